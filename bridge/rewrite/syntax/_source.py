"""A source file, and text with parts of it replaced.

`ast` gives positions in UTF-8 bytes, as code objects do, so that the position of a running call is
that of a node. Text is replaced in the source itself, which keeps comments and formatting: a syntax
tree with formatting of its own, as LibCST has, would count columns in code points and be one more
dependency.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from bridge.rewrite.observe._records import Span
from bridge.rewrite.observe._trace import WatchedLines

COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Edit(NamedTuple):
    """A stretch of a file, in bytes, and the text in its place; an insertion has no length."""

    start: int
    end: int
    text: str


class Source:
    """A parsed file.

    Raises SyntaxError if it is not Python, and UnicodeDecodeError if it is not UTF-8.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.text = pathlib.Path(file).read_bytes().decode("utf-8")
        self.data = self.text.encode()
        self.tree = ast.parse(self.text)
        self.lines = self.data.split(b"\n")
        starts = [0]
        for line in self.lines:
            starts.append(starts[-1] + len(line) + 1)
        self._starts = starts

    @functools.cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node around each node."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @functools.cached_property
    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        """The imports, at the top and in functions."""
        every = ast.walk(self.tree)
        return [node for node in every if isinstance(node, ast.Import | ast.ImportFrom)]

    @functools.cached_property
    def _calls(self) -> dict[Span, ast.Call]:
        return {span_of(node): node for node in ast.walk(self.tree) if isinstance(node, ast.Call)}

    def call_at(self, span: Span) -> ast.Call | None:
        """The call at a position."""
        return self._calls.get(span)

    def offset(self, line: int, column: int) -> int:
        """The byte at a position; lines count from 1."""
        return self._starts[line - 1] + column

    def start(self, node: ast.AST) -> int:
        """The first byte of a node, decorators included."""
        decorators = getattr(node, "decorator_list", None)
        if decorators:
            return self.offset(decorators[0].lineno, decorators[0].col_offset - 1)
        return self.offset(node.lineno, node.col_offset)  # pyright: ignore

    def end(self, node: ast.AST) -> int:
        """The byte behind a node."""
        return self.offset(node.end_lineno, node.end_col_offset)  # pyright: ignore

    def end_of_argument(self, node: ast.AST) -> int:
        """The byte behind an argument of a call, with parentheses of its own."""
        end = self.end(node)
        parent = self.parents[node]
        parent = self.parents[parent] if isinstance(parent, ast.keyword) else parent
        stop = self.end(parent) - 1
        rest = self.data[end:stop].decode()
        text = rest.split("#")[0].split("\n")[0].rstrip()
        closing = 0
        for character in text:
            if character == ")":
                closing += 1
            elif character not in " ":
                break
        return end + (text.rfind(")", 0, len(text)) + 1 if closing else 0)

    def render(self, node: ast.AST, edits: Iterable[Edit] = ()) -> str:
        """A node's text, with stretches of it replaced."""
        return self.stretch(self.start(node), self.end(node), edits)

    @functools.cached_property
    def _lines_in_strings(self) -> frozenset[str]:
        """The lines of strings that are several lines long, which begin as they are written."""
        texts = [
            self.render(node).split("\n")[1:]
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno != node.lineno
        ]
        return frozenset(line for lines in texts for line in lines)

    def as_indented(self, node: ast.AST, text: str) -> str:
        """New text with a tab for each space at the beginning of a line, if the old one has tabs.

        A column of the file counts a tab as one, so that the new text has one space for it. The
        text is the new text of `node`.
        """
        if b"\n\t" not in self.data[self.start(node) : self.end(node)]:
            return text
        found = []
        for line in text.split("\n"):
            rest = line.lstrip(" \t")
            begin = line[: len(line) - len(rest)]
            is_kept = line in self._lines_in_strings
            found.append(line if is_kept else begin.replace(" ", "\t") + rest)
        return "\n".join(found)

    def lines_of(self, node: ast.AST, *, comments: bool = False) -> Edit:
        """Takes away the whole lines of a statement, its decorators' too.

        With `comments`, the comments right above it go too.
        """
        first: int = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])  # pyright: ignore
        if comments:
            first -= len(self.comments_above(node))  # pyright: ignore
        last: int = node.end_lineno or node.lineno  # pyright: ignore
        return Edit(self.offset(first, 0), self.offset(last + 1, 0), "")

    def stretch(self, start: int, end: int, edits: Iterable[Edit] = ()) -> str:
        """The text between two bytes, with stretches of it replaced; the outermost wins."""
        # In order: of insertions at one place the first given comes first.
        inside = dict.fromkeys(e for e in edits if start <= e.start and e.end <= end)
        parts, position = [], start
        for edit in sorted(inside, key=lambda e: (e.start, e.end != e.start, -e.end)):
            if edit.start < position:
                continue
            parts += [self.data[position : edit.start].decode(), edit.text]
            position = edit.end
        parts.append(self.data[position:end].decode())
        return "".join(parts)

    def edit(self, node: ast.AST, text: str) -> Edit:
        """The replacement of a node."""
        return Edit(self.start(node), self.end(node), text)

    def comments_above(self, statement: ast.stmt) -> list[str]:
        """The lines of comments right above a statement."""
        found: list[str] = []
        number = statement.lineno - 2
        while number >= 0 and self.lines[number].strip().startswith(b"#"):
            found.insert(0, self.lines[number].decode().strip())
            number -= 1
        return found

    def comment_behind(self, node: ast.AST) -> str:
        """The comment at the end of a node's last line, `""` if there is none."""
        line = self.lines[node.end_lineno - 1][node.end_col_offset :].decode()  # pyright: ignore
        rest = line.strip().lstrip(",;").strip()
        return rest if rest.startswith("#") else ""

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The innermost statement around a node."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """What is around a node, the innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node


