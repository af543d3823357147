"""`jit_partial`: a compiled function of modules, at the dispatch cost of a pure function."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from flax import linen as nn
from flax import nnx

import registry
from bridge._bounded_cache import BoundedCache
from bridge._errors import InvalidModuleError
from bridge._flax.flattening import flatten

from .bound_program import KINDS, BoundProgram, Program, StructureChangedError

R = TypeVar("R")


def jit_partial(
    fun: Callable[..., R],
    *modules: object,
    static_argnames: str | Iterable[str] | None = None,
    donate: bool = False,
) -> Callable[..., R]:
    """Compiles a function with its first arguments, the modules, bound to it.

    `nnx.jit` traverses every module at every call. This function traverses them once. Each call
    then passes the arrays of the Variables to the compiled program and stores those that it
    changed. So a call costs as much as that of a jitted pure function, and the modules still own
    their state.

    Each call checks the attributes of the modules. If one was replaced, removed or added, as by
    `model.train()`, the modules are traversed again; programs of earlier structures are kept.
    Modules with a plain list of Variables, instead of an `nnx.List`, are traversed at each call.
    Attributes and metadata are compared by identity, so a call does not notice a change inside an
    object that is an attribute, or inside the metadata of a Variable.

    Some calls run under `nnx.jit`, at its cost: a call that changes more than the values of
    Variables (the first `sow`, a new attribute), and one that returns a module or a bound Variable.
    Calls from several threads run one after the other if they change Variables or donate, and
    otherwise at once.

    Args:
      fun: called as `fun(*modules, *args, **kwargs)`; it may change Variables, and draw keys.
      *modules: NNX modules, optimizers, `nnx.Rngs`; they may share parts.
      static_argnames: keyword arguments that are static, as for `jax.jit`.
      donate: whether the program may take the arrays of the Variables that it changes, and
        write into their memory. Other references to these arrays become invalid.

    Returns:
      A function of the remaining arguments, arrays or pytrees of arrays.

    Raises:
      InvalidModuleError: no module is given, or a Linen module, a class or a function; or, in
        the call, a module or a Variable is passed that is not bound.

    Example::

      >>> import jax.numpy as jnp
      >>> from flax import linen as nn, nnx
      >>> import bridge
      >>> x = jnp.ones((4, 8))
      >>> model = bridge.ToNNX(nn.BatchNorm(), rngs=nnx.Rngs(0)).lazy_init(
      ...     x, use_running_average=False)
      >>> step = bridge.jit_partial(lambda model, x: model(x), model)
      >>> model.train()
      >>> for _ in range(3):
      ...   y = step(x)
      >>> print(f'{model.mean[0]:.4f}')
      0.0297

    Source: flax/nnx/transforms/compilation.py:jit_partial @ 0.12.8
    """
    _check_arguments(fun, modules)
    # One program for each structure, so that a model that switches back does not compile again.
    programs: BoundedCache[Program] = BoundedCache(maxsize=16)
    under_nnx_jit: Any = nnx.jit(
        fun, static_argnames=static_argnames, graph=True, graph_updates=True
    )
    # Held by the running call. Reentrant: `fun` is called while it is traced.
    lock = threading.RLock()
    bound: BoundProgram | None = None

    def found() -> BoundProgram:
        """The modules as they are now."""
        graphdef, leaves = flatten(modules)
        program = programs.get(
            (graphdef, registry.current()),
            lambda: Program(fun, graphdef, leaves, static_argnames, donate),
        )
        return BoundProgram(modules, leaves, program)

    @functools.wraps(fun)
    def call(*args: object, **kwargs: object) -> R:
        nonlocal bound
        with lock:
            if bound is None or not bound.is_current():
                bound = found()
            current, program, values = bound, bound.program, bound.values()
            if program.runs_under_nnx_jit:
                return under_nnx_jit(*modules, *args, **kwargs)
            if not program.changes_nothing:
                try:
                    output, changed = program.run(values, current.arrays, *args, **kwargs)
                except StructureChangedError:
                    program.runs_under_nnx_jit = True
                    return under_nnx_jit(*modules, *args, **kwargs)
                current.store(changed)
                program.changes_nothing = not changed and current.is_plain and not donate
                return output
        # A program that has changed nothing so far runs beside others. With other arguments it may
        # change something, and then it is run again when it is its turn.
        try:
            output, changed = program.run(values, current.arrays, *args, **kwargs)
            if not changed:
                return output
        except StructureChangedError:
            pass
        program.changes_nothing = False
        return call(*args, **kwargs)

    return call


def _check_arguments(fun: object, modules: tuple[Any, ...]) -> None:
    is_function = callable(fun) and not isinstance(fun, nnx.Variable)
    wrong = [m for m in modules if isinstance(m, nn.Module) or not _is_instance(m)]
    if not is_function or not modules or wrong:
        raise InvalidModuleError(
            "jit_partial",
            wrong[0] if is_function and wrong else fun,
            "a function and the NNX modules to bind",
            "pass the function first, and instances of modules behind the function; for a Linen"
            " module use jax.jit on its apply, or wrap it with its variables in a ToNNX",
        )


def _is_instance(value: object) -> bool:
    """Whether a value may have state, which classes and functions do not."""
    return isinstance(value, KINDS) or not callable(value)
