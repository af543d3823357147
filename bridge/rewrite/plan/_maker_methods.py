"""Methods that return a layer, as the constructors that their calls stand for.

`self.norm(name="last")(x)` makes what `return nn.LayerNorm(dtype=self.dtype, name=name)` in the
method `norm` makes, where such a method is called at several places.
"""

from __future__ import annotations

import ast
import collections
from typing import Any

from flax import linen as nn

from bridge.rewrite.observe._records import Making, Site
from bridge.rewrite.syntax._source import arguments_of, is_docstring, is_self, names_in

from ._plans import ClassPlan, Program
from ._references import References


def follow_methods(program: Program, plan: ClassPlan, references: References) -> None:
    """Moves what such methods make to the calls of them."""
    for name, method in plan.methods.items():
        constructor = _returned(method, references)
        if constructor is None or name in ("__call__", "setup"):
            continue
        own = [m for m in program.records.makings if _is_by(m, plan, constructor)]
        places = collections.Counter((m.run, m.owner) for m in own if m.through is None or m.path)
        calls = [_call(plan, method, constructor, m) for m in own]
        is_known = all(each is not None for each in calls)
        if max(places.values(), default=0) < 2 or not is_known:
            continue
        plan.maker_methods.add(method)
        for making, (node, call) in zip(own, calls, strict=True):  # pyright: ignore
            plan.constructors[node] = call
            making.made_at = making.made_at or making.site
            making.site = making.through  # pyright: ignore


def _is_by(making: Making, plan: ClassPlan, constructor: ast.Call) -> bool:
    site = making.made_at or making.site
    is_here = making.kind == "module" and site.file == plan.source.file
    return is_here and plan.source.call_at(site.span) is constructor


def _returned(method: ast.FunctionDef, references: References) -> ast.Call | None:
    """The constructor that is all that a method is."""
    body = [each for each in method.body if not is_docstring(each)]
    given = method.args
    if len(body) != 1 or given.vararg or given.kwarg or not given.args:
        return None
    if any(references.value_of(each) is not nn.nowrap for each in method.decorator_list):
        return None
    value = body[0].value if isinstance(body[0], ast.Return) else None
    return value if isinstance(value, ast.Call) else None


def _call(
    plan: ClassPlan, method: ast.FunctionDef, constructor: ast.Call, making: Making
) -> tuple[ast.Call, ast.Call] | None:
    """The call of a method that made something, and the constructor with what it was given."""
    site: Site | None = making.through
    node = plan.source.call_at(site.span) if site is not None else None
    if site is None or site.file != plan.source.file or node is None:
        return None
    if not {*plan.methods.values()} & {*plan.source.ancestors(node)}:
        return None
    if not is_self(node.func, method.name) or any(k.arg is None for k in node.keywords):
        return None
    own = arguments_of(method)
    names = [each.arg for each in own]
    given: dict[str, Any] = {each.arg: default for each, default in own.items() if default}
    if method.args.kwonlyargs:
        return None
    given |= dict(zip(names[1:], node.args, strict=False))
    given |= {str(k.arg): k.value for k in node.keywords}
    if not all(isinstance(each, ast.expr) for each in given.values()):
        return None
    args = [_with(each, given, names) for each in constructor.args]
    values = [_with(k.value, given, names) for k in constructor.keywords]
    function = _with(constructor.func, given, names)
    if None in (*args, *values, function):
        return None
    keywords = [
        ast.keyword(k.arg, value)  # pyright: ignore
        for k, value in zip(constructor.keywords, values, strict=True)
    ]
    call = ast.Call(function, args, keywords)  # pyright: ignore
    return node, ast.copy_location(call, constructor)


def _with(node: ast.expr, given: dict[str, ast.expr], names: list[str]) -> Any:
    """An expression of the method with the call's values; None if it is not one expression."""
    if isinstance(node, ast.Name) and node.id in names[1:]:
        return given.get(node.id)
    if isinstance(node, ast.IfExp) and names_in(node.test) <= {*names[1:]}:
        test = _with(node.test, given, names)
        if isinstance(test, ast.Constant):
            return _with(node.body if test.value else node.orelse, given, names)
    return None if names_in(node) & {*names[1:]} else node
