"""Registries: which Variable type a collection has, and which codec a metadata box.

Beside them, what is known of Variable types without one: Flax's table, and types without a pair.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading
import weakref
from collections.abc import Generator, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from flax import nnx
from flax.core import meta

from . import auto
from ._boxes import BoxCodec, derive_codec
from ._errors import (
    InvalidRegistrationError,
    RegistrationConflictError,
    UnknownNameError,
    describe,
)

VariableType: TypeAlias = type[nnx.Variable[Any]]
# For `isinstance`, which otherwise trusts annotations, and narrows to unknown type parameters.
_STR: Any = str
_TYPE: Any = type
_VARIABLE: Any = nnx.Variable
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
        f" that is not in force here; use its model inside `with registry.use(...)` too, or"
        f" register the pair for good with register_variable_name({name!r}, {typ.__name__})"
    )


def check_pair(name: object, typ: object) -> None:
    check_name(name)
    check_type(typ)


def check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidRegistrationError(name, "a collection name, that is a non-empty string")


def check_kind(value: object, kind: type, expected: str) -> None:
    if not isinstance(value, kind):
        raise InvalidRegistrationError(value, expected)


def check_box_type(box_type: object) -> None:
    found = box_type
    if not (isinstance(box_type, type) and issubclass(box_type, meta.AxisMetadata)):
        raise InvalidRegistrationError(found, "a subclass of flax.core.meta.AxisMetadata")


def type_is_taken(name: str, typ: type, taken: object) -> RegistrationConflictError:
    return RegistrationConflictError(
        name,
        typ,
        taken,
        f"the type already belongs to collection {taken!r}; register a subclass of it, or pass"
        " overwrite=True to replace that pair",
    )


def check_type(typ: object) -> None:
    found = typ
    if not (isinstance(typ, type) and issubclass(typ, nnx.Variable)):
        raise InvalidRegistrationError(
            found, "a Variable type, that is a subclass of flax.nnx.Variable"
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
    typ: Any = vars(nnx).get(name)
    is_own = isinstance(typ, _TYPE) and issubclass(typ, _VARIABLE) and typ.__name__ == name
    return typ if is_own else None


@dataclasses.dataclass(frozen=True)
class Registry:
    """An immutable one-to-one table of collection names and Variable types, and of box codecs.

    Example::

      >>> import registry
      >>> from flax import nnx
      >>> class Count(nnx.Variable): ...
      >>> counts = registry.Registry().extend({'counts': Count})
      >>> counts.name_from_type(Count), counts.type_from_name('counts') is Count
      ('counts', True)

    Attributes:
      pairs: Variable type by collection name. A name that is missing is looked up in Flax's own
        table.
      boxes: codec by box type; other boxes get a derived codec.
    """

    pairs: Mapping[str, VariableType] = dataclasses.field(default_factory=dict[str, VariableType])
    boxes: Mapping[type, BoxCodec] = dataclasses.field(default_factory=dict[type, BoxCodec])
    _names: Mapping[VariableType, str] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names: dict[VariableType, str] = {}
        for name, typ in self.pairs.items():
            check_pair(name, typ)
            if typ in names:
                raise type_is_taken(name, typ, names[typ])
            names[typ] = name
        object.__setattr__(self, "pairs", MappingProxyType(dict(self.pairs)))
        object.__setattr__(self, "boxes", MappingProxyType(dict(self.boxes)))
        object.__setattr__(self, "_names", names)

    def __hash__(self) -> int:
        return hash((frozenset(self.pairs.items()), frozenset(self.boxes.items())))

    def extend(
        self,
        pairs: Mapping[str, VariableType] | None = None,
        boxes: Mapping[type, BoxCodec] | None = None,
        *,
        overwrite: bool = False,
    ) -> Registry:
        """A registry with more pairs and codecs.

        Args:
          pairs: Variable type by collection name.
          boxes: codec by box type; a codec replaces the one that is there.
          overwrite: whether a pair replaces those that its name or its type are in.

        Returns:
          A new registry; this one stays as it is.

        Raises:
          InvalidRegistrationError: a name is not a non-empty string, a type not a Variable type, or
            a codec not a `BoxCodec` for a box type.
          RegistrationConflictError: a name or a type is taken and `overwrite` is false.
        """
        merged = dict(self.pairs)
        for name, typ in (pairs or {}).items():
            check_pair(name, typ)
            if not overwrite:
                Registry(merged).require_free(name, typ)
            merged = {n: t for n, t in merged.items() if n != name and t is not typ}
            merged[name] = typ
        codecs = dict(self.boxes)
        for box_type, codec in (boxes or {}).items():
            check_kind(codec, BoxCodec, "a registry.BoxCodec")
            check_box_type(box_type)
            codecs[box_type] = codec
        return Registry(merged, codecs)

    def require_free(self, name: str, typ: VariableType) -> None:
        """Checks that a pair would not take a name or a type from another pair.

        Args:
          name: a collection's name.
          typ: a Variable type.

        Raises:
          RegistrationConflictError: the name or the type is taken.
        """
        found = self._owner(name)
        if found is not None and not same_definition(found, typ):
            raise RegistrationConflictError(
                name,
                typ,
                found,
                f"the collection already belongs to {describe(found)}; choose another name, or"
                " pass overwrite=True to replace that pair",
            )
        taken = self._registered_name(typ)
        if taken not in (None, name):
            raise type_is_taken(name, typ, taken)

    def _owner(self, name: str) -> VariableType | None:
        """The type that a collection was registered for, here or in Flax."""
        found = self.pairs.get(name) or flax_type(name)
        # A type that was made on demand makes way for a registered one.
        if found is None or auto.collection_of(found) is not None:
            return None
        # Flax cannot unregister a name, so it is free if its type has another collection here.
        return found if self._registered_name(found) == name else None

    def _registered_name(self, typ: VariableType) -> str | None:
        return self._names.get(typ) or flax_name(typ)

    def type_from_name(self, name: str, *, create: bool = True) -> VariableType:
        """The Variable type of a collection.

        Args:
          name: the collection's name.
          create: whether a name that nobody registered gets a type of its own
            (`registry.auto.<name>`).

        Returns:
          The registered type; else Flax's; else the unregistered type that was put in a collection
          of this name; else the automatic one.

        Raises:
          InvalidRegistrationError: `name` is not a string.
          UnknownNameError: nobody registered the name, it has no automatic type yet, and `create`
            is false.
        """
        if not isinstance(name, _STR):
            raise InvalidRegistrationError(name, "a collection name, that is a string")
        typ = self._owner(name)
        if typ is None and create:
            typ = self._derived_type(name) or auto.for_collection(name)
        typ = typ or auto.found(name)
        if typ is None:
            raise UnknownNameError(name, "register its Variable type with register_variable_name")
        return typ

    def _derived_type(self, name: str) -> VariableType | None:
        """The type that goes to this collection because the class is called so."""
        candidates = (derived.get(name), flax_class(name))
        return next((t for t in candidates if t and self._registered_name(t) is None), None)

    def name_from_type(self, typ: VariableType, *, create: bool = True) -> str:
        """The collection of a Variable type.

        Args:
          typ: a subclass of `nnx.Variable`. Its parents' collections are not its own.
          create: whether a type that nobody registered goes to the collection named after the
            class.

        Returns:
          The collection's name.

        Raises:
          InvalidRegistrationError: `typ` is not a Variable type.
          UnknownNameError: nobody registered the type and `create` is false; or only a registry
            that `use` put in force earlier knows the type.
          RegistrationConflictError: the collection named after the class belongs to another type.
        """
        check_type(typ)
        # After a notebook cell ran twice, models still hold the first definition of a registered
        # class.
        name = (
            self._registered_name(typ)
            or auto.collection_of(typ)
            or redefined.get(definition_name(typ))
        )
        if name is not None:
            return name
        scoped = scoped_names.get(typ)
        is_settled = derived.get(typ.__name__) is typ or flax_class(typ.__name__) is typ
        if scoped is not None and not is_settled:
            # Raise: a default here would differ from the collection of its model's variables.
            # Types of Flax's own are excepted, as models that know nothing of that registry have
            # them too.
            raise UnknownNameError(typ, out_of_scope_remedy(scoped, typ))
        if not create:
            raise UnknownNameError(typ, "register its collection with register_variable_name")
        return self._derive_name(typ)

    def _derive_name(self, typ: VariableType) -> str:
        name = typ.__name__
        with lock:
            found = self._owner(name) or self._derived_type(name)
            if found is None or same_definition(found, typ):
                derived[name] = typ
                return name
        raise RegistrationConflictError(
            name,
            typ,
            found,
            f"the collection named after the class belongs to {describe(found)}; give the type a"
            f" collection of"
            f" its own, for instance register_variable_name('{typ.__module__}.{name}', {name})",
        )

    def codec_for(self, box_type: type) -> BoxCodec:
        """The codec of a box type: the registered one of the nearest parent, else a derived one.

        Args:
          box_type: a subclass of `AxisMetadata`.

        Returns:
          The codec. One registered for a parent serves only that parent, as its constructor need
          not fit the subclass.

        Raises:
          UnsupportedBoxError: no codec is registered and none can be derived.
        """
        return self.boxes.get(box_type) or derive_codec(box_type)


class Default:
    """The default registry; registering a codec replaces the value. Its pairs are Flax's table."""

    registry = Registry()


