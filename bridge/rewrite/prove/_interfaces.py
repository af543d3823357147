"""Finds how a Linen class runs its NNX class: where its variables and its sizes are."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax import linen as nn
from flax.core import meta

from bridge._conversion.collections import OUTPUTS
from bridge._conversion.neutral import walk
from bridge.port._rule_text import rules_of as compressed
from bridge.rewrite.emit._linen_class import Interface, UnfitError, declared_methods
from bridge.rewrite.observe._records import Instance, Path, Shape, below
from bridge.rewrite.plan._plans import ClassPlan, Program

from ._parts import first_calls
from ._paths import Paths


class Interfaces:
    """The interfaces of the rewritten classes.

    `models` has the NNX model of each run.
    """

    def __init__(self, program: Program, models: Mapping[int, Any]) -> None:
        self.program = program
        self._places = {run: Paths(program, run, model).places() for run, model in models.items()}

    def of(self, plan: ClassPlan) -> Interface:
        """The interface of a class.

        Raises UnfitError if its variables or sizes are not found.
        """
        instances = [
            each
            for each in self.program.records.instances.values()
            if each.cls is plan.cls and each.run in self._places
        ]
        called = [each for each in instances if first_calls(each)]
        if not called:
            raise UnfitError("it was never called")
        module = f"{self.program.new_modules[plan.cls.__module__]}:{plan.name}"
        sizes: dict[str, tuple[str, str]] = {}
        parts: dict[str, tuple[str, int]] = {}
        stored: dict[str, str] = {}
        for name, size in plan.sizes.items():
            values = [(each, size.values.get((each.run, each.path))) for each in called]
            own, of_variables = self._of_call(name, values), self._of_variables(values)
            if own is not None:
                sizes[name] = own
            elif (part := self._of_part(name, values)) is not None:
                parts[name] = part
            else:
                raise UnfitError(f"no argument of a call determines {name}")
            if of_variables is not None and len(declared_methods(plan)) > 1:
                stored[name] = of_variables
        boxes = {
            type(leaf)
            for each in called
            for _, leaf in walk(self._below(each))
            if isinstance(leaf, meta.AxisMetadata)
        }
        return Interface(
            module, self._paths(called), sizes, parts, stored, nn.LogicallyPartitioned in boxes
        )

    def _below(self, instance: Instance) -> dict[str, Any]:
        variables = self.program.records.variables[instance.run]
        return {c: t for c, t in below(variables, instance.path).items() if c not in OUTPUTS}

    def _paths(self, instances: Sequence[Instance]) -> dict[str, str]:
        """The rules for paths below a class."""
        pairs: dict[str, str] = {}
        leaves: set[str] = set()
        for instance in instances:
            places, top = self._places[instance.run], instance.path
            own = places.get(top, "")
            prefix = f"{own}." if own else ""
            leaves |= {
                "/".join(path[:n])
                for _, *path in (p for p, _ in walk(self._below(instance)))
                for n in range(1, len(path) + 1)
            }
            for path, place in places.items():
                if path[: len(top)] != top or path == top or not place.startswith(prefix):
                    continue
                linen = "/".join(path[len(top) :])
                nnx = place[len(prefix) :]
                default = _default(places, path)
                if linen not in leaves or (place == default and linen not in pairs):
                    continue
                if pairs.setdefault(linen, nnx) != nnx:
                    raise UnfitError(f"{linen} is at several NNX paths")
        return compressed(pairs.items(), pairs.items(), leaves)

    def _of_call(self, name: str, values: Sequence[tuple[Instance, Any]]) -> tuple[str, str] | None:
        """The argument and the expression that tell a size in every call that needs it."""
        left: list[tuple[str, str]] | None = None
        # A layer that these fields leave out needs no size, and takes any.
        values = [each for each in values if each[1] is not None] or values
        for instance, value in values:
            own = [(a, t) for a, t, found in _known(instance) if found == value]
            left = own if left is None else [each for each in left if each in own]
        first = name.removesuffix("_features")
        distinct = {repr(value) for _, value in values}
        if not left and len(distinct) == 1 and len(values) > 1:
            # Not even other sizes change it.
            return "", distinct.pop()
        if not left and all(isinstance(value, tuple) and value for _, value in values):
            return self._of_list(name, values)
        return min(left or (), key=lambda each: each[0] != first, default=None)

    def _of_list(self, name: str, values: Sequence[tuple[Instance, Any]]) -> tuple[str, str] | None:
        """The same for layers one after the other, whose output sizes are a field."""
        first = self._of_call(name, [(each, value[0]) for each, value in values])
        for field in values[0][0].fields if first is not None else ():
            sizes = [instance.fields.get(field) for instance, _ in values]
            if first is not None and all(
                isinstance(own, tuple | list) and tuple(own[:-1]) == value[1:]
                for own, (_, value) in zip(sizes, values, strict=True)
            ):
                arguments = ", ".join(dict.fromkeys(filter(None, ("self", first[0]))))
                return arguments, f"({first[1]}, *self.{field}[:-1])"
        return None

    def _of_part(self, name: str, values: Sequence[tuple[Instance, Any]]) -> tuple[str, int] | None:
        """The part that needs a size, and the axis of what it is called with, in every instance."""
        left: set[tuple[str, int]] | None = None
        for instance, value in values:
            found: dict[str, dict[int, Instance]] = {}
            for part, number, each in self._parts(instance):
                if name.startswith(f"{part.lower()}_"):
                    found.setdefault(part, {})[number] = each
            here: set[tuple[str, int]] = set()
            for part, each in found.items():
                shapes = [_first_shape(own) for _, own in sorted(each.items())]
                ranks = [0 if shape is None else len(shape) for shape in shapes]
                for axis in range(-1, -min(ranks) - 1, -1):
                    sizes = tuple(shape[axis] for shape in shapes if shape is not None)
                    if value == sizes or ((value,) == sizes and -1 in each):
                        here.add((part, axis))
            left = here if left is None else left & here
        # The longest name, and the last axis of these.
        return max(left or (), key=lambda each: (len(each[0]), each[1]), default=None)

    def _parts(self, instance: Instance) -> Iterator[tuple[str, int, Instance]]:
        """The attributes that hold parts of a module, the number in a list or -1, and the part."""
        places = self._places[instance.run]
        own = places.get(instance.path, "")
        prefix = f"{own}." if own else ""
        for path, place in places.items():
            part = self.program.records.instances.get((instance.run, path))
            names = place.removeprefix(prefix).split(".")
            is_below = place.startswith(prefix) and path != instance.path
            if part is None or not is_below or len(names) > 2:
                continue
            if len(names) == 1:
                yield names[0], -1, part
            elif names[1].isdecimal():
                yield names[0], int(names[1]), part

    def _of_variables(self, values: Sequence[tuple[Instance, Any]]) -> str | None:
        """The expression of variables that tells a size in every instance."""
        left: list[str] | None = None
        for instance, value in values:
            stacks = self.program.records.stacks_above(instance.run, instance.path)
            variables = self.program.records.variables[instance.run]
            inner = below(variables, instance.path, stacks)
            own = [text for text, found in _axes(inner) if found == value]
            left = own if left is None else [each for each in left if each in own]
        return left[0] if left else None


def _default(places: Mapping[Path, str], path: Path) -> str:
    """Where a path is if only what is above it has another place."""
    above = next(path[:n] for n in range(len(path) - 1, -1, -1) if path[:n] in places)
    return ".".join(filter(None, (places[above], *path[len(above) :])))


def _first_shape(instance: Instance) -> tuple[int, ...] | None:
    """The shape of the first argument of a module's first call."""
    call = next(iter(instance.uses), None)
    first = call.args[0] if call is not None and call.args else None
    return first.shape if isinstance(first, Shape) else None


