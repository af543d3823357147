"""Lifted transforms around a layer: NNX's transforms in the constructor and around the calls."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from bridge.rewrite.observe._records import Lifted
from bridge.rewrite.syntax._source import binding, is_self, names_in, negated, operand, origins

from ._axes import PASSED, STACKS, Axes, axis_texts, check_options, metadata, stacked
from ._method import Method
from ._plans import Slot
from ._refusals import NotRewritableError


class Lift:
    """What a layer under lifted transforms becomes.

    Raises NotRewritableError if NNX's transforms do not do the same.
    """

    def __init__(self, method: Method, slot: Slot) -> None:
        self.method, self.slot = method, slot
        records = method.program.records
        unseen = unseen_transform(method, slot)
        if unseen is not None:
            raise NotRewritableError("transform-unseen", slot.node, call=ast.unparse(unseen))
        used = _of_one_variable(method, slot)
        makings = [making for each in used for making in each.makings]
        if len(used) > 1 and len({records.base_of(making.cls) for making in makings}) > 1:
            raise NotRewritableError("transform-varies", slot.node)
        chains = [records.chain(making.cls) for making in makings]
        longest = max(chains, key=len)
        kinds = {tuple(each.kind for each in chain) for chain in chains}
        self.sometimes = _left_out(tuple(each.kind for each in longest), kinds - {()})
        sites = {tuple(each.site for each in c) for c in chains if len(c) == len(longest)}
        if self.sometimes is None or len(sites) > 1 or (self.sometimes and () in kinds):
            raise NotRewritableError("transform-varies", slot.node)
        self._is_beside_plain = self._has_plain_sibling()
        self._is_made_plain = () in kinds
        self.is_always = not self._is_made_plain and not self._is_beside_plain
        self.chain: Sequence[Lifted] = longest
        is_stacked = any(each.kind in STACKS for each in longest)
        is_one_vmap = [each.kind for each in longest] == ["vmap"]
        if not self.is_always and is_stacked and not is_one_vmap:
            raise NotRewritableError("transform-sometimes", slot.node)
        for each in longest:
            self._check(each)
        plan = method.program.plan_of(longest[-1].target)
        if plan is not None and plan.wraps:
            raise NotRewritableError("transform-of-linen", slot.node)
        self.cls = self._field(longest[-1]) or self._name(longest[-1].target)
        self.test = None if self.is_always else self._test(self.chain[0])
        self.inner_tests = {
            each.kind: self._test(each) for each in longest if each.kind in self.sometimes
        }

    def _has_plain_sibling(self) -> bool:
        """Whether another branch puts layers without transforms into the same name."""
        records = self.method.program.records

        def target(slot: Slot) -> str | None:
            return slot.stored if self.method.is_setup else slot.variable

        own = target(self.slot)
        others = [
            each
            for each in self.method.slots
            if own is not None
            and target(each) == own
            and self._is_in_other_branch(each)
            # A list of layers is called by its items, and stacked layers as one.
            and each.is_alone == self.slot.is_alone
        ]
        return not all(records.chain(making.cls) for each in others for making in each.makings)

    def _is_in_other_branch(self, slot: Slot) -> bool:
        """Whether a condition decides between a slot and this one."""
        source = self.method.source
        ways = [[each.node, *source.ancestors(each.node)] for each in (slot, self.slot)]
        for choice in ways[0]:
            if isinstance(choice, ast.If | ast.IfExp) and choice in ways[1]:
                below = [way[way.index(choice) - 1] for way in ways]
                body = choice.body if isinstance(choice.body, list) else [choice.body]
                return (below[0] in body) is not (below[1] in body)
        return False

    def axes(self, lifted: Lifted) -> Axes:
        """The axes of one of the transforms.

        Raises NotRewritableError if NNX cannot say them.
        """
        places = [(m.run, m.path or ()) for m in self.slot.makings]
        texts = axis_texts(self._call(lifted), self.method.call_text)
        return Axes(self.method.program.records, lifted, places, texts)

    def _check(self, lifted: Lifted) -> None:
        check_options(lifted)
        if lifted.kind in STACKS:
            self.axes(lifted)
        if lifted.options.get("metadata_params"):
            metadata(lifted)

    def _field(self, lifted: Lifted) -> str:
        """The field that brings what is transformed, `""` if there is none."""
        call = self._call(lifted)
        target = call.args[0] if call is not None and call.args else None
        if target is None or not is_self(target) or any(e.kind not in STACKS for e in self.chain):
            return ""
        return self.method.init_text(target, self.slot.makings)

    def _name(self, cls: type) -> str:
        """What the class is called in the file."""
        references = self.method.references
        own = next((n for n, value in self.method.namespace.items() if value is cls), None)
        if own is None:
            own = next(
                (
                    ast.unparse(node)
                    for node in ast.walk(self.method.node)
                    if isinstance(node, ast.Attribute) and references.value_of(node) is cls
                ),
                None,
            )
        if own is None:
            raise NotRewritableError("transform-no-name", self.slot.node, name=cls.__name__)
        node = ast.parse(own, mode="eval").body
        return references.text(node) or own

    def _call(self, lifted: Lifted) -> ast.Call | None:
        """The call of the transform, if it is in the method's file."""
        site = lifted.site
        if site is None or site.file != self.method.source.file:
            return None
        return self.method.source.call_at(site.span)

    def keyword(self, lifted: Lifted, name: str) -> ast.expr | None:
        """The expression of an option."""
        call, place = self._call(lifted), self._place(lifted)
        node = next((k.value for k in call.keywords if k.arg == name), None) if call else None
        if place in (call, None) or not isinstance(node, ast.Name) or call is None:
            return node
        # An argument of the function that the transform is in.
        given = {each.arg: each.value for each in place.keywords}
        for function in self.method.source.ancestors(call):
            if isinstance(function, ast.FunctionDef) and function.name == ast.unparse(place.func):
                names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
                given |= dict(zip(names, place.args, strict=False))
        return given.get(node.id, node)

    def _length(self, lifted: Lifted) -> ast.expr | None:
        """How many layers there are, if the method says it."""
        node = self.keyword(lifted, STACKS[lifted.kind])
        is_here = node is not None and self.method.node in self.method.source.ancestors(node)
        return node if is_here else None

    def _test(self, lifted: Lifted, text: Callable[[ast.expr], str] | None = None) -> str:
        """The condition under which one of the transforms is there.

        `text` gives an expression's text, by default as the call has it.
        """
        source = self.method.source
        # Of two branches that fill one attribute, the one of the layers.
        made = self.slot.node if self._is_beside_plain else None
        before: ast.AST | None = made or self._place(lifted)
        if before is None:
            raise NotRewritableError("transform-condition", self.slot.node)
        for each in source.ancestors(before):
            if each is self.method.node:
                break
            if isinstance(each, ast.If | ast.IfExp):
                body = each.body if isinstance(each.body, list) else [each.body]
                asked = (text or self.in_call)(each.test)
                return asked if before in body else negated(asked)
            before = each
        raise NotRewritableError("transform-condition", self.slot.node)

    def in_call(self, node: ast.AST) -> str:
        """An expression as a call of the layer has it, which knows no variable of `setup`.

        Raises NotRewritableError if a variable has no single value.
        """
        if not self.method.is_setup:
            return self.method.call_text(node)
        source, own = self.method.source, self.method.node
        edits = [*self.method.references.edits(node), *self.method.field_edits(node)]
        for each in ast.walk(node):
            places = binding(own, each.id) if isinstance(each, ast.Name) else []
            if not places:
                continue
            match places:
                case [ast.Assign(targets=[ast.Name()], value=value) as made] if made in own.body:
                    text = operand(self.in_call(value), type(source.parents[each]))
                    edits.append(source.edit(each, text))
                case _:
                    raise NotRewritableError("transform-condition", self.slot.node)
        return source.render(node, edits)

    def _place(self, lifted: Lifted) -> ast.Call | None:
        """The call of the transform, or of the file's function that it is in, in the method."""
        own = self._call(lifted)
        around = [*self.method.source.ancestors(own)] if own is not None else []
        names = {each.name for each in around if isinstance(each, ast.FunctionDef)}
        if own is None or self.method.node in around:
            return own
        calls = [
            each
            for each in ast.walk(self.method.node)
            if isinstance(each, ast.Call)
            and isinstance(each.func, ast.Name)
            and each.func.id in names
        ]
        own = self.slot.constructor.func
        return own if own in calls else calls[0] if len(calls) == 1 else None  # pyright: ignore

    def constructor(self, made: str) -> str:
        """The expression that makes the layers.

        The expression `made` makes one layer.
        """
        plain = made
        for each in reversed(self.chain):
            if each.is_stacking:
                call = self._call(each)
                inside = call is not None and self.method.node in self.method.source.ancestors(call)
                texts = call if inside else None
                length = self._length(each)
                made = stacked(self.method, self.slot, each, made, texts, length)
        if made == plain or not self._is_made_plain:
            return made
        asked = self._test(self.chain[0], lambda node: self.method.init_text(node, ()))
        return f"{made} if {asked} else {plain}"

    def reads(self) -> set[str]:
        """The names that the call needs besides."""
        found: set[str] = set()
        for each in self.chain:
            call = self._call(each)
            for keyword in call.keywords if call is not None else ():
                if keyword.arg in PASSED[each.kind] or keyword.arg == "variable_axes":
                    found |= names_in(keyword.value)
        for test in (self.test, *self.inner_tests.values()):
            if test is not None:
                found |= names_in(ast.parse(test, mode="eval"))
        return found


