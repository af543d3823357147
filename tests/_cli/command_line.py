"""Runs the command line: in this process, or in one of its own as a user does."""

import json
import subprocess
import sys
from typing import NamedTuple

from bridge import __main__, _cli
from tests import processes

# Every command but the demo.
COMMANDS = [add_command.__module__.split(".")[2] for add_command in _cli.COMMANDS]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self):
        return json.loads(self.out)


def run(capsys, *arguments):
    """The exit code and the output of a command, here."""
    capsys.readouterr()
    try:
        code = __main__.main([str(argument) for argument in arguments])
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    return Outcome(code, captured.out, captured.err)


def start(*arguments, **options):
    """The same in a process of its own, which has no terminal."""
    done = processes.run_module("bridge", *arguments, **options)
    return Outcome(done.returncode, done.stdout, done.stderr)


def start_new(*arguments, **options):
    """The same in a new process, where imports and the end of the interpreter count too."""
    command = [sys.executable, "-m", "bridge", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, **options
    )
    return Outcome(done.returncode, done.stdout, done.stderr)
