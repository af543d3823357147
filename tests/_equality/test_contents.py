"""What values hold: equal keys for what holds the same, and for nothing else."""

import argparse
import collections
import dataclasses
import enum
import functools
import gc
import io
import logging
import re
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import bridge
from bridge._equality.contents import contents
from bridge._nnx_in_linen import rebuilding
from tests.drawing import drawing

KEY = jax.random.key(0)


@dataclasses.dataclass
class Config:
    a: object = None
    b: object = None


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a, b):
        self.a, self.b = a, b


class Named(dict):
    pass


class Color(enum.Enum):
    RED = 1
    BLUE = 2


Pair = collections.namedtuple("Pair", "a b")
CONTAINERS = {
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"a": a, "b": b},
    "dict reversed": lambda a, b: {"b": b, "a": a},
    "dict subclass": lambda a, b: Named(a=a, b=b),
    "ordered": lambda a, b: collections.OrderedDict(a=a, b=b),
    "deque": lambda a, b: collections.deque([a, b]),
    "dataclass": Config,
    "slots": Slotted,
    "SimpleNamespace": lambda a, b: types.SimpleNamespace(a=a, b=b),
    "argparse": lambda a, b: argparse.Namespace(a=a, b=b),
    "namedtuple": Pair,
    "partial": lambda a, b: functools.partial(max, a, b=b),
    "types": lambda a, b: types.MappingProxyType({"a": a, "b": b}),
}
SOURCES = (
    "lambda x=DEFAULT, *, k=KEYWORD: (x, k, cell, GLOBAL)",
    "lambda x=DEFAULT, *, k=KEYWORD: (k, x, cell, GLOBAL)",
    "lambda x=DEFAULT, *, k=KEYWORD: [(x, k, cell, GLOBAL) for _ in (0,)][0]",
    "lambda x=DEFAULT, *, k=KEYWORD: (lambda: (x, k, cell, inner()))()",
)
ATOMS = (
    *(0, 1, 1.0, 0.0, -0.0, float("nan"), True, False, None, "", "1", b"1", 1j, complex(0, -0.0)),
    *(
        np.float32(1),
        np.float32("nan"),
        np.int32(1),
        np.dtype("float32"),
        jnp.float32,
        jnp.bfloat16,
    ),
    *(int, float, Color.RED, Color.BLUE, ..., len, jnp.tanh, jax.nn.relu, nnx.Linear, nn.Dense),
    jax.sharding.PartitionSpec("a"),
    jax.sharding.PartitionSpec("b"),
    range(3),
    jax.lax.Precision.HIGHEST,
)
# Values by description, so that one may be made twice and two descriptions may be compared.
atoms = st.integers(0, len(ATOMS) - 1).map(lambda i: ("atom", i))
arrays = st.tuples(st.just("array"), st.sampled_from("if"), st.lists(st.integers(0, 1), max_size=3))
described = st.recursive(
    atoms | arrays,
    lambda inner: (
        st.tuples(st.sampled_from(sorted(CONTAINERS)), inner, inner)
        | st.tuples(st.just("function"), st.sampled_from(SOURCES), inner, inner, inner, inner)
    ),
    max_leaves=6,
)


def make(description):
    """What a description describes, made of new objects."""
    kind, *parts = description
    if kind == "atom":
        return ATOMS[parts[0]]
    if kind == "array":
        return np.array(parts[1], parts[0])
    if kind == "function":
        source, *held = parts
        return function(source, *map(make, held))
    return CONTAINERS[kind](*map(make, parts))


def function(source, default, keyword, cell, held):
    """A function that returns its default, its keyword default, a cell and a global."""
    namespace = {"__name__": "a_program", "DEFAULT": default, "KEYWORD": keyword}
    exec(f"def outer(cell):\n  return {source}\ndef inner():\n  return GLOBAL", namespace)
    namespace["GLOBAL"] = held
    return namespace["outer"](cell)


def described_alike(a, b):
    """Whether two descriptions are of the same; some look different and are not."""
    return repr(a) == repr(b)


