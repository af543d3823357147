"""Methods of Linen's modules that NNX lacks, or has in another way."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from flax import linen as nn
from flax import nnx

from bridge._train_eval import MODE_NAMES
from bridge.rewrite.observe._records import below
from bridge.rewrite.plan._method import Method
from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.syntax._source import (
    Edit,
    bound_in,
    is_docstring,
    is_self,
    names_in,
    walk_without,
)
from bridge.rewrite.syntax._taint import STATEFUL

from ._dead import block_of

# Methods that NNX lacks: those that take or give a tree of variables, and those of one variable.
_OF_TREES = ("apply", "bind", "clone", "copy", "init", "unbind")
_OF_VARIABLES = (
    *("get_variable", "has_rng", "param", "put_variable"),
    *("scope", "variable", "variables"),
)
# A Linen program passes keys in `rngs=`, so this note keeps no class from being exported there.
DRAWS = "keys are drawn from an NNX stream"


class States:
    """The calls of such methods in one method.

    The blocks `dead` did not run. `notes` has what a person has to look at: line and text.
    """

    def __init__(self, method: Method, dead: Sequence[list[ast.stmt]]) -> None:
        self.method, self.source, self.plan = method, method.source, method.plan
        self.notes: list[tuple[int, str]] = []
        self.dead = {statement for block in dead for statement in block}

    def _handed_on(self, node: ast.Attribute) -> Iterator[Edit]:
        """A method that a function is given, or that is called by another name."""
        parent = self.source.parents[node]
        is_called = isinstance(parent, ast.Call) and parent.func is node
        if is_called or node.attr not in (*STATEFUL, "put_variable"):
            return
        if node.attr != "make_rng":
            raise NotRewritableError("method-handed-on", node, name=node.attr)
        self.notes.append((node.lineno, DRAWS))
        yield self.source.edit(node, "(lambda name: self.rngs[name]())")

    def _merged(self, node: ast.Call) -> Iterator[Edit]:
        """Linen raises where both are given; in NNX the call wins, as `eval()` sets the field."""
        arguments = dict(zip(("name", "a", "b"), node.args, strict=False))
        arguments |= {str(k.arg): k.value for k in node.keywords}
        if arguments.keys() != {"name", "a", "b"}:
            raise NotRewritableError("merge-param", node)
        field, given = (self.method.call_text(arguments[each]) for each in ("a", "b"))
        if field != given:
            text = f"{given} if {given} is not None else {field}"
            is_whole = isinstance(self.source.parents[node], ast.Assign | ast.keyword | ast.Return)
            yield self.source.edit(node, text if is_whole else f"({text})")
            return
        # The field has become this argument of the call.
        statement = self.source.parents[node]
        if isinstance(statement, ast.Assign) and bound_in(statement) == {given}:
            yield self.source.lines_of(statement)
        else:
            yield self.source.edit(node, given)

    def edits(self) -> Iterator[Edit]:
        """The edits.

        Raises NotRewritableError if a call has no counterpart.
        """
        for node in walk_without(self.method.node.body, self.dead.__contains__):
            if isinstance(node, ast.Attribute) and is_self(node):
                yield from self._handed_on(node)
            if isinstance(node, ast.If) and merged_field(node) in self.plan.mode_fields:
                # The field has become this argument of the call.
                yield self.source.lines_of(node)
            if not isinstance(node, ast.Call):
                continue
            if self.method.references.value_of(node.func) is nn.merge_param:
                yield from self._merged(node)
                continue
            if isinstance(node.func, ast.Attribute) and node.func.attr == "initialize_carry":
                yield from self._carry(node)
            if not is_self(node.func):
                continue
            if node in self.plan.slots:
                continue
            name = node.func.attr  # pyright: ignore
            if name == "is_initializing" or (
                name == "is_mutable_collection" and _collection(node) == "params"
            ):
                yield from self._constant(node, value=False)
            elif name == "is_mutable_collection":
                if _collection(node) != "intermediates" and not self._is_under_mode(node):
                    self.notes.append(
                        (node.lineno, "NNX state is always mutable, in evaluation too")
                    )
                yield from self._constant(node, value=True)
            elif name == "has_variable" and self._is_never_made(node):
                self.notes.append(
                    (node.lineno, "no run made this variable: it is taken not to be there")
                )
                yield from self._constant(node, value=False)
            elif name == "has_variable":
                yield from self._always(node)
            elif name == "sow":
                yield from self._sow(node)
            elif name == "perturb":
                self._perturb(node)
            elif name == "make_rng":
                self.notes.append((node.lineno, DRAWS))
                yield self.source.edit(node, f"self.rngs{self._stream(node)}()")
            elif name in _OF_TREES and not self._ran(node):
                self.notes.append((node.lineno, f"self.{name} is called where nothing ran"))
            elif name in (*_OF_TREES, *_OF_VARIABLES):
                raise NotRewritableError("no-method", node, name=name)

    def _ran(self, node: ast.AST) -> bool:
        return self.source.statement_of(node).lineno in self.method.lines

    def _stream(self, node: ast.Call) -> str:
        """How a stream is read: `Rngs` has methods named as distributions, as `gumbel`."""
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if not given:
            return ".params"
        name = given[0].value if isinstance(given[0], ast.Constant) else None
        is_plain = isinstance(name, str) and name.isidentifier() and not hasattr(nnx.Rngs, name)
        return f".{name}" if is_plain else f"[{self.method.call_text(given[0])}]"

    def _carry(self, node: ast.Call) -> Iterator[Edit]:
        """NNX's cells take the shape first, and streams in the place of the key."""
        cell = node.func.value  # pyright: ignore
        for slot in self.method.slots:
            program = self.method.program
            layer = program.layer_of(program.records.base_of(slot.makings[0].cls))
            is_it = cell is slot.node or (isinstance(cell, ast.Name) and cell.id == slot.variable)
            is_own = _is_cell(self.method.program.records.base_of(slot.makings[0].cls))
            if not is_it or not (layer or is_own) or slot.linen:
                continue
            if len(node.args) != 2 or node.keywords:
                raise NotRewritableError("carry-call", node)
            key, shape = (self.method.call_text(each) for each in node.args)
            begin, end = self.source.start(node.args[0]), self.source.end(node.args[1])
            yield Edit(begin, end, f"{shape}, nnx.Rngs({key})")

    def _is_under_mode(self, node: ast.AST) -> bool:
        """Whether a condition around a call, or beside it, asks for training."""
        for each in self.source.ancestors(node):
            test = each.test if isinstance(each, ast.If | ast.IfExp) else each
            if isinstance(test, ast.expr) and names_in(test) & {*MODE_NAMES}:
                return True
        return False

    def _always(self, node: ast.Call) -> Iterator[Edit]:
        """What is true behind the constructor, itself or by its variable."""
        statement = self.source.parents[node]
        name = statement.targets[0] if isinstance(statement, ast.Assign) else None
        uses = [
            each
            for each in ast.walk(self.method.node)
            if isinstance(name, ast.Name) and isinstance(each, ast.Name) and each.id == name.id
        ]
        if len([each for each in uses if isinstance(each.ctx, ast.Store)]) != 1:
            yield from self._constant(node, value=True)
            return
        yield self.source.lines_of(statement)
        for each in uses:
            if isinstance(each.ctx, ast.Load):
                yield from self._constant(each, value=True)

    def _is_never_made(self, node: ast.Call) -> bool:
        """Whether no run of the class made a variable, which is asked for by its name."""
        given = [each.value for each in node.args if isinstance(each, ast.Constant)]
        if len(given) != 2 or node.keywords:
            return False
        records, (collection, name) = self.method.program.records, given
        return not any(
            name in below(records.variables[each.run], each.path).get(str(collection), {})
            for each in records.of_class(self.plan.cls)
        )

    def _constant(self, node: ast.expr, *, value: bool) -> Iterator[Edit]:
        """What is known: `x and not self.is_initializing()` is `x`, `False or x` too."""
        parent = self.source.parents[node]
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
            yield from self._constant(parent, value=not value)
            return
        if isinstance(parent, ast.BoolOp) and value is isinstance(parent.op, ast.And):
            others = [each for each in parent.values if each is not node]
            if len(others) == 1:
                yield self.source.edit(parent, self.method.call_text(others[0]))
                return
        if isinstance(parent, ast.If) and parent.test is node:
            edits = branch_edits(self.method, parent, value=value)
            if edits is not None:
                yield from edits
                return
        yield self.source.edit(node, str(value))

    def _perturb(self, node: ast.Call) -> None:
        """Has one name in both; Linen's adds nothing where no perturbations are given."""
        if len(node.args) > 2 or any(k.arg == "collection" for k in node.keywords):
            raise NotRewritableError("perturb-collection", node)
        self.notes.append(
            (node.lineno, "perturb adds to the state, and warns, outside of nnx.capture")
        )

    def _sow(self, node: ast.Call) -> Iterator[Edit]:
        first = node.args[0] if node.args else None
        if (
            not (isinstance(first, ast.Constant) and first.value == "intermediates")
            or len(node.args) != 3
            or node.keywords
        ):
            raise NotRewritableError("sow-collection", node)
        yield self.source.edit(first, "nnx.Intermediate")


