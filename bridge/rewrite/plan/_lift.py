"""Lifted transforms around a layer: NNX's transforms in the constructor and around the calls."""

from __future__ import annotations

import ast
from collections.abc import Sequence, Set

from bridge.rewrite.observe._records import Lifted
from bridge.rewrite.syntax._source import is_self, names_in

from ._axes import Axes, axis_texts
from ._containers import attribute_of, container_of
from ._method import Method
from ._options import PASSED, STACKS, check_options
from ._plans import Slot
from ._refusals import NotRewritableError
from ._stacking import metadata, stacked


class Lift:
    """What a layer under lifted transforms becomes.

    Args:
        method: the method that makes it.
        slot: where it is made.

    Raises:
        NotRewritableError: NNX's transforms do not do the same.
    """

    def __init__(self, method: Method, slot: Slot) -> None:
        self.method, self.slot = method, slot
        records = method.program.records
        chains = [records.chain(making.cls) for making in slot.makings]
        longest = max(chains, key=len)
        kinds = {tuple(each.kind for each in chain) for chain in chains}
        self.sometimes = _left_out(tuple(each.kind for each in longest), kinds - {()})
        if self.sometimes is None or (self.sometimes and () in kinds):
            raise NotRewritableError("transform-varies", slot.node)
        self._is_beside_plain = self._has_plain_sibling()
        self.is_always = () not in kinds and not self._is_beside_plain
        self.chain: Sequence[Lifted] = longest
        if not self.is_always and any(each.kind in STACKS for each in longest):
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
        """Whether another branch puts layers without transforms into the same attribute."""
        plan, records = self.method.plan, self.method.program.records
        if not self.method.is_setup:
            return False

        def target(slot: Slot) -> str | None:
            return attribute_of(plan, slot) or container_of(plan, slot)

        own = target(self.slot)
        others = [each for each in self.method.slots if own is not None and target(each) == own]
        return not all(records.chain(making.cls) for each in others for making in each.makings)

    def axes(self, lifted: Lifted) -> Axes:
        """The axes of one of the transforms.

        Raises:
            NotRewritableError: NNX cannot say them.
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
        call = self._call(lifted)
        return next((k.value for k in call.keywords if k.arg == name), None) if call else None

    def _test(self, lifted: Lifted) -> str:
        """The condition under which one of the transforms is there."""
        source = self.method.source
        # Of two branches that fill one attribute, the one of the layers.
        made = self.slot.node if self._is_beside_plain else None
        before: ast.AST | None = made or self._call(lifted)
        if before is None:
            raise NotRewritableError("transform-condition", self.slot.node)
        for each in source.ancestors(before):
            if each is self.method.node:
                break
            if isinstance(each, ast.If | ast.IfExp):
                body = each.body if isinstance(each.body, list) else [each.body]
                text = self.method.call_text(each.test)
                return text if before in body else f"not ({text})"
            before = each
        raise NotRewritableError("transform-condition", self.slot.node)

    def constructor(self, made: str) -> str:
        """The expression that makes the layers.

        Args:
            made: the expression that makes one.
        """
        for each in reversed(self.chain):
            if each.is_stacking:
                call = self._call(each)
                inside = call is not None and self.method.node in self.method.source.ancestors(call)
                made = stacked(self.method, self.slot, each, made, call if inside else None)
        return made

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


def _left_out(longest: tuple[str, ...], others: Set[tuple[str, ...]]) -> frozenset[str] | None:
    """The transforms that are not always there; None unless all others are, in the same order."""
    for kind in ("remat", "jit"):
        shorter = tuple(each for each in longest if each != kind)
        if shorter != longest and others <= {longest, shorter}:
            return frozenset({kind}) if shorter in others else frozenset()
    return frozenset() if others <= {longest} else None
