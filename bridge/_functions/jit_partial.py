"""`jit_partial`: a compiled function of modules, at the dispatch cost of a pure function."""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
from flax import linen as nn
from flax import nnx

import registry
from bridge._equality.bounded_cache import BoundedCache
from bridge._errors import InvalidModuleError
from bridge._flax.graphdef_builder import GraphDefBuilder, flatten
from bridge._flax.nodes import nodes_below
from bridge._flax.variables import RawValues

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
    turns.

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
    # Reentrant: `fun` is called while its program is traced.
    lock = threading.RLock()

    # A function and no object with a `__call__`, which Python takes longer to call.
    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> R:
        with lock:
            bound = bindings.last
            values = None if bound is None else bound.values()
            if bound is None or values is None:
                bound = bindings.renew()
                values = bound.raw.get()
            program = bound.program
            if not program.runs_under_nnx_jit:
                run = program.run
                try:
                    # An empty `kwargs` is not for nothing where it has to be passed on.
                    output, changed = (
                        run(values, bound.arrays, *args, **kwargs)
                        if kwargs
                        else run(values, bound.arrays, *args)
                    )
                except _StructureChangedError:
                    program.runs_under_nnx_jit = True
                else:
                    if changed:
                        bound.raw.set(changed)
                    return output
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
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        modules: tuple[Any, ...],
        static_argnames: str | Iterable[str] | None,
        donate: bool,
    ):
        self.last: _Bound | None = None
        self._fun = fun
        self._modules = modules
        self._static_argnames = static_argnames
        self._donate = donate
        # Another structure is another program; a model that goes back and forth keeps them.
        self._programs: BoundedCache[_Program] = BoundedCache(maxsize=16)

    def renew(self) -> _Bound:
        """Finds the modules as they are now."""
        graphdef, leaves = flatten(self._modules)
        bare = frozenset(i for i, x in enumerate(leaves) if not isinstance(x, nnx.Variable))
        program = self._programs.get(
            (graphdef, bare, registry.current()),
            lambda: _Program(
                self._fun, graphdef, bare, len(leaves), self._static_argnames, self._donate
            ),
        )
        self.last = _Bound(self._modules, leaves, program)
        return self.last

    @functools.cached_property
    def under_nnx_jit(self) -> Callable[..., Any]:
        """The function under `nnx.jit`, called with the modules and the remaining arguments."""
        jitted: Any = nnx.jit(
            self._fun, static_argnames=self._static_argnames, graph=True, graph_updates=True
        )
        return jitted


class _Bound:
    """Modules as they were found, and how to see that they are no longer so.

    Args:
      modules: the modules.
      leaves: their Variables and bare arrays, in the order of their GraphDef.
      program: what is compiled for this structure.

    Attributes:
      raw: the values of their Variables.
      arrays: their bare arrays.
    """

    def __init__(self, modules: tuple[Any, ...], leaves: list[Any], program: _Program):
        self.program = program
        self.raw = RawValues(leaf for leaf in leaves if isinstance(leaf, nnx.Variable))
        self.arrays = [leaf for leaf in leaves if not isinstance(leaf, nnx.Variable)]
        self._registry = registry.current()
        nodes = nodes_below(modules)
        # What may be replaced: the attributes of objects, and the items of containers.
        self._dicts = [*map(vars, nodes.objects), *(n for n in nodes.others if isinstance(n, dict))]
        self._keys = list(_chained(self._dicts))
        # Views, which follow their dicts.
        self._views = [node.values() for node in self._dicts]
        self._values = list(_chained(self._views))
        self._lists = [node for node in nodes.others if isinstance(node, list)]
        self._items = [list(node) for node in self._lists]

    def values(self) -> list[Any] | None:
        """The values of the Variables; None if a module was changed since it was bound.

        That is, unless every module still has these attributes, and in them these objects. All of
        it is in loops of the interpreter's own: this is paid at each call.
        """
        is_current = (
            list(_chained(self._dicts)) == self._keys
            and all(map(operator.is_, _chained(self._views), self._values))
            and (not self._lists or self._has_same_items())
            and self._registry is registry.current()
        )
        return self.raw.get() if is_current else None

    def _has_same_items(self) -> bool:
        return all(
            len(now) == len(then) and all(map(operator.is_, now, then))
            for now, then in zip(self._lists, self._items, strict=True)
        )


