"""A static value that refers to its module is refused, as a merged module could not follow."""

import collections
import dataclasses
import functools
import types
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import bridge

KEY = jax.random.key(0)
X = jnp.array(2.0)


class Step(nnx.Module):
    def step(self, x):
        return self.scale * x * x


class Block(Step):
    """Chooses in its constructor what it computes with."""

    def __init__(self, forward):
        self.scale = nnx.Param(jnp.ones(()))
        self.forward = forward(self)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def step(self, x, factor=1.0):
        self.calls[...] += 1
        return factor * self.scale * x + self.calls

    def __call__(self, x):
        return self.forward(x)


def with_default(block):
    def step(x, *, owner=block):
        return owner.step(x)

    return step


class Calls:
    """An object with a module in it, and itself."""

    def __init__(self, block):
        self.block = block
        self.me = self

    def __call__(self, x):
        return self.me.block.step(x)


class Slots:
    __slots__ = ("block",)

    def __init__(self, block):
        self.block = block

    def __call__(self, x):
        return self.block.step(x)


class Pair(NamedTuple):
    first: object
    second: object

    def __call__(self, x):
        return self.second.step(x) + self.first


@dataclasses.dataclass(frozen=True)
class Config:
    block: object

    def __call__(self, x):
        return self.block.step(x)


class Twice(dict):
    def __call__(self, x):
        return self["block"].step(x) + self["block"].step(x)


def local(block):
    class Local:
        def __init__(self):
            self.block = block

        def __call__(self, x):
            return self.block.step(x)

    return Local()


def recursive(block):
    def down(n, x):
        return block.step(x) if n == 0 else down(n - 1, x)

    return functools.partial(down, 1)


REFUSED = {
    "method": lambda block: block.step,
    "method of a base": lambda block: super(type(block), block).step,
    "object": Calls,
    "slots": Slots,
    "named tuple": lambda block: functools.partial(Pair.__call__, Pair(jnp.ones(()), block)),
    "dataclass": Config,
    "dict": lambda block: Twice(block=block),
    "method of an object": lambda block: Calls(block).__call__,
    "lambda over an object": lambda block: (
        lambda y: lambda x: y.at["calls"](x) + y.at["slots"](x)
    )(types.SimpleNamespace(at=collections.OrderedDict(calls=Calls(block), slots=Slots(block)))),
    "object of a class of its own": local,
    "weak reference": lambda block: (lambda ref: lambda x: ref().step(x))(weakref.ref(block)),
    "weak proxy": lambda block: functools.partial(Block.step, weakref.proxy(block)),
    "recursive": recursive,
    "lambda": lambda block: lambda x: block.step(x) + 1,
    "array": lambda block: functools.partial(lambda y, x: block.step(x) + y, jnp.ones(())),
    "partial": lambda block: functools.partial(block.step, factor=3.0),
    "argument": lambda block: functools.partial(Block.step, block),
    "default": with_default,
    "checkpoint": lambda block: jax.checkpoint(lambda x: x * block.scale),
    "variable": lambda block: functools.partial(jnp.multiply, block.scale),
    "nested": lambda block: functools.partial(
        lambda steps, x: steps["a"][0](x), {"a": [block.step]}
    ),
    "jit": lambda block: jax.jit(block.step),
    "nnx.jit": lambda block: nnx.jit(lambda x: block.step(x) + 1),
    "cache": lambda block: functools.lru_cache(block.step),
}


REMEDY = r"(?s)'forward'.*refer to the module.*make it a submodule"


@pytest.mark.parametrize("forward", REFUSED.values(), ids=REFUSED)
def test_what_cannot_follow_a_merged_module_is_refused_by_its_name(forward):
    with pytest.raises(bridge.InvalidModuleError, match=REMEDY):
        bridge.ToLinen.from_module(Block(forward))


@pytest.mark.parametrize("kind", ["lambda", "partial", "object", "weak reference"])
def test_init_refuses_what_cannot_follow_a_merged_module(kind):
    with pytest.raises(bridge.InvalidModuleError, match=REMEDY):
        bridge.ToLinen(Block, args=(REFUSED[kind],)).init(KEY, X)


class Listed(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))
        self.steps = nnx.data([self.step])

    def step(self, x):
        return self.scale * x


def test_a_method_in_a_plain_list_is_refused_by_its_path():
    with pytest.raises(bridge.InvalidModuleError, match=r"(?s)'steps/0'.*refer to the module"):
        bridge.ToLinen.from_module(Listed())


class Owned(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()), owner=lambda: self)


def test_a_variable_whose_metadata_refers_to_its_module_is_refused():
    with pytest.raises(bridge.InvalidModuleError, match=r"(?s)'scale'.*refer to the module"):
        bridge.ToLinen.from_module(Owned())


HELD = []


def plain(x):
    return x * len(HELD)


def test_what_a_function_finds_in_its_globals_is_no_reference():
    HELD[:] = [Block(lambda block: plain)]
    graphdef, _ = nnx.split(HELD[0])
    ours = bridge.ToLinen.from_module(HELD[0])[1]["nnx"]["graphdef"]
    assert dict(ours.attributes)["forward"] == dict(graphdef.attributes)["forward"]
