"""Moves values from one side to the other along the pieces of a correspondence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import FrozenDict, freeze
from jax.core import Tracer

from bridge._conversion import linen_leaves
from bridge._conversion.arrays import is_abstract, shape_of
from bridge._conversion.collections import STATIC, with_static
from bridge._conversion.neutral import Address, Neutral, Path, walk
from bridge._errors import PortError, mapping_error
from bridge._flax.variables import assign_raw_value, raw_value
from bridge._rules.pieces import assembled

from ._correspondence import Correspondence
from ._trees import linen_text, nnx_text, value_of


def to_nnx(correspondence: Correspondence, values: Mapping[Address, Any]) -> dict[Path, Any]:
    """NNX values by path from Linen values by address; the inverse of `to_linen`.

    `values` may lack Linen leaves. The result has a value for every NNX leaf with all of its
    sources; Linen leaves without a place are left out. Raises PortError if only some of the sources
    of a leaf are there, or if an array that would have to be cut does not have the shape of its
    leaf.
    """
    return _moved(correspondence, values, to_nnx=True)


def to_linen(correspondence: Correspondence, values: Mapping[Path, Any]) -> dict[Address, Any]:
    """Linen values by address from NNX values by path; the inverse of `to_nnx`.

    The result has a value for every Linen leaf with all of its sources, and zeros for those that
    only Linen has.
    """
    moved = _moved(correspondence, values, to_nnx=False)
    for address in correspondence.zero:
        # A tree without this layer, such as masked moments, has nothing to fill.
        if any(a[0] == address[0] and a[1][:-2] == address[1][:-2] for a in moved):
            leaf = correspondence.linen_values[address]
            moved[address] = np.zeros(leaf.shape, leaf.dtype)
    return moved


def is_zero(value: Any) -> bool:
    """Whether an array is zero all over, so that nothing is lost without it."""
    numpy = jnp if isinstance(value, jax.Array) else np
    return not bool(numpy.any(numpy.asarray(value) != 0))


def is_other(value: Any, known: Any) -> bool:
    """Whether two arrays differ, as far as this process knows their values."""
    both = value, known
    if value is known or known is None or any(map(is_unknown, both)):
        return False
    # A step that donates its state deletes the arrays of the one before.
    if isinstance(known, jax.Array) and known.is_deleted():
        return True
    # Reading the shards of other processes is not worth it here.
    if not all(x.is_fully_addressable for x in both if isinstance(x, jax.Array)):
        return False
    one, other = map(np.asarray, both)
    same = one.shape == other.shape and (one == other) | ((one != one) & (other != other))
    return not np.all(same)


def is_unknown(value: Any) -> bool:
    """Whether a leaf has a shape and no values."""
    return isinstance(value, jax.ShapeDtypeStruct | Tracer)


def linen_values(tree: Any, collections: Iterable[str]) -> dict[Address, Any]:
    """The arrays of a tree like Linen variables by address.

    The tree is variables, the parameters alone, or what `convert` returned. The names of
    `collections` tell variables from parameters.
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


def cast_is_exact(value: Any, place: Any) -> bool:
    """Whether a value is the same in the dtype of what it replaces.

    That holds for an abstract value if it does for every value of its dtype.
    """
    found, dtype = (getattr(each, "dtype", None) for each in (value, place))
    if found is None or dtype is None or found == dtype:
        return True
    if is_unknown(value):
        return jnp.promote_types(found, dtype) == dtype
    numpy = jnp if isinstance(value, jax.Array) else np
    with np.errstate(all="ignore"):
        back = value.astype(dtype).astype(found)
    return bool(numpy.all((back == value) | ((back != back) & (value != value))))


def write_nnx(found: Correspondence) -> None:
    """Writes the Linen values into the NNX model: all of them, or none if anything raises.

    Raises PortError if the Linen side holds no values.
    """
    sources = found.linen_values
    _require_values({linen_text(address): value for address, value in sources.items()})
    leaves = found.nnx_leaves
    moved = to_nnx(found, sources)
    # Everything that can fail for its size or its type fails before the first write.
    values = {path: like(value, leaves[path].value) for path, value in moved.items()}
    variables = {path: leaves[path].item for path in values if leaves[path].is_variable}
    write([(variable, values[path]) for path, variable in variables.items()])
    for path, value in values.items():
        if path not in variables:
            holder = found.nnx.at(path[:-1])
            _set(holder.item if holder else None, path[-1], value)
            leaves[path].item = value


