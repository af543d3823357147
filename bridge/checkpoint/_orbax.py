"""Calls orbax: one save at a time, and without the failures that it prints besides raising them."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import orbax.checkpoint as ocp

# How tensorstore's errors begin: with the name of a status.
_STATUS = re.compile(r"[A-Z]+(_[A-Z]+)*: ")

_writing = threading.Lock()
_installed: Any = None


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


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """A block in which orbax does not log the errors that it raises as well.

    Its threads log each failure with a traceback. If the block ends without an error, what was
    logged belongs to somebody else's checkpoint, and is logged then.
    """
    logger = logging.getLogger("absl")
    held: list[logging.LogRecord] = []

    def is_shown(record: logging.LogRecord) -> bool:
        is_failure = record.levelno >= logging.ERROR and "orbax" in record.pathname
        if is_failure:
            held.append(record)
        return not is_failure

    logger.addFilter(is_shown)
    try:
        yield
    except BaseException:
        held.clear()
        raise
    finally:
        logger.removeFilter(is_shown)
        for record in held:
            logger.handle(record)


def silence_late_reads() -> None:
    """Leaves them out of stderr, from the first read or save of this process on.

    Orbax stops waiting at the first array that cannot be read, and closes its event loop. A read
    that fails before the loop is closed leaves an error that nobody asks for, and asyncio logs it;
    of one that ends later tensorstore wants to tell the closed loop, and Python prints a traceback.
    The error of the read names all arrays that cannot be read. Other errors go where they went.
    """
    global _installed  # noqa: PLW0603
    before = sys.unraisablehook
    if before is _installed:
        return

    def hook(unraisable: Any) -> None:
        if not _is_refused_by_loop(unraisable.exc_value):
            before(unraisable)

    sys.unraisablehook = _installed = hook
    logging.getLogger("asyncio").addFilter(_is_of_others)


def _is_refused_by_loop(error: BaseException | None) -> bool:
    if not isinstance(error, RuntimeError) or str(error) != "Event loop is closed":
        return False
    first = error.__traceback__
    return first is not None and first.tb_frame.f_code.co_name == "call_soon_threadsafe"


def _is_of_others(record: logging.LogRecord) -> bool:
    """Whether a record of asyncio says anything else than that nobody asked for a failed read."""
    if "exception was never retrieved" not in str(record.msg) or not record.exc_info:
        return True
    error = record.exc_info[1]
    return not (isinstance(error, ValueError) and _STATUS.match(str(error)))
