"""The entry points of a rewriting: what makes the model, and how it is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

_MOST_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model and a call of it.

    Attributes:
        make: what gives the Linen module.
        inputs: shapes or arrays.
        kwargs: keyword arguments of the call.
        method: what is called, None for `__call__`.
    """

    make: Callable[[], nn.Module]
    inputs: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    method: str | None = None


def variations(module: nn.Module, inputs: tuple[Any, ...]) -> Iterator[tuple[nn.Module, Any]]:
    """Models and inputs with one size changed in each, to tell equal sizes apart.

    Sizes are doubled, so that what divides them still does.
    """
    shapes = jax.tree.map(_spec, inputs)
    for index, spec in enumerate(shapes):
        if not isinstance(spec, jax.ShapeDtypeStruct):
            continue
        for axis in reversed(range(1, len(spec.shape))):
            sizes = list(spec.shape)
            sizes[axis] *= 2
            changed = list(shapes)
            changed[index] = jax.ShapeDtypeStruct(tuple(sizes), spec.dtype)
            yield module, tuple(changed)
        if len({s.shape for s in shapes if isinstance(s, jax.ShapeDtypeStruct)}) == 1 and len(
            shapes
        ) > 1 and spec.shape:
            break
    for field in dataclasses.fields(module):
        if field.name in ("parent", "name") or not field.init:
            continue
        for value in _changed(getattr(module, field.name)):
            try:
                yield module.clone(**{field.name: value}), shapes
            except Exception:  # noqa: BLE001, PERF203 a constructor may refuse any value
                continue


def _spec(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array | np.ndarray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def _changed(value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value * 2 if value else 1
    elif type(value) in (list, tuple) and value and all(type(v) is int for v in value):
        yield type(value)(v * 2 for v in value)
        yield type(value)([*value, value[-1]])
    elif dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module):
        for field in dataclasses.fields(value):
            for inner in _changed(getattr(value, field.name)):
                if field.init:
                    yield dataclasses.replace(value, **{field.name: inner})
    elif type(value).__name__ == "ConfigDict":
        for name, inner in value.items():
            for changed in _changed(inner):
                copied = value.copy_and_resolve_references()
                with copied.unlocked():
                    copied[name] = changed
                yield copied


def shaped(entry: Entry) -> Entry:
    """An entry whose arrays are shapes."""
    return dataclasses.replace(entry, inputs=tuple(jax.tree.map(_spec, entry.inputs)))


def second_batch(inputs: Any) -> Any:
    """The inputs with another batch size."""
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(inputs)
             if hasattr(leaf, "shape") and leaf.shape}
    if len(sizes) != 1:
        return None

    def larger(leaf: Any) -> Any:
        if hasattr(leaf, "shape") and leaf.shape:
            return jnp.concatenate([leaf, leaf[:1]])
        return leaf

    return jax.tree.map(larger, inputs)
