"""Moving values from one side to the other along the pieces of a correspondence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from bridge._conversion import linen_leaves
from bridge._conversion.arrays import shape_of
from bridge._conversion.collections import STATIC
from bridge._conversion.neutral import Address, Path, walk
from bridge._errors import PortError, mapping_error

from ._correspondence import Correspondence
from ._pieces import Piece, Region, joined, part
from ._trees import linen_text, nnx_text, value_of


def to_nnx(correspondence: Correspondence, values: Mapping[Address, Any]) -> dict[Path, Any]:
    """NNX values by path from Linen values by address; the inverse of `to_linen`.

    Args:
      correspondence: what belongs together.
      values: arrays for some or all Linen leaves.

    Returns:
      A value for every NNX leaf whose sources are there. Linen leaves without a place are left out.

    Raises:
      PortError: only some of the sources of a leaf are there, or an array has not the shape of its
        leaf and would have to be cut.
    """
    pieces = [piece for piece in correspondence.pieces if piece.nnx is not None]
    parts = [(p.nnx, p.nnx_region, p.linen, p.linen_region) for p in pieces]
    leaf_of = correspondence.linen_value
    return _moved(parts, values, leaf_of, nnx_text, linen_text)


def to_linen(correspondence: Correspondence, values: Mapping[Path, Any]) -> dict[Address, Any]:
    """Linen values by address from NNX values by path; the inverse of `to_nnx`.

    Returns:
      A value for every Linen leaf whose sources are there, and zeros for those that only Linen has.
    """
    pieces = [piece for piece in correspondence.pieces if piece.nnx is not None]
    parts = [(p.linen, p.linen_region, p.nnx, p.nnx_region) for p in pieces]
    leaves = {node.path: node.value for node in correspondence.nnx_leaves()}
    moved = _moved(parts, values, leaves.__getitem__, linen_text, nnx_text)
    for address in (p.linen for p in zero_pieces(correspondence)):
        # A tree without this layer, such as masked moments, has nothing to fill.
        if any(a[0] == address[0] and a[1][:-2] == address[1][:-2] for a in moved):
            leaf = correspondence.linen_value(address)
            moved[address] = np.zeros(leaf.shape, leaf.dtype)
    return moved


def zero_pieces(correspondence: Correspondence) -> list[Piece]:
    """The Linen leaves that NNX has no place for."""
    return [piece for piece in correspondence.pieces if piece.nnx is None]


def is_zero(value: Any) -> bool:
    """Whether an array is zero all over, so that nothing is lost without it."""
    numpy = jnp if isinstance(value, jax.Array) else np
    return not bool(numpy.any(numpy.asarray(value) != 0))


def is_unknown(value: Any) -> bool:
    """Whether a leaf has a shape and no values."""
    return isinstance(value, jax.ShapeDtypeStruct | Tracer)


def linen_values(tree: Any, collections: Iterable[str]) -> dict[Address, Any]:
    """The arrays of a tree like Linen variables by address.

    Args:
      tree: variables, the parameters alone, or what `convert` returned.
      collections: the names that tell variables from parameters.
    """
    if _is_flat(tree):
        return dict(tree)
    if not isinstance(tree, Mapping):
        raise mapping_error(tree, "Linen variables or parameters")
    neutral = linen_leaves.from_variables(as_variables(tree, collections))
    return {a: leaf.value for a, leaf in neutral.items() if not _is_nothing(leaf.value)}


def as_variables(tree: Mapping[str, Any], collections: Iterable[str]) -> Mapping[str, Any]:
    """Parameters alone as variables; variables as they are."""
    names = {*collections, STATIC}
    return tree if "params" in tree or (tree and set(tree) <= names) else {"params": tree}


def nnx_values(tree: Any) -> dict[Path, Any]:
    """The arrays of a module, a State or nested dicts by path."""
    if _is_flat(tree):
        return {path: value for (_, path), value in tree.items()}
    if isinstance(tree, nnx.Pytree):
        tree = nnx.state(tree, graph=True)
    if not isinstance(tree, Mapping):
        raise mapping_error(tree, "an NNX module, a State or nested dicts of arrays")
    values = {path: value_of(item) for path, item in walk(tree)}
    return {path: value for path, value in values.items() if not _is_nothing(value)}


def cast_is_exact(value: Any, dtype: Any) -> bool:
    """Whether a value is the same after a cast; an abstract one if every value of its type is."""
    found = jnp.dtype(value.dtype)
    if found == dtype:
        return True
    if is_unknown(value):
        return jnp.promote_types(found, dtype) == dtype
    numpy = jnp if isinstance(value, jax.Array) else np
    with np.errstate(all="ignore"):
        back = value.astype(dtype).astype(found)
    return bool(numpy.all((back == value) | ((back != back) & (value != value))))


def _moved(
    parts: list[tuple[Any, Region, Any, Region]],
    values: Mapping[Any, Any],
    leaf_of: Callable[[Any], Any],
    target_text: Callable[[Any], str],
    source_text: Callable[[Any], str],
) -> dict[Any, Any]:
    """(target, its region, source, its region) applied to values by source."""
    by_target: dict[Any, list[tuple[Region, Any, Region]]] = {}
    for target, region, source, source_region in parts:
        by_target.setdefault(target, []).append((region, source, source_region))
    moved: dict[Any, Any] = {}
    problems: list[str] = []
    for target, sources in by_target.items():
        absent = [source for _, source, _ in sources if source not in values]
        if len(absent) == len(sources):
            continue
        cut = [source for region, source, other in sources if region or other]
        if absent:
            names = ", ".join(map(source_text, absent))
            problems.append(f"{target_text(target)}: {names} is not in the tree, the rest is")
        elif odd := [s for s in cut if shape_of(values[s]) != shape_of(leaf_of(s))]:
            problems.append(
                f"{source_text(odd[0])}: expected the leaf's own shape {shape_of(leaf_of(odd[0]))},"
                f" found {shape_of(values[odd[0]])}, which cannot be cut into {target_text(target)}"
            )
        else:
            moved[target] = joined(
                [(region, part(values[source], other)) for region, source, other in sources]
            )
    if problems:
        raise PortError("these values cannot be moved", problems)
    return moved


def _is_flat(tree: Any) -> bool:
    return isinstance(tree, dict) and bool(tree) and all(_is_address(key) for key in tree)


def _is_address(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], tuple)


def _is_nothing(value: Any) -> bool:
    """Whether this is the empty tuple that optax puts where a parameter is masked."""
    return isinstance(value, tuple | Mapping) and not value
