"""The attributes of a `bridge.Module`: its own, those that are other names, those that are free."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from flax import nnx
from flax.core import FrozenDict

from bridge._conversion.linen_holder import IS_SETUP as IS_SETUP
from bridge._flax.objects import CAPTURES, is_data_attribute, is_note

# The attributes in which a module keeps what is neither a field nor a variable nor a submodule.
MODULE_PREFIX = "bridge__"
NAMES = "bridge__names"
PRIORITIES = "bridge__priorities"


class AttrPriority(enum.IntEnum):
    """Which of several attributes gives the variables of a shared module their path in Linen.

    The smallest one does, in `init`, `apply` and `variables`. In `nnx.state` it is the first name,
    as for every NNX module: `nnx.merge` hands out leaves in the order of names.

    Source: flax/nnx/bridge/module.py:AttrPriority @ 0.12.8
    """

    HIGH = 0
    INIT_PARENT = 20
    DEFAULT = 50
    LOW = 100


class Ref(NamedTuple):
    """Stands for the attribute of that name."""

    name: str


def is_reserved_name(name: str) -> bool:
    """Whether an attribute belongs to the bridge or to NNX, and not to the model."""
    return name.startswith(MODULE_PREFIX) or is_note(name) or name in ("scope", CAPTURES)


def is_free(module: Any, name: str) -> bool:
    """Whether a variable can live in an attribute of this name."""
    return not (
        name in vars(module)
        or is_reserved_name(name)
        or name in names_of(module)
        or hasattr(type(module), name)
    )


def put(module: Any, name: str, value: Any) -> None:
    """Sets an attribute as NNX does, also one that has been static until now."""
    is_static = name in vars(module) and not is_data_attribute(module, name)
    if is_static and nnx.is_data(value):
        value = nnx.data(value)
    nnx.Module.__setattr__(module, name, value)


def names_of(module: Any) -> Mapping[str, Any]:
    """The attributes that are other names of submodules and variables, or containers of them."""
    return dict(vars(module).get(NAMES, ()))


def set_name(module: Any, name: str, structure: Any) -> None:
    """Makes an attribute stand for others.

    Args:
      module: the module.
      name: the attribute.
      structure: a `Ref`, or tuples and FrozenDicts with `Ref`s and values without state in them.
    """
    names = {**names_of(module), name: structure}
    nnx.Module.__setattr__(module, NAMES, tuple(sorted(names.items())))


def drop_name(module: Any, name: str) -> None:
    """Takes back `set_name`."""
    names = {n: structure for n, structure in names_of(module).items() if n != name}
    nnx.Module.__setattr__(module, NAMES, tuple(sorted(names.items())))


def resolved(structure: Any, attribute: Callable[[str], Any]) -> Any:
    """A structure of `set_name` with the attributes in the place of their names."""
    if isinstance(structure, Ref):
        return attribute(structure.name)
    if isinstance(structure, tuple):
        items = [resolved(item, attribute) for item in structure]
        return type(structure)(*items) if hasattr(structure, "_fields") else tuple(items)
    if isinstance(structure, FrozenDict):
        return FrozenDict({key: resolved(item, attribute) for key, item in structure.items()})
    return structure


def frozen_value(value: Any) -> Any:
    """Lists as tuples and dicts as FrozenDicts, as Linen keeps them; hashable, if the items are."""
    return replaced(value, lambda suffix, item: item)


def container_parts(value: Any, suffix: str = "") -> Iterator[tuple[str, Any]]:
    """(suffix of the name that Linen gives it, item) of everything in nested containers."""
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from container_parts(item, f"{suffix}_{index}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from container_parts(item, f"{suffix}_{key}")
    else:
        yield suffix, value


def replaced(value: Any, replace: Callable[[str, Any], Any], suffix: str = "") -> Any:
    """Frozen containers with other items; `replace` gets what `container_parts` yields."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(
            *(replaced(item, replace, f"{suffix}_{i}") for i, item in enumerate(value))
        )
    if isinstance(value, list | tuple):
        return tuple(replaced(item, replace, f"{suffix}_{i}") for i, item in enumerate(value))
    if isinstance(value, Mapping):
        return FrozenDict({k: replaced(x, replace, f"{suffix}_{k}") for k, x in value.items()})
    return replace(suffix, value)
