"""A transform refuses for a wrapped module all that it refuses for a native one."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from tests.models import assert_identical, snapshot
from tests.transforms.nnx_states import KINDS, X, pure_state

XS = jnp.stack([X, 2 * X])


class NativeSows(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        x = self.dense(x)
        with warnings.catch_warnings():
            # Flax advises nnx.capture.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.sow(nnx.Intermediate, "out", x)
        return x


class NativeNorm(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(x)


class NativeLazy(nnx.Module):
    """Creates its parameter in a call."""

    def __call__(self, x):
        if not hasattr(self, "w"):
            self.w = nnx.Param(jnp.ones((4, 4)))
        return x @ self.w.get_value()


def native(kind):
    return lambda: kind(nnx.Rngs(0))


def wrapped(state, **options):
    kind = KINDS[state]

    class Calls(nnx.Module):
        def __init__(self):
            self.inner = kind.wrap()

        def __call__(self, x):
            return self.inner(x, **options)

    return Calls


class WrappedLazy(nnx.Module):
    def __init__(self):
        self.inner = bridge.ToNNX(nn.Dense(4), nnx.Rngs(0))

    def __call__(self, x):
        return bridge.lazy_init(self.inner, x)(x)


SOWS = (native(NativeSows), wrapped("sown", mutable=["intermediates"]))
NORM = (native(NativeNorm), wrapped("batch_stats_by_mutable", mutable=["batch_stats"]))
LAZY = (NativeLazy, WrappedLazy)


def call(model, x):
    return model(x)


def scan_of_inputs(model):
    body = lambda m, x: (m, m(x))  # noqa: E731
    return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(model, XS)


def while_loop(model):
    body = lambda c: (c[0] + 1, c[1], c[1](c[2]))  # noqa: E731
    return nnx.while_loop(lambda c: c[0] < 2, body, (jnp.array(0), model, X))


def fori_loop(model):
    return nnx.fori_loop(0, 2, lambda i, c: (c[0], c[0](c[1])), (model, X))


def one_branch(model):
    return nnx.cond(jnp.array(True), call, lambda m, x: x, model, X)


def vmap_of_inputs(model):
    return nnx.vmap(call, in_axes=(None, 0))(model, XS)


def state_axes(model):
    return nnx.vmap(call, in_axes=(nnx.StateAxes({...: None}), 0))(model, XS)


def diff_state(model):
    loss = lambda m: m(X).sum()  # noqa: E731
    return nnx.grad(loss, argnums=nnx.DiffState(0, nnx.Param))(model)


def grad_of_all(model):
    return nnx.grad(lambda m: m(X).sum())(model)


def jit(model):
    return nnx.jit(call)(model, X)


def aliased(model):
    return nnx.jit(lambda a, b: a(X) + b(X))(model, model)


def closed_over(model):
    return nnx.jit(functools.partial(call, model))(X)


CASES = {
    "sown state is created in a scan": (SOWS, scan_of_inputs, True),
    "sown state is created in a while_loop": (SOWS, while_loop, True),
    "sown state is created in a fori_loop": (SOWS, fori_loop, True),
    "sown state is created in one branch": (SOWS, one_branch, True),
    "all slices write to one Variable": (NORM, vmap_of_inputs, True),
    "all slices write to one Variable in tree mode": (NORM, vmap_of_inputs, False),
    "a parameter is created in a scan": (LAZY, scan_of_inputs, True),
    "a parameter is created in one branch": (LAZY, one_branch, True),
    "StateAxes in tree mode": (NORM, state_axes, False),
    "DiffState in tree mode": (NORM, diff_state, False),
    "an alias in tree mode": (NORM, aliased, False),
    "a closure that changes state": (NORM, closed_over, True),
    "a closure that changes state in tree mode": (NORM, closed_over, False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_transform_refuses_a_wrapped_module_as_it_refuses_a_native_one(case):
    (make_native, make_wrapped), transform, graph = CASES[case]
    with nnx.set_graph_mode(graph):
        raised = []
        for make in (make_native, make_wrapped):
            with pytest.raises(Exception) as caught:  # noqa: PT011 whatever the native one raises
                transform(make())
            raised.append(type(caught.value))
    assert raised[0] is raised[1]


@pytest.mark.parametrize("make", SOWS)
def test_state_created_in_a_transform_in_tree_mode_stays_inside(make):
    with nnx.set_graph_mode(False):
        model = make()
        before = snapshot(model)
        jit(model)
        assert snapshot(model) == before


@pytest.mark.parametrize("transform", [scan_of_inputs, while_loop, fori_loop])
def test_a_refused_transform_leaves_the_model_as_it_was(transform):
    model = SOWS[1]()
    before = snapshot(model)
    with pytest.raises(Exception):  # noqa: B017, PT011
        transform(model)
    assert snapshot(model) == before


def test_a_parameter_created_in_jit_arrives_in_the_model():
    model = WrappedLazy()
    output = nnx.jit(call)(model, X)
    twin = WrappedLazy()
    assert_identical(output, jax.jit(nn.Dense(4).apply)(twin_variables(twin), X))
    assert_identical(pure_state(model.inner)["variables"], pure_state(twin.inner)["variables"])


def twin_variables(twin):
    bridge.lazy_init(twin.inner, X)
    return twin.inner.linen_variables()
