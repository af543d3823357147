"""Methods that return a layer, as the constructors that their calls stand for.

`self.norm(name="last")(x)` makes what `return nn.LayerNorm(dtype=self.dtype, name=name)` in the
method `norm` makes, where such a method is called at several places. So does `norm(name="last")` of
a function inside of the method.
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
    """Moves what such methods and functions make to the calls of them."""
    for name, method in plan.methods.items():
        if name not in ("__call__", "setup") and method.args.args:
            _follow(program, plan, method, name, references)
        for inner in ast.walk(method):
            if isinstance(inner, ast.FunctionDef) and inner is not method:
                _follow(program, plan, inner, inner.name, references, around=method)
            elif isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Lambda):
                target = getattr(inner.targets[0], "id", "")
                _follow(program, plan, inner.value, target, references, around=method)


def _follow(
    program: Program,
    plan: ClassPlan,
    function: ast.FunctionDef | ast.Lambda,
    name: str,
    references: References,
    around: ast.FunctionDef | None = None,
) -> None:
    """Does so for one method, or for one function inside of the method `around`."""
    constructor = _returned(function, references)
    if constructor is None:
        return
    own = [m for m in program.records.makings if _is_by(m, plan, constructor)]
    places = collections.Counter((m.run, m.owner) for m in own if m.through is None or m.path)
    calls = [_call(plan, function, name, constructor, m, around) for m in own]
    is_known = all(each is not None for each in calls)
    # A method that is called once keeps its layer.
    if max(places.values(), default=0) < (1 if around else 2) or not is_known:
        return
    plan.maker_methods[function] = name
    for making, (node, call) in zip(own, calls, strict=True):  # pyright: ignore
        plan.constructors[node] = call
        making.made_at = making.made_at or making.site
        making.site = making.through  # pyright: ignore


def _is_by(making: Making, plan: ClassPlan, constructor: ast.Call) -> bool:
    site = making.made_at or making.site
    is_here = making.kind == "module" and site.file == plan.source.file
    return is_here and plan.source.call_at(site.span) is constructor


def _returned(function: ast.FunctionDef | ast.Lambda, references: References) -> ast.Call | None:
    """The constructor that is all that a method or function is."""
    given = function.args
    if given.vararg or given.kwarg:
        return None
    if isinstance(function, ast.Lambda):
        return function.body if isinstance(function.body, ast.Call) else None
    body = [each for each in function.body if not is_docstring(each)]
    if len(body) != 1:
        return None
    if any(references.value_of(each) is not nn.nowrap for each in function.decorator_list):
        return None
    value = body[0].value if isinstance(body[0], ast.Return) else None
    return value if isinstance(value, ast.Call) else None


def _call(
    plan: ClassPlan,
    function: ast.FunctionDef | ast.Lambda,
    name: str,
    constructor: ast.Call,
    making: Making,
    around: ast.FunctionDef | None,
) -> tuple[ast.Call, ast.Call] | None:
    """The call of a function that made something, and the constructor with what it was given."""
    site: Site | None = making.through
    node = plan.source.call_at(site.span) if site is not None else None
    if site is None or site.file != plan.source.file or node is None:
        return None
    methods = {around} if around else {*plan.methods.values()}
    if not methods & {*plan.source.ancestors(node)} or any(k.arg is None for k in node.keywords):
        return None
    is_function = isinstance(node.func, ast.Name) and node.func.id == name
    if not (is_function if around else is_self(node.func, name)):
        return None
    own = arguments_of(function)
    # A function inside of a method has no module as its first argument.
    names = [each.arg for each in own][0 if around else 1 :]
    given: dict[str, Any] = {each.arg: default for each, default in own.items() if default}
    given |= dict(zip(names[: len(names) - len(function.args.kwonlyargs)], node.args, strict=False))
    given |= {str(k.arg): k.value for k in node.keywords}
    if not all(isinstance(each, ast.expr) for each in given.values()):
        return None
    args = [_with(each, given, names) for each in constructor.args]
    values = [_with(k.value, given, names) for k in constructor.keywords]
    called = _with(constructor.func, given, names)
    if None in (*args, *values, called):
        return None
    keywords = [
        ast.keyword(k.arg, value)  # pyright: ignore
        for k, value in zip(constructor.keywords, values, strict=True)
    ]
    call = ast.Call(called, args, keywords)  # pyright: ignore
    return node, ast.copy_location(call, constructor)


def _with(node: ast.expr, given: dict[str, ast.expr], names: list[str]) -> Any:
    """An expression of the function with the call's values; None if it is not one expression."""
    own = names_in(node) & {*names}
    if isinstance(node, ast.Name) and own:
        return given.get(node.id)
    if isinstance(node, ast.JoinedStr) and own:
        return _joined(node, given, names)
    if isinstance(node, ast.IfExp) and names_in(node.test) <= {*names}:
        test = _with(node.test, given, names)
        if isinstance(test, ast.Constant):
            return _with(node.body if test.value else node.orelse, given, names)
    is_same = all(isinstance(v := given.get(n), ast.Name) and v.id == n for n in own)
    return node if is_same else None


def _joined(node: ast.JoinedStr, given: dict[str, ast.expr], names: list[str]) -> Any:
    """A text with constants in it as a constant, and with other values as it is in the call."""
    parts = [each.value if isinstance(each, ast.FormattedValue) else each for each in node.values]
    values = [_with(each, given, names) for each in parts]
    if all(isinstance(each, ast.Constant) for each in values):
        text = "".join(str(each.value) for each in values)
        return ast.copy_location(ast.Constant(text), node)
    return node