def merged_field(node: ast.AST) -> str | None:
    """The field that a statement takes where the call gives nothing: `if a is None: a = self.a`."""
    match node:
        case ast.If(
            test=ast.Compare(
                left=ast.Name(id=name), ops=[ast.Is()], comparators=[ast.Constant(value=None)]
            ),
            body=[ast.Assign(targets=[ast.Name(id=target)], value=value)],
            orelse=[],
        ) if target == name and is_self(value, name):
            return name
    return None


def _collection(node: ast.Call) -> Any:
    """The collection that a call asks for, None if it is not written out."""
    given = [*node.args, *(k.value for k in node.keywords if k.arg == "col")]
    return given[0].value if given and isinstance(given[0], ast.Constant) else None


_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)


def branch_edits(method: Method, node: ast.If, *, value: bool) -> Iterator[Edit] | None:
    """The edits that leave one branch of a statement.

    `value` is the value of its condition. Returns None if the statement has to stay as it is.
    """
    source = method.source
    block = block_of(source, node)
    kept, gone = (node.body, node.orelse) if value else (node.orelse, node.body)
    makers = {source.statement_of(slot.node) for slot in method.slots}
    if not _is_simple([*kept, *gone]) or makers & {*kept, *gone}:
        return None
    if any(line.lstrip().startswith("#") for line in source.render(node).split("\n")):
        return None
    if not kept:
        return None if block == [node] else iter([source.lines_of(node)])
    return _unindented(method, node, kept)


