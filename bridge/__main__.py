"""The command line, `python -m bridge`: one subcommand per job.

A command lives in its own private package, which adds a parser and sets `run` to a function from
the parsed arguments to the exit code; what a command needs is imported only when it runs.
"""

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Any

from bridge import _cli, _demo
from bridge._cli._command import OK, UNUSABLE, complain, give_up
from bridge._errors import did_you_mean

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
    parser = _parser()
    failure: OSError | None = None
    code = OK
    try:
        code = _run(parser, argv)
    except KeyboardInterrupt:
        complain(f"{parser.prog}: interrupted")
        code = _INTERRUPTED
    except OSError as error:
        failure = error
    try:
        sys.stdout.flush()
    except OSError as error:
        failure = failure or error
        give_up(sys.stdout)
    # A reader that has stopped, as `| head` does, is no failure; UNUSABLE has told its own.
    if failure is not None and not isinstance(failure, BrokenPipeError) and code != UNUSABLE:
        complain(f"{parser.prog}: {failure.filename or 'stdout'}: {failure.strerror}")
        code = UNUSABLE
    return code


def _parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
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
    parser.set_defaults(commands=commands)
    return parser


def _run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Runs the command that the arguments name."""
    # Refuse early: a command would do its work first and then fail to show the result.
    if sys.stdout is None:
        parser.exit(UNUSABLE, f"{parser.prog}: stdout is closed\n")
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes an optional positional for missing where an option comes before it.
    late = getattr(arguments, "late", None)
    is_one = len(rest) == 1 and not rest[0].startswith("-")
    if is_one and late is not None and getattr(arguments, late) is None:
        own = arguments.commands.choices[arguments.command]
        action = next(action for action in own._actions if action.dest == late)  # noqa: SLF001
        try:
            setattr(arguments, late, own._get_value(action, rest.pop()))  # noqa: SLF001
        except argparse.ArgumentError as error:
            own.error(str(error))
    if rest:
        own = arguments.commands.choices[arguments.command]
        known = [option for action in own._actions for option in action.option_strings]  # noqa: SLF001
        questions = (did_you_mean(text.partition("=")[0], known) for text in rest)
        own.error(
            ". ".join([f"unrecognized arguments: {' '.join(rest)}", *filter(None, questions)])
        )
    return arguments.run(arguments)


class _Parser(argparse.ArgumentParser):
    """Names the choice that a misspelled one is nearest to, as Python 3.14's parser does.

    It raises what argparse passes over in silence: help that cannot be written.
    """

    def print_help(self, file: Any = None) -> None:
        out = file or sys.stdout
        out.write(self.format_help())
        out.flush()

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
        sys.stdout.flush()
        parser.exit()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
