"""NumPy arrays of a wrapped NNX module, whose dtypes JAX may not have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import bridge

KEY = jax.random.key(0)


class Wide(nnx.Module):
    """Computes with NumPy on numbers of 64 bits."""

    def __init__(self):
        self.big = np.array([2**40 + 3])
        self.near = nnx.Cache(np.array([1.0 + 1e-12]))
        self.w = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        near = self.near.get_value()
        return x * float(self.big[0] % 7) * self.w[...], (near[0] - 1.0) * 1e12, near.dtype


@pytest.mark.parametrize("with_graphdef", [True, False])
@pytest.mark.parametrize("make", [bridge.to_linen, lambda cls: bridge.ToLinen.from_module(cls())])
def test_numpy_values_of_64_bits_stay_what_they_are(make, with_graphdef):
    """Regression: they were cut off to 32 bits by `apply`."""
    made = make(Wide)
    model, variables = made if isinstance(made, tuple) else (made, made.init(KEY, 1.0))
    if not with_graphdef:
        del variables["nnx"]
    y, difference, dtype = model.apply(variables, 1.0)
    expected = Wide()(1.0)
    np.testing.assert_array_equal(y, expected[0])
    assert (difference, dtype) == expected[1:]


def test_values_that_a_file_has_widened_are_arrays_of_jax():
    model = bridge.to_linen(nnx.Linear, 2, 2)
    variables = model.init(KEY, jnp.ones((1, 2)))
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), variables["params"])
    y = model.apply({**variables, "params": wide}, jnp.ones((1, 2)))
    np.testing.assert_array_equal(y, model.apply(variables, jnp.ones((1, 2))))
    assert y.dtype == jnp.float32
