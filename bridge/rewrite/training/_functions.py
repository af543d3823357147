"""Decides what each function of the program becomes: its statements, expressions and calls."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from flax import core, jax_utils
from flax import linen as nn
from flax.training.train_state import TrainState

from bridge._conversion.collections import OUTPUTS
from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.plan._variables import type_text
from bridge.rewrite.syntax._source import (
    arguments_of,
    bound_in,
    is_docstring,
    is_fixed,
    is_none,
    names_in,
)

from ._changes import Arguments, Before, Change, Decision, Dropped, Part, Removed, separated
from ._program import (
    DROPPED,
    GONE,
    OF_MODEL,
    OTHER,
    File,
    Kind,
    Place,
    Program,
    Value,
    first_line,
    fresh,
)

_UNBOXING = (nn.unbox, nn.meta.unbox, core.freeze, core.unfreeze)
# What they return is of the kind that they are given.
_KEEPING = (jax_utils.replicate, jax_utils.unreplicate, jax.device_put, jax.device_get)
# A function of a state returns it, so these may take modules as the trees that they are.
_OF_TREES = (jax.pmap, jax.vmap, jax.checkpoint, jax.named_call)
_GRADIENTS = {jax.grad: "nnx.grad", jax.value_and_grad: "nnx.value_and_grad"}


# A call whose fields are not known.
_ANY = ast.Call(ast.Name("_"), [], [ast.keyword(None, ast.Name("_"))])


# Above lines that did not run and are not rewritten.
UNREACHED = ('raise NotImplementedError("what follows is still Linen: no step ran it")',)


def plan_function(program: Program, place: Place) -> Value:
    """What a function at the top of a file takes and returns; its changes go to its file.

    Raises NotRewritableError if the function stays as it is.
    """
    if place not in program.kinds:
        # What did not run is not rewritten.
        return OTHER
    if place not in program.functions:
        # A function that calls itself gives what its other branches give.
        arguments = tuple(program.kinds[place].items())
        program.functions[place] = Value(Kind.FUNCTION, parts=(OTHER,), arguments=arguments)
        node = program.node_at(place)
        if node is not None:
            body = _body(program, place, node)
            program.functions[place] = body.function()
            program.files[place.file].changes += body.changes
    return program.functions[place]


def is_concerned(program: Program, place: Place) -> bool:
    """Whether a function that did not run would have to be another one."""
    node = program.node_at(place)
    if node is None:
        return False
    body = _body(program, place, node)
    try:
        body.function()
    except NotRewritableError:
        return True
    reads = ("params", "apply_fn", "apply_gradients", "opt_state")
    return bool(body.changes) or any(
        isinstance(each, ast.Attribute) and each.attr in reads for each in ast.walk(node)
    )


def _body(program: Program, place: Place, node: ast.FunctionDef) -> Body:
    file = program.files[place.file]
    return Body(program, file, node, {}, _name_of_model(file, node))


def _name_of_model(file: File, node: ast.AST) -> str:
    """A name for the model in a function."""
    taken = set(vars(file.module))
    for each in ast.walk(node):
        if isinstance(each, ast.arg):
            taken.add(each.arg)
        elif isinstance(each, ast.Name) and not _is_definition(file, each):
            taken.add(each.id)
    return next(name for name in ("model", "network", "nnx_model") if name not in taken)


def _is_definition(file: File, node: ast.Name) -> bool:
    """Whether a name is a Linen module that is only initialised and applied here."""
    parent = file.source.parents[node]
    if isinstance(node.ctx, ast.Store):
        value = parent.value if isinstance(parent, ast.Assign) else None
        return isinstance(value, ast.Call) and file.made(value.func) is not None
    return isinstance(parent, ast.Attribute) and parent.attr in ("init", "apply")


class Body:
    """A function, and the functions in it.

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
        self.returns: list[Value] = []
        self.is_seen = bool(
            {*range(self.node.lineno, (self.node.end_lineno or 0) + 1)}
            & {*self.program.lines.get(self.source.file, ())}
        )

    def function(self) -> Value:
        """The function as a value, after its changes were decided."""
        arguments = tuple(self._arguments())
        if isinstance(self.node, ast.Lambda):
            self.returns.append(self._given(self.node.body))
        else:
            self._block(self.node.body)
        returned = next((r for r in self.returns if r.is_special), None)
        returned = returned or (self.returns[0] if self.returns else OTHER)
        if any(_shape(each) != _shape(returned) for each in self.returns):
            raise NotRewritableError("returns-differ", self.node)
        found = Value(Kind.FUNCTION, parts=(returned,), arguments=arguments)
        if isinstance(self.node, ast.FunctionDef):
            self._annotate(self.node.returns, returned)
            for decorator in self.node.decorator_list:
                found = self._decorated(decorator, found)
        return found

    def _arguments(self) -> Iterable[tuple[str, Kind]]:
        name = getattr(self.node, "name", "<lambda>")
        place = Place(self.source.file, first_line(self.node), name)
        kinds = self.program.kinds.get(place, {})
        for each in arguments_of(self.node):
            kind = kinds.get(each.arg, Kind.OTHER)
            if kind is Kind.PARAMS and not self._is_applied(each.arg):
                # Gradients look like parameters.
                kind = Kind.OTHER
            if kind in DROPPED and not {*OF_MODEL, Kind.STATE} & {*kinds.values()}:
                # A collection that the caller takes out of the model.
                kind = Kind.OTHER
            if kind in DROPPED:
                self.changes.append(Dropped(each, arguments_of(self.node)[each] or each))
                self.names[each.arg] = Value(kind)
            elif kind in OF_MODEL:
                typed = ": nnx.Module" if each.annotation is not None else ""
                self._change(each, f"{self.model}{typed}")
                self.names[each.arg] = Value(kind, self.model)
            else:
                has_name = kind in (Kind.STATE, Kind.MODEL)
                self.names[each.arg] = Value(kind, each.arg if has_name else "")
            yield each.arg, kind

    def _is_applied(self, name: str) -> bool:
        """Whether an argument is given to the model as its parameters."""
        for each in ast.walk(self.node):
            if isinstance(each, ast.Dict):
                for key, value in zip(each.keys, each.values, strict=True):
                    is_params = isinstance(key, ast.Constant) and key.value == "params"
                    if is_params and isinstance(value, ast.Name) and value.id == name:
                        return True
        return name in ("params", "parameters")

    def _annotate(self, node: ast.expr | None, returned: Value) -> None:
        """An annotation of what is returned, without the parts that are gone."""
        if node is None:
            return
        if returned.kind in OF_MODEL:
            self._change(node, "nnx.Module")
        given = node.slice if isinstance(node, ast.Subscript) else None
        if returned.kind is not Kind.TUPLE or given is None:
            return
        each = given.elts if isinstance(given, ast.Tuple) else [given]
        if len(each) != len(returned.parts):
            raise NotRewritableError("return-annotation", node)
        for annotation, part in zip(each, returned.parts, strict=True):
            self._annotate(annotation, part)
        kept: list[Sequence[Part]] = [[each[i]] for i in returned.kept]
        if len(kept) == 1:
            self._change(node, *kept[0])
        elif len(kept) < len(each):
            self._change(given, *separated(kept))

    def _inner(self, node: ast.FunctionDef | ast.Lambda) -> Value:
        inner = Body(self.program, self.file, node, self.names, self.model)
        found = inner.function()
        self.changes.extend(inner.changes)
        return found

    def _forwarded(self, node: ast.FunctionDef) -> Value | None:
        """The `init` or `apply` that a function gives all its arguments to."""
        body = [each for each in node.body if not is_docstring(each)]
        call = body[0].value if isinstance(body[0], ast.Return) else None
        if len(body) != 1 or not isinstance(call, ast.Call) or node.args.vararg is None:
            return None
        given = [each.value for each in call.args if isinstance(each, ast.Starred)]
        if len(given) != 1 or ast.unparse(given[0]) != node.args.vararg.arg:
            return None
        changes = [*self.changes]
        value = self._value(call.func)
        self.changes = changes
        return value if value.kind in (Kind.INIT, Kind.APPLY) else None

    def _planned(self, place: Place) -> Value:
        return plan_function(self.program, place)

    def _block(self, body: Sequence[ast.stmt]) -> None:
        """Statements; those that did not run stay, and raise where they would have to be others."""
        reached = [each for each in body if self._is_reached(each)]
        end = body.index(reached[-1]) + 1 if reached else 0
        for statement in body[:end]:
            self._statement(statement)
        rest = [each for each in body[end:] if not is_docstring(each)]
        if not rest:
            return
        names, returns, replaced = dict(self.names), [*self.returns], {*self.replaced}
        changes = self.changes
        self.changes = []
        try:
            for statement in rest:
                self._statement(statement)
            is_right = not self.changes
        except NotRewritableError:
            is_right = False
        self.names, self.returns, self.replaced = names, returns, replaced
        self.changes = changes
        if not is_right:
            self.changes.append(Before(rest[0], UNREACHED))

    def _is_reached(self, node: ast.stmt) -> bool:
        """Whether a statement began to run, or the function that it is in did not run at all."""
        if not self.is_seen:
            return True
        body = getattr(node, "body", None)
        end = body[0].lineno if isinstance(body, list) else (node.end_lineno or 0) + 1
        decorators = getattr(node, "decorator_list", None)
        start = decorators[0].lineno if decorators else node.lineno
        return bool({*range(start, end)} & {*self.program.lines.get(self.source.file, ())})

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.FunctionDef() if (given := self._forwarded(node)) is not None:
                self.names[node.name] = given
                self.changes.append(Removed(node))
            case ast.FunctionDef():
                self.names[node.name] = self._inner(node)
            case ast.Delete(targets=targets) if all(self._is_without(each) for each in targets):
                self.changes.append(Removed(node))
            case ast.Return(value=None):
                self.returns.append(OTHER)
            case ast.Return():
                self.returns.append(self._given(node.value))
            case ast.Assign(targets=[target]):
                self._assign(node, target, node.value)
            case ast.AnnAssign(value=ast.expr() as value):
                self._assign(node, node.target, value)
            case ast.Expr(value=ast.Call() as call):
                value = self._value(call)
                if value.kind is Kind.STATE and value.text:
                    self.changes.append(Removed(node))
            case _:
                for each in self._parts(node):
                    self._inside(each)

    def _assign(self, node: ast.stmt, target: ast.expr, value_node: ast.expr) -> None:
        value = self._value(value_node)
        if isinstance(target, ast.Tuple):
            self._unpack(node, target, value, value_node)
        elif isinstance(target, ast.Name):
            if self._bind(target, value):
                self.changes.append(Removed(node))
            elif value.kind is Kind.MODEL and value.made is not None:
                if not self._is_kept(target.id):
                    self.changes.append(Removed(node))
                else:
                    self._postponed(value.made)
                    self.names[target.id] = Value(Kind.MODEL, target.id)
            elif value.kind is Kind.MODEL:
                self.names[target.id] = Value(Kind.MODEL, value.text or target.id)
        elif value.is_special and value.kind is not Kind.STATE:
            raise NotRewritableError("training-target", target, text=ast.unparse(target))
        else:
            self._plain(value_node, value)

    def _is_without(self, node: ast.expr) -> bool:
        """Whether a name is gone in the new program."""
        value = self.names.get(node.id, OTHER) if isinstance(node, ast.Name) else OTHER
        return value.kind in OF_MODEL or value.is_gone

    def _is_kept(self, name: str) -> bool:
        """Whether a Linen module is used for more than to make variables and to apply them."""
        return any(
            isinstance(each, ast.Name)
            and each.id == name
            and isinstance(each.ctx, ast.Load)
            and not _is_definition(self.file, each)
            for each in ast.walk(self.node)
        )

    def _bind(self, target: ast.Name, value: Value) -> bool:
        """Gives a name a value; whether the name itself is no longer needed."""
        name = target.id
        if value.kind is Kind.STATE:
            if value.text and value.text != name:
                self.names[value.text] = Value(Kind.STALE)
            self.names[name] = Value(Kind.STATE, value.text or name)
            return bool(value.text)
        self.names[name] = value
        if value.kind in OF_MODEL:
            if value.text:
                return True
            self._change(target, self.model)
            self.names[name] = Value(value.kind, self.model)
        return value.is_gone or value.kind in (Kind.APPLY, Kind.INIT)

    def _unpack(self, node: ast.stmt, target: ast.Tuple, value: Value, given: ast.expr) -> None:
        if value.kind is not Kind.TUPLE or not value.is_special:
            self._plain(given, value)
            for each in ast.walk(target):
                if isinstance(each, ast.Name):
                    self.names.pop(each.id, None)
            return
        if len(target.elts) != len(value.parts):
            raise NotRewritableError("training-target", target, text=ast.unparse(target))
        gone = []
        for each, part in zip(target.elts, value.parts, strict=True):
            if isinstance(each, ast.Tuple):
                self._unpack(node, each, part, given)
            elif not isinstance(each, ast.Name):
                if part.is_special:
                    raise NotRewritableError("training-target", each, text=ast.unparse(each))
            elif self._bind(each, part) and not part.is_gone:
                gone.append(each)
        if gone and len(gone) + len(value.parts) - len(value.kept) == len(value.parts):
            self.changes.append(Removed(node))
        elif gone:
            raise NotRewritableError("training-target", target, text=ast.unparse(target))
        elif not value.kept:
            if isinstance(self.source.parents[target], ast.stmt):
                self.changes.append(Removed(node))
        elif len(value.kept) < len(value.parts):
            kept: list[Sequence[Part]] = [[target.elts[i]] for i in value.kept]
            text = separated(kept)
            if len(kept) == 1:
                self._change(target, *text)
            elif self.source.render(target).startswith("("):
                self._change(target, "(", *text, ")")
            else:
                self._change(target, *text)

    def _given(self, node: ast.expr | None) -> Value:
        """A value that is returned: the model in the place of its parameters."""
        value = OTHER if node is None else self._value(node)
        if value.kind is Kind.MODEL and value.made is not None:
            self._postponed(value.made)
        if value.kind in (Kind.OTHER, Kind.TUPLE, Kind.STATE, Kind.MODEL, *OF_MODEL):
            return fresh(value)
        if node is None or value.kind is Kind.FUNCTION:
            return value
        self._plain(node, value)
        return OTHER

    # Expressions.

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

    # Calls.

    def _call(self, node: ast.Call) -> Value:
        made = None if self._is_local(node.func) else self.file.made(node.func)
        if made is not None:
            for each in [*node.args, *(k.value for k in node.keywords)]:
                self._plain(each)
            return Value(Kind.MODEL, made=node)
        function = None if self._is_local(node.func) else self.file.value_of(node.func)
        if function in _UNBOXING and len(node.args) == 1:
            value = self._value(node.args[0])
            if value.kind in (*OF_MODEL, *GONE):
                self._change(node, node.args[0])
                return value
            self._plain(node.args[0], value)
            return OTHER
        if function in _KEEPING and node.args:
            value = self._value(node.args[0])
            if value.kind in (Kind.STATE, *OF_MODEL) and value.text:
                self._rest(node.args[1:], node.keywords)
                return fresh(value)
        if function in (jax.jit, functools.partial, *_OF_TREES) and node.args:
            return self._wrapped(node, function)
        if function is jax.lax.scan and node.args:
            value = self._value(node.args[0])
            self._rest(node.args[1:], node.keywords)
            return fresh(value.parts[0]) if value.kind is Kind.FUNCTION else OTHER
        if function in _GRADIENTS and node.args:
            value = self._value(node.args[0])
            if value.kind is Kind.FUNCTION:
                return self._gradient(node, node.func, value, node.keywords)
        if isinstance(node.func, ast.Attribute):
            found = self._method(node, node.func)
            if found is not None:
                return found
        value = self._value(node.func)
        if value.kind is Kind.CLASS:
            self._rest(node.args, node.keywords)
            return Value(Kind.MODEL, made=node)
        if value.kind is Kind.INIT:
            return self._initialised(node, value)
        if value.kind is Kind.APPLY:
            return self._applied(node, value)
        if value.kind is Kind.GRADIENT:
            return self._arguments_of(node, value)
        if value.kind is Kind.FUNCTION:
            return self._arguments_of(node, value)
        self._plain(node.func, value)
        self._passed(node)
        self._rest(node.args, node.keywords)
        return OTHER

    def _method(self, node: ast.Call, function: ast.Attribute) -> Value | None:
        """A method of a state or a model."""
        if function.attr == "create":
            cls = self.file.value_of(function.value)
            if isinstance(cls, type) and issubclass(cls, TrainState):
                return self._created(node, function, cls)
        if function.attr not in ("apply_gradients", "replace"):
            return None
        holder = self._value(function.value)
        if holder.kind is Kind.STATE and function.attr in ("apply_gradients", "replace"):
            return self._updated(node, holder, function.attr)
        self._plain(function.value, holder)
        self._rest(node.args, node.keywords)
        return OTHER

    def _arguments_of(self, node: ast.Call, function: Value) -> Value:
        """A call of a function of the program."""
        kinds = dict(function.arguments)
        names = [*kinds]
        given = [*zip(names, node.args, strict=False)]
        given += [(None, each) for each in node.args[len(names) :]]  # pyright: ignore
        given += [(k.arg, k.value) for k in node.keywords]
        for name, each in given:
            own = each.value if isinstance(each, ast.Starred) else each
            value = self._value(own)
            if kinds.get(name or "") in DROPPED:
                keyword = self.source.parents[each]
                last = keyword if isinstance(keyword, ast.keyword) else each
                self.changes.append(Dropped(last, last))
                continue
            if value.kind in OF_MODEL and kinds.get(name or "") in OF_MODEL:
                if value.kind is Kind.PARAMS and not value.text:
                    raise NotRewritableError("variables-use", own, text=ast.unparse(own))
                if any(k.value is each for k in node.keywords):
                    raise NotRewritableError("params-keyword", own, name=name)
            elif value.kind is not Kind.STATE:
                self._plain(own, value)
        return fresh(function.parts[0]) if function.parts else OTHER

    def _wrapped(self, node: ast.Call, function: Any) -> Value:
        value = self._value(node.args[0])
        self._rest(node.args[1:], node.keywords)
        if value.kind in (Kind.INIT, Kind.APPLY):
            return value
        if value.kind is not Kind.FUNCTION:
            self._plain(node.args[0], value)
            return OTHER
        if function is jax.jit and self._needs_nnx(value):
            self._change(node.func, "nnx.jit")
        if function is functools.partial:
            for (_, kind), each in zip(value.arguments, node.args[1:], strict=False):
                if kind in DROPPED:
                    self.changes.append(Dropped(each, each))
            return dataclasses.replace(value, arguments=value.arguments[len(node.args) - 1 :])
        self._renumbered(node.keywords, value)
        return value

    def _renumbered(self, keywords: Iterable[ast.keyword], function: Value) -> None:
        """Positions of arguments, where some of these are dropped."""
        gone = [i for i, (_, kind) in enumerate(function.arguments) if kind in DROPPED]
        for each in keywords if gone else ():
            if each.arg not in ("static_argnums", "donate_argnums"):
                if each.arg in ("in_axes", "in_shardings", "static_argnames", "donate_argnames"):
                    raise NotRewritableError("argument-options", each.value, name=each.arg)
                continue
            numbers = getattr(each.value, "elts", [each.value])
            if not all(isinstance(n, ast.Constant) for n in numbers):
                raise NotRewritableError("argument-options", each.value, name=each.arg)
            kept = [n.value for n in numbers if n.value not in gone]
            moved = [number - sum(i < number for i in gone) for number in kept]
            self._change(each.value, f"({', '.join(map(str, moved))}{',' * (len(moved) == 1)})")

    def _decorated(self, decorator: ast.expr, found: Value) -> Value:
        value = self.file.value_of(decorator)
        keywords = decorator.keywords if isinstance(decorator, ast.Call) else ()
        if isinstance(decorator, ast.Call):
            is_partial = self.file.value_of(decorator.func) is functools.partial
            inner = decorator.args[0] if is_partial and decorator.args else decorator.func
            value = self.file.value_of(inner)
            if value in _GRADIENTS:
                return self._gradient(decorator, inner, found, keywords)
            decorator = inner
        if value in _GRADIENTS:
            return self._gradient(None, decorator, found, ())
        if value is jax.jit and self._needs_nnx(found):
            self._change(decorator, "nnx.jit")
        elif value not in (jax.jit, *_OF_TREES) and self._needs_nnx(found):
            raise NotRewritableError("training-decorator", decorator, text=ast.unparse(decorator))
        self._renumbered(keywords, found)
        return found

    def _needs_nnx(self, function: Value) -> bool:
        return any(part.is_special for part in function.parts) or any(
            kind in (Kind.STATE, *OF_MODEL) for _, kind in function.arguments
        )

    def _gradient(
        self,
        node: ast.Call | None,
        function: ast.expr,
        loss: Value,
        keywords: Iterable[ast.keyword],
    ) -> Value:
        """`jax.grad` and `jax.value_and_grad` of a loss."""
        if not loss.arguments or loss.arguments[0][1] not in OF_MODEL:
            return Value(Kind.OTHER)
        for each in keywords:
            if each.arg != "has_aux" or not isinstance(each.value, ast.Constant):
                raise NotRewritableError("gradient-option", each.value, name=each.arg)
        name = _GRADIENTS[self.file.value_of(function)]
        has_aux = any(k.value.value for k in keywords)  # pyright: ignore
        returned = loss.parts[0]
        self._change(function, name)
        if has_aux and len(returned.kept) == 1 and node is not None:
            given: list[Sequence[Part]] = [[each] for each in node.args]
            if node.func is function:
                self._change(node, name, "(", *separated(given), ")")
            else:
                self._change(node, name)
        gradient = OTHER
        if name == "nnx.grad":
            returned = Value(Kind.TUPLE, parts=(gradient, returned.parts[1])) if has_aux else OTHER
        else:
            returned = Value(Kind.TUPLE, parts=(returned, gradient))
        return Value(Kind.GRADIENT, parts=(returned,), arguments=loss.arguments)

    def _passed(self, node: ast.Call) -> None:
        """Refuses a function that needs NNX's transforms where JAX's would run it."""
        called = self.file.value_of(node.func)
        if not (getattr(called, "__module__", None) or "").startswith("jax"):
            return
        for each in [*node.args, *(k.value for k in node.keywords)]:
            is_partial = isinstance(each, ast.Call) and (
                self.file.value_of(each.func) is functools.partial
            )
            if is_partial or isinstance(each, ast.Name | ast.Attribute | ast.Lambda):
                value = self._value(each)
                if value.kind is Kind.FUNCTION and self._needs_nnx(value):
                    raise NotRewritableError(
                        "training-transform", node, text=ast.unparse(node.func)
                    )

    # Calls of the model.

    def _initialised(self, node: ast.Call, model: Value) -> Value:
        if not node.args or isinstance(node.args[0], ast.Starred):
            raise NotRewritableError("init-keys", node)
        keys = node.args[0]
        if isinstance(keys, ast.Dict):
            pairs = [*zip(keys.keys, keys.values, strict=True)]
            if not all(isinstance(k, ast.Constant) for k, _ in pairs):
                raise NotRewritableError("init-keys", keys)
            # Other streams draw from that of the parameters, as they do in Linen.
            pairs.sort(key=lambda pair: pair[0].value != "params")  # pyright: ignore
            names = [k.value for k, _ in pairs]  # pyright: ignore
            streams: list[Sequence[Part]] = [
                [*([] if name == "params" else [f"{name}="]), key]
                for name, (_, key) in zip(names, pairs, strict=True)
            ]
            again = "0"
        else:
            streams = [[keys]]
            is_name = isinstance(keys, ast.Name | ast.Attribute)
            again: Part = keys if is_name else "0"
        named = {str(each[0]) for each in streams}
        streams += [[f"{s}=", again] for s in self.program.streams if f"{s}=" not in named]
        self._plain(keys) if not isinstance(keys, ast.Dict) else self._rest(keys.values, ())
        holder = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        self._change(node, *self._made(node, model.made, model.text or holder, streams))
        return Value(Kind.VARIABLES)

    def _made(
        self,
        node: ast.Call,
        call: ast.Call | None,
        function: Part,
        streams: Iterable[Sequence[Part]],
    ) -> tuple[Part, ...]:
        """The call of a constructor."""
        made, parts = self.program.only, list[Sequence[Part]]()
        if call is not None:
            made, function = self.file.made(call.func) or made, call.func
            parts += [[each] for each in call.args]
            parts += [[f"{k.arg}=" if k.arg else "**", k.value] for k in call.keywords]
        for name, text in made.sizes(call or _ANY).items():
            if text == "...":
                raise NotRewritableError("size-unknown", node, name=name)
            parts.append([f"{name}={text}"])
        parts.append(["rngs=nnx.Rngs(", *separated(streams), ")"])
        return function, Arguments(tuple(map(tuple, parts)))

    def _applied(self, node: ast.Call, model: Value) -> Value:
        """A call of the model, with what `mutable=` and `rngs=` ask for."""
        if not node.args or isinstance(node.args[0], ast.Starred):
            raise NotRewritableError("variables-use", node, text=ast.unparse(node.func))
        variables = self._value(node.args[0])
        if variables.kind is not Kind.VARIABLES or not variables.text:
            raise NotRewritableError("variables-use", node, text=ast.unparse(node.args[0]))
        holder = self._configured(node, model.made, variables.text)
        name, returned = holder, OTHER
        kept: list[Sequence[Part]] = [[each] for each in node.args[1:]]
        self._rest(node.args[1:], ())
        for each in node.keywords:
            if each.arg == "mutable":
                returned = self._mutable(each.value)
            elif each.arg == "rngs" and not is_none(each.value):
                self._reseeded(node, each.value, holder)
            elif each.arg == "method":
                name = f"{holder}.{self._named_method(each.value)}"
            else:
                kept.append([f"{each.arg}=" if each.arg else "**", each.value])
                self._plain(each.value)
        arguments = Arguments(tuple(map(tuple, kept)))
        if self.program.sows:
            # As in Linen, where nobody asks for them, sown values go nowhere.
            self._change(node, f"nnx.capture({name}, nnx.Intermediate)", arguments, "[0]")
        else:
            self._change(node, name, arguments)
        return returned

    def _configured(self, node: ast.Call, made: ast.Call | None, model: str) -> str:
        """The name of the model, or of one with other fields that has the model's variables."""
        lines = {(self.source.file, n) for n in range(node.lineno, (node.end_lineno or 0) + 1)}
        if made is None or not lines & {*self.program.others}:
            return model
        if any(k.arg == "mutable" and not is_fixed(k.value) for k in node.keywords):
            raise NotRewritableError("model-fields", node, name=ast.unparse(made))
        taken = {self.model, *vars(self.file.module), *names_in(self.node), *bound_in(self.node)}
        other = next(n for n in ("configured", "configured_model", "other") if n not in taken)
        streams = [["0"], *([f"{stream}=0"] for stream in self.program.streams)]
        constructed = self._made(node, made, made.func, streams)
        self._before(node, f"{other} = nnx.eval_shape(lambda: ", *constructed, ")")
        self._before(node, f"nnx.update({other}, nnx.state({model}))")
        return other

    def _mutable(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Constant) and node.value is False:
            return OTHER
        names = [node] if isinstance(node, ast.Constant) else getattr(node, "elts", [node])
        known = self.program.recognizer.collections - {*OUTPUTS}
        if not all(isinstance(each, ast.Constant) and each.value in known for each in names):
            raise NotRewritableError("mutable-names", node, text=ast.unparse(node))
        return Value(Kind.TUPLE, parts=(OTHER, Value(Kind.UPDATES)))

    def _named_method(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.Attribute):
            return node.attr
        raise NotRewritableError("apply-method", node, text=ast.unparse(node))

    def _reseeded(self, node: ast.Call, keys: ast.expr, model: str) -> None:
        if isinstance(keys, ast.Dict) and all(isinstance(k, ast.Constant) for k in keys.keys):
            named = zip(keys.keys, keys.values, strict=True)
            given: list[Sequence[Part]] = [[f"{k.value}=", v] for k, v in named]  # pyright: ignore
            self._rest(keys.values, ())
        else:
            value = self._value(keys)
            may_lack = value.kind is Kind.OPTIONAL
            given = [["**(", keys, " or {})"] if may_lack else ["**", keys]]
            self._plain(keys, value)
        if self.program.is_stacked:
            given.append(['policy="match_shape"'])
        self._before(node, f"nnx.reseed({model}, ", *separated(given), ")")

    # Calls of a state.

    def _updated(self, node: ast.Call, state: Value, method: str) -> Value:
        """`apply_gradients` and `replace`, which NNX does in place."""
        name = state.text
        if not name or node.args:
            raise NotRewritableError("state-use", node, text=ast.unparse(node.func))
        is_name = isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
        if is_name and method == "replace" and [k.arg for k in node.keywords] == ["params"]:
            model = self._value(node.keywords[0].value)
            if model.kind in OF_MODEL and model.text:
                return self._with_model(node, name, model.text)
        others = [k for k in node.keywords if k.arg != "grads"]
        self.replaced |= {str(k.arg) for k in others}
        for each in [k for k in node.keywords if k.arg == "grads"]:
            self._plain(each.value)
            self._before(node, f"{name}.optimizer.update({name}.model, ", each.value, ")")
        for each in others:
            value = self._value(each.value)
            if value.is_gone:
                continue
            self._plain(each.value, value)
            if each.arg in (None, "params", "opt_state", "tx", "apply_fn"):
                raise NotRewritableError("state-replace", node, name=each.arg or "**")
            if each.arg == "step":
                self._before(node, f"{name}.optimizer.step.set_value(", each.value, ")")
            elif self._fields().get(each.arg) is Kind.STATISTICS:
                self._before(node, f"nnx.update({name}.model, ", each.value, ")")
            else:
                self._before(node, f"{name}.{each.arg} = ", each.value)
        self._change(node, name)
        return Value(Kind.STATE, name)

    def _with_model(self, node: ast.Call, state: str, model: str) -> Value:
        """A state with another model, such as that which a gradient is taken of."""
        (cls,) = self.program.fields if len(self.program.fields) == 1 else (None,)
        fields = self.program.fields[cls] if cls is not None else {}
        if cls == "TrainState" and set(fields) == {"params"}:
            cls = self.file.state = self.file.state or "TrainState"
        elif cls is None or cls not in vars(self.file.module):
            raise NotRewritableError("state-replace", node, name="params")
        kept = [n for n, kind in fields.items() if n != "params" and kind not in GONE]
        parts = [model, f"{state}.optimizer", *(f"{name}={state}.{name}" for name in kept)]
        self._change(node, cls, Arguments(tuple((each,) for each in parts)))
        return Value(Kind.STATE)

    def _created(self, node: ast.Call, function: ast.Attribute, cls: type) -> Value:
        """`TrainState.create`."""
        named = {k.arg: k.value for k in node.keywords}
        if node.args or not {"params", "tx"} <= set(named):
            raise NotRewritableError("state-create", node)
        params = self._value(named["params"])
        if params.kind not in OF_MODEL:
            raise NotRewritableError("state-create", node)
        model = params.text
        if not model:
            model = self.model
            self._before(node, f"{model} = ", named["params"])
        applied = named.get("apply_fn")
        applied = None if isinstance(applied, ast.Constant) else applied
        if applied is not None and self._value(applied).kind is not Kind.APPLY:
            raise NotRewritableError("state-apply", applied, text=ast.unparse(applied))
        self._plain(named["tx"])
        parts: list[Sequence[Part]] = [
            [model],
            [f"nnx.Optimizer({model}, ", named["tx"], ", wrt=nnx.Param)"],
        ]
        for name, each in named.items():
            if name in ("params", "tx", "apply_fn"):
                continue
            value = self._value(each)
            if not value.is_gone:
                self._plain(each, value)
                parts.append([f"{name}=", each])
        own: Part = function.value
        if cls is TrainState:
            is_name = isinstance(function.value, ast.Name)
            own = self.file.state = function.value.id if is_name else "TrainState"  # pyright: ignore
        self._change(node, own, Arguments(tuple(map(tuple, parts))))
        return Value(Kind.STATE)


def _shape(value: Value) -> Any:
    """What has to be equal in all returns of a function."""
    if value.kind is Kind.TUPLE and value.is_special:
        return tuple(map(_shape, value.parts))
    return value.kind if value.is_special else None
