"""What `convert` would write, and where every leaf of it comes from."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

import registry
from bridge import checkpoint, linen_to_nnx, port
from bridge._conversion.linen_leaves import to_variables
from bridge._conversion.neutral import Address, Neutral, Path, nest
from bridge._conversion.nnx_leaves import address_of
from bridge._errors import path_text
from bridge._rules import rules as _rules
from bridge.checkpoint import _renaming

from . import _collections, _model, _target
from ._input_errors import InputError
from ._leaves import CheckpointContents
from ._rules_file import Rules


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A conversion that has not happened yet.

    Attributes:
        moves: (source, target) paths as text, empty if `plan` tells them.
        plan: the comparison with the model, None without one.
        make: makes the tree: Linen variables, or an NNX State.
        source_classes_are_open: whether it is from NNX paths whose layers have no known classes.
    """

    moves: tuple[tuple[str, str], ...]
    plan: port.Plan | None
    make: Callable[[], Any]
    source_classes_are_open: bool = False

    @property
    def ok(self) -> bool:
        """Whether it can be done."""
        return self.plan is None or self.plan.ok

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values, in the form of `port.Plan.to_json`."""
        if self.plan is not None:
            return json.loads(self.plan.to_json())
        entries = [{"kind": "matched", "source": [a], "target": [b]} for a, b in self.moves]
        return {"ok": True, "entries": entries}


def against_model(source: Any, model: Any, rules: Rules, *, to_nnx: bool) -> Conversion:
    """The conversion into what a model needs.

    Args:
        source: Linen variables, or an NNX module or State.
        model: an NNX module or Linen variables, abstract.
        rules: the table.
        to_nnx: which of the two `model` is.
    """
    plan = port.plan(source, model, rules.paths)

    def make() -> Any:
        made = plan.apply()
        return _concrete(nnx.state(made, graph=True)) if to_nnx else made

    return Conversion((), plan, make, isinstance(source, nnx.State))


def source_of(
    contents: CheckpointContents,
    rules: Rules,
    model: Any,
    arguments: argparse.Namespace,
    *,
    to_nnx: bool,
) -> Any:
    """A checkpoint as the source of a plan: Linen variables, or an NNX State or module.

    Args:
        contents: the checkpoint.
        rules: the table.
        model: what the values are for, whose collections the leaves of an NNX state get if the
            table names none.
        arguments: those of the command, whose `--source-model` is the module.
        to_nnx: whether the model is NNX's.
    """
    if not to_nnx and arguments.source_model is not None:
        # With its classes, so that fused gates are known.
        inputs, kwargs = _target.parse_inputs(arguments.inputs), dict(arguments.kwargs)
        native = _model.called(arguments.source_model, inputs, kwargs)
        # Skip arguments that only the Linen model takes.
        own = {name: value for name, value in kwargs.items() if name in native.kwargs}
        written_by = _model.abstract_values(
            arguments.source_model, inputs, own, to_nnx=True, option="--source-model"
        )
        options = {"within": arguments.within, "layout": arguments.layout}
        return checkpoint.restore(arguments.checkpoint, written_by, rngs=False, **options)
    if contents.has_collections or rules.collections or to_nnx:
        neutral = _with_collections(contents, rules)
    else:
        neutral = _with_collections_of(model, contents, rules)
    if to_nnx:
        return to_variables(neutral)
    # Orbax writes the numbers of an `nnx.List` as texts, which no rule for stacked layers matches.
    keyed = {(c, _renaming.nnx_keys(path)): leaf for (c, path), leaf in neutral.items()}
    return linen_to_nnx(to_variables(keyed))


def conversion_of(
    contents: CheckpointContents, rules: Rules, arguments: argparse.Namespace, *, to_nnx: bool
) -> Conversion:
    """The conversion that `--model` with its inputs, or else `--rules` alone, makes.

    Args:
        contents: the checkpoint.
        rules: the content of `--rules`.
        arguments: those of the command.
        to_nnx: whether the result is an NNX state.
    """
    if arguments.model is None:
        return by_rules(contents, rules, to_nnx=to_nnx)
    inputs = _target.parse_inputs(arguments.inputs)
    kwargs = dict(arguments.kwargs)
    model = _model.abstract_values(arguments.model, inputs, kwargs, to_nnx=to_nnx)
    source = source_of(contents, rules, model, arguments, to_nnx=to_nnx)
    return against_model(source, model, rules, to_nnx=to_nnx)


def by_rules(contents: CheckpointContents, rules: Rules, *, to_nnx: bool) -> Conversion:
    """The conversion that renames paths and does no more.

    Raises:
        InputError: a rule cannot be followed, or two leaves get one path.
    """
    neutral = _with_collections(contents, rules)
    table = _rules.read_forward(rules.paths) if to_nnx else _rules.read_backward(rules.paths)
    renamed = _renaming.rename(dict.fromkeys(path for _, path in neutral), table)
    moved: Neutral = {}
    sources: dict[Address, Path] = {}
    problems: list[str] = []
    for (collection, path), leaf in neutral.items():
        target = (
            collection,
            _renaming.nnx_keys(renamed[path]) if to_nnx else tuple(map(str, renamed[path])),
        )
        if target in sources:
            places = [path_text(collection, p) for p in (path, sources[target])]
            problems.append(" and ".join(places))
        sources[target] = path
        moved[target] = leaf
    if problems:
        raise InputError(
            "--rules",
            f"one new path for {'; '.join(problems)}",
            "another path for each",
            "correct the table",
        )
    state = linen_to_nnx(to_variables(moved)) if to_nnx else None
    if state is not None:
        active = registry.current()
        flat = nnx.to_flat_state(state)
        where = {address_of(path, variable, active): path for path, variable in flat}
        moves = [(path_text(t[0], sources[t]), ".".join(map(str, where[t]))) for t in moved]
    else:
        moves = [(".".join(map(str, sources[t])), path_text(*t)) for t in moved]
    made = to_variables(moved) if state is None else state
    return Conversion(tuple(moves), None, lambda: made)


def _with_collections(contents: CheckpointContents, rules: Rules) -> Neutral:
    """The leaves by collection and path, without RNG state, which plain checkpoints cannot hold."""
    weights = contents.without_rngs().leaves
    if contents.has_collections:
        return dict(weights)
    rngs = [path for _, path in contents.leaves.keys() - weights.keys()]
    found = _collections.collections_of(
        [path for _, path in weights], rngs, rules.collections, contents.within
    )
    return {(found[path], path): leaf for (_, path), leaf in weights.items()}


def _with_collections_of(model: Any, contents: CheckpointContents, rules: Rules) -> Neutral:
    """The same of an NNX state, each leaf in the collection of the Linen leaf that it fits."""
    leaves = {path: leaf for (_, path), leaf in contents.without_rngs().leaves.items()}
    # A bare array is matched with a leaf of any collection.
    state = nnx.State(nest({_renaming.nnx_keys(p): leaf.value for p, leaf in leaves.items()}))
    found: dict[str, str] = {}
    for entry in port.plan(state, model, rules.paths).entries:
        if entry.target:
            collection = entry.target[0].partition("/")[0]
            found |= dict.fromkeys(entry.source, collection)
    return {(found.get(".".join(map(str, p)), "params"), p): leaf for p, leaf in leaves.items()}


def _concrete(state: Any) -> Any:
    """What has values: an abstract model's RNG state has none."""
    leaves = nnx.to_flat_state(state)
    kept = [(path, leaf) for path, leaf in leaves if not _is_abstract(leaf)]
    return nnx.from_flat_state(kept)


def _is_abstract(leaf: Any) -> bool:
    value = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(value))
