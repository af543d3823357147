"""The line of the user's program that an error comes from."""

from __future__ import annotations

import pathlib
import sysconfig
import traceback

_OURS = pathlib.Path(__file__).parents[1]
_INSTALLED = tuple(
    pathlib.Path(path).resolve() for path in {*sysconfig.get_paths().values()} if path
)


def user_place(error: BaseException) -> str | None:
    """File and line of the innermost call in the user's own program.

    Flax, JAX and this package raise most errors, but the line to change is in the program. None if
    no code of the program was running.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_of_user(frame.filename)]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else None


def is_of_user(filename: str) -> bool:
    """Whether a file of Python belongs to the user's program, and not to an installed package."""
    if filename.startswith("<"):
        return False
    path = pathlib.Path(filename).resolve()
    if path.is_relative_to(_OURS):
        # The demo is a program that is run, as a user's.
        return path.is_relative_to(_OURS / "_demo")
    return not any(path.is_relative_to(installed) for installed in _INSTALLED)
