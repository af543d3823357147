"""Writes a checkpoint: one orbax tree for the model, one for each extra, and notes in JSON."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

from bridge._conversion.neutral import nest
from bridge._errors import CheckpointError, bullets, warn
from bridge._types import ModelTree

from . import _digests, _notes
from ._failures import agreed, reported
from ._files import NOTES, VARIABLES
from ._json import NotCarriedError
from ._publish import publishing
from ._stored import Names, Record, is_rng, record_of, tree_text, writable
from ._targets import TargetTree, empty_wrappers, tree_of
from ._training import linen_state

_writing = threading.Lock()


def save_args(
    tree: ModelTree,
    *,
    rngs: bool = True,
    extra: Mapping[str, Any] | None = None,
    digests: bool = True,
    layout: str = "bridge",
) -> ocp.args.Composite | ocp.args.PyTreeSave:
    """Arguments with which orbax's own `CheckpointManager` and checkpointers write a model.

    Args:
      tree: as for `save`.
      rngs: as for `save`.
      extra: as for `save`.
      digests: as for `save`.
      layout: as for `save`.

    Returns:
      Arguments for `CheckpointManager.save(step, args=…)`. `restore` reads the step's directory.

    Raises:
      CheckpointError: a leaf or a key cannot be stored (the error lists every one), or there is no
        such layout.
      ConversionError: `tree` is not one of the forms listed above.

    Example::

      >>> import jax.numpy as jnp
      >>> from bridge import checkpoint
      >>> sorted(checkpoint.save_args({'params': {'w': jnp.ones(2)}}))
      ['bridge', 'variables']
    """
    if layout not in ("bridge", "linen"):
        raise CheckpointError(f"there is no layout {layout!r}", "", "Give 'bridge' or 'linen'.")
    with agreed("", "could not save"), reported("these values cannot be saved", ""):
        if layout == "linen":
            return _linen_args(tree, extra or {})
        trees = _trees(tree, extra or {})
        records, arrays = _recorded(trees, rngs)
        if isinstance(tree, nnx.Pytree):
            _check_initialized(tree, trees[VARIABLES])
        parts = [_digests.own_part(array) for array in arrays.values()] if digests else []
    # All processes reach this line because they agreed before; otherwise one would wait forever.
    texts = dict(zip(arrays, _digests.texts_of(parts), strict=True)) if digests else None
    notes = _notes.write(trees[VARIABLES].side, records, texts)
    items = {name: ocp.args.PyTreeSave(own) for name, own in nest(arrays).items()}
    return ocp.args.Composite(**items, **{NOTES: ocp.args.JsonSave(notes)})


def save(
    path: str | os.PathLike[str],
    tree: ModelTree,
    *,
    rngs: bool = True,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    digests: bool = True,
    layout: str = "bridge",
) -> None:
    """Saves a model: the same checkpoint, whichever side it is saved from.

    In a program of several processes all of them call this, and each writes its own shards. If
    every process has an array of its own, such as the key of a local `nnx.Rngs`, that of the first
    process is stored. Threads may save at once, and so may programs that save to one path: they
    wait for each other.

    Args:
      path: the directory of the checkpoint. It appears when everything is on the disk. Missing
        directories above it are made.
      tree: Linen variables, an NNX module (native, ToNNX or mixed) or an `nnx.State`, with arrays
        on any devices. A collection `nnx` is static and is not stored. For a ToNNX that
        `bridge.lazy_init` has not initialised nothing is stored, with a `BridgeWarning`.
      rngs: False leaves out RNG state, including that of the wrappers.
      extra: other trees by name: an `nnx.Optimizer`, an optax state, a step, any pytree of arrays
        and numbers.
      overwrite: whether to replace a checkpoint at `path`. The old one can be restored until the
        new one is finished. Only a checkpoint is replaced: not a directory that holds anything
        else, a file, a link, the current directory, or anything in an object store.
      digests: whether to store digests of the arrays; `restore(…, verify=True)` finds damage by
        them.
      layout: `'linen'` for a tree that a Linen program can restore with orbax alone: the
        collections, and `opt_state` and `step` in place of an `nnx.Optimizer`. RNG state and
        digests are left out, because that tree has no place for them.

    Raises:
      CheckpointError: `path` exists already, a leaf or key cannot be stored (the error lists every
        one), or the system cannot write the files. `path` is then as it was, and nothing temporary
        is left.
      ConversionError: `tree` is not one of the forms listed above.

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
        args = save_args(tree, rngs=rngs, extra=extra, digests=digests, layout=layout)
        is_tree = isinstance(args, ocp.args.PyTreeSave)
        write(
            new,
            ocp.PyTreeCheckpointHandler() if is_tree else ocp.CompositeCheckpointHandler(),
            args,
        )


