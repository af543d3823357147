"""The table of versions, with answers that do not come from pip."""

import runpy
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "versions.py"))


def rows(newest):
    lines = SCRIPT["table"](newest).splitlines()
    return {line.split()[0]: line.split()[1:] for line in lines[1:]}


def test_the_table_has_all_dependencies_and_those_of_the_tests():
    found = rows(lambda name: None)
    wanted = {"flax", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "qwix", "pytest"}
    assert wanted <= found.keys()
    # Of the extras that the tests need, not this package itself.
    assert {"matplotlib", "scikit-learn", "safetensors"} <= found.keys()
    assert "linen-nnx-bridge" not in found
    assert found["python"] == [">=3.11", sys.version.split()[0]]


def test_a_newer_version_is_marked():
    newest = {"flax": "99.1", "jax": version("jax")}
    found = rows(newest.get)
    assert found["flax"][1:] == [version("flax"), "99.1", "*"]
    assert found["jax"][1:] == [version("jax"), version("jax")]


def test_where_pip_cannot_answer_the_table_says_so():
    assert rows(lambda name: None)["numpy"][1:] == [version("numpy"), "pip", "cannot", "say"]


@pytest.mark.parametrize(
    ("code", "output", "found"),
    [
        (0, "some-package (1.2.3)\nAvailable versions: 1.2.3, 1.2\n", "1.2.3"),
        (1, "", None),
        (0, "an answer of another form\n", None),
    ],
)
def test_the_newest_version_is_what_pip_says(monkeypatch, code, output, found):
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, code, output, "")

    monkeypatch.setattr(subprocess, "run", run)
    assert SCRIPT["newest_of_pip"]("some-package") == found
    assert commands == [[sys.executable, "-m", "pip", "index", "versions", "some-package"]]
