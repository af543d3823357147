"""A Linen class as the text of an NNX class."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from flax import linen as nn
from flax import nnx

from bridge.rewrite.plan._axes import STACKS
from bridge.rewrite.plan._class_fields import (
    as_default,
    check_class,
    default_node,
    field_nodes,
    module_default,
)
from bridge.rewrite.plan._layers import Layer, layer_of
from bridge.rewrite.plan._lifted_functions import unseen_functions
from bridge.rewrite.plan._method_plans import SetupPlan, method_plans
from bridge.rewrite.plan._plans import CACHE, ClassPlan, Field, Lines, Program, Written
from bridge.rewrite.plan._references import References
from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.syntax._source import (
    Edit,
    arguments_of,
    bound_in,
    is_docstring,
    is_import,
    is_self,
    span_of,
)

from ._calls import Calls
from ._function_edits import decorated
from ._layer_classes import LayerClass
from ._lines import as_text
from ._setup import Setup

_KEPT_DECORATORS = ("property", "staticmethod", "classmethod", "cached_property")


class ClassText:
    """The new text of one class."""

    def __init__(self, program: Program, plan: ClassPlan, references: References) -> None:
        self.program, self.plan, self.references = program, plan, references
        self.source = plan.source
        self.edits: list[Edit] = []
        self.is_decorated = False
        self.signature = Signature(program, plan, references)
        self.notes: list[tuple[int, str]] = []

    def written(self) -> Written:
        """The text, and what a person has to look at.

        Raises NotRewritableError if the class stays Linen.
        """
        plan = self.plan
        if (layer := layer_of(plan.layer)) is not None:
            return Written(self.source.as_indented(plan.node, self._of_layer(layer)))
        for call in unseen_functions(plan, self.references):
            raise NotRewritableError("transform-unseen", call, call=ast.unparse(call))
        plans = method_plans(self.program, plan, self.references)
        self._class_decorators()
        body: Lines = []
        setup_text, properties = "", list[str]()
        for base in plan.node.bases:
            self.edits += self.references.edits(base)
        setup = next((Setup(each) for each in plans if isinstance(each, SetupPlan)), None)
        if setup is not None:
            setup_text = setup.text()
            properties = setup.properties.texts(self._indent)
            self.notes += setup.notes
            self._delete(setup.method.node)
        needs_rngs = False
        through: set[ast.Call] = set()
        for each in plans:
            method = each.method
            if method.is_setup:
                continue
            body += each.lines
            calls = Calls(each)
            own = calls.edits()
            if setup is not None:
                own += setup.call_edits(method, calls)
            self.notes += calls.notes
            through |= calls.through
            needs_rngs |= any("self.rngs" in edit.text for edit in own)
            self.edits += own
            self._decorators(method.node)
            self._annotations(method.node)
        for each in plan.methods.values():
            if each in plan.maker_methods:
                self._delete(each)
        self._check_lifts(through)
        if plan.wraps and self.is_decorated:
            # A wrapper makes its variables when it is first called, which no transform may see.
            raise NotRewritableError("transform-method-linen")
        if needs_rngs:
            body.insert(0, (0, "self.rngs = rngs.fork()"))
        if self._is_needed(setup_text, body):
            self._insert("\n\n".join([self._constructor(setup_text, body), *properties]))
        text = self.source.render(plan.node, self.edits).rstrip()
        if (comment := self.source.comment_behind(plan.node)) and not self._deletes_last():
            text = f"{text}  {comment}"
        text = self.source.as_indented(plan.node, text)
        return Written(self._with_free_names(text), tuple(self.notes))

    def _deletes_last(self) -> bool:
        """Whether the last line of the class is gone."""
        end = self.source.end(self.plan.node)
        return any(edit.start < end <= edit.end for edit in self.edits if not edit.text)

    def _with_free_names(self, text: str) -> str:
        """The class with the attribute `train_` for a field `train`, which would hide a method."""
        taken = {
            field.name
            for field in self.plan.fields
            if hasattr(nnx.Module, field.name) and field.name not in self.plan.mode_fields
        }
        if not taken:
            return text
        data = text.encode()
        starts = [0, *itertools.accumulate(len(line) + 1 for line in data.split(b"\n"))]
        spans = [
            span_of(each)
            for each in ast.walk(ast.parse(text))
            if is_self(each) and each.attr in taken  # pyright: ignore
        ]
        found = [starts[span.end_line - 1] + span.end_column for span in spans]
        for end in sorted(found, reverse=True):
            data = data[:end] + b"_" + data[end:]
        return data.decode()

    def _of_layer(self, layer: Layer) -> str:
        """The text of a class that derives from a layer of Flax."""
        plan = self.plan
        check_class(plan, self.references)
        own = LayerClass(plan, layer, self.references)
        own.check()
        for base in plan.node.bases:
            self.edits += self.references.edits(base)
        self.edits += own.edits()
        for method in plan.methods.values():
            self._decorators(method)
            self._annotations(method)
        constructor, call = own.constructor(self._indent), own.call(self._indent)
        if constructor:
            self._insert(constructor)
        if call:
            end = self.source.end(plan.node)
            self.edits.append(Edit(end, end, f"\n{call}"))
        return self.source.render(plan.node, self.edits).rstrip()

    def _check_lifts(self, through: set[ast.Call]) -> None:
        """Transforms around layers whose calls were not found."""
        for slot in self.plan.slots.values():
            if slot.lift is None or slot.node in through:
                continue
            if any(each.kind in STACKS for each in slot.lift.chain):
                raise NotRewritableError("stacked-call", slot.node)
            kind = slot.lift.chain[0].kind
            text = f"nn.{kind} is dropped, as the calls are not found"
            self.notes.append((slot.node.lineno, text))

    def _is_needed(self, setup: str, body: Lines) -> bool:
        """Whether the class needs a constructor: one that only others derive from may not."""
        made = any(i.cls is self.plan.cls for i in self.program.records.instances.values())
        return bool(made or setup or body or self.plan.fields)

    def _decorators(self, method: ast.FunctionDef) -> None:
        for decorator in method.decorator_list:
            value = self.references.value_of(decorator)
            if value in (nn.compact, nn.nowrap):
                self.edits.append(self.source.lines_of(decorator))
            elif ast.unparse(decorator).split(".")[-1] in _KEPT_DECORATORS or (
                isinstance(decorator, ast.Attribute) and decorator.attr in ("setter", "getter")
            ):
                continue
            elif (text := decorated(self.references, decorator, method)) is not None:
                self.edits.append(self.source.edit(decorator, text))
                self.is_decorated = True
            elif ast.unparse(decorator) == "jax.jit":
                raise NotRewritableError("method-jit", decorator, decorator=ast.unparse(decorator))
            elif (
                value is nn.remat
                or value is nn.jit
                or value is None
                or isinstance(decorator, ast.Call)
            ):
                raise NotRewritableError(
                    "method-decorator", decorator, decorator=ast.unparse(decorator)
                )

    def _class_decorators(self) -> None:
        """Those of other files stay with the old class, which they may have registered."""
        own = {
            name
            for statement in self.source.tree.body
            if not is_import(statement)
            for name in bound_in(statement)
        }
        for decorator in self.plan.node.decorator_list:
            root = next(n for n in ast.walk(decorator) if isinstance(n, ast.Name))
            text = ast.unparse(decorator)
            if root.id in own or text.split("(")[0].split(".")[-1] in ("dataclass", "final"):
                continue
            note = f"@{text} is left out: it would be called for both classes"
            self.notes.append((decorator.lineno, note))
            self.edits.append(self.source.lines_of(decorator))

    def _annotations(self, method: ast.FunctionDef) -> None:
        given = arguments_of(method)
        for each in (*(each.annotation for each in given), *given.values(), method.returns):
            if each is not None:
                self.edits += self.references.edits(each)

    def _delete(self, node: ast.stmt) -> None:
        """Takes away a statement with its comments, and the blank lines behind it."""
        begin, end, _ = self.source.lines_of(node, comments=True)
        while self.source.data[end : end + 1] == b"\n":
            end += 1
        self.edits.append(Edit(begin, min(end, self.source.end(self.plan.node)), ""))

    def _constructor(self, setup: str, body: Lines) -> str:
        plan = self.plan
        indent = self._indent
        lines: list[str] = []
        parent = self._calls_parent()
        inherited = {f.name for f in parent.fields} if parent is not None else set()
        if parent is not None:
            given = [f"{f.name}={f.name}" for f in parent.fields if f.name not in plan.mode_fields]
            given += [f"{name}={name}" for name in parent.sizes]
            lines.append(f"super().__init__({', '.join([*given, 'rngs=rngs'])})")
        for field in plan.fields:
            if field.name in plan.mode_fields or field.name in inherited:
                continue
            lines.append(f"self.{field.name} = {self.signature.stored(field)}")
        text = "\n".join(" " * (2 * indent) + line for line in lines)
        made = as_text(body, 2 * indent, indent)
        parts = [part for part in (text, setup, made) if part]
        if not parts:
            parts = [" " * (2 * indent) + "pass"]
        return "\n".join([self.signature.text(self._indent), *parts])

    def _calls_parent(self) -> ClassPlan | None:
        for base in self.plan.bases:
            if base.refusal is None and (
                base.slots or base.bases or any(m == "setup" for m in base.methods)
            ):
                ran = any(
                    m.owner_cls is self.plan.cls for s in base.slots.values() for m in s.makings
                )
                if ran:
                    return base
        return None

    @property
    def _indent(self) -> int:
        return self.plan.node.body[0].col_offset

    def _insert(self, constructor: str) -> None:
        source, plan = self.source, self.plan
        own = field_nodes(plan)
        first = next((n for n in plan.node.body if n in own), None)
        if first is None:
            first = next((n for n in plan.node.body if isinstance(n, ast.FunctionDef)), None)
        if first is None:
            # A class without fields and methods of its own.
            end = source.end(plan.node)
            last = plan.node.body[-1]
            if isinstance(last, ast.Pass):
                self.edits.append(Edit(source.offset(last.lineno, 0), end, constructor))
            else:
                self.edits.append(Edit(end, end, f"\n\n{constructor}"))
            return
        if first in own:
            # The constructor has them.
            for node in own:
                self._delete(node)
        anchor = next(
            (
                n
                for n in plan.node.body
                if n not in own
                and not is_docstring(n)
                and not (isinstance(n, ast.FunctionDef) and n.name == "setup")
            ),
            None,
        )
        if anchor is None:
            end = source.end(plan.node)
            blank = "\n" if is_docstring(plan.node.body[-1]) else ""
            self.edits.append(Edit(end, end, f"{blank}{constructor}"))
            return
        line = min([anchor.lineno, *(d.lineno for d in getattr(anchor, "decorator_list", []))])
        line -= (
            len(source.comments_above(anchor)) if not getattr(anchor, "decorator_list", []) else 0
        )
        begin = source.offset(line, 0)
        place = line
        if own and own[0] is first:
            place = own[0].lineno - len(source.comments_above(own[0]))
        blank = "\n" if is_docstring(plan.node.body[0]) and not _is_blank(source, place) else ""
        self.edits.append(Edit(begin, begin, f"{blank}{constructor}\n\n"))


def _is_blank(source: Any, line: int) -> bool:
    return line < 2 or not source.lines[line - 2].strip()


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
