"""The command line, `python -m bridge`: one subcommand per job.

A command lives in its own private package, which adds a parser and sets `run` to a function from
the parsed arguments to the exit code; what a command needs is imported only when it runs.
"""

import argparse
import importlib.metadata
import io
import sys
from collections.abc import Sequence

from bridge import _cli, _demo
from bridge._cli._command import UNUSABLE, complain, give_up

_COMMANDS = (_demo.add_command, *_cli.COMMANDS)

# What shells report for a program that Ctrl-C ended.
_INTERRUPTED = 130

_EPILOG = """\
exit codes:
  0  the command did its job and every check held
  1  a check failed, or what was compared differs
  2  wrong usage, or input that cannot be used
  3  an optional dependency is missing
  130  interrupted

examples:
  python -m bridge demo
  python -m bridge report bridge._demo._models:MixedDigitsCNN --input 1,8,8,1

'python -m bridge COMMAND --help' explains a command. Where a message names an argument of Python,
such as within= or rngs=, the option of that name is meant.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    `argv` has the arguments after `python -m bridge`; None takes them from the process. Raises
    SystemExit with code 2 for wrong usage or a closed stdout, with code 0 after `--help`.
    """
    parser = _parser()
    # Refuse early: a command would do its work first and then fail to show the result.
    if sys.stdout is None:
        parser.exit(UNUSABLE, f"{parser.prog}: stdout is closed\n")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Escape what the encoding cannot show, such as a name in Greek.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            arguments = parser.parse_args(argv)
            return arguments.run(arguments)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        complain(f"{parser.prog}: interrupted")
        return _INTERRUPTED
    except OSError as error:
        give_up(sys.stdout)
        complain(f"{parser.prog}: stdout: {error.strerror}")
        return UNUSABLE


def _parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m bridge",
        description="Tools for models that mix Flax Linen and Flax NNX.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # What a report of a fault should have.
    versions = [f"{name} {_version(name)}" for name in ("linen-nnx-bridge", "flax", "jax")]
    parser.add_argument("--version", action="version", version=", ".join(versions) + "\n")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for add_command in _COMMANDS:
        add_command(commands)
    return parser


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
