"""Arguments belong to the user: every keyword that Python allows reaches the wrapped module."""

import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from tests.models import assert_identical

X = jnp.ones((2, 3))
KEY = jax.random.key(0)
# The options that ToNNX shares with Linen's `apply`.
OPTIONS = {"rngs", "method", "mutable", "capture_intermediates"}
# Flax takes these for its own while there are interceptors, as of `train()` and `eval()`.
OF_INTERCEPTORS = {"module", "orig_method"}


# No call of a model goes through their functions.
TOOLS = {"_cli", "_demo", "checkpoint", "parity", "port", "rewrite"}


def functions_of(owner):
    for value in vars(owner).values():
        if inspect.isfunction(function := getattr(value, "__func__", value)):
            # Linen wraps the methods of its modules.
            yield inspect.unwrap(function)
        elif inspect.isclass(value) and value.__module__.startswith("bridge"):
            yield from functions_of(value)


def names_within(code):
    """Arguments of a function and of those that it makes."""
    yield from code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from names_within(constant)


def all_names():
    """The names of all arguments of all functions of the package, and a few that others use."""
    found = {"self", "cls", "name", "parent", "scope", "fun", "fn", "f", "orig_method", "x_"}
    for info in pkgutil.walk_packages(bridge.__path__, "bridge."):
        if info.name != "bridge.__main__" and info.name.split(".")[1] not in TOOLS:
            for function in functions_of(importlib.import_module(info.name)):
                found.update(names_within(function.__code__))
    return {name for name in found if name.isidentifier() and not name.startswith("__")}


NAMES = all_names()


class LinenTaker(nn.Module):
    """Returns the keywords that it was called with."""

    @nn.compact
    def __call__(this, here, /, **given):  # noqa: N805
        this.param("w", nn.initializers.ones, ())
        return dict(given)

    def other(this, here, /, **given):  # noqa: N805
        return dict(given)


class LinenHolder(nn.Module):
    def setup(self):
        self.taker = LinenTaker()

    def __call__(self, x):
        return self.taker(x)


class NnxTaker(nnx.Module):
    """The same for NNX."""

    def __init__(this):  # noqa: N805
        this.w = nnx.Param(jnp.ones(()))

    def __call__(this, here, /, **given):  # noqa: N805
        return dict(given)

    def other(this, here, /, **given):  # noqa: N805
        return dict(given)


class NnxHolder(nnx.Module):
    def __init__(self):
        self.taker = NnxTaker()

    def __call__(self, x):
        return self.taker(x)


def test_the_names_are_those_of_the_inner_functions():
    inner = {"module", "function", "draws", "variables", "wrapper", "initializing", "nnx_method"}
    assert inner | OPTIONS < NAMES


def linen_calls():
    taker = bridge.ToNNX(LinenTaker(), KEY).lazy_init(X)
    holder = bridge.ToNNX(LinenHolder(), KEY).lazy_init(X)
    return {
        "call": (taker, NAMES - OPTIONS),
        "other": (taker.other, NAMES - OPTIONS | {"method"}),
        "submodule": (holder.taker, NAMES - OPTIONS | {"method"}),
        "submodule.other": (holder.taker.other, NAMES - OPTIONS | {"method"}),
    }


@pytest.mark.parametrize("modes", [None, "train", "eval"])
@pytest.mark.parametrize("name", ["call", "other", "submodule", "submodule.other"])
def test_every_keyword_reaches_a_linen_module(name, modes):
    call, names = linen_calls()[name]
    if modes:
        owner = getattr(call, "_owner", getattr(call, "__self__", call))
        getattr(owner, modes)() if isinstance(owner, bridge.ToNNX) else None
        names = names - OF_INTERCEPTORS
    given = {name: index for index, name in enumerate(sorted(names))}
    assert call(X, **given) == given


@pytest.mark.parametrize("name", sorted(OF_INTERCEPTORS))
def test_two_keywords_fail_under_an_interceptor_as_in_linen(name):
    module = LinenTaker()
    with (
        nn.intercept_methods(lambda f, args, kwargs, _: f(*args, **kwargs)),
        pytest.raises(TypeError, match="multiple values"),
    ):
        module.init(KEY, X, method=lambda bound, x: bound(x, **{name: 1}))
    model = bridge.ToNNX(module, KEY).lazy_init(X)
    model.eval()
    with pytest.raises(TypeError, match="multiple values"):
        model(X, **{name: 1})


@pytest.mark.parametrize("init", [bridge.lazy_init, bridge.ToNNX.lazy_init])
def test_every_keyword_is_a_sample_input(init):
    given = dict.fromkeys(sorted(NAMES - OPTIONS), 1)
    seen = []

    class Sees(nn.Module):
        @nn.compact
        def __call__(this, here, /, **given):  # noqa: N805
            seen.append(given)
            return this.param("w", nn.initializers.ones, ())

    init(bridge.ToNNX(Sees(), KEY), X, **given)
    init(bridge.ToNNX(Sees(), KEY), jax.ShapeDtypeStruct(X.shape, X.dtype), **given)
    assert seen == [given, given]


def test_a_mismatch_is_found_whatever_the_keywords_are_called():
    class Scales(nn.Module):
        @nn.compact
        def __call__(this, here, /, **given):  # noqa: N805
            return here @ this.param("w", nn.initializers.ones, (here.shape[-1],))

    model = bridge.ToNNX(Scales(), KEY).lazy_init(X)
    given = dict.fromkeys(sorted(NAMES - OPTIONS), 1)
    with pytest.raises(bridge.MismatchError):
        model(jnp.ones((2, 4)), **given)


class Around(nn.Module):
    """Calls what it is told to on a ToLinen, as a Linen parent does."""

    function: object

    def setup(self):
        self.taker = bridge.to_linen(NnxTaker)
        self.holder = bridge.to_linen(NnxHolder)

    def __call__(self):
        self.taker(X)
        self.holder(X)
        return self.function(self)


@pytest.mark.parametrize(
    ("function", "own"),
    [
        (lambda m: m.taker, {"nnx_method"}),
        (lambda m: m.taker.other, set()),
        (lambda m: m.holder.taker, set()),
        (lambda m: m.holder.taker.other, set()),
    ],
)
def test_every_keyword_reaches_an_nnx_module(function, own):
    given = {name: index for index, name in enumerate(sorted(NAMES - own))}
    variables = Around(lambda m: None).init(KEY)
    assert Around(lambda m: function(m)(X, **given)).apply(variables) == given
    if not own:
        return
    assert Around(lambda m: function(m)(X, **given)).init_with_output(KEY)[0] == given


def test_linen_attributes_called_name_and_parent_are_plain_attributes():
    module = nn.Dense(2)
    model = bridge.ToNNX(module, KEY).lazy_init(X)
    expected = module.apply(module.init(KEY, X), X)
    model.name, model.parent, model.scope = "enc", "mine", 3
    assert (model.name, model.parent, model.scope) == ("enc", "mine", 3)
    assert model.to_nnx__module.name is None
    assert_identical(model(X), expected)
    model.set_attributes(name="dec")
    assert model.name == "dec"
    assert_identical(nnx.merge(*nnx.split(model))(X), expected)
