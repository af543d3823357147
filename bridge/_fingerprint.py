"""Fingerprints: which constructor is meant, and what a definition holds.

Equal fingerprints mean the same; others may mean the same too, and then something is made once
more. A fingerprint says what a value is and not where it lies, so it keeps nothing of a model
alive:

- containers and objects by what they hold now, with the order of their items, and with types and
  signs: 1, 1.0 and True differ, as do the two zeros;
- functions by code, defaults, closure cells and attributes, and methods by function and owner. What
  they look up elsewhere (globals, attributes of classes) is not told;
- classes, arrays and what Python cannot look into by identity while they live.

In what a constructor has made, arrays are told by their bytes: each run makes others, and those
that are drawn with another key are not the same. A class that no imported module holds is told by
its name, and beside the key.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import logging
import struct
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict
from jax.core import Tracer

from bridge._flax.objects import DATA_ATTRIBUTES, ObjectState

T = TypeVar("T")


class ByValue(weakref.ref[Any]):
    """Stands for an object that its own `==` tells, and does not keep it alive."""


_ATOMS = frozenset({int, bool, str, bytes, type(None), type(Ellipsis), types.CodeType, range})
_ATOMS |= {ByValue}
# Immutable, and compared by value.
_VALUES = (
    np.dtype,
    jax.Device,
    jax.ShapeDtypeStruct,
    jax.sharding.AbstractMesh,
    jax.sharding.Mesh,
    jax.sharding.PartitionSpec,
    jax.sharding.Sharding,
)
# A larger array is told by identity, so that no call takes longer for it.
_MOST_BYTES = 1 << 16
# Beyond this, all that is left is told by identity.
_MOST_PARTS = 1_000_000
# A set may hold itself, by way of an object in it.
_DEEPEST_SET = 3


class Fingerprint(NamedTuple):
    """What a value held when it was looked at (`key`).

    `identities` are numbers for the arrays and objects in it that are compared by identity.
    """

    key: tuple[Any, ...]
    identities: tuple[Any, ...]


class Look:
    """One look at a value and everything in it, without recursion.

    `made` says whether a constructor has made the value. `ordered` says whether the order of a dict
    with names counts, which a constructor may go by. To Python, dicts are equal in any order.

    `objects` is all that was met but numbers, texts and tuples, in an order that is the same for
    equal fingerprints; it leaves out what is in sets.
    """

    def __init__(self, value: object, *, made: bool = False, ordered: bool = True, depth: int = 0):
        self._made = made
        self._ordered = ordered
        self._depth = depth
        self._key: list[Any] = []
        self._pending: list[Any] = [value]
        self._identities: list[Any] = []
        self.objects: list[Any] = []
        self._run()
        self.fingerprint = Fingerprint(tuple(self._key), tuple(self._identities))

    def _run(self) -> None:
        key, pending = self._key, self._pending
        # What was met is kept alive, so that its id stays its own.
        seen: dict[int, tuple[int, Any]] = {}
        while pending:
            value = pending.pop()
            kind = type(value)
            if kind in _ATOMS:
                key += (kind, value)
            elif kind is float or kind is complex:
                # As text, the zeros differ and NaN equals itself.
                key += (kind, float.hex(value.real), float.hex(value.imag))
            elif len(key) + len(pending) > _MOST_PARTS:
                key += map(identity, (value, *pending))
                return
            elif kind is tuple:
                key += (tuple, len(value))
                pending += value
            elif (met := seen.get(id(value))) is not None:
                key += (Look, met[0])
            else:
                seen[id(value)] = len(seen), value
                self._tell(kind, value)

    def _tell(self, kind: type, value: Any) -> None:
        read = _PARTS.get(kind)
        if read is None and isinstance(value, np.generic):
            self._key += (kind, value.dtype, value.tobytes())
            return
        if read is None and isinstance(value, _VALUES):
            self._key += (kind, value)
            return
        if kind not in _IMMUTABLE:
            self.objects.append(value)
        if kind is set or kind is frozenset:
            self._set(value)
        elif read is not None:
            if kind in _DICTS and not self._ordered and all(type(name) is str for name in value):
                value = {name: value[name] for name in sorted(value)}
                read = _items
            # As `_hold` does, which takes its time.
            parts = tuple(read(value))
            self._key += (kind, len(parts))
            self._pending += parts
        elif kind is types.FunctionType:
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, jax.Array | np.ndarray | jax.Ref):
            self._array(value)
        else:
            self._object(kind, value)

    def _hold(self, kind: type, parts: Iterable[Any]) -> None:
        parts = tuple(parts)
        self._key += (kind, len(parts))
        self._pending += parts

    def _itself(self, value: object) -> None:
        self._identities.append(identity(value))
        self._key += (Fingerprint, identity(type(value)))
        own = getattr(value, "__dict__", None)
        # What `jax.jit` makes has the function in it.
        self._pending.append(own.get("__wrapped__") if type(own) is dict else None)

    def _function(self, value: types.FunctionType) -> None:
        scope = value.__globals__
        home = sys.modules.get(str(scope.get("__name__")))
        if getattr(home, "__dict__", None) is not scope:
            # One that `exec` made looks names up elsewhere than another of the same code.
            self._identities.append(identity(value))
        names = value.__code__, value.__module__, value.__qualname__
        by_name = tuple((value.__kwdefaults__ or {}).items())
        own = tuple(value.__dict__.items())
        cells = map(_in_cell, value.__closure__ or ())
        self._hold(types.FunctionType, (*names, value.__defaults__, by_name, own, *cells))

    def _set(self, value: Iterable[Any]) -> None:
        """A set's items have no order, so each is looked at by itself."""
        if self._depth == _DEEPEST_SET:
            self._itself(value)
            return
        options = {"made": self._made, "ordered": self._ordered, "depth": self._depth + 1}
        found = [Look(item, **options).fingerprint for item in value]
        self._key += (type(value), frozenset(each.key for each in found))
        self._identities.append(frozenset(found))

    def _class(self, value: type) -> None:
        if not self._made or is_of_module(value):
            self._key += (type, identity(value))
        else:
            self._key += (type, value.__module__, value.__qualname__)
            self._identities.append(identity(value))

    def _array(self, value: jax.Array | np.ndarray | jax.Ref) -> None:
        if isinstance(value, np.ndarray):
            is_plain = type(value) is np.ndarray and not value.dtype.hasobject
            is_told = is_plain and (self._made or value.nbytes <= _MOST_BYTES)
        elif isinstance(value, Tracer | jax.Ref):
            is_told = False
        else:
            is_told = self._made and value.is_fully_addressable and not value.is_deleted()
        if is_told:
            self._key += (jax.Array, isinstance(value, np.ndarray), *_digest(value))
        else:
            self._itself(value)

    def _object(self, kind: type, value: object) -> None:
        held: dict[str, Any] | None = None
        if is_of_module(value):
            self._key += (types.ModuleType, identity(value))
            return
        if isinstance(value, nn.Module):
            # Its internal state has a number that differs for every module.
            names = [n for n in value.__dataclass_fields__ if n != "parent" and hasattr(value, n)]
            # What a constructor has made of a bound one may hold its variables.
            if value.scope is None or not self._made:
                held = {name: getattr(value, name) for name in names}
        elif isinstance(value, nnx.Variable):
            if not value.ref and not value.hijax:
                held = {"": value.get_raw_value(), **value.get_metadata()}
        elif (base := _noted(_bases, kind, _base)) and not isinstance(value, logging.Logger):
            state: Any = object.__getstate__(value)
            in_dict, in_slots = state if type(state) is tuple else (state, None)
            own = {**(in_dict or {}), **(in_slots or {})}
            # NNX notes in it what happens to a module.
            held = {name: x for name, x in own.items() if type(x) is not ObjectState}
            read = _PARTS[base]
            held[""] = tuple(read(value)) if read else ()
        if held is None:
            self._itself(value)
        else:
            self._key.append(tuple(held))
            self._hold(object, (kind, *held.values()))


