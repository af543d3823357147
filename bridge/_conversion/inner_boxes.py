"""Metadata boxes inside the value of a Variable, such as a dict of partitioned arrays."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from flax.core import meta

import registry
from bridge._flax.variables import raw_value

from . import linen_leaves, nnx_leaves
from .neutral import Leaf, Path
from .nnx_leaves import DISPLACED_KEY

# The metadata that says which boxes there were: (path, type, fields) of each.
_BOXES = "linen_boxes"


def unboxed_within(variable: nnx.Variable[Any]) -> nnx.Variable[Any]:
    """A Variable with the metadata boxes inside its value in its metadata; `boxed` undoes it."""
    value = raw_value(variable)
    if isinstance(value, jax.Array):
        return variable
    active = registry.current()
    collection = active.name_from_type(variable.var_type)
    boxes: list[tuple[Any, type | None, tuple[Any, ...]]] = []

    def unboxed(path: Path, item: object) -> Any:
        if not _is_box(item):
            return item
        leaf = linen_leaves.to_leaf(collection, path, item, active)
        # A GraphDef holds the metadata, so it is hashable.
        boxes.append((path, leaf.box, tuple(sorted(leaf.fields.items()))))
        return leaf.value

    value = jax.tree_util.tree_map_with_path(unboxed, value, is_leaf=_is_box)
    if boxes:
        variable.set_raw_value(value)
        variable.set_metadata(_BOXES, tuple(boxes))
    return variable


def boxed(variable: nnx.Variable[Any]) -> Any:
    """What Linen holds of a Variable, in its metadata boxes."""
    active = registry.current()
    collection = active.name_from_type(variable.var_type)
    if not is_plain(variable):
        leaf = nnx_leaves.to_leaf(variable, active, boxed_as_is=True)
        return linen_leaves.from_leaf(collection, leaf, active)
    boxes = {path: box for path, *box in variable.get_metadata(_BOXES, ())}

    def box(path: object, item: object) -> Any:
        if path not in boxes:
            return item
        kind, fields = boxes[path]
        return linen_leaves.from_leaf(collection, Leaf(item, kind, dict(fields)), active)

    def is_boxed(path: object, _: object) -> bool:
        return path in boxes

    return jax.tree_util.tree_map_with_path(
        box, raw_value(variable), is_leaf=is_boxed, is_leaf_takes_path=True
    )


def is_plain(variable: nnx.Variable[Any]) -> bool:
    """Whether a Variable as a whole has no metadata that Linen would have in a box."""
    own = (_BOXES, DISPLACED_KEY)
    metadata = variable.get_metadata().items()
    return nnx_leaves.says_nothing({key: x for key, x in metadata if key not in own})


def _is_box(value: object) -> bool:
    return isinstance(value, meta.AxisMetadata)
