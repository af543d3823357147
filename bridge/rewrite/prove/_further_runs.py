"""Runs classes with other fields where they have layers that no run has made."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bridge.rewrite.emit._dead import dead_blocks, dead_choices
from bridge.rewrite.observe._entries import Entry, shaped
from bridge.rewrite.observe._runs import run
from bridge.rewrite.observe._trace import Watch
from bridge.rewrite.plan._constructors import made_text
from bridge.rewrite.plan._function_plans import FunctionPlan
from bridge.rewrite.plan._method import Method
from bridge.rewrite.plan._plans import ClassPlan, Program
from bridge.rewrite.plan._references import References
from bridge.rewrite.plan._refusals import NotRewritableError

from ._other_values import compared_words, other_values, types_of
from ._parts import entry_of, first_calls

_MOST_RUNS = 20
# By which a branch uses the weights of other layers.
_OF_WEIGHTS = ("apply", "variables")


def run_further(program: Program, entries: Sequence[Entry], watch: Watch) -> bool:
    """Runs each class that has such layers by itself, with one field changed at a time.

    Args:
        program: everything.
        entries: how the models are made and called.
        watch: what looks on.

    Returns:
        Whether something ran.
    """
    words = compared_words(source.tree for source in program.sources.values())
    before = len(watch.records.variables)
    for plan in program.plans.values():
        if plan.refusal is not None or isinstance(plan, FunctionPlan):
            continue
        entry = next(_entries(program, plan, entries), None)
        if entry is None or not _has_unmade(program, plan):
            continue
        for changed in _changed(plan, entry, words):
            # Where Linen refuses a value there is nothing to see.
            with contextlib.suppress(Exception):
                run(watch, changed, *entry.called)
    return len(watch.records.variables) > before


def _has_unmade(program: Program, plan: ClassPlan) -> bool:
    """Whether a class has layers that no run made, or weights that none used."""
    instances = program.records.instances
    for slot in plan.slots.values():
        # A layer of `setup` that was never called has no weights.
        made = [instances.get((making.run, making.path or ())) for making in slot.makings]
        if slot.kind == "module" and not any(each and each.calls for each in made):
            return True
    lines = program.records.lines.get(plan.source.file, set())
    read = (n for n in ast.walk(plan.node) if isinstance(n, ast.Attribute))
    if any(n.attr in _OF_WEIGHTS and n.lineno not in lines for n in read):
        return True
    references = References(program, plan.source, vars(sys.modules[plan.cls.__module__]))
    try:
        methods = [
            Method(program, plan, node, references, made_text) for node in plan.methods.values()
        ]
        return any(dead_blocks(each) or dead_choices(each) for each in methods)
    except NotRewritableError:
        return True


def _entries(program: Program, plan: ClassPlan, entries: Sequence[Entry]) -> Iterator[Entry]:
    """How an instance of a class is made and called by itself."""
    for instance in program.records.instances.values():
        if instance.cls is plan.cls and instance.run < program.entries:
            if not instance.path:
                yield shaped(entries[instance.run])
            else:
                made = (entry_of(program, instance, called) for called in first_calls(instance))
                yield from (each for each in made if each is not None)


def _changed(plan: ClassPlan, entry: Entry, words: Any) -> Iterator[Any]:
    model = entry.make()
    types = types_of(plan.cls)
    names = [field.name for field in plan.fields]
    found = [
        (name, each)
        for name in names
        for others in other_values(getattr(model, name, None), types.get(name), name, words)
        for each in others
    ]
    for name, value in found[:_MOST_RUNS]:
        try:
            yield model.clone(**{name: value})
        except Exception:
            continue
