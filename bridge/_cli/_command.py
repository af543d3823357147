"""Begins and ends every command: its parser, its exit codes, its errors."""

from __future__ import annotations

import argparse
import ast
import contextlib
import math
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

from bridge._errors import BridgeError, CheckpointError, PortError

from ._input_errors import InputError, ProgramError, SeveralInputsError
from ._options import error_in_options
from ._places import user_place
from ._stdout import for_document

OK = 0
FAILED = 1
"""A check failed, or two things that were compared differ."""
UNUSABLE = 2
"""Wrong usage, or input that cannot be read."""
MISSING_EXTRA = 3
"""An optional dependency is missing."""
Idle = tuple[str, Sequence[str]]
"""Why options have no effect, as in `("without --model", ["--input"])`."""
_EXTRA_LIBRARIES = ("safetensors",)
_Number = TypeVar("_Number", int, float)


def new_parser(
    commands: argparse._SubParsersAction[Any],
    name: str,
    summary: str,
    description: str,
    epilog: str,
    run: Callable[[argparse.Namespace], int],
    idle: Callable[[argparse.Namespace], Iterable[Idle]] = lambda arguments: (),
) -> argparse.ArgumentParser:
    """Adds a command to the subparsers of `python -m bridge`.

    What is wrong with the input goes to stderr in a few lines, with exit code 2; `--traceback`
    shows where it was raised.

    Args:
        commands: the subparsers.
        name: the command.
        summary: its line in the list of commands.
        description: what it does, above its options.
        epilog: exit codes and examples, below them.
        run: from the parsed arguments to the exit code.
        idle: the options that these arguments leave without an effect.

    Returns:
        The command's parser, which has the options that all commands have.
    """
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")

    def guarded(arguments: argparse.Namespace) -> int:
        problems = []
        for why, options in idle(arguments):
            given = [option for option in options if _is_given(parser, arguments, option)]
            if given:
                verb = "has" if len(given) == 1 else "have"
                problems.append(f"{', '.join(given)} {verb} no effect {why}")
        if problems:
            complain(f"{parser.prog}: {'; '.join(problems)}")
            return UNUSABLE
        # Messages name those that there are.
        arguments.options = options_of(parser)
        try:
            with for_document() if arguments.json else contextlib.nullcontext():
                code = run(arguments)
        except BrokenPipeError:
            raise
        except (BridgeError, OSError) as error:
            if arguments.traceback:
                traceback.print_exception(error)
            else:
                complain(f"{parser.prog}: {_text(error, options_of(parser))}")
            if _lacks_rules(error):
                return FAILED
            return MISSING_EXTRA if _lacks_extra(error) else UNUSABLE
        except SystemExit as error:
            # A program that a command runs may call `sys.exit`; its code is not one of ours.
            if arguments.traceback:
                traceback.print_exception(error)
            where = user_place(error) or "the program"
            complain(f"{parser.prog}: {where} called sys.exit({error.code!r})")
            return UNUSABLE
        except Exception as error:
            # Python would exit with 1, which says that a check failed.
            traceback.print_exception(error)
            complain(f"{parser.prog}: this error is not one that the command expects")
            return UNUSABLE
        return code

    parser.set_defaults(run=guarded)
    return parser


def complain(message: str) -> None:
    """Writes a message to stderr; the exit code says the same where there is no stderr."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
    except OSError:
        give_up(sys.stderr)


def give_up(stream: TextIO) -> None:
    """Discards what a stream could not write, which Python would try again at exit, and report."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_given(parser: argparse.ArgumentParser, arguments: argparse.Namespace, option: str) -> bool:
    """Whether an option has another value than by default."""
    action = options_of(parser)[option]
    return getattr(arguments, action.dest) != action.default


def options_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.Action]:
    """The options of a parser by name."""
    return parser._option_string_actions  # noqa: SLF001 (argparse has no other way)


def add_within(parser: argparse.ArgumentParser, option: str = "--within", of: str = "") -> None:
    """Adds the option for checkpoints that hold more than a model; `of` says which of two."""
    parser.add_argument(
        option,
        type=lambda text: tuple(filter(None, text.split("/"))),
        default=(),
        metavar="KEYS",
        help=f"the keys of the model in a checkpoint that holds more, joined by /{of}",
    )