def span_of(node: ast.AST) -> Span:
    """A node's position."""
    return Span(node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)  # pyright: ignore


def is_docstring(node: ast.stmt) -> bool:
    """Whether a statement is a text alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


# Trees do not change once they are read, so a function is walked through once for all its names.
_BINDINGS: weakref.WeakKeyDictionary[ast.AST, dict[str, list[ast.stmt]]] = (
    weakref.WeakKeyDictionary()
)


def binding(function: ast.AST, name: str) -> list[ast.stmt]:
    """The statements in a function that bind a name, with the blocks around them."""
    if function not in _BINDINGS:
        found: dict[str, list[ast.stmt]] = {}
        for each in ast.walk(function):
            if isinstance(each, ast.stmt) and each is not function:
                for bound in bound_in(each):
                    found.setdefault(bound, []).append(each)
        _BINDINGS[function] = found
    return _BINDINGS[function].get(name, [])


def only_value(function: FunctionNode, name: str) -> ast.expr | None:
    """What a name is set to, if that happens once, and in no block; None for an argument."""
    bound = binding(function, name)
    own = bound[0] if len(bound) == 1 else None
    is_plain = isinstance(own, ast.Assign) and isinstance(own.targets[0], ast.Name)
    if not is_plain or name in {each.arg for each in arguments_of(function)}:
        return None
    return own.value if isinstance(own, ast.Assign) else None


def origins(
    function: ast.AST, node: ast.expr, inside: Collection[ast.AST] = ()
) -> Iterator[ast.expr]:
    """The expressions in a function that another one may get its value from.

    `inside` has the assignments that were followed: `block = nn.remat(block)` names itself.
    """
    if isinstance(node, ast.IfExp):
        yield from origins(function, node.body, inside)
        yield from origins(function, node.orelse, inside)
        return
    assigned = [
        each
        for each in (ast.walk(function) if isinstance(node, ast.Name) else ())
        if isinstance(each, ast.Assign) and each not in inside
        if any(isinstance(t, ast.Name) and t.id == node.id for t in each.targets)  # pyright: ignore
    ]
    for each in assigned:
        yield from origins(function, each.value, {*inside, each})
    if not assigned:
        yield node


def arguments_of(function: FunctionNode) -> dict[ast.arg, ast.expr | None]:
    """The arguments of a function with their defaults, but for `*` and `**`."""
    given = function.args
    by_place = [*given.posonlyargs, *given.args]
    defaults = [*[None] * (len(by_place) - len(given.defaults)), *given.defaults]
    return dict(zip([*by_place, *given.kwonlyargs], [*defaults, *given.kw_defaults], strict=True))


def is_fixed(node: ast.AST) -> bool:
    """Whether an expression is True or False."""
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


def is_none(node: ast.AST | None) -> bool:
    """Whether an expression is None."""
    return isinstance(node, ast.Constant) and node.value is None


def walk_without(nodes: Iterable[ast.AST], skipped: Callable[[ast.AST], bool]) -> Iterator[ast.AST]:
    """Some nodes and what is in them, without those that are skipped and what is in these."""
    stack = [*nodes]
    while stack:
        node = stack.pop()
        if not skipped(node):
            yield node
            stack.extend(ast.iter_child_nodes(node))


def names_in(node: ast.AST) -> set[str]:
    """The names that an expression or statement reads."""
    return {
        each.id
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    }


def bound_in(node: ast.AST) -> set[str]:
    """The names that a statement or target binds, comprehensions apart."""
    found: set[str] = set()
    stack = [node]
    while stack:
        each = stack.pop()
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            found.add(each.id)
        elif isinstance(each, ast.FunctionDef | ast.ClassDef):
            found.add(each.name)
            continue
        elif isinstance(each, ast.MatchAs | ast.MatchStar) and each.name is not None:
            found.add(each.name)
        elif isinstance(each, ast.MatchMapping) and each.rest is not None:
            found.add(each.rest)
        elif isinstance(each, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in each.names}
        elif isinstance(
            each, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.Lambda
        ):
            continue
        stack.extend(ast.iter_child_nodes(each))
    return found


_WEAK = (ast.IfExp, ast.Lambda, ast.BoolOp, ast.Compare, ast.NamedExpr)
_STRONG = (ast.BinOp, ast.UnaryOp, ast.Attribute, ast.Subscript)
_OPPOSITES = {
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
    "==": "!=",
    "!=": "==",
}


def operand(text: str, parent: type[ast.AST]) -> str:
    """A text that becomes a part of an expression, in parentheses if it would fall apart there.

    `parent` is the kind of expression around it; a call, for one, takes any text as it is.
    """
    if not issubclass(parent, (*_WEAK, *_STRONG)):
        return text
    own = ast.parse(text.strip(), mode="eval").body
    is_not = isinstance(own, ast.UnaryOp) and isinstance(own.op, ast.Not)
    splits = isinstance(own, _WEAK) or is_not
    if issubclass(parent, _STRONG):
        splits |= isinstance(own, ast.BinOp | ast.UnaryOp)
    return f"({text})" if splits else text


def negated(text: str) -> str:
    """The opposite of a condition, as a programmer writes it: `x is not None` for `x is None`."""
    text = text.strip()
    node = ast.parse(text, mode="eval").body
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=own):
            segment = str(ast.get_source_segment(text, own))
            return f"({segment})" if "\n" in segment else segment
        case ast.Compare(ops=[_], comparators=[right]):
            left = ast.get_source_segment(text, node.left)
            last = ast.get_source_segment(text, right)
            for word, opposite in _OPPOSITES.items():
                # No parentheses or comments stand between the sides.
                if text == f"{left} {word} {last}":
                    return f"{left} {opposite} {last}"
        case ast.Name() | ast.Attribute() | ast.Call() | ast.Subscript():
            return f"not {text}"
    return f"not ({text})"


def set_in(node: ast.AST) -> set[str]:
    """The names that a statement binds, or the list or dict that it grows."""
    grown = grown_name(node)
    return bound_in(node) | ({grown} if grown is not None else set())


def is_import(statement: ast.stmt) -> bool:
    """Whether a statement imports, or tries to."""
    if isinstance(statement, ast.Try):
        return all(isinstance(s, ast.Import | ast.ImportFrom) for s in statement.body)
    return isinstance(statement, ast.Import | ast.ImportFrom)


def imported_from(node: ast.ImportFrom, package: str) -> str:
    """The name of the module that a statement imports from, in a file of a package."""
    if not node.level:
        return node.module or ""
    parts = package.split(".") if package else []
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def indented(text: str, old: int, new: int) -> str:
    """A statement's text moved from one indentation to another, its first line without."""
    first, *rest = text.split("\n")
    moved = []
    for line in rest:
        blank = len(line) - len(line.lstrip(" "))
        moved.append(" " * max(new + blank - old, 0) + line.lstrip(" ") if line.strip() else "")
    return "\n".join([first, *moved])


