"""Moves weights from one step's model to the next: one flat mapping, renamed by rules."""

from collections.abc import Mapping
from typing import Any, cast

import jax
from flax import nnx, traverse_util

from bridge import linen_to_nnx, nnx_to_linen

Weights = dict[str, jax.Array]
"""`'collection/path'` to array, for the collections that hold weights."""

WEIGHT_COLLECTIONS = ("params", "batch_stats")


def parameter_count(weights: Weights) -> int:
    """Returns the number of trainable scalars in `weights`."""
    return sum(value.size for key, value in weights.items() if key.startswith("params/"))


def from_linen(variables: Mapping[str, Any]) -> Weights:
    """Returns the weights in Linen `variables`."""
    weights: dict[str, Any] = {name: variables[name] for name in WEIGHT_COLLECTIONS}
    return cast(Weights, traverse_util.flatten_dict(weights, sep="/"))


def to_linen_variables(weights: Weights) -> dict[str, Any]:
    """Returns `weights` as nested Linen variables, the inverse of `from_linen`."""
    return traverse_util.unflatten_dict(weights, sep="/")


def into_linen(template: Mapping[str, Any], weights: Weights) -> dict[str, Any]:
    """Returns `template` with its weights replaced, its other collections as they are.

    Raises:
        ValueError: when the two do not hold the same paths and shapes.
    """
    _require_same(from_linen(template), weights)
    return {**template, **to_linen_variables(weights)}


def from_nnx(model: nnx.Module) -> Weights:
    """Returns the weights in the Variables of `model`."""
    return from_linen(nnx_to_linen(model))


def into_nnx(model: nnx.Module, weights: Weights) -> None:
    """Sets the Variables of `model` to `weights`, in place.

    Raises:
        ValueError: when the two do not hold the same paths and shapes.
    """
    _require_same(from_nnx(model), weights)
    nnx.update(model, linen_to_nnx(to_linen_variables(weights)))


def renamed(weights: Weights, rules: Mapping[str, str]) -> Weights:
    """Returns `weights` under the paths that `rules` give them.

    Args:
        weights: flat weights.
        rules: old path prefix to new one, without the collection, because a module's parameters
            and its statistics move together. Only whole path components match; a path that no
            rule names stays. The longest matching prefix wins, and each path is renamed once,
            so that `a -> b, b -> c` does not chain.
    """
    longest_first = sorted(rules.items(), key=lambda rule: -len(rule[0]))
    renamed = {}
    for key, value in weights.items():
        collection, path = key.split("/", 1)
        for old, new in longest_first:
            if f"{path}/".startswith(f"{old}/"):
                path = new + path[len(old) :]
                break
        renamed[f"{collection}/{path}"] = value
    return renamed


def _require_same(expected: Weights, found: Weights) -> None:
    problems = [f"missing {key}" for key in sorted(expected.keys() - found.keys())]
    problems += [f"unknown {key}" for key in sorted(found.keys() - expected.keys())]
    for key in sorted(expected.keys() & found.keys()):
        if expected[key].shape != found[key].shape:
            problems.append(f"{key} is {found[key].shape}, expected {expected[key].shape}")
    if problems:
        raise ValueError("the weights do not fit the next model: " + "; ".join(problems))
