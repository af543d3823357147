"""What a call of `apply` may not change, and whether it has."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

import registry
from bridge._conversion.arrays import is_taken, taken
from bridge._conversion.collections import OUTPUTS
from bridge._errors import ImmutableCollectionError
from bridge._flax.nodes import nodes_below
from bridge._flax.objects import is_initializing
from bridge._flax.variables import raw_value
from bridge._module_calls.calls import ModuleInCall
from bridge._module_calls.scope import is_in


class Guard:
    """The values below a module that the call which it is part of may not change.

    NNX Variables can be written whatever the call says, so this is seen after the call. A transform
    of NNX writes what it has not changed as well: a new array of the same values, or a value of the
    trace, which tells nothing. So a copy that a transform has made has a guard of its own.

    Args:
      record: the module.
    """

    def __init__(self, record: ModuleInCall):
        self._module = record.module
        self._call = record.call
        self._copies = record.call.copies
        self._root = type(record.call.root.module)
        self._is_creating = is_initializing(record.module)
        self._before = [(v, taken(raw_value(v))) for v in self._fixed()]

    def check(self) -> None:
        """Raises ImmutableCollectionError if one has changed."""
        changed = [v for v, value in self._before if self._is_other(raw_value(v), value)]
        # Given Variables, of which the module has made the one that it declares.
        known = {id(x) for _, value in self._before for x in jax.tree.leaves(value)}
        now = [] if self._is_creating else self._fixed()
        found = [v for v in now if isinstance(raw_value(v), Mapping)]
        new = [not known.issuperset(map(id, jax.tree.leaves(raw_value(v)))) for v in found]
        changed += itertools.compress(found, new)
        for variable in changed:
            collection = registry.current().name_from_type(variable.var_type)
            raise ImmutableCollectionError(
                self._root.__name__, collection, "with apply(…, {mutable})"
            )

    def _is_other(self, value: object, before: object) -> bool:
        if is_taken(value, before):
            return False
        if self._call.copies == self._copies:
            return True
        leaves, tree = jax.tree.flatten(value)
        leaves_before, tree_before = jax.tree.flatten(before)
        return tree != tree_before or not all(map(_may_be_same, leaves, leaves_before))

    def _fixed(self) -> list[nnx.Variable[Any]]:
        active = registry.current()
        return [
            variable
            for variable in nodes_below(self._module).variables
            if not isinstance(variable, nnx.RngState)
            and (name := active.name_from_type(variable.var_type)) not in OUTPUTS
            and not is_in(self._call.mutable, name)
        ]


def _may_be_same(a: object, b: object) -> bool:
    """Whether two arrays have the same values, as far as that is known."""
    if a is b or isinstance(a, Tracer):
        return True
    if isinstance(b, Tracer) or not isinstance(a, jax.Array):
        return False
    if not isinstance(b, jax.Array) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    with jax.ensure_compile_time_eval():
        return bool(((a == b) | ((a != a) & (b != b))).all())
