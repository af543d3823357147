"""Pairs of paths as a table of rules: regular expressions where numbers run along."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bridge._conversion.neutral import Path
from bridge._errors import PortError
from bridge._rules.rules import Segment

from ._correspondence import Context, Correspondence, Pairing
from ._numbers import Numbered, numbered
from ._trees import NNXNode, linen_text, nnx_text


class Paths(NamedTuple):
    """A Linen path and the NNX path that it is, each taken apart at its numbers."""

    linen: Numbered
    nnx: Numbered


def paths_of(pairing: Pairing) -> tuple[str, str]:
    """The two paths of a pairing as a rule writes them."""
    return "/".join(map(str, pairing.linen.path)), nnx_rule(pairing.nnx, pairing.context)


def rules_of(
    pairs: Iterable[tuple[str, str]], known: Iterable[tuple[str, str]], linen_paths: Iterable[str]
) -> dict[str, str]:
    """A short table that says what belongs together.

    Args:
      pairs: Linen and NNX paths as rules write them.
      known: all such pairs; an expression may match what makes one of these, and nothing else.
      linen_paths: all paths of the Linen side.
    """
    every: dict[str, set[str]] = {path: set() for path in linen_paths}
    for linen, nnx in known:
        every.setdefault(linen, set()).add(nnx)
    families: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Paths]] = {}
    for linen, nnx in dict.fromkeys(pairs):
        paths = Paths(numbered(linen), numbered(nnx))
        families.setdefault((paths.linen.pieces, paths.nnx.pieces), []).append(paths)
    rules: dict[str, str] = {}
    for family in families.values():
        rules |= _rules_of_family(family, every)
    return rules


def renames_of(found: Correspondence) -> dict[str, str]:
    """A short table of the paths and arrays that differ, without stacks and fused gates.

    Raises:
      PortError: a leaf is not one leaf of the other side, and no rule says so.
    """
    given = {id(piece) for pieces in found.laid_out.values() for piece in pieces}
    others = [piece for piece in found.pieces if id(piece) not in given]
    parts = [p for p in others if p.nnx is None or p.linen_region or p.nnx_region]
    if parts:
        problems = {p.linen: f"{linen_text(p.linen)} is moved in parts" for p in parts}
        raise PortError(
            "paths alone do not tell where all leaves go",
            list(problems.values()),
            "Use plan.apply(), or `python -m bridge convert --model`.",
        )
    pairs = [_without_common_end(p.linen[1], p.nnx) for p in others]
    every = {path[:n] for _, path in (p.linen for p in found.pieces) for n in range(1, len(path))}
    every |= {path for _, path in (p.linen for p in found.pieces)}
    known = [("/".join(map(str, linen)), nnx_text(nnx)) for linen, nnx in pairs]
    changed = [(a, b) for a, b in known if a.replace("/", ".") != b]
    table = rules_of(changed, known, ["/".join(map(str, path)) for path in every])
    return {**table, **{rule.linen: rule.nnx for rule in found.laid_out}}


def _without_common_end(linen: Path, nnx: Path) -> tuple[Path, Path]:
    """The modules that two leaves of the same name belong to."""
    same = 0
    while same < min(len(linen), len(nnx)) - 1 and str(linen[-1 - same]) == str(nnx[-1 - same]):
        same += 1
    return linen[: len(linen) - same], nnx[: len(nnx) - same]


def braced(paths: Sequence[str], separator: str, axis: str = "", times: str = "") -> str | None:
    """Paths that differ in one place as one, `attn.{q,k,v}`; None if they differ in several.

    Args:
      paths: the paths.
      separator: what is between their keys.
      axis: what stands behind the names in the braces.
      times: what stands before them.
    """
    split = [path.split(separator) for path in dict.fromkeys(paths)]
    if len({len(parts) for parts in split}) != 1:
        return None
    columns = [list(dict.fromkeys(column)) for column in zip(*split, strict=True)]
    if sum(len(column) > 1 for column in columns) > 1:
        return None
    return separator.join(
        "{" + times + ",".join(column) + axis + "}" if len(column) > 1 else column[0]
        for column in columns
    )


def python_text(text: str) -> str:
    """A string as Python source, raw where that saves backslashes."""
    if "\\" in text and '"' not in text and not text.endswith("\\"):
        return f'r"{text}"'
    return json.dumps(text, ensure_ascii=False)


def toml_text(rules: Mapping[str, str]) -> str:
    """Rules as the TOML table that `python -m bridge convert --rules` reads."""
    lines = [f"{_toml_string(key)} = {_toml_string(value)}" for key, value in rules.items()]
    return "\n".join(["[rules]", *lines]) + "\n"


def _toml_string(text: str) -> str:
    # A literal string has no escapes, so an expression stays as it is.
    return json.dumps(text) if "'" in text or not text.isprintable() else f"'{text}'"


def nnx_rule(node: NNXNode, context: Context) -> str:
    """The path of an NNX node as a rule writes it, with the sign for stacked layers in it."""
    keys = [str(key) for key in node.path]
    for layer, is_star in ((context.linen, True), (context.nnx, False)):
        if layer is not None:
            own = (None, None) if is_star else (keys[layer.at], str(layer.number))
            keys[layer.at] = Segment(*own, layer.axis).text
    return ".".join(keys)


def _rules_of_family(family: Sequence[Paths], every: Mapping[str, set[str]]) -> dict[str, str]:
    """One expression for paths that differ in their numbers alone, or several if one is wrong."""
    columns = list(zip(*(paths.linen.digits for paths in family), strict=True))
    targets = list(zip(*(paths.nnx.digits for paths in family), strict=True))
    varying = [n for n, column in enumerate(columns) if len({*column}) > 1]
    same = {n: [v for v in varying if columns[v] == target] for n, target in enumerate(targets)}
    moving = [n for n, target in enumerate(targets) if len({*target}) > 1]
    used = {same[n][0] for n in moving if same[n]}
    group = {column: number for number, column in enumerate(varying, start=1)}
    linen, nnx = family[0]
    key = _filled(
        [_escaped(piece) for piece in linen.pieces],
        [r"(\d+)" if n in group else digits for n, digits in enumerate(linen.digits)],
    )
    if all(same[n] for n in moving) and used == {*varying}:
        fills = [
            rf"\g<{group[same[n][0]]}>" if n in moving else digits
            for n, digits in enumerate(nnx.digits)
        ]
        value = _filled([piece.replace("\\", "\\\\") for piece in nnx.pieces], fills)
        # The shorter form is not possible before another digit.
        value = re.sub(r"\\g<(\d)>(?!\d)", r"\\\1", value)
        if _is_right(key, value, every):
            return {key: value}
    # The number that the target does not repeat tells the rules apart.
    apart = next((v for v in varying if v not in used), varying[0])
    parts: dict[str, list[Paths]] = {}
    for paths in family:
        parts.setdefault(paths.linen.digits[apart], []).append(paths)
    rules: dict[str, str] = {}
    for part in parts.values():
        rules |= _rules_of_family(part, every)
    return rules


def _escaped(piece: str) -> str:
    """Text as an expression; the names of parts stay in their braces."""
    return re.sub(r"\\([{} ])", r"\1", re.escape(piece))


def _is_right(key: str, value: str, every: Mapping[str, set[str]]) -> bool:
    """Whether all that a rule matches becomes what it should."""
    pattern = re.compile(key)
    hits = [(hit, targets) for path, targets in every.items() if (hit := pattern.fullmatch(path))]
    return all(hit.expand(value) in targets for hit, targets in hits)


def _filled(pieces: Sequence[str], between: Sequence[str]) -> str:
    return "".join(piece + fill for piece, fill in zip(pieces, [*between, ""], strict=True))
