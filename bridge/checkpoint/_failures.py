"""Makes errors of the bridge of those that orbax and the system raise.

Orbax also logs and prints the errors that it raises; that is kept out of stderr.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from bridge._errors import BridgeError, CheckpointError

# How tensorstore writes the number of a system error.
_CODE = re.compile(r"\[os_error_code='(\d+)'\]")
# How tensorstore's errors begin: with the name of a status.
_STATUS = re.compile(r"[A-Z]+(_[A-Z]+)*: ")

_installed: Any = None


@contextlib.contextmanager
def reported(what: str, path: object, remedy: str = "") -> Iterator[None]:
    """Turns the errors of a block into errors of the bridge.

    `what` was not done, up to the path. `remedy` says what holds after an error, and what to do.
    Raises CheckpointError for an error of the block that is not the bridge's.
    """
    try:
        yield
    except BridgeError:
        raise
    except Exception as error:
        text = reason(error)
        failure = CheckpointError(what, path, f"{text.rstrip('.')}. {remedy}".rstrip())
        # The reason says everything about a full disk; a traceback through orbax adds nothing.
        raise failure from (error if _code(error) is None else None)


@contextlib.contextmanager
def agreed(path: object, failure: str = "could not restore") -> Iterator[None]:
    """A block that ends well on all processes of a program, or with an error on all of them.

    Without it one process would go on with the old model, and the others with the new one; or it
    would wait for a process that has given up. `failure` says what the processes that raised an
    error of their own could not do.
    """
    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        if jax.process_count() > 1:
            failed = multihost_utils.process_allgather(np.asarray(has_failed))
            if failed.any() and not has_failed:
                raise CheckpointError(
                    f"processes {[i for i, bad in enumerate(failed) if bad]} {failure}",
                    path,
                    "Their errors say why. Nothing was changed in memory.",
                )


def reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    found = _code(error)
    if found is not None:
        names = getattr(error, "filename", None), getattr(error, "filename2", None)
        where = " -> ".join(os.fsdecode(name) for name in names if isinstance(name, str | bytes))
        return f"{os.strerror(found)} ({where})" if where else os.strerror(found)
    if isinstance(error, KeyError):
        # Its text is the key alone.
        return f"there is no entry {error}"
    lines = [line for line in str(error).splitlines() if line.strip()]
    # Tensorstore appends all of its options.
    return lines[0].partition(" [tensorstore_spec")[0] if lines else type(error).__name__


def _code(error: BaseException) -> int | None:
    """The number of a system error, also of one that tensorstore reports as text."""
    if isinstance(error, OSError):
        return error.errno
    found = _CODE.search(str(error))
    if found:
        return int(found[1])
    return errno.ENOSPC if os.strerror(errno.ENOSPC) in str(error) else None


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """A block in which orbax does not also log, with tracebacks, the errors that it raises."""
    silence_late_reads()
    logger = logging.getLogger("absl")

    def is_shown(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or "orbax" not in record.pathname

    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)


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
