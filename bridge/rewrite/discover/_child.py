"""Runs a command in a process of its own that records its Linen calls."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bridge.rewrite._failures import RewriteError, said

from . import _recorder

_GRACE = 5.0
_LAST_LINES = 12
# Starts the recorder, and then what else there is of this name.
_SITE = """\
import importlib.util, sys
sys.path.remove({site!r})
spec = importlib.util.spec_from_file_location("bridge_recorder", {recorder!r})
sys.modules["bridge_recorder"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.start({root!r}, {folder!r})
del sys.modules["sitecustomize"]
try:
    import sitecustomize
except ImportError:
    pass
"""


def records_of(
    command: Sequence[str],
    root: pathlib.Path,
    *,
    allow_failure: bool,
    on_progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Runs a command, and returns what its Linen calls were.

    The command runs in the folder `root` of the project. It and what it starts are ended with this
    process. With `allow_failure`, the records count although the command fails. `on_progress` is
    given a line about what goes on. Raises RewriteError if the command cannot be started, or if it
    fails.
    """
    with tempfile.TemporaryDirectory(prefix="bridge-discover-") as name:
        folder = pathlib.Path(name)
        site = folder / "site"
        site.mkdir()
        text = _SITE.format(
            site=str(site), recorder=_recorder.__file__, root=str(root), folder=name
        )
        (site / "sitecustomize.py").write_text(text, encoding="utf-8")
        environment = {
            **os.environ,
            "PYTHONPATH": _before(str(site), "PYTHONPATH"),
            # `python` and `pytest` are those of this environment.
            "PATH": _before(os.path.dirname(sys.executable), "PATH"),
        }
        output = folder / "output"
        with output.open("wb") as file:
            code = _run(command, root, environment, file, on_progress)
        if code and not allow_failure:
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
            ended = f"failed with exit code {code}" if code > 0 else f"was ended by {_name(-code)}"
            raise RewriteError(
                f"the command {ended}, so nothing is rewritten",
                [shlex.join(command), *lines[-_LAST_LINES:]],
                "Correct the command, or pass --allow-failure to use what it recorded before.",
            )
        return [each for file in sorted(folder.glob("*.records")) for each in _read(file)]


def _before(folder: str, variable: str) -> str:
    """A folder before those that a variable of the environment lists."""
    return os.pathsep.join(filter(None, (folder, os.environ.get(variable))))


def _run(
    command: Sequence[str],
    root: pathlib.Path,
    environment: dict[str, str],
    output: Any,
    on_progress: Callable[[str], None],
) -> int:
    on_progress(f"running {shlex.join(command)}")
    try:
        # A group of its own ends as a whole, also the workers of a test runner.
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise RewriteError(
            "the command cannot be started",
            [f"{shlex.join(command)}: {said(error)}"],
            "Write it behind -- as in a shell, such as -- pytest tests.",
        ) from error
    try:
        return process.wait()
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a command that still runs, and what it has started and left behind."""
    try:
        if process.poll() is None:
            _signal(process, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
    finally:
        # Also where the user interrupts the wait.
        _signal(process, signal.SIGKILL)
        process.wait()


def _name(number: int) -> str:
    """The name of a signal."""
    return signal.Signals(number).name


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Sends a signal to the whole group, if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _read(file: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The records of one process, whose last one may be cut off."""
    with file.open("rb") as opened, contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            yield pickle.load(opened)