class _Program:
    """The compiled function for one structure of the modules.

    Args:
      fun: the function.
      graphdef: the structure.
      bare: which of its leaves are in no Variable.
      size: how many leaves there are.
      static_argnames: as for `jax.jit`.
      donate: whether changed Variables' arrays are donated.

    Attributes:
      run: called with the Variables' values, the bare arrays and the remaining arguments, it
        returns the function's output and the new values of Variables by their index. Raises
        _StructureChangedError if the function changes more than that.
      runs_under_nnx_jit: whether a call was found to change more than values.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        graphdef: nnx.GraphDef[Any],
        bare: frozenset[int],
        size: int,
        static_argnames: str | Iterable[str] | None,
        donate: bool,
    ):
        self.runs_under_nnx_jit = False
        self._fun = fun
        self._graphdef = graphdef
        self._order = sorted(range(size), key=lambda i: (i in bare, i))
        self._donated: frozenset[int] | None = None
        self._jitted = jax.jit(self._traced, static_argnames=static_argnames, donate_argnums=0)
        # No function of Python stands before the compiled one, unless there is something to do.
        self.run: Callable[..., tuple[Any, dict[int, Any]]] = (
            self._run_donating if donate else functools.partial(self._jitted, {})
        )

    def _run_donating(
        self, values: list[Any], arrays: list[Any], /, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[int, Any]]:
        if self._donated is None:
            _, changed = self._jitted.eval_shape({}, values, arrays, *args, **kwargs)
            self._donated = frozenset(changed)
        donated = {i: values[i] for i in self._donated}
        kept = [None if i in donated else value for i, value in enumerate(values)]
        return self._jitted(donated, kept, arrays, *args, **kwargs)

    def _traced(
        self,
        donated: dict[int, Any],
        values: list[Any],
        arrays: list[Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, dict[int, Any]]:
        _check_bound((args, kwargs))
        before = [donated.get(i, value) for i, value in enumerate(values)]
        leaves: list[Any] = [None] * len(self._order)
        for i, value in zip(self._order, [*before, *arrays], strict=True):
            leaves[i] = value
        built = GraphDefBuilder(self._graphdef).build(leaves)
        modules = built.module
        output = self._fun(*modules, *args, **kwargs)
        if _returns_state(output, built.variables):
            # A program returns arrays, out of which JAX would make copies.
            raise _StructureChangedError
        graphdef, after = flatten(modules)
        if graphdef != self._graphdef or any(
            after[i] is not leaves[i] for i in self._order[len(values) :]
        ):
            raise _StructureChangedError
        new = [after[i].get_raw_value() for i in self._order[: len(values)]]
        # What is donated has to come back, changed or not.
        return output, {
            i: value for i, value in enumerate(new) if i in donated or value is not before[i]
        }


_chained = itertools.chain.from_iterable


class _StructureChangedError(Exception):
    """Ends the trace of a function that changes more than the values of Variables."""


_KINDS = nnx.Pytree, nnx.Variable


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
        if callable(module) and not isinstance(module, _KINDS):
            remedy = "pass the function first, and instances of modules behind it"
            raise InvalidModuleError("jit_partial", module, expected, remedy)


def _check_bound(arguments: Any) -> None:
    """Raises for a module among the arguments: what the call changes in it would be lost."""
    # A State is a value, as it is for `jax.jit`.
    for leaf in jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, (*_KINDS, nnx.State))):
        if isinstance(leaf, _KINDS):
            raise InvalidModuleError(
                "a function compiled by jit_partial",
                leaf,
                "arrays and pytrees of arrays",
                "bind what has a state: jit_partial(fun, model, optimizer)",
            )


def _returns_state(output: Any, bound: Iterable[Any]) -> bool:
    """Whether an output holds a module or a bound Variable, also as a part of a State."""
    own = {id(variable) for variable in bound if variable is not None}
    leaves = jax.tree.leaves(output, is_leaf=lambda x: isinstance(x, _KINDS))
    return any(isinstance(leaf, nnx.Pytree) or id(leaf) in own for leaf in leaves)
