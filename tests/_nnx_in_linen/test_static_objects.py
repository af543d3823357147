"""`ToLinen`: Python objects that a module holds as static attributes and a call writes into."""

import collections
import dataclasses
import functools
import types
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge

KEY = jax.random.key(0)
X = jnp.ones((2, 3))


@dataclasses.dataclass
class Counts:
    n: int = 1000
    log: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Slotted:
    n: int = 1000


@dataclasses.dataclass(frozen=True)
class Frozen:
    log: collections.deque[int] = dataclasses.field(default_factory=lambda: collections.deque([1]))


class Plain:
    def __init__(self):
        self.inner = types.SimpleNamespace(log=[0])
        self.owner = self


class OwnList(list[int]):
    pass


class OwnDict(dict[int, int]):
    pass


class WantsArguments(dict[str, int]):
    """Its constructor cannot be called without arguments, nor can its items be set twice."""

    def __new__(cls, width):
        return super().__new__(cls)

    def __init__(self, width):
        super().__init__(width=width)

    def __setitem__(self, key, value):
        if key in self:
            raise KeyError(key)
        super().__setitem__(key, value)


class Number(int):
    """A number with an attribute."""

    n = 0


class Named(NamedTuple):
    log: list[int]


def more(counts):
    counts.n += 1


KINDS = {
    "deque": (lambda: collections.deque([1], maxlen=3), lambda s: s.append(len(s)), sum),
    "defaultdict": (
        lambda: collections.defaultdict(int),
        lambda s: s.update(a=s["a"] + 1),
        lambda s: s["a"],
    ),
    "OrderedDict": (
        lambda: collections.OrderedDict(a=1, b=2),
        lambda s: s.move_to_end(next(iter(s))),
        lambda s: next(iter(s.values())),
    ),
    "Counter": (collections.Counter, lambda s: s.update(["a"]), lambda s: s["a"]),
    "bytearray": (bytearray, lambda s: s.append(2), sum),
    "dataclass": (Counts, more, lambda s: s.n),
    "slots": (Slotted, more, lambda s: s.n),
    "frozen": (Frozen, lambda s: s.log.append(2), lambda s: sum(s.log)),
    "list in dataclass": (Counts, lambda s: s.log.append(2), lambda s: sum(s.log)),
    "namespace": (lambda: types.SimpleNamespace(n=0), more, lambda s: s.n),
    "object": (Plain, lambda s: s.owner.inner.log.append(1), lambda s: sum(s.inner.log)),
    "list of its own": (lambda: OwnList([1]), lambda s: s.append(1), sum),
    "dict of its own": (
        lambda: OwnDict({1: 1}),
        lambda s: s.update({len(s) + 1: 2}),
        lambda s: sum(s.values()),
    ),
    "with arguments": (
        lambda: WantsArguments(2),
        lambda s: s.update({f"k{len(s)}": 1}),
        lambda s: sum(s.values()),
    ),
    "number": (lambda: Number(3), more, lambda s: s + s.n),
    "in a tuple": (
        lambda: (collections.deque([1]), 2),
        lambda s: s[0].append(1),
        lambda s: sum(s[0]),
    ),
    "in a list": (lambda: [Counts()], lambda s: more(s[0]), lambda s: s[0].n),
    "in a dict": (
        lambda: {"a": Plain()},
        lambda s: s["a"].inner.log.append(1),
        lambda s: len(s["a"].inner.log),
    ),
    "named tuple": (lambda: Named([1]), lambda s: s.log.append(1), lambda s: sum(s.log)),
    "new object": (
        Plain,
        lambda s: setattr(s, "other", Counts(n=getattr(s, "other", Counts()).n + 1)),
        lambda s: s.other.n,
    ),
    "removed": (
        lambda: types.SimpleNamespace(a=1, b=2, c=3),
        lambda s: delattr(s, next(iter(vars(s)))),
        lambda s: len(vars(s)),
    ),
}