def path(text: str) -> pathlib.Path:
    """The path that an option is given, for a `type` of argparse; `~` is the home directory.

    Raises:
        ArgumentTypeError: it is empty, or leads to an object store.
    """
    if not text.strip() or "://" in text:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a path of this machine")
    try:
        return pathlib.Path(text).expanduser()
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def add_layout(parser: argparse.ArgumentParser, *options: str) -> None:
    """Adds the option that says whose paths a checkpoint has; its default name is `--layout`."""
    for option in options or ("--layout",):
        parser.add_argument(
            option,
            choices=("linen", "nnx"),
            help="whose paths the checkpoint has, where its keys mislead; linen takes a tree"
            " without collections for parameters (default: found out)",
        )


def add_input(parser: argparse.ArgumentParser) -> None:
    """Adds the option for sample inputs of a model."""
    parser.add_argument(
        "--input",
        action="append",
        dest="inputs",
        metavar="SHAPE[:DTYPE]",
        help="a sample input of the model, such as 8,28,28,1 or 8,16:int32, float32 by default;"
        " once for each input, instead of those that TARGET gives",
    )


def add_kwarg(parser: argparse.ArgumentParser) -> None:
    """Adds the option for keyword arguments of a model's call."""
    parser.add_argument(
        "--kwarg",
        action="append",
        dest="kwargs",
        type=kwarg,
        default=[],
        metavar="NAME=VALUE",
        help="a keyword argument of the model's call, such as train=False; a Python literal, or"
        " text; once for each",
    )


def add_filter(parser: argparse.ArgumentParser) -> None:
    """Adds the option that leaves out leaves."""
    parser.add_argument(
        "--filter",
        type=_expression,
        metavar="REGEX",
        help="only leaves in whose path the expression is found, such as params/.*/bias$",
    )


def _text(error: BridgeError | OSError, options: Collection[str]) -> str:
    """An error's message with the options of the command line in the place of arguments."""
    if isinstance(error, SeveralInputsError):
        return "\n".join(_text(each, options) for each in error.errors)
    if isinstance(error, PortError) and _lacks_rules(error):
        remedy = (
            "Name the places in a table for --rules; --suggest of convert and parity proposes one."
        )
        return str(PortError(error.where, error.problems, remedy))
    # These two speak of the command line, or quote somebody's program.
    if isinstance(error, BridgeError) and not isinstance(error, InputError | ProgramError):
        return error_in_options(error, options)
    if isinstance(error, OSError) and not isinstance(error, BridgeError) and error.strerror:
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return f"{where}{error.strerror}"
    return str(error)


def _lacks_rules(error: BaseException) -> bool:
    """Whether values do not fit a model under the rules that there are."""
    return isinstance(error, PortError) and "rules=" in error.remedy


def _lacks_extra(error: BaseException) -> bool:
    cause = error.__cause__
    is_import = isinstance(error, CheckpointError) and isinstance(cause, ImportError)
    return is_import and getattr(cause, "name", None) in _EXTRA_LIBRARIES


def _expression(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text} is not a regular expression: {error}") from None


def kwarg(text: str) -> tuple[str, Any]:
    """A keyword argument that an option is given, for a `type` of argparse.

    Raises:
        ArgumentTypeError: not `NAME=VALUE`.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE, such as train=False")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def number(
    expected: str, fits: Callable[[float], bool], kind: Callable[[str], _Number] = float
) -> Callable[[str], _Number]:
    """A `type` of argparse for numbers.

    Args:
        expected: what a number has to be, for the error.
        fits: whether a number is that.
        kind: what reads it.
    """

    def read(text: str) -> _Number:
        with contextlib.suppress(ValueError):
            if fits(found := kind(text)):
                return found
        raise argparse.ArgumentTypeError(f"{text} is not {expected}")

    return read


def named(expected: str, read: Callable[[str], _Number]) -> Callable[[str], tuple[str, _Number]]:
    """A `type` of argparse for NAME=NUMBER.

    Args:
        expected: the form and an example, for the error.
        read: a `type` for the number.
    """

    def read_named(text: str) -> tuple[str, _Number]:
        name, _, value = text.partition("=")
        with contextlib.suppress(argparse.ArgumentTypeError):
            if name:
                return name, read(value)
        raise argparse.ArgumentTypeError(f"{text} is not {expected}")

    return read_named


FROM_ZERO = number("a number from 0 on", lambda x: 0 <= x < math.inf)
COUNT = number("a whole number from 0 on", lambda x: x >= 0, int)
POSITIVE = number("a whole number from 1 on", lambda x: x >= 1, int)
SHARE = number("a share between 0 and 1", lambda x: 0 <= x <= 1)
