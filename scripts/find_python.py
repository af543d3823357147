"""Print the path of a Python for a leg of CI: ``newest``, ``oldest``, or such as ``3.12``.

A version is looked for as ``python3.N`` on the path, among pyenv's versions, and as ``python3``.
Runs on any Python 3.11 or newer, with nothing installed.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# JAX has wheels for a new Python some months after its release, so each is asked.
NEWEST = ("3.14", "3.13", "3.12")
_ASK = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"


def oldest_version() -> str:
    """Return the lowest Python that pyproject.toml admits."""
    bound = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    found = re.fullmatch(r">=(3\.\d+)", bound)
    if not found:
        raise SystemExit(f"requires-python: expected >=3.N, found {bound}")
    return found[1]


def candidates(version: str) -> Iterator[str]:
    """Yield the commands that may run a version, by name and from pyenv's folder."""
    yield f"python{version}"
    if pyenv := shutil.which("pyenv"):
        root = output(pyenv, "root") or ""
        yield from map(
            str, sorted(Path(root).glob(f"versions/{version}.*/bin/python"), reverse=True)
        )
    yield "python3"


def output(*command: str) -> str | None:
    """Return what a command prints, None if it fails."""
    try:
        run = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def executable(version: str) -> str | None:
    """Return the path of a Python that can make environments, None if there is none."""
    for command in candidates(version):
        # A version manager's stand-in exists for versions that it then refuses to run.
        if output(command, "-c", _ASK) == version:
            return output(command, "-c", "import sys; print(sys.executable)")
    return None


def has_jax(python: str) -> bool:
    """Tell whether pip finds a wheel of jaxlib for this Python."""
    with tempfile.TemporaryDirectory() as folder:
        # Not every Python has a pip of its own.
        output(python, "-m", "venv", folder)
        pip = str(Path(folder, "bin", "pip"))
        return output(pip, "index", "versions", "--only-binary", ":all:", "jaxlib") is not None


def find(which: str, usable: Callable[[str], bool] = has_jax) -> str:
    """Return the path of the Python that a leg runs with.

    Args:
        which: ``newest``, ``oldest``, or a version.
        usable: Whether a Python that was found can be the newest.

    Raises:
        SystemExit: There is none; the message says what was looked for.
    """
    if which == "newest":
        versions = NEWEST
    else:
        versions, usable = (oldest_version() if which == "oldest" else which,), lambda python: True
    for version in versions:
        python = executable(version)
        if python and usable(python):
            return python
    wanted = " or ".join(versions)
    raise SystemExit(
        f"no Python {wanted} with ensurepip: looked for python3.N, pyenv's versions and python3"
    )


if __name__ == "__main__":
    print(find(sys.argv[1]))
