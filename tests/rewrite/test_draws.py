"""Keys under which Linen and NNX drop the same elements."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from bridge import port
from bridge.rewrite.prove._draws import same_key, with_same_keys


def test_linen_and_nnx_drop_the_same_elements():
    x = jax.random.normal(jax.random.key(0), (2, 5, 4))
    linen = nn.MultiHeadDotProductAttention(2, dropout_rate=0.5)
    variables = linen.init(jax.random.key(1), x, deterministic=True)
    model = nnx.MultiHeadAttention(2, 4, dropout_rate=0.5, decode=False, rngs=nnx.Rngs(0))
    port.plan(variables, model).apply()
    with_same_keys(model)
    rngs = {"dropout": same_key()}
    expected = linen.apply(variables, x, deterministic=False, rngs=rngs)
    np.testing.assert_array_equal(model(x, deterministic=False), expected)
    assert jnp.abs(expected - linen.apply(variables, x, deterministic=True)).max() > 0.01


def test_another_rate_drops_other_elements():
    x = jnp.ones((64,))
    dropped = [
        nn.Dropout(rate).apply({}, x, deterministic=False, rngs={"dropout": same_key()}) == 0
        for rate in (0.3, 0.5)
    ]
    assert dropped[0].sum() < dropped[1].sum()
    assert 0.15 < dropped[0].mean() < 0.45


def test_numbers_are_spread():
    drawn = jax.random.uniform(same_key(), (1000,))
    assert abs(drawn.mean() - 0.5) < 0.02
    assert abs(jnp.diff(drawn)).mean() > 0.1
    assert jnp.unique(drawn).size > 990