def _unindented(method: Method, node: ast.If, kept: list[ast.stmt]) -> Iterator[Edit]:
    source, width = method.source, kept[0].col_offset - node.col_offset
    yield Edit(source.start(node), source.start(kept[0]), "")
    last = kept[-1].end_lineno or kept[-1].lineno
    for line in range(kept[0].lineno + 1, last + 1):
        begin = source.offset(line, 0)
        if source.data[begin : begin + width].isspace():
            yield Edit(begin, begin + width, "")
    if source.end(kept[-1]) < source.end(node):
        yield Edit(source.end(kept[-1]), source.end(node), "")


def _is_simple(statements: list[ast.stmt]) -> bool:
    """Whether nothing in statements depends on how far they are indented."""
    return all(
        isinstance(each, _SIMPLE)
        and not any(
            isinstance(n, ast.Constant | ast.JoinedStr) and n.lineno != n.end_lineno
            for n in ast.walk(each)
        )
        for each in statements
    )


def _is_cell(cls: type | None) -> bool:
    """Whether a class is a cell."""
    return cls is not None and issubclass(cls, nn.RNNCellBase)


def carry_edits(method: Method) -> Iterator[Edit]:
    """The edits of the method that makes a cell's first carry.

    Raises NotRewritableError if the method takes other arguments than Flax's cells do.
    """
    node, source = method.node, method.source
    if node.name != "initialize_carry" or not _is_cell(method.plan.cls):
        return
    given = node.args
    names = [each.arg for each in (*given.posonlyargs, *given.args)]
    if len(names) != 3 or given.kwonlyargs or given.vararg or given.kwarg or given.defaults:
        raise NotRewritableError("carry-signature", node)
    _, key, shape = given.args
    text = source.render(shape, list(method.references.edits(shape)))
    streams = "rngs" if key.arg != "rngs" else "streams"
    begin, end = source.start(key), source.end(shape)
    yield Edit(begin, end, f"{text}, {streams}: nnx.Rngs | None = None, carry_init=None")
    deletion = f"del {key.arg}"
    body = [e for e in node.body if not (isinstance(e, ast.Delete) and ast.unparse(e) == deletion)]
    yield from (source.lines_of(each) for each in node.body if each not in body)
    if body and any(key.arg in names_in(each) for each in body):
        statement = next(each for each in body if not is_docstring(each))
        start = source.start(statement)
        made = f"{key.arg} = (nnx.Rngs(0) if {streams} is None else {streams})()"
        yield Edit(start, start, f"{made}\n{' ' * statement.col_offset}")
