"""An optimizer's state in the layout of either side: `opt_state` and `step`, or an `nnx.Optimizer`.

Both sides have the tree that optax made. A Linen program has its leaves at `opt_state` 0 `mu`
`Dense_0` `kernel`, an `nnx.Optimizer` at the same keys. So a leaf has the keys of its place in the
state, and behind them those of its parameter, for which the rules of the model hold too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
from flax import nnx

from bridge._conversion import linen_leaves, nnx_leaves
from bridge._conversion.arrays import shape_of
from bridge._conversion.neutral import Neutral, Path, walk
from bridge._errors import CheckpointError

from ._renaming import ItemPath, renamed
from ._source import Source
from ._stored import Record, is_rng, tree_text
from ._targets import TargetTree, tree_of

OPT_STATE, STEP = "opt_state", "step"


def linen_state(tree: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """What a Linen program keeps of its training: collections, `opt_state`, `step` and the rest.

    RNG state is left out, which such a program derives from a key. An `nnx.Optimizer` in `extra`
    becomes `opt_state` and `step`. Raises CheckpointError if two trees have one name, one is of NNX
    and no optimizer, or an optimizer is of another model, and ConversionError if `tree` is not a
    model.
    """
    model = tree_of(tree)
    addresses = {path: (path[0], path[1:]) for path in model.leaves if not is_rng(path)}
    leaves: Neutral = {address: model.leaves[path] for path, address in addresses.items()}
    nnx_paths = model.nnx_paths()
    places = {nnx_paths[path]: address for path, address in addresses.items() if path in nnx_paths}

    def as_linen(node: Any) -> Any:
        if not isinstance(node, nnx.State):
            return nnx_leaves.raw_value(node) if isinstance(node, nnx.Variable) else node
        if lacking := [path for path, _ in walk(node) if path not in places]:
            raise CheckpointError(
                "the optimizer belongs to another model than the one that is saved",
                "",
                "Pass the optimizer of this model.",
                unsupported=[(tree_text(path), "not in the model") for path in lacking],
            )
        moments = {
            places[path]: leaves[places[path]]._replace(value=as_linen(item))
            for path, item in walk(node)
        }
        made = linen_leaves.to_dicts(moments)
        return made.get("params", {}) if made.keys() <= {"params"} else made

    def is_nnx(node: Any) -> bool:
        return isinstance(node, nnx.State | nnx.Variable)

    state = linen_leaves.to_dicts(leaves)
    for name, value in extra.items():
        own = {name: value}
        if isinstance(value, nnx.Optimizer):
            opt_state = jax.tree.map(as_linen, value.opt_state, is_leaf=is_nnx)
            # A TrainState counts in signed integers.
            own = {OPT_STATE: opt_state, STEP: nnx_leaves.raw_value(value.step).astype("int32")}
        elif isinstance(value, nnx.Pytree) or any(
            map(is_nnx, jax.tree.leaves(value, is_leaf=is_nnx))
        ):
            raise CheckpointError(
                f"the tree {name!r} is one of NNX, for which there is no place in the layout",
                "'linen'",
                "From NNX, this layout takes only a model and its nnx.Optimizer.",
            )
        if taken := own.keys() & state.keys():
            raise CheckpointError(f"there are two trees called {sorted(taken)} in", "", "")
        state |= own
    return state


def with_optimizer(
    source: Source,
    main: TargetTree | None,
    targets: Mapping[str, TargetTree],
    table: Mapping[str, str] | None,
) -> Source:
    """A checkpoint with the optimizer's state in the layout of the targets that ask for it.

    `main` is the model that is restored into, and `targets` has the other trees by name. `table`
    has the rules of the model, None for names that are the same. Raises RulesError if a rule cannot
    be followed.
    """
    start = 1 if source.layout == "bridge" else 0
    trees = {n: {_text(r.path[start:]): r for r in own} for n, own in source.extra.items()}
    of_nnx = {name: tree for name, tree in trees.items() if _is_optimizer(tree)}
    of_linen = {
        _text((name, *record.path)): record
        for name in (OPT_STATE, STEP)
        if name in source.extra.keys() - of_nnx.keys()
        for record in source.extra[name]
    }
    linen_names = {path[0] for path in of_linen}
    first = 0 if source.layout == "nnx" else 1
    theirs = {_text(record.path[first:]) for record in source.variables}
    ours = {_text(path[1:]) for path in (main.leaves if main else ())}
    extra = dict(source.extra)
    for name, target in targets.items():
        is_nnx = target.side == "nnx" and _is_optimizer(path[1:] for path in target.leaves)
        if is_nnx and name not in of_nnx and OPT_STATE in linen_names:
            state = of_linen
        elif name in (OPT_STATE, STEP) and name not in extra and len(of_nnx) == 1:
            (state,) = of_nnx.values()
        elif table and main is not None and main.side == "linen" and name in linen_names:
            # A model of NNX saved it in the layout of Linen, under its own names.
            state = of_linen
        else:
            continue
        records = {
            _split(path, theirs): _as_number(path, record)
            for path, record in state.items()
            if record.stored and (is_nnx or path[0] == name)
        }
        wanted = {
            _split(_text(path[1:] if is_nnx else (name, *path)), ours): (path, shape_of(leaf.value))
            for path, leaf in target.leaves.items()
        }
        extra[name] = renamed(source, records, wanted, table, to_nnx=is_nnx, all_used=False)
    return dataclasses.replace(source, extra=extra)


def _is_optimizer(paths: Iterable[Path]) -> bool:
    first = {path[0] if path else None for path in paths}
    return bool(first) and first <= {OPT_STATE, STEP}


def _text(path: Path) -> Path:
    """Keys as text, without the one that a box or a Variable has in a tree of another writer."""
    texts = tuple(map(str, path))
    return texts[:-1] if texts[-1:] == ("value",) else texts


def _as_number(path: Path, record: Record) -> Record:
    """The step as a number: Linen counts in signed integers, NNX in unsigned ones."""
    stored = {
        names: own
        if path != (STEP,) or own.shape or own.is_python
        else dataclasses.replace(own, kind="int", dtype="int")
        for names, own in record.stored.items()
    }
    return dataclasses.replace(record, stored=stored)


def _split(path: Path, parameters: Collection[Path]) -> ItemPath:
    """A path as the place in the optimizer's state, and the path of the parameter."""
    for start in range(1, len(path)):
        if path[start:] in parameters:
            return path[:start], path[start:]
    return path, ()
