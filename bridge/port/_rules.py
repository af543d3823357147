"""The pairs of nodes that the user's table of rules makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bridge._conversion.rules import Rule, RulesError, Segment

from ._context import PLAIN, Context, Layer
from ._names import did_you_mean
from ._trees import LinenNode, NNXNode, linen_text, nnx_text


class Pair(NamedTuple):
    """Two nodes that a rule says are the same.

    Attributes:
      linen: the Linen scope or leaf.
      nnx: the NNX module or leaf.
      context: which entry of stacked layers, if any.
      rule: the rule's key.
    """

    linen: LinenNode
    nnx: NNXNode
    context: Context
    rule: str


class Problem(NamedTuple):
    """A rule that cannot be followed."""

    rule: str
    target: str
    note: str


def pairs_of(
    rules: Mapping[str, str], linen: LinenNode, nnx: NNXNode
) -> tuple[list[Pair], list[Problem]]:
    """The pairs that a table makes between two trees, and what is wrong with the table."""
    problems: list[Problem] = []
    found: dict[tuple[LinenNode, tuple[Segment, ...]], Rule] = {}
    scopes = {"/".join(map(str, scope.path)): scope for scope in linen.walk() if scope.path}
    for key, value in rules.items():
        try:
            rule = Rule(key, value)
            hits = [(scope, rule.pattern.fullmatch(text)) for text, scope in scopes.items()]
            targets = [(scope, tuple(rule.target(hit))) for scope, hit in hits if hit]
        except ValueError as error:
            note = f"{error.found}" if isinstance(error, RulesError) else str(error)
            problems.append(Problem(str(key), str(value), note))
            continue
        if not targets:
            near = did_you_mean(key, scopes, is_pattern=True)
            problems.append(Problem(key, value, f"matches no Linen path{near}"))
        for each in targets:
            found.setdefault(each, rule)
    pairs: list[Pair] = []
    for (scope, target), rule in found.items():
        resolved = _resolve(nnx, target)
        if not resolved:
            text = ".".join(part.text for part in target)
            near = did_you_mean(text, (nnx_text(each.path) for each in nnx.walk() if each.path))
            note = f"the NNX model has no {text!r} for {_text(scope)}{near}"
            problems.append(Problem(rule.linen, rule.nnx, note))
        pairs += [Pair(scope, node, context, rule.linen) for node, context in resolved]
    return pairs, problems + _collisions(pairs, rules)


def _collisions(pairs: list[Pair], rules: Mapping[str, str]) -> list[Problem]:
    problems: list[Problem] = []
    by_target: dict[tuple[int, Context], Pair] = {}
    by_source: dict[tuple[int, Context], Pair] = {}
    for pair in pairs:
        for seen, where in (
            (by_target, (id(pair.nnx), pair.context._replace(linen=None))),
            (by_source, (id(pair.linen), pair.context._replace(nnx=None))),
        ):
            other = seen.setdefault(where, pair)
            if other is not pair:
                note = (
                    f"collides with rule {other.rule!r}: {_text(pair.linen)} to"
                    f" {nnx_text(pair.nnx.path)}, and {_text(other.linen)} to"
                    f" {nnx_text(other.nnx.path)}"
                )
                problems.append(Problem(pair.rule, rules[pair.rule], note))
    return problems


def _resolve(root: NNXNode, target: Sequence[Segment]) -> list[tuple[NNXNode, Context]]:
    """The nodes that a target names, one for each item if it has a star."""
    nodes = [(root, PLAIN)]
    for segment in target:
        nodes = [
            reached
            for node, context in nodes
            for reached in (
                _items(node, context, segment.axis)
                if segment.name is None
                else _named(node, context, segment)
            )
        ]
    return nodes


def _items(node: NNXNode, context: Context, axis: int) -> list[tuple[NNXNode, Context]]:
    if not node.is_container or not all(isinstance(key, int) for key in node.children):
        return []
    total = len(node.children)
    return [
        (node.children[key], context._replace(linen=Layer(axis, number, total, len(node.path))))
        for number, key in enumerate(sorted(node.children))
    ]


def _named(node: NNXNode, context: Context, segment: Segment) -> list[tuple[NNXNode, Context]]:
    child = node.at((segment.name,))
    if child is None:
        return []
    if segment.number is not None:
        layer = Layer(segment.axis, int(segment.number), None, len(node.path))
        context = context._replace(nnx=layer)
    return [(child, context)]


def _text(scope: LinenNode) -> str:
    return "/".join(map(str, scope.path)) or linen_text(("", ()))
