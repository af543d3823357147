"""The training program: its files, what values are in it, and what a run of a sample showed."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from flax import linen as nn
from flax.training.train_state import TrainState

from bridge._conversion.neutral import walk
from bridge.rewrite.publish._places import Made
from bridge.rewrite.syntax._source import Source

from ._changes import Decision

FUNCTIONS = (ast.FunctionDef, ast.Lambda)


class Place(NamedTuple):
    """A function by where its code begins."""

    file: str
    line: int
    name: str


@dataclasses.dataclass
class File:
    """A file of the program.

    Attributes:
        source: its text.
        module: its module, as it was imported.
        made: the rewritten class that an expression names.
        changes: what is decided so far.
        state: the name of the class of plain states, "" if it makes none.
    """

    source: Source
    module: types.ModuleType
    made: Callable[[ast.AST | None], Made | None]
    changes: list[Decision] = dataclasses.field(default_factory=list)
    state: str = ""

    def value_of(self, node: ast.AST | None) -> Any:
        """The value of a dotted name of the module, None for anything else."""
        if isinstance(node, ast.Name):
            return vars(self.module).get(node.id)
        if isinstance(node, ast.Attribute):
            holder = self.value_of(node.value)
            if isinstance(holder, types.ModuleType | type):
                return getattr(holder, node.attr, None)
        return None


@dataclasses.dataclass
class Program:
    """Everything that the functions are planned from.

    Attributes:
        files: by path.
        recognizer: tells what a running value is.
        kinds: the kinds of each function's arguments, for the functions that ran.
        lines: the lines of each file that ran.
        fields: the kinds of the fields of each class of states, by the class's name.
        others: files and lines where a module is applied that has other fields than the model.
        only: the rewritten class of the model itself.
        streams: the streams that the model draws from in a call.
        is_stacked: whether layers are stacked, each with keys of its own.
        sows: whether the model sows values.
        functions: what is known of each function that was planned.
    """

    files: Mapping[str, File]
    recognizer: Recognizer
    kinds: Mapping[Place, Mapping[str, Kind]]
    lines: Mapping[str, Collection[int]]
    fields: Mapping[str, Mapping[str, Kind]]
    others: Collection[tuple[str, int]]
    only: Made
    streams: Sequence[str] = ()
    is_stacked: bool = False
    sows: bool = False
    functions: dict[Place, Value] = dataclasses.field(default_factory=dict)

    def place_of(self, function: Any) -> Place | None:
        """Where a function of the program is, under its decorators."""
        function = inspect.unwrap(function) if callable(function) else None
        code = getattr(function, "__code__", None)
        if code is None or code.co_filename not in self.files:
            return None
        return Place(code.co_filename, code.co_firstlineno, code.co_name)

    def node_at(self, place: Place) -> ast.FunctionDef | None:
        """The function at a place, None unless it is at the top of a file."""
        for node in self.files[place.file].source.tree.body:
            if isinstance(node, ast.FunctionDef) and first_line(node) == place.line:
                return node
        return None


def first_line(node: ast.FunctionDef | ast.Lambda) -> int:
    """The line by which code knows a function: that of its first decorator."""
    decorators: Sequence[ast.expr] = getattr(node, "decorator_list", ())
    return decorators[0].lineno if decorators else node.lineno


class Kind(enum.Enum):
    """What a value is in the Linen program, with what takes its place."""

    OTHER = "anything else, which stays"
    OPTIONAL = "anything else, which was None in some call"
    STATE = "a TrainState: an NNX module with the model and the optimizer"
    STALE = "a TrainState before an update, which NNX makes in place"
    PARAMS = "the parameters: the model"
    VARIABLES = "all variables: the model"
    STATISTICS = "another collection: nothing, as the model has it"
    UPDATES = "what `mutable=` returns: nothing"
    CLASS = "a Linen class, or a partial of one: stays"
    MODEL = "a Linen module: a call of its constructor, or a partial of that"
    INIT = "a function that makes variables: a call of the constructor"
    APPLY = "a function that applies the module: the model"
    FUNCTION = "a function of the program"
    GRADIENT = "a loss function's gradient"
    TUPLE = "a tuple of values"


GONE = (Kind.STATISTICS, Kind.UPDATES)
# Arguments that a function of the model has no more.
DROPPED = (Kind.APPLY, *GONE)
OF_MODEL = (Kind.PARAMS, Kind.VARIABLES)


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of the Linen program.

    Attributes:
        kind: what it is.
        text: the expression that names it in the new program; "" if only its own place has it.
        parts: of a tuple; for a function what it returns, and for a gradient what its loss does.
        arguments: the kinds of a function's arguments by name, in order.
        made: the call that makes a Linen module, if it is made in the same function.
    """

    kind: Kind
    text: str = ""
    parts: tuple[Value, ...] = ()
    arguments: tuple[tuple[str, Kind], ...] = ()
    made: ast.Call | None = None

    @property
    def is_gone(self) -> bool:
        """Whether nothing takes its place."""
        if self.kind is Kind.TUPLE:
            return bool(self.parts) and all(part.is_gone for part in self.parts)
        return self.kind in GONE

    @property
    def kept(self) -> tuple[int, ...]:
        """The positions of a tuple's parts that are left."""
        return tuple(i for i, part in enumerate(self.parts) if not part.is_gone)

    @property
    def is_special(self) -> bool:
        """Whether the new program has something else in its place, or needs NNX's transforms."""
        if self.kind is Kind.TUPLE:
            return any(part.is_special for part in self.parts)
        return self.kind in (Kind.STATE, *OF_MODEL, *GONE)


OTHER = Value(Kind.OTHER)


def fresh(value: Value) -> Value:
    """A value as a call returns it, which has no name yet."""
    return dataclasses.replace(value, text="", made=None, parts=tuple(map(fresh, value.parts)))


class Recognizer:
    """Recognizes the values of a running program.

    `variables` are those of the model, by collection.
    """

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._paths = {name: _paths(tree) for name, tree in variables.items()}

    @property
    def collections(self) -> frozenset[str]:
        """The names of the model's collections."""
        return frozenset(self._paths)

    def kind(self, value: Any) -> Kind:
        """What a value is; gradients look like parameters."""
        if value is None:
            return Kind.OPTIONAL
        if isinstance(value, TrainState):
            return Kind.STATE
        if isinstance(value, nn.Module):
            return Kind.MODEL
        cls = value
        while isinstance(cls, functools.partial):
            cls = cls.func
        if isinstance(cls, type) and issubclass(cls, nn.Module):
            return Kind.CLASS
        own = getattr(value, "__self__", None)
        if isinstance(own, nn.Module) and getattr(value, "__name__", "") == "apply":
            return Kind.APPLY
        if not isinstance(value, Mapping) or not value:
            return Kind.OTHER
        paths = _paths(value)
        for name, known in self._paths.items():
            if paths == known:
                return Kind.PARAMS if name == "params" else Kind.STATISTICS
        if all(n in self._paths and _paths(tree) == self._paths[n] for n, tree in value.items()):
            return Kind.VARIABLES if "params" in value else Kind.UPDATES
        return Kind.OTHER


def _paths(tree: Any) -> frozenset[tuple[Any, ...]]:
    return frozenset(path for path, _ in walk(tree)) if isinstance(tree, Mapping) else frozenset()
