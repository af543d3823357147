"""The fields of a class, as the arguments of its constructor."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator

from flax import linen as nn

from bridge.rewrite.syntax._source import Source, is_docstring

from ._plans import ClassPlan, Field

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
