"""Methods of Linen's modules that NNX lacks, or has in another way."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from flax import linen as nn

from ._layers import layer_of
from ._method import Method
from ._plans import LeftLinenError
from ._source import Edit, is_self


class States:
    """The calls of such methods in one method.

    Args:
        method: the method.
        dead: blocks that did not run.
    """

    def __init__(self, method: Method, dead: Sequence[list[ast.stmt]]) -> None:
        self.method, self.source, self.plan = method, method.source, method.plan
        self.dead = {statement for block in dead for statement in block}

    def _calls(self) -> Iterator[ast.Call]:
        """The calls in what ran."""
        stack: list[ast.AST] = list(self.method.node.body)
        while stack:
            node = stack.pop()
            if node in self.dead:
                continue
            if isinstance(node, ast.Call):
                yield node
            stack.extend(ast.iter_child_nodes(node))

    def _merged(self, node: ast.Call) -> Iterator[Edit]:
        """Linen raises where both are given; in NNX the call wins, as `eval()` sets the field."""
        if len(node.args) != 3 or node.keywords:
            raise LeftLinenError("nn.merge_param in another form", node)
        field, given = (self.method.call_text(each) for each in node.args[1:])
        yield self.source.edit(node, f"({given} if {given} is not None else {field})")

    def edits(self) -> Iterator[Edit]:
        """The edits.

        Raises:
            LeftLinenError: one has no counterpart.
        """
        for node in self._calls():
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
            if name in ("is_initializing", "is_mutable_collection"):
                yield self._never(node)
            elif name == "has_variable":
                yield self.source.edit(node, "True")
            elif name == "sow":
                yield from self._sow(node)
            elif name == "perturb":
                self._perturb(node)
            elif name == "make_rng":
                stream = node.args[0] if node.args else None
                if not (isinstance(stream, ast.Constant) and isinstance(stream.value, str)):
                    raise LeftLinenError("a stream whose name is not written out", node)
                self.plan.note(node, "keys are drawn from an NNX stream")
                yield self.source.edit(node, f"self.rngs.{stream.value}()")
            elif name in (
                "param",
                "variable",
                "get_variable",
                "put_variable",
                "has_rng",
                "clone",
                "copy",
                "init",
                "apply",
                "bind",
                "unbind",
                "scope",
                "variables",
            ):
                raise LeftLinenError(f"self.{name} has no counterpart here", node)

    def _carry(self, node: ast.Call) -> Iterator[Edit]:
        """NNX's cells take the shape first, and streams in the place of the key."""
        cell = node.func.value  # pyright: ignore
        for slot in self.method.slots:
            layer = layer_of(self.method.program.records.base_of(slot.makings[0].cls))
            is_it = cell is slot.node or (isinstance(cell, ast.Name) and cell.id == slot.variable)
            if not is_it or layer is None or slot.linen:
                continue
            if len(node.args) != 2 or node.keywords:
                raise LeftLinenError("a carry that is made in another way", node)
            key, shape = (self.method.call_text(each) for each in node.args)
            begin, end = self.source.start(node.args[0]), self.source.end(node.args[1])
            yield Edit(begin, end, f"{shape}, nnx.Rngs({key})")

    def _never(self, node: ast.Call) -> Edit:
        """`x and not self.is_initializing()` is `x`."""
        negation = self.source.parents[node]
        if isinstance(negation, ast.UnaryOp) and isinstance(negation.op, ast.Not):
            both = self.source.parents[negation]
            if (
                isinstance(both, ast.BoolOp)
                and isinstance(both.op, ast.And)
                and len(both.values) == 2
            ):
                other = both.values[0] if both.values[1] is negation else both.values[1]
                return self.source.edit(both, self.method.call_text(other))
            return self.source.edit(negation, "True")
        return self.source.edit(node, "False")

    def _perturb(self, node: ast.Call) -> None:
        """Has one name in both; Linen's adds nothing where no perturbations are given."""
        if len(node.args) > 2 or any(k.arg == "collection" for k in node.keywords):
            raise LeftLinenError("perturb in another collection", node)
        self.plan.note(node, "perturb adds to the state, and warns, outside of nnx.capture")

    def _sow(self, node: ast.Call) -> Iterator[Edit]:
        first = node.args[0] if node.args else None
        if (
            not (isinstance(first, ast.Constant) and first.value == "intermediates")
            or len(node.args) != 3
            or node.keywords
        ):
            raise LeftLinenError("sow into another collection, or with its own reduction", node)
        yield self.source.edit(first, "nnx.Intermediate")
