"""Print the installed versions of Python and the dependencies beside the newest that pip knows.

``python scripts/versions.py`` asks pip for each dependency of pyproject.toml, also for those of the
tests. pip names the newest version for the Python that runs it; another Python may get another.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
UNKNOWN = "pip cannot say"


def dependencies() -> dict[str, str]:
    """Return the bound of each dependency by its name, those of the tests last."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"]]
    left = ["test"]
    while left:
        for text in extras[left.pop()]:
            own = re.fullmatch(rf"{project['name']}\[(.*)\]", text)
            if own is None:
                texts.append(text)
            else:
                left += own[1].split(",")
    found = (re.fullmatch(r"([\w-]+)(?:\[.*\])?(.*)", text) for text in texts)
    return {match[1]: match[2] for match in found if match}


def newest_of_pip(name: str) -> str | None:
    """Return the newest version of a package for this Python, None if pip cannot say."""
    command = [sys.executable, "-m", "pip", "index", "versions", name]
    run = subprocess.run(command, capture_output=True, check=False, text=True)
    found = re.match(r"\S+ \((\S+)\)", run.stdout)
    return found[1] if run.returncode == 0 and found else None


def installed(name: str) -> str:
    """Return the installed version of a package, a dash if there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


def table(newest: Callable[[str], str | None]) -> str:
    """Return the table, with a mark in the lines whose newest version is not installed.

    Args:
        newest: Returns the newest version of a package by its name, None if it is unknown.
    """
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    rows = [("", "supported", "installed", "newest", "")]
    rows.append(("python", project["requires-python"], sys.version.split()[0], "", ""))
    for name, bound in dependencies().items():
        here, there = installed(name), newest(name)
        mark = "*" if there not in (None, here) else ""
        rows.append((name, bound, here, there or UNKNOWN, mark))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(newest_of_pip))
