"""The training program: its files, and what was seen of its functions when a sample of it ran."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from bridge.rewrite.publish._places import Made
from bridge.rewrite.syntax._source import Source

from ._changes import Decision
from ._kinds import Kind, Recognizer, Value

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
