"""Writes a checkpoint: one orbax tree for the model, one for each extra, and notes in JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp

from bridge._conversion.neutral import nest

from . import _notes, _orbax_saves
from ._contents import contents_of
from ._files import NOTES
from ._publish import publishing


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
    side, contents = contents_of(tree, rngs=rngs, extra=extra or {}, digests=digests)
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
      overwrite: whether a checkpoint at `path` is replaced. The old one is there until the new one
        is finished, and they change places in one step. Nothing else is replaced: a directory that
        holds anything but a checkpoint, a file, a link, the current directory.
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
        _orbax_saves.write(new, ocp.CompositeCheckpointHandler(), args)
