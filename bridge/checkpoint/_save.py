"""Writes a checkpoint: one orbax tree for the model, one for each extra, and notes in JSON."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from bridge._conversion.neutral import nest
from bridge._errors import CheckpointError

from . import _digests, _notes, _orbax
from ._failures import reported
from ._files import NOTES, VARIABLES
from ._json import NotCarriedError
from ._processes import Agreement, summed
from ._publish import publishing
from ._stored import Names, Record, is_rng, record_of, tree_text
from ._targets import TargetTree, empty_wrappers, tree_of


def save_args(
    tree: Any,
    *,
    rngs: bool = True,
    extra: Mapping[str, Any] | None = None,
    digests: bool = True,
) -> ocp.args.Composite:
    """What `save` writes, as arguments for orbax's own `CheckpointManager` and checkpointers.

    Args:
      tree: as for `save`.
      rngs: as for `save`.
      extra: as for `save`.
      digests: as for `save`.

    Returns:
      Arguments for `CheckpointManager.save(step, args=…)`. `restore` reads the step's directory.

    Raises:
      CheckpointError: a leaf or a key cannot be stored; the error lists every one.
      ConversionError: `tree` is none of the above.

    Example::

      >>> import jax.numpy as jnp
      >>> from bridge import checkpoint
      >>> sorted(checkpoint.save_args({'params': {'w': jnp.ones(2)}}))
      ['bridge', 'variables']
    """
    side, contents = _contents_of(tree, rngs=rngs, extra=extra or {}, digests=digests)
    items = {
        name: ocp.args.PyTreeSave(nest(content.arrays))
        for name, content in contents.items()
        if content.arrays
    }
    records = {name: content.records for name, content in contents.items()}
    notes = _notes.write(side, records, digest=digests)
    return ocp.args.Composite(**items, **{NOTES: ocp.args.JsonSave(notes)})


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    rngs: bool = True,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    digests: bool = True,
) -> None:
    """Saves a model: the same checkpoint, whichever side it is saved from.

    In a program of several processes all of them call this. Each writes its own shards; of an array
    that every process has for itself, such as the key of a local `nnx.Rngs`, the first one's is
    stored. Threads may save at once; they wait for each other.

    Args:
      path: the directory that the checkpoint becomes, and those above it that are missing. It
        appears when all of it is on the disk.
      tree: Linen variables, an NNX module (native, ToNNX or mixed) or an `nnx.State`, with arrays
        on any devices. A collection `nnx` is static and is not stored.
      rngs: False leaves out RNG state, that of the wrappers included.
      extra: other trees by name: an `nnx.Optimizer`, an optax state, a step, any pytree of arrays
        and numbers.
      overwrite: whether a checkpoint at `path` is replaced. The old one can be restored until the
        new one is finished. Nothing else is replaced: a directory that holds anything but a
        checkpoint, a file, a link, the current directory.
      digests: whether digests of the arrays are stored, with which `restore(…, verify=True)` finds
        damage.

    Raises:
      CheckpointError: there is something already, or a leaf or key cannot be stored (the error
        lists every one), or the system does not let it be written. What was at `path` is there, and
        nothing temporary is left.
      ConversionError: `tree` is none of the above.

    Example::

      >>> import pathlib, tempfile
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from bridge import checkpoint
      >>> path = pathlib.Path(tempfile.mkdtemp()) / 'model'
      >>> checkpoint.save(path, nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> checkpoint.restore(path)['params']['kernel'].shape
      (2, 3)
    """
    with publishing(path, overwrite=overwrite) as new:
        args = save_args(tree, rngs=rngs, extra=extra, digests=digests)
        _orbax.write(new, ocp.CompositeCheckpointHandler(), args)


@dataclasses.dataclass
class _Content:
    """What is written of one tree.

    Attributes:
      records: its leaves.
      arrays: their arrays by name.
    """

    records: list[Record]
    arrays: dict[Names, Any]


def _contents_of(
    tree: Any, *, rngs: bool, extra: Mapping[str, Any], digests: bool
) -> tuple[str, dict[str, _Content]]:
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
) -> tuple[str, dict[str, _Content]]:
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
) -> _Content:
    made = _Content([], {})
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
