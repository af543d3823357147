"""The pairs of nodes that the user's table of rules makes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from bridge._rules.rules import Layer, Route, Rule, RulesError, Segment

from ._correspondence import PLAIN, Context, Problem
from ._names import did_you_mean
from ._trees import LinenNode, NNXNode, linen_text

# A scope and the NNX path that a rule says it is.
Target: TypeAlias = tuple[LinenNode, tuple[Segment, ...]]


class Pair(NamedTuple):
    """Nodes that a rule says are the same.

    `parts` has several pairs if the rule has parts.
    """

    parts: tuple[tuple[NNXNode, LinenNode], ...]
    context: Context
    rule: Rule


def pairs_of(
    rules: Mapping[str, str], linen: LinenNode, nnx: NNXNode
) -> tuple[list[Pair], list[Problem]]:
    """The pairs that a table makes between two trees, and what is wrong with the table."""
    problems: list[Problem] = []
    pairs: list[Pair] = []
    scopes = {scope.text: scope for scope in linen.walk() if scope.path}
    taken: set[Target] = set()
    for key, value in rules.items():
        try:
            rule = Rule(key, value)
            found = [_targets(route, scopes) for route in rule.routes]
        except ValueError as error:
            note = error.found if isinstance(error, RulesError) else str(error)
            problems.append(Problem(str(key), str(value), note))
            continue
        for route, targets in zip(rule.routes, found, strict=True):
            if not targets:
                near = did_you_mean(route.linen, scopes, is_pattern=True)
                problems.append(Problem(key, value, f"matches no Linen path{near}"))
        for each in dict.fromkeys(itertools.chain(*found)):
            parts = [targets[each] for targets in found if each in targets]
            if len(parts) < len(found):
                note = f"only some of its parts are there: {', '.join(_text(s) for s, _ in parts)}"
                problems.append(Problem(key, value, note))
            elif parts[0] not in taken:
                taken.update(parts)
                made, notes = _pairs(parts, nnx, rule)
                pairs += made
                problems += [Problem(key, value, note) for note in notes]
    return pairs, problems + _collisions(pairs)


def _targets(route: Route, scopes: Mapping[str, LinenNode]) -> dict[Any, Target]:
    """The scopes that a rule matches with their NNX paths, by what is the same for all parts."""
    found: dict[Any, Target] = {}
    for text, scope in scopes.items():
        if hit := route.pattern.fullmatch(text):
            target = tuple(route.target(hit))
            is_joined = route.rule.form.fused == "nnx"
            found[(target, hit.groups()) if is_joined else scope] = scope, target
    return found


def _pairs(parts: Sequence[Target], root: NNXNode, rule: Rule) -> tuple[list[Pair], list[str]]:
    """The pairs of scopes and NNX paths that go together, and what is wrong with them."""
    resolved = [_resolve(root, target) for _, target in parts]
    notes: list[str] = []
    for (scope, target), nodes in zip(parts, resolved, strict=True):
        if not nodes:
            text = ".".join(segment.text for segment in target)
            near = did_you_mean(text, (n.text for n in root.walk() if n.path))
            notes.append(f"the NNX model has no {text!r} for {_text(scope)}{near}")
    scopes = [scope for scope, _ in parts]
    pairs = [
        Pair(tuple((node, s) for (node, _), s in zip(own, scopes, strict=True)), own[0][1], rule)
        for own in zip(*resolved, strict=False)
    ]
    return pairs, notes


def _collisions(pairs: list[Pair]) -> list[Problem]:
    problems: list[Problem] = []
    taken: dict[Any, tuple[Pair, str]] = {}
    for pair in pairs:
        for node, scope in pair.parts:
            text = f"{_text(scope)} to {node.text}"
            ours = id(node), pair.context._replace(linen=None)
            theirs = id(scope), pair.context._replace(nnx=None)
            for place in (ours, theirs):
                other, there = taken.setdefault(place, (pair, text))
                if other is not pair:
                    note = f"collides with rule {other.rule.linen!r}: {text}, and {there}"
                    problems.append(Problem(pair.rule.linen, pair.rule.nnx, note))
    return problems


def _resolve(root: NNXNode, target: Sequence[Segment]) -> list[tuple[NNXNode, Context]]:
    """The nodes that a target names, one for each item if it has a star."""
    nodes = [(root, PLAIN)]
    for segment in target:
        nodes = [each for node, context in nodes for each in _below(node, context, segment)]
    return nodes


def _below(node: NNXNode, context: Context, segment: Segment) -> list[tuple[NNXNode, Context]]:
    at = len(node.path)
    if segment.name is None:
        items = node.list_items
        return [
            (item, context._replace(linen=Layer(segment.axis, number, len(items), at)))
            for number, item in enumerate(items)
        ]
    child = node.at((segment.name,))
    if segment.number is not None:
        context = context._replace(nnx=Layer(segment.axis, int(segment.number), None, at))
    return [] if child is None else [(child, context)]


def _text(scope: LinenNode) -> str:
    return scope.text or linen_text(("", ()))
