"""The functions that act on the default registry, and look up in the one in force."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, overload

from flax import nnx

from . import auto
from ._boxes import BoxCodec
from ._registry import (
    Default,
    T,
    VariableType,
    check_box_type,
    check_name,
    check_type,
    current,
    definition_name,
    flax_name,
    lock,
    redefined,
)

_MISSING: Any = object()


@overload
def register_variable_name(name: str, typ: T, *, overwrite: bool = False) -> T: ...
@overload
def register_variable_name(name: str, *, overwrite: bool = False) -> Callable[[T], T]: ...
def register_variable_name(name: str, typ: Any = _MISSING, *, overwrite: bool = False) -> Any:
    """Pairs a collection with a Variable type in the default registry and in Flax's own table.

    Args:
      name: the collection's name.
      typ: the Variable type; without it the call is a class decorator.
      overwrite: whether the pair replaces those that the name or the type are in.

    Returns:
      The Variable type, or a decorator that returns it.

    Raises:
      InvalidRegistrationError: not a name, or not a Variable type.
      RegistrationConflictError: the name or the type is taken and `overwrite` is false. The same
        pair twice is fine, and so is the same class defined again (a notebook cell that runs
        twice).

    Example::

      >>> import registry
      >>> from flax import nnx
      >>> @registry.register_variable_name('moments')
      ... class Moment(nnx.Variable): ...
      >>> registry.variable_type_from_name('moments') is Moment
      True

    Source: flax/nnx/variablelib.py:register_variable_name @ 0.12.8
    """
    check_name(name)
    if typ is _MISSING:

        def decorate(decorated: T) -> T:
            register_variable_name(name, decorated, overwrite=overwrite)
            return decorated

        return decorate
    check_type(typ)
    with lock:
        if not overwrite:
            Default.registry.require_free(name, typ)
        old = flax_name(typ)
        if old not in (None, name):
            # Flax has no way to unregister a name.
            nnx.register_variable_name(old, auto.for_collection(old), overwrite=True)
        # Programs ask Flax for the pair too. What was checked above may replace what is there.
        nnx.register_variable_name(name, typ, overwrite=True)
        for key in [k for k, n in redefined.items() if n == name]:
            del redefined[key]
        redefined[definition_name(typ)] = name
    return typ


def register_variable_name_type_pair(name: str, typ: T, overwrite: bool = False) -> T:
    """`register_variable_name` under the name that the bridge guide uses.

    Args:
      name: the collection's name.
      typ: the Variable type.
      overwrite: whether the pair replaces those that the name or the type are in.

    Returns:
      The Variable type.

    Raises:
      InvalidRegistrationError: not a name, or not a Variable type.
      RegistrationConflictError: the name or the type is taken and `overwrite` is false.
    """
    return register_variable_name(name, typ, overwrite=overwrite)


def register_box(
    box_type: type,
    to_fields: Callable[[Any], tuple[Any, Mapping[str, Any]]],
    from_fields: Callable[[Any, Mapping[str, Any]], Any],
) -> None:
    """Registers in the default registry how boxes of a type become (value, fields) and back.

    Args:
      box_type: a subclass of `AxisMetadata`.
      to_fields: box -> (value, fields); the fields become metadata of the NNX Variable.
      from_fields: (value, fields) -> an equal box.

    Raises:
      InvalidRegistrationError: `box_type` is not a box type, or a codec is not a pair of functions.
    """
    check_box_type(box_type)
    codec = BoxCodec(to_fields, from_fields)
    with lock:
        Default.registry = Default.registry.extend(boxes={box_type: codec})


def variable_type_from_name(name: str, *, create: bool = False) -> VariableType:
    """The Variable type of a collection in the registry in force; see `Registry.type_from_name`.

    Args:
      name: the collection's name.
      create: whether a name that nobody knows gets a type (`registry.auto.<name>`), as it does
        where the wrappers meet it.

    Returns:
      The Variable type.

    Raises:
      InvalidRegistrationError: `name` is not a string.
      UnknownNameError: nobody knows the name and `create` is false.

    Source: flax/nnx/variablelib.py:variable_type_from_name @ 0.12.8
    """
    return current().type_from_name(name, create=create)


def variable_name_from_type(typ: VariableType, *, create: bool = False) -> str:
    """The collection of a Variable type in the registry in force; see `Registry.name_from_type`.

    Args:
      typ: a subclass of `nnx.Variable`.
      create: whether a type that nobody knows gets the collection named after the class, as it
        does where the wrappers meet it.

    Returns:
      The collection's name.

    Raises:
      InvalidRegistrationError: `typ` is not a Variable type.
      UnknownNameError: nobody knows the type and `create` is false, or only a registry that is
        not in force knows it.

    Source: flax/nnx/variablelib.py:variable_name_from_type @ 0.12.8
    """
    return current().name_from_type(typ, create=create)
