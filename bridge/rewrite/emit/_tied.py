"""Tied weights: variables that are read by their path, and layers that are applied to them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from bridge.rewrite.observe._records import Instance, Making, Path
from bridge.rewrite.plan._method import Method
from bridge.rewrite.plan._plans import Slot
from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.syntax._evaluate import UnknownValueError, evaluate
from bridge.rewrite.syntax._source import (
    Edit,
    arguments_of,
    is_none,
    is_self,
    names_in,
    negated,
    set_in,
)

from ._dead import is_never_called


def variable_edits(method: Method) -> Iterator[Edit]:
    """`self.body.variables["params"]["wte"]["embedding"]` is `self.body.wte.embedding[...]`.

    Raises NotRewritableError if this is not one array of a rewritten class.
    """
    source = method.source
    lines = method.lines
    for node in ast.walk(method.node):
        if not (isinstance(node, ast.Attribute) and node.attr == "variables"):
            continue
        names: list[str] = []
        whole: ast.AST = node
        while isinstance(around := source.parents[whole], ast.Subscript) and around.value is whole:
            whole = around
            names.append(str(getattr(around.slice, "value", "")))
        ran = source.statement_of(node).lineno in lines
        if whole is node or names[0] != "params" or not ran:
            continue
        attributes = _attributes(method, node.value, names[1:])
        if attributes is None:
            raise NotRewritableError("variables-read", node)
        yield Edit(source.end(node.value), source.end(whole), f".{'.'.join(attributes)}[...]")


def _attributes(method: Method, module: ast.expr, names: Sequence[str]) -> list[str] | None:
    """The attributes that lead to a parameter, None if there are none."""
    records = method.program.records
    if isinstance(module, ast.Name) and module.id == "self":
        places = [(i.run, i.path) for i in records.of_class(method.plan.cls)]
    else:
        slots = [slot for slot in method.plan.slots.values() if _holds(method, slot, module)]
        places = [(m.run, m.path) for slot in slots for m in slot.makings if m.path]
    found = [_below(method, run, path, names) for run, path in places]
    return found[0] if names and found and all(each == found[0] for each in found) else None


def _holds(method: Method, slot: Slot, module: ast.expr) -> bool:
    if slot.kind != "module" or slot.lift is not None or slot.linen or slot.is_list:
        return False
    return (slot.is_alone and is_self(module, slot.stored)) or (
        isinstance(module, ast.Name) and module.id == slot.variable
    )


def _below(method: Method, run: int, path: Path, names: Sequence[str]) -> list[str] | None:
    program, found = method.program, list[str]()
    for number, name in enumerate(names):
        is_last = number == len(names) - 1
        owner = program.records.instances.get((run, path))
        if is_last and owner is not None and program.layer_of(owner.cls) is not None:
            return [*found, name]
        for plan in program.plans.values():
            for slot in plan.slots.values():
                if any(_is_it(making, run, path, name) for making in slot.makings):
                    is_apart = slot.linen or slot.lift or slot.is_list or slot.outer
                    if plan.refusal or is_apart or (is_last and slot.kind == "module"):
                        return None
                    found.append(slot.attribute)
        if len(found) != number + 1:
            return None
        path = (*path, name)
    return found


def _is_it(making: Making, run: int, path: Path, name: str) -> bool:
    if making.run != run:
        return False
    if making.kind == "module":
        return making.path == (*path, name)
    return making.kind == "param" and making.scope == path and making.name == name


class Applied:
    """The layers of a `setup` that are applied to weights of others: `self.head.apply(...)`.

    They have weights of their own only where they are called as well, as any layer of Linen's.
    """

    def __init__(self, method: Method) -> None:
        self._method = method
        self.plan, self.source, self._lines = method.plan, method.source, method.lines
        self._records = method.program.records
        self._nodes = [node for each in self.plan.methods.values() for node in ast.walk(each)]

    def calls(self, slot: Slot) -> list[ast.Call]:
        """The calls of `apply`."""
        if slot.kind != "module" or not slot.is_alone:
            return []
        return [
            node
            for node in self._nodes
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "apply"
            and is_self(node.func.value, slot.stored)
            and self._is_known(node)
        ]

    def _is_known(self, call: ast.Call) -> bool:
        """Whether a call ran, or only fields decide about it; another one is to be reviewed."""
        around = [x for x in self.source.ancestors(call) if isinstance(x, ast.If | ast.IfExp)]
        is_of_fields = all(names_in(each.test) == {"self"} for each in around)
        return is_of_fields or self.source.statement_of(call).lineno in self._lines

    def edits(self, method: Method) -> Iterator[Edit]:
        """The edits of a method: Linen's layer is a function of the weights."""
        for slot in self.plan.slots.values():
            for call in self.calls(slot):
                if method.node not in self.source.ancestors(call):
                    continue
                if {name for a in slot.node.args for name in names_in(a)} - {"self"} or any(
                    names_in(k.value) & _bound(slot.method) for k in slot.node.keywords
                ):
                    raise NotRewritableError("applied-arguments", call)
                text = self.source.render(slot.node, list(method.field_edits(slot.node)))
                yield self.source.edit(
                    call.func.value,  # pyright: ignore
                    f"{text[:-1].rstrip().rstrip(',')}, parent=None)",
                )

    def test(self, slot: Slot) -> str | None:
        """When a layer has weights of its own, `""` for never; None for always.

        Raises NotRewritableError if a constructor cannot know it.
        """
        applied = self.calls(slot)
        if not applied and not self._is_uncalled(slot):
            return None
        every = [n for n in self._nodes if isinstance(n, ast.Call)]
        calls = [each for each in every if is_self(each.func, slot.stored)]
        called = [each for each in calls if not is_never_called(self._method, each)]
        tests = [" and ".join(self._tests(call, applied)) for call in called]
        if "" in tests and not applied:
            # It is called behind a `return`, for instance.
            return None
        if "" in tests:
            raise NotRewritableError("applied-and-called", applied[0])
        return " or ".join(f"({test})" if len(tests) > 1 else test for test in tests)

    def _is_uncalled(self, slot: Slot) -> bool:
        """Whether a model that makes a layer in `setup` may do without calling it."""
        if slot.kind != "module" or not slot.is_alone:
            return False
        every = [node for node in self._nodes if is_self(node, slot.stored)]
        uses = [each for each in every if isinstance(each.ctx, ast.Load)]  # pyright: ignore
        parents = [self.source.parents[each] for each in uses]
        called = [*map(self._records.made_by, slot.makings)]
        return all(
            isinstance(parent, ast.Call) and parent.func is use
            for use, parent in zip(uses, parents, strict=True)
        ) and any(each is None or not each.calls for each in called)

    def _tests(self, call: ast.AST, applied: Sequence[ast.Call]) -> Iterator[str]:
        """The conditions under which a call runs."""
        before: ast.AST = call
        for around in self.source.ancestors(call):
            if isinstance(around, ast.If | ast.IfExp):
                body = around.body if isinstance(around.body, list) else [around.body]
                if before is not around.test:
                    yield self._test(around.test, is_true=before in body)
            block = [b for b in (getattr(around, "body", 0), getattr(around, "orelse", 0)) if b]
            for statements in (each for each in block if isinstance(each, list) and before in each):
                for each in statements[: statements.index(before)]:
                    returns = isinstance(each, ast.If) and isinstance(each.body[-1], ast.Return)
                    if returns and any(node in applied for node in ast.walk(each)):
                        yield self._test(each.test, is_true=False)
            before = around

    def _test(self, node: ast.expr, *, is_true: bool) -> str:
        if names_in(node) != {"self"}:
            text = self._of_fields(node)
            if text is None:
                raise NotRewritableError("applied-on-call", node)
            return text if is_true else negated(text)
        text = self.source.render(node)
        return text if is_true else negated(text)

    def _of_fields(self, node: ast.expr) -> str | None:
        """A condition on an argument of the call as one on fields, None if there is none.

        A caller decides by fields that this class has as well whether it gives the argument: it
        sets a name to None or to another value, or has such a choice in its call.
        """
        names = names_in(node) & {*self._method.taint.arguments, *self.plan.call_arguments}
        argument = names.pop() if len(names) == 1 else None
        instances = self._records.of_class(self.plan.cls)
        spaces = [space for each in instances for space in self._given(each)]
        tests = {
            text
            for plan in self._method.program.plans.values()
            for method in plan.methods.values()
            for test in _choices(method, argument)
            for text in (plan.source.render(test), negated(plan.source.render(test)))
            if names_in(test) == {"self"}
        }
        found = [text for text in tests if spaces and _is_alike(text, node, spaces)]
        return found[0] if len(found) == 1 else None

    def _given(self, instance: Instance) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """What each call of a module was given, by name, and its fields."""
        call = self.plan.call
        if call is None:
            return
        names = [each.arg for each in call.args.args]
        defaults = arguments_of(call).items()
        known = {each.arg: d.value for each, d in defaults if isinstance(d, ast.Constant)}
        for each in instance.uses:
            if each.method == "__call__":
                given = dict(zip(names[1:], each.args, strict=False))
                yield {**known, **given, **each.kwargs}, instance.fields