def like(value: Any, place: Any) -> Any:
    """A value in the dtype and the sharding of what it replaces.

    A host array goes to its shards at once: no device needs room for all of it.
    """
    if not hasattr(place, "dtype"):
        return value
    # JAX may use the memory of a NumPy array, whose owner may write to it later: `astype` copies.
    if value.dtype != place.dtype or isinstance(value, np.ndarray):
        value = value.astype(place.dtype)
    sharding = getattr(place, "sharding", None)
    if isinstance(value, Tracer) or isinstance(place, Tracer) or sharding is None:
        return jnp.asarray(value)
    if isinstance(place, jax.Array) and not place.committed:
        return jnp.asarray(value)
    return jax.device_put(value, sharding)


def write(values: Sequence[tuple[nnx.Variable[Any], Any]]) -> None:
    """Puts values into Variables: all of them, or none if anything raises."""
    before: list[tuple[nnx.Variable[Any], Any]] = []
    try:
        for variable, value in values:
            before.append((variable, raw_value(variable)))
            assign_raw_value(variable, value)
    except BaseException:
        for variable, value in before:
            assign_raw_value(variable, value)
        raise


def linen_variables(found: Correspondence, target: Mapping[str, Any]) -> Any:
    """Linen variables like `target` with the NNX values.

    What has no counterpart, RNG state for one, is the target's own; where that is abstract, it is
    left out. Raises PortError if the NNX side holds no values.
    """
    sources = {path: node.value for path, node in found.nnx_leaves.items()}
    _require_values({nnx_text(path): value for path, value in sources.items()})
    moved = to_linen(found, sources)
    filled: Neutral = {}
    for address, leaf in linen_leaves.from_variables(target).items():
        if address in moved:
            filled[address] = leaf._replace(value=like(moved[address], leaf.value))
        elif leaf.is_empty or not is_abstract(leaf.value):
            filled[address] = leaf
    result = with_static(linen_leaves.to_variables(filled), target)
    return freeze(result) if isinstance(target, FrozenDict) else result


def _moved(found: Correspondence, values: Mapping[Any, Any], *, to_nnx: bool) -> dict[Any, Any]:
    """The values of one side, by the other side's leaves that they make up."""
    leaves = {path: node.value for path, node in found.nnx_leaves.items()}
    sides = [(found.linen_values, linen_text), (leaves, nnx_text)]
    (known, source_text), (places, target_text) = sides if to_nnx else reversed(sides)
    moved: dict[Any, Any] = {}
    problems: list[str] = []
    for target, pieces in found.by_target(to_nnx=to_nnx).items():
        sources = [piece.linen if to_nnx else piece.nnx for piece in pieces]
        absent = [source for source in sources if source not in values]
        if len(absent) == len(sources):
            continue
        odd = [x for x in sources if shape_of(values.get(x)) != shape_of(known[x])]
        if absent:
            names = ", ".join(map(source_text, absent))
            problems.append(f"{target_text(target)}: {names} is not in the tree, the rest is")
        elif found.is_whole(pieces[0]):
            moved[target] = values[sources[0]]
        elif odd:
            expected, shape = shape_of(known[odd[0]]), shape_of(values[odd[0]])
            problems.append(
                f"{source_text(odd[0])}: expected the leaf's own shape {expected}, found {shape},"
                f" which cannot be cut into {target_text(target)}"
            )
        else:
            shape = shape_of(places[target]) or ()
            parts = zip(pieces, (values[source] for source in sources), strict=True)
            moved[target] = assembled([p.moved(v, shape, to_nnx=to_nnx) for p, v in parts])
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


def _set(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, dict | list):
        holder[key] = value
    else:
        setattr(holder, key, value)


def _require_values(sources: Mapping[str, Any]) -> None:
    abstract = [path for path, value in sources.items() if is_abstract(value)]
    if abstract:
        raise PortError("the source has shapes and no values", abstract)
