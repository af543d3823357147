"""Linen modules where the mesh in force has Explicit axes.

Linen constrains the value of an annotated box each time it is read, which Flax does for Auto axes
alone: with Explicit ones, the default of `jax.make_mesh`, the sharding is part of an array's type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from bridge._conversion.arrays import Arrays
from bridge._errors import ShardingError

from .specs import Mesh as AnyMesh
from .specs import axes_of, fitting, shardings

M = TypeVar("M", Mesh, AbstractMesh, AnyMesh)
# With it in force, Flax finds nothing to shard over and constrains nothing.
NO_MESH = AbstractMesh((), ())


def any_explicit() -> bool:
    """Whether the mesh in force has an Explicit axis."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def all_auto(mesh: M) -> M:
    """The same mesh with all axes Auto."""
    any_mesh: Any = mesh
    return any_mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def init_in_auto_axes(init: Callable[..., Any], *inputs: object, eager: bool) -> Any:
    """What `init(*inputs)` returns, computed with all axes Auto, in its annotated sharding.

    Nothing that `init` closes over may be an array of this mesh. A leaf without an annotation, or
    with one that does not fit the mesh, is replicated; so are all leaves if not `eager`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    given = Arrays(inputs)
    run = lambda *values: init(*given.tree(list(values)))  # noqa: E731
    with jax.sharding.use_abstract_mesh(all_auto(mesh)):
        shapes = jax.eval_shape(run, *given.avals)
    treedef = jax.tree.structure(shapes)
    specs = fitting(shapes, mesh) if eager else [PartitionSpec()] * treedef.num_leaves
    explicit = [_restricted(spec, mesh, AxisType.Explicit) for spec in specs]
    run = jax.sharding.auto_axes(run, out_sharding=treedef.unflatten(explicit))

    # Outside of a program, constraining the Auto axes would take the Explicit ones away.
    @jax.jit
    def constrained(*values: object) -> list[Any]:
        return [
            _constrained(value, _restricted(spec, mesh, AxisType.Auto))
            for value, spec in zip(jax.tree.leaves(run(*values)), specs, strict=True)
        ]

    return treedef.unflatten(constrained(*given.values))


def sharded(tree: object, where: str, *, strict: bool, mesh: AnyMesh | None = None) -> Any:
    """A tree of Variables or Linen variables with every array in its annotated sharding.

    If `strict`, every annotation has to name axes of the mesh in force. If not, a leaf with other
    names is left as it is, and so are all leaves without a mesh. `mesh` is None for the one in
    force.

    Raises ShardingError if an annotation does not fit the mesh or, if `strict`, there is no mesh.
    """
    own, mesh = mesh, mesh_in_force() if mesh is None else mesh
    if mesh.empty and not strict:
        return tree
    concrete = _concrete(mesh)
    leaves, treedef = jax.tree.flatten(tree)
    placed: list[Any] = []
    is_traced = any(isinstance(value, Tracer) for value in leaves)
    # In a program JAX divides over Auto axes whatever it can, as natively.
    uneven = is_traced and not strict and AxisType.Explicit not in mesh.axis_types
    options: Any = {"foreign": not strict, "uneven": uneven, "is_own": own is not None}
    wanted = shardings(tree, mesh, None, where, **options)
    for value, sharding in zip(leaves, wanted, strict=True):
        if isinstance(value, jax.ShapeDtypeStruct):
            placed.append(value)
            continue
        if concrete is not None and not isinstance(value, Tracer):
            # A constraint outside of a program would take one type of axes from the other.
            annotated = NamedSharding(concrete, sharding.spec)
            placed.append(jax.device_put(value, annotated) if any(sharding.spec) else value)
            continue
        explicit = _restricted(sharding.spec, mesh, AxisType.Explicit)
        typed = value
        if any(explicit):
            # A bare spec speaks of the mesh in force.
            target = explicit if own is None else NamedSharding(mesh, explicit)
            typed = jax.sharding.reshard(value, target)
        placed.append(_constrained(typed, _restricted(sharding.spec, mesh, AxisType.Auto), mesh))
    return treedef.unflatten(placed)


def misfit(tree: object, where: str, *, strict: bool) -> ShardingError | None:
    """The error that `sharded` raises for a tree of shapes, None if it raises none."""
    try:
        sharded(tree, where, strict=strict)
    except ShardingError as error:
        return error
    return None


def mesh_in_force() -> AnyMesh:
    """The mesh of `jax.set_mesh`, or of `with mesh:`, which Flax does not see; it may be empty."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return mesh
    try:
        # JAX has no public question for it, and this is what looks there.
        with jax.ensure_compile_time_eval():
            found = jax.lax.with_sharding_constraint(jax.numpy.zeros(()), PartitionSpec())
    except (RuntimeError, ValueError):
        return mesh
    return found.sharding.mesh


def _concrete(mesh: AnyMesh) -> Mesh | None:
    """The mesh with its devices, None inside a program."""
    if isinstance(mesh, Mesh):
        return mesh
    try:
        found = jax.sharding.get_mesh()
    except ValueError:
        return None
    return None if found.empty else found


def _constrained(value: object, spec: PartitionSpec, mesh: AnyMesh | None = None) -> Any:
    if not any(spec):
        return value
    return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec) if mesh else spec)


def _restricted(spec: PartitionSpec, mesh: AnyMesh, kind: AxisType) -> PartitionSpec:
    """The part of a spec that speaks of axes of one type."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def entries() -> Iterator[Any]:
        for entry in spec:
            kept = tuple(name for name in axes_of(entry) if types[name] == kind)
            yield kept or None

    return PartitionSpec(*entries())
