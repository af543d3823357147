"""The leaves by path of what can be saved or restored into, and the way back from values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
from flax import nnx
from flax.core import FrozenDict, freeze

from bridge._conversion import linen_leaves, nnx_leaves
from bridge._conversion.collections import with_static
from bridge._conversion.linen_attributes import is_initialized
from bridge._conversion.neutral import Leaf, Neutral, Path, nest, place, walk
from bridge._errors import mapping_error
from bridge._flax.variables import assign_raw_value, variable_from_metadata
from bridge._linen_in_nnx.to_nnx import ToNNX

from ._stored import parts

ValuesByPath: TypeAlias = Mapping[Path, Any]


class Assignment(NamedTuple):
    """A value to be put into a module, and the one that is there."""

    put: Callable[[Any], None]
    new: Any
    old: Any


class TargetTree(NamedTuple):
    """Something to be saved, or restored into.

    Attributes:
      leaves: its leaves; the first key of a path is the collection, if it has collections.
      nnx_paths: where the leaves are in an NNX state.
      filled: values by path -> (the same thing with these values, what to put into a module for
        that). A leaf without a value keeps its own.
      side: `linen`, `nnx`, or `pytree`, which has no collections.
    """

    leaves: Mapping[Path, Leaf]
    nnx_paths: Callable[[], Mapping[Path, Path]]
    filled: Callable[[ValuesByPath], tuple[Any, list[Assignment]]]
    side: str


def tree_of(tree: Any, *, as_pytree: bool = False) -> TargetTree:
    """The leaves of Linen variables, of an NNX module, of a State, or of any pytree.

    With `as_pytree`, a mapping without Variables is a pytree like any other, not variables. Raises
    ConversionError for any other form.
    """
    if isinstance(tree, nnx.Pytree):
        return _of_module(tree)
    if isinstance(tree, nnx.State) or (isinstance(tree, Mapping) and _has_variables(tree)):
        return _of_state(tree)
    if as_pytree:
        return _of_pytree(tree)
    if isinstance(tree, Mapping):
        return _of_variables(tree)
    remedy = ""
    if hasattr(tree, "params"):
        # Such as a TrainState; what else it holds lies beside the model.
        beside = [name for name in ("opt_state", "step") if hasattr(tree, name)]
        fields = getattr(tree, "__dict__", {}).items()
        collections = [n for n, v in fields if isinstance(v, Mapping) and n not in beside]
        given, others = (
            ", ".join(f"{name!r}: state.{name}" for name in names)
            for names in (collections or ["params"], beside)
        )
        remedy = f"give {{{given}}}" + (f" and extra={{{others}}}" if others else "")
    raise mapping_error(tree, "Linen variables, an NNX module or an nnx.State", remedy)


def empty_wrappers(tree: Any) -> list[Path]:
    """The paths of the `ToNNX` in a model whose variables `lazy_init` has still to create."""
    nodes = nnx.iter_graph(tree, graph=True) if isinstance(tree, nnx.Pytree) else ()
    return [p for p, node in nodes if isinstance(node, ToNNX) and not is_initialized(node)]


def _of_variables(variables: Mapping[str, Any]) -> TargetTree:
    neutral = linen_leaves.from_variables(variables)

    def nnx_paths() -> dict[Path, Path]:
        placed = place(address for address in neutral if address[1])
        return {(c, *path): target for (c, path), (target, _) in placed.items()}

    def filled(values: ValuesByPath) -> tuple[Any, list[Assignment]]:
        leaves = {
            (c, path): leaf._replace(value=values.get((c, *path), leaf.value))
            for (c, path), leaf in neutral.items()
        }
        made = linen_leaves.to_variables(leaves)
        return _shaped_as(with_static(made, variables), variables), []

    return TargetTree(_by_path(neutral), nnx_paths, filled, "linen")


def _of_module(module: nnx.Pytree) -> TargetTree:
    items = walk(nnx.state(module, graph=True))
    leaves, paths, found = _nnx_leaves(items)

    def filled(values: ValuesByPath) -> tuple[Any, list[Assignment]]:
        return module, [
            Assignment(_setter(module, paths[path], found[path]), value, leaves[path].value)
            for path, value in values.items()
        ]

    return TargetTree(leaves, lambda: paths, filled, "nnx")


def _of_state(state: Mapping[Any, Any]) -> TargetTree:
    leaves, paths, found = _nnx_leaves(walk(state))

    def filled(values: ValuesByPath) -> tuple[Any, list[Assignment]]:
        flat = {
            paths[path]: _with_value(item, values.get(path, leaves[path].value))
            for path, item in found.items()
        }
        made = nest(flat)
        return nnx.State(made) if isinstance(state, nnx.State) else made, []

    return TargetTree(leaves, lambda: paths, filled, "nnx")


def _of_pytree(tree: Any) -> TargetTree:
    own = dict(parts(tree))

    def filled(values: ValuesByPath) -> tuple[Any, list[Assignment]]:
        leaves = [values.get(path, value) for path, value in own.items()]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves), []

    leaves = {path: Leaf(value) for path, value in own.items()}
    return TargetTree(leaves, lambda: {path: path for path in own}, filled, "pytree")


def _nnx_leaves(items: Any) -> tuple[dict[Path, Leaf], dict[Path, Path], dict[Path, Any]]:
    """Leaves, paths in the State, and Variables or arrays, all by collection and path."""
    flat = list(items)
    neutral = nnx_leaves.from_leaves(flat)
    # `from_leaves` keeps the order and refuses two leaves for one place.
    addresses = list(_by_path(neutral))
    paths = {a: path for a, (path, _) in zip(addresses, flat, strict=True)}
    return _by_path(neutral), paths, {a: v for a, (_, v) in zip(addresses, flat, strict=True)}


def _by_path(neutral: Neutral) -> dict[Path, Leaf]:
    return {(collection, *path): leaf for (collection, path), leaf in neutral.items()}


def _has_variables(tree: Mapping[Any, Any]) -> bool:
    return any(isinstance(leaf, nnx.Variable) for _, leaf in walk(tree))


def _shaped_as(made: Any, like: Any) -> Any:
    """Nested dicts with the mapping types of the tree that they were made from, in its order."""
    if not isinstance(like, Mapping) or not isinstance(made, Mapping):
        return made
    shaped = {key: _shaped_as(made[key], like[key]) for key in like}
    return freeze(shaped) if isinstance(like, FrozenDict) else shaped


def _setter(module: nnx.Pytree, path: Path, item: Any) -> Callable[[Any], None]:
    if isinstance(item, nnx.Variable):
        return functools.partial(assign_raw_value, item)
    # An array without a Variable is an attribute, which only its owner can replace.
    return lambda value: nnx.update(module, nnx.State(nest({path: value})))


def _with_value(item: Any, value: Any) -> Any:
    if not isinstance(item, nnx.Variable):
        return value
    return variable_from_metadata(item.var_type, value, item.get_metadata())
