"""Finds the parts of a model that can run by themselves while the model's own class stays Linen."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import linen as nn

from bridge.rewrite.observe._entries import Entry
from bridge.rewrite.observe._records import Called, Instance, Path, Shape
from bridge.rewrite.plan._function_plans import FunctionPlan
from bridge.rewrite.plan._plans import ClassPlan, Program
from bridge.rewrite.plan._refusals import refused


def parts_of(program: Program, entries: Sequence[Entry]) -> list[Entry] | None:
    """The outermost rewritten modules of entries whose own class stays Linen, as entries.

    Each is called as the model calls it, with its fields. What is given modules cannot be made
    again, so its class goes back to Linen.

    Args:
        program: everything.
        entries: how the model is made and called.

    Returns:
        Them and the entries whose class is rewritten; None if it is so for all.
    """
    kept = [_plan(program, root) is not None for root in program.roots]
    if all(kept):
        return None
    found: list[Entry] = []
    seen: set[tuple[type, str]] = set()
    for run, entry in enumerate(entries):
        if kept[run]:
            found.append(entry)
            continue
        for instance, parts in _outermost(program, run):
            for part in parts:
                key = instance.cls, repr((instance.fields, part.called))
                if key not in seen:
                    seen.add(key)
                    found.append(part)
    return found


def _plan(program: Program, instance: Instance) -> ClassPlan | None:
    """The plan of a module's class if it is rewritten."""
    plan = program.plan_of(instance.cls)
    is_class = plan is not None and plan.refusal is None and not isinstance(plan, FunctionPlan)
    return plan if is_class else None


def _outermost(program: Program, run: int) -> Iterator[tuple[Instance, list[Entry]]]:
    """The rewritten modules of a run that are in no other one, and how they are made again."""
    own = [each for (number, _), each in program.records.instances.items() if number == run]
    inside: set[Path] = set()
    for instance in sorted(own, key=lambda each: len(each.path)):
        path, plan = instance.path, _plan(program, instance)
        if plan is None or any(path[:n] in inside for n in range(len(path))):
            continue
        made = [entry_of(instance, called) for called in first_calls(instance)]
        parts = [each for each in made if each is not None]
        if parts:
            inside.add(path)
            yield instance, parts
        else:
            plan.refuse(refused("given-modules"))


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


def entry_of(instance: Instance, called: Called) -> Entry | None:
    """An instance and a call of it, None if it cannot be made or called again."""
    names = [field.name for field in dataclasses.fields(instance.cls) if field.init]  # pyright: ignore
    fields = {name: instance.fields[name] for name in names if name in instance.fields}
    try:
        method = inspect.signature(getattr(instance.cls, called.method))
        bound = method.bind(None, *called.args, **called.kwargs)
    except (AttributeError, TypeError):
        return None
    kinds = {each.kind for each in method.parameters.values()}
    if _holds_modules((fields, called.args, dict(called.kwargs))) or (
        inspect.Parameter.VAR_POSITIONAL in kinds
    ):
        return None
    inputs: list[Any] = []
    for value in called.args:
        if not _has_shapes(value):
            break
        inputs.append(_given(value))
    given = list(bound.arguments.items())[1 + len(inputs) :]
    named: dict[str, Any] = {}
    for name, value in given:
        is_rest = method.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        named |= value if is_rest else {name: value}
    kwargs = {name: _given(value) for name, value in named.items()}
    name = None if called.method == "__call__" else called.method
    return Entry(functools.partial(instance.cls, **fields), tuple(inputs), kwargs, name)


def _holds_modules(value: Any) -> bool:
    return any(isinstance(each, nn.Module) for each in jax.tree.leaves(value))


def _has_shapes(value: Any) -> bool:
    return any(isinstance(each, Shape) for each in jax.tree.leaves(value))


def _given(value: Any) -> Any:
    """Shapes as sample inputs are given."""

    def one(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, Shape) else leaf

    return jax.tree.map(one, value)
