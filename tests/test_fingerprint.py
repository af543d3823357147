"""Fingerprints: equal for what holds the same, and for nothing else."""

import argparse
import collections
import dataclasses
import enum
import functools
import gc
import io
import logging
import random
import re
import threading
import types
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict
from hypothesis import given
from hypothesis import strategies as st

from bridge._fingerprint import Look, fingerprint, is_of_module
from tests.drawing import drawing

SHIFT = 1


@dataclasses.dataclass
class Config:
    a: object = None
    b: object = None


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a, b):
        self.a, self.b = a, b

    def method(self):
        return self.a


class Named(dict):
    pass


class Pair(NamedTuple):
    a: object
    b: object


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def add(x, y=0):
    return x + y


CONTAINERS = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"a": a, "b": b},
    "dict reversed": lambda a, b: {"b": b, "a": a},
    "dict of its own": lambda a, b: Named(a=a, b=b),
    "ordered": lambda a, b: collections.OrderedDict(a=a, b=b),
    "frozen": lambda a, b: FrozenDict(a=a, b=b),
    "default": lambda a, b: collections.defaultdict(list, a=a, b=b),
    "deque": lambda a, b: collections.deque([a, b]),
    "dataclass": Config,
    "slots": Slotted,
    "namespace": lambda a, b: types.SimpleNamespace(a=a, b=b),
    "argparse": lambda a, b: argparse.Namespace(a=a, b=b),
    "named tuple": Pair,
    "partial": lambda a, b: functools.partial(add, a, y=b),
    "view": lambda a, b: types.MappingProxyType({"a": a, "b": b}),
    "method": lambda a, b: Slotted(a, b).method,
    "slice": slice,
    "linen": lambda a, b: nn.Dense(2, kernel_init=a, bias_init=b),
    "closure": lambda a, b: lambda: (a, b),
    "defaults": lambda a, b: lambda x=a, *, y=b: (x, y),
    "attributes": lambda a, b: with_attributes(lambda x: x, a, b),
}


def with_attributes(function, a, b):
    function.a, function.b = a, b
    return function


ATOMS = (
    *(0, 1, 1.0, 0.0, -0.0, float("nan"), float("inf"), True, False, None, "", "1", b"1", ...),
    *(1j, complex(0, -0.0), np.float32(1), np.float32("nan"), np.int32(1), np.dtype("float32")),
    *(int, float, Color, Color.RED, Color.BLUE, Config, nnx.Linear, nn.Dense, jnp.float32),
    *(len, add, jnp.tanh, jax.nn.relu, nnx.initializers.zeros, np.add, jax.lax.Precision.HIGHEST),
    *(jax.sharding.PartitionSpec("a"), jax.sharding.PartitionSpec("b"), range(3), (), frozenset()),
)
# Values by description, so that one can be made twice and two descriptions can be compared.
described = st.recursive(
    st.integers(0, len(ATOMS) - 1).map(lambda i: ("atom", i))
    | st.tuples(st.just("array"), st.sampled_from("if"), st.lists(st.integers(0, 1), max_size=3)),
    lambda inner: st.tuples(st.sampled_from(sorted(CONTAINERS)), inner, inner),
    max_leaves=6,
)


def make(description):
    """What a description describes, made of new objects."""
    kind, *parts = description
    if kind == "atom":
        return ATOMS[parts[0]]
    if kind == "array":
        return np.array(parts[1], parts[0])
    return CONTAINERS[kind](*map(make, parts))


@drawing(150)
@given(described, described)
def test_two_values_have_one_fingerprint_if_and_only_if_they_hold_the_same(a, b):
    first, again, other = (fingerprint(make(d)) for d in (a, a, b))
    assert first == again
    assert hash(first) == hash(again)
    assert (first == other) is (a == b)
    made, again, other = (Look(make(d), made=True).fingerprint for d in (a, a, b))
    assert made == again
    assert (made == other) is (a == b)


def test_no_two_atoms_have_one_fingerprint():
    assert len({fingerprint(atom) for atom in ATOMS}) == len(ATOMS)