_scoped: contextvars.ContextVar[Registry | None] = contextvars.ContextVar("registry", default=None)


def current() -> Registry:
    """The registry in force: the innermost `use`, else the default one."""
    return _scoped.get() or Default.registry


@contextlib.contextmanager
def use(registry: Registry) -> Generator[Registry]:
    """Puts a registry in force for this thread and task, until the block ends.

    Args:
      registry: the registry; `current().extend(…)` keeps what is registered.

    Yields:
      The registry.

    Raises:
      InvalidRegistrationError: `registry` is not a `Registry`.

    Example::

      >>> import registry
      >>> from flax import nnx
      >>> class Visits(nnx.Variable): ...
      >>> with registry.use(registry.current().extend({'visits': Visits})):
      ...   registry.variable_name_from_type(Visits)
      'visits'

      Outside of the block nobody knows the type:

      >>> registry.variable_name_from_type(Visits)
      Traceback (most recent call last):
      registry._errors.UnknownNameError: Variable type ... is not registered; it has collection
      'visits' in the registry ...
    """
    check_kind(registry, Registry, "a registry.Registry")
    for name, typ in registry.pairs.items():
        scoped_names[typ] = name
    token = _scoped.set(registry)
    try:
        yield registry
    finally:
        _scoped.reset(token)
