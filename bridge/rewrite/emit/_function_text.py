"""A function that makes layers as the text of a class, or of a function that returns NNX's."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator

from bridge.rewrite.plan._function_plans import FunctionPlan
from bridge.rewrite.plan._method_plans import MethodPlan, SetupPlan, method_plans
from bridge.rewrite.plan._plans import Program, Written
from bridge.rewrite.plan._references import References
from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.syntax._source import (
    Edit,
    arguments_of,
    bound_in,
    indented,
    is_docstring,
    names_in,
)

from ._calls import Calls
from ._class_text import size_arguments
from ._lines import as_text
from ._setup import Setup

_WIDTH = 100


class FunctionText:
    """The new text of one function."""

    def __init__(self, program: Program, plan: FunctionPlan, references: References) -> None:
        self.program, self.plan, self.references = program, plan, references
        self.source, self.node = plan.source, plan.function
        self.rest = plan.rest if plan.returns_layers else None

    def written(self) -> Written:
        """The text, what a person has to look at, and what the constructor takes.

        Raises NotRewritableError if the function stays Linen.
        """
        (given,) = method_plans(self.program, self.plan, self.references)
        return self._function(given) if isinstance(given, SetupPlan) else self._class(given)

    @property
    def _set_anew(self) -> set[str]:
        """The arguments that the constructor knows, and that the function sets anew."""
        return self.plan.known & set().union(*map(bound_in, self.node.body))

    def _class(self, method: MethodPlan) -> Written:
        """A class, if the function calls its layers."""
        calls = Calls(method)
        edits = calls.edits()
        read = self._read(edits)
        stored = [name for name in self.plan.arguments if name in read]
        edits += [
            self.source.edit(each, f"self.{each.id}")
            for each in self._loads(edits)
            if each.id in self.plan.known - self._set_anew
        ]
        plan = self.plan
        used = {*stored, *method.method.used}
        constructed = [name for name in plan.arguments if name in plan.known and name in used]
        if not plan.modules.isdisjoint(constructed):
            raise NotRewritableError("function-given-module", self.node)
        body = self._body(edits, [name for name in stored if name in self._set_anew])
        made = [f"        self.{name} = {name}" for name in stored if name in plan.known]
        if any("self.rngs" in edit.text for edit in edits):
            made.append("        self.rngs = rngs.fork()")
        text = as_text(method.lines, 8, self._unit)
        given = ", ".join(
            ["self", *(self._argument(n) for n in plan.arguments if n not in plan.known)]
        )
        lines = [
            f"class {plan.name_in_file}(nnx.Module):",
            _header("    def __init__", ["self", *self._parameters(constructed)]),
            *(made or ([] if text else ["        pass"])),
            *([text] if text else []),
            "",
            f"    def __call__({given}):",
            body,
        ]
        text = self.source.as_indented(self.node, "\n".join(lines))
        return Written(text, tuple(calls.notes), tuple(constructed))

    @property
    def _unit(self) -> int:
        return self.node.body[0].col_offset

    def _body(self, edits: list[Edit], set_anew: Iterable[str]) -> str:
        """The function's body, which begins with the first values of what it sets anew."""
        first = self.node.body[0]
        begin = self.source.offset(first.lineno - len(self.source.comments_above(first)), 0)
        lines = "".join(f"{' ' * self._unit}{name} = self.{name}\n" for name in set_anew)
        if lines:
            is_text = ast.get_docstring(self.node, clean=False) is not None
            second = self.node.body[is_text]
            above = second.lineno - len(self.source.comments_above(second))
            place = self.source.offset(above, 0)
            edits = [*edits, Edit(place, place, lines)]
        text = self.source.stretch(begin, self.source.end(self.node), edits)
        return indented(f"\n{text}", 0, 8 - self._unit)[1:].rstrip()

    def _loads(self, edits: list[Edit]) -> Iterator[ast.Name]:
        """The names that are read in what stays of the body."""
        gone = [(e.start, e.end) for e in edits if e.end > e.start]
        for statement in self.node.body:
            for each in ast.walk(statement):
                grown = isinstance(self.source.parents.get(each), ast.AugAssign)
                if isinstance(each, ast.Name) and (isinstance(each.ctx, ast.Load) or grown):
                    begin = self.source.start(each)
                    if not any(start <= begin < end for start, end in gone):
                        yield each

    def _read(self, edits: list[Edit]) -> set[str]:
        return {each.id for each in self._loads(edits)} & self.plan.known

    def _parameters(self, constructed: Iterable[str]) -> list[str]:
        named = [each.arg for each in self.node.args.kwonlyargs]
        given = [self._argument(name) for name in constructed if name not in named]
        given += ["*", *(self._argument(name) for name in constructed if name in named)]
        given += [*size_arguments(self.program, self.plan), "rngs: nnx.Rngs"]
        return given if self.rest is None else [*given, f"**{self.rest}"]

    def _argument(self, name: str) -> str:
        """An argument as the function has it."""
        node, value = next(each for each in arguments_of(self.node).items() if each[0].arg == name)
        text = self.source.render(node, list(self.references.edits(node)))
        if value is None:
            return text
        default = self.source.render(value, list(self.references.edits(value)))
        return f"{text} = {default}" if node.annotation else f"{text}={default}"

    def _function(self, method: SetupPlan) -> Written:
        """A function that returns the layers."""
        plan = self.plan
        if plan.known | plan.modes != set(plan.arguments):
            raise NotRewritableError("function-given-arrays", self.node)
        if any(slot.kind != "module" for slot in plan.slots.values()):
            raise NotRewritableError("function-parameters", self.node)
        setup = Setup(method)
        body = setup.text()
        read = names_in(ast.parse(textwrap.dedent(body)))
        constructed = [name for name in plan.arguments if name in read]
        first = self.node.body[0]
        if is_docstring(first):
            body = f"{' ' * first.col_offset}{self.source.render(first)}\n{body}"
        head = _header(f"def {plan.name_in_file}", self._parameters(constructed))
        text = f"{head}\n{body}"
        text = self.source.as_indented(self.node, text)
        return Written(text, tuple(setup.notes), tuple(constructed))


def _header(head: str, parameters: list[str]) -> str:
    """The line of a `def`; on several lines if it would be too long."""
    text = f"{head}({', '.join(parameters)}):"
    if len(text) <= _WIDTH:
        return text
    column = " " * (len(head) - len(head.lstrip()))
    return "\n".join([f"{head}(", *(f"{column}    {each}," for each in parameters), f"{column}):"])
