r"""The user's table of which Linen path is which NNX path.

A key is a regular expression that must match a whole Linen path, up to some `/`; its value is the
NNX path, with dots, in which `\1` stands for the first group. Everything below the two is then
matched as usual. Where the NNX model has a `ToNNX`, the path goes on with dots along the Linen path
of what it holds: `encoder.block_0.Dense_0`. Two more signs in the value are for layers that one
side keeps stacked:

- ``{'layers': 'blocks.*'}``: the leaves below Linen's `layers` are stacked, and the entries are
  the items of the NNX list `blocks`;
- ``{r'block_(\d+)': r'blocks[\1]'}``: Linen has the layers one by one, and the leaves below the
  NNX module `blocks` are stacked.

The axis is the first one; `blocks.*@1` and `blocks[0@1]` name another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from bridge._conversion.rule_paths import Segment, segments

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
    found: dict[tuple[LinenNode, str], list[tuple[str, str]]] = {}
    scopes = [scope for scope in linen.walk() if scope.path]
    for key, value in rules.items():
        try:
            pattern = re.compile(key)
            hits = [(s, pattern.fullmatch("/".join(map(str, s.path)))) for s in scopes]
            targets = [(s, hit.expand(value)) for s, hit in hits if hit]
        except (re.error, IndexError, TypeError) as error:
            note = f"not a regular expression and a path: {error}"
            problems.append(Problem(str(key), str(value), note))
            continue
        if not targets:
            names = ["/".join(map(str, scope.path)) for scope in scopes]
            near = did_you_mean(key, names, is_pattern=True)
            problems.append(Problem(key, value, f"matches no Linen path{near}"))
        for scope, target in targets:
            found.setdefault((scope, target), []).append((key, value))
    pairs: list[Pair] = []
    for (scope, target), sources in found.items():
        key, value = sources[0]
        resolved = _resolve(nnx, target)
        if not resolved:
            near = did_you_mean(target, (nnx_text(each.path) for each in nnx.walk() if each.path))
            note = f"the NNX model has no {target!r} for {_text(scope)}{near}"
            problems.append(Problem(key, value, note))
        pairs += [Pair(scope, node, context, key) for node, context in resolved]
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


def _resolve(root: NNXNode, target: str) -> list[tuple[NNXNode, Context]]:
    """The nodes that a target names, one for each item if it has a star."""
    found = segments(target)
    if found is None:
        return []
    nodes = [(root, PLAIN)]
    for segment in found:
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
        if not segment.number.isdecimal():
            return []
        layer = Layer(segment.axis, int(segment.number), None, len(node.path))
        context = context._replace(nnx=layer)
    return [(child, context)]


def _text(scope: LinenNode) -> str:
    return "/".join(map(str, scope.path)) or linen_text(("", ()))
