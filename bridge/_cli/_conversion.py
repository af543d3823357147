"""Plans what `convert` writes for a model, and what `diff` compares."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from flax import nnx

from bridge import linen_to_nnx, port
from bridge._conversion.arrays import is_abstract
from bridge._conversion.linen_leaves import from_variables, to_variables
from bridge._conversion.neutral import Neutral

from . import _target
from ._checkpoints import CheckpointContents, nnx_keys
from ._command import InputError


def plan_for(
    contents: CheckpointContents, rules: Mapping[str, str] | None, arguments: argparse.Namespace
) -> port.Plan[Any]:
    """The plan that moves a checkpoint's weights to the model of `--model`.

    Raises InputError if there is no `--model`, or it is of the same library as the checkpoint.
    """
    if arguments.model is None:
        raise InputError("--rules", "no --model", "the model that they lead to", "give --model")
    model = _target.abstract(arguments.model, arguments)
    leaves = contents.without_rngs().leaves
    if isinstance(model, nnx.Module):
        if not contents.has_collections:
            raise InputError(
                "CHECKPOINT",
                "an NNX state by path, which does not record the collections of its leaves",
                "Linen variables, or a Linen model for which they are converted",
                "give a Linen --model, --layout linen if they are parameters, or --within KEYS if"
                " the variables lie deeper",
            )
        return port.plan(to_variables(leaves), model, rules)
    if not contents.has_collections:
        leaves = _in_collections(leaves, from_variables(model))
    # Orbax writes the numbers of an `nnx.List` as texts, which no rule for stacked layers matches.
    by_key = {(c, nnx_keys(path)): leaf for (c, path), leaf in leaves.items()}
    return port.plan(linen_to_nnx(to_variables(by_key)), model, rules)


def applied(plan: port.Plan[Any]) -> Any:
    """The values under the new names: Linen variables, or the State of an NNX model.

    Raises PortError if the checkpoint does not fit the model.
    """
    made = plan.apply()
    if not plan.to_nnx:
        return made
    # What is no weight, such as RNG state or a cache, has no values in an abstract model.
    leaves = nnx.to_flat_state(nnx.state(made, graph=True))
    return nnx.from_flat_state([(path, leaf) for path, leaf in leaves if not is_abstract(leaf)])


def _in_collections(leaves: Neutral, target: Neutral) -> Neutral:
    """The leaves of an NNX state, with the collections in which a Linen model has such names."""
    known: dict[Any, str] = {}
    for collection, path in sorted(target, key=lambda address: address[0] != "params"):
        for names in (path, path[-1:]):
            known.setdefault(tuple(map(str, names)), collection)
    made: Neutral = {}
    for (_, path), leaf in leaves.items():
        names = tuple(map(str, path))
        made[known.get(names) or known.get(names[-1:], "params"), path] = leaf
    return made
