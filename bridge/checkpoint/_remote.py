"""Saving to object stores, which have no directories and cannot rename in one step."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

from bridge._errors import CheckpointError

from ._files import find
from ._processes import Agreement, from_first, is_first


@contextlib.contextmanager
def publishing(where: Any, *, overwrite: bool) -> Iterator[Any]:
    """A block that writes a checkpoint to a remote path; see `_publish.publishing`.

    Where nothing is, orbax writes to the path itself and marks the checkpoint as complete at last.
    Otherwise both checkpoints are there, under one name or another, until the new one has the path.
    """
    exists = where.exists()
    if exists and not overwrite:
        raise CheckpointError(
            "there is something already at", where, "Pass overwrite=True to replace it."
        )
    if not exists:
        yield where
        return
    check_replaceable(where)
    token = from_first(secrets.randbits(64))
    new, old = (where.with_name(f"{where.name}.bridge-{n}-{token:016x}") for n in ("new", "old"))
    try:
        yield new
    except BaseException:
        if is_first() and new.exists():
            new.rmtree()
        raise
    with Agreement(where, "could not save"):
        if is_first():
            where.rename(old)
            try:
                new.rename(where)
            except Exception as error:
                raise CheckpointError(
                    "a save was interrupted at",
                    where,
                    f"What was there is complete in {old}, the new checkpoint in {new}.",
                ) from error
            old.rmtree()


def check_replaceable(where: Any) -> None:
    """Raises CheckpointError if something else than a checkpoint is at a remote path."""
    if find(where).path != where:
        raise CheckpointError("there is a directory that is no checkpoint at", where, "Remove it.")
