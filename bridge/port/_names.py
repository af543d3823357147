"""Compares names, for proposals and for "did you mean"."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from bridge._rules.numbers import numbered

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Synonyms in programs; each word stands for the first of its group.
_SYNONYMS = (
    ("norm", "ln", "bn", "layernorm", "batchnorm", "rmsnorm", "groupnorm"),
    ("dense", "fc", "linear", "lin"),
    ("mlp", "ffn", "ff", "feedforward"),
    ("embed", "wte", "tok", "token"),
    ("position", "pos", "wpe"),
    ("down", "wo"),
    ("output", "out", "head", "logits", "classifier"),
    ("shortcut", "downsample", "skip"),
)
_FIRST = {word: group[0] for group in _SYNONYMS for word in group}


def words_of(name: str) -> list[str]:
    """The words of a name: `SelfAttention_0` and `self_attention` have the same two."""
    return [word.lower() for word in _WORD.findall(name)]


def likeness(a: str, b: str) -> float:
    """From 0 to 1, how many of the words of two names are the same or short for each other."""
    ours, theirs = words_of(a), words_of(b)
    if not ours or not theirs:
        return 0.0
    forward = sum(max(_alike(x, y) for y in theirs) for x in ours)
    backward = sum(max(_alike(x, y) for y in ours) for x in theirs)
    return (forward + backward) / (len(ours) + len(theirs))


def did_you_mean(wanted: str, names: Iterable[str], *, is_pattern: bool = False) -> str:
    """`; did you mean 'x'?` for the nearest of some names, nothing if none is near.

    `is_pattern` says that `wanted` is a regular expression.
    """
    plain = re.sub(r"\\d[+*]?|\[0-9\][+*]?", "0", wanted) if is_pattern else wanted
    plain = re.sub(r"[()\\^$]", "", plain) if is_pattern else plain
    # Numbers distinguish items; they do not describe them.
    by_form: dict[str, str] = {}
    for name in names:
        by_form.setdefault(_without_numbers(name), name)
    near = difflib.get_close_matches(_without_numbers(plain), by_form, n=1, cutoff=0.6)
    return f"; did you mean {by_form[near[0]]!r}?" if near else ""


def _without_numbers(name: str) -> str:
    return "0".join(numbered(name).pieces).lower()


def _alike(a: str, b: str) -> float:
    if a == b:
        return 1.0
    if _FIRST.get(a, a) == _FIRST.get(b, b):
        return 0.9
    short, long = sorted((a, b), key=len)
    if long.startswith(short):
        return 0.8 if len(short) > 1 else 0.6
    if len(short) > 1 and short[0] == long[0] and _is_within(short, long):
        return 0.6
    return 0.0


def _is_within(short: Sequence[str], long: Sequence[str]) -> bool:
    rest = iter(long)
    return all(letter in rest for letter in short)
