"""What a save writes of each tree: a record for each leaf, with its digest, and the arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from bridge._errors import CheckpointError

from . import _digests
from ._failures import reported
from ._files import NOTES, VARIABLES
from ._json import NotCarriedError
from ._processes import Agreement, summed
from ._stored import Names, Record, is_rng, record_of, tree_text
from ._targets import TargetTree, empty_wrappers, tree_of


@dataclasses.dataclass
class Content:
    """What is written of one tree.

    Attributes:
      records: its leaves.
      arrays: their arrays by name.
    """

    records: list[Record]
    arrays: dict[Names, Any]


def contents_of(
    tree: Any, *, rngs: bool, extra: Mapping[str, Any], digests: bool
) -> tuple[str, dict[str, Content]]:
    """The side of a model, and what is written of it and of each extra tree, by name.

    Args:
      tree: the model.
      rngs: whether RNG state is written.
      extra: other trees by name.
      digests: whether records have the digests of arrays.

    Raises:
      CheckpointError: a leaf or a key cannot be stored; the error lists every one.
      ConversionError: the model is none.
    """
    with Agreement("", "could not save"), reported("these values cannot be saved", ""):
        side, contents = _all_recorded(tree, rngs, extra)
        arrays = [array for content in contents.values() for array in content.arrays.values()]
        own = [_digests.own_part(array) for array in arrays] if digests else []
    if digests:
        # All processes reach this line because they agreed before; otherwise one would wait
        # forever.
        texts = map(_digests.text_of, map(int, summed(np.asarray(own, np.uint64))))
        for content in contents.values():
            found = dict(zip(content.arrays, texts, strict=False))
            content.records = [record.with_digests(found) for record in content.records]
    return side, contents


def _all_recorded(
    tree: Any, rngs: bool, extra: Mapping[str, Any]
) -> tuple[str, dict[str, Content]]:
    trees = {VARIABLES: tree_of(tree)}
    for name, value in extra.items():
        if name in (NOTES, VARIABLES) or not name.isidentifier():
            problem = f"an extra tree cannot be called {name!r}; it needs another identifier"
            raise CheckpointError(problem, "", "The checkpoint's own trees have these names.")
        trees[name] = tree_of(value, as_pytree=True)
    unsupported: list[tuple[str, str]] = []
    contents = {
        name: _recorded(content, rngs, "" if name == VARIABLES else f"{name}: ", unsupported)
        for name, content in trees.items()
    }
    if unsupported:
        raise CheckpointError(
            "these leaves cannot be stored in a checkpoint",
            "",
            "Remove them from the tree, or store arrays and numbers instead.",
            unsupported=unsupported,
        )
    empty = (
        [] if any(not is_rng(path) for path in trees[VARIABLES].leaves) else empty_wrappers(tree)
    )
    if empty:
        raise CheckpointError(
            "there are no variables to save in this model",
            "",
            "Call bridge.lazy_init first.",
            unsupported=[
                (tree_text(path) if path else "the model", "a ToNNX without any") for path in empty
            ],
        )
    return trees[VARIABLES].side, contents


def _recorded(
    tree: TargetTree, rngs: bool, label: str, unsupported: list[tuple[str, str]]
) -> Content:
    made = Content([], {})
    in_collection = tree.side != "pytree"
    for path, leaf in tree.leaves.items():
        if not rngs and in_collection and is_rng(path):
            continue
        try:
            record, own = record_of(path, leaf, in_collection=in_collection)
        except NotCarriedError as error:
            unsupported.append((label + tree_text(path), str(error)))
        else:
            made.records.append(record)
            made.arrays |= own
    return made
