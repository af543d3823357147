"""Begins and ends every command: its parser, its exit codes, its errors, and shared options."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import math
import os
import pathlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from bridge._errors import BridgeError, PortError

# Importing it imports rich, which --help does without.
if TYPE_CHECKING:
    from ._output import Result as Result

OK = 0
FAILED = 1
"""A check failed, or two things that were compared differ."""
UNUSABLE = 2
"""Wrong usage, or input that cannot be read."""
MISSING_EXTRA = 3
"""An optional dependency is missing."""
_Number = TypeVar("_Number", int, float)
_OURS = pathlib.Path(__file__).parents[1]
_INSTALLED = tuple(
    pathlib.Path(path).resolve() for path in {*sysconfig.get_paths().values()} if path
)


class InputError(BridgeError, ValueError):
    """An argument, or what it names, is not what a command needs.

    Attributes:
        where: the argument.
        found: what there is.
        expected: what is needed.
        remedy: what to do.
    """

    def __init__(self, where: str, found: str, expected: str, remedy: str):
        self.where = where
        self.found = found
        self.expected = expected
        self.remedy = remedy
        super().__init__(where, found, expected, remedy)

    def __str__(self) -> str:
        return f"{self.where}: found {self.found}, expected {self.expected}; {self.remedy}"


def new_parser(
    commands: argparse._SubParsersAction[Any],
    name: str,
    summary: str,
    description: str,
    epilog: str,
    run: Callable[[argparse.Namespace], Result],
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
        run: from the parsed arguments to the result. `arguments.tell` shows what it is doing.

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
    parser.set_defaults(run=functools.partial(_run, parser.prog, run))
    return parser


def _run(
    prog: str, command: Callable[[argparse.Namespace], Result], arguments: argparse.Namespace
) -> int:
    from . import _output

    try:
        with _output.working(prog, is_json=arguments.json) as arguments.tell:
            result = command(arguments)
    except (Exception, SystemExit) as error:
        if arguments.traceback:
            traceback.print_exception(error)
        complain(f"{prog}: {_text(error)}{_input_hint(error, arguments)}")
        return _code(error)
    try:
        _output.write(result, as_json=arguments.json)
    except BrokenPipeError:
        # As `| head` does; the exit code still says what was found.
        give_up(sys.stdout)
    return OK if result.ok else FAILED


def _input_hint(error: BaseException, arguments: argparse.Namespace) -> str:
    """The form of `--input` for integers, where a model that takes them was given floats."""
    import jax

    for given in getattr(arguments, "inputs", None) or ():
        if "integer" in str(error) and jax.numpy.issubdtype(given.dtype, jax.numpy.floating):
            shape = ",".join(map(str, given.shape))
            return f"\n(an --input is float32 unless it says otherwise: --input {shape}:int32)"
    return ""


def _text(error: BaseException) -> str:
    """What was wrong, in a few lines."""
    if isinstance(error, BridgeError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return f"{where}{error.strerror}"
    place = user_place(error)
    if isinstance(error, SystemExit):
        # A program that a command runs may call `sys.exit`; its code is not one of ours.
        return f"{place or 'the program'} called sys.exit({error.code!r})"
    first, *_ = str(error).strip().splitlines() or ["no message"]
    where = "" if place is None else f"{place}; "
    return f"{type(error).__name__}: {first}\n({where}--traceback shows all of it)"


def user_place(error: BaseException) -> str | None:
    """File and line of the innermost call in the user's own program.

    Flax, JAX and this package raise most errors, but the line to change is in the program. None if
    no code of the program was running.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_of_user(frame.filename)]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else None


def is_of_user(filename: str) -> bool:
    """Whether a file of Python belongs to the user's program, and not to an installed package."""
    if filename.startswith("<"):
        return False
    path = pathlib.Path(filename).resolve()
    if path.is_relative_to(_OURS):
        # The demo is a program that is run, as a user's.
        return path.is_relative_to(_OURS / "_demo")
    return not any(path.is_relative_to(installed) for installed in _INSTALLED)


def _code(error: BaseException) -> int:
    if isinstance(error, PortError):
        return FAILED
    is_extra = isinstance(error, BridgeError) and isinstance(error.__cause__, ImportError)
    return MISSING_EXTRA if is_extra else UNUSABLE


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


def path(text: str) -> pathlib.Path:
    """The path that an option is given, for a `type` of argparse; `~` is the home directory.

    Raises ArgumentTypeError if it is empty, or leads to an object store.
    """
    if not text.strip() or "://" in text:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a path of this machine")
    # Unlike `Path.expanduser`, this leaves a home directory that is not known as it is.
    return pathlib.Path(os.path.expanduser(text))