def may_lift(method: Method, slot: Slot) -> bool:
    """Whether a lifted transform may be around what a slot makes."""
    records = method.program.records
    used = _of_one_variable(method, slot)
    is_seen = any(making.cls in records.lifted for each in used for making in each.makings)
    return is_seen or unseen_transform(method, slot) is not None


def _of_one_variable(method: Method, slot: Slot) -> list[Slot]:
    """A slot, and those that call the same variable: what is put into it is around all of them.

    A flag may decide on the transform, and another one on the slot, so that no run has both.
    """
    records, own = method.program.records, slot.constructor.func
    if not isinstance(own, ast.Name):
        return [slot]

    def sites(each: Slot) -> dict[Any, list[Any]]:
        return {(m.run, m.owner): [e.site for e in records.chain(m.cls)] for m in each.makings}

    here = sites(slot)
    others = [
        each
        for each in method.slots
        if each is not slot
        and isinstance(each.constructor.func, ast.Name)
        and each.constructor.func.id == own.id
        # The variable may have become another one in between.
        and all(here.get(key, found) == found for key, found in sites(each).items())
    ]
    return [slot, *others]


def transforms(method: Method, slot: Slot) -> Iterator[ast.Call]:
    """The calls of lifted transforms that the class which a slot calls may come from."""
    functions = {e.name: e for e in method.source.tree.body if isinstance(e, ast.FunctionDef)}
    pending, known = [slot.constructor.func], set[ast.expr]()
    while pending:
        found = [e for e in origins(method.node, pending.pop()) if e not in known]
        known |= {*found}
        for each in found:
            called = each.func if isinstance(each, ast.Call) else None
            name = called.id if isinstance(called, ast.Name) else ""
            for node in ast.walk(functions.get(name, each)):
                if isinstance(node, ast.Call) and method.references.is_lifted(node):
                    yield node
                    # The class that it transforms may be a transformed one.
                    pending += [a for a in node.args[:1] if isinstance(a, ast.Name)]


