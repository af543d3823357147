"""The conditions of a compact method, as its constructor has them."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from bridge.rewrite.observe._records import Making, Site
from bridge.rewrite.syntax._source import bound_in, only_value, span_of

from ._method import Method
from ._plans import Slot
from ._predicates import predicate
from ._refusals import NotRewritableError


class Conditions:
    """The conditions of one method."""

    def __init__(self, method: Method) -> None:
        self.method, self.source, self.plan = method, method.source, method.plan

    def text(self, node: ast.If | ast.IfExp) -> str | None:
        """A condition as the constructor has it; None if it is about the call alone."""
        in_test = set(ast.walk(node.test))
        slots = [
            s
            for s in self.method.slots
            if s.node not in in_test and node in self.source.ancestors(s.node)
        ]
        body = node.body if isinstance(node, ast.If) else []
        needed = any(bound_in(s) & self.method.used for s in body)
        needed |= self.method.kept.has_updates(node)
        if not slots and not needed:
            return (
                "True"
                if self.method.taint.touches(node.test)
                else self.method.init_text(node.test, ())
            )
        if not self.method.taint.touches(node.test):
            return self.method.init_text(node.test, ())
        makings = self._condition_records(node)
        test = self._written(node.test)
        text = predicate(self.method, test, makings)
        if text is not None:
            self.method.used |= self.method.names_of(text)
            return text
        try:
            return self.method.init_text(test, makings)
        except NotRewritableError:
            return self._of_call(node, slots)

    def _written(self, test: ast.expr) -> ast.expr:
        """What a condition's name was set to, if that happens once and not in a block."""
        value = only_value(self.method.node, test.id) if isinstance(test, ast.Name) else None
        return test if value is None else value

    def _of_call(self, node: ast.If | ast.IfExp, slots: Sequence[Slot]) -> None:
        """A branch that an argument of the call decides: its layers are always there."""
        owners = {(i.run, i.path) for i in self.plan_instances()}
        for slot in slots:
            if slot.kind == "module" and {(m.run, m.owner) for m in slot.makings} != owners:
                raise NotRewritableError("call-decides", node)
        self.plan.note(node, "layers that depend on an argument of the call are always made")

    def plan_instances(self) -> list[Any]:
        """The instances whose method ran."""
        return [
            i
            for i in self.method.program.records.of_class(self.plan.cls)
            if any(c.method == self.method.node.name for c in i.calls)
        ]

    def _condition_records(self, node: ast.If | ast.IfExp) -> list[Any]:
        found = []
        records = self.method.program.records
        for (run, owner, file, line), envs in records.conditions.items():
            instance = records.instances.get((run, owner))
            if file != self.source.file or line != node.test.lineno or instance is None:
                continue
            found += [
                Making(
                    "condition",
                    run,
                    0,
                    Site(file, span_of(node.test)),
                    owner,
                    instance.fields,
                    env,
                    {},
                )
                for env in envs
            ]
        if not found:
            raise NotRewritableError("condition-unseen", node)
        return found