def is_free(node: ast.Call) -> bool:
    """Whether a constructor makes a module that is part of no model."""
    return any(
        k.arg == "parent" and isinstance(k.value, ast.Constant) and k.value.value is None
        for k in node.keywords
    )


def shape_item(node: ast.expr) -> tuple[str, int] | None:
    """The name and the number in `x.shape[-1]`, None for another expression."""
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "shape"
        and isinstance(node.value.value, ast.Name)
    ):
        try:
            index = ast.literal_eval(node.slice)
        except ValueError:
            return None
        return (node.value.value.id, index) if isinstance(index, int) else None
    return None


def is_shadowed(source: Source, node: ast.AST, name: str, method: ast.AST) -> bool:
    """Whether a function inside a method has an argument of this name."""
    for each in source.ancestors(node):
        if each is method:
            return False
        is_function = isinstance(each, ast.FunctionDef | ast.Lambda)
        if is_function and name in {argument.arg for argument in arguments_of(each)}:
            return True
    return False


def items_of(
    target: ast.expr, values: ast.expr, through: Collection[str] = ()
) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The names that a loop binds, each with the list that it takes them from.

    The loop binds `target` and goes over `values`. `through` has the functions besides `zip` and
    `enumerate` whose argument is looked into.
    """
    if isinstance(values, ast.Call) and isinstance(values.func, ast.Name):
        parts = target.elts if isinstance(target, ast.Tuple) else []
        if values.func.id == "enumerate" and len(parts) == 2:
            yield from items_of(parts[1], values.args[0], through)
        elif values.func.id == "zip" and len(parts) == len(values.args):
            for part, each in zip(parts, values.args, strict=True):
                yield from items_of(part, each, through)
        elif values.func.id in through and len(values.args) == 1:
            yield from items_of(target, values.args[0], through)
        else:
            yield target, values
    else:
        yield target, values


def is_self(node: ast.AST, name: str | None = None) -> bool:
    """Whether an expression is `self.name`."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and (name is None or node.attr == name)
    )


