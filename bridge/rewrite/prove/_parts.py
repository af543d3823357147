"""Finds the parts of a model that can run by themselves while the model's own class stays Linen."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import linen as nn

from bridge.rewrite.observe._entries import Entry, arguments_of
from bridge.rewrite.observe._records import Called, Instance, Path, Shape
from bridge.rewrite.plan._function_plans import FunctionPlan
from bridge.rewrite.plan._plans import Program
from bridge.rewrite.plan._refusals import Refusal, refused


@dataclasses.dataclass(frozen=True)
class Parts:
    """What runs instead of entries if their own class stays Linen.

    Attributes:
        entries: the outermost rewritten modules, and the entries whose class is rewritten. A module
            is called as the model calls it, with its fields.
        refused: the classes that are given modules, which cannot be made again.
    """

    entries: list[Entry]
    refused: dict[type, Refusal]


def parts_of(program: Program, entries: Sequence[Entry]) -> Parts | None:
    """The parts of a model that run by themselves; None if each entry's own class is rewritten."""
    # A transform of a class is no class of the program.
    kept = [_is_rewritten(program, root) and not root.lifted for root in program.roots]
    if all(kept):
        return None
    found, seen = Parts([], {}), set[tuple[type, str]]()
    for run, entry in enumerate(entries):
        if kept[run]:
            found.entries.append(entry)
            continue
        for instance, parts in _outermost(program, run, found.refused):
            for part in parts:
                key = instance.cls, repr((instance.fields, part.called))
                if key not in seen:
                    seen.add(key)
                    found.entries.append(part)
    return found


def _is_rewritten(program: Program, instance: Instance) -> bool:
    plan = program.plan_of(instance.cls)
    return plan is not None and plan.refusal is None and not isinstance(plan, FunctionPlan)


def _outermost(
    program: Program, run: int, refused_classes: dict[type, Refusal]
) -> Iterator[tuple[Instance, list[Entry]]]:
    """The rewritten modules of a run that are in no other one, and how they are made again."""
    own = [each for (number, _), each in program.records.instances.items() if number == run]
    inside: set[Path] = set()
    for instance in sorted(own, key=lambda each: len(each.path)):
        path = instance.path
        if not _is_rewritten(program, instance) or instance.cls in refused_classes:
            continue
        if any(path[:n] in inside for n in range(len(path))):
            continue
        calls = (_inside(program, instance, called) for called in first_calls(instance))
        made = [entry_of(program, instance, called) for called in calls if called is not None]
        parts = [each for each in made if each is not None]
        if parts:
            inside.add(path)
            yield instance, parts
        else:
            refused_classes[instance.cls] = refused("given-modules")


def _inside(program: Program, root: Instance, called: Called) -> Called | None:
    """A call of a model that a lifted transform made, as the module inside is called.

    None if that is not known: only the outer call was seen.
    """
    chain = program.records.chain(root.lifted) if not root.path else []
    args = called.args
    for lifted in chain:
        if lifted.kind in ("remat", "jit"):
            continue
        axes = lifted.options.get("in_axes")
        if lifted.kind != "vmap" or not isinstance(axes, int | None) or called.kwargs:
            return None
        if axes is not None:
            args = jax.tree.map(lambda leaf, axis=axes: _without_axis(leaf, axis), args)
    return dataclasses.replace(called, args=args)


def _without_axis(leaf: Any, axis: int) -> Any:
    if not isinstance(leaf, Shape):
        return leaf
    sizes = list(leaf.shape)
    del sizes[axis]
    return Shape(tuple(sizes), leaf.dtype)


def first_calls(instance: Instance) -> list[Called]:
    """The first call of each method from outside, or from a function under a lifted transform."""
    found: dict[str, Called] = {}
    ended = -1
    for call in sorted(instance.calls, key=lambda each: each.began):
        is_method = call.method != "setup" and hasattr(instance.cls, call.method)
        if is_method and call.began > ended:
            found.setdefault(call.method, call)
            ended = call.ended
    return list(found.values())


def entry_of(program: Program, instance: Instance, called: Called) -> Entry | None:
    """An instance and a call of it, None if it cannot be made or called again.

    A mode that is a field or an argument of the call is passed in the call, as both models take it.
    """
    names = [field.name for field in dataclasses.fields(instance.cls) if field.init]  # pyright: ignore
    fields = {name: instance.fields[name] for name in names if name in instance.fields}
    args, named = _given((called.args, dict(called.kwargs)))
    arguments = arguments_of(instance.cls, called.method, args, named)
    if arguments is None or _holds_modules((fields, args, named)):
        return None
    inputs, kwargs = arguments
    plan = program.plan_of(instance.cls)
    modes = plan.mode_fields if plan is not None else ()
    for mode in inspect.signature(getattr(instance.cls, called.method)).parameters.keys() & modes:
        if fields.get(mode) is not None:
            kwargs[mode], fields[mode] = fields[mode], None
    name = None if called.method == "__call__" else called.method
    return Entry(functools.partial(instance.cls, **fields), inputs, kwargs, name)


def _holds_modules(value: Any) -> bool:
    return any(isinstance(each, nn.Module) for each in jax.tree.leaves(value))


def _given(value: Any) -> Any:
    """Shapes as sample inputs are given."""

    def one(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, Shape) else leaf

    return jax.tree.map(one, value)
