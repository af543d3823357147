"""Compares the steps of the new program with those of the Linen program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bridge import port

from ._run import Ran, Sample, with_same_keys

_TOLERANCE = 1e-5


class DifferenceError(Exception):
    """The two programs differ."""


def compare(
    old: Ran, new: Sample, rules: Mapping[str, str], collections: frozenset[str], *, draws: bool
) -> float:
    """Makes the steps of the Linen program in the new one, from the same state.

    `rules` has NNX paths by Linen paths. With `draws`, keys were replaced by those that draw the
    same in both. Returns the largest difference. Raises DifferenceError, which says where they
    differ.
    """
    new.batches = old.batches
    if draws:
        _replace_keys(new.state)
    _move(old.first, new.state, rules, collections)
    found = 0.0
    for number, before in enumerate(old.returned):
        after = new.run(number)
        # A tree like the parameters has other paths; the parameters are compared themselves.
        if jax.tree.structure(before) == jax.tree.structure(after):
            pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
            for a, b in pairs:
                found = max(found, _apart(a, b, f"what step {number + 1} returns"))
        elif not _has_states(after):
            raise DifferenceError(f"step {number + 1} returns another structure")
    expected = nnx.clone(new.state)
    _move(old.last, expected, rules, collections)
    for name in ("model", "optimizer"):
        values = [_leaves(getattr(each, name)) for each in (expected, new.state)]
        for path, a in values[0].items():
            where = f"{name}.{'.'.join(map(str, path))} after {len(old.returned)} steps"
            found = max(found, _apart(a, values[1][path], where))
    return found


def _move(old: Any, new: Any, rules: Mapping[str, str], collections: frozenset[str]) -> None:
    """Gives the new state the values of the old one, on each device that has its own."""
    if not jnp.shape(old.step):
        _move_one(old, new, rules, collections)
        return
    devices = []
    for number in range(len(old.step)):
        before, after = jax.tree.map(lambda x, number=number: x[number], (old, new))  # pyright: ignore
        _move_one(before, after, rules, collections)
        devices.append(after)

    def together(known: Any, *each: Any) -> Any:
        value, sharding = jnp.stack(each), getattr(known, "sharding", None)
        # What one device has, such as a replaced key, must not become bound to it.
        is_spread = sharding is not None and len(sharding.device_set) > 1
        return jax.device_put(value, sharding) if is_spread else value

    nnx.update(new, nnx.state(jax.tree.map(together, new, *devices)))


def _move_one(old: Any, new: Any, rules: Mapping[str, str], collections: frozenset[str]) -> None:
    if _has_collections(old.params):
        is_leaf = _has_collections
        old = jax.tree.map(lambda x: x["params"] if is_leaf(x) else x, old, is_leaf=is_leaf)
    names = {name: getattr(old, name, None) for name in collections - {"params"}}
    variables = {"params": old.params, **{n: tree for n, tree in names.items() if tree is not None}}
    plan = port.plan(variables, new.model, rules)
    if not plan.ok:
        raise DifferenceError(f"the new state differs: {plan.problems[0]}")
    plan.apply()
    plan.apply_optimizer(old, new.optimizer)


def _has_collections(tree: Any) -> bool:
    """Whether all variables are in the place of the parameters."""
    return isinstance(tree, Mapping) and set(tree) == {"params"}


def _replace_keys(state: Any) -> None:
    # A scan over states needs keys of one type, also in the streams of the model.
    nnx.update(state, with_same_keys(nnx.state(state, nnx.RngKey)))
    fields = {
        name: value
        for name, value in vars(state).items()
        if name not in ("model", "optimizer") and not name.startswith("_")
    }
    arrays = {n: v for n, v in fields.items() if isinstance(v, jax.Array)}
    for name, value in with_same_keys(arrays).items():
        if value is not fields[name]:
            setattr(state, name, value)


def _has_states(tree: Any) -> bool:
    is_state = lambda x: isinstance(x, nnx.State)  # noqa: E731
    return any(is_state(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_state))


def _leaves(module: Any) -> dict[Any, Any]:
    state = nnx.state(module, nnx.All(nnx.Variable, nnx.Not(nnx.RngState)))
    return {path: leaf[...] for path, leaf in nnx.to_flat_state(state)}


def _apart(a: Any, b: Any, where: str) -> float:
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        raise DifferenceError(f"{where}: shape {b.shape} instead of {a.shape}")
    if not np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
        apart = float(np.max(np.abs(a - b), initial=0.0))
        raise DifferenceError(f"{where}: {apart:.2g} apart")
    return float(np.max(np.abs(a.astype(float) - b.astype(float)), initial=0.0))
