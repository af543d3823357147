"""The decode cache of attention, which NNX makes by a call after the constructor."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any

from flax.core import meta

from bridge.rewrite.observe._records import Making, below_made

from ._method import Method
from ._plans import CACHE, Lines, Slot
from ._refusals import NotRewritableError


@dataclasses.dataclass(frozen=True)
class Cache:
    """How a constructor makes a cache.

    `arguments` are the arguments of `init_cache`. `test` is the condition for a cache, None for
    always.
    """

    arguments: str
    test: str | None


def cache_lines(cache: Cache, attention: str, depth: int = 0) -> Lines:
    """The statements that make a decode cache, behind that which makes the layer.

    `depth` is the indentation of the first line.
    """
    call = f"{attention}.init_cache({cache.arguments})"
    if cache.test is None:
        return [(depth, call)]
    return [(depth, f"if {cache.test}:"), (depth + 1, call)]


def cache_of(method: Method, slot: Slot) -> Cache | None:
    """The cache of an attention layer; None if it never decodes.

    The shape becomes an argument of the constructor, which is None where nothing is decoded. Raises
    NotRewritableError if the constructor cannot make it.
    """
    makings = [m for m in slot.makings if m.made.get("decode")]
    if not makings:
        return None
    if slot.outer is not None or slot.lift is not None:
        raise NotRewritableError("cache-inside", slot.node)
    node = next((k.value for k in slot.constructor.keywords if k.arg == "decode"), None)
    if node is None:
        raise NotRewritableError("cache-partial", slot.node)
    found = [_shape(method, making) for making in makings]
    made = [cache for cache in found if cache is not None]
    if len(made) < len(found):
        raise NotRewritableError("cache-absent", slot.node)
    if len({dtype for _, dtype in made}) > 1:
        raise NotRewritableError("cache-dtypes", slot.node)
    by_owner: dict[Any, tuple[int, ...]] = {}
    for making, (shape, _) in zip(makings, made, strict=True):
        if by_owner.setdefault((making.run, making.owner), shape) != shape:
            raise NotRewritableError("cache-shapes", slot.node)
    name = method.sizes.given(CACHE, makings, [shape for shape, _ in made])
    dtype = made[0][1]
    arguments = name if dtype == "float32" else f'{name}, "{dtype}"'
    if isinstance(node, ast.Constant):
        return Cache(arguments, None)
    return Cache(arguments, method.init_text(node, slot.makings))


def _shape(method: Method, making: Making) -> tuple[tuple[int, ...], str] | None:
    """The shape of the input that the cache is for, and the dtype; None if there is no cache."""
    variables = below_made(method.program.records, making)
    key = _leaf(variables, "cache", "cached_key")
    query = _leaf(variables, "params", "query", "kernel")
    if key is None or query is None:
        return None
    return (*key.shape[:-2], query.shape[0]), str(key.dtype)


def _leaf(variables: Any, *names: str) -> Any:
    for name in names:
        variables = variables.get(name) if isinstance(variables, Mapping) else None
    return None if variables is None else meta.unbox(variables)
