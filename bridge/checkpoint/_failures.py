"""What saving and restoring raise: errors of the bridge, whatever orbax and the system raise."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator

from bridge._errors import BridgeError, CheckpointError

# How tensorstore writes the number of a system error.
_CODE = re.compile(r"\[os_error_code='(\d+)'\]")


@contextlib.contextmanager
def reported(what: str, path: object, remedy: str = "") -> Iterator[None]:
    """A block whose errors are errors of the bridge.

    Args:
      what: what was not done, up to the path.
      path: the checkpoint's.
      remedy: what holds after an error, and what to do.

    Raises:
      CheckpointError: the block raised an error that is not the bridge's.
    """
    try:
        yield
    except BridgeError:
        raise
    except Exception as error:
        text = reason(error)
        failure = CheckpointError(what, path, f"{text.rstrip('.')}. {remedy}".rstrip())
        # The reason says everything about a full disk; a traceback through orbax adds nothing.
        raise failure from (None if is_of_system(error) else error)


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
    return lines[0][:200] if lines else type(error).__name__


def is_of_system(error: BaseException) -> bool:
    """Whether the operating system refused something."""
    return _code(error) is not None


def _code(error: BaseException) -> int | None:
    """The number of a system error, also of one that tensorstore reports as text."""
    if isinstance(error, OSError):
        return error.errno
    found = _CODE.search(str(error))
    if found:
        return int(found[1])
    return errno.ENOSPC if os.strerror(errno.ENOSPC) in str(error) else None
