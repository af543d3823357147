"""Print what flax.nnx.bridge and this package do, in the installed versions of Flax and JAX.

``python scripts/peer_defects.py`` runs the checks of all ``tests/*/test_peer_defects_*.py``, and
the lines of README's table, with both packages. ``python scripts/peer_defects.py ToLinen`` picks
the lines that have one of the words. The tests run only this package's side: what Flax mends must
not fail them. The exit code is 1 if this package fails a check, or if flax.nnx.bridge fails one in
another way than the check or the table says.
"""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
# What the tests run under; JAX reads it when it is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

HAS_IT, MENDED, PASSES = "has it", "mended", "passes"
AS_TOLD = "as the table says"


class Line(NamedTuple):
    """One line of the table.

    Attributes:
        name: The defect, or the line of README's table.
        of_peer: Runs it with flax.nnx.bridge and returns what to print.
        of_bridge: The same with this package.
        apart: Whether nothing can run after ``of_peer`` in the same process.
    """

    name: str
    of_peer: Callable[[], str]
    of_bridge: Callable[[], str]
    apart: bool = False


def short(error: BaseException) -> str:
    """Return an error in one line of a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"


def of_defect(name: str, defect: Any, peer: Any, bridge: Any) -> Line:
    """Return the line of a ``Defect`` of one of the test files."""

    def of_peer() -> str:
        try:
            defect.check(peer)
        except Exception as error:
            if isinstance(error, defect.raises) and defect.says in str(error):
                return f"{HAS_IT} ({type(error).__name__})"
            return f"fails in another way: {short(error)}"
        return MENDED

    def of_bridge() -> str:
        try:
            defect.check(bridge)
        except Exception as error:
            return f"FAILS: {short(error)}"
        return PASSES

    return Line(name, of_peer, of_bridge, defect.apart)


def of_readme(row: Any, peer: Any, bridge: Any) -> Line:
    """Return the line of what README's table says of both packages."""
    name, run, *expected = row

    def of(lib: Any, wanted: Any) -> Callable[[], str]:
        def result() -> str:
            try:
                found = run(lib)
            except Exception as error:
                told = isinstance(wanted, type) and isinstance(error, wanted)
                return AS_TOLD if told else f"fails in another way: {short(error)}"
            told = not isinstance(wanted, type) and found == wanted
            return AS_TOLD if told else f"not as the table says: {found!r}"

        return result

    return Line(f"README: {name}", of(peer, expected[0]), of(bridge, expected[1]))


def lines() -> list[Line]:
    """Return all lines: the defects by their numbers, and those of README's table."""
    from flax.nnx import bridge as peer

    import bridge
    from tests.bridge.test_readme_table import LINES

    found: list[Line] = []
    for file in sorted((ROOT / "tests").glob("*/test_peer_defects_*.py")):
        module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
        found += [of_defect(name, defect, peer, bridge) for name, defect in module.DEFECTS.items()]
    found.sort(key=lambda line: line.name)
    return [*found, *(of_readme(row, peer, bridge) for row in LINES)]


def of_peer_apart(name: str) -> str:
    """Return what ``of_peer`` of a line does in a process of its own."""
    run = subprocess.run(
        [sys.executable, __file__, name], capture_output=True, check=False, text=True
    )
    rows = [re.split("  +", row) for row in run.stdout.splitlines()]
    return next((row[1] for row in rows if row[0] == name), f"fails: {run.stderr[-100:]}")


def main(words: list[str]) -> int:
    """Print the table, and return the exit code."""
    from tests.bridge.peer import without_traces

    chosen = [e for e in lines() if not words or any(word in e.name for word in words)]
    ours = [line.of_bridge() for line in chosen]
    theirs = []
    for line in chosen:
        if line.apart and len(chosen) > 1:
            theirs.append(of_peer_apart(line.name))
            continue
        with without_traces():
            theirs.append(line.of_peer())
    table = [("what", "flax.nnx.bridge", "bridge")]
    table += [(line.name, a, b) for line, a, b in zip(chosen, theirs, ours, strict=True)]
    widths = [max(len(row[i]) for row in table) for i in (0, 1)]
    for what, a, b in table:
        print(f"{what:{widths[0]}}  {a:{widths[1]}}  {b}")
    print(f"Flax {version('flax')}, JAX {version('jax')}: {theirs.count(MENDED)} mended")
    known = (HAS_IT, MENDED, AS_TOLD)
    return int(not all(t.startswith(known) for t in theirs) or not {*ours} <= {PASSES, AS_TOLD})


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
