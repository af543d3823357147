"""The constructor's arguments: the fields, the sizes, and `rngs`."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from flax import linen as nn

from bridge.rewrite.plan._class_fields import as_default, default_node, module_default
from bridge.rewrite.plan._plans import CACHE, ClassPlan, Field, Program
from bridge.rewrite.plan._references import References
from bridge.rewrite.syntax._source import Edit

_WIDTH = 100


class Signature:
    """The arguments of one class's constructor."""

    def __init__(self, program: Program, plan: ClassPlan, references: References) -> None:
        self.program, self.plan, self.references = program, plan, references
        self.source = plan.source

    def stored(self, field: Field) -> str:
        """What the attribute of a field is set to."""
        values = [
            i.fields.get(field.name)
            for i in self.program.records.instances.values()
            if i.cls is self.plan.cls
        ]
        text = field.name
        if self._is_made(field):
            text = f"{self.factory(field)} if {field.name} is None else {field.name}"
        if any(_holds_modules(v) for v in values):
            kind = "Dict" if isinstance(values[0], Mapping) else "List"
            return f"nnx.{kind}({text})"
        return text

    def _is_made(self, field: Field) -> bool:
        """Whether the constructor makes the default of a field."""
        return field.factory is not None or module_default(field) is not None

    def factory(self, field: Field) -> str:
        """What makes the default of a field."""
        node = default_node(field)
        if module_default(field) is not None and isinstance(node, ast.Call):
            text = self.source.render(node, self.references.edits(node))
            given = "rngs=rngs" if not (node.args or node.keywords) else ", rngs=rngs"
            return f"{text[:-1].rstrip().rstrip(',')}{given})"
        factory = field.factory or ""
        if factory.startswith("lambda:"):
            return factory[len("lambda:") :].strip()
        return f"{factory}()"

    def text(self, column: int) -> str:
        """The line of `def`, or the lines.

        The line is indented by `column`.
        """
        indent = " " * column
        parameters: list[_Parameter] = []
        named: list[_Parameter] = []
        for field in self.plan.fields:
            if field.name in self.plan.mode_fields:
                continue
            annotation, default = self._field_texts(field)
            if self._is_made(field):
                annotation, default = f"{annotation} | None", "None"
            text = f"{field.name}: {annotation}"
            text = text if default is None else f"{text} = {default}"
            entry = _Parameter(text, field.comment, field.above)
            (named if field.is_named else parameters).append(entry)
        keyword = [*size_arguments(self.program, self.plan), "rngs: nnx.Rngs"]
        parameters += [_Parameter("*"), *named, *map(_Parameter, keyword)]
        # As the other methods have it.
        end = " -> None:" if any(m.returns for m in self.plan.methods.values()) else ":"
        line = f"{indent}def __init__(self, {', '.join(each.text for each in parameters)}){end}"
        if len(line) <= _WIDTH and not any(each.comment or each.above for each in parameters):
            return line
        rows = [
            f"{indent}{indent}{row}"
            for text, comment, above in [_Parameter("self"), *parameters]
            for row in (*above, f"{text},{'  ' + comment if comment else ''}")
        ]
        return "\n".join([f"{indent}def __init__(", *rows, f"{indent}){end}"])

    def _field_texts(self, field: Field) -> tuple[str, str | None]:
        own = field.plan
        if own.source is not self.source:
            return field.annotation, field.default
        annotation = self.source.render(
            field.node.annotation, list(self.references.edits(field.node.annotation))
        )
        if field.default is None or field.node.value is None:
            return annotation, field.default
        node = default_node(field)
        if node is None:
            return annotation, field.default
        edits: list[Edit] = []
        if not self._stays_linen(field):
            edits = [*self._defaults_in(field, node), *self.references.edits(node)]
        return annotation, as_default(node, self.source.render(node, edits))

    def _defaults_in(self, field: Field, node: ast.expr) -> Iterator[Edit]:
        """`b: int = a` has the default of `a`, which no argument can name."""
        own = {each.name: each for each in self.plan.fields if each.plan is field.plan}
        for each in ast.walk(node):
            other = own.get(each.id) if isinstance(each, ast.Name) else None
            if other is None or other.node.lineno >= field.node.lineno:
                continue
            default = self._field_texts(other)[1]
            is_part = each is not node and isinstance(default_node(other), ast.BinOp | ast.IfExp)
            yield self.source.edit(each, f"({default})" if is_part else str(default))

    def _stays_linen(self, field: Field) -> bool:
        """Whether a field brings a layer of Flax that NNX lacks, so that it is wrapped."""
        values = [i.fields.get(field.name) for i in self.program.records.of_class(self.plan.cls)]
        classes = [v.func if isinstance(v, functools.partial) else v for v in values]
        return bool(classes) and all(
            isinstance(each, type)
            and issubclass(each, nn.Module)
            and self.program.plan_of(each) is None
            and self.program.layer_of(each) is None
            for each in classes
        )


class _Parameter(NamedTuple):
    """A parameter, and the comments behind and above it."""

    text: str
    comment: str = ""
    above: tuple[str, ...] = ()


def size_arguments(program: Program, plan: ClassPlan) -> list[str]:
    """The sizes as arguments of a constructor."""
    instances = program.records.of_class(plan.cls)
    found = []
    for name, size in plan.sizes.items():
        if name.startswith(CACHE):
            found.append(f"{name}: tuple[int, ...] | None = None")
            continue
        text = "int" if all(isinstance(v, int) for v in size.values.values()) else "tuple[int, ...]"
        # An instance whose loop has no turn needs no size.
        is_told = all((i.run, i.path) in size.values for i in instances)
        found.append(f"{name}: {text}" if is_told else f"{name}: {text} | None = None")
    return found


def _holds_modules(value: Any) -> bool:
    # Linen makes `FrozenDict`s of dicts.
    inside = value.values() if isinstance(value, Mapping) else value
    return isinstance(value, list | tuple | Mapping) and any(
        isinstance(each, nn.Module) for each in inside
    )