@drawing(300)
@given(described, described)
def test_two_values_have_one_key_if_and_only_if_they_hold_the_same(a, b):
    first, again, other = (contents(make(d)) for d in (a, a, b))
    assert first.is_complete
    assert first.key == again.key
    assert hash(first.key) == hash(again.key)
    assert (first.key == other.key) is described_alike(a, b)


def test_no_two_atoms_have_one_key():
    assert len({contents(atom).key for atom in ATOMS}) == len(ATOMS)


class Observing(nnx.Module):
    """Says what its argument was when it was constructed, and what it is now."""

    def __init__(self, argument, *, rngs):
        self.before = observed(argument)
        self.scale = nnx.Param(jnp.ones(()))
        if callable(argument):
            self.argument = argument

    def __call__(self):
        now = observed(self.argument) if hasattr(self, "argument") else None
        return self.before, now


def observed(value):
    """A text of everything that can be read out of a value."""
    if isinstance(value, types.FunctionType):
        return f"function {observed(value())}"
    if isinstance(value, functools.partial):
        return f"partial {observed([value.func, *value.args, value.keywords])}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.tolist()}"
    if isinstance(value, collections.abc.Mapping):
        return f"{type(value)}{[(k, observed(v)) for k, v in value.items()]}"
    if isinstance(value, list | tuple | collections.deque):
        return f"{type(value)}{list(map(observed, value))}"
    if isinstance(value, Config | Slotted | types.SimpleNamespace | argparse.Namespace):
        return f"{type(value)}{observed(value.a)}{observed(value.b)}"
    return f"{type(value)}{value!r}"


def change(value, new):
    """Writes into a value, or into something in it; False if there is nothing to write into."""
    if isinstance(value, Config | Slotted | types.SimpleNamespace | argparse.Namespace):
        if not change(value.a, new):
            value.a = new
    elif isinstance(value, types.FunctionType):
        kind = len(repr(value.__defaults__)) % 4
        if kind == 0:
            value.__defaults__ = (new,)
        elif kind == 1:
            value.__kwdefaults__["k"] = new
        elif kind == 2:
            value.__globals__["GLOBAL"] = new
        else:
            value.__closure__[0].cell_contents = new
    elif isinstance(value, functools.partial):
        return change(value.args[0], new)
    else:
        return False
    return True


@drawing(200)
@given(described, st.lists(described, max_size=2))
def test_the_module_is_that_of_its_argument_as_it_is_at_the_call(description, changes):
    """Every call is compared with native construction and a native call."""
    argument = make(description)
    model = bridge.to_linen(Observing, argument)
    variables = {"params": {"scale": jnp.ones(())}}
    if isinstance(argument, list | dict | np.ndarray | tuple):
        # The wrapper has a copy, as ever.
        changes = []
    for new in [None, *changes]:
        if new is not None:
            change(argument, make(new))
        expected = Observing(argument, rngs=nnx.Rngs(0))()
        assert model.apply(variables) == expected
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rebuilding, "_abstract", None)
            assert model.apply(variables) == expected


def test_what_cannot_be_told_is_never_kept():
    for value in ((i for i in ()), io.StringIO()):
        assert not contents([value]).is_complete
        assert not contents(types.SimpleNamespace(value=value)).is_complete


def test_a_value_of_a_trace_is_never_kept():
    found = []
    jax.eval_shape(lambda x: found.append(contents([x]).is_complete), jnp.ones(()))
    assert found == [False]


def test_too_much_is_not_told():
    deep = ()
    for _ in range(60):
        deep = (deep, deep)
    for value in ([[i] for i in range(30_000)], list(range(300_000)), deep):
        assert not contents([value, [value]]).is_complete
    model = bridge.to_linen(Observing, list(range(300_000)))
    assert model == model.clone()
    assert hash(model) == hash(model.clone())


def test_values_that_hold_themselves_are_told():
    a, b = [], []
    a.append(a)
    b.append([b])
    assert contents(a).key == contents(a).key
    assert contents(a).key != contents(b).key
    space = types.SimpleNamespace()
    space.set = {Slotted}
    space.self = space
    assert contents(space).is_complete


def test_a_list_that_code_only_writes_into_says_nothing_about_it():
    calls, read = [], []

    def act(x):
        calls.append(x)
        return x, read[:]

    before = contents(act).key
    calls.append(1)
    assert contents(act).key == before
    read.append(1)
    assert contents(act).key != before


