"""Decides what expressions become, by what their values are."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flax import linen as nn

from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.plan._variables import type_text
from bridge.rewrite.syntax._source import bound_in

from ._changes import Arguments, Before, Change, Decision, Part, separated
from ._kinds import GONE, OF_MODEL, OTHER, Kind, Value
from ._program import File, Place, Program


class Expressions:
    """The expressions of a function; `Body` has the rest of it.

    `names` has the values of the names around the function. `model` says how the model is called.
    `changes` has what was decided.
    """

    def __init__(
        self,
        program: Program,
        file: File,
        node: ast.FunctionDef | ast.Lambda,
        names: dict[str, Value],
        model: str,
    ) -> None:
        self.program, self.file, self.source, self.node = program, file, file.source, node
        self.names, self.model = dict(names), model
        self.changes = list[Decision]()
        # What updates in place change of states.
        self.replaced = {"params", "opt_state", "step"}

    def _call(self, node: ast.Call) -> Value:
        raise NotImplementedError

    def _inner(self, node: ast.FunctionDef | ast.Lambda) -> Value:
        raise NotImplementedError

    def _planned(self, place: Place) -> Value:
        raise NotImplementedError

    def _block(self, body: Sequence[ast.stmt]) -> None:
        raise NotImplementedError

    def _value(self, node: ast.expr) -> Value:
        """What an expression is, after the changes in it were decided."""
        match node:
            case ast.Name():
                return self._name(node)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self._call(node)
            case ast.Subscript():
                return self._subscript(node)
            case ast.Tuple():
                return self._tuple(node)
            case ast.Dict():
                return self._dict(node)
            case ast.Lambda():
                return self._inner(node)
            case _:
                for each in ast.iter_child_nodes(node):
                    self._inside(each)
                return OTHER

    def _inside(self, node: ast.AST) -> None:
        """Statements and expressions of a part of a statement, such as an `except`."""
        if isinstance(node, ast.expr):
            if not isinstance(getattr(node, "ctx", None), ast.Store):
                self._plain(node)
            return
        for each in self._parts(node):
            self._inside(each)

    def _parts(self, node: ast.AST) -> Iterator[ast.AST]:
        """The parts of a node that are in no block, after its blocks in their order."""
        for _, field in ast.iter_fields(node):
            if isinstance(field, list) and field and isinstance(field[0], ast.stmt):
                self._block(field)
            else:
                given = field if isinstance(field, list) else [field]
                yield from (each for each in given if isinstance(each, ast.AST))

    def _rest(self, args: Iterable[ast.expr], keywords: Iterable[ast.keyword]) -> None:
        for each in [*args, *(k.value for k in keywords)]:
            self._plain(each.value if isinstance(each, ast.Starred) else each)

    def _plain(self, node: ast.expr, value: Value | None = None) -> None:
        """An expression in a place about which nothing is known."""
        value = self._value(node) if value is None else value
        text = ast.unparse(node)
        if value.kind is Kind.PARAMS:
            self._change(node, f"nnx.state({value.text}, nnx.Param)" if value.text else text)
            if not value.text:
                raise NotRewritableError("variables-use", node, text=text)
        elif value.kind is Kind.VARIABLES:
            raise NotRewritableError("variables-use", node, text=text)
        elif value.kind is Kind.STATISTICS and value.text:
            self._change(node, value.text)
        elif value.kind in GONE:
            raise NotRewritableError("statistics-use", node, text=text)
        elif value.kind in (Kind.APPLY, Kind.INIT):
            raise NotRewritableError("model-passed", node, name=text)
        elif value.kind is Kind.MODEL and value.made is not None:
            self._postponed(value.made)
        elif value.kind is Kind.TUPLE and value.is_special:
            if not isinstance(node, ast.Tuple):
                if all(p.kind in (Kind.OTHER, Kind.STATE) for p in value.parts):
                    return
                raise NotRewritableError("variables-use", node, text=text)
            for each, part in zip(node.elts, value.parts, strict=True):
                self._plain(each, part)

    def _change(self, node: ast.AST, *parts: Part) -> None:
        # What is decided later knows more: where a name is used, besides what it is.
        self.changes = [c for c in self.changes if not (isinstance(c, Change) and c.node is node)]
        self.changes.append(Change(node, parts))

    def _before(self, node: ast.expr, *parts: Part) -> None:
        """A statement above that of an expression."""
        below: ast.AST = node
        for each in self.source.ancestors(node):
            if isinstance(each, ast.stmt):
                is_first = isinstance(each, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr)
                line = self.source.lines[each.lineno - 1][: each.col_offset]
                if not is_first or line.strip():
                    raise NotRewritableError("training-line", each)
                self.changes.append(Before(each, parts))
                return
            if not isinstance(each, ast.Tuple | ast.Call | ast.keyword | ast.Attribute | ast.BinOp):
                raise NotRewritableError("training-line", below)
            below = each

    def _is_local(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self.names

    def _name(self, node: ast.Name) -> Value:
        value = self.names.get(node.id)
        if value is None:
            found = self.file.value_of(node)
            place = self.program.place_of(found)
            if place is not None and self.program.node_at(place) is not None:
                return self._planned(place)
            return self._global_model(node) if isinstance(found, nn.Module) else OTHER
        if value.kind is Kind.STALE:
            raise NotRewritableError("old-state", node, name=node.id)
        if value.text and value.text != node.id:
            self._change(node, value.text)
        return value

    def _global_model(self, node: ast.Name) -> Value:
        """A Linen module that the file makes at its top."""
        for each in self.source.tree.body:
            call = each.value if isinstance(each, ast.Assign) else None
            if isinstance(call, ast.Call) and bound_in(each) == {node.id}:
                if self.file.made(call.func) is None:
                    break
                self._postponed(call)
                return Value(Kind.MODEL, node.id)
        raise NotRewritableError("model-passed", node, name=node.id)

    def _postponed(self, call: ast.Call) -> None:
        """A constructor's call without the keys and sizes, which are given later."""
        parts: list[Sequence[Part]] = [[call.func], *([each] for each in call.args)]
        parts += [[f"{k.arg}=" if k.arg else "**", k.value] for k in call.keywords]
        if len(parts) == 1:
            self._change(call, call.func)
        else:
            self._change(call, "functools.partial", Arguments(tuple(map(tuple, parts))))

    def _attribute(self, node: ast.Attribute) -> Value:
        own = self.names.get(node.value.id) if isinstance(node.value, ast.Name) else OTHER
        if own is None:
            place = self.program.place_of(self.file.value_of(node))
            if place is not None and self.program.node_at(place) is not None:
                return self._planned(place)
        if own is not None and own.kind is Kind.STALE and node.attr not in self.replaced:
            # An update in place leaves this field as it was.
            return Value(self._fields().get(node.attr, Kind.OTHER))
        holder = self._value(node.value)
        if holder.kind is Kind.STATE:
            return self._of_state(node, holder)
        if holder.kind is Kind.MODEL and node.attr in ("apply", "init"):
            kind = Kind.APPLY if node.attr == "apply" else Kind.INIT
            return Value(kind, holder.text, made=holder.made)
        if holder.kind in (Kind.MODEL, Kind.VARIABLES, Kind.PARAMS, *GONE):
            self._plain(node.value, holder)
        return OTHER

    def _of_state(self, node: ast.Attribute, state: Value) -> Value:
        text = state.text
        if not text:
            raise NotRewritableError("state-use", node, text=ast.unparse(node))
        if node.attr == "params":
            self._change(node, f"{text}.model")
            kind = self._fields().get("params", Kind.PARAMS)
            return Value(kind if kind in OF_MODEL else Kind.PARAMS, f"{text}.model")
        if node.attr == "apply_fn":
            return Value(Kind.APPLY)
        if node.attr == "step":
            self._change(node, f"{text}.optimizer.step[...]")
            return OTHER
        if node.attr in ("opt_state", "tx"):
            raise NotRewritableError("state-use", node, text=ast.unparse(node))
        kind = self._fields().get(node.attr, Kind.OTHER)
        if kind is Kind.STATISTICS:
            return Value(kind, f"nnx.state({text}.model, {type_text(node.attr)})")
        return Value(kind)

    def _fields(self) -> dict[str, Kind]:
        return {n: k for fields in self.program.fields.values() for n, k in fields.items()}

    def _subscript(self, node: ast.Subscript) -> Value:
        holder = self._value(node.value)
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if holder.kind is Kind.VARIABLES and key == "params":
            self._change(node, *([holder.text] if holder.text else [node.value]))
            return Value(Kind.PARAMS, holder.text)
        if (
            holder.kind in (Kind.VARIABLES, Kind.UPDATES)
            and key in self.program.recognizer.collections
        ):
            return Value(Kind.STATISTICS)
        if holder.kind is Kind.TUPLE and holder.is_special:
            if not isinstance(key, int) or not -len(holder.parts) <= key < len(holder.parts):
                raise NotRewritableError("variables-use", node, text=ast.unparse(node))
            place = key % len(holder.parts)
            if len(holder.kept) == 1:
                self._change(node, node.value)
            elif place in holder.kept and holder.kept.index(place) != place:
                self._change(node.slice, str(holder.kept.index(place)))
            return holder.parts[place]
        self._plain(node.value, holder)
        self._plain(node.slice)
        return OTHER

    def _tuple(self, node: ast.Tuple) -> Value:
        parts = [self._value(each) for each in node.elts]
        for each, part in zip(node.elts, parts, strict=True):
            if part.kind in (Kind.MODEL, Kind.APPLY, Kind.INIT):
                self._plain(each, part)
        value = Value(Kind.TUPLE, parts=tuple(parts))
        if not value.is_special:
            return OTHER if all(p == OTHER for p in parts) else value
        kept: list[Sequence[Part]] = [[node.elts[i]] for i in value.kept]
        if len(kept) == 1 and len(parts) > 1:
            self._change(node, *kept[0])
        elif len(kept) < len(parts):
            is_bare = not self.source.render(node).startswith("(")
            text = separated(kept)
            self._change(node, *(text if is_bare else ("(", *text, ")")))
        return value

    def _dict(self, node: ast.Dict) -> Value:
        """The variables that a model is applied to, or a dict of other things."""
        found: list[tuple[Any, Value, ast.expr]] = []
        for key, each in zip(node.keys, node.values, strict=True):
            name = key.value if isinstance(key, ast.Constant) else None
            found.append((name, self._value(each), each))
            if key is not None and not isinstance(key, ast.Constant):
                self._plain(key)
        params = next((v for n, v, _ in found if n == "params" and v.kind is Kind.PARAMS), None)
        if params is not None and all(v.is_gone for n, v, _ in found if n != "params"):
            return Value(Kind.VARIABLES, params.text)
        for _, value, each in found:
            self._plain(each, value)
        return OTHER
