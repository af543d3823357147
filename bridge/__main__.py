"""The command line, `python -m bridge`: one subcommand per job.

A command lives in its own private package, which adds a parser and sets `run` to a function from
the parsed arguments to the exit code; what a command needs is imported only when it runs.
"""

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from bridge import _cli, _demo
from bridge._errors import did_you_mean

_COMMANDS = (_demo.add_command, *_cli.COMMANDS)

_UNUSABLE = 2
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

'python -m bridge COMMAND --help' explains a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after `python -m bridge`; None takes them from the process.

    Returns:
        The exit code.

    Raises:
        SystemExit: with code 2 for wrong usage or a closed stdout, with code 0 after `--help`.
    """
    parser = _Parser(
        prog="python -m bridge",
        description="Tools for models that mix Flax Linen and Flax NNX.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show versions and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for add_command in _COMMANDS:
        add_command(commands)
    # Refuse early: a command would do its work first and then fail to show the result.
    if sys.stdout is None:
        parser.exit(_UNUSABLE, f"{parser.prog}: stdout is closed\n")
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes an optional positional for missing where an option comes before it.
    late = getattr(arguments, "late", None)
    is_one = len(rest) == 1 and not rest[0].startswith("-")
    if is_one and late is not None and getattr(arguments, late) is None:
        own = commands.choices[arguments.command]
        action = next(action for action in own._actions if action.dest == late)  # noqa: SLF001
        try:
            setattr(arguments, late, own._get_value(action, rest.pop()))  # noqa: SLF001
        except argparse.ArgumentError as error:
            own.error(str(error))
    if rest:
        own = commands.choices[arguments.command]
        known = [option for action in own._actions for option in action.option_strings]  # noqa: SLF001
        questions = (did_you_mean(text.partition("=")[0], known) for text in rest)
        own.error(
            ". ".join([f"unrecognized arguments: {' '.join(rest)}", *filter(None, questions)])
        )
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        sys.stderr.write(f"{parser.prog}: interrupted\n")
        return _INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Names the choice that a misspelled one is nearest to, as Python 3.14's parser does."""

    def _check_value(self, action: argparse.Action, value: object) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            question = did_you_mean(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(
                action, ". ".join(filter(None, (error.message, question)))
            ) from None


class _Version(argparse.Action):
    """Prints the versions that a report of a fault should have."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        names = ("linen-nnx-bridge", "flax", "jax")
        sys.stdout.write(", ".join(f"{name} {_version(name)}" for name in names) + "\n")
        parser.exit()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
