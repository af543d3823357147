"""Values as they are kept from a trace: arrays as shapes, modules as paths and fields."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from ._records import Path, Shape

_OWN_FIELDS = ("parent", "name")
# Frames that belong to the function around them.
INSIDE = ("<listcomp>", "<dictcomp>", "<genexpr>", "<setcomp>")


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array or stands for one."""
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def shapes_of(value: Any) -> Any:
    """A tree with a `Shape` in the place of each array."""
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return Shape(tuple(value.shape), value.dtype)
    if type(value) in (list, tuple):
        return type(value)(map(shapes_of, value))
    if type(value) is dict:
        return {name: shapes_of(each) for name, each in value.items()}
    if isinstance(value, int | float | str | bool | type(None)):
        return value
    try:
        return jax.tree.map(lambda leaf: shapes_of(leaf) if is_array(leaf) else leaf, value)
    except (TypeError, ValueError):
        return None


def fields_of(module: nn.Module) -> dict[str, Any]:
    """The dataclass fields of a module, but `parent` and `name`."""
    return {
        field.name: getattr(module, field.name)
        for field in dataclasses.fields(module)
        if field.name not in _OWN_FIELDS and hasattr(module, field.name)
    }


def owner_of(
    frame: Any, is_users: Callable[[str], bool]
) -> tuple[nn.Module | None, dict[str, Any]]:
    """The module whose method a frame is in, with the variables of the frames in between."""
    env: dict[str, Any] = {}
    while frame is not None and is_users(frame.f_code.co_filename):
        for name, value in snapshot(frame).items():
            env.setdefault(name, value)
        code = frame.f_code
        if code.co_argcount and code.co_name not in INSIDE:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, nn.Module) and (
                (code.co_varnames[0] == "self" and code.co_qualname != code.co_name)
                or _is_lifted(frame, first, is_users)
            ):
                return first, env
        if reads_nothing_around(code) and code.co_name not in INSIDE:
            return None, env
        frame = frame.f_back
    return None, env


def reads_nothing_around(code: Any) -> bool:
    """Whether the code is that of a function that could be at the top of its file."""
    return not code.co_flags & inspect.CO_NESTED or (
        not code.co_freevars and not code.co_name.startswith("<")
    )


def _is_lifted(frame: Any, first: nn.Module, is_users: Callable[[str], bool]) -> bool:
    """Whether a function is called by a lifted transform, with the module that it is for."""
    caller = frame.f_back
    return (
        first.scope is not None
        and caller is not None
        and not is_users(caller.f_code.co_filename)
        and bool(frame.f_code.co_flags & inspect.CO_NESTED)
    )


def snapshot(frame: Any) -> dict[str, Any]:
    """The local variables of a frame."""
    return {
        name: _kept_value(value)
        for name, value in frame.f_locals.items()
        if not isinstance(value, nn.Module) or name == "self"
    }


def _kept_value(value: Any) -> Any:
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return Shape(tuple(value.shape), value.dtype)
    if type(value) in (list, tuple):
        return type(value)(map(_kept_value, value))
    if isinstance(value, nn.Module):
        return None
    # A size, if `np.prod` made it.
    return int(value) if isinstance(value, np.integer) else value


def path_of(module: nn.Module) -> Path | None:
    """The path of a module that is bound, None for another."""
    if module.scope is None:
        return None
    parent = module.parent
    if isinstance(parent, nn.Module) and module.name is not None:
        above = path_of(parent)
        if above is not None:
            return (*above, str(module.name))
    return tuple(map(str, module.scope.path))
