"""Compares a Linen class with the one of the same name that runs an NNX class."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.core import FrozenDict, meta

from bridge._conversion.neutral import walk
from bridge.rewrite._failures import said
from bridge.rewrite.observe._entries import Entry, difference, entry_kwargs, training_kwargs
from bridge.rewrite.observe._snapshots import is_array

from ._pairing import without_sown
from ._same_program import Given, is_same_function
from ._weights import random_inputs, random_variables

_TOLERANCE = 1e-4


def fault(
    entry: Entry, classes: Mapping[type, Any], keys: Mapping[str, Any], *, computes: bool
) -> str | None:
    """What differs, None if nothing does.

    Both are initialised, which computes nothing. With `computes`, both are called with the same
    random variables too: they have to be one program, or to give the same numbers.

    `entry` says how the old model is made and called. `classes` maps old classes to new ones.
    `keys` has a key for each stream; all of them draw the same.
    """
    old = entry.make()
    try:
        new = made_of(old, classes)
        (output, before), (other, after) = (_initialized(each, entry, keys) for each in (old, new))
    except Exception as error:
        return f"init raised {said(error)}"
    differs = _difference(before, after)
    if differs is None and not computes:
        differs = _difference({"output": output}, {"output": other})
    if differs is not None or not computes:
        return differs
    variables = random_variables(without_sown(before))
    inputs = random_inputs(entry.inputs)
    modes = [entry_kwargs(entry), training_kwargs(entry)]
    for kwargs in [each for each in modes if each is not None]:
        given = Given((variables, *inputs), random_inputs(dict(kwargs)))
        for mutable in ([*before, "intermediates"], False):
            options = {"method": entry.method, "rngs": keys, "mutable": mutable}
            one, other = (functools.partial(_applied, each, given, options) for each in (old, new))
            if is_same_function(one, other, given.arrays):
                continue
            try:
                expected = one(given.arrays)
            except Exception:
                # Such as an update of statistics that are not mutable.
                continue
            try:
                found = other(given.arrays)
            except Exception as error:
                return f"apply raised {said(error)}"
            if not _same(expected, found):
                return f"apply with {dict(kwargs)} gives other values"
    return None


def fault_of_fields(
    entry: Entry,
    fields: Mapping[str, Any],
    classes: Mapping[type, Any],
    keys: Mapping[str, Any],
    *,
    computes: bool,
) -> str | None:
    """What differs with other fields, None if nothing does or Linen itself refuses them.

    The arguments are as for `fault`.
    """
    try:
        model = entry.make()
        old = model.clone(**fields)
        what = ", ".join(difference(model, old))
        _initialized(old, entry, keys)
    except Exception:
        return None
    own = dataclasses.replace(entry, make=lambda: old)
    differs = fault(own, classes, keys, computes=computes)
    return None if differs is None else f"with {what} {differs}"


def made_of(old: nn.Module, classes: Mapping[type, Any]) -> nn.Module:
    """A new module with the fields of an old one."""
    names = [n for n, f in old.__dataclass_fields__.items() if f.init]
    fields = {n: _mapped(getattr(old, n), classes) for n in names if n not in ("parent", "name")}
    return classes.get(type(old), type(old))(**fields)


def _mapped(value: Any, classes: Mapping[type, Any]) -> Any:
    if isinstance(value, type):
        return classes.get(value, value)
    if isinstance(value, functools.partial):
        keywords = {name: _mapped(each, classes) for name, each in value.keywords.items()}
        positional = (_mapped(each, classes) for each in value.args)
        return functools.partial(_mapped(value.func, classes), *positional, **keywords)
    if isinstance(value, nn.Module):
        return made_of(value, classes)
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, classes) for each in value)
    if isinstance(value, dict | FrozenDict):
        return {name: _mapped(each, classes) for name, each in value.items()}
    return value


def _initialized(model: nn.Module, entry: Entry, keys: Mapping[str, Any]) -> Any:
    """The output and the variables of an initialisation, as shapes."""
    leaves, tree = jax.tree.flatten((entry.inputs, dict(entry.kwargs)))

    def init(*arrays: Any) -> Any:
        given = iter(arrays)
        args, kwargs = jax.tree.unflatten(
            tree, [next(given) if is_array(leaf) else leaf for leaf in leaves]
        )
        return model.init_with_output(dict(keys), *args, method=entry.method, **kwargs)

    return jax.eval_shape(init, *[leaf for leaf in leaves if is_array(leaf)])


def _applied(
    model: nn.Module, given: Given, options: Mapping[str, Any], arrays: Sequence[Any]
) -> Any:
    """What a model returns, the updated variables too, without boxes."""
    result = given.call(functools.partial(model.apply, **options), arrays)
    return jax.tree.map(
        lambda x: x.unfreeze() if isinstance(x, FrozenDict) else x,
        meta.unbox(result),
        is_leaf=lambda x: isinstance(x, FrozenDict),
    )


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """The first leaf of two initialisations that differs."""
    one, other = (
        {"/".join(map(str, path)): _described(leaf) for path, leaf in walk(each, empty=True)}
        for each in (before, after)
    )
    for path in sorted({*one, *other}):
        if one.get(path) != other.get(path):
            name = path or "the whole tree"
            return f"{name} is {one.get(path, 'absent')} in Linen, and {other.get(path, 'absent')}"
    return None


def _described(leaf: Any) -> str:
    if isinstance(leaf, meta.AxisMetadata):
        names = getattr(leaf, "names", None)
        return f"{type(leaf).__name__}{names} of {_described(leaf.unbox())}"
    if hasattr(leaf, "shape"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    leaves, tree = jax.tree.flatten(leaf)
    return f"{tree} of {[*map(_described, leaves)]}" if leaves else str(tree)


def _same(one: Any, other: Any) -> bool:
    """Whether two results of `apply` are alike."""
    (first, tree), (second, other_tree) = map(jax.tree.flatten, (one, other))
    return tree == other_tree and all(map(_close, first, second))


def _close(one: Any, other: Any) -> bool:
    if not (hasattr(one, "shape") and hasattr(other, "shape")):
        return one == other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not jax.numpy.issubdtype(one.dtype, jax.numpy.inexact):
        return jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key) or bool((one == other).all())
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    scale = float(np.max(np.abs(a), initial=0.0, where=np.isfinite(a)))
    low = jax.numpy.finfo(one.dtype).bits < 32
    return np.allclose(a, b, 0, (0.1 if low else _TOLERANCE) * max(scale, 1e-3), equal_nan=True)
