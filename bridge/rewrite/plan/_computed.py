"""Finds what `setup` computes from parameters, which Linen computes in each call."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from bridge.rewrite.syntax._source import bound_in, is_self, names_in

from ._plans import ClassPlan, Slot
from ._refusals import NotRewritableError
from ._slots import is_stored


class Computed:
    """The statements of one `setup` that compute with parameters.

    `slots` has the parameters that no attribute is, by the expressions that make them, and `stored`
    the attributes that are parameters.
    """

    def __init__(self, plan: ClassPlan, setup: ast.FunctionDef) -> None:
        self.setup, self.source = setup, plan.source
        own = [slot for slot in plan.slots.values() if slot.method is setup]
        self._modules = {slot.node for slot in own if slot.kind == "module"}
        slots = [slot for slot in own if slot.kind == "param" and not slot.is_list]
        self.stored = {str(slot.stored) for slot in slots if is_stored(plan, slot)}
        self.slots = {slot.node: slot for slot in slots if not is_stored(plan, slot)}
        self._kept = {slot.node for slot in slots} - self.slots.keys()
        self.attributes: dict[str, None] = {}
        self._names: set[str] = set()
        self.statements: list[ast.stmt] = []
        self._find()

    def makes(self, slot: Slot) -> bool:
        """Whether a parameter is one that such a statement makes."""
        return any(slot.node in ast.walk(each) for each in self.statements)

    def _find(self) -> None:
        waiting = [
            each
            for each in ast.walk(self.setup)
            if isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None
        ]
        while True:
            more = [each for each in waiting if self._reads(each.value)]
            if not more:
                break
            for each in more:
                waiting.remove(each)
                if not self._modules.isdisjoint(ast.walk(each)):
                    raise NotRewritableError("computed-for-layer", each)
                self.statements.append(each)
                self._names |= bound_in(each)
                self.attributes |= dict.fromkeys(set_attributes(each))
        self.statements.sort(key=lambda each: each.lineno)
        ordered = [name for each in self.statements for name in set_attributes(each)]
        self.attributes = dict.fromkeys(ordered)
        for each in self.statements:
            around = self.source.parents[each]
            while isinstance(around, ast.If):
                around = self.source.parents[around]
            if around is not self.setup:
                raise NotRewritableError("computed-in-block", each)
        for name in self.attributes:
            self._check_reads(name)

    def _check_reads(self, name: str) -> None:
        """Refuses to read an attribute before the same block sets it again."""
        setting = [each for each in self.statements if name in set_attributes(each)]
        blocks = [self.source.parents[each] for each in setting]
        again = [each for n, each in enumerate(setting) if blocks[n] in blocks[:n]]
        for each in ast.walk(self.setup) if again else ():
            is_between = is_self(each, name) and each.lineno < again[-1].lineno  # pyright: ignore
            if is_between and self.source.statement_of(each) not in setting:
                raise NotRewritableError("computed-again", each, name=name)

    def _reads(self, value: ast.AST | None) -> bool:
        """Whether an expression reads a parameter, or what is computed from one."""
        if value is None or (is_self(value) and value.attr in self.stored):  # pyright: ignore
            # A second name of a parameter.
            return False
        stack: list[ast.AST] = [value]
        while stack:
            each = stack.pop()
            if each in self._kept:
                # What a parameter is initialised with; the constructor makes it.
                if names_in(each) & self._names:
                    raise NotRewritableError("computed-for-parameter", each)
                continue
            if each in self.slots:
                return True
            if isinstance(each, ast.Name) and each.id in self._names:
                return True
            if is_self(each) and each.attr in {*self.stored, *self.attributes}:  # pyright: ignore
                return True
            stack += ast.iter_child_nodes(each)
        return False


def set_attributes(statement: ast.stmt) -> Iterator[str]:
    """The attributes that a statement sets."""
    targets = [getattr(statement, "target", None), *getattr(statement, "targets", ())]
    for node in (node for each in targets if each is not None for node in ast.walk(each)):
        if is_self(node):
            yield node.attr  # pyright: ignore