@drawing(100)
@given(described, st.sampled_from(["dataclass", "slots", "namespace", "argparse"]), described)
def test_a_configuration_is_told_as_it_is_now(a, kind, b):
    config = CONTAINERS[kind](make(a), None)
    nested = [lambda: config.a, (config,)]
    before = fingerprint(nested)
    config.b = make(b)
    assert (fingerprint(nested) == before) is (b == ("atom", ATOMS.index(None)))
    config.b = None
    assert fingerprint(nested) == before


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (re.compile("a"), re.compile("b")),
        (collections.defaultdict(list), collections.defaultdict(dict)),
        (collections.deque([1]), collections.deque([1], maxlen=3)),
        (nn.Dense(2), nn.Dense(2, name="a")),
        (nnx.initializers.constant(1), nnx.initializers.constant(1.0)),
        ({1}, {2}),
        ({1}, {True}),
        (frozenset({1}), {1}),
        ({("a", 1)}, {("a", 1.0)}),
        (np.ones((1, 2)), np.ones((2, 1))),
        (np.array([None]), np.array([0], object)),
        ([].append, [1].append),
        (random.Random(0), random.Random(1)),
        (types.MethodType(add, 1), types.MethodType(add, 2)),
        (jnp.ones(3), jnp.ones(3)),
        (np.ones(1 << 20), np.ones(1 << 20)),
        (threading.Lock(), threading.Lock()),
        (iter([1]), iter([1])),
        (object(), object()),
        (io.StringIO(), io.StringIO()),
    ],
)
def test_what_holds_something_else_or_cannot_be_looked_into_differs(a, b):
    assert fingerprint(a) == fingerprint(a)
    assert fingerprint([a]) != fingerprint([b])


def test_equal_values_of_libraries_have_one_fingerprint():
    for make_one in (
        lambda: nn.Dense(2, kernel_init=nn.initializers.normal()),
        lambda: nnx.initializers.truncated_normal(0.3),
        lambda: {"a", "b", "c", ("d", 1), frozenset({"e"})},
        lambda: np.arange(6).reshape(2, 3).T,
        lambda: jax.tree.structure({"a": [1, 2]}),
        lambda: property(add),
    ):
        assert fingerprint(make_one()) == fingerprint(make_one())


def test_what_a_function_looks_up_elsewhere_is_not_told(monkeypatch):
    def shifted(x):
        return x + SHIFT + Config.a

    before = fingerprint(shifted)
    monkeypatch.setitem(globals(), "SHIFT", 2)
    monkeypatch.setattr(Config, "a", 3)
    assert fingerprint(shifted) == before


def test_functions_of_one_code_in_two_namespaces_differ():
    def defined(factor):
        namespace = {"__name__": "a_program", "FACTOR": factor}
        exec("def act(x):\n  return x * FACTOR", namespace)
        return namespace["act"]

    one, other = defined(1), defined(2)
    assert fingerprint(one) == fingerprint(one) != fingerprint(other)


def test_functions_are_told_by_defaults_and_cells_as_they_are_now():
    def counting():
        calls = 0

        def act(x=1, *, y=2):
            nonlocal calls
            calls += 1
            return act, x, y, calls

        return act

    one, other = counting(), counting()
    assert fingerprint(one) == fingerprint(other)
    one()
    assert fingerprint(one) != fingerprint(other)
    other()
    assert fingerprint(one) == fingerprint(other)
    one.__kwdefaults__["y"] = 2.0
    assert fingerprint(one) != fingerprint(other)


def test_a_cell_may_be_unset():
    def unset():
        def act():
            return later

        if False:
            later = 1
        return act

    assert fingerprint(unset()) == fingerprint(unset())


def local_class(held):
    class Local(Config):
        value = held

        def method(self):
            return super().a, held

    return Local


def test_a_local_class_is_one_for_a_constructor_and_told_beside_the_key():
    one, twin = local_class(1), local_class(1)
    assert fingerprint(one) == fingerprint(one) != fingerprint(twin)
    told, again = (Look(cls(), made=True).fingerprint for cls in (one, twin))
    assert told != again
    assert told.key == again.key


def test_arrays_that_a_constructor_has_made_are_told_by_their_bytes():
    for same, other in (
        (lambda: jnp.arange(3), jnp.arange(3.0)),
        (lambda: np.arange(1 << 20), np.arange(1, 1 + (1 << 20))),
        (lambda: jax.random.key(1), jax.random.key(2)),
    ):
        a, b, c = (Look([x], made=True).fingerprint for x in (same(), same(), other))
        assert a == b != c


