"""The Pythons that CI's legs run on, looked for among stand-ins."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_project import CI, PROJECT, ROOT

_spec = importlib.util.spec_from_file_location("find_python", ROOT / "scripts/find_python.py")
find_python = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(find_python)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A path with nothing on it, and what puts commands there that answer as a Python would."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def add(name, version="", folder=tmp_path):
        folder.mkdir(parents=True, exist_ok=True)
        command = folder / name
        answer = f'case "$2" in *version_info*) echo {version};; *) echo "$0";; esac'
        command.write_text(f"#!/bin/sh\n{answer if version else 'exit 127'}\n")
        command.chmod(0o755)
        return str(command)

    return add


def anything(_python):
    return True


def test_the_newest_python_that_jax_has_wheels_for_is_the_newest(machine):
    machine("python3.12", "3.12")
    newest, too_new = machine("python3.13", "3.13"), machine("python3.14", "3.14")
    assert find_python.find("newest", usable=anything) == too_new
    assert find_python.find("newest", usable=lambda python: python != too_new) == newest


def test_a_version_manager_s_stand_in_that_refuses_is_passed_over(machine, tmp_path):
    machine("python3.13")
    pyenv = Path(machine("pyenv", "unused"))
    pyenv.write_text(f"#!/bin/sh\necho {tmp_path}/pyenv-root\n")
    found = machine("python", "3.13", tmp_path / "pyenv-root/versions/3.13.0/bin")
    assert find_python.find("newest", usable=anything) == found


def test_python3_is_taken_for_the_version_that_it_is(machine):
    found = machine("python3", "3.12")
    assert find_python.find("3.12") == found
    assert find_python.find("newest", usable=anything) == found
    with pytest.raises(SystemExit):
        find_python.find("oldest")


def test_a_missing_python_is_one_sentence():
    run = subprocess.run(
        [sys.executable, ROOT / "scripts/find_python.py", "3.99"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert re.fullmatch(r"no Python 3\.99 with ensurepip: looked for .*\n", run.stderr)


def test_a_leg_whose_python_may_be_lacking_is_left_out():
    function = re.search(r"^python_for\(\) \{.*?^\}", CI, re.DOTALL | re.MULTILINE)[0]
    bash = f'set -e\n{function}\nfound=$(python_for 3.99)\necho "left out: $found"'
    for may_lack, code in (("", 1), ("oldest", 1), ("3.99", 0), ("oldest 3.99", 0)):
        run = subprocess.run(
            ["bash", "-c", bash],
            cwd=ROOT,
            check=False,
            env={**os.environ, "CI_MAY_LACK": may_lack},
            capture_output=True,
            text=True,
        )
        assert run.returncode == code, may_lack
        assert run.stdout == ("" if code else "left out: \n")


def test_the_classifiers_name_the_pythons_that_ci_runs():
    prefix = "Programming Language :: Python :: 3."
    named = {
        f"3.{c.removeprefix(prefix)}" for c in PROJECT["project"]["classifiers"] if prefix in c
    }
    between = re.search(r"between=\$\(python_for (3\.\d+)\)", CI)[1]
    # JAX may have no wheels yet for the first of the newest.
    first, *rest = find_python.NEWEST
    assert {find_python.oldest_version(), between} <= named
    assert named <= {find_python.oldest_version(), between, first, *rest}
    assert named & {first, *rest}
    assert PROJECT["tool"]["pyright"]["pythonVersion"] == find_python.oldest_version()
