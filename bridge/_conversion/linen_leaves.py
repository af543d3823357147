"""Linen variables <-> the neutral form."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from flax import config, nnx
from flax import linen as nn
from flax.core import freeze, meta

import registry
from bridge._errors import ConversionError, mapping_error, path_text
from bridge._types import VARIABLE, Variables, VariableType

from .collections import STATIC, is_static
from .neutral import Leaf, Neutral, Path, is_mapping, nest, walk
from .nnx_meta import NNXMeta

EXPECTED = "Linen variables, that is {collection: {name: array, box or mapping}}"
# What Linen calls a submodule by itself.
_SUBMODULE = re.compile(r"[A-Z]\w*_\d+")


def from_variables(variables: Variables) -> Neutral:
    """The leaves of Linen variables, and every empty mapping, by (collection, path).

    The variables are dicts or FrozenDicts by collection, with arrays, abstract arrays, any pytrees
    or metadata boxes at the leaves. The GraphDefs in collection `nnx` are static and are left out.

    Raises:
      ConversionError: not a mapping of mappings.
      UnsupportedBoxError: a box cannot be carried.
    """
    _check(variables)
    active = registry.current()
    return {
        (collection, path): to_leaf(collection, path, value, active)
        for collection, tree in variables.items()
        for path, value in walk(tree, empty=True)
        if collection != STATIC or not is_static(collection, path, value)
    }


def to_variables(neutral: Neutral) -> Any:
    """The inverse of `from_variables`.

    Returns a dict, or a FrozenDict if Flax's `flax_return_frozendict` is on.
    """
    nested = to_dicts(neutral)
    return freeze(nested) if config.flax_return_frozendict else nested


def to_dicts(neutral: Neutral) -> dict[str, Any]:
    """`to_variables` as nested dicts in any case, made anew so that Linen may write into them."""
    active = registry.current()
    return nest(
        {
            (collection, *path): from_leaf(collection, leaf, active)
            for (collection, path), leaf in neutral.items()
        }
    )


def to_leaf(collection: str, path: Path, value: object, active: registry.Registry) -> Leaf:
    """One leaf of Linen variables in the neutral form."""
    if type(value) is NNXMeta:
        expected = active.type_from_name(collection)
        if value.var_type is not expected and active.name_from_type(value.var_type) != collection:
            raise ConversionError(
                f"{path_text(collection, path)} holds an NNXMeta of {value.var_type.__name__},"
                f" and the"
                f" Variable type of collection {collection!r} is {expected.__name__}; put the"
                f" leaf in collection"
                f" {active.name_from_type(value.var_type)!r}, or register the pair"
            )
        return Leaf(value.value, NNXMeta, value.metadata)
    kind: Any = type(value)
    if _is_box(kind):
        inner, fields = active.codec_for(kind).to_fields(value)
        return Leaf(inner, kind, fields)
    return Leaf(value)


def _is_box_type(kind: type) -> bool:
    return issubclass(kind, meta.AxisMetadata)


_is_box: Callable[[Any], bool] = functools.lru_cache(maxsize=1024)(_is_box_type)


def from_leaf(collection: str, leaf: Leaf, active: registry.Registry) -> Any:
    """The inverse of `to_leaf`."""
    if leaf.box is None:
        # An empty mapping is made anew, as Linen may write into it.
        return {} if leaf.is_empty else leaf.value
    if leaf.box is NNXMeta:
        return box_of(active.type_from_name(collection), leaf)
    return active.codec_for(leaf.box).from_fields(leaf.value, leaf.fields)


def box_of(var_type: VariableType, leaf: Leaf) -> NNXMeta[Any]:
    """The box of a Variable that no box of Linen's own can hold."""
    return NNXMeta(var_type, leaf.value, dict(leaf.fields))


def check_variables(variables: Variables) -> None:
    """Raises ConversionError if what a user gave is not variables; the error says what is allowed.

    `from_variables` checks only the collections, because it runs in every call.
    """
    _check(variables)
    names = [name for name in variables if _SUBMODULE.fullmatch(name)]
    if names and "params" not in variables:
        raise mapping_error(variables, EXPECTED, _PARAMS_ALONE)
    for _, leaf in walk(variables):
        if isinstance(leaf, VARIABLE):
            raise mapping_error(leaf, EXPECTED, _IS_NNX)


def _check(variables: Any) -> None:
    if isinstance(variables, nnx.Pytree):
        raise mapping_error(variables, EXPECTED, _IS_NNX)
    if isinstance(variables, nn.Module):
        raise mapping_error(variables, EXPECTED, "give what the module's init returns")
    if not is_mapping(type(variables)):
        raise mapping_error(variables, EXPECTED)
    for collection, tree in variables.items():
        if not isinstance(collection, str) or not isinstance(tree, Mapping):
            is_nnx = isinstance(tree, nnx.Variable | nnx.Pytree)
            remedy = _IS_NNX if is_nnx else "" if "params" in variables else _PARAMS_ALONE
            raise mapping_error(variables, EXPECTED, remedy)


_IS_NNX = "it is NNX; bridge.nnx_to_linen turns it into variables"
_PARAMS_ALONE = "give parameters alone as {'params': …}"
