"""Loops over what the call knows beside what the constructor does, as loops over the latter."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import NamedTuple

from bridge.rewrite.syntax._source import Source
from bridge.rewrite.syntax._taint import SAME_ITEMS, Taint


class Loop(NamedTuple):
    """The text of a loop: `for {target} in {values}`."""

    target: str
    values: str


def known_loop(
    target: ast.expr,
    values: ast.expr,
    taint: Taint,
    source: Source,
    text: Callable[[ast.expr], str],
    sized: Callable[[ast.expr, ast.expr], Loop | None],
) -> Loop | None:
    """The part of a loop that a constructor knows, None if there is none.

    `for skip, width in zip(skips, widths)` has `for width in widths`: where there are fewer skips
    than widths this makes too many layers, which the comparison of weights finds. The loop binds
    `target` and goes over `values`. `text` gives an expression as the constructor has it.
    `sized(target, values)` is the loop over the sizes of a list of arrays, where one is kept.
    """
    if not taint.touches(values):
        return Loop(source.render(target), text(values))
    if not isinstance(values, ast.Call) or not isinstance(values.func, ast.Name):
        return sized(target, values)
    name, given = values.func.id, values.args
    if any(k.arg != "strict" for k in values.keywords):
        return None

    def part(own: ast.expr, inner: ast.expr) -> Loop | None:
        return known_loop(own, inner, taint, source, text, sized)

    if name in SAME_ITEMS and len(given) == 1:
        found = part(target, given[0])
        return found and Loop(found.target, f"{name}({found.values})")
    if not isinstance(target, ast.Tuple):
        return None
    if name == "enumerate" and len(given) == 1 and len(target.elts) == 2:
        found = part(target.elts[1], given[0])
        if found is None:
            return None
        item = f"({found.target})" if "," in found.target else found.target
        return Loop(f"{source.render(target.elts[0])}, {item}", f"enumerate({found.values})")
    if name == "zip" and len(given) == len(target.elts):
        parts = [each for each in map(part, target.elts, given) if each is not None]
        if len(parts) < 2:
            return parts[0] if parts else None
        targets = [f"({each.target})" if "," in each.target else each.target for each in parts]
        options = [source.render(each) for each in values.keywords]
        return Loop(
            ", ".join(targets), f"zip({', '.join([*(each.values for each in parts), *options])})"
        )
    return None
