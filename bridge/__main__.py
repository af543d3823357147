"""The command line, `python -m bridge`: one subcommand per job.

A command lives in its own private package, which adds a parser and sets `run` to a function from
the parsed arguments to the exit code; what a command needs is imported only when it runs.
"""

import argparse
import sys
from collections.abc import Sequence

from bridge import _cli, _demo

_COMMANDS = (_demo.add_command, *_cli.COMMANDS)

_EPILOG = """\
exit codes:
  0  the command did its job and every check held
  1  a check failed, or what was compared differs
  2  wrong usage, or input that cannot be used
  3  an optional dependency is missing

examples:
  python -m bridge demo
  python -m bridge report bridge._demo._models:MixedDigitsCNN --input 1,8,8,1

'python -m bridge COMMAND --help' explains a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after `python -m bridge`; None takes them from the process.

    Returns:
        The exit code.

    Raises:
        SystemExit: with code 2 for wrong usage, with code 0 after `--help`.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bridge",
        description="Tools for models that mix Flax Linen and Flax NNX.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add_command in _COMMANDS:
        add_command(commands)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
