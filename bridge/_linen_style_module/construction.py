"""Constructs a `bridge.Module`: its fields, its name, its parent, its keys."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from flax import nnx

from bridge._errors import DeclarationError
from bridge._module_calls.calls import LinenStyle, joined
from bridge._module_calls.scope import as_rngs

from .attributes import IS_SETUP
from .submodules import auto_name, place_submodule

# Says that a constructor was given no `parent`; None stands for a module that stands alone.
UNSET: Any = object()


class ModuleMeta(type(nnx.Module)):
    """Takes `name`, `parent` and `rngs` of a constructor, and gives a submodule its place."""

    bridge__has_own_init: bool

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        parameters: Any = getattr(cls, "__dataclass_fields__", {})
        if cls.bridge__has_own_init:
            parameters = inspect.signature(cls.__init__).parameters
        parent = UNSET if "parent" in parameters else kwargs.pop("parent", UNSET)
        rngs = None if "rngs" in parameters else kwargs.pop("rngs", None)
        name = kwargs.get("name") if "name" in parameters else kwargs.pop("name", None)
        if name is not None and not isinstance(name, str):
            raise DeclarationError.of_argument(cls.__name__, "name as a str", name)
        module: Any = super().__call__(*args, **kwargs)
        if rngs is not None:
            streams = as_rngs(rngs, cls.__name__)
            module.bridge__rngs = streams.fork() if isinstance(rngs, nnx.Rngs) else streams
        return placed(module, name, parent)

    def _pytree_meta_construct(cls, self: Any, *args: object, **kwargs: object) -> None:
        vars(self)[IS_SETUP] = False
        super()._pytree_meta_construct(self, *args, **kwargs)


def with_fields(cls: Any, *, kw_only: bool) -> None:
    """Makes the annotations of a class fields of a dataclass."""
    own_base = next(base for base in cls.__mro__ if "bridge__is_lazy" in vars(base))
    for name in inspect.get_annotations(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), None)
        if owner in own_base.__mro__:
            # Else a method of Linen or NNX, such as `train`, would be the default of the field.
            setattr(cls, name, dataclasses.field())
    dataclasses.dataclass(repr=False, kw_only=kw_only)(cls)
    # A dataclass that compares by value is not hashable, and NNX needs its nodes to be.
    cls.__hash__ = object.__hash__


def placed(module: LinenStyle, name: str | None, parent: object) -> Any:
    """Makes a module a submodule of the one that is being called, unless it is to stand alone."""
    record = joined()
    if parent is None or (record is None and parent is UNSET):
        return module
    if parent is not UNSET:
        record = record and record.call.find(parent)
        if record is None:
            expected = "parent=None or a bridge.Module that is being called"
            raise DeclarationError.of_argument(type(module).__name__, expected, parent)
    if record is None or (record.in_setup and name is None):
        # In setup it gets its name when it is assigned.
        return module
    if not record.is_declaring:
        what = f"Submodule {type(module).__name__}"
        raise DeclarationError.of_place(what, type(record.module).__name__)
    return place_submodule(record, name or auto_name(record, type(module)), module)
