"""Chooses other values for a field, which a rewritten class has to take as the Linen class does."""

from __future__ import annotations

import ast
import dataclasses
import enum
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from flax import linen as nn

from bridge.rewrite.syntax._source import arguments_of

_NONE: Mapping[str, Collection[str | int]] = types.MappingProxyType({})
# For a field that is None, by what its annotation names.
_FOR_NONE = (("bool", True), ("int", 6), ("int", 5), ("int", 1), ("int", 2), ("float", 0.5))


Words = Mapping[str, Collection[str | int]]
"""The texts and integers that a program compares with what has a name, by that name."""


def other_values(
    value: Any, annotation: Any = None, name: str = "", words: Words = _NONE
) -> list[list[Any]]:
    """Values of the same kind, each different; those of a configuration by its fields.

    The type `annotation` says what may stand in the place of None. `words` has what the program
    compares with fields.
    """
    if not is_configuration(value):
        return [list(_others(value, annotation, words.get(name, ())))]
    return [
        [dataclasses.replace(value, **{own: other}) for other in others]
        for own, held, kind in configured(value)
        for others in other_values(held, kind, own, words)
    ]


def is_configuration(value: Any) -> bool:
    """Whether a value is an object with fields of its own."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module)


def configured(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """The fields of such an object: name, value, and type or None."""
    known = types_of(type(value))
    for own in dataclasses.fields(value):
        if own.init:
            yield own.name, getattr(value, own.name), known.get(own.name)


def compared_words(trees: Iterable[ast.AST]) -> dict[str, list[str | int]]:
    """What files compare with a name, as in `self.norm == "layer"`, `self.depth > 1` or `match`.

    What a function compares with an argument counts for what its calls give it.
    """
    found: dict[str, list[str | int]] = {}
    nodes = [node for tree in trees for node in ast.walk(tree)]
    for node in nodes:
        match node:
            case ast.Compare():
                names, values = [node.left, *node.comparators], [node]
            case ast.Match():
                names, values = [node.subject], [case.pattern for case in node.cases]
            case ast.Subscript(value=ast.Dict() as table):
                names, values = [node.slice], [each for each in table.keys if each is not None]
            case _:
                continue
        constants = [
            each.value
            for value in values
            for each in ast.walk(value)
            if isinstance(each, ast.Constant)
        ]
        words = [each for each in constants if isinstance(each, str) or type(each) is int]
        for own in filter(None, map(_name_of, names)):
            found[own] = list(dict.fromkeys([*found.get(own, ()), *words]))
    functions = {each.name: each for each in nodes if isinstance(each, ast.FunctionDef)}
    for node in nodes:
        called = node.func if isinstance(node, ast.Call) else None
        function = functions.get(called.id) if isinstance(called, ast.Name) else None
        if function is None or not isinstance(node, ast.Call):
            continue
        names = [each.arg for each in arguments_of(function)]
        given = [*zip(names, node.args, strict=False), *((k.arg, k.value) for k in node.keywords)]
        for name, value in given:
            own = _name_of(value)
            if own is not None and name in found:
                found[own] = list(dict.fromkeys([*found.get(own, ()), *found[name]]))
    return found


def _name_of(node: ast.AST) -> str | None:
    """The name of a variable or an attribute."""
    return getattr(node, "attr", getattr(node, "id", None))


def _others(value: Any, annotation: Any, compared: Collection[str | int]) -> Iterator[Any]:
    words = [each for each in compared if isinstance(each, str)]
    numbers = [each for each in compared if isinstance(each, int)]
    allowed = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        yield from (each for each in allowed if each != value)
    elif value is None:
        names = [getattr(each, "__name__", str(each)) for each in allowed]
        yield from (other for name, other in _FOR_NONE if name in names)
        yield from words
    elif isinstance(value, str) and words:
        yield from (each for each in words if each != value)
        # What no condition asks for.
        yield f"not {value}"
    elif isinstance(value, enum.Enum):
        yield from (each for each in type(value) if each is not value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
        if value > 0:
            yield value * 2
        if value > 1:
            yield value - 1
        # On the other side of what a condition asks for.
        known = (value, value + 1, value * 2, value - 1)
        edges = (own + step for own in numbers for step in (0, 1, -1))
        yield from (each for each in dict.fromkeys(edges) if each not in known and each >= 0)
    elif isinstance(value, float):
        yield value / 2 if value else 0.25
    elif type(value) in (list, tuple) and all(type(each) is int for each in value):
        yield from map(type(value), _other_sequences(value))
    if value is not None and type(None) in allowed:
        yield None


def other_sizes(module: nn.Module, names: Collection[str]) -> Iterator[dict[str, Any]]:
    """Integers for the fields of a module, each another one, in the order to try."""
    known = {name: getattr(module, name) for name in names}
    integers = [name for name, each in known.items() if type(each) is int and each > 0]
    if integers:
        yield {name: known[name] + 1 + place for place, name in enumerate(integers)}
        yield {name: known[name] * (2 + place) for place, name in enumerate(integers)}


def _other_sequences(value: Any) -> Iterator[list[int]]:
    if value:
        yield []
        if len(value) > 1:
            yield list(value[:-1])
        # Unequal, so that one member cannot stand for another.
        yield [each + 2 * (place + 1) for place, each in enumerate(value)]
        yield [*value, 2 * value[-1]]
    else:
        yield [6, 4]


def types_of(cls: type) -> dict[str, Any]:
    """The types of a class's fields; none where an annotation cannot be resolved."""
    try:
        return typing.get_type_hints(cls)
    except Exception:
        return {}
