"""The options and axes of lifted transforms, and the layers that they stack, as NNX has them."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn

from bridge._conversion.collections import OUTPUTS
from bridge.rewrite.observe._records import Lifted, Making, Path, Records, below

from ._method import Method
from ._plans import Slot
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


_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "remat": {"variables": True, "rngs": True, "concrete": False, "methods": None},
    "jit": {
        "variables": True,
        "rngs": True,
        "donate_argnums": (),
        "device": None,
        "backend": None,
        "methods": None,
        "static_argnames": (),
    },
    "scan": {"data_transform": None, "methods": None},
    "vmap": {"methods": None},
    "cond": {"variables": True, "rngs": True},
    "switch": {"variables": True, "rngs": True},
    "while_loop": {},
}
PASSED: Mapping[str, Mapping[str, Any]] = {
    "remat": {"prevent_cse": True, "policy": None},
    "jit": {},
    "scan": {"reverse": False, "unroll": 1},
    "vmap": {"axis_name": None, "spmd_axis_name": None},
}
STACKS = {"scan": "length", "vmap": "axis_size"}
"""The transforms that may stack variables, with how the number is called."""


def check_options(lifted: Lifted) -> None:
    """Looks for what NNX's transform does not have.

    Raises NotRewritableError if there is any.
    """
    for name, default in _DEFAULTS[lifted.kind].items():
        if lifted.options.get(name, default) not in (default, None):
            raise NotRewritableError("transform-option", kind=lifted.kind, option=name)


def of_functions(method: Method, slot: Slot, made: str, *, wraps: bool) -> str:
    """What makes a layer that functions under transforms are given, or that is made in one.

    `method` is the method that the constructor's part is of. `made` is the expression that makes
    one layer. With `wraps`, something in the layer stays Linen. Raises NotRewritableError if NNX's
    transforms do not do the same.
    """
    if slot.functions and (wraps or slot.linen):
        raise NotRewritableError("transform-of-linen", slot.node)
    for each in reversed(slot.functions):
        if each.lifted.is_stacking:
            keywords = each.node.keywords if isinstance(each.node, ast.Call) else []
            length = (k.value for k in keywords if k.arg == STACKS[each.lifted.kind])
            made = stacked(method, slot, each.lifted, made, each.node, next(length, None))
    return made


def stacked(
    method: Method,
    slot: Slot,
    lifted: Lifted,
    made: str,
    call: ast.AST | None,
    length: ast.expr | None,
) -> str:
    """The expression that makes the layers of a transform.

    `method` is the method that the constructor's part is of. `made` is the expression that makes
    one layer, `call` is the call of the transform, and `length` is the expression for the number of
    layers. Raises NotRewritableError if NNX's transforms do not do the same.
    """
    records = method.program.records
    texts = axis_texts(call, lambda node: _axis_text(method, slot, node))
    axes = Axes(records, lifted, [(m.run, m.path or ()) for m in slot.makings], texts)
    options = [] if axes.made == "0" else [f"out_axes={axes.made}"]
    if lifted.options.get("metadata_params"):
        options.append(metadata(lifted))
    inside = ", ".join([f"lambda rngs: {made}", *options])
    keys = "broadcast" if axes.is_shared else "split"
    return f"nnx.vmap({inside})(rngs.{keys}({_length(method, slot, lifted, length)}))"


def _axis_text(method: Method, slot: Slot, node: ast.expr) -> str:
    if method.node not in method.source.ancestors(node):
        raise NotRewritableError("transform-setup-axis", node)
    return method.init_text(node, slot.makings)


def metadata(lifted: Lifted) -> str:
    """The metadata of the new axis for NNX's transform.

    Raises NotRewritableError if the metadata is more than a name.
    """
    given = dict(lifted.options["metadata_params"])
    name = given.get(nn.PARTITION_NAME)
    if set(given) != {nn.PARTITION_NAME} or not isinstance(name, str | None):
        raise NotRewritableError("transform-metadata", kind=lifted.kind)
    text = "None" if name is None else json.dumps(name)
    return f"transform_metadata={{nnx.PARTITION_NAME: {text}}}"


def _length(method: Method, slot: Slot, lifted: Lifted, node: ast.expr | None) -> str:
    name = STACKS[lifted.kind]
    if node is not None and method.node in method.source.ancestors(node):
        return method.init_text(node, slot.makings)
    value = lifted.options.get(name)
    if node is None and isinstance(value, int):
        return repr(value)
    records = method.program.records
    values = [_measured(records, m.run, m.path or (), lifted) for m in slot.makings]
    if len(set(values)) == 1:
        # An argument of the call that is as long, such as a batch, says nothing.
        return method.named(slot.makings, values, slot.node) or repr(values[0])
    return method.solve(slot.makings, values, name, slot.loops, slot.node)


def _measured(records: Records, run: int, path: Path, lifted: Lifted) -> Any:
    """How many there are, by the variables."""
    stacks = records.stacks_above(run, path)
    index = next(i for i, each in enumerate(stacks) if each.site == lifted.site)
    inside = below(records.variables[run], path, stacks[:index])
    for collection, axis in stacks[index].axes.items():
        for leaf in jax.tree.leaves(inside.get(collection, ())):
            return leaf.shape[axis]
    raise NotRewritableError("transform-empty", kind=lifted.kind)
