"""Writes a checkpoint: one orbax tree for the model, one for each extra, and notes in JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from bridge._errors import CheckpointError
from bridge._neutral import nest

from ._files import NOTES, VARIABLES, absolute
from ._json import NotCarriedError
from ._source import VERSION
from ._stored import Record, is_rng, record_of, tree_text
from ._targets import Tree, tree_of


def save_args(
    tree: Any, *, rngs: bool = True, extra: Mapping[str, Any] | None = None
) -> ocp.args.Composite:
    """What `save` writes, as arguments for orbax's own `CheckpointManager` and checkpointers.

    Args:
      tree: as for `save`.
      rngs: as for `save`.
      extra: as for `save`.

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
    trees = {VARIABLES: tree_of(tree)}
    for name, value in (extra or {}).items():
        if name in (NOTES, VARIABLES) or not name.isidentifier():
            problem = f"an extra tree cannot be called {name!r}; it needs another identifier"
            raise CheckpointError(problem, "", "The checkpoint's own trees have these names.")
        trees[name] = tree_of(value, as_pytree=True)
    unsupported: list[tuple[str, str]] = []
    items: dict[str, Any] = {}
    notes: dict[str, Any] = {}
    for name, content in trees.items():
        label = "" if name == VARIABLES else f"{name}: "
        records, arrays = _recorded(content, rngs, label, unsupported)
        notes[name] = [record.to_json() for record in records]
        if arrays:
            items[name] = ocp.args.PyTreeSave(nest(arrays))
    if unsupported:
        raise CheckpointError(
            "these leaves cannot be stored in a checkpoint",
            "",
            "Remove them from the tree, or store arrays and numbers instead.",
            unsupported=unsupported,
        )
    header = {"version": VERSION, "written_by": trees[VARIABLES].side, "items": notes}
    return ocp.args.Composite(**items, **{NOTES: ocp.args.JsonSave(header)})


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    rngs: bool = True,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Saves a model: the same checkpoint, whichever side it is saved from.

    In a program of several processes all of them call this. Each writes its own shards; of an array
    that every process has for itself, such as the key of a local `nnx.Rngs`, the first one's is
    stored.

    Args:
      path: the directory that the checkpoint becomes. It appears when all of it is written.
      tree: Linen variables, an NNX module (native, ToNNX or mixed) or an `nnx.State`, with arrays
        on any devices. A collection `nnx` is static and is not stored.
      rngs: False leaves out RNG state, that of the wrappers included.
      extra: other trees by name: an `nnx.Optimizer`, an optax state, a step, any pytree of arrays
        and numbers.
      overwrite: whether a checkpoint at `path` is replaced. The old one is there until the new one
        is finished.

    Raises:
      CheckpointError: there is a checkpoint already, or a leaf or key cannot be stored; the error
        lists every one.
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
    where = absolute(path)
    args = save_args(tree, rngs=rngs, extra=extra)
    exists = where.exists()
    if exists and not overwrite:
        raise CheckpointError(
            "there is something already at", where, "Pass overwrite=True to replace it."
        )
    # Orbax's own `force` deletes first and writes then, and an interruption would leave nothing.
    target = where.with_name(f"{where.name}.next") if exists else where
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(target, args=args, force=exists)
    if exists:
        _replace(where, target)


def _replace(where: Any, new: Any) -> None:
    """Puts a finished directory in the place of another one."""
    if jax.process_index() == 0:
        old = where.with_name(f"{where.name}.previous")
        if old.exists():
            old.rmtree()
        where.rename(old)
        new.rename(where)
        old.rmtree()
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"bridge.checkpoint {where}")


def _recorded(
    tree: Tree, rngs: bool, label: str, unsupported: list[tuple[str, str]]
) -> tuple[list[Record], dict[Any, Any]]:
    records: list[Record] = []
    arrays: dict[Any, Any] = {}
    in_collection = tree.side != "pytree"
    for path, leaf in tree.leaves.items():
        if not rngs and in_collection and is_rng(path):
            continue
        try:
            record, own = record_of(path, leaf, in_collection=in_collection)
        except NotCarriedError as error:
            unsupported.append((label + tree_text(path), str(error)))
        else:
            records.append(record)
            arrays |= own
    return records, arrays
