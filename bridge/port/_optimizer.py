"""An optax state and its step from a Linen `TrainState` into an `nnx.Optimizer`, and back.

Both states have the skeleton that optax made. Where the NNX one holds a State, the Linen one holds
a tree like the parameters, and the plan converts it; everything else is a scalar that is carried
over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict, freeze

from bridge._conversion import linen_leaves, nnx_leaves
from bridge._conversion.arrays import shape_of
from bridge._conversion.neutral import walk
from bridge._errors import PortError

from . import _moving
from ._correspondence import Correspondence
from ._trees import linen_text, nnx_text, value_of
from ._writing import like, write


class Both(NamedTuple):
    """What stands at one place of the two states."""

    where: str
    linen: Any
    nnx: Any


class OptimizerPort:
    """Moves optimizer state along a correspondence.

    Args:
      correspondence: what belongs together.
      collections: the names of the Linen collections.
    """

    def __init__(self, correspondence: Correspondence, collections: tuple[str, ...]):
        self._found = correspondence
        self._collections = collections
        self._problems: list[str] = []

    def to_nnx(self, train_state: Any, optimizer: nnx.Optimizer[Any]) -> nnx.Optimizer[Any]:
        """Writes state and step into an `nnx.Optimizer`, all of it or nothing."""
        writes: list[tuple[nnx.Variable[Any], Any]] = []
        for both in self._walk(train_state.opt_state, optimizer.opt_state, "opt_state"):
            if isinstance(both.nnx, nnx.State):
                writes += self._moments_to_nnx(both)
            else:
                writes.append((both.nnx, self._fitting(both.linen, both.nnx, both.where)))
        step = jnp.asarray(train_state.step, nnx_leaves.raw_value(optimizer.step).dtype)
        self._raise("the optimizer state cannot be moved to NNX")
        write([*writes, (optimizer.step, step)])
        return optimizer

    def to_linen(self, optimizer: nnx.Optimizer[Any], train_state: Any) -> Any:
        """The train state with state and step of an `nnx.Optimizer`; the inverse of `to_nnx`."""
        new: dict[str, Any] = {}
        for both in self._walk(train_state.opt_state, optimizer.opt_state, "opt_state"):
            if isinstance(both.nnx, nnx.State):
                new[both.where] = self._moments_to_linen(both)
            else:
                value = nnx_leaves.raw_value(both.nnx)
                new[both.where] = self._fitting(value, both.linen, both.where)
        self._raise("the optimizer state cannot be moved to Linen")
        step = nnx_leaves.raw_value(optimizer.step)
        given = train_state.step
        step = int(step) if isinstance(given, int) else jnp.asarray(step, given.dtype)
        opt_state = _rebuilt(train_state.opt_state, "opt_state", new)
        return dataclasses.replace(train_state, opt_state=opt_state, step=step)

    def _walk(self, linen: Any, ours: Any, where: str) -> Iterator[Both]:
        """The parameter-like trees and the scalars of both states, side by side."""
        if isinstance(ours, nnx.State | nnx.Variable):
            yield Both(where, linen, ours)
        elif isinstance(ours, tuple | list) and type(linen) is type(ours):
            if len(linen) != len(ours):
                self._problems.append(f"{where}: expected {len(ours)} parts, found {len(linen)}")
                return
            for key, one, other in zip(_names(ours), linen, ours, strict=True):
                yield from self._walk(one, other, f"{where}.{key}")
        elif isinstance(ours, Mapping) and isinstance(linen, Mapping):
            if ours.keys() != linen.keys():
                found, expected = sorted(map(str, linen)), sorted(map(str, ours))
                self._problems.append(f"{where}: expected the keys {expected}, found {found}")
                return
            for key in ours:
                yield from self._walk(linen[key], ours[key], f"{where}.{key}")
        elif type(linen) is not type(ours):
            self._problems.append(
                f"{where}: Linen has a {type(linen).__name__} and NNX a {type(ours).__name__}; give"
                " both the same optax transformation"
            )

    def _moments_to_nnx(self, both: Both) -> list[tuple[nnx.Variable[Any], Any]]:
        values = _moving.linen_values(both.linen, self._collections)
        moved = _moving.to_nnx(self._found, values)
        places = {p: v for p, v in walk(both.nnx) if not _is_masked(v)}
        adapters = {path for path, node in self._found.nnx_leaves.items() if node.is_adapter}
        self._compare(
            both.where,
            {
                path: value
                for path, value in moved.items()
                if path in places or path not in adapters
            },
            [path for path in places if path not in adapters],
            nnx_text,
        )
        for piece in self._found.zero_pieces():
            if piece.linen in values and not _moving.is_zero(values[piece.linen]):
                self._problems.append(
                    f"{both.where}: {linen_text(piece.linen)} is not zero, and NNX has no place for"
                    " it"
                )
        return [
            (places[path], self._fitting(value, places[path], f"{both.where}: {nnx_text(path)}"))
            for path, value in moved.items()
            if path in places
        ]

    def _moments_to_linen(self, both: Both) -> Any:
        variables = _moving.as_variables(both.linen, self._collections)
        neutral = linen_leaves.from_variables(variables)
        moved = _moving.to_linen(self._found, _moving.nnx_values(both.nnx))
        places = {a: leaf for a, leaf in neutral.items() if shape_of(leaf.value) is not None}
        self._compare(both.where, moved, list(places), linen_text)
        filled = {
            a: leaf._replace(
                value=self._fitting(moved[a], leaf.value, f"{both.where}: {linen_text(a)}")
            )
            if a in moved and a in places
            else leaf
            for a, leaf in neutral.items()
        }
        tree = linen_leaves.to_variables(filled)
        tree = tree if variables is both.linen else tree.get("params", {})
        return freeze(tree) if isinstance(both.linen, FrozenDict) else tree

    def _compare(self, where: str, moved: Mapping[Any, Any], places: list[Any], text: Any) -> None:
        """Every place needs a value, and every value that is not zero a place."""
        self._problems += [
            f"{where}: the source has nothing for {text(place)}"
            for place in places
            if place not in moved
        ]
        self._problems += [
            f"{where}: {text(key)} has no place in the target's state, and is not zero"
            for key, value in moved.items()
            if key not in places and not _moving.is_zero(value)
        ]

    def _fitting(self, value: Any, place: Any, where: str) -> Any:
        """A value in the dtype and the sharding of the place that it goes to."""
        place = value_of(place)
        if not hasattr(place, "dtype"):
            return value
        value = value if hasattr(value, "dtype") else jnp.asarray(value)
        if shape_of(value) != shape_of(place):
            found, expected = shape_of(value), shape_of(place)
            self._problems.append(f"{where}: expected shape {expected}, found {found}")
        elif not _moving.cast_is_exact(value, place.dtype):
            text = f"the cast to {place.dtype} changes {value.dtype} values"
            self._problems.append(f"{where}: {text}")
        else:
            return like(value, place)
        return value

    def _raise(self, where: str) -> None:
        problems, self._problems = self._problems, []
        if problems:
            raise PortError(where, problems)


def _rebuilt(tree: Any, where: str, new: Mapping[str, Any]) -> Any:
    """A Linen optimizer state with the values at the places that `_walk` named."""
    if where in new:
        return new[where]
    if isinstance(tree, tuple | list):
        names = _names(tree)
        parts = [_rebuilt(one, f"{where}.{k}", new) for k, one in zip(names, tree, strict=True)]
        return _type_of(tree)._make(parts) if hasattr(tree, "_fields") else _type_of(tree)(parts)
    if isinstance(tree, Mapping):
        return _type_of(tree)({k: _rebuilt(v, f"{where}.{k}", new) for k, v in tree.items()})
    return tree


def _type_of(tree: Any) -> Any:
    return type(tree)


def _names(parts: Any) -> list[str]:
    return list(getattr(parts, "_fields", None) or map(str, range(len(parts))))


def _is_masked(item: Any) -> bool:
    """Whether this is the place of a parameter that the transformation passes over."""
    return not jax.tree.leaves(value_of(item))
