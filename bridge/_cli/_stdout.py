"""Keeps stdout for one document, whatever the program prints that a command runs."""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
from collections.abc import Iterator
from typing import TextIO

_reserved: contextvars.ContextVar[TextIO | None] = contextvars.ContextVar("stdout", default=None)


def document_stream() -> TextIO:
    """Where the document goes: stdout, as it was before `for_document`."""
    return _reserved.get() or sys.stdout


@contextlib.contextmanager
def for_document() -> Iterator[None]:
    """A block in which all that is printed goes to stderr, except to `document_stream`.

    What C code or a child process writes to descriptor 1 goes there too, if stdout is that.
    """
    out = sys.stdout
    with contextlib.ExitStack() as stack:
        if _is_descriptor(out, 1) and _is_descriptor(sys.stderr, 2):
            out.flush()
            kept = os.dup(1)
            os.dup2(2, 1)
            stack.callback(_put_back, kept)
            encoding, errors = getattr(out, "encoding", "utf-8"), getattr(out, "errors", None)
            document = open(  # noqa: SIM115 (the stack closes it)
                os.dup(kept), "w", encoding=encoding, errors=errors
            )
            stack.callback(_close, document)
        else:
            document = out
        token = _reserved.set(document)
        stack.callback(_reserved.reset, token)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def _is_descriptor(stream: TextIO, number: int) -> bool:
    try:
        return stream.fileno() == number
    except (AttributeError, OSError, ValueError):
        return False


def _close(document: TextIO) -> None:
    # What could not be written has raised before.
    with contextlib.suppress(OSError):
        document.close()


def _put_back(kept: int) -> None:
    os.dup2(kept, 1)
    os.close(kept)
