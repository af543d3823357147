"""What a value holds at this moment, as a key that is equal for values that hold the same.

Keys distinguish constructors and their arguments. They hold names, numbers and code, and numbers in
place of objects, so a key keeps no part of a model alive.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from . import tell_functions, tell_values
from .walk import MOST_PARTS, MOST_VALUES, TELL, TELL_INSTANCES, Teller, Walk

TELL.update(tell_functions.BY_TYPE)
TELL.update(tell_values.BY_TYPE)
TELL_INSTANCES += [*tell_functions.BY_PARENT, *tell_values.BY_PARENT]


class Contents(NamedTuple):
    """What a value held when it was looked at.

    Attributes:
      key: equal for values that hold the same.
      identities: numbers for the objects in it that may be written into. Two values may hold the
        same now, and not after one of them was called.
      objects: what was met on the way, in an order that is the same for equal keys.
      is_complete: whether the key covers everything. If not, equal keys from two moments prove
        nothing.
      opaque: numbers for the objects in it that Python cannot look into, of something that was
        made; their types are in the key.
    """

    key: tuple[Any, ...]
    identities: tuple[int, ...]
    objects: list[Any]
    is_complete: bool
    opaque: tuple[int, ...] = ()

    @property
    def origin(self) -> Origin:
        """The part to store in a GraphDef."""
        return Origin(self.key, self.identities, self.is_complete)


class Origin(NamedTuple):
    """What a module was constructed from, without the objects themselves.

    Attributes:
      key: as in `Contents`.
      identities: as in `Contents`.
      is_complete: as in `Contents`.
      constructed: the GraphDef of the module before a call gave it another one, None if none did.
    """

    key: tuple[Any, ...]
    identities: tuple[int, ...]
    is_complete: bool
    constructed: Any = None

    def is_still(self, now: Contents) -> bool:
        """Whether the constructor and its arguments are the same objects and hold the same."""
        return self.is_equal(now) and self.identities == now.identities

    def is_equal(self, now: Contents) -> bool:
        """Whether the constructor and its arguments hold the same, possibly in other objects."""
        return self.is_complete and now.is_complete and self.key == now.key


def contents(
    value: Any, *, calls: bool = False, ordered: bool = True, made: bool = False
) -> Contents:
    """What a value holds at this moment.

    Functions are told by code, defaults, closure cells and the globals that the code names, through
    other functions, methods and modules; objects by type and contents; arrays of JAX by identity;
    NumPy arrays, which may be written into, by a digest of their bytes.

    Args:
      value: anything.
      calls: whether all methods of NNX modules count, and not those alone that construct.
      ordered: whether the order of a dict counts, which a constructor may go by. To Python, dicts
        are equal in any order.
      made: whether a constructor made the value, which another run of it makes of other objects.
        Then functions are told without the globals that they name, which are looked up when they
        run, arrays of JAX by a digest, and objects that Python cannot look into in `opaque`.

    Returns:
      The contents. They are incomplete if there is a value of an ongoing trace, or something that
      Python cannot look into, or too much of it.
    """
    # A definition is as large as its model.
    most = {"most_values": 10 * MOST_VALUES, "most_parts": 10 * MOST_PARTS} if made else {}
    walk = Walk(calls=calls or made, ordered=ordered, made=made, **most)
    walk.run(value)
    return Contents(
        tuple(walk.key),
        tuple(walk.identities),
        walk.objects,
        walk.is_complete,
        tuple(walk.opaque),
    )


def tell_by(cls: type, teller: Teller) -> None:
    """Says how instances of a class of this package are told."""
    TELL[cls] = teller
