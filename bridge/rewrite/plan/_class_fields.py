"""The fields of a class as its constructor's arguments, and names and features that NNX lacks."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from flax import linen as nn
from flax import nnx

from bridge import wrappers
from bridge.rewrite.syntax._source import Source, is_docstring, is_self

from ._plans import ClassPlan, Field
from ._references import References
from ._refusals import NotRewritableError

_WIDTH = 90


def fields_of(plan: ClassPlan) -> Iterator[Field]:
    """The fields of a class, inherited ones first, as its constructor takes them."""
    found: dict[str, Field] = {}
    for owner in [*reversed(plan.bases), plan]:
        for node in owner.node.body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            annotation = owner.source.render(node.annotation)
            is_of_class = annotation.startswith(("ClassVar", "typing.ClassVar", "t.ClassVar"))
            if is_of_class or _is_no_argument(node.value) or _is_mark(node):
                continue
            default, factory = _default(owner.source, node)
            name = node.target.id
            if node.value is None and name in found:
                # Annotated anew, a field keeps the default that the class has for it.
                default = found[name].default
            comment = owner.source.comment_behind(node)
            known = owner.cls.__dataclass_fields__.get(name)  # pyright: ignore
            is_named = known is not None and known.kw_only is True
            above = (*owner.source.comments_above(node), *_as_comments(_text_behind(owner, node)))
            found[name] = Field(
                name, annotation, default, factory, comment, node, owner, is_named, above
            )
    yield from (each for name, each in found.items() if name not in ("name", "parent"))


def field_nodes(plan: ClassPlan) -> list[ast.stmt]:
    """The statements of a class's own fields, with the texts behind them."""
    known = {field.name for field in plan.fields if field.plan is plan}
    found: list[ast.stmt] = []
    for node in plan.node.body:
        if isinstance(node, ast.AnnAssign) and (
            ast.unparse(node.target) in known or _is_no_argument(node.value) or _is_mark(node)
        ):
            text = _text_behind(plan, node)
            found += [node] if text is None else [node, text]
    return found


def _text_behind(plan: ClassPlan, node: ast.AnnAssign) -> ast.Expr | None:
    """The text that says what a field is, as the statement behind it."""
    body = plan.node.body
    behind = body[body.index(node) + 1 :][:1]
    return next((e for e in behind if isinstance(e, ast.Expr) and is_docstring(e)), None)


def _as_comments(text: ast.Expr | None) -> Iterator[str]:
    value = getattr(text.value, "value", None) if text is not None else None
    for line in inspect.cleandoc(value).splitlines() if isinstance(value, str) else ():
        yield from textwrap.wrap(line, _WIDTH, initial_indent="# ", subsequent_indent="# ") or ["#"]


def _is_mark(node: ast.AnnAssign) -> bool:
    """Whether it is `_: dataclasses.KW_ONLY`, behind which fields are given by name."""
    return ast.unparse(node.annotation).strip("'\"").split(".")[-1] == "KW_ONLY"


def _is_no_argument(value: ast.expr | None) -> bool:
    """Whether a field is `field(init=False)`, without a default."""
    given = {k.arg: k.value for k in value.keywords} if isinstance(value, ast.Call) else {}
    is_told = isinstance(init := given.get("init"), ast.Constant) and init.value is False
    return is_told and not given.keys() & {"default", "default_factory"}


def _default(source: Source, node: ast.AnnAssign) -> tuple[str | None, str | None]:
    value = node.value
    if value is None:
        return None, None
    if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] == "field":
        for keyword in value.keywords:
            if keyword.arg == "default":
                return source.render(keyword.value), None
            if keyword.arg == "default_factory":
                return None, source.render(keyword.value)
        return None, None
    return as_default(value, source.render(value)), None


def as_default(node: ast.expr, text: str) -> str:
    """The text of a default as an argument has it: a tuple needs parentheses there."""
    first = node.elts[0] if isinstance(node, ast.Tuple) and node.elts else None
    is_bare = first is not None and (
        (node.lineno, node.col_offset) == (first.lineno, first.col_offset)
    )
    return f"({text})" if is_bare else text