def unseen_transform(method: Method, slot: Slot) -> ast.Call | None:
    """The call of a transform that the class which a slot calls may come from, but never did."""
    records, source = method.program.records, method.source
    makings = [making for each in method.slots for making in each.makings]
    sites = [each.site for making in makings for each in records.chain(making.cls)]
    seen = [source.call_at(site.span) for site in sites if site and site.file == source.file]
    return next((call for call in transforms(method, slot) if call not in seen), None)


def has_unseen_choice(method: Method, slot: Slot) -> bool:
    """Whether a condition decides on a transform around a slot, and only one way was seen."""
    if unseen_transform(method, slot) is not None:
        return True
    records, source = method.program.records, method.source
    used = _of_one_variable(method, slot)
    if not all(making.cls in records.lifted for each in used for making in each.makings):
        return False
    around = {each for call in transforms(method, slot) for each in source.ancestors(call)}
    return any(
        isinstance(a, ast.If | ast.IfExp) and method.node in source.ancestors(a) for a in around
    )


def _left_out(longest: tuple[str, ...], others: Set[tuple[str, ...]]) -> frozenset[str] | None:
    """The transforms that are not always there; None unless all others are, in the same order."""
    for kind in ("remat", "jit"):
        shorter = tuple(each for each in longest if each != kind)
        if shorter != longest and others <= {longest, shorter}:
            return frozenset({kind}) if shorter in others else frozenset()
    return frozenset() if others <= {longest} else None
