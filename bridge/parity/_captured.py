"""The arrays in what a layer gets and returns, by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FrameType
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from bridge._typed_keys import to_bits

from ._numbers import is_array


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
    return {jax.tree_util.keystr(path): to_bits(leaf) for path, leaf in leaves if is_array(leaf)}
