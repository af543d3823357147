"""Pairs of paths as a table of rules: regular expressions where numbers run along."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from bridge._conversion.neutral import Path
from bridge._errors import PortError
from bridge._rules.numbers import Numbered, numbered
from bridge._rules.pieces import Piece
from bridge._rules.rules import Layer, Segment

from ._correspondence import Context, Correspondence, Pairing
from ._trees import NNXNode, linen_text, nnx_text

# A Linen path and the NNX path that it is, each taken apart at its numbers.
_Paths: TypeAlias = tuple[Numbered, Numbered]


def paths_of(pairing: Pairing) -> tuple[str, str]:
    """The two paths of a pairing as a rule writes them."""
    return pairing.linen.text, nnx_rule(pairing.nnx, pairing.context)


def rules_of(
    pairs: Iterable[tuple[str, str]], known: Iterable[tuple[str, str]], linen_paths: Iterable[str]
) -> dict[str, str]:
    """A short table that says what belongs together.

    `pairs` are Linen and NNX paths as rules write them, and `known` has all such pairs. An
    expression may match what makes one of these, and nothing else.
    """
    every: dict[str, set[str]] = {path: set() for path in linen_paths}
    for linen, nnx in known:
        every.setdefault(linen, set()).add(nnx)
    families: dict[tuple[tuple[str, ...], tuple[str, ...]], list[_Paths]] = {}
    for linen, nnx in dict.fromkeys(pairs):
        ours, theirs = numbered(linen), numbered(nnx)
        families.setdefault((ours.pieces, theirs.pieces), []).append((ours, theirs))
    rules: dict[str, str] = {}
    for family in families.values():
        rules |= _rules_of_family(family, every)
    return rules


def renames_of(found: Correspondence) -> dict[str, str]:
    """A short table of the paths and arrays that differ, which needs nothing found by structure.

    Raises PortError if NNX has no place for a leaf, or no rule can say where its parts go.
    """
    given = {id(piece) for pieces in found.laid_out.values() for piece in pieces}
    pairs: dict[tuple[str, str], tuple[str, str]] = {}
    gates: dict[str, list[Piece]] = {}
    problems: list[str] = []
    for piece in (piece for piece in found.pieces if id(piece) not in given):
        if piece.nnx is None:
            problems.append(f"{linen_text(piece.linen)} has no place in NNX")
            continue
        linen, nnx = [*map(str, piece.linen[1])], _nnx_keys(piece.nnx, piece.layers)
        if len(piece.nnx_region) > (piece.layers[1] is not None):
            gates.setdefault(".".join(nnx), []).append(piece)
        else:
            pairs["/".join(linen), ".".join(nnx)] = _without_common_end(linen, nnx)
    # The leaves of one module may go to several places.
    places: dict[str, set[str]] = {}
    for linen, nnx in pairs.values():
        places.setdefault(linen, set()).add(nnx)
    known = [short if len(places[short[0]]) == 1 else whole for whole, short in pairs.items()]
    for nnx, pieces in gates.items():
        pieces.sort(key=lambda piece: piece.nnx_region[-1].start)
        linen = braced(["/".join(map(str, piece.linen[1])) for piece in pieces], "/")
        if linen is None:
            problems.append(f"{nnx} has parts of several places")
        else:
            known.append((linen, nnx))
    if problems:
        remedy = "Use plan.apply(), or `python -m bridge convert --model`."
        raise PortError("paths alone do not tell where all leaves go", problems, remedy)
    paths = [piece.linen[1] for piece in found.pieces]
    every = {path[:n] for path in paths for n in range(1, len(path) + 1)}
    changed = [(a, b) for a, b in known if a.replace("/", ".") != b]
    table = rules_of(changed, known, ["/".join(map(str, path)) for path in every])
    return {**table, **{rule.linen: rule.nnx for rule in found.laid_out}}


def _without_common_end(linen: Sequence[str], nnx: Sequence[str]) -> tuple[str, str]:
    """The modules that two leaves of the same name belong to."""
    same = 0
    while same < min(len(linen), len(nnx)) - 1 and linen[-1 - same] == nnx[-1 - same]:
        same += 1
    return "/".join(linen[: len(linen) - same]), ".".join(nnx[: len(nnx) - same])


def braced(paths: Sequence[str], separator: str, axis: str = "", times: str = "") -> str | None:
    """Paths that differ in one place as one, `attn.{q,k,v}`; None if they differ in several.

    `axis` stands behind the names in the braces, and `times` before them.
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
    return ".".join(_nnx_keys(node.path, context))


def _nnx_keys(path: Path, layers: tuple[Layer | None, Layer | None]) -> list[str]:
    keys = [nnx_text((key,)) for key in path]
    for layer, is_star in zip(layers, (True, False), strict=True):
        if layer is not None:
            own = (None, None) if is_star else (keys[layer.at], str(layer.number))
            keys[layer.at] = Segment(*own, layer.axis).text
    return keys


def _rules_of_family(family: Sequence[_Paths], every: Mapping[str, set[str]]) -> dict[str, str]:
    """One expression for paths that differ in their numbers alone, or several if one is wrong."""
    columns = list(zip(*(linen.digits for linen, _ in family), strict=True))
    targets = list(zip(*(nnx.digits for _, nnx in family), strict=True))
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
    parts: dict[str, list[_Paths]] = {}
    for paths in family:
        parts.setdefault(paths[0].digits[apart], []).append(paths)
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
