"""Cells of the program's own: NNX's `initialize_carry` takes the shape first, and streams."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from flax import linen as nn

from bridge.rewrite.observe._records import Making
from bridge.rewrite.syntax._source import Edit, is_docstring, names_in

from ._method import Method
from ._refusals import NotRewritableError


def splits_all(makings: Sequence[Making]) -> bool:
    """Whether each step of an RNN draws other keys, as in NNX."""
    given = [dict(making.made["split_rngs"]) for making in makings]
    return all(split for each in given for name, split in each.items() if name != "params")


def is_cell(cls: type | None) -> bool:
    """Whether a class is a cell."""
    return cls is not None and issubclass(cls, nn.RNNCellBase)


def carry_edits(method: Method) -> Iterator[Edit]:
    """The edits of the method that makes a cell's first carry.

    Raises NotRewritableError if the method takes other arguments than Flax's cells do.
    """
    node, source = method.node, method.source
    if node.name != "initialize_carry" or not is_cell(method.plan.cls):
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
    body = [each for each in node.body if not _only_deletes(each, key.arg)]
    yield from (source.lines_of(each) for each in node.body if each not in body)
    if body and any(key.arg in names_in(each) for each in body):
        statement = next(each for each in body if not is_docstring(each))
        start = source.start(statement)
        made = f"{key.arg} = (nnx.Rngs(0) if {streams} is None else {streams})()"
        yield Edit(start, start, f"{made}\n{' ' * statement.col_offset}")


def _only_deletes(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.Delete) and ast.unparse(statement) == f"del {name}"
