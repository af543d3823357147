"""Separates a method's names that come from its call from those that a constructor can know."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator

from bridge._train_eval import MODE_FIELDS

from ._evaluate import KNOWN_CALLS
from ._source import (
    arguments_of,
    bound_in,
    grown_name,
    is_growth,
    is_self,
    items_of,
    names_in,
    shape_item,
)

# Functions whose result has the items of what they are given.
SAME_ITEMS = ("reversed", "list", "tuple")
STATEFUL = (
    "param",
    "variable",
    "make_rng",
    "has_variable",
    "get_variable",
    "is_initializing",
    "is_mutable_collection",
    "has_rng",
)


class Taint:
    """The names of a method by where their values come from.

    Args:
        method: the function.
        slots: expressions in it that make modules.
        mode_fields: fields that become arguments of the call.
        known: arguments that a constructor knows.
        moved: what partials and makers are given that moves to the calls of what they make, as
            modes do.

    Attributes:
        names: those that depend on an argument of the call.
        pure: those that are bound in the method and do not, or are computed from dimensions of
            arguments alone, which a constructor is told.
        computed: those of them that are computed so.
        dimensions: the dimensions of arguments.
    """

    def __init__(
        self,
        method: ast.FunctionDef,
        slots: Iterable[ast.AST],
        mode_fields: Iterable[str] = (),
        known: Iterable[str] = (),
        moved: Iterable[ast.AST] = (),
    ) -> None:
        self.slots = set(slots)
        self.mode_fields = set(mode_fields)
        self.moved = set(moved)
        given = method.args
        arguments = [*arguments_of(method)]
        self.arguments = [each.arg for each in arguments if each.arg != "self"]
        arguments += [each for each in (given.vararg, given.kwarg) if each]
        self.names = {each.arg for each in arguments} - {"self", *known}
        self.names |= set(_inner_arguments(method, self.slots))
        self.dimensions = Dimensions(method, self.arguments)
        bindings = list(_bindings(method))
        size = -1
        while size != len(self.names):
            size = len(self.names)
            for value, targets in bindings:
                if self.touches(value) and not self.dimensions.computes(value, self.touches):
                    self.names |= targets
        bound = set().union(*(targets for _, targets in bindings)) if bindings else set()
        self.pure = (bound | set(known)) - self.names
        self.computed = set().union(
            *(targets & self.pure for value, targets in bindings if self.touches(value))
        )

    def touches(self, node: ast.AST) -> bool:
        """Whether an expression depends on an argument of the call."""
        inside = list(self._walk(node))
        own = {name for each in inside for name in own_names(each)}
        names = {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        if (names - own) & self.names:
            return True
        for each in inside:
            if isinstance(each, ast.Call):
                if each.func in self.slots:
                    return True
                if is_self(each.func) and each.func.attr in STATEFUL:  # pyright: ignore
                    return True
            if is_self(each) and each.attr in self.mode_fields:  # pyright: ignore
                return True
        return False

    def _walk(self, node: ast.AST) -> Iterator[ast.AST]:
        """A tree without what moves to the calls, and without the arguments of modules in it.

        A module is made where the constructor can make it, whatever it is given.
        """
        yield node
        for child in ast.iter_child_nodes(node):
            is_mode = isinstance(child, ast.keyword) and child.arg in MODE_FIELDS
            if child in self.slots:
                yield child
            elif not is_mode and child not in self.moved:
                yield from self._walk(child)


def own_names(node: ast.AST) -> set[str]:
    """The names that a lambda, a comprehension or a part of one has for itself."""
    if isinstance(node, ast.Lambda):
        return {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
    generators = getattr(node, "generators", [node])
    found = (bound_in(each.target) for each in generators if isinstance(each, ast.comprehension))
    return set().union(*found)


def _inner_arguments(method: ast.FunctionDef, slots: set[ast.AST]) -> Iterator[str]:
    """What functions inside are given, where they make layers."""
    for each in ast.walk(method):
        if not isinstance(each, ast.FunctionDef | ast.Lambda) or each is method:
            continue
        if any(inner in slots for inner in ast.walk(each)):
            yield from (a.arg for a in arguments_of(each) if a.arg != "self")


def _bindings(method: ast.FunctionDef) -> Iterator[tuple[ast.AST, set[str]]]:
    for node in ast.walk(method):
        match node:
            case ast.Assign():
                for target in node.targets:
                    yield from _unpacked(target, node.value)
            case ast.AnnAssign(value=ast.expr() as value):
                yield value, bound_in(node.target)
            case ast.AugAssign():
                yield node.value, bound_in(node.target)
            case ast.NamedExpr():
                yield node.value, bound_in(node.target)
            case ast.For():
                yield from _loop(node.target, node.iter)
            case ast.comprehension():
                yield from _loop(node.target, node.iter)
            case ast.With():
                for item in node.items:
                    if item.optional_vars is not None:
                        yield item.context_expr, bound_in(item.optional_vars)
            case ast.Expr() if is_growth(node.value):
                yield node.value, {str(grown_name(node))}
            case ast.Import() | ast.ImportFrom():
                yield ast.Constant(0), bound_in(node)
            case ast.FunctionDef() if node is not method:
                yield _Free(node), {node.name}


def _loop(target: ast.expr, values: ast.expr) -> Iterator[tuple[ast.AST, set[str]]]:
    """`for i, x in enumerate(xs)` binds `i` to nothing of `xs`."""
    items = [(own, bound_in(item)) for item, own in items_of(target, values, SAME_ITEMS)]
    yield from items
    yield ast.Constant(0), bound_in(target).difference(*(names for _, names in items))


def _unpacked(target: ast.AST, value: ast.expr) -> Iterator[tuple[ast.AST, set[str]]]:
    if (
        isinstance(target, ast.Tuple)
        and isinstance(value, ast.Tuple)
        and len(target.elts) == len(value.elts)
    ):
        for each, own in zip(target.elts, value.elts, strict=True):
            yield from _unpacked(each, own)
    else:
        yield value, bound_in(target)


class _Free(ast.AST):
    """The names that a nested function reads from around it, as one expression."""

    _fields = ("names",)

    def __init__(self, function: ast.FunctionDef) -> None:
        super().__init__()
        own = {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
        bound = set().union(set(), *(bound_in(each) for each in function.body))
        self.names = [
            ast.Name(name, ast.Load())
            for each in function.body
            for name in names_in(each) - own - bound
        ]


_COMPUTING = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.IfExp, ast.Compare)
# Calls whose results keep dimensions for what they will make.
_PARTIALS = ("partial", "functools.partial")
# The name of an argument, and a dimension of it; counted from its end where it is negative.
Dimension = tuple[str, int]


class Dimensions:
    """The dimensions of arguments in a method, while the arguments are what the call was given."""

    def __init__(self, method: ast.FunctionDef, arguments: Collection[str]) -> None:
        self._arguments = arguments
        self._bound: dict[str, list[int]] = {}
        for each in ast.walk(method):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                self._bound.setdefault(each.id, []).append(each.lineno)
        self._in_loops = {
            inner
            for each in ast.walk(method)
            if isinstance(each, ast.For | ast.While | ast.AsyncFor)
            for inner in ast.walk(each)
        }
        self._names = {
            name: found
            for each in ast.walk(method)
            if isinstance(each, ast.Assign)
            for name, found in self._named(each)
            if len(self._bound[name]) == 1 and each not in self._in_loops
        }

    def of(self, node: ast.AST) -> Dimension | None:
        """The dimension that an expression is, by itself or by its name; None for another one."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        found = shape_item(node) if isinstance(node, ast.expr) else None
        return found if found is not None and self._is_given(found[0], node) else None

    def computes(self, node: ast.AST, touches: Callable[[ast.AST], bool]) -> bool:
        """Whether an expression computes with dimensions, and needs nothing else of the call.

        `touches` says whether an expression depends on the call.
        """
        if isinstance(node, ast.Call):
            is_partial = ast.unparse(node.func) in _PARTIALS
            is_plain = not any(isinstance(each, ast.Starred) for each in node.args)
            is_known = ast.unparse(node.func) in KNOWN_CALLS and not node.keywords
            if not is_plain or not (is_known or is_partial):
                return False
        elif not isinstance(node, _COMPUTING):
            return False
        return all(
            self.of(part) is not None or not touches(part) or self.computes(part, touches)
            for part in _parts(node)
        )

    def _named(self, statement: ast.Assign) -> Iterator[tuple[str, Dimension]]:
        target, value = statement.targets[0], statement.value
        if len(statement.targets) > 1:
            return
        pairs: list[tuple[ast.expr, ast.expr]] = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=False))
        for each, own in pairs:
            found = shape_item(own)
            if isinstance(each, ast.Name) and found and self._is_given(found[0], statement):
                yield each.id, found
        if (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Attribute)
            and value.attr == "shape"
            and isinstance(value.value, ast.Name)
            and self._is_given(value.value.id, statement)
        ):
            parts = target.elts
            for place, each in enumerate(parts):
                before = any(isinstance(part, ast.Starred) for part in parts[:place])
                after = any(isinstance(part, ast.Starred) for part in parts[place:])
                if isinstance(each, ast.Name):
                    # A part that takes any number of dimensions is on one side alone.
                    number = place if after and not before else place - len(parts)
                    yield each.id, (value.value.id, number)

    def _is_given(self, name: str, node: ast.AST) -> bool:
        """Whether a name still is the argument at a place."""
        bound = self._bound.get(name, [])
        line: int = node.lineno  # pyright: ignore
        return name in self._arguments and (
            not bound or (min(bound) >= line and node not in self._in_loops)
        )


def _parts(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions that one is made of."""
    if isinstance(node, ast.Call):
        yield from node.args
        yield from (each.value for each in node.keywords if each.arg not in MODE_FIELDS)
        return
    yield from (each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))
