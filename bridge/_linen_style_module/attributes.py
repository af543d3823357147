"""Keeps what lives in an attribute of a `bridge.Module`, and what a read of it returns.

Submodules and Variables are its parts. A part lives in the attribute of its Linen name, whatever
else the class calls by that name. Where a read returns something else, `bridge__names` says what.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Iterator
from typing import Any, TypeAlias, TypeGuard

import jax
from flax import nnx

from bridge._conversion.linen_attributes import IS_SETUP as IS_SETUP
from bridge._errors import NameInUseError
from bridge._flax.objects import CAPTURES, attributes_of, is_data_attribute, is_note
from bridge._module_calls import SCOPE as SCOPE
from bridge._types import Variable

from .containers import items_within

# A plain dict holds the variables of a submodule that is not there yet. One that a model assigns
# becomes a FrozenDict.
Part: TypeAlias = nnx.Pytree | Variable | dict[str, Any]

# The attributes in which a module keeps what is neither a field nor a variable nor a submodule.
MODULE_PREFIX = "bridge__"
NAMES = "bridge__names"
REPLACED = "bridge__replaced"
_VALUE = "bridge__value_of_"
PRIORITIES = "bridge__priorities"


class AttrPriority(enum.IntEnum):
    """The order in which several attributes may give a shared module its path in Linen.

    In `init`, `apply` and `variables` the attribute with the smallest value gives the path. In
    `nnx.state` it is the first name, as for every NNX module, because `nnx.merge` hands out leaves
    in the order of names.

    Source: flax/nnx/bridge/module.py:AttrPriority @ 0.12.8
    """

    HIGH = 0
    INIT_PARENT = 20
    DEFAULT = 50
    LOW = 100


@dataclasses.dataclass(frozen=True)
class Ref:
    """Stands for the attribute of that name."""

    name: str


# Stands for the class's own member with the name of a part.
OF_CLASS = Ref("")


def value_ref(name: str) -> Ref:
    """Stands for data beside the part of that name, or for what `setup` makes in each call."""
    return Ref(f"{_VALUE}{name}")


def is_reserved_name(name: str) -> bool:
    """Whether an attribute belongs to the bridge or to NNX, and not to the model."""
    return name.startswith(MODULE_PREFIX) or is_note(name) or name == CAPTURES


def is_part(value: object) -> TypeGuard[Part]:
    """Whether a value is a submodule or a Variable, or holds variables of a later submodule."""
    return isinstance(value, nnx.Pytree | nnx.Variable | dict)


def has_room(module: nnx.Pytree, name: str) -> bool:
    """Whether a part can live in an attribute: no other one does."""
    return not is_reserved_name(name) and not is_part(vars(module).get(name))


def put_part(module: nnx.Pytree, name: str, part: Part) -> None:
    """Puts a submodule or a Variable into the attribute of its Linen name.

    As in Linen, a read still returns a value or a class member with this name, until `drop_name`
    says otherwise. Raises NameInUseError if the class has a property of this name.
    """
    own, kind = attributes_of(module), type(module)
    if is_property(kind, name):
        raise NameInUseError("submodule or variable", name, kind.__name__)
    if name not in names_of(module):
        if name in own and not is_part(own[name]):
            set_name(module, name, stand_in(module, name, own[name]))
        elif name not in own and (hasattr(kind, name) or name == "name"):
            set_name(module, name, OF_CLASS)
    put(module, name, part)


def is_property(kind: type, name: str) -> bool:
    """Whether a class, and not its instances, decides what an attribute is set to."""
    return hasattr(inspect.getattr_static(kind, name, None), "__set__")


def put_plain(module: nnx.Pytree, name: str, value: object, *, keeps_part: bool) -> None:
    """Sets an attribute to a value that is not a part.

    A part of that name stays if reads have not returned it so far, or with `keeps_part`.
    """
    if is_part(vars(module).get(name)) and (keeps_part or name in names_of(module)):
        set_name(module, name, stand_in(module, name, value))
    else:
        drop_name(module, name)
        put(module, name, nnx.data(value) if _has_data(value) else value)


def stand_in(module: nnx.Pytree, name: str, value: object) -> Any:
    """What stands for a value in a structure of `set_name`.

    It is the value itself, or its `value_ref` if it is data.
    """
    if not _has_data(value):
        return value
    ref = value_ref(name)
    put(module, ref.name, nnx.data(value))
    return ref


def _has_data(value: object) -> bool:
    # NNX takes the arrays of a trace for static.
    return any(nnx.is_data(x) or isinstance(x, jax.Array) for x in jax.tree.leaves(value))


def put(module: nnx.Pytree, name: str, value: object) -> None:
    """Sets an attribute as NNX does, also one that has been static until now."""
    is_static = name in vars(module) and not is_data_attribute(module, name)
    if isinstance(value, dict) or (is_static and nnx.is_data(value)):
        value = nnx.data(value)
    nnx.Pytree.__setattr__(module, name, value)


def names_of(module: nnx.Pytree) -> dict[str, Any]:
    """What a read of an attribute returns, for those that hold no value or another one."""
    return dict(attributes_of(module).get(NAMES, ()))


def set_name(module: nnx.Pytree, name: str, structure: object) -> None:
    """Says what a read of an attribute returns.

    `structure` is a `Ref`, containers with these and values without state in them, or such a value
    itself.
    """
    names = {**names_of(module), name: structure}
    nnx.Pytree.__setattr__(module, NAMES, tuple(sorted(names.items())))


def drop_name(module: nnx.Pytree, name: str) -> None:
    """Takes back `set_name`."""
    names = names_of(module)
    if name in names:
        del names[name]
        nnx.Pytree.__setattr__(module, NAMES, tuple(sorted(names.items())))


def refs(structure: object) -> Iterator[str]:
    """The names of the attributes in a structure of `set_name`."""
    return (item.name for _, item in items_within(structure) if isinstance(item, Ref))


def held_by(module: nnx.Pytree, name: str) -> Any:
    """What an attribute holds: a value, a part, or a structure of `set_name`."""
    return names_of(module).get(name, attributes_of(module).get(name))


def priorities_of(module: nnx.Pytree) -> dict[str, int]:
    """What `set_priority` has set, by attribute."""
    return dict(attributes_of(module).get(PRIORITIES, ()))


def set_priority(module: nnx.Pytree, name: str, value: int) -> None:
    """Says how far an attribute is from giving a shared module its path."""
    priorities = {**priorities_of(module), name: int(value)}
    vars(module)[PRIORITIES] = tuple(sorted(priorities.items()))
