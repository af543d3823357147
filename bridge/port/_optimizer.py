"""An optax state and its step from a Linen `TrainState` into an `nnx.Optimizer`, and back.

Both states have the containers that optax made. Where the NNX one holds a State, the Linen one
holds a tree like the parameters, and the plan converts it; everything else is a scalar that is
carried over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict, freeze
from jax.tree_util import DictKey, GetAttrKey, KeyPath, SequenceKey

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
    """Moves optimizer state along a correspondence."""

    def __init__(self, correspondence: Correspondence, collections: tuple[str, ...]):
        self._found = correspondence
        self._collections = collections
        self._problems: list[str] = []

    def to_nnx(self, train_state: Any, optimizer: nnx.Optimizer[Any]) -> nnx.Optimizer[Any]:
        """Writes state and step into an `nnx.Optimizer`, all of it or nothing."""
        self._check_parameters(getattr(train_state, "params", None))
        writes: list[tuple[nnx.Variable[Any], Any]] = []
        for both in self._parts(train_state.opt_state, optimizer.opt_state):
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
        new = [
            self._moments_to_linen(both)
            if isinstance(both.nnx, nnx.State)
            else self._fitting(nnx_leaves.raw_value(both.nnx), both.linen, both.where)
            for both in self._parts(train_state.opt_state, optimizer.opt_state)
        ]
        self._raise("the optimizer state cannot be moved to Linen")
        step = nnx_leaves.raw_value(optimizer.step)
        given = train_state.step
        step = int(step) if isinstance(given, int) else jnp.asarray(step, given.dtype)
        opt_state = jax.tree.unflatten(jax.tree.structure(optimizer.opt_state, _is_nnx), new)
        return dataclasses.replace(train_state, opt_state=opt_state, step=step)

    def _check_parameters(self, params: Any) -> None:
        """Raises PortError if a train state has other parameters than those that the plan moves."""
        values = _moving.linen_values(params, self._collections) if params else {}
        other = [
            f"{linen_text(address)}: the plan has other values"
            for address, value in values.items()
            if _moving.is_other(value, self._found.linen_values.get(address))
        ]
        if other:
            raise PortError(
                "the train state is not the one whose parameters the plan moves",
                other,
                "Make a plan of its parameters, {'params': state.params}.",
            )

    def _parts(self, linen: Any, ours: Any) -> list[Both]:
        """The parameter-like trees and the scalars of both states, side by side.

        Raises PortError if one state has parts that the other one lacks.
        """
        found: list[Both] = []
        only: list[str] = []
        for keys, part in jax.tree_util.tree_flatten_with_path(ours, _is_nnx)[0]:
            try:
                found.append(Both(_where(keys), _at(linen, keys), part))
            except (LookupError, AttributeError):
                only.append(f"{_where(keys)}: only the NNX state has it")
        known = {id(both.linen) for both in found}
        for keys, part in jax.tree_util.tree_flatten_with_path(linen, lambda x: id(x) in known)[0]:
            if id(part) not in known:
                only.append(f"{_where(keys)}: only the Linen state has it")
        if only:
            remedy = "Give both the same optax transformation."
            raise PortError("the two optimizer states have other parts", only, remedy)
        return found

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


def _is_nnx(item: Any) -> bool:
    return isinstance(item, nnx.State | nnx.Variable)


def _at(tree: Any, keys: KeyPath) -> Any:
    """What stands at a place of another tree in this one."""
    for key in keys:
        if isinstance(key, GetAttrKey):
            tree = getattr(tree, key.name)
        elif isinstance(key, DictKey) and isinstance(tree, Mapping):
            tree = tree[key.key]
        elif isinstance(key, SequenceKey) and type(tree) in (tuple, list):
            tree = tree[key.idx]
        else:
            raise LookupError(key)
    return tree


def _where(keys: KeyPath) -> str:
    return ".".join(["opt_state", *(jax.tree_util.keystr((key,), simple=True) for key in keys)])


def _is_masked(item: Any) -> bool:
    """Whether this is the place of a parameter that the transformation passes over."""
    return not jax.tree.leaves(value_of(item))