def _known(instance: Instance) -> Iterator[tuple[str, str, Any]]:
    """Arguments of a module's first call, and what expressions of them and its fields are."""
    call, fields = first_calls(instance)[0], [*_fields(instance)]
    function = getattr(instance.cls, call.method)
    bound = inspect.signature(function).bind(None, *call.args, **call.kwargs)
    shapes = {n: v.shape for n, v in [*bound.arguments.items()][1:] if isinstance(v, Shape)}
    for name, shape in shapes.items():
        for axis in (*range(-1, -len(shape) - 1, -1), *range(len(shape))):
            yield name, f"{name}.shape[{axis}]", shape[axis]
        for axis in range(1, len(shape)):
            yield name, f"{name}.shape[{axis}:]", shape[axis:]
        yield name, f"{name}.shape", shape
    for text, value in fields:
        yield "self", text, value
    for name, shape in shapes.items():
        for text, value in fields:
            # Such as the shape of what an embedding makes of tokens.
            yield f"self, {name}", f"(*{name}.shape, {text})", (*shape, value)


def _fields(instance: Instance) -> Iterator[tuple[str, int]]:
    """Fields of a module and of its configurations, and their values."""
    for name, value in instance.fields.items():
        if type(value) is int:
            yield f"self.{name}", value
        elif dataclasses.is_dataclass(value) and not isinstance(value, nn.Module | type):
            for field in dataclasses.fields(value):
                if type(own := getattr(value, field.name, None)) is int:
                    yield f"self.{name}.{field.name}", own


def _axes(variables: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Expressions for the axes of parameters."""
    found: list[tuple[Path, Any]] = [
        (path, leaf) for path, leaf in walk(meta.unbox(variables)) if path[0] == "params"
    ]
    for path, leaf in sorted(found, key=lambda each: (len(each[0]), each[0])):
        place = "".join(f'["{name}"]' for name in path)
        for axis, size in enumerate(leaf.shape):
            yield f"variables{place}.shape[{axis}]", size
