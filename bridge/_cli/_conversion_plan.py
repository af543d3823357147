"""Plans what `convert` writes, and where every leaf of it comes from."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

import registry
from bridge import checkpoint, linen_to_nnx, port
from bridge._conversion.arrays import shape_of
from bridge._conversion.linen_leaves import to_variables
from bridge._conversion.neutral import Address, Leaf, Neutral, Path, nest
from bridge._conversion.nnx_leaves import address_of
from bridge._errors import path_text
from bridge._rules.rules import RulesError
from bridge.checkpoint import _renaming
from bridge.checkpoint._restacking import value_of

from . import _collections, _model, _target
from ._leaves import CheckpointContents, in_order
from ._rules_file import Rules


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A conversion that has not happened yet.

    Attributes:
        moves: the paths of the sources and that of the target as text, empty if `plan` tells them.
        plan: the comparison with the model, None without one.
        make: makes the tree: Linen variables, or an NNX State.
        source_classes_are_open: whether it is from NNX paths whose layers have no known classes.
    """

    moves: tuple[tuple[tuple[str, ...], str], ...]
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
        entries = [
            {"kind": "matched", "source": [*sources], "target": [target]}
            for sources, target in self.moves
        ]
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
    contents: CheckpointContents, rules: Rules, arguments: argparse.Namespace, *, to_nnx: bool
) -> Any:
    """A checkpoint as the source of a plan: Linen variables, or an NNX State or module.

    Args:
        contents: the checkpoint.
        rules: the table.
        arguments: those of the command, whose `--source-model` is the module.
        to_nnx: whether the values are for an NNX model.
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
    if not (contents.has_collections or rules.collections or to_nnx):
        # A bare array is matched with a leaf of any collection.
        leaves = {path: leaf.value for (_, path), leaf in contents.without_rngs().leaves.items()}
        return nnx.State(nest({_renaming.nnx_keys(path): value for path, value in leaves.items()}))
    neutral = _with_collections(contents, rules)
    if to_nnx:
        return to_variables(neutral)
    # Orbax writes the numbers of an `nnx.List` as texts, which no rule for stacked layers matches.
    keyed = {(c, _renaming.nnx_keys(path)): leaf for (c, path), leaf in neutral.items()}
    return linen_to_nnx(to_variables(keyed))


def conversion_of(
    contents: CheckpointContents,
    rules: Rules,
    arguments: argparse.Namespace,
    *,
    to_nnx: bool,
    other: CheckpointContents | None = None,
) -> Conversion:
    """The conversion that `--model` with its inputs, or else `--rules` alone, makes.

    Args:
        contents: the checkpoint.
        rules: the content of `--rules`.
        arguments: those of the command.
        to_nnx: whether the result is an NNX state.
        other: a checkpoint that has the shapes of the result; None if nothing tells them.
    """
    if arguments.model is None:
        return by_rules(contents, rules, to_nnx=to_nnx, other=other)
    inputs = _target.parse_inputs(arguments.inputs)
    kwargs = dict(arguments.kwargs)
    model = _model.abstract_values(arguments.model, inputs, kwargs, to_nnx=to_nnx)
    source = source_of(contents, rules, arguments, to_nnx=to_nnx)
    return against_model(source, model, rules, to_nnx=to_nnx)


def by_rules(
    contents: CheckpointContents,
    rules: Rules,
    *,
    to_nnx: bool,
    other: CheckpointContents | None = None,
) -> Conversion:
    """The conversion by `--rules` alone, as `checkpoint.restore(rules=)` reads them.

    Args:
        contents: the checkpoint.
        rules: the table.
        to_nnx: whether the result is an NNX state.
        other: a checkpoint that has the shapes of the result; None if nothing tells them.

    Raises:
        RulesError: a rule cannot be followed, or two leaves get one path.
        InputError: the collections of the leaves are not known.
    """
    neutral = _with_collections(contents, rules)
    if rules.paths and contents.is_linen != to_nnx:
        kind, given = ("Linen", "nnx") if contents.is_linen else ("NNX", "linen")
        raise RulesError(
            f"paths of {kind} in the checkpoint and in what is to be written",
            "a table from the paths of the one to those of the other",
            f"leave rules out, or give --layout {given} if the checkpoint is taken for what it is"
            " not",
        )
    shapes = {
        ((collection,), path): list(map(np.shape, jax.tree.leaves(leaf.value)))
        for (collection, path), leaf in neutral.items()
    }
    wanted = None
    if other is not None:
        collections = {collection for collection, _ in neutral}
        wanted = {
            (collection, *path): shape_of(leaf.value)
            for path, leaf in other.by_path().items()
            for collection in collections
        }
    made = _renaming.placements(shapes, wanted, rules.paths, to_nnx=to_nnx)
    moved: Neutral = {}
    moves: list[tuple[Sequence[Address], Address]] = []
    for (collection, *path), own in made.items():
        sources = [(origin.path[0], origin.path[1:]) for origin in own.origins]
        leaves = [neutral[source] for source in sources]
        # The fields of a box, such as the names of axes, are those of the leaf as it was.
        leaf = leaves[0]
        if not own.is_whole:
            leaf = Leaf(value_of(own, [each.value for each in leaves], to_nnx=to_nnx))
        target = collection, tuple(path)
        moved[target] = leaf
        moves.append((list(dict.fromkeys(sources)), target))
    moves.sort(key=lambda move: in_order(move[0][0]))
    made_tree = linen_to_nnx(to_variables(moved)) if to_nnx else to_variables(moved)
    where: dict[Address, Path] = {}
    if to_nnx:
        active = registry.current()
        flat = nnx.to_flat_state(made_tree)
        where = {address_of(path, variable, active): path for path, variable in flat}
    texts = [
        (
            tuple(path_text(*a) if contents.is_linen else _dotted(a[1]) for a in sources),
            _dotted(where[target]) if to_nnx else path_text(*target),
        )
        for sources, target in moves
    ]
    return Conversion(tuple(texts), None, lambda: made_tree)


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


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


def _concrete(state: Any) -> Any:
    """What has values: an abstract model's RNG state has none."""
    leaves = nnx.to_flat_state(state)
    kept = [(path, leaf) for path, leaf in leaves if not _is_abstract(leaf)]
    return nnx.from_flat_state(kept)


def _is_abstract(leaf: Any) -> bool:
    value = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(value))
