"""Writes the axes that NNX's `scan` and `vmap` need for a module's variables, by collection."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flax import linen as nn

from bridge._conversion.collections import OUTPUTS
from bridge.rewrite.observe._records import Lifted, Making, Path, Records, below

from ._refusals import NotRewritableError
from ._variables import type_text

_CARRY = "nnx.Carry"


class Axes:
    """The axes of one transform.

    `places` has run and path of every module that the transform was used on, and `texts` the axes
    that are no numbers in the program, by collection. Raises NotRewritableError if NNX cannot say
    them.

    Attributes:
        called: what the transform's `in_axes` has for the module.
        made: `out_axes` of the `nnx.vmap` that makes it.
        is_shared: whether all members have the same keys.
        draws: whether the modules draw keys.
    """

    def __init__(
        self,
        records: Records,
        lifted: Lifted,
        places: Iterable[tuple[int, Path]],
        texts: Mapping[str, str],
    ) -> None:
        self.records, self.lifted, self.texts = records, lifted, texts
        self.places = list(places)
        self._check()
        axes = {name: self._axis(name) for name in self._collections()}
        keys = self._keys()
        self.draws = bool(self._drawn())
        self.is_shared = lifted.is_stacking and not self._splits("params")
        self.called = _text(axes, keys)
        made = {name: "None" if axis == _CARRY else axis for name, axis in axes.items()}
        self.made = _text(made, "0")

    def _check(self) -> None:
        name = f"nn.{self.lifted.kind}"
        given = self.lifted.options
        for option in ("variable_axes", "variable_broadcast", "variable_carry"):
            filters = given.get(option)
            if not all(isinstance(each, str) for each in _names(filters)):
                raise NotRewritableError("transform-filters", kind=name, option=option)
        for collection, axis in dict(given.get("variable_axes") or {}).items():
            if not isinstance(axis, int) and axis not in (None, nn.broadcast):
                raise NotRewritableError("transform-own-axis", kind=name, collection=collection)

    def _collections(self) -> list[str]:
        """The collections that the modules have."""
        found: dict[str, None] = {}
        for run, path in self.places:
            for collection in below(self.records.variables[run], path):
                if collection not in OUTPUTS:
                    found[collection] = None
        return list(found)

    def _axis(self, collection: str) -> str:
        given = self.lifted.options
        if collection in self.lifted.axes:
            return self.texts.get(collection) or repr(self.lifted.axes[collection])
        if collection in _names(given.get("variable_carry")):
            return _CARRY
        return "None"

    def _splits(self, stream: str) -> bool:
        return bool(dict(self.lifted.options.get("split_rngs") or {}).get(stream))

    def _keys(self) -> str:
        """The axis of the keys.

        Raises NotRewritableError if they are split otherwise than NNX's modules split them.
        """
        splits = dict(self.lifted.options.get("split_rngs") or {})
        drawn = {each for each in self._drawn() if each in splits}
        kind, stacks = f"nn.{self.lifted.kind}", self.lifted.is_stacking
        if stacks:
            equal = self._splits("params")
            other = sorted(each for each in drawn if bool(splits[each]) != equal)
            if other:
                own, same = "keys of their own", "the same keys"
                first, then = (own, same) if equal else (same, own)
                how = f"{first} at init, and {then} in a call"
                raise NotRewritableError("transform-keys", kind=kind, how=how)
            return "0"
        if not drawn:
            return "None"
        if any(splits[each] for each in drawn) == (self.lifted.kind == "vmap"):
            how = "different keys" if self.lifted.kind == "vmap" else "the same keys"
            raise NotRewritableError("transform-turn-keys", kind=kind, how=how)
        return _CARRY if self.lifted.kind == "scan" else "None"

    def _drawn(self) -> set[str]:
        """The streams that the modules draw from in a call."""
        found: set[str] = set()
        for run, path in self.places:
            for making in self.records.makings:
                own = making.path if making.kind == "module" else making.owner
                if making.run == run and own is not None and own[: len(path)] == path:
                    found |= streams_of(making)
        return found


def axis_texts(call: ast.AST | None, text: Callable[[ast.expr], str]) -> dict[str, str]:
    """The axes of a transform's call that are not numbers, by collection."""
    keywords = call.keywords if isinstance(call, ast.Call) else []
    node = next((k.value for k in keywords if k.arg == "variable_axes"), None)
    found: dict[str, str] = {}
    for key, value in (
        zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
    ):
        try:
            ast.literal_eval(value)
        except ValueError:
            if isinstance(key, ast.Constant):
                found[str(key.value)] = text(value)
    return found


def streams_of(making: Making) -> set[str]:
    """The streams that what was made draws from in training."""
    made = making.made
    if making.kind == "make_rng":
        return {str(made.get("name", "params"))}
    if making.kind != "module":
        return set()
    if issubclass(making.cls or nn.Module, nn.Dropout) and made["rate"]:
        return {str(made.get("rng_collection", "dropout"))}
    return {"dropout"} if made.get("dropout_rate") else set()


def _names(given: Any) -> Sequence[Any]:
    if isinstance(given, Mapping):
        return tuple(given)
    if not given:
        return ()
    return tuple(given) if isinstance(given, list | tuple | set | frozenset) else (given,)


def _text(axes: dict[str, str], keys: str) -> str:
    """One axis for all, or `nnx.StateAxes` with those that differ from the most."""
    used = {*axes.values(), keys}
    if len(used) == 1 and keys != _CARRY:
        return keys
    rest = "None" if keys == _CARRY else keys
    parts = [f"{type_text(name)}: {axis}" for name, axis in axes.items() if axis != rest]
    if keys == _CARRY:
        parts.append(f"nnx.RngState: {_CARRY}")
    return f"nnx.StateAxes({{{', '.join([*parts, f'...: {rest}'])}}})"