def test_tools_are_told_by_identity():
    for tool in (logging.getLogger("tests"), threading.Lock(), threading.RLock()):
        assert contents(tool).is_complete
        assert contents(tool).key == contents(tool).key
    assert contents(threading.Lock()).key != contents(threading.Lock()).key


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (re.compile("a"), re.compile("b")),
        (re.compile("a"), re.compile("a", re.IGNORECASE)),
        (collections.defaultdict(list), collections.defaultdict(dict)),
        (collections.Counter("a"), collections.Counter("aa")),
        (nn.Dense(2), nn.Dense(3)),
        (nn.Dense(2), nn.Dense(2, name="a")),
        (nnx.initializers.constant(1), nnx.initializers.constant(1.0)),
        (nnx.initializers.normal(0.1), nnx.initializers.normal(0.2)),
        (slice(1), slice(2)),
        ({1}, {2}),
        (frozenset({1}), {1}),
        ({1}, {True}),
        (np.ones((1, 2)), np.ones((2, 1))),
        (np.array([None]), np.array([0], object)),
        ([].append, [1].append),
    ],
)
def test_values_of_libraries_are_told_by_what_they_hold(a, b):
    assert contents(a).is_complete
    assert contents(b).is_complete
    assert contents(a).key != contents(b).key


def test_equal_values_of_libraries_have_one_key():
    for make_one in (
        lambda: nn.Dense(2, kernel_init=nn.initializers.normal()),
        lambda: nnx.initializers.truncated_normal(0.3),
        lambda: {"a", "b", "c", ("d", 1)},
        lambda: re.compile("a"),
        lambda: np.arange(6).reshape(2, 3).T,
        lambda: collections.defaultdict(list, a=1),
    ):
        assert contents(make_one()).key == contents(make_one()).key


def test_arrays_of_jax_are_told_by_identity_and_are_not_held():
    a, b = jnp.ones(3), jnp.ones(3)
    kept = contents([a]), contents([b])
    keys = [found.key for found in kept]
    assert keys[0] != keys[1]
    assert contents([a]).key == keys[0]
    watched = weakref.ref(a)
    del a, kept
    gc.collect()
    assert watched() is None
    # Another array may get the address of the one that is gone.
    assert all(contents([jnp.ones(3)]).key != keys[0] for _ in range(20))


def test_dicts_are_equal_in_any_order_but_constructors_may_go_by_it():
    a, b = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert contents(a).key != contents(b).key
    assert contents(a, ordered=False).key == contents(b, ordered=False).key

    class InOrder(nnx.Module):
        def __init__(self, sizes, *, rngs):
            self.names = tuple(sizes)

        def __call__(self):
            return self.names

    assert bridge.to_linen(InOrder, a).apply({}) == ("a", "b")
    assert bridge.to_linen(InOrder, b).apply({}) == ("b", "a")


def test_a_wrapper_s_hash_and_equality_follow_what_its_configuration_holds():
    config, other = Config(1), Config(1)
    model, twin = bridge.to_linen(Observing, config), bridge.to_linen(Observing, other)
    assert model == twin
    assert hash(model) == hash(twin)
    other.a = True
    assert model != twin
    sub = type("Sub", (bridge.ToLinen,), {})
    assert sub(Observing, args=(config,)) == sub(Observing, args=(Config(1),))
    assert sub(Observing, args=(config,)) != model


class Knot:
    """Holds sets of others."""

    def __init__(self, others):
        self.others = others


def test_sets_that_share_what_they_hold_are_looked_at_with_one_allowance():
    # Each item of a set is looked at by itself, so there are 2 ** 18 ways to the last knot.
    knot = Knot(frozenset())
    for _ in range(18):
        knot = Knot(frozenset({knot, (knot, 0)}))
    told = contents(knot)
    assert not told.is_complete
    assert contents(Knot(frozenset({1, "a"}))).is_complete


changes = threading.local()


def test_an_attribute_is_not_taken_for_a_global_of_its_name():
    def takes_attribute(config):
        return config.changes

    def reads_global(config):
        return changes

    assert contents(takes_attribute).is_complete
    assert not contents(reads_global).is_complete