@functools.cache
def source_of(file: str, stamp: float) -> Source:
    """The source of a file as it was at a time, parsed once."""
    return Source(file)


@functools.cache
def watched_lines(file: str) -> WatchedLines:
    """The lines of a file that a run is watched at; none unless it is a Python file.

    Conditions that read a name are, and for arrays the beginning of each statement, but for lines
    with a comprehension: Python 3.13.0 crashes where local variables are read inside one.
    """
    try:
        source = source_of(file, pathlib.Path(file).stat().st_mtime)
    except (SyntaxError, UnicodeDecodeError, OSError):
        return WatchedLines()
    nodes = [*ast.walk(source.tree)]
    conditions = (
        node.test.lineno
        for node in nodes
        if isinstance(node, ast.If | ast.IfExp)
        and any(isinstance(each, ast.Name) for each in ast.walk(node.test))
    )
    begins = {node.lineno for node in nodes if isinstance(node, ast.stmt)}
    inside = (
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in nodes
        if isinstance(node, COMPREHENSIONS)
    )
    return WatchedLines(frozenset(conditions), frozenset(begins.difference(*inside)))


def loops_around(source: Source, node: ast.AST, method: ast.AST) -> list[ast.AST]:
    """The loops around a place in a method, the outermost first."""
    found: list[ast.AST] = []
    before = node
    for each in source.ancestors(node):
        if each is method:
            break
        if (isinstance(each, ast.For | ast.While) and before in each.body) or isinstance(
            each, COMPREHENSIONS
        ):
            found.insert(0, each)
        before = each
    return found


def is_growth(node: ast.AST) -> bool:
    """Whether an expression is `layers.append(...)`, or the like."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("append", "extend", "insert")
        and isinstance(node.func.value, ast.Name)
    )


def grown_name(statement: ast.AST) -> str | None:
    """The local variable with a list that a statement makes or extends."""
    target: ast.AST | None = None
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    elif isinstance(statement, ast.AugAssign | ast.AnnAssign):
        target = statement.target
    elif isinstance(statement, ast.Expr) and is_growth(statement.value):
        target = statement.value.func.value  # pyright: ignore
    return target.id if isinstance(target, ast.Name) else None
