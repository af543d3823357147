"""Derives the mesh axes of every leaf of a model from metadata alone.

No Variable is built, no mesh has to be in force, and abstract leaves will do.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
from flax import linen as nn
from flax import nnx
from flax.core import meta
from flax.linen.spmd import logical_to_mesh
from jax.sharding import NamedSharding, PartitionSpec

from bridge._conversion import inner_boxes
from bridge._conversion.nnx_meta import NNXMeta
from bridge._errors import ShardingError

Mesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh
AxisRules: TypeAlias = Sequence[tuple[str, Any]] | None


def shardings(
    tree: object,
    mesh: Mesh,
    rules: AxisRules,
    where: str,
    *,
    foreign: bool = False,
    uneven: bool = False,
    is_own: bool = False,
) -> list[NamedSharding]:
    """The sharding of every array of a tree; what is not annotated is replicated.

    The shardings are in the order of `jax.tree.leaves`.

    Args:
      tree: Linen variables or a State; the leaves arrays or abstract arrays, with or without boxes.
      mesh: the mesh.
      rules: (logical name, mesh axis or axes or None) in order of precedence; None for those in
        force.
      where: what the tree belongs to, for the error.
      foreign: whether a leaf with names that are not axes of the mesh is replicated, or an error.
      uneven: whether dimensions need not be divisible.
      is_own: whether the leaves bring the mesh, for the error.

    Raises:
      ShardingError: the mesh lacks an axis that a leaf names, or a dimension cannot be divided.
    """
    found: list[NamedSharding] = []
    problems: list[tuple[str, str, str]] = []
    for path, shape, spec, wrong in _specs(tree, mesh, rules, uneven=uneven):
        if foreign and not has_axes(spec, mesh):
            found.append(NamedSharding(mesh, PartitionSpec()))
            continue
        problems += ((path, f"{shape} as {spec}", text) for text in wrong)
        found.append(NamedSharding(mesh, PartitionSpec() if wrong else spec))
    if problems:
        raise ShardingError(where, problems, dict(mesh.shape), is_own=is_own)
    return found


def fitting(tree: object, mesh: Mesh) -> list[PartitionSpec]:
    """As `shardings` by the rules in force; what does not fit the mesh is replicated."""
    specs = _specs(tree, mesh, None)
    return [PartitionSpec() if wrong else spec for _, _, spec, wrong in specs]


def has_axes(spec: PartitionSpec, mesh: Mesh) -> bool:
    """Whether all names of a partition spec are axes of the mesh."""
    return all(name in mesh.shape for entry in _entries(spec) for name in axes_of(entry))


def _specs(
    tree: object, mesh: Mesh, rules: AxisRules, *, uneven: bool = False
) -> Iterator[tuple[str, tuple[int, ...], PartitionSpec, list[str]]]:
    """(path, shape, spec, what is wrong with it) of every array."""
    rules = nn.get_logical_axis_rules() if rules is None else rules
    for path, box, arrays in _annotated(tree):
        spec = mesh_spec(box, rules) if box is not None else PartitionSpec()
        for array in arrays:
            shape = jax.numpy.shape(array)
            wrong = list(_problems(spec, shape, mesh, uneven)) or list(_refusals(spec, mesh))
            own = box.metadata.get("mesh") if isinstance(box, NNXMeta) else None
            if wrong and own is not None and own.shape != mesh.shape:
                wrong.append(f"its Variable brings another mesh by mesh=, {dict(own.shape)}")
            yield path, shape, spec, wrong


def mesh_spec(box: meta.AxisMetadata[Any], rules: AxisRules) -> PartitionSpec:
    """The partition spec of a box in names of mesh axes; the rules are applied once, here.

    The names of an `nn.LogicallyPartitioned` are logical: a name that no rule mentions is not
    sharded, and the first rule that asks for a mesh axis gets it. Other names are those of the
    mesh, unless a rule renames them. Without any rule all names are those of the mesh.

    Source: flax/linen/spmd.py:logical_to_mesh, flax/core/spmd.py:apply_rules @ 0.12.8
    """
    names, own = _names(box)
    rules = (*(rules or ()), *(own or ()))
    if not rules:
        return names
    if isinstance(box, nn.LogicallyPartitioned):
        return logical_to_mesh(names, rules)
    # As `dict` in Flax, so the last rule for a name holds; Flax refuses two that disagree.
    renamed = dict(rules)
    return PartitionSpec(*(renamed.get(n, n) if isinstance(n, str) else n for n in names))


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[Any, ...]:
    """The mesh axes that an entry of a partition spec names."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _names(box: meta.AxisMetadata[Any]) -> tuple[PartitionSpec, AxisRules]:
    if isinstance(box, NNXMeta):
        return box.get_partition_spec(), box.metadata.get("sharding_rules")
    own = box.rules if isinstance(box, nn.LogicallyPartitioned) else None
    # A box of the user's need not know of partitioning.
    spec = getattr(box, "get_partition_spec", PartitionSpec)()
    return spec, own


def _annotated(tree: object) -> Iterator[tuple[str, meta.AxisMetadata[Any] | None, list[Any]]]:
    """(path, box or None, arrays) of every box, Variable and bare array."""
    is_leaf = lambda x: isinstance(x, meta.AxisMetadata | nnx.Variable)  # noqa: E731
    for path, item in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
        linen = inner_boxes.boxed(item) if isinstance(item, nnx.Variable) else item
        for below, box in jax.tree_util.tree_leaves_with_path(linen, is_leaf=is_leaf):
            yield (
                jax.tree_util.keystr((*path, *below), simple=True, separator="/"),
                box if isinstance(box, meta.AxisMetadata) else None,
                jax.tree.leaves(box),
            )


def _problems(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh, uneven: bool
) -> Iterator[str]:
    axes = list(map(axes_of, _entries(spec)))
    if len(axes) > len(shape):
        yield f"the spec has {len(axes)} entries and the array {len(shape)} dimensions"
    used = collections.Counter(name for names in axes for name in names)
    if missing := [name for name in used if name not in mesh.shape]:
        yield f"the mesh has no axis {', '.join(map(repr, missing))}"
    if repeated := [name for name, count in used.items() if count > 1]:
        yield f"axis {', '.join(map(repr, repeated))} is there more than once"
    for dimension, (size, names) in enumerate(() if uneven else zip(shape, axes, strict=False)):
        parts = 1
        for name in names:
            parts *= mesh.shape.get(name, 1)
        if size % parts:
            yield f"dimension {dimension} of size {size} cannot be divided into {parts} parts"


def _refusals(spec: PartitionSpec, mesh: Mesh) -> Iterator[str]:
    """What JAX has against a spec by itself, such as `P.UNCONSTRAINED` without an Auto axis."""
    try:
        NamedSharding(mesh, spec)
    except ValueError as error:
        yield str(error)


def _entries(spec: PartitionSpec) -> Iterator[Any]:
    for entry in spec:
        yield None if entry is PartitionSpec.UNCONSTRAINED else entry
