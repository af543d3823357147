"""Shards annotated leaves over the mesh in force when a wrapper creates them or takes them in."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from flax import nnx
from flax.core import meta

from bridge._conversion import linen_leaves
from bridge._conversion.neutral import Neutral
from bridge._conversion.nnx_meta import NNXMeta
from bridge._flax.nodes import Nodes, nodes_below
from bridge._flax.variables import LATER, assign_raw_value, mark_eager_sharding, raw_value

from . import explicit_axes


def is_eager(option: bool | None) -> bool:
    """Whether annotated leaves are sharded at once, by a wrapper's `eager_sharding`."""
    return nnx.using_eager_sharding() if option is None else option


def in_shards(leaves: Neutral, option: bool | None, where: str) -> Neutral:
    """Leaves that are new in a wrapper, sharded over the mesh in force as its option says.

    `option` is the wrapper's `eager_sharding`, None for what Flax does natively. Raises
    ShardingError if an annotation does not fit the mesh.
    """
    annotated = {
        address: leaf
        for address, leaf in leaves.items()
        # An `NNXMeta` keeps what its Variable said about itself.
        if leaf.box is not None and (option or leaf.fields.get("eager_sharding") is not False)
    }
    if not is_eager(option) or not annotated:
        return leaves
    boxed = linen_leaves.to_variables(annotated)
    placed = explicit_axes.sharded(boxed, where, strict=option is True)
    return {**leaves, **linen_leaves.from_variables(placed)}


def constructed(
    construct: Callable[[], Any], option: bool | None, where: str, *, is_abstract: bool
) -> tuple[Any, Nodes]:
    """An NNX module and its nodes, with annotated Variables in their shards.

    Flax shards a Variable in its constructor, and raises for names that are not axes of the mesh
    and if there is no mesh. If Flax refuses a module for that, it is constructed a second time, and
    only the Variables that fit are sharded.

    `construct` makes another module each time. `option` is the wrapper's `eager_sharding`, None for
    what Flax does natively. If `is_abstract`, only shapes and metadata count, and nothing is
    sharded.
    """
    has_flax_mesh = meta.get_global_mesh() is not None
    # Without a mesh, True is an error, which Flax raises.
    is_native = has_flax_mesh or (option is True and explicit_axes.mesh_in_force().empty)
    if not is_eager(option) or (is_native and not is_abstract):
        try:
            with nnx.use_eager_sharding(is_eager(option)):
                module = construct()
            return module, nodes_below(module)
        except Exception as error:
            # What JAX raises for an axis that is used twice has no public name. That one is raised
            # again below, with every other one.
            is_known = isinstance(error, ValueError | AssertionError)
            if not is_eager(option) or (is_known and option is not None):
                raise
    with nnx.use_eager_sharding(LATER):
        module = construct()
    nodes = nodes_below(module)
    late = [variable for variable in nodes.variables if variable.eager_sharding is LATER]
    # Few models are annotated, and finding the paths takes a walk that `init` pays for.
    annotated = {id(v) for v in late if v.get_metadata("out_sharding", None)}
    if annotated and not is_abstract:
        _put_in_shards(module, annotated, where, strict=option is True)
    mark_eager_sharding(late)
    return module, nodes


def _put_in_shards(module: object, annotated: Collection[int], where: str, *, strict: bool) -> None:
    """Shards the Variables of a module that have these ids."""
    late: dict[str, nnx.Variable[Any]] = {
        "/".join(map(str, path)): item
        for path, item in nnx.iter_graph(module, graph=True)
        if id(item) in annotated
    }
    boxes = {
        path: NNXMeta(item.var_type, raw_value(item), item.get_metadata())
        for path, item in late.items()
    }
    # A Variable that brings a mesh is sharded over it, as natively.
    for own in dict.fromkeys(item.get_metadata("mesh", None) for item in late.values()):
        here = {p: box for p, box in boxes.items() if box.metadata.get("mesh") == own}
        placed = explicit_axes.sharded(here, where, strict=strict, mesh=own)
        for path, box in placed.items():
            assign_raw_value(late[path], box.value)
