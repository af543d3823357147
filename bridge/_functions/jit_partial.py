"""`jit_partial`: a compiled function of modules, at the dispatch cost of a pure function."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator
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
    *modules: Any,
    static_argnames: str | Iterable[str] | None = None,
    donate: bool = False,
) -> Callable[..., R]:
    """Compiles a function with its first arguments, the modules, bound to it.

    `nnx.jit` walks through every module at every call. This walks once and from then on passes the
    Variables' arrays to the compiled program and puts back those that it changed, so a call costs
    what a call of a jitted pure function costs, and the modules stay the owners of their state. It
    looks at the modules' attributes at every call: when one was replaced, removed or added, as by
    `model.train()`, the modules are walked through again, and programs of earlier structures are
    kept. Attributes and metadata are compared by identity, so what is written into an object that
    sits in an attribute, or into a Variable's metadata, is not seen.

    A call that changes more than the values of Variables (`sow` for the first time, a new
    attribute), or that returns a module or a bound Variable, runs under `nnx.jit`, which costs what
    it costs and returns the very object. Calls of one compiled function from several threads take
    turns if they change Variables, and run at once if they change none and nothing is donated.

    Args:
      fun: called as `fun(*modules, *args, **kwargs)`; it may change Variables, and draw keys.
      *modules: NNX modules, optimizers, `nnx.Rngs`; they may share parts.
      static_argnames: keyword arguments that are static, as for `jax.jit`.
      donate: whether the arrays of Variables that the call changes are given to the program, which
        then writes into their memory. References to those arrays elsewhere become invalid.

    Returns:
      A function of the remaining arguments, arrays or pytrees of arrays.

    Raises:
      InvalidModuleError: there is nothing to bind, or a Linen module, a class or a function; or, in
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
    bindings = _Bindings(fun, modules, static_argnames, donate)

    # A function and no object with a `__call__`, which Python takes longer to call.
    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> R:
        bound = bindings.last
        if bound is not None and bound.program.changes_nothing:
            is_done, output = bindings.run_at_once(bound, args, kwargs)
            if is_done:
                return output
        with bindings.lock:
            bound = bindings.last
            values = None if bound is None else bound.values()
            if bound is None or values is None:
                bound, values = bindings.renew()
            program = bound.program
            if not program.runs_under_nnx_jit:
                run = program.run
                try:
                    # Passing on an empty `kwargs` takes time.
                    output, changed = (
                        run(values, bound.arrays, *args, **kwargs)
                        if kwargs
                        else run(values, bound.arrays, *args)
                    )
                except StructureChangedError:
                    program.runs_under_nnx_jit = True
                else:
                    if changed:
                        bindings.write(bound, changed)
                    else:
                        program.changes_nothing = bound.is_plain and not donate
                    return output
            with bindings.writing():
                return bindings.under_nnx_jit(*modules, *args, **kwargs)

    return call


class _Bindings:
    """A function's modules as they were last found, and its programs.

    Args:
      fun: the function.
      modules: its first arguments.
      static_argnames: as for `jax.jit`.
      donate: whether changed Variables' arrays are donated.

    Attributes:
      last: the modules as they were last found, None before the first call.
      lock: held by the call whose turn it is. Reentrant: `fun` is called while it is traced.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        modules: tuple[Any, ...],
        static_argnames: str | Iterable[str] | None,
        donate: bool,
    ):
        self.last: BoundProgram | None = None
        self.lock = threading.RLock()
        # How many blocks of `writing` there are, and how many there have been.
        self._writers = 0
        self._writes = 0
        self._fun = fun
        self._modules = modules
        self._static_argnames = static_argnames
        self._donate = donate
        # One program for each structure, so that a model that switches back does not compile again.
        self._programs: BoundedCache[Program] = BoundedCache(maxsize=16)

    def renew(self) -> tuple[BoundProgram, list[Any]]:
        """Finds the modules as they are now, and the values of their Variables."""
        # Flattening takes references that are shared out of Variables for a moment.
        with self.writing():
            graphdef, leaves = flatten(self._modules)
            bare = frozenset(i for i, x in enumerate(leaves) if not isinstance(x, nnx.Variable))
            program = self._programs.get(
                (graphdef, bare, registry.current()),
                lambda: Program(
                    self._fun, graphdef, bare, len(leaves), self._static_argnames, self._donate
                ),
            )
            self.last = BoundProgram(self._modules, leaves, program)
            return self.last, self.last.raw.get()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A block that changes modules, of the call whose turn it is."""
        self._writers += 1
        self._writes += 1
        try:
            yield
        finally:
            self._writers -= 1

    def write(self, bound: BoundProgram, changed: dict[int, Any]) -> None:
        """Puts new values into Variables; `writing` spelled out, which every training step pays."""
        self._writers += 1
        self._writes += 1
        try:
            bound.raw.set(changed)
        finally:
            self._writers -= 1

    def run_at_once(
        self, bound: BoundProgram, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        """Runs a program that changed nothing so far, without waiting for a turn.

        It reads values as they were between two blocks of `writing`: if one begins meanwhile, the
        call has to wait for its turn. Other arguments may make the program change something. Then
        that is kept if nothing was written since the values were read, and else the call is to be
        made again when it has its turn.

        Returns:
          (whether that could be done, the function's output).
        """
        before = self._writes
        try:
            values = None if self._writers else bound.values()
        except RuntimeError:
            # A dict cannot be gone through while another thread adds to it.
            return False, None
        if values is None or self._writers or self._writes != before:
            return False, None
        program = bound.program
        try:
            output, changed = (
                program.run(values, bound.arrays, *args, **kwargs)
                if kwargs
                else program.run(values, bound.arrays, *args)
            )
        except StructureChangedError:
            program.changes_nothing = False
            return False, None
        if not changed:
            return True, output
        program.changes_nothing = False
        with self.lock:
            if self._writes != before or not _are_same(bound.values(), values):
                return False, None
            self.write(bound, changed)
        return True, output

    @functools.cached_property
    def under_nnx_jit(self) -> Callable[..., Any]:
        """The function under `nnx.jit`, called with the modules and the remaining arguments."""
        jitted: Any = nnx.jit(
            self._fun, static_argnames=self._static_argnames, graph=True, graph_updates=True
        )
        return jitted


def _are_same(now: list[Any] | None, values: list[Any]) -> bool:
    return now is not None and all(map(operator.is_, now, values))


def _check_arguments(fun: Any, modules: tuple[Any, ...]) -> None:
    expected = "a function and the NNX modules to bind"
    if not modules or not callable(fun) or isinstance(fun, nnx.Variable):
        raise InvalidModuleError("jit_partial", fun, expected, "pass them behind the function")
    for module in modules:
        if isinstance(module, nn.Module):
            name = type(module).__name__
            raise InvalidModuleError(
                "jit_partial",
                module,
                expected,
                f"a Linen module has no state: use jax.jit on {name}.apply, or wrap the module with"
                " its variables in a ToNNX",
            )
        if callable(module) and not isinstance(module, KINDS):
            remedy = "pass the function first, and instances of modules behind it"
            raise InvalidModuleError("jit_partial", module, expected, remedy)
