"""Decides what each function of the program becomes, statement by statement."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import Any

from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.syntax._source import arguments_of, is_docstring

from ._calls import Calls
from ._changes import Before, Dropped, Part, Removed, separated
from ._kinds import DROPPED, OF_MODEL, OTHER, Kind, Value, fresh
from ._program import File, Place, Program, first_line

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


class Body(Calls):
    """A function, and the functions in it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
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
                self.changes.append(self._dropped(each))
                self.names[each.arg] = Value(kind)
            elif kind in OF_MODEL:
                typed = ": nnx.Module" if each.annotation is not None else ""
                self._change(each, f"{self.model}{typed}")
                self.names[each.arg] = Value(kind, self.model)
            else:
                has_name = kind in (Kind.STATE, Kind.MODEL)
                self.names[each.arg] = Value(kind, each.arg if has_name else "")
            yield each.arg, kind

    def _dropped(self, node: ast.arg) -> Dropped:
        return Dropped(node, arguments_of(self.node)[node] or node)

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


def _shape(value: Value) -> Any:
    """What has to be equal in all returns of a function."""
    if value.kind is Kind.TUPLE and value.is_special:
        return tuple(map(_shape, value.parts))
    return value.kind if value.is_special else None
