"""Silences the tracebacks of reads that end after another read of a checkpoint has failed."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

# How tensorstore's errors begin: with the name of a status.
_STATUS = re.compile(r"[A-Z]+(_[A-Z]+)*: ")


_installed: Any = None


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
