"""NNX's transforms inside a module in a ToLinen: what they hand on unchanged is no update."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import bridge
from tests.drawing import drawing
from tests.models import assert_close, assert_same_program

KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(7).normal(size=(4, 3)), jnp.float32)


def called(module, x):
    return module(x)


# A call of a submodule, through a transform.
PLAIN = {
    "jit": nnx.jit(called),
    "remat": nnx.remat(called),
    "cached_partial": lambda module, x: nnx.cached_partial(nnx.jit(called), module)(x),
    "jit of remat": nnx.jit(nnx.remat(called)),
    "remat of jit": nnx.remat(nnx.jit(called)),
    "scan": nnx.scan(nnx.remat(called), in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=2),
    "scan with state": nnx.scan(
        nnx.jit(called),
        in_axes=(nnx.StateAxes({...: nnx.Carry}), nnx.Carry),
        out_axes=nnx.Carry,
        length=2,
    ),
    "vmap": nnx.vmap(nnx.remat(called), in_axes=(None, 0)),
    "vmap over the state": nnx.vmap(nnx.jit(called), in_axes=(nnx.StateAxes({...: None}), 0)),
    "cond": lambda module, x: nnx.cond(x.sum() > 0, nnx.remat(called), called, module, x),
    "switch": lambda module, x: nnx.switch(1, [called, nnx.jit(called)], module, x),
    "while": lambda module, x: nnx.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1], nnx.jit(called)(*c[1:])), (0, module, x)
    )[2],
    "fori": lambda module, x: nnx.fori_loop(
        0, 2, lambda i, c: (c[0], nnx.remat(called)(*c)), (module, x)
    )[1],
    "checkpoint by jax": lambda module, x: jax.checkpoint(
        lambda state, x: nnx.merge(nnx.graphdef(module), state)(x)
    )(nnx.state(module), x),
    "value_and_grad": lambda module, x: (
        nnx.value_and_grad(lambda m, x: nnx.jit(called)(m, x).sum())(module, x)[0] * x
    ),
    "eval_shape": lambda module, x: (nnx.eval_shape(called, module, x), module(x))[1],
}


def calling(through, *, dropout=False, norm=False):
    class Calling(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(3, 3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs) if dropout else None
            self.norm = nnx.BatchNorm(3, use_running_average=True, rngs=rngs) if norm else None

        def inner(self, x):
            x = self.linear(x)
            x = x if self.norm is None else self.norm(x)
            return x if self.dropout is None else self.dropout(x)

        def __call__(self, x):
            return PLAIN[through](Inner(self), x)

    class Inner(nnx.Module):
        def __init__(self, owner):
            self.owner = owner

        def __call__(self, x):
            return self.owner.inner(x)

    return Calling


class Stack(nnx.Module):
    """Layers of one kind with their parameters stacked, as guides show them."""

    def __init__(self, *, rngs, remat=True):
        make = nnx.vmap(lambda rngs: nnx.Linear(3, 3, rngs=rngs), in_axes=0)
        self.layers = nnx.split_rngs(splits=4)(make)(rngs)
        self.remat = remat

    def __call__(self, x):
        body = nnx.remat(called) if self.remat else called
        return nnx.scan(body, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


def outer(make, lift):
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return lift(make)(x)

    return Outer()


def scanned(make):
    class Body(nn.Module):
        @nn.compact
        def __call__(self, carry, _):
            return make()(carry), None

    def run(x):
        lifted = nn.scan(Body, variable_axes={True: 0}, split_rngs={"params": True}, length=2)
        return lifted()(x, None)[0]

    return run


# What a Linen program does around it.
LIFTS = {
    "nothing": lambda make: make(),
    "nn.remat": lambda make: lambda x: nn.remat(lambda m, x: m(x))(make(), x),
    "nn.jit": lambda make: lambda x: nn.jit(lambda m, x: m(x))(make(), x),
    "nn.scan": scanned,
}


def runs(linen, variables, x):
    """What a program may do with `apply`.

    Of all but the first, the trace is enough: an update is lost there or not at all.
    """
    params = variables["params"]

    def loss(params, x):
        return linen.apply({**variables, "params": params}, x).sum()

    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), variables)
    traced = {
        "jit": lambda: jax.jit(linen.apply)(variables, x),
        "grad": lambda: jax.grad(loss)(params, x),
        "jit of grad": lambda: jax.jit(jax.grad(loss))(params, x),
        "grad of the input": lambda: jax.grad(loss, 1)(params, x),
        "vmap": lambda: jax.vmap(linen.apply, (None, 0))(variables, jnp.stack([x, x])),
        "vmap over the variables": lambda: jax.vmap(linen.apply, (0, None))(stacked, x),
        "remat": lambda: jax.checkpoint(linen.apply)(variables, x),
        "scan": lambda: jax.lax.scan(lambda c, _: (linen.apply(variables, c), None), x, length=2),
    }
    return {
        "eager": lambda: linen.apply(variables, x),
        **{name: functools.partial(jax.eval_shape, run) for name, run in traced.items()},
    }


def some_variables(linen):
    """Variables of a program, with values that no initializer has computed."""

    def value(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(KEY, leaf.shape)
        return jnp.asarray(np.ones(leaf.shape, leaf.dtype))

    return jax.tree.map(value, jax.eval_shape(linen.init, KEY, X))


@drawing(50, deadline=None)
@given(st.sampled_from(list(PLAIN)), st.booleans(), st.booleans(), st.data())
def test_what_a_transform_hands_on_is_not_a_lost_update(through, dropout, norm, data):
    make = functools.partial(
        bridge.ToLinen, calling(through, dropout=dropout, norm=norm), strict=True
    )
    lift = data.draw(st.sampled_from(list(LIFTS)))
    linen = outer(make, LIFTS[lift])
    variables = some_variables(linen)
    here = runs(linen, variables, X)
    if through == "while":
        # A loop of unknown length has no gradient.
        here = {name: run for name, run in here.items() if "grad" not in name}
    run = data.draw(st.sampled_from(list(here)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        here[run]()


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("lift", list(LIFTS))
def test_a_scan_over_stacked_layers_is_not_a_lost_update(lift, remat):
    make = functools.partial(bridge.ToLinen, Stack, kwargs={"remat": remat}, strict=True)
    linen = outer(make, LIFTS[lift])
    variables = some_variables(linen)
    for run in runs(linen, variables, X).values():
        run()


@pytest.mark.parametrize("through", list(PLAIN))
def test_a_call_through_a_transform_computes_what_the_native_one_does(through):
    nnx_class = calling(through, norm=True)
    native = nnx_class(rngs=nnx.Rngs(KEY))
    model = bridge.ToLinen(nnx_class, strict=True)
    variables = model.init(KEY, X)
    np.testing.assert_array_equal(model.apply(variables, X), native(X))
    if through == "while":
        return
    graphdef, state = nnx.split(native)
    others = {name: tree for name, tree in variables.items() if name != "params"}

    def ours(params):
        return jax.grad(lambda params: model.apply({"params": params, **others}, X).sum())(params)

    def natively(params):
        copy = nnx.merge(graphdef, state, copy=True)
        nnx.update(copy, params)
        return nnx.to_pure_dict(nnx.grad(lambda m, x: m(x).sum())(copy, X))

    assert_same_program(ours, natively, variables["params"], compare=assert_close)


class Counting(nnx.Module):
    def __init__(self):
        self.count = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        def step(module, x):
            module.count[...] += 1
            return x

        return nnx.jit(step)(self, x)


def test_what_is_changed_inside_a_transform_is_still_reported():
    model = bridge.ToLinen(Counting, strict=True)
    variables = model.init(KEY, X)
    for apply in (model.apply, jax.jit(model.apply)):
        with pytest.raises(bridge.LostUpdateError, match="batch_stats"):
            apply(variables, X)
    apply = functools.partial(model.apply, mutable=["batch_stats"])
    for run in (apply, jax.jit(apply)):
        assert run(variables, X)[1]["batch_stats"]["count"] == 1


class Stopped(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        self.scale[...] = jax.lax.stop_gradient(self.scale[...])
        return x * self.scale


def test_an_update_that_only_stops_a_gradient_is_returned():
    model = bridge.ToLinen(Stopped)
    variables = model.init(KEY, X)

    def loss(variables):
        _, updates = model.apply(variables, X, mutable=["params"])
        return updates["params"]["scale"] * 3.0

    assert jax.grad(loss)(variables)["params"]["scale"] == 0


class Table(nnx.Module):
    def __init__(self, table):
        self.table = table

    def __call__(self, x):
        return nnx.jit(lambda m, x: x + m.table)(self, x)


def test_an_argument_that_a_transform_hands_on_stays_an_argument():
    def apply(table, variables, x):
        return bridge.ToLinen(Table, args=(table,), strict=True).apply(variables, x, mutable=True)

    variables = bridge.ToLinen(Table, args=(X,)).init(KEY, X)
    for run in (apply, jax.jit(apply)):
        y, updates = run(X, variables, X)
        np.testing.assert_array_equal(y, X + X)
        assert "nnx_arrays" not in updates


class Dropping(nnx.Module):
    def __init__(self, *, rngs, deterministic):
        self.dropout = nnx.Dropout(0.5, deterministic=deterministic, rngs=rngs)

    def __call__(self, x):
        return nnx.jit(called)(self.dropout, x)


def test_a_stream_that_a_transform_only_hands_on_needs_no_key():
    model = bridge.ToLinen(Dropping, kwargs={"deterministic": True}, rng_state=False, strict=True)
    variables = model.init(KEY, X)
    np.testing.assert_array_equal(model.apply(variables, X), X)
    np.testing.assert_array_equal(jax.jit(model.apply)(variables, X), X)
    model = bridge.ToLinen(Dropping, kwargs={"deterministic": False}, rng_state=False)
    for apply in (model.apply, jax.jit(model.apply)):
        with pytest.raises(bridge.MissingRngError):
            apply(variables, X)
        apply(variables, X, rngs={"dropout": KEY})
