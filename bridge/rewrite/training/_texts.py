"""The new text of a file: its changes, the class of its states, and imports of new files."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping

from flax.training.train_state import TrainState

from bridge.rewrite.emit._files import SUFFIX, NewFile, alias_text, import_line
from bridge.rewrite.plan._plans import Program as Classes
from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.publish._in_place import in_place_text
from bridge.rewrite.syntax._source import (
    Edit,
    bound_in,
    imported_from,
    is_docstring,
    is_import,
    span_of,
)

from ._changes import Arguments, Change, Part, edits_of
from ._program import GONE, File, Kind


def text_of(
    classes: Classes, file: File, whole: Collection[str], names: Mapping[str, Collection[str]]
) -> str:
    """The new text.

    `classes` has what the rewriter knows of the classes. The modules `whole` have all their names
    in a new file. `names` has the names that other new files have, by the names of the old modules.
    """
    new = NewFile(classes, file.source, file.module.__name__)
    changes = [*file.changes, *_annotations(file)]
    text = in_place_text(new, edits_of(file.source, changes))
    data, tree = text.encode(), ast.parse(text)
    starts = [0]
    for line in data.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    edits: list[Edit] = []
    for node in tree.body:
        lines = _redirected(file, node, whole, names)
        if lines is not None:
            span = span_of(node)
            start = starts[span.line - 1] + span.column
            edits.append(Edit(start, starts[span.end_line - 1] + span.end_column, "\n".join(lines)))
    if file.state:
        last = [node for node in tree.body if is_import(node)][-1]
        place = starts[span_of(last).end_line]
        edits.append(Edit(place, place, f"\n\n{_PLAIN.format(file.state)}\n"))
        for node in tree.body:
            span = span_of(node)
            if not isinstance(node, ast.ClassDef) and bound_in(node) == {file.state}:
                # Flax's class by this name.
                edits.append(Edit(starts[span.line - 1], starts[span.end_line], ""))
    if "functools." in text and not any("functools" in bound_in(node) for node in tree.body):
        first = next(n for n in tree.body if is_import(n) and "__future__" not in ast.unparse(n))
        place = starts[first.lineno - 1]
        edits.append(Edit(place, place, "import functools\n"))
    for edit in sorted(edits, reverse=True):
        data = data[: edit.start] + edit.text.encode() + data[edit.end :]
    return data.decode()


def _annotations(file: File) -> Iterator[Change]:
    """Annotations of plain states, which have a class of this file now."""
    for node in ast.walk(file.source.tree) if file.state else ():
        given = [getattr(node, name, None) for name in ("annotation", "returns")]
        for each in (each for top in given if isinstance(top, ast.AST) for each in ast.walk(top)):
            if isinstance(each, ast.Attribute) and file.value_of(each) is TrainState:
                yield Change(each, (file.state,))


def modules_in(file: File) -> set[str]:
    """The names of the modules that a file imports as modules."""
    found = set()
    for node in file.source.tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{_absolute(file, node)}.{alias.name}" for alias in node.names}
    return found


def _absolute(file: File, node: ast.ImportFrom) -> str:
    return imported_from(node, getattr(file.module, "__package__", "") or "")


def _redirected(
    file: File, node: ast.stmt, whole: Collection[str], names: Mapping[str, Collection[str]]
) -> list[str] | None:
    """An import from where the names now are, None if they are where they were."""
    if isinstance(node, ast.Import):
        lines = []
        for alias in node.names:
            is_new = alias.name in whole and (alias.asname or "." not in alias.name)
            own = alias.asname or alias.name
            text = f"{alias.name}{SUFFIX} as {own}" if is_new else alias_text(alias)
            lines.append(f"import {text}")
        return lines if any(SUFFIX in line for line in lines) else None
    if not isinstance(node, ast.ImportFrom):
        return None
    where = f"{'.' * node.level}{node.module or ''}"
    absolute = _absolute(file, node)
    places: dict[str, list[str]] = {}
    for alias in node.names:
        own = alias.asname or alias.name
        if absolute in whole or alias.name in names.get(absolute, ()):
            places.setdefault(f"{where}{SUFFIX}", []).append(alias_text(alias))
        elif f"{absolute}.{alias.name}" in whole:
            places.setdefault(where, []).append(f"{alias.name}{SUFFIX} as {own}")
        else:
            places.setdefault(where, []).append(alias_text(alias))
    lines = [import_line(place, given) for place, given in places.items()]
    return lines if any(SUFFIX in line for line in lines) else None


# The class that takes the place of Flax's `TrainState`.
_PLAIN = '''class {}(nnx.Module):
    """The model and its optimizer."""

    def __init__(self, model: nnx.Module, optimizer: nnx.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer'''


def state_class(node: ast.ClassDef, kinds: Mapping[str, Kind]) -> tuple[Part, ...]:
    """The text of a class of states with fields of its own.

    `kinds` has what its fields held. Raises NotRewritableError if the class has more than fields.
    """
    arguments: list[tuple[Part, ...]] = [
        ("self",),
        ("model: nnx.Module",),
        ("optimizer: nnx.Optimizer",),
    ]
    lines: list[str] = []
    docstring: tuple[Part, ...] = ()
    for each in node.body:
        if is_docstring(each):
            docstring = ("\n    ", each, "\n")
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            name = each.target.id
            if kinds.get(name) in GONE:
                continue
            if kinds.get(name, Kind.OTHER) not in (Kind.OTHER, Kind.OPTIONAL):
                raise NotRewritableError("state-field", each, name=name)
            if not lines:
                arguments.append(("*",))
            is_static, default = _options(each.value)
            given = () if default is None else (" = ", default)
            arguments.append((f"{name}: ", each.annotation, *given))
            lines.append(f"self.{name} = {name if is_static else f'nnx.data({name})'}")
        elif not isinstance(each, ast.Pass):
            raise NotRewritableError("state-body", each, name=node.name)
    body = "".join(f"\n        {line}" for line in lines)
    return (
        f"class {node.name}(nnx.Module):",
        *docstring,
        "\n    def __init__",
        Arguments(tuple(arguments), indent=4),
        " -> None:\n        self.model = model\n        self.optimizer = optimizer",
        body,
    )


def _options(value: ast.expr | None) -> tuple[bool, ast.expr | None]:
    """Whether a field is static, and its default."""
    if not isinstance(value, ast.Call):
        return False, value
    named = {k.arg: k.value for k in value.keywords}
    node = named.get("pytree_node")
    if not {*named} <= {"pytree_node", "default"} or value.args:
        raise NotRewritableError("state-field", value, name=ast.unparse(value))
    is_static = isinstance(node, ast.Constant) and node.value is False
    return is_static, named.get("default")
