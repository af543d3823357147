"""What is known of Variable types besides registries: Flax's table, and types without a pair."""

from __future__ import annotations

import threading
import weakref
from typing import Any, TypeAlias, TypeVar

from flax import nnx
from flax.core import meta

from ._errors import (
    InvalidRegistrationError,
    RegistrationConflictError,
)

VariableType: TypeAlias = type[nnx.Variable[Any]]
T = TypeVar("T", bound=VariableType)

# Unregistered types by the collection that they were put in, to find the type of that collection.
derived: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
# The collections that Variable types have, or had, in registries that `use` put in force.
scoped_names: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
# Collections by the definition of the class that was registered for them.
redefined: dict[tuple[str, str], str] = {}
lock = threading.RLock()


def out_of_scope_remedy(name: str, typ: type) -> str:
    pair = f"{{{name!r}: {typ.__name__}}}"
    return (
        f"it has collection {name!r} in the registry {pair} that registry.use had put in force and"
        f" that is not in force here; use its model inside of `with registry.use(...)` too, or"
        f" register the pair for good with register_variable_name({name!r}, {typ.__name__})"
    )


def check_pair(name: Any, typ: Any) -> None:
    check_name(name)
    check_type(typ)


def check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidRegistrationError(name, "a collection name, that is a non-empty string")


def check_box_type(box_type: Any) -> None:
    if not (isinstance(box_type, type) and issubclass(box_type, meta.AxisMetadata)):
        raise InvalidRegistrationError(box_type, "a subclass of flax.core.meta.AxisMetadata")


def type_is_taken(name: str, typ: type, taken: object) -> RegistrationConflictError:
    return RegistrationConflictError(
        name,
        typ,
        taken,
        f"the type already belongs to collection {taken!r}; register a subclass of it, or pass"
        " overwrite=True to replace that pair",
    )


def check_type(typ: Any) -> None:
    if not (isinstance(typ, type) and issubclass(typ, nnx.Variable)):
        raise InvalidRegistrationError(
            typ, "a Variable type, that is a subclass of flax.nnx.Variable"
        )


def same_definition(a: type, b: type) -> bool:
    """Whether two classes are one class, or one definition that ran twice."""
    return a is b or definition_name(a) == definition_name(b)


def definition_name(typ: type) -> tuple[str, str]:
    return typ.__module__, typ.__qualname__


def flax_type(name: str) -> VariableType | None:
    try:
        return nnx.variable_type_from_name(name)
    except ValueError:
        return None


def flax_name(typ: VariableType) -> str | None:
    try:
        return nnx.variable_name_from_type(typ)
    except ValueError:
        return None


def flax_class(name: str) -> VariableType | None:
    """A Variable type of Flax's own that has no collection there, such as RngKey."""
    # Not getattr: flax.nnx makes some attributes on demand, with a warning.
    typ = vars(nnx).get(name)
    is_own = isinstance(typ, type) and issubclass(typ, nnx.Variable) and typ.__name__ == name
    return typ if is_own else None
