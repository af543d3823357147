"""Plans what `convert` writes, and where every leaf of it comes from."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

import registry
from bridge import checkpoint, linen_to_nnx, port
from bridge._conversion.arrays import shape_of
from bridge._conversion.linen_leaves import from_variables, to_variables
from bridge._conversion.neutral import Address, Leaf, Neutral, Path, nest
from bridge._conversion.nnx_leaves import address_of
from bridge._errors import path_text
from bridge.checkpoint import _renaming
from bridge.checkpoint._restacking import check_dtypes

from . import _target
from ._checkpoints import CheckpointContents, in_order
from ._input_errors import InputError


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A conversion that has not happened yet.

    `make` gives an NNX State with `to_nnx`, and Linen variables without it. `moves` has the paths
    of the sources and that of the target as text; it is empty if `plan` tells them. `plan` is the
    comparison with the model, None without one.
    """

    to_nnx: bool
    moves: tuple[tuple[tuple[str, ...], str], ...]
    plan: port.Plan | None
    make: Callable[[], Any]

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


def conversion_of(
    contents: CheckpointContents, rules: Mapping[str, str] | None, arguments: argparse.Namespace
) -> Conversion:
    """The conversion for `--model`; by `--rules` alone; or into another format, without either.

    Raises RulesError if a rule cannot be followed or two leaves get one path, and InputError if the
    collections of the leaves are not known.
    """
    if arguments.model is not None:
        sample, model = _target.abstract(arguments.model, arguments)
        return _for_model(contents, rules, arguments, model, sample.inputs)
    if rules is not None:
        return _by_rules(contents, rules)
    weights = contents.without_rngs()
    if contents.is_linen:
        return _unchanged(weights, to_variables(weights.leaves), to_nnx=False)
    if contents.has_collections:
        return _unchanged(weights, linen_to_nnx(to_variables(weights.leaves)), to_nnx=True)
    return _unchanged(weights, _bare_state(weights), to_nnx=True)


def _for_model(
    contents: CheckpointContents,
    rules: Mapping[str, str] | None,
    arguments: argparse.Namespace,
    model: Any,
    inputs: tuple[Any, ...],
) -> Conversion:
    """The conversion into what a model needs: an NNX module or Linen variables, abstract."""
    to_nnx = isinstance(model, nnx.Module)
    plan = port.plan(source_of(contents, arguments, inputs, model), model, rules)

    def make() -> Any:
        made = plan.apply()
        return _concrete(nnx.state(made, graph=True)) if to_nnx else made

    return Conversion(to_nnx, (), plan, make)


def source_of(
    contents: CheckpointContents,
    arguments: argparse.Namespace,
    inputs: tuple[Any, ...],
    model: Any,
) -> Any:
    """A checkpoint as the source of a plan: Linen variables, or an NNX State or module.

    `--source-model` names the module, and `inputs` are for that module if it brings none. `model`
    is what the values are for, an NNX module or Linen variables.
    """
    if isinstance(model, nnx.Module):
        return to_variables(_with_collections(contents))
    if arguments.source_model is not None:
        # With its classes, so that fused gates are known.
        _, written_by = _target.abstract(arguments.source_model, arguments, inputs)
        if not isinstance(written_by, nnx.Module):
            raise InputError(
                "--source-model", "a Linen model", "the NNX model that wrote CHECKPOINT", "name it"
            )
        options = {"within": arguments.within, "layout": arguments.layout}
        return checkpoint.restore(arguments.checkpoint, written_by, rngs=False, **options)
    leaves = contents.without_rngs().leaves
    if not contents.has_collections:
        leaves = _in_collections(leaves, from_variables(model))
    # Orbax writes the numbers of an `nnx.List` as texts, which no rule for stacked layers matches.
    by_key = {(c, _renaming.nnx_keys(path)): leaf for (c, path), leaf in leaves.items()}
    return linen_to_nnx(to_variables(by_key))


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


def _bare_state(contents: CheckpointContents) -> nnx.State:
    """An NNX state of bare arrays, without known Variable types."""
    leaves = {_renaming.nnx_keys(path): leaf.value for (_, path), leaf in contents.leaves.items()}
    return nnx.State(nest(leaves))


def _unchanged(contents: CheckpointContents, tree: Any, *, to_nnx: bool) -> Conversion:
    addresses = [(a, a[1]) for a in contents.by_address()]
    texts = [_text(a, to_nnx=to_nnx) for a, _ in sorted(addresses, key=lambda a: in_order(a[0]))]
    return Conversion(to_nnx, tuple(((text,), text) for text in texts), None, lambda: tree)


def _by_rules(contents: CheckpointContents, rules: Mapping[str, str]) -> Conversion:
    """The conversion into the other layout, as `checkpoint.restore(rules=)` reads rules."""
    neutral, to_nnx = _with_collections(contents), contents.is_linen
    shapes = {
        ((collection,), path): shape_of(leaf.value) for (collection, path), leaf in neutral.items()
    }
    made = _renaming.placements(shapes, None, rules, to_nnx=to_nnx)
    moved: Neutral = {}
    moves: list[tuple[Sequence[Address], Address]] = []
    for (collection, *path), own in made.items():
        sources = [(source[0], source[1:]) for source in own.paths]
        leaves = [neutral[source] for source in sources]
        # The fields of a box, such as the names of axes, are those of the leaf as it was.
        leaf = leaves[0]
        if own.shape is not None:
            check_dtypes((collection, *path), [str(each.value.dtype) for each in leaves])
            leaf = Leaf(own.array([each.value for each in leaves], to_nnx=to_nnx))
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
            tuple(_text(a, to_nnx=not to_nnx) for a in sources),
            _text((target[0], where.get(target, target[1])), to_nnx=to_nnx),
        )
        for sources, target in moves
    ]
    return Conversion(to_nnx, tuple(texts), None, lambda: made_tree)


def _text(address: Address, *, to_nnx: bool) -> str:
    return ".".join(map(str, address[1])) if to_nnx else path_text(*address)


def _with_collections(contents: CheckpointContents) -> Neutral:
    """The leaves by collection and path, without RNG state, which plain checkpoints cannot hold."""
    if not contents.has_collections:
        raise InputError(
            "CHECKPOINT",
            "an NNX state by path, which does not record the collections of its leaves",
            "Linen variables, or a Linen model for which they are converted",
            "give a Linen --model, --layout linen if they are parameters, or --within KEYS if the"
            " variables lie deeper",
        )
    return dict(contents.without_rngs().leaves)


def _concrete(state: Any) -> Any:
    """What has values: an abstract model's RNG state has none."""
    leaves = nnx.to_flat_state(state)
    kept = [(path, leaf) for path, leaf in leaves if not _is_abstract(leaf)]
    return nnx.from_flat_state(kept)


def _is_abstract(leaf: Any) -> bool:
    value = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(value))