def write(path: Any, handler: Any, args: Any) -> None:
    """Writes a tree with orbax.

    Orbax numbers the saves of a process, and every thread of a save waits for the signals of the
    process's newest number (orbax-checkpoint 0.12.8, `OperationIdGenerator`). Two saves at once
    wait for each other's signals, and create or remove directories that the other one is using,
    even if their paths differ. So saves of this process wait here for each other.
    """
    with _writing, ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=args)


def _linen_args(tree: Any, extra: Mapping[str, Any]) -> ocp.args.PyTreeSave:
    if isinstance(tree, nnx.Pytree):
        _check_initialized(tree, tree_of(tree))
    state = linen_state(tree, extra)
    # The error of orbax would name no leaf.
    _recorded({VARIABLES: tree_of(state, as_pytree=True)}, rngs=True)
    return ocp.args.PyTreeSave(jax.tree.map(writable, state))


def _trees(tree: Any, extra: Mapping[str, Any]) -> dict[str, TargetTree]:
    trees = {VARIABLES: tree_of(tree)}
    for name, value in extra.items():
        if name in (NOTES, VARIABLES) or not name.isidentifier():
            problem = f"an extra tree cannot be called {name!r}; it needs another identifier"
            raise CheckpointError(problem, "", "The checkpoint's own trees have these names.")
        trees[name] = tree_of(value, as_pytree=True)
    return trees


def _recorded(
    trees: Mapping[str, TargetTree], rngs: bool
) -> tuple[dict[str, list[Record]], dict[Names, Any]]:
    """The leaves of each tree, and their arrays by the name of the tree and their own."""
    records: dict[str, list[Record]] = {name: [] for name in trees}
    arrays: dict[Names, Any] = {}
    unsupported: list[tuple[str, str]] = []
    for name, tree in trees.items():
        in_collection = tree.side != "pytree"
        for path, leaf in tree.leaves.items():
            if not rngs and in_collection and is_rng(path):
                continue
            try:
                record, own = record_of(path, leaf, in_collection=in_collection)
            except NotCarriedError as error:
                label = "" if name == VARIABLES else f"{name}: "
                unsupported.append((label + tree_text(path), str(error)))
            else:
                records[name].append(record)
                arrays |= {(name, *names): array for names, array in own.items()}
    if unsupported:
        raise CheckpointError(
            "these leaves cannot be stored in a checkpoint",
            "",
            "Remove them from the tree, or store arrays and numbers instead.",
            unsupported=unsupported,
        )
    return records, arrays


def _check_initialized(model: nnx.Pytree, tree: TargetTree) -> None:
    empty = [tree_text(path) if path else "the model" for path in empty_wrappers(model)]
    if empty and all(map(is_rng, tree.leaves)):
        raise CheckpointError(
            "there are no variables to save in this model",
            "",
            "Call bridge.lazy_init first.",
            unsupported=[(place, "a ToNNX without any") for place in empty],
        )
    if empty:
        warn(
            "the checkpoint has no variables of these ToNNX, which lazy_init has not initialised:"
            f"{bullets(empty)}\nCall bridge.lazy_init(model, *inputs) before you save; for one that"
            " only another method calls, bridge.lazy_init(model.method, *inputs)."
        )
