"""Classes that derive from Flax's own layers, as classes that derive from NNX's.

What such a class adds are fields, other defaults, methods around those of the layer, `param`, by
which Linen's layers read each of their parameters, and a call of its own, which may read the
parameters that the layer has.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from flax import linen as nn

from bridge._layers.table import layer_of_linen
from bridge.rewrite.plan._class_fields import default_node
from bridge.rewrite.plan._layers import Layer, field_order
from bridge.rewrite.plan._plans import ClassPlan, Field, Slot
from bridge.rewrite.plan._references import References
from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.syntax._source import Edit, is_self, names_in

_OWN = ("setup", "param", "make_rng", "variable", "sow", "__post_init__")
_CALL = """
{0}def __call__(self, *args, **kwargs):
{1}# Computes with what `param` makes of the parameters.
{1}layer = nnx.clone(self)
{1}for name, each in vars(layer).items():
{2}if isinstance(each, nnx.Param):
{3}each[...] = self.param(name, each[...])
{1}return super({4}, layer).__call__(*args, **kwargs)
"""


class LayerClass:
    """One class that derives from a layer."""

    def __init__(self, plan: ClassPlan, layer: Layer, references: References) -> None:
        self.plan, self.layer, self.references = plan, layer, references
        self.source = plan.source
        self.own = [field for field in plan.fields if field.plan is plan]

    def check(self) -> None:
        """Checks that it does no more than NNX's layer has a place for.

        Raises NotRewritableError otherwise.
        """
        methods = self.plan.methods
        for name, node in methods.items():
            if name in _OWN and name != "param":
                raise NotRewritableError("layer-own-method", node, name=name)
        if "param" in methods and "__call__" in methods:
            raise NotRewritableError("layer-param-and-call", self.plan.node)
        for slot in self.plan.slots.values():
            if not self._is_of_layer(slot):
                raise NotRewritableError("layer-with-parts", slot.node)
        for field in self.own:
            if field.name in self.layer.unsupported:
                raise NotRewritableError(
                    "no-argument", field.node, layer=self.layer.name, name=field.name
                )

    def _is_of_layer(self, slot: Slot) -> bool:
        """Whether `self.param` in a call makes what the layer has by this name."""
        row = layer_of_linen(self.plan.layer)
        name = slot.makings[0].name or ""
        is_known = row is not None and row.leaves.get(name) == name
        given = [ast.unparse(each) for each in slot.node.args]
        is_plain = slot.kind == "param" and not slot.node.keywords and len(given) > 2
        is_alike = given[:2] == [repr(name), f"self.{name}_init"]
        return is_known and is_plain and is_alike and given[3:] in ([], ["self.param_dtype"])

    def _has_own_type(self) -> bool:
        """Whether its parameters have the type that initializers give them, whatever the field is.

        Raises NotRewritableError if some parameters have that type and others the type of the
        field.
        """
        slots = self.plan.slots.values()
        own = [slot for slot in slots if len(slot.node.args) == 3]
        reads = self.plan.reads("param_dtype")
        if own and reads:
            raise NotRewritableError("layer-with-parts", own[0].node)
        return bool(own)

    def edits(self) -> Iterator[Edit]:
        """The edits of the methods."""
        attributes = {**self.layer.renames}
        for node, slot in self.plan.slots.items():
            yield self.source.edit(node, f"self.{slot.makings[0].name}[...]")
        for node in self.plan.methods.values():
            if node.name == "param":
                yield from self._param(node)
            for each in ast.walk(node):
                if is_self(each) and each.attr in attributes:  # pyright: ignore
                    yield self.source.edit(each, f"self.{attributes[each.attr]}")  # pyright: ignore
                if _is_super(each, "__call__"):
                    self._check_call(each)
            for statement in node.body:
                yield from self.references.edits(statement)

    def _check_call(self, node: Any) -> None:
        if len(node.args) > self.layer.keep or any(isinstance(a, ast.Starred) for a in node.args):
            raise NotRewritableError("layer-call", node, layer=self.layer.name)

    def _param(self, node: ast.FunctionDef) -> Iterator[Edit]:
        """Linen's `param` makes a parameter; NNX's gets the value of one that is there."""
        calls = [each for each in ast.walk(node) if _is_super(each, "param")]
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        call: Any = calls[0] if len(calls) == 1 else None
        if call is None or len(names) < 2 or ast.unparse(call.args[0]) != names[1]:
            raise NotRewritableError("layer-parameters", node)
        given = node.args
        every = [*names, *(a.arg for a in (given.vararg, given.kwarg) if a)]
        every += [each.arg for each in given.kwonlyargs]
        inside = set(ast.walk(call))
        read = {
            each.id for each in ast.walk(node) if isinstance(each, ast.Name) and each not in inside
        }
        if read & set(every[2:]):
            raise NotRewritableError("layer-initialiser", node)
        statement = self.source.parents[call]
        if statement is node.body[0] and isinstance(statement, ast.Assign):
            value = ast.unparse(statement.targets[0])
            yield self.source.lines_of(statement)
        else:
            value = "value" if "value" not in read else "value_"
            yield self.source.edit(call, value)
        first = [*given.posonlyargs, *given.args][1]
        head = self.source.render(first)
        begin = self.source.start(first)
        opening = self.source.data.rindex(b"(", 0, begin)
        end = self._end_of_arguments(node)
        yield Edit(opening, end, f"(self, {head}, {value})")

    def _end_of_arguments(self, node: ast.FunctionDef) -> int:
        """The byte behind the parenthesis that closes the arguments of a function."""
        stop = self.source.start(node.returns) if node.returns else self.source.start(node.body[0])
        return self.source.data.rindex(b")", 0, stop) + 1

    def constructor(self, indent: int) -> str:
        """The text of `__init__`, `""` if it is that of the layer."""
        is_typed = self._has_own_type()
        if not self.own and not is_typed:
            return ""
        inherited = set(field_order(self.plan.layer or nn.Module))
        inherited |= {field.name for base in self.plan.bases for field in base.fields}
        blank = " " * indent
        given = "".join(f"{self._argument(field)}, " for field in self.own)
        passed = [self._new(f) for f in self.own if f.name in inherited]
        kept = [f.name for f in self.own if f.name not in inherited]
        texts = ", ".join(["*args", *(f"{name}={name}" for name in passed), "**kwargs"])
        typed = f'{2 * blank}kwargs["param_dtype"] = float  # That of the initializers.'
        lines = [
            f"{blank}def __init__(self, *args, {given}**kwargs):",
            *([typed] if is_typed else ()),
            f"{2 * blank}super().__init__({texts})",
            *(f"{2 * blank}self.{name} = {name}" for name in kept),
        ]
        return "\n".join(lines)

    def _new(self, field: Field) -> str:
        return self.layer.renames.get(field.name, field.name)

    def _argument(self, field: Field) -> str:
        edits = list(self.references.edits(field.node.annotation))
        annotation = self.source.render(field.node.annotation, edits)
        text = f"{self._new(field)}: {annotation}"
        default = default_node(field)
        if field.factory is not None:
            raise NotRewritableError("layer-factory", field.node)
        if default is None:
            return text
        return f"{text} = {self.source.render(default, list(self.references.edits(default)))}"

    def call(self, indent: int) -> str:
        """The text of `__call__`, `""` if the class has no `param`."""
        if "param" not in self.plan.methods:
            return ""
        return _CALL.rstrip("\n").format(*(" " * indent * n for n in (1, 2, 3, 4)), self.plan.name)


def _is_super(node: ast.AST, name: str) -> bool:
    """Whether an expression calls a method of the parent."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == name
        and isinstance(node.func.value, ast.Call)
        and names_in(node.func.value.func) == {"super"}
    )
