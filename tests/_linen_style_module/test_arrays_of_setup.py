"""Arrays that `setup` computes from variables have their gradient and follow them, as in Linen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import bridge

X = np.array([[1.0, 2.0, 3.0]], np.float32)


def twice(module):
    return jnp.asarray(module.w) * 2


# What setup stores, and how a method uses it.
STORED = {
    "array": (twice, lambda value, x: x * value),
    "the parameter's own": (lambda m: jnp.asarray(m.w), lambda value, x: x * value),
    "list": (lambda m: [twice(m), 3], lambda value, x: x * value[0] * value[1]),
    "partial": (lambda m: functools.partial(jnp.multiply, twice(m)), lambda value, x: value(x)),
    "lambda": (
        lambda m: {"a": (lambda w: lambda x: m.dense(x) * w)(twice(m))},
        lambda value, x: value["a"](x),
    ),
    "beside a submodule": (lambda m: (m.dense, twice(m)), lambda value, x: value[0](x) * value[1]),
    "constant": (lambda m: jnp.ones(m.w.shape), lambda value, x: x * value),
}


def model(b, stored):
    store, use = STORED[stored]

    class Inner(b.Module):
        def setup(self):
            self.dense = nn.Dense(3)
            self.w = self.param("w", nn.initializers.normal(), (1, 3))
            self.stored = store(self)
            self.table = jnp.arange(3.0).reshape(1, 3)

        def __call__(self, x):
            return use(self.stored, self.dense(x) + self.table) * use(self.stored, x)

    class Model(b.Module):
        def setup(self):
            self.inner = Inner()

        def __call__(self, x):
            return self.inner(x)

    return Model()


@pytest.mark.parametrize("stored", STORED)
def test_an_attribute_that_is_computed_from_variables_is_linens(stored):
    linen, style = model(nn, stored), model(bridge, stored)
    variables = linen.init(jax.random.key(0), X)
    other = jax.tree.map(lambda leaf: leaf * 1.5 + 0.1, variables)
    assert np.array_equal(style.apply(variables, X), linen.apply(variables, X))
    kept = style.bind(variables)
    expected = jax.grad(lambda v: (linen.apply(v, X) ** 2).sum())(variables)["params"]
    found = nnx.to_pure_dict(nnx.grad(lambda m: (m(X) ** 2).sum())(kept))
    assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-5), found, expected))
    nnx.update(kept, nnx.state(style.bind(other)))
    y = linen.apply(other, X)
    assert np.allclose(kept(X), y, rtol=1e-6)
    assert np.allclose(nnx.jit(lambda model, x: model(x))(nnx.clone(kept), X), y, rtol=1e-5)
    fresh = bridge.lazy_init(type(style)(rngs=0), X)
    assert np.allclose(fresh(X), linen.apply(fresh.variables, X), rtol=1e-5)


@pytest.mark.parametrize("store", [lambda w: w * 2, lambda w: [w * 2, 3], lambda w: 5])
def test_an_attribute_may_have_the_name_of_its_parameter(store):
    def make(b):
        class Model(b.Module):
            def setup(self):
                w = jnp.asarray(self.param("w", nn.initializers.normal(), (1, 3)))
                self.w = store(w)

            def __call__(self, x):
                return x * jax.tree.leaves(self.w)[0]

        return Model()

    linen, style = make(nn), make(bridge)
    variables = linen.init(jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, style.init(0, X)) == jax.tree.map(jnp.shape, variables)
    assert np.array_equal(style.apply(variables, X), linen.apply(variables, X))
    expected = jax.grad(lambda v: linen.apply(v, X).sum())(variables)["params"]
    found = nnx.to_pure_dict(nnx.grad(lambda m: m(X).sum())(style.bind(variables)))
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))
    kept = nnx.clone(style.bind(variables))
    nnx.update(kept, nnx.state(style.bind(jax.tree.map(lambda w: w + 1, variables))))
    y = linen.apply(jax.tree.map(lambda w: w + 1, variables), X)
    assert np.allclose(kept(X), y, rtol=1e-6)


def test_a_constant_of_setup_is_there_in_a_model_created_in_a_trace():
    style = type(model(bridge, "beside a submodule"))
    fresh = nnx.jit(lambda: bridge.lazy_init(style(rngs=0), X))()
    y = model(nn, "beside a submodule").apply(fresh.variables, X)
    assert np.allclose(fresh(X), y, rtol=1e-5)


def test_an_attribute_computed_from_variables_is_read_outside_of_a_call():
    kept = model(bridge, "array").bind({"params": {"inner": {"w": jnp.ones((1, 3))}}})
    assert np.array_equal(kept.inner.stored, np.full((1, 3), 2.0))
    kept.inner.w[...] = kept.inner.w[...] * 2
    assert np.array_equal(kept.inner.stored, np.full((1, 3), 4.0))
