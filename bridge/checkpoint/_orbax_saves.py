"""Lets orbax write one tree at a time, however many threads save."""

from __future__ import annotations

import threading
from typing import Any

import orbax.checkpoint as ocp

from ._late_reads import silence_late_reads

_writing = threading.Lock()


def write(path: Any, handler: Any, args: Any) -> None:
    """Writes a tree with orbax.

    Orbax numbers the saves of a process, and every thread of a save waits for the signals of the
    process's newest number (orbax-checkpoint 0.12.8, `OperationIdGenerator`). Two saves at once
    wait for each other's signals, and create or remove directories that the other one is using,
    even if their paths differ. So saves of this process wait here for each other.

    Args:
      path: the directory to write to.
      handler: an orbax handler.
      args: what the handler saves.
    """
    silence_late_reads()
    with _writing, ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=args)
