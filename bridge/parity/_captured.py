"""The record of a call: the arrays that a layer gets and returns, by name, and its fields."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from types import FrameType
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from bridge._randomness.typed_keys import to_bits

from ._numbers import is_comparable


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of one layer.

    Attributes:
      path: where the layer is in the model, as text.
      method: the method's name.
      nth: which call of that method it is, from 0.
      layer: the layer's class.
      inputs: arrays by the name of the argument and where they are in it.
      outputs: arrays by where they are in the output.
      is_leaf: whether it called no other layer.
      fields: the layer's static fields, in the form that `_fields` compares.
    """

    path: tuple[str, ...]
    method: str
    nth: int
    layer: type[Any]
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    is_leaf: bool
    fields: Mapping[str, Any]

    @property
    def module(self) -> str:
        """The name of the layer's class."""
        return self.layer.__name__


@dataclasses.dataclass(frozen=True)
class Trace:
    """The calls that one run of a model made.

    Attributes:
      calls: in the order in which they ended, so a layer comes after those it calls.
      note: what could not be observed.
      output: what the run returned.
    """

    calls: tuple[LayerCall, ...]
    note: str = ""
    output: Any = None


def frame_arguments(frame: FrameType) -> dict[str, Any]:
    """The arguments of a call that has just begun by name, without the module itself."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    values = frame.f_locals
    return {name: values[name] for name in code.co_varnames[1:count] if name in values}


def linen_arguments(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a Linen call by name, without the module itself."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    return dict(list(bound.arguments.items())[1:])


def arrays(tree: Any) -> dict[str, Any]:
    """The arrays in a tree by where they are; modules and Variables are not looked into."""
    leaves = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, nnx.Pytree | nnx.Variable | nn.Module)
    )[0]
    return {
        jax.tree_util.keystr(path): to_bits(leaf) for path, leaf in leaves if is_comparable(leaf)
    }