def page(text: str) -> pathlib.Path:
    """The path of a page that is written at the end of a command's work.

    Raises ArgumentTypeError as `path` does, and if there is no directory to write to.
    """
    found = path(text)
    if not found.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {found.parent}")
    return found


def add_within(parser: argparse.ArgumentParser, option: str = "--within", of: str = "") -> None:
    """Adds the option for checkpoints that hold more than a model; `of` says which of two."""
    parser.add_argument(
        option,
        type=lambda text: tuple(filter(None, text.split("/"))),
        default=(),
        metavar="KEYS",
        help=f"the keys of the model in a checkpoint that holds more, joined by /{of}",
    )


def add_layout(parser: argparse.ArgumentParser, *options: str) -> None:
    """Adds the option that says which library's paths a checkpoint has; by default `--layout`."""
    for option in options or ("--layout",):
        parser.add_argument(
            option,
            choices=("linen", "nnx"),
            help="the library of the checkpoint's paths, if its keys are misleading; linen reads a"
            " tree without collections as parameters (default: detected)",
        )


def add_call(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the inputs of a model's call."""
    parser.add_argument(
        "--input",
        action="append",
        dest="inputs",
        type=_shape,
        metavar="SHAPE[:DTYPE]",
        help="a sample input of the model, such as 8,28,28,1 or 8,16:int32, float32 by default;"
        " once for each input, instead of those that TARGET gives",
    )
    parser.add_argument(
        "--kwarg",
        action="append",
        dest="kwargs",
        type=named("NAME=VALUE, such as train=False", _literal),
        default=[],
        metavar="NAME=VALUE",
        help="a keyword argument of the model's call, such as train=False; a Python literal, or"
        " text; once for each",
    )


def add_rules(parser: argparse.ArgumentParser, of: str) -> None:
    """Adds the option for a file of rules; `of` says for which paths."""
    parser.add_argument("--rules", metavar="FILE", type=path, help=f"a table of paths{of}")


def load_rules(file: pathlib.Path | None) -> Mapping[str, str] | None:
    """Reads a table of NNX paths by regular expressions for Linen paths, as `port.plan` takes it.

    In TOML it is a table `[rules]`, as `convert --help` shows. Returns None without a file. Raises
    InputError if it is not TOML, or not such a table.
    """
    if file is None:
        return None
    import tomllib

    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(str(file), str(error), "a TOML file", "correct it") from error
    rules = document.get("rules")
    is_table = isinstance(rules, dict) and all(isinstance(path, str) for path in rules.values())
    if document.keys() != {"rules"} or not is_table:
        found = f"the entries {', '.join(map(repr, document)) or 'none'}"
        expected = "one table [rules] of texts"
        raise InputError(str(file), found, expected, "see python -m bridge convert --help")
    return rules


def _shape(text: str) -> Any:
    """A sample input written as `8,28,28,1` or `8,16:int32`; `:float32` is a scalar."""
    import jax

    shape, _, dtype = text.partition(":")
    try:
        sizes = [COUNT(part) for part in shape.split(",") if part.strip()]
        return jax.ShapeDtypeStruct(sizes, jax.numpy.dtype(dtype or "float32"))
    except argparse.ArgumentTypeError as error:
        problem = str(error)
    except TypeError as error:
        problem = f"{dtype} is not a dtype: {error}"
    form = "expected SHAPE or SHAPE:DTYPE, such as 8,28,28,1 or 8,16:int32"
    raise argparse.ArgumentTypeError(f"{problem}; {form}")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def named(expected: str, read: Callable[[str], Any]) -> Callable[[str], tuple[str, Any]]:
    """A `type` of argparse for NAME=VALUE.

    `expected` is the form with an example, for the error, and `read` is a `type` for the value.
    """

    def read_named(text: str) -> tuple[str, Any]:
        name, equals, value = text.partition("=")
        with contextlib.suppress(argparse.ArgumentTypeError):
            if equals and name.isidentifier():
                return name, read(value)
        raise argparse.ArgumentTypeError(f"{text} is not {expected}")

    return read_named


def number(
    expected: str, fits: Callable[[float], bool], kind: Callable[[str], _Number] = float
) -> Callable[[str], _Number]:
    """A `type` of argparse for numbers.

    `expected` says in the error what a number has to be.
    """

    def read(text: str) -> _Number:
        with contextlib.suppress(ValueError):
            if fits(found := kind(text)):
                return found
        raise argparse.ArgumentTypeError(f"{text} is not {expected}")

    return read


FROM_ZERO = number("a number from 0 on", lambda x: 0 <= x < math.inf)
COUNT = number("a whole number from 0 on", lambda x: x >= 0, int)
POSITIVE = number("a whole number from 1 on", lambda x: x >= 1, int)
SHARE = number("a share between 0 and 1", lambda x: 0 <= x <= 1)
