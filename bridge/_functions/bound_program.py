"""A compiled program, and the modules that are bound to it."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax import nnx

import registry
from bridge._errors import InvalidModuleError
from bridge._flax.flattening import GraphDefBuilder, flatten
from bridge._flax.nodes import nodes_below


class BoundProgram:
    """Modules as they were found, and how to see that they have changed.

    `leaves` are their Variables and bare arrays, in the order of their GraphDef, and `arrays` the
    bare arrays among them. `program` is what is compiled for this structure. `is_plain` says
    whether a program changes values only by returning new ones; it writes into references and hijax
    Variables.
    """

    def __init__(self, modules: tuple[Any, ...], leaves: list[Any], program: Program):
        self.program = program
        self._variables = [leaf for leaf in leaves if isinstance(leaf, nnx.Variable)]
        self.arrays = [leaf for leaf in leaves if not isinstance(leaf, nnx.Variable)]
        self.is_plain = not any(map(_is_written_into, leaves))
        self._registry = registry.current()
        nodes = nodes_below(modules)
        # What may be replaced: the attributes of objects, and the items of containers.
        self._dicts = [*map(vars, nodes.objects), *(n for n in nodes.others if isinstance(n, dict))]
        self._keys = list(_chained(self._dicts))
        # Views, which follow their dicts.
        self._views = [node.values() for node in self._dicts]
        self._values = list(_chained(self._views))
        # Nothing follows a plain list, so the modules that hold one are found anew at each call.
        self._has_lists = any(isinstance(node, list) for node in nodes.others)

    def is_current(self) -> bool:
        """Whether every module still has these attributes, and in them these objects.

        Every call pays for this, so all loops run in C.
        """
        return (
            list(_chained(self._dicts)) == self._keys
            and all(map(operator.is_, _chained(self._views), self._values))
            and not self._has_lists
            and self._registry is registry.current()
        )

    def values(self) -> list[Any]:
        """What the Variables hold, before their hooks and references as they are."""
        return [variable.get_raw_value() for variable in self._variables]

    def store(self, changed: Mapping[int, Any]) -> None:
        """Puts in values by the index of their Variable: all of them or none.

        Raises TraceContextError if a Variable belongs to another trace.
        """
        before: dict[int, Any] = {}
        try:
            for index, value in changed.items():
                before[index] = self._variables[index].get_raw_value()
                self._variables[index].set_raw_value(value)
        except BaseException:
            for index, value in before.items():
                if self._variables[index].get_raw_value() is not value:
                    self._variables[index].set_raw_value(value)
            raise


class Program:
    """The compiled function for one structure of the modules.

    `leaves` are the Variables and bare arrays that the structure was found with. With `donate`,
    changed Variables' arrays are donated.

    Attributes:
      run: called with the Variables' values, the bare arrays and the remaining arguments, it
        returns the function's output and the new values of Variables by their index. Raises
        StructureChangedError if the function changes more than that.
      runs_under_nnx_jit: whether a call was found to change more than values.
      changes_nothing: whether no call has changed anything, of those that could be told.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        graphdef: nnx.GraphDef[Any],
        leaves: list[Any],
        static_argnames: str | Iterable[str] | None,
        donate: bool,
    ):
        self.runs_under_nnx_jit = False
        self.changes_nothing = False
        self._fun = fun
        self._graphdef = graphdef
        self._is_variable = [isinstance(leaf, nnx.Variable) for leaf in leaves]
        self._donated: frozenset[int] | None = None
        self._jitted = jax.jit(self._traced, static_argnames=static_argnames, donate_argnums=0)
        # Call the compiled function directly unless there is something to do around it.
        self.run: Callable[..., tuple[Any, dict[int, Any]]] = (
            self._run_donating if donate else functools.partial(self._jitted, {})
        )

    def _run_donating(
        self, values: list[Any], arrays: list[Any], /, *args: object, **kwargs: object
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
        *args: object,
        **kwargs: object,
    ) -> tuple[Any, dict[int, Any]]:
        _check_bound((args, kwargs))
        before = [donated.get(i, value) for i, value in enumerate(values)]
        of_variables, bare = iter(before), iter(arrays)
        leaves = [next(of_variables if is_one else bare) for is_one in self._is_variable]
        built = GraphDefBuilder(self._graphdef).build(leaves)
        output = self._fun(*built.module, *args, **kwargs)
        if _returns_state(output, built.variables):
            # A program returns arrays, and JAX would copy them.
            raise StructureChangedError
        graphdef, after = flatten(built.module)
        is_same = (
            new is old or isinstance(new, nnx.Variable)
            for new, old in zip(after, leaves, strict=True)
        )
        if graphdef != self._graphdef or not all(is_same):
            raise StructureChangedError
        new = [leaf.get_raw_value() for leaf in after if isinstance(leaf, nnx.Variable)]
        # What is donated has to come back, changed or not.
        return output, {
            i: value for i, value in enumerate(new) if i in donated or value is not before[i]
        }


_chained = itertools.chain.from_iterable


def _is_written_into(leaf: object) -> bool:
    if isinstance(leaf, nnx.Variable):
        return leaf.hijax or leaf.ref
    return isinstance(leaf, jax.Ref)


class StructureChangedError(Exception):
    """Ends the trace of a function that changes more than the values of Variables."""


KINDS = nnx.Pytree, nnx.Variable


def _check_bound(arguments: object) -> None:
    """Raises for a module among the arguments: what the call changes in it would be lost."""
    # A State is a value, as it is for `jax.jit`.
    for leaf in jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, (*KINDS, nnx.State))):
        if isinstance(leaf, KINDS):
            raise InvalidModuleError(
                "a function compiled by jit_partial",
                leaf,
                "arrays and pytrees of arrays",
                "bind what has a state: jit_partial(fun, model, optimizer)",
            )


def _returns_state(output: object, bound: Iterable[Any]) -> bool:
    """Whether an output holds a module or a bound Variable, also as a part of a State."""
    own = {id(variable) for variable in bound if variable is not None}
    leaves = jax.tree.leaves(output, is_leaf=lambda x: isinstance(x, KINDS))
    return any(isinstance(leaf, nnx.Pytree) or id(leaf) in own for leaf in leaves)
