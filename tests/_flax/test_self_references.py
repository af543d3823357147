"""Methods in attributes follow a merged module; what refers to it in another way is refused."""

import collections
import dataclasses
import functools
import gc
import pickle
import types
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import bridge
from tests.models import assert_identical

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


class Holder(nnx.Module):
    """Stores a method of a submodule that comes after it."""

    def __init__(self, forward):
        block = Block(forward)
        self.a_first = block.step
        self.block = block

    def __call__(self, x):
        return self.a_first(x) + self.block(x)


def with_default(block):
    def step(x, *, owner=block):
        return owner.step(x)

    return step


def scaled(module, scale):
    # `nnx.grad` would split the module, after which the attribute calls the original one.
    (module if isinstance(module, Block) else module.block).scale[...] = scale
    return module


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


FORWARDS = {
    "method": lambda block: block.step,
    "method of a base": lambda block: super(type(block), block).step,
}


@pytest.mark.parametrize("cls", [Block, Holder])
@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
@pytest.mark.parametrize("with_definition", [True, False])
def test_an_attribute_that_refers_to_its_module_computes_with_the_given_variables(
    cls, forward, with_definition
):
    native = scaled(cls(forward), jnp.array(10.0))
    block = native if cls is Block else native.block
    module = bridge.ToLinen(cls, args=(forward,), strict=True)
    variables = module.init(KEY, X)
    params = {"scale": jnp.array(10.0)}
    variables["params"] = params if cls is Block else {"block": params}
    if not with_definition:
        del variables["nnx"]
    mutable = ["batch_stats"]
    gradient = jax.grad(lambda p: module.apply({**variables, "params": p}, X, mutable=mutable)[0])
    found = gradient(variables["params"])
    wanted = jax.grad(lambda scale: scaled(cls(forward), scale)(X))(jnp.array(10.0))
    assert_identical((found if cls is Block else found["block"])["scale"], wanted)
    for _ in range(2):
        y, updates = module.apply(variables, X, mutable=mutable)
        variables = {**variables, **updates}
        assert_identical(y, native(X))
    stats = variables["batch_stats"] if cls is Block else variables["batch_stats"]["block"]
    assert_identical(stats["calls"], block.calls[...])


def test_a_definition_with_such_an_attribute_is_an_argument_of_jit():
    module = bridge.ToLinen(Block, args=(FORWARDS["method"],))
    variables = module.init(KEY, X)
    apply = jax.jit(functools.partial(module.apply, mutable=True))
    assert float(apply(variables, X)[0]) == float(Block(FORWARDS["method"])(X))
    apply(variables, X)
    assert apply._cache_size() == 1


def test_a_definition_with_a_bound_method_can_be_pickled_and_holds_no_module():
    made = []

    def forward(block):
        made.append(weakref.ref(block))
        return block.step

    module = bridge.ToLinen(Block, args=(forward,))
    variables = module.init(KEY, X)
    gc.collect()
    assert [ref() for ref in made] == [None] * len(made) != []
    again = pickle.loads(pickle.dumps(variables["nnx"]))
    assert_identical(
        module.apply({**variables, "nnx": again}, X, mutable=True)[0], Block(forward)(X)
    )


REFUSED = {
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


REMEDY = r"(?s)'forward'.*make it a method"


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
    """Regression: it was replaced by what cannot be called."""
    with pytest.raises(
        bridge.InvalidModuleError, match=r"(?s)attribute 'steps/0'.*make it a method"
    ):
        bridge.ToLinen.from_module(Listed())


class Choosing(nnx.Module):
    """Has its methods in plain containers."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))
        self.steps = nnx.static({"double": [self.double], "factors": [2.0]})
        self.listed = nnx.List([self.double])

    def double(self, x):
        return self.scale * x * self.steps["factors"][0]

    def __call__(self, x):
        return self.steps["double"][0](x) + self.listed[0](x)


def test_methods_in_plain_containers_follow_a_merged_module():
    module = bridge.ToLinen(Choosing, strict=True)
    variables = module.init(KEY, X)
    for params in ({"scale": jnp.array(10.0)}, {"scale": jnp.array(3.0)}):
        assert module.apply({**variables, "params": params}, X) == params["scale"] * 8
        assert module.apply({"params": params}, X) == params["scale"] * 8


class Owned(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()), owner=lambda: self)


def test_a_variable_whose_metadata_refers_to_its_module_is_refused():
    with pytest.raises(bridge.InvalidModuleError, match="metadata of a Param"):
        bridge.ToLinen.from_module(Owned())


HELD = []


def plain(x):
    return x * len(HELD)


def test_what_a_function_finds_in_its_globals_is_no_reference():
    HELD[:] = [Block(lambda block: plain)]
    graphdef, _ = nnx.split(HELD[0])
    ours = bridge.ToLinen.from_module(HELD[0])[1]["nnx"]["graphdef"]
    assert dict(ours.attributes)["forward"] == dict(graphdef.attributes)["forward"]
