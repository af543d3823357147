"""NNX Variables <-> the neutral form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax
from flax import linen as nn
from flax import nnx

import registry
from bridge._errors import ConversionError, path_text
from bridge._flax.variables import (
    REQUIRED_METADATA,
    class_hooks,
    raw_value,
    variable_from_metadata,
    variable_maker,
)
from bridge._types import Variable, VariableType

from .collections import ARRAYS
from .neutral import Address, Displaced, Leaf, Neutral, Path, is_mapping, place, unplace
from .nnx_meta import NNXMeta

BOX_KEY = "linen_meta_type"
# How far a Variable is from its Linen path; only on Variables with colliding paths.
DISPLACED_KEY = "linen_displaced"
# Which fields an NNXMeta had that somebody made by hand; one that was made of a Variable has them
# all.
FIELDS_KEY = "linen_fields"

# What is at a path of a State: a Variable, or an array in none.
StateItem: TypeAlias = Variable | jax.Array
_MODULE: Any = (nnx.Pytree, nn.Module)


def from_leaves(items: Iterable[tuple[Path, StateItem]]) -> Neutral:
    """The leaves of a State or a module, by (collection, path).

    Raises:
      ConversionError: a module among the leaves, or two Variables for one place.
      RegistrationConflictError: two unregistered Variable types have the same name.
    """
    active = registry.current()
    neutral: Neutral = {}
    for path, item in items:
        if isinstance(item, _MODULE):
            raise ConversionError(
                f"{'/'.join(map(str, path))} is a {type(item).__name__} module and not a Variable;"
                " give the module itself, or its state with nnx.state"
            )
        address = address_of(path, item, active)
        if address in neutral:
            raise two_at(*address)
        leaf = to_leaf(item, active)
        is_bare = address == (ARRAYS, path) and leaf.box is None and not leaf.is_empty
        if is_bare and isinstance(item, nnx.Variable):
            # A bare value in this collection would come back without its Variable.
            leaf = Leaf(leaf.value, NNXMeta, _own_metadata(item))
        neutral[address] = leaf
    return neutral


def two_at(collection: str, path: Path) -> ConversionError:
    """The error of two Variables for one place."""
    return ConversionError(
        f"two Variables would be {path_text(collection, path)} in Linen; rename one of them"
    )


def to_leaves(
    neutral: Neutral, occupied: Iterable[Path] = (), *, all_variables: bool = False
) -> dict[Path, Any]:
    """The inverse of `from_leaves`: Variables (and bare arrays) by path.

    `occupied` has the paths of leaves that are already in the tree. With `all_variables`, bare
    arrays become Variables, as in a ToNNX: its Variables are Linen's, its other attributes are not.
    """
    active = registry.current()
    types = {name: active.type_from_name(name) for name in {name for name, _ in neutral}}
    # Nearly all leaves are bare, and what makes their Variable is asked once for each collection.
    makers = {name: variable_maker(kind, bare_metadata()) for name, kind in types.items()}
    leaves: dict[Path, Any] = {}
    for address, (target, displaced) in place(neutral, occupied).items():
        collection, leaf = address[0], neutral[address]
        if leaf.box is not None or displaced is not None:
            leaves[target] = from_leaf(types[collection], leaf, displaced)
        elif collection == ARRAYS and not leaf.is_empty and not all_variables:
            leaves[target] = leaf.value
        else:
            leaves[target] = makers[collection](leaf.value)
    return leaves


def address_of(path: Path, item: StateItem, active: registry.Registry) -> Address:
    """The (collection, path) of a Variable or bare array."""
    if not isinstance(item, nnx.Variable):
        return ARRAYS, path
    collection = active.name_from_type(item.var_type)
    return collection, unplace(path, item.get_metadata(DISPLACED_KEY, None))


def to_leaf(item: StateItem, active: registry.Registry, *, boxed_as_is: bool = False) -> Leaf:
    """A Variable or bare array in the neutral form.

    With `boxed_as_is`, a Variable that came out of a Linen box goes back into a box of that type
    even if it has metadata by now that the box cannot hold. Without it such a Variable gets an
    `NNXMeta`, which loses nothing.
    """
    if not isinstance(item, nnx.Variable):
        return Leaf(item)
    value = raw_value(item)
    metadata = _own_metadata(item)
    own = metadata.pop(FIELDS_KEY, None)
    if own is not None:
        implied = REQUIRED_METADATA | class_hooks(item.var_type)
        fields = {k: v for k, v in metadata.items() if k in own or k not in implied}
        return Leaf(value, NNXMeta, fields)
    box_type = metadata.get(BOX_KEY)
    if box_type is not None:
        names = active.codec_for(box_type).names
        extra = REQUIRED_METADATA | {BOX_KEY}
        fields = {k: v for k, v in metadata.items() if k not in extra}
        if (
            boxed_as_is
            or names is None
            or says_nothing({k: fields[k] for k in fields if k not in names})
        ):
            return Leaf(value, box_type, fields)
    elif not _needs_box(item.var_type, value, metadata):
        return Leaf(value)
    return Leaf(value, NNXMeta, metadata)


def from_leaf(var_type: VariableType, leaf: Leaf, displaced: Displaced | None = None) -> Variable:
    """The Variable of a leaf; the inverse of `to_leaf`.

    An annotated value is not sharded here: it may be abstract, and there may be no mesh.
    """
    metadata = dict(leaf.fields)
    if leaf.box is None:
        metadata.update(bare_metadata())
    elif leaf.box is not NNXMeta:
        metadata[BOX_KEY] = leaf.box
    elif not metadata.keys() >= REQUIRED_METADATA or not (
        _needs_box(var_type, leaf.value, metadata)
        or registry.current().name_from_type(var_type) == ARRAYS
    ):
        metadata[FIELDS_KEY] = tuple(sorted(metadata))
    if displaced is not None:
        metadata[DISPLACED_KEY] = displaced
    return variable_from_metadata(var_type, leaf.value, metadata)


def bare_metadata() -> dict[str, Any]:
    """What a Variable without a box has besides what every Variable has."""
    return {"eager_sharding": nnx.using_eager_sharding()}


def metadata_with(variable: Variable, leaf: Leaf) -> dict[str, Any]:
    """The metadata of a Variable that gets another leaf; what says how it holds a value stays."""
    before = variable.get_metadata()
    new = from_leaf(variable.var_type, leaf, before.get(DISPLACED_KEY)).get_metadata()
    return {**new, **{key: before[key] for key in REQUIRED_METADATA}}


def _own_metadata(variable: Variable) -> dict[str, Any]:
    metadata = variable.get_metadata()
    metadata.pop(DISPLACED_KEY, None)
    return metadata


def _needs_box(var_type: VariableType, value: object, metadata: Mapping[str, Any]) -> bool:
    """Whether the leaf needs its Variable: a bare mapping would be read as a subtree."""
    if not metadata.keys() <= REQUIRED_METADATA:
        hooks = {hook: getattr(var_type, hook) for hook in class_hooks(var_type)}
        told = {k: v for k, v in metadata.items() if k not in hooks or v is not hooks[k]}
        if not says_nothing(told):
            return True
    return not isinstance(value, jax.Array) and is_mapping(type(value)) and bool(value)


def says_nothing(metadata: Mapping[str, Any]) -> bool:
    """Whether metadata holds no more than what every Variable has."""
    return all(
        # By type first: an array cannot be compared with a tuple.
        key in REQUIRED_METADATA or value is None or (type(value) is tuple and not value)
        for key, value in metadata.items()
    )
