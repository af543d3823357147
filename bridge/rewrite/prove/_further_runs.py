"""Runs classes with other fields where they have layers that no run has made."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bridge.rewrite.emit._dead import dead_blocks, dead_choices
from bridge.rewrite.observe._entries import Entry, shaped
from bridge.rewrite.observe._runs import run
from bridge.rewrite.observe._trace import Watch
from bridge.rewrite.plan._constructors import made_text
from bridge.rewrite.plan._function_plans import FunctionPlan, called_function
from bridge.rewrite.plan._lift import has_unseen_choice, transforms
from bridge.rewrite.plan._lifted_functions import unseen_functions
from bridge.rewrite.plan._method import Method
from bridge.rewrite.plan._plans import ClassPlan, Program
from bridge.rewrite.plan._references import references_of
from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.syntax._source import is_self

from ._other_values import (
    compared_words,
    configured,
    is_configuration,
    other_values,
    types_of,
)
from ._parts import entry_of, first_calls

_MOST_RUNS = 30
# By which a branch uses the weights of other layers.
_OF_WEIGHTS = ("apply", "variables")


def run_further(program: Program, entries: Sequence[Entry], watch: Watch) -> bool:
    """Runs each class that has such layers by itself, with other fields.

    One field is changed at a time, and then those together that conditions around a layer read.
    Returns whether something ran.
    """
    # A maker of another file may know layers that stay Linen.
    sources = {plan.source for plan in program.plans.values()}
    words = compared_words(source.tree for source in program.sources.values() if source in sources)
    before = len(watch.records.variables)
    for plan in program.plans.values():
        if plan.refusal is not None or isinstance(plan, FunctionPlan):
            continue
        entry = next(_entries(program, plan, entries), None)
        if entry is None or not _has_unmade(program, plan):
            continue
        unmade = dict.fromkeys(_unmade(program, plan))
        choices = dict.fromkeys(_unseen_choices(program, plan))
        values = _values(plan, entry.make(), words)
        # The first other value of each field, then the second of each.
        single = [[{name: each} for each in others] for name, others in values.items()]
        turns = (each for turn in itertools.zip_longest(*single) for each in turn if each)
        for fields in itertools.islice(turns, _MOST_RUNS):
            _run(watch, entry, fields)
        for each in unmade:
            own = {name: values[name] for name in values if _last(name) in each.fields}
            for fields in itertools.islice(_together(own), _MOST_RUNS):
                if each.line in program.records.lines.get(plan.source.file, set()):
                    break
                _run(watch, entry, fields)
        for read in choices:
            own = {name: values[name][:1] for name in values if _last(name) in read}
            for fields in itertools.islice(_together(own), _MOST_RUNS):
                _run(watch, entry, fields)
    return len(watch.records.variables) > before


def _has_unmade(program: Program, plan: ClassPlan) -> bool:
    """Whether a class has layers or transforms that no run made, or weights that no run used."""
    for slot in plan.slots.values():
        # A layer of `setup` that was never called has no weights.
        made = [*map(program.records.made_by, slot.makings)]
        if slot.kind == "module" and not any(each and each.calls for each in made):
            return True
    lines = program.records.lines.get(plan.source.file, set())
    read = (n for n in ast.walk(plan.node) if isinstance(n, ast.Attribute))
    if any(n.attr in _OF_WEIGHTS and n.lineno not in lines for n in read):
        return True
    if any(unseen_functions(plan, references_of(program, plan))):
        return True
    called = (called_function(program, slot) for slot in plan.slots.values())
    if any(_unmade(program, each) for each in called if each is not None):
        return True
    try:
        return any(
            dead_blocks(method)
            or dead_choices(method)
            or any(has_unseen_choice(method, slot) for slot in method.slots)
            for method in _methods(program, plan)
        )
    except NotRewritableError:
        return True


def _methods(program: Program, plan: ClassPlan) -> list[Method]:
    references = references_of(program, plan)
    return [Method(program, plan, node, references, made_text) for node in plan.methods.values()]


class _Unmade(NamedTuple):
    """A layer or parameter that no run made.

    `line` is the line of its statement; None if that ran and chose another layer or none. `fields`
    has what the conditions around it read.
    """

    line: int | None
    fields: frozenset[str]


def _unmade(program: Program, plan: ClassPlan) -> list[_Unmade]:
    found: list[_Unmade] = []
    lines = program.records.lines.get(plan.source.file, set())
    for method in _methods(program, plan):
        for node in ast.walk(method.node):
            if not isinstance(node, ast.Call) or node in plan.slots:
                continue
            if not plan.maker_methods.keys().isdisjoint(plan.source.ancestors(node)):
                continue
            is_state = is_self(node.func) and node.func.attr in ("param", "variable")  # pyright: ignore
            if not is_state and not method.references.makes_layer(node.func):
                continue
            line = plan.source.statement_of(node).lineno
            found.append(_Unmade(None if line in lines else line, _fields_asked(plan, node)))
    return found


def _unseen_choices(program: Program, plan: ClassPlan) -> Iterator[frozenset[str]]:
    """The fields that decide on a layer and its transforms, where no run took the other way."""
    for method in _methods(program, plan):
        for slot in method.slots:
            if has_unseen_choice(method, slot):
                places = [slot.node, *transforms(method, slot)]
                yield frozenset().union(*(_fields_asked(plan, each) for each in places))


def _fields_asked(plan: ClassPlan, node: ast.AST) -> frozenset[str]:
    """The fields that the conditions around a place read."""
    asked: list[ast.expr] = []
    for each in plan.source.ancestors(node):
        if isinstance(each, ast.If | ast.IfExp):
            asked.append(each.test)
        elif isinstance(each, ast.Match):
            asked += [each.subject, *(c.guard for c in each.cases if c.guard)]
    # A field of a configuration has a local name before it.
    read = (e for test in asked for e in ast.walk(test) if isinstance(e, ast.Attribute))
    return frozenset(each.attr for each in read)


def _run(watch: Watch, entry: Entry, fields: Mapping[str, Any]) -> None:
    # Where Linen refuses a value there is nothing to see.
    with contextlib.suppress(Exception):
        model = entry.make()
        changed: dict[str, Any] = {}
        for name, value in fields.items():
            field, _, inner = name.partition(".")
            held = changed.get(field, getattr(model, field))
            changed[field] = dataclasses.replace(held, **{inner: value}) if inner else value
        run(watch, model.clone(**changed), *entry.called)


def _last(name: str) -> str:
    """The name of a field without that of the configuration that it is in."""
    return name.rpartition(".")[2]


def _together(values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Several fields with other values, the fewest changes first."""
    for number in range(2, len(values) + 1):
        for names in itertools.combinations(values, number):
            for each in itertools.product(*(values[name] for name in names)):
                yield dict(zip(names, each, strict=True))


def _entries(program: Program, plan: ClassPlan, entries: Sequence[Entry]) -> Iterator[Entry]:
    """How an instance of a class is made and called by itself."""
    for instance in program.records.instances.values():
        if instance.cls is plan.cls and instance.run < program.entries:
            if not instance.path:
                yield shaped(entries[instance.run])
            else:
                made = (entry_of(program, instance, called) for called in first_calls(instance))
                yield from (each for each in made if each is not None)


def _values(plan: ClassPlan, model: Any, words: Any) -> dict[str, list[Any]]:
    """Other values of each field; those of a configuration as `config.width`."""
    found: dict[str, list[Any]] = {}

    def add(name: str, value: Any, annotation: Any) -> None:
        others = other_values(value, annotation, _last(name), words)
        found[name] = [each for own in others for each in own]

    types = types_of(plan.cls)
    for field in plan.fields:
        value: Any = getattr(model, field.name, None)
        if is_configuration(value):
            for own, held, kind in configured(value):
                add(f"{field.name}.{own}", held, kind)
        else:
            add(field.name, value, types.get(field.name))
    return {name: values for name, values in found.items() if values}
