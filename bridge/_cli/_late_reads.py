"""Silences the tracebacks of reads that end after another read of a checkpoint has failed."""

from __future__ import annotations

import sys
from typing import Any


def silence_late_reads() -> None:
    """Leaves them out of stderr, for the rest of this process.

    Orbax closes its event loop with the first array that cannot be read. Tensorstore wants to tell
    that loop of the others, and Python prints a traceback for each; the command's error names all
    arrays that cannot be read.
    """
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not _is_late_read(unraisable.exc_value):
            before(unraisable)

    sys.unraisablehook = hook


def _is_late_read(error: BaseException | None) -> bool:
    if not isinstance(error, RuntimeError) or str(error) != "Event loop is closed":
        return False
    first = error.__traceback__
    return first is not None and first.tb_frame.f_code.co_name == "call_soon_threadsafe"