def fingerprint(value: object, *, ordered: bool = True) -> Fingerprint:
    """The fingerprint of a value as it is now; `ordered` as for `Look`."""
    return Look(value, ordered=ordered).fingerprint


def is_of_module(value: Any) -> bool:
    """Whether an imported module holds the value under its own name."""
    try:
        name = getattr(value, "__qualname__", None) or value.__name__
        found = sys.modules[value.__module__]
        for part in name.split("."):
            found = getattr(found, part)
    except Exception:
        # A class of the user says what its instances have.
        return False
    return found is value


def told_by(cls: type, parts: Callable[[Any], Iterable[Any]]) -> None:
    """Says what tells instances of a class of this package apart."""
    _PARTS[cls] = parts


def _items(value: Mapping[Any, Any]) -> tuple[Any, ...]:
    return *value, *value.values()


def _referent(value: Any) -> tuple[Any, ...]:
    """What a weak reference or a proxy refers to; nothing if that is gone."""
    try:
        return (value() if isinstance(value, weakref.ref) else value.__reduce_ex__.__self__,)
    except ReferenceError:
        return ()


def _in_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return Look


# What objects of a type, and of classes derived from it, hold beside their attributes; without the
# methods that a class of its own may have instead.
_PARTS: dict[type, Callable[[Any], Iterable[Any]] | None] = {
    **dict.fromkeys((object, types.SimpleNamespace)),
    **dict.fromkeys((FrozenDict, types.MappingProxyType), _items),
    **{kind: lambda value: (frozenset(value),) for kind in (set, frozenset)},
    list: list.__iter__,
    tuple: tuple.__iter__,
    dict: lambda value: (*dict.keys(value), *dict.values(value)),
    collections.OrderedDict: lambda value: tuple(collections.OrderedDict.items(value)),
    collections.defaultdict: lambda value: (value.default_factory, *dict.items(value)),
    collections.deque: lambda value: (value.maxlen, *collections.deque.__iter__(value)),
    str: lambda value: (str.__str__(value),),
    bytes: lambda value: (bytes.__bytes__(value),),
    int: lambda value: (int.__int__(value),),
    float: lambda value: (float.__float__(value),),
    complex: lambda value: (complex.__complex__(value),),
    DATA_ATTRIBUTES: lambda value: (*(names := tuple(value)), *map(value.__getitem__, names)),
    functools.partial: lambda value: (
        value.func,
        value.args,
        tuple(value.keywords.items()),
        tuple(vars(value).items()),
    ),
    types.MethodType: lambda value: (value.__func__, value.__self__),
    **dict.fromkeys((weakref.ref, *weakref.ProxyTypes), _referent),
    slice: lambda value: (value.start, value.stop, value.step),
    property: lambda value: (value.fget, value.fset, value.fdel),
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    jax.tree_util.PyTreeDef: lambda value: (
        value.num_nodes,
        value.num_leaves,
        value.node_data(),
        tuple(value.children()),
    ),
}
_DICTS = frozenset({dict, FrozenDict})
_IMMUTABLE = frozenset({FrozenDict, DATA_ATTRIBUTES, jax.tree_util.PyTreeDef})


