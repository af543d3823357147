"""Puts the program together as it stands after each step, and shows what its tests say."""

import contextlib
import io
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from xml.etree import ElementTree

from bridge.__main__ import main

PROJECT = pathlib.Path(__file__).parent
DIRECTORY = tempfile.TemporaryDirectory()
WORKSPACE = pathlib.Path(DIRECTORY.name)


def prepare():
    """Makes the packages `step_0` to `step_4`, and runs their tests in a process of their own.

    Returns:
        What the tests printed and which of them passed, for `show_tests`.
    """
    for step in range(5):
        for number in range(step + 1):
            own = PROJECT / f"step_{number}"
            shutil.copytree(own, WORKSPACE / f"step_{step}", dirs_exist_ok=True)
    sys.path.insert(0, DIRECTORY.name)
    # In one process, what the steps share compiles once.
    command = [sys.executable, "-m", "pytest", "-q", "--junit-xml=results.xml"]
    command += ["-o", "junit_logging=system-out", *(f"step_{step}" for step in range(5))]
    # Without what the caller's own pytest and coverage were told.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))}
    ran = subprocess.run(
        command, cwd=WORKSPACE, env=environment, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        print(ran.stdout, ran.stderr)
    return ElementTree.parse(WORKSPACE / "results.xml")


def show_tests(results, step):
    """Shows how many of a step's tests passed, those that failed, and what they print."""
    cases = [
        case
        for case in results.iter("testcase")
        if case.get("classname").startswith(f"step_{step}.")
    ]
    failed = [
        case.get("name")
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    print(len(cases) - len(failed), "tests passed")
    print(*(f"FAILED {name}\n" for name in failed), sep="", end="")
    for case in cases:
        printed = case.findtext("system-out", "").partition("Captured Out")[2].strip(" -\n")
        if printed:
            print(printed)


def report(step, only=""):
    """Shows what `python -m bridge report` prints, or those of its lines that begin so."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["report", f"step_{step}.model:create_model"])
    lines = filter(None, printed.getvalue().splitlines())
    print(*(line for line in lines if line.startswith(only)), sep="\n")


def clean_up():
    """Removes the packages again."""
    sys.path.remove(DIRECTORY.name)
    DIRECTORY.cleanup()
