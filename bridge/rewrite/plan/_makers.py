"""Functions that return layers' classes, partials of them, or initialisers with axis names.

`get_norm(kind, train)` returns `functools.partial(nn.BatchNorm, use_running_average=not train)`.
A constructor calls it with any mode, as each call of the layer says the mode. A function of another
file that names layers or axes without a mode has its counterpart in that file's new one.
"""

from __future__ import annotations

import ast
import collections
import inspect
import pathlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from flax import linen as nn

from bridge._train_eval import MODE_FIELDS
from bridge.rewrite.observe._records import Making, Site
from bridge.rewrite.syntax._source import (
    arguments_of,
    is_docstring,
    is_self,
    names_in,
    origins,
    source_of,
)

from ._layers import layer_of
from ._plans import ClassPlan, Maker, Program
from ._references import References, references_of


def find_makers(program: Program, inside: Callable[[str], bool]) -> None:
    """Finds the makers that the classes call, and what depends on a mode alone in these calls.

    `inside` says whether a file belongs to the program.
    """
    for plan in program.plans.values():
        references = references_of(program, plan)
        for name, method in plan.methods.items():
            for node in ast.walk(method):
                function = references.value_of(node.func) if isinstance(node, ast.Call) else None
                if not inspect.isfunction(function) or not inside(function.__code__.co_filename):
                    continue
                if function.__code__ not in program.makers:
                    program.makers[function.__code__] = _maker(program, function)
                maker = program.makers[function.__code__]
                # `setup` has no mode, and a function of this file is taken over anyway.
                if maker is None or (
                    name == "setup" if maker.modes else maker.source is plan.source
                ):
                    continue
                given = _bound(maker, node)  # pyright: ignore
                if given is not None:
                    plan.makers[node] = maker  # pyright: ignore
                    plan.moved |= {given[each] for each in maker.given if each in given}


def _maker(program: Program, function: Any) -> Maker | None:
    module = sys.modules.get(function.__module__)
    file = function.__code__.co_filename
    source = source_of(file, pathlib.Path(file).stat().st_mtime)
    node = next(
        (
            each
            for each in source.tree.body
            if isinstance(each, ast.FunctionDef) and each.name == function.__name__
        ),
        None,
    )
    if module is None or node is None or getattr(module, node.name, None) is not function:
        return None
    references = References(program, source, vars(module))
    partials = [
        each
        for each in ast.walk(node)
        if isinstance(each, ast.Call) and each.args and references.is_partial(each)
    ]
    modes = [(each, k) for each in partials for k in each.keywords if k.arg in MODE_FIELDS]
    given = {each.arg for each in arguments_of(node)}
    texts = {(k.arg, ast.unparse(k.value)) for _, k in modes}
    names = set[str]().union(*(names_in(k.value) for _, k in modes))
    inner = {id(each) for _, k in modes for each in ast.walk(k.value)}
    read = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and id(n) not in inner}
    if not names or len(texts) != len({name for name, _ in texts}) or not names <= given - read:
        # It takes no mode, or does more with it.
        if not _names_linen(references, node):
            return None
        program.sources[file] = source
        return Maker(node, source, module.__name__, frozenset(), {}, is_mixed=True)
    layers = {call: layer_of(references.value_of(call.args[0])) for call, _ in modes}
    returned = [n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value]
    makes = {each for value in returned for each in origins(node, value)}
    takers = {layer.name for layer in layers.values() if layer is not None}
    if not takers:
        return None
    program.sources[file] = source
    return Maker(
        node,
        source,
        module.__name__,
        frozenset(names),
        {str(k.arg): k.value for _, k in modes},
        is_mixed=not makes <= {call for call, layer in layers.items() if layer is not None},
    )


def _names_linen(references: References, function: ast.FunctionDef) -> bool:
    """Whether a function, or one of its file that it calls, names layers or gives names to axes."""
    tops = {f.name: f for f in references.source.tree.body if isinstance(f, ast.FunctionDef)}
    left, seen = [function], {function.name}
    while left:
        for node in ast.walk(left.pop()):
            value = references.value_of(node)
            if value is nn.with_partitioning or value is nn.with_logical_partitioning:
                return True
            if isinstance(value, type) and issubclass(value, nn.Module):
                return True
            if isinstance(node, ast.Name) and node.id in tops.keys() - seen:
                seen.add(node.id)
                left.append(tops[node.id])
    return False


def _bound(maker: Maker, node: ast.Call) -> dict[str, ast.AST] | None:
    """The arguments of a call by name, each as a node of the call; None if it has a star."""
    if any(isinstance(each, ast.Starred) for each in node.args):
        return None
    if any(each.arg is None for each in node.keywords):
        return None
    names = [each.arg for each in maker.function.args.args]
    found: dict[str, ast.AST] = dict(zip(names, node.args, strict=False))
    return found | {str(each.arg): each for each in node.keywords}


def without_mode(maker: Maker, node: ast.Call) -> Mapping[ast.AST, str]:
    """The text of each argument of a call that only the mode depends on, for a constructor."""
    given = _bound(maker, node) or {}
    moved = {given[name]: name for name in maker.given if name in given}
    last = [each for each in node.args if each not in moved]
    behind = node.args.index(last[-1]) if last else -1
    return {
        each: "False" if each in node.args[:behind] else f"{name}=False"
        for each, name in moved.items()
    }


def modes_in_call(
    maker: Maker, node: ast.Call, text_of: Callable[[ast.AST], str]
) -> dict[str, str]:
    """The modes of what a maker makes, by name, as the call that calls the maker has them.

    `node` calls the maker. `text_of` gives an expression as the call has it.
    """
    given = _bound(maker, node) or {}
    defaults = {each.arg: default for each, default in arguments_of(maker.function).items()}

    def text(name: str) -> str:
        value: Any = given.get(name)
        value = value.value if isinstance(value, ast.keyword) else value
        if value is None:
            return maker.source.render(defaults[name])  # pyright: ignore
        is_simple = isinstance(value, ast.Name | ast.Constant | ast.Attribute)
        return text_of(value) if is_simple else f"({text_of(value)})"

    return {
        mode: maker.source.render(
            value,
            [
                maker.source.edit(each, text(each.id))
                for each in ast.walk(value)
                if isinstance(each, ast.Name) and each.id in maker.given
            ],
        )
        for mode, value in maker.modes.items()
    }


def is_mixed(plan: ClassPlan, method: ast.AST, node: ast.expr, modes: Collection[str]) -> bool:
    """Whether what an expression makes may take no mode, where some of it takes one.

    `modes` has the names of these modes.
    """
    found = list(origins(method, node))
    takes = [_takes(plan, each, modes) for each in found]
    return any(each is not False for each in takes) and not all(takes)


def _takes(plan: ClassPlan, node: ast.expr, modes: Collection[str]) -> bool | None:
    """Whether what an expression makes takes a mode; None if some of it does."""
    if is_self(node) and node.attr in plan.carried:  # pyright: ignore
        return None if node.attr in plan.mixed else True  # pyright: ignore
    if isinstance(node, ast.Call):
        maker = plan.makers.get(node)
        if maker is not None and maker.modes:
            return None if maker.is_mixed else True
        return any(k.arg in modes for k in node.keywords) or any(
            _takes(plan, each, modes) is not False for each in node.args[:1]
        )
    return False


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