def _base(cls: type) -> type | None:
    """The built-in base of a class; None if its instances hold something that only C code can see.

    As in `pickle`, this is so if an instance is larger than what Python itself has put into it.
    """
    base = next(b for b in cls.__mro__ if b in _PARTS)
    own = [vars(owner).values() for owner in cls.__mro__ if owner not in _PARTS]
    pointers = sum(type(x) is types.MemberDescriptorType for x in itertools.chain(*own))
    has_dict = cls.__dictoffset__ != 0 and not cls.__flags__ & _MANAGED_DICT
    pointers += has_dict and not base.__dictoffset__
    pointers += cls.__weakrefoffset__ > 0 and not base.__weakrefoffset__
    is_seen = cls.__basicsize__ <= base.__basicsize__ + pointers * _POINTER
    return base if is_seen and cls is not object else None


_MANAGED_DICT = 1 << 4
_POINTER = struct.calcsize("P")


def _digest(array: Any) -> tuple[Any, ...]:
    kind = str(array.dtype), array.shape, getattr(array, "weak_type", False)
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():
            array = jax.random.key_data(array)
    return *kind, hashlib.sha256(np.asarray(array).tobytes()).digest()


# By id, for what need not be hashable, and as looking up by weak references takes longer.
_identities: dict[int, tuple[weakref.ref[Any], int]] = {}
_bases: dict[int, tuple[weakref.ref[Any], type | None]] = {}
_counter = itertools.count()


def identity(value: object) -> Any:
    """What belongs to one object for good."""
    try:
        return _noted(_identities, value, lambda _: next(_counter))
    except TypeError:
        # What cannot be referred to weakly is held; methods are equal by the owner's identity.
        return types.MethodType(id, value)


def _noted(
    notes: dict[int, tuple[weakref.ref[Any], T]], value: object, make: Callable[[Any], T]
) -> T:
    """What is noted of an object while it lives."""
    key = id(value)
    found = notes.get(key)
    if found is not None and found[0]() is value:
        return found[1]

    def forget(ref: weakref.ref[Any]) -> None:
        if key in notes and notes[key][0] is ref:
            del notes[key]

    made = make(value)
    notes[key] = weakref.ref(value, forget), made
    return made
