"""`functional`: an NNX module class as a pair of pure functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx import bridge as peer

import bridge
from tests.models import assert_identical

X = jax.random.normal(jax.random.key(7), (4, 3))


class Normed(nnx.Module):
    def __init__(self, width, *, scale=1.0, rngs):
        self.linear = nnx.Linear(3, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.scale = scale

    def __call__(self, x):
        return self.norm(self.linear(x)) * self.scale

    def encode(self, x):
        return self.linear(x)


class Constant(nnx.Module):
    def __init__(self, value):
        self.value = nnx.Variable(jnp.array(value))

    def __call__(self):
        return self.value[...]


@pytest.fixture
def model():
    return bridge.functional(Normed)(4, scale=2.0)


def native():
    return Normed(4, scale=2.0, rngs=nnx.Rngs(0))


def test_init_gives_the_state_of_native_construction(model):
    assert_identical(model.init(rngs=nnx.Rngs(0)), nnx.state(native()))


def test_init_keeps_the_definition(model):
    assert model.graphdef is None
    model.init(rngs=nnx.Rngs(0))
    assert model.graphdef == nnx.graphdef(native())


def test_apply_gives_the_output_and_the_new_state_of_the_native_call(model):
    y, (graphdef, state) = model.apply(model.init(rngs=nnx.Rngs(0)))(X)
    module = native()
    np.testing.assert_array_equal(y, module(X))
    assert_identical(state, nnx.state(module))
    np.testing.assert_array_equal(nnx.merge(graphdef, state)(X), module(X))


def test_apply_calls_methods(model):
    y, _ = model.apply(model.init(rngs=nnx.Rngs(0))).encode(X)
    np.testing.assert_array_equal(y, native().encode(X))


def test_the_state_may_come_in_parts(model):
    state = model.init(rngs=nnx.Rngs(0))
    params, rest = nnx.split_state(state, nnx.Param, ...)
    y, _ = model.apply(params, rest)(X)
    np.testing.assert_array_equal(y, native()(X))


def test_a_class_without_rngs_is_initialised_without_them():
    model = bridge.functional(Constant)(3.0)
    assert float(model.apply(model.init())()[0]) == 3.0


def test_apply_before_init_says_what_to_do(model):
    with pytest.raises(ValueError, match=r"Functional\(Normed\).*init"):
        model.apply({})


def test_it_is_pure_under_jit_and_grad(model):
    state = model.init(rngs=nnx.Rngs(0))
    params, rest = nnx.split_state(state, nnx.Param, ...)
    before = jax.tree.map(jnp.copy, rest)

    @jax.jit
    def loss(params):
        return (model.apply(params, rest)(X)[0] ** 2).sum()

    grads = jax.grad(loss)(params)
    expected = nnx.grad(lambda m: (m(X) ** 2).sum())(native())
    for found, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert_identical(rest, before)


def test_programs_written_for_the_peer_get_the_same():
    mine, theirs = (package.functional(Normed)(4, scale=2.0) for package in (bridge, peer))
    states = [f.init(rngs=nnx.Rngs(0)) for f in (mine, theirs)]
    assert_identical(*states)
    outputs = [f.apply(s)(X)[0] for f, s in zip((mine, theirs), states, strict=True)]
    np.testing.assert_array_equal(*outputs)
    assert (mine.module_type, mine.args, mine.kwargs) == (Normed, (4,), {"scale": 2.0})
    assert (mine.module_type, mine.args, mine.kwargs) == (
        theirs.module_type,
        theirs.args,
        theirs.kwargs,
    )


def test_a_functional_can_be_built_by_its_fields():
    model = bridge.Functional(Constant, None, (3.0,), {})
    assert float(model.apply(model.init())()[0]) == 3.0
