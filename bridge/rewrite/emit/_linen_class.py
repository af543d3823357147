"""The text of a Linen class that runs the NNX class: its fields, and what its methods take."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping

from bridge.rewrite.plan._plans import ClassPlan
from bridge.rewrite.syntax._source import FUNCTIONS, Edit, Source, is_docstring, is_self

_LONG = 90
_KEPT = ("staticmethod", "classmethod", "nowrap", "property", "cached_property")


@dataclasses.dataclass(frozen=True)
class Interface:
    """What a Linen class needs besides its fields to run an NNX class.

    Attributes:
        target: the NNX class, `module:name`.
        paths: NNX paths by Linen paths.
        sizes: expressions of the method's arguments, by the name of the size: the argument that
            it reads, and the text.
        sizes_of_parts: the attribute of the part that needs a size, and the axis of what it is
            called with, by the name of the size.
        sizes_of_variables: expressions of `variables`, by the name of the size.
        is_logical: whether the names of axes are logical ones.
    """

    target: str
    paths: Mapping[str, str]
    sizes: Mapping[str, tuple[str, str]]
    sizes_of_parts: Mapping[str, tuple[str, int]]
    sizes_of_variables: Mapping[str, str]
    is_logical: bool = False


class UnfitError(Exception):
    """A class cannot be written so; the text says why."""


def declared_methods(plan: ClassPlan) -> list[ast.FunctionDef]:
    """The methods that callers of a class see and that run the model."""
    return [
        node
        for name, node in plan.methods.items()
        if (name == "__call__" or not name.startswith("_"))
        and name != "setup"
        and not _is_kept(node)
    ]


def linen_class_text(plan: ClassPlan, interface: Interface) -> str:
    """The class's text.

    Raises UnfitError if something else of the class is needed.
    """
    node, source = plan.node, plan.source
    if node.decorator_list:
        raise UnfitError("it has a decorator")
    declared = {*declared_methods(plan)}
    functions = [n for n in node.body if isinstance(n, FUNCTIONS[:2])]
    gone = {n.name for n in functions if n not in declared and not _is_kept(n)}
    edits: list[Edit] = []
    fields = {field.name for field in plan.fields}
    for each in functions:
        if each in declared:
            edits += _shortened(source, each)
        elif _is_kept(each):
            read = {n.attr for n in ast.walk(each) if is_self(n)}  # pyright: ignore
            known = fields | {n for n in plan.methods if n not in gone} | set(dir(object))
            known |= {n.id for s in node.body for n in ast.walk(s) if isinstance(n, ast.Name)}
            if read - known:
                name = next(iter(sorted(read - known)))
                raise UnfitError(f"{each.name}, which reads self.{name}, is no method of a model")
        else:
            edits.append(source.lines_of(each, comments=True))
    text = source.render(node, edits).rstrip()
    lines = [line.rstrip() for line in text.split("\n")]
    if all(
        not isinstance(n, ast.AnnAssign) and n not in declared and not is_docstring(n)
        for n in node.body
    ):
        lines.append("    pass")
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
    return f"{_decorator(interface)}\n{body}"


def _is_kept(node: ast.AST) -> bool:
    """Whether a function of a class runs without variables, or is not a method of the model."""
    decorators = [ast.unparse(d).rpartition(".")[2] for d in getattr(node, "decorator_list", ())]
    return any(each in _KEPT for each in decorators)


def _shortened(source: Source, node: ast.FunctionDef) -> Iterator[Edit]:
    """Takes away what a method does, and its decorators."""
    for decorator in node.decorator_list:
        yield Edit(
            source.offset(decorator.lineno, 0),
            source.offset((decorator.end_lineno or decorator.lineno) + 1, 0),
            "",
        )
    first = node.body[0]
    end = source.end(node.body[-1])
    if is_docstring(first):
        yield Edit(source.end(first), end, "")
        return
    given = node.args
    parts = [*given.args, *given.posonlyargs, *given.kwonlyargs, *given.defaults]
    parts += [each for each in (*given.kw_defaults, given.vararg, given.kwarg) if each is not None]
    last = max((source.end(each) for each in parts), default=source.start(node))
    pattern = rb"\)\s*:"
    if node.returns is not None:
        last, pattern = source.end(node.returns), rb":"
    colon = re.compile(pattern).search(source.data, last)
    if colon is None:
        raise UnfitError(f"the head of {node.name} cannot be read")
    yield Edit(colon.end(), end, " ...")


def _decorator(interface: Interface) -> str:
    stored = interface.sizes_of_variables
    tables = {
        "paths": [f"{_text(k)}: {_text(v)}" for k, v in interface.paths.items()],
        "sizes": [
            f'"{name}": lambda {argument}: {text}' if argument else f'"{name}": lambda: {text}'
            for name, (argument, text) in interface.sizes.items()
        ],
        "sizes_of_parts": [
            f'"{name}": ("{part}", {axis})'
            for name, (part, axis) in interface.sizes_of_parts.items()
        ],
        "sizes_of_variables": [f'"{n}": lambda variables: {t}' for n, t in stored.items()],
    }
    lines = [json.dumps(interface.target)]
    for name, rows in tables.items():
        short = f"{name}={{{', '.join(rows)}}}"
        if rows and len(short) < _LONG:
            lines.append(short)
        elif rows:
            lines += [f"{name}={{", *(f"    {row}," for row in rows), "}"]
    if interface.is_logical:
        lines.append("logical_axes=True")
    if len(lines) == 1:
        return f"@bridge.implemented_by({lines[0]})"
    ends = ("{", ",")
    rows = [f"    {each}" if each.endswith(ends) else f"    {each}," for each in lines]
    return "\n".join(["@bridge.implemented_by(", *rows, ")"])


def _text(value: str) -> str:
    """A rule as text, raw where it has backslashes."""
    return f'r"{value}"' if "\\" in value else f'"{value}"'
