"""The script that compares with flax.nnx.bridge: what it says of a check, and that it runs."""

import runpy
from pathlib import Path

import pytest

from tests.bridge.peer import Defect

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "peer_defects.py"))


def raising(error):
    def check(package):
        if package == "peer" and error is not None:
            raise error

    return check


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("no mesh is set"), "has it (ValueError)"),
        (None, "mended"),
        (ValueError("another one"), "fails in another way: ValueError: another one"),
        (NameError("a typo"), "fails in another way: NameError: a typo"),
    ],
)
def test_only_the_expected_error_counts_as_the_defect(error, told):
    defect = Defect(raising(error), ValueError, "no mesh")
    line = SCRIPT["of_defect"]("a defect", defect, "peer", "bridge")
    assert line.of_peer() == told
    assert line.of_bridge() == "passes"


@pytest.mark.parametrize(
    ("expected", "told"),
    [
        (ValueError, "as the table says"),
        (KeyError, "fails in another way: ValueError: no mesh is set"),
        (3, "fails in another way: ValueError: no mesh is set"),
    ],
)
def test_a_line_of_the_readme_is_as_it_says_or_not(expected, told):
    row = ("a job", raising(ValueError("no mesh is set")), expected, None)
    line = SCRIPT["of_readme"](row, "peer", "bridge")
    assert line.of_peer() == told
    assert line.of_bridge() == "as the table says"
    row = ("a job", lambda package: 4, expected, 4)
    assert SCRIPT["of_readme"](row, "peer", "bridge").of_peer() == "not as the table says: 4"


def test_every_defect_has_a_line_of_its_own():
    names = [line.name for line in SCRIPT["lines"]() if not line.name.startswith("README: ")]
    assert len(names) == len(set(names))
    assert {int(name[:2]) for name in names} == set(range(1, 27))


def test_the_script_prints_what_both_packages_do(capsys):
    SCRIPT["main"](["26", "README: `lazy_init`"])
    _, *rows, versions = capsys.readouterr().out.splitlines()
    assert len(rows) == 11
    assert all(row.endswith(("  passes", "  as the table says")) for row in rows)
    assert versions.startswith("Flax ")