def test_what_cannot_be_looked_into_is_told_beside_the_key():
    one, twin, other = jax.jit(lambda x: x), jax.jit(lambda x: x), jax.jit(lambda x: x + 1)
    keys = [Look(x, made=True).fingerprint.key for x in (one, one, other)]
    assert keys[0] == keys[1] != keys[2]
    assert fingerprint(one) != fingerprint(twin)


def test_values_that_hold_themselves_end():
    a, b = [], []
    a.append(a)
    b.append([b])
    assert fingerprint(a) == fingerprint(a) != fingerprint(b)
    space = types.SimpleNamespace()
    space.set = {Slotted, Knot({1})}
    space.me = [space]
    assert fingerprint(space) == fingerprint(space)


class Knot:
    """Holds sets of others."""

    def __init__(self, others):
        self.others = others


def test_a_set_may_hold_itself_and_share_what_it_holds():
    knot = Knot(frozenset())
    for _ in range(18):
        knot = Knot(frozenset({knot, (knot, 0)}))
    assert fingerprint(knot) == fingerprint(knot)
    own = Knot(set())
    own.others.add(own)
    assert fingerprint(own) == fingerprint(own)


def test_depth_and_size_have_no_limit():
    deep, wide = 1, list(range(30_000))
    for _ in range(10_000):
        deep = [(deep,)]
    assert fingerprint(deep) == fingerprint(deep)
    assert fingerprint(wide) == fingerprint(wide[:]) != fingerprint(wide[:-1])
    knotted = ()
    for _ in range(60):
        knotted = knotted, knotted
    assert fingerprint([knotted]) == fingerprint([knotted])


def test_a_fingerprint_holds_nothing_of_a_model():
    array, config, table = jnp.ones(3), Config(1), np.ones(1 << 20)

    act, local = CONTAINERS["closure"](array, config), local_class(array)
    kept = fingerprint([array, config, table, act, local, local(), iter([])])
    watched = [weakref.ref(x) for x in (array, config, table, act, local)]
    del array, config, table, act, local
    gc.collect()
    assert [ref() for ref in watched] == [None] * 5
    # Another array may get the address of the one that is gone.
    assert all(fingerprint(jnp.ones(3)).identities[0] not in kept.identities for _ in range(9))


def test_a_value_of_a_trace_is_told_by_identity():
    found = []
    jax.eval_shape(lambda x, y: found.extend(map(fingerprint, (x, x, y))), 1.0, 1.0)
    assert found[0] == found[1] != found[2]


def test_the_order_of_a_dict_counts_to_a_constructor_alone():
    a, b = {"a": 1, "b": [{}]}, {"b": [{}], "a": 1}
    assert fingerprint(a) != fingerprint(b)
    assert fingerprint(a, ordered=False) == fingerprint(b, ordered=False)


def test_objects_have_an_order_that_equal_fingerprints_share():
    looks = [Look([Config([1]), CONTAINERS["closure"](1, Color.RED), {1}]) for _ in range(2)]
    assert looks[0].fingerprint == looks[1].fingerprint
    kinds = [[type(x) for x in look.objects] for look in looks]
    assert kinds[0] == kinds[1]
    assert {Config, list, types.FunctionType, Color} <= set(kinds[0])


@pytest.mark.parametrize("value", [add, Config, len, jax.nn.relu, nnx.Linear, Slotted.method])
def test_what_a_module_holds_under_its_own_name_is_of_that_module(value):
    assert is_of_module(value)


class Answering:
    """Has whatever it is asked for."""

    def __getattr__(self, name):
        raise KeyError(name)


def test_all_else_is_of_none():
    values = local_class(1), lambda: 1, Config(), Answering(), 3, None
    assert not any(map(is_of_module, values))


def test_tools_are_told_by_identity():
    logger = logging.getLogger("tests")
    before = fingerprint(logger)
    logger.isEnabledFor(logging.INFO)
    assert fingerprint(logger) == before != fingerprint(logging.getLogger("tests.other"))