def module_default(field: Field) -> type[nn.Module] | None:
    """The class of the module that is the default of a field, None if there is none."""
    value = field.plan.cls.__dataclass_fields__[field.name].default  # pyright: ignore
    return type(value) if isinstance(value, nn.Module) else None


def default_node(field: Field) -> ast.expr | None:
    """The expression of a field's default, in the field's file."""
    value = field.node.value
    if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] == "field":
        return next((k.value for k in value.keywords if k.arg == "default"), None)
    return value


# Functions that no class is rewritten with.
_WITHOUT = (nn.share_scope, nn.map_variables)
# What layers of Linen have, and those of NNX have not.
_OF_LINEN = ("apply", "init", "bind", "unbind", "variables", "scope")


def check_class(plan: ClassPlan, references: References) -> None:
    """Checks that a class uses nothing that NNX modules lack, or have for themselves.

    Raises NotRewritableError otherwise.
    """
    for name, node in plan.methods.items():
        if name in ("__init__", "__post_init__", "__getattr__", "__setattr__"):
            raise NotRewritableError("own-method", node, name=name)
        if name in ("train", "eval"):
            raise NotRewritableError("reserved-method", node, name=name)
    for field in plan.fields:
        if field.name in ("cls", "self", "rngs"):
            raise NotRewritableError("reserved-argument", field.node, name=field.name)
        if not _is_made_anew(plan, field, references):
            raise NotRewritableError("module-default", field.node)
    own = {n.arg for n in ast.walk(plan.node) if isinstance(n, ast.arg)}
    names = [n for n in ast.walk(plan.node) if isinstance(n, ast.Name)]
    own |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
    for name in names:
        if name.id not in own and isinstance(references.value_of(name), nn.Module):
            raise NotRewritableError("module-outside", name, name=name.id)
    for node in ast.walk(plan.node):
        if isinstance(node, ast.Name | ast.Attribute) and _is_to_linen(references.value_of(node)):
            raise NotRewritableError("mixed-class", node, name=ast.unparse(node))
    layers = {slot.attribute for slot in plan.slots.values() if slot.kind == "module"}
    for node in ast.walk(plan.node):
        if isinstance(node, ast.Attribute):
            value = references.value_of(node)
            if any(value is each for each in _WITHOUT):
                raise NotRewritableError("no-function", node, name=node.attr)
            lines = references.program.records.lines.get(plan.source.file, set())
            ran = plan.source.statement_of(node).lineno in lines
            if not ran and node.attr in _OF_LINEN and _attribute_of(node.value) in layers:
                plan.note(node, f"{ast.unparse(node)} is read in a branch that did not run")
            lacking = {"scope", "path", "variables", "name", "parent"}
            lacking -= {f.name for f in plan.fields}
            if not is_self(node) or node.attr not in lacking:
                continue
            is_item = isinstance(plan.source.parents[node], ast.Subscript)
            if ran and node.attr == "variables" and is_item:
                # Read by their path, as tied weights are.
                continue
            if not ran:
                plan.note(node, f"self.{node.attr} is read in a branch that did not run")
            else:
                raise NotRewritableError("no-attribute", node, name=node.attr)


def _is_made_anew(plan: ClassPlan, field: Field, references: References) -> bool:
    """Whether the constructor can make the default of a field, if that is a module.

    It knows no sizes for it.
    """
    cls = module_default(field)
    if cls is None:
        return True
    made = references.program.plan_of(cls)
    is_known = made is not None and made.refusal is None and not made.sizes and not made.layer
    # None stands for the default.
    takes_none = "None" in field.annotation or "Optional" in field.annotation
    is_call = isinstance(default_node(field), ast.Call)
    return is_known and field.plan is plan and is_call and not takes_none


def _attribute_of(node: ast.expr) -> str | None:
    """The attribute of the module that an expression reads, None if it reads another thing."""
    return node.attr if isinstance(node, ast.Attribute) and is_self(node) else None


def _is_to_linen(value: Any) -> bool:
    """Whether something makes a Linen module of an NNX class."""
    if isinstance(value, type):
        return issubclass(value, wrappers.ToLinen | nnx.bridge.ToLinen)
    makers = (wrappers.to_linen, wrappers.to_linen_class, nnx.bridge.to_linen)
    return any(value is each for each in makers)
