"""Defines the errors of a registry, and the root of every error of both packages.

::

    BridgeError(Exception)
    └── RegistryError(ValueError)
        ├── RegistrationConflictError   a name or a type is already taken
        ├── InvalidRegistrationError    not a name, not a Variable type (also a TypeError)
        ├── UnknownNameError            nobody registered the name or the type (also a KeyError)
        └── UnsupportedBoxError         a metadata box that cannot be carried (also a TypeError)
"""

from __future__ import annotations

from typing import Any


class BridgeError(Exception):
    """Root of the errors that `registry` and `bridge` raise on purpose."""

    def __init__(self, *args: object):
        # Not `super()`: Flax's errors, which some are as well, write messages of their own.
        Exception.__init__(self, *args)

    def __reduce__(self) -> Any:
        # The message is made of the constructor's arguments, so it cannot be passed in again.
        return _restore, (type(self), self.args, self.__dict__)


class RegistryError(BridgeError, ValueError):
    """A registration or a look-up is not possible."""


class RegistrationConflictError(RegistryError):
    """A collection name or a Variable type is already paired with another one.

    Attributes:
      name: the collection name of the refused pair.
      typ: the Variable type of the refused pair.
      found: what the name or the type is paired with today.
    """

    def __init__(self, name: str, typ: type, found: object, remedy: str):
        self.name = name
        self.typ = typ
        self.found = found
        super().__init__(
            f"cannot pair collection {name!r} with Variable type {describe(typ)}: {remedy}"
        )


class InvalidRegistrationError(RegistryError, TypeError):
    """A registry was given something that is not a name, a Variable type or a codec.

    Attributes:
      found: the refused object.
      expected: what the argument has to be.
    """

    def __init__(self, found: object, expected: str):
        self.found = found
        self.expected = expected
        super().__init__(f"expected {expected}, found {found!r} of type {describe(type(found))}")


class UnknownNameError(RegistryError, KeyError):
    """Nobody registered this collection name or this Variable type.

    Attributes:
      wanted: the name or the type that was looked up.
    """

    def __init__(self, wanted: object, remedy: str):
        self.wanted = wanted
        self._message = f"{_show(wanted)} is not registered; {remedy}"
        super().__init__(self._message)

    def __str__(self) -> str:
        # KeyError would print the repr of its argument.
        return self._message


class UnsupportedBoxError(RegistryError, TypeError):
    """A metadata box cannot be taken apart and put together again.

    Attributes:
      box_type: the type of the box.
    """

    def __init__(self, box_type: type, reason: str):
        self.box_type = box_type
        super().__init__(
            f"metadata box {describe(box_type)} cannot cross the bridge: {reason}; register how"
            f" it becomes"
            f" (value, fields) and back with registry.register_box({box_type.__name__},"
            f" to_fields, from_fields)"
        )


def _restore(cls: type[BridgeError], args: tuple[Any, ...], fields: dict[str, Any]) -> BridgeError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(fields)
    return error


def describe(typ: type) -> str:
    """The full name of a type, so that two types of one name can be told apart."""
    return f"{typ.__module__}.{typ.__qualname__}"


def _show(wanted: object) -> str:
    if isinstance(wanted, type):
        return f"Variable type {describe(wanted)}"
    return f"collection {wanted!r}"