def _choices(method: ast.FunctionDef, name: str | None) -> Iterator[ast.expr]:
    """The conditions under which a method has None or another value for a name."""
    for node in ast.walk(method):
        if isinstance(node, ast.If) and node.orelse:
            ends = [
                [s.value for s in block if isinstance(s, ast.Assign) and name in set_in(s)]
                for block in (node.body, node.orelse)
            ]
            if all(ends) and any(is_none(values[-1]) for values in ends):
                yield node.test
        if isinstance(node, ast.keyword | ast.Assign) and isinstance(node.value, ast.IfExp):
            own = node.arg == name if isinstance(node, ast.keyword) else name in set_in(node)
            if own and (is_none(node.value.body) or is_none(node.value.orelse)):
                yield node.value.test


def _is_alike(
    text: str, node: ast.expr, spaces: Sequence[tuple[dict[str, Any], dict[str, Any]]]
) -> bool:
    """Whether a condition on fields was what another one was, in every call."""
    test = ast.parse(text, mode="eval").body
    try:
        return all(
            bool(evaluate(test, {}, fields)) is bool(evaluate(node, given, fields))
            for given, fields in spaces
        )
    except UnknownValueError:
        return False


def _bound(method: ast.FunctionDef) -> set[str]:
    return {
        node.id
        for node in ast.walk(method)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