class Holder(nnx.Module):
    """Writes into an object that its submodule holds too, and computes with what that holds."""

    def __init__(self, kind, *, rngs):
        make, self.write, self.read = KINDS[kind]
        self.held = nnx.static(make())
        self.part = Part(self.held)
        self.w = nnx.Param(jnp.eye(3))

    def __call__(self, x):
        self.write(self.held)
        return x @ self.w[...] * (self.read(self.held) + self.read(self.part.held))


class Part(nnx.Module):
    def __init__(self, held):
        self.held = nnx.static(held)


def quiet(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bridge.BridgeWarning)
        return function(*args, **kwargs)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_a_call_writes_into_belongs_to_that_call(kind, compiled):
    model = bridge.to_linen(Holder, kind)
    variables = model.init(KEY, X)
    wanted = Holder(kind, rngs=nnx.Rngs(KEY))(X)
    for _ in range(3):
        # The definition need not be hashable, so it is closed over.
        apply = functools.partial(model.apply, variables)
        output = quiet(jax.jit(apply) if compiled else apply, X)
        assert (output == wanted).all()
    assert (quiet(model.apply, {"params": variables["params"]}, X) == wanted).all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_a_call_writes_into_is_threaded_with_the_definition(kind):
    native = Holder(kind, rngs=nnx.Rngs(KEY))
    model = bridge.to_linen(Holder, kind)
    variables = model.init(KEY, X)
    for _ in range(2):
        output, updates = model.apply(variables, X, mutable=["nnx"])
        variables = {**variables, **updates}
        assert (output == native(X)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_a_call_writes_into_is_said_to_be_lost(kind):
    model = bridge.to_linen(Holder, kind)
    variables = model.init(KEY, X)
    strict = model.clone(strict=True)
    with pytest.raises(bridge.LostUpdateError, match="held"):
        strict.apply(variables, X)
    native = Holder(kind, rngs=nnx.Rngs(KEY))
    assert (quiet(model.apply, variables, X) == native(X)).all()


def test_a_call_that_fails_takes_back_what_it_wrote():
    counts = Counts()

    class Failing(nnx.Module):
        def __init__(self, counts):
            self.counts = counts

        def __call__(self, fails):
            self.counts.n += 1
            if fails:
                raise ValueError("on purpose")
            return self.counts.n

    model = bridge.to_linen(Failing, counts)
    variables = model.init(KEY, False)
    with pytest.raises(ValueError, match="on purpose"):
        model.apply(variables, True)
    assert counts == Counts()
    assert quiet(model.apply, variables, False) == 1001


def test_an_object_that_a_call_only_reads_is_the_one_that_was_given():
    class Settings:
        def __init__(self):
            self.width = 3

        @functools.cached_property
        def area(self):
            return self.width**2

    settings = Settings()

    class Reads(nnx.Module):
        def __init__(self, settings: Any):
            self.settings = settings

        def __call__(self):
            return self.settings is settings, self.settings.area

    model = bridge.ToLinen(Reads, (settings,), strict=True)
    assert model.apply(model.init(KEY)) == (True, 9)
    # What a property has computed stays.
    assert "area" in vars(settings)


def test_an_object_in_a_linen_parent_belongs_to_one_call():
    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x):
            part = bridge.ToLinen(Holder, ("dataclass",), name="part")
            return part(x) + part(x)

    variables = Parent().init(KEY, X)
    native = Holder("dataclass", rngs=nnx.Rngs(KEY))
    wanted = native(X) + native(X)
    assert (Parent().apply(variables, X, mutable=["nnx"])[0] == wanted).all()
    assert (Parent().apply(variables, X, mutable=["nnx"])[0] == wanted).all()


def test_lazy_init_takes_back_what_native_siblings_write_into_objects():
    class Mixed(nnx.Module):
        def __init__(self, rngs):
            self.counts = Counts()
            self.wrapped = bridge.ToNNX(nn.Dense(3), rngs=rngs)

        def __call__(self, x):
            self.counts.n += 1
            self.counts.log.append(1)
            return self.wrapped(x)

    model = bridge.lazy_init(Mixed(nnx.Rngs(0)), X)
    counts = model.counts
    assert counts == Counts()
    model(X)
    assert counts == Counts(1001, [1])
