"""An optax state and its step from a Linen `TrainState` into an `nnx.Optimizer`, and back.

Both states have the containers that optax made. Where the NNX one holds a State, the Linen one
holds a tree like the parameters, and the plan converts it; everything else is a scalar that is
carried over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict, freeze
from jax.tree_util import KeyPath

from bridge._conversion import linen_leaves, nnx_leaves
from bridge._conversion.arrays import shape_of
from bridge._conversion.neutral import Address, walk
from bridge._errors import PortError

from . import _moving
from ._correspondence import Correspondence
from ._trees import linen_text, nnx_text, value_of


class OptimizerPort:
    """Moves optimizer state along a correspondence."""

    def __init__(self, correspondence: Correspondence, collections: tuple[str, ...]):
        self._found = correspondence
        self._collections = collections
        self._problems: list[str] = []

    def to_nnx(self, train_state: Any, optimizer: nnx.Optimizer[Any]) -> nnx.Optimizer[Any]:
        """Writes state and step into an `nnx.Optimizer`, all of it or nothing."""
        self._check_parameters(train_state, are_moved=True)
        writes: list[tuple[nnx.Variable[Any], Any]] = []
        for where, linen, ours in _parts(train_state.opt_state, optimizer.opt_state):
            if isinstance(ours, nnx.State):
                places = {path: leaf for path, leaf in walk(ours) if not _is_masked(leaf)}
                values = _moving.linen_values(linen, self._collections)
                self._check_zeros(where, values)
                moved = self._moments(where, _moving.to_nnx(self._found, values), places, nnx_text)
                writes += [(places[path], value) for path, value in moved.items()]
            else:
                writes.append((ours, self._fitting(linen, ours, where)))
        step = jnp.array(train_state.step, nnx_leaves.raw_value(optimizer.step).dtype)
        self._raise("the optimizer state cannot be moved to NNX")
        _moving.write([*writes, (optimizer.step, step)])
        return optimizer

    def to_linen(self, optimizer: nnx.Optimizer[Any], train_state: Any) -> Any:
        """The train state with state and step of an `nnx.Optimizer`; the inverse of `to_nnx`."""
        self._check_parameters(train_state, are_moved=False)
        new = [
            self._linen_moments(where, linen, ours)
            if isinstance(ours, nnx.State)
            else self._fitting(nnx_leaves.raw_value(ours), linen, where)
            for where, linen, ours in _parts(train_state.opt_state, optimizer.opt_state)
        ]
        self._raise("the optimizer state cannot be moved to Linen")
        step = nnx_leaves.raw_value(optimizer.step)
        given = train_state.step
        step = int(step) if isinstance(given, int) else jnp.asarray(step, given.dtype)
        opt_state = jax.tree.unflatten(jax.tree.structure(optimizer.opt_state, _is_nnx), new)
        return dataclasses.replace(train_state, opt_state=opt_state, step=step)

    def _check_parameters(self, train_state: Any, *, are_moved: bool) -> None:
        """Raises PortError if a train state has other parameters than the plan.

        `are_moved` says whether they also need the values that the plan moves.
        """
        params, known = getattr(train_state, "params", None), self._found.linen_values
        values = _moving.linen_values(params, self._collections) if params else {}
        other: list[str] = []
        for address, value in values.items():
            if address[0] == "params" and address not in known:
                other.append(f"{linen_text(address)}: the plan has no such parameter")
            elif address in known and shape_of(value) != shape_of(known[address]):
                shapes = f"{shape_of(known[address])}, found {shape_of(value)}"
                other.append(f"{linen_text(address)}: the plan has shape {shapes}")
            elif are_moved and _moving.is_other(value, known.get(address)):
                other.append(f"{linen_text(address)}: the plan has other values")
        if other:
            raise PortError(
                "the train state is not the one whose parameters the plan moves",
                other,
                "Make a plan of its parameters, {'params': state.params}.",
            )

    def _check_zeros(self, where: str, values: Mapping[Address, Any]) -> None:
        """Notes values that are lost, as NNX has no place for them."""
        for address in self._found.zero:
            if address in values and not _moving.is_zero(values[address]):
                text = f"{linen_text(address)} is not zero, and NNX has no place for it"
                self._problems.append(f"{where}: {text}")

    def _linen_moments(self, where: str, linen: Any, ours: nnx.State[Any, Any]) -> Any:
        """The Linen tree like the parameters with the values of an NNX one."""
        variables = _moving.as_variables(linen, self._collections)
        neutral = linen_leaves.from_variables(variables)
        places = {a: leaf.value for a, leaf in neutral.items() if shape_of(leaf.value) is not None}
        moved = _moving.to_linen(self._found, _moving.nnx_values(ours))
        values = self._moments(where, moved, places, linen_text)
        filled = {a: leaf._replace(value=values.get(a, leaf.value)) for a, leaf in neutral.items()}
        tree = linen_leaves.to_variables(filled)
        tree = tree if variables is linen else tree.get("params", {})
        return freeze(tree) if isinstance(linen, FrozenDict) else tree

    def _moments(
        self, where: str, moved: Mapping[Any, Any], places: Mapping[Any, Any], text: Any
    ) -> dict[Any, Any]:
        """The values that go to places of the target.

        Every place needs a value, and every value that is not zero a place.
        """
        leaves = self._found.nnx_leaves
        for key in places:
            if key not in moved and not (key in leaves and leaves[key].is_adapter):
                self._problems.append(f"{where}: the source has nothing for {text(key)}")
        for key, value in moved.items():
            if key not in places and not _moving.is_zero(value):
                problem = f"{text(key)} has no place in the target's state, and is not zero"
                self._problems.append(f"{where}: {problem}")
        return {
            key: self._fitting(value, places[key], f"{where}: {text(key)}")
            for key, value in moved.items()
            if key in places
        }

    def _fitting(self, value: Any, place: Any, where: str) -> Any:
        """A value in the dtype and the sharding of the place that it goes to."""
        place = value_of(place)
        if not hasattr(place, "dtype"):
            return value
        value = value if hasattr(value, "dtype") else jnp.asarray(value)
        if shape_of(value) != shape_of(place):
            found, expected = shape_of(value), shape_of(place)
            self._problems.append(f"{where}: expected shape {expected}, found {found}")
        elif not _moving.cast_is_exact(value, place):
            text = f"the cast to {place.dtype} changes {value.dtype} values"
            self._problems.append(f"{where}: {text}")
        else:
            return _moving.like(value, place)
        return value

    def _raise(self, where: str) -> None:
        problems, self._problems = self._problems, []
        if problems:
            raise PortError(where, problems)


def _is_nnx(item: Any) -> bool:
    return isinstance(item, nnx.State | nnx.Variable)


def _parts(linen: Any, ours: Any) -> list[tuple[str, Any, Any]]:
    """(place, Linen part, NNX part) of the scalars and the parameter-like trees of two states.

    Raises PortError if one state has parts that the other one lacks.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(ours, _is_nnx)
    places = [_where(keys) for keys, _ in flat]
    try:
        parts = structure.flatten_up_to(linen)
    except ValueError as error:
        theirs = [_where(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(linen)[0]]
        only = [
            *(f"{one}: only the NNX state has it" for one in places if not _above(one, theirs)),
            *(
                f"{one}: only the Linen state has it"
                for one in theirs
                if not any(_above(place, [one]) for place in places)
            ),
        ]
        remedy = "Give both the same optax transformation."
        problems = only or [str(error)]
        raise PortError("the two optimizer states have other parts", problems, remedy) from None
    return list(zip(places, parts, (part for _, part in flat), strict=True))


def _above(place: str, others: Sequence[str]) -> bool:
    """Whether one of other places is this one or below it."""
    return any(f"{other}.".startswith(f"{place}.") for other in others)


def _where(keys: KeyPath) -> str:
    return ".".join(["opt_state", *(jax.tree_util.keystr((key,), simple=True) for key in keys)])


def _is_masked(item: Any) -> bool:
    """Whether this is the place of a parameter that the transformation passes over."""
    return not jax.tree.leaves(value_of(item))
