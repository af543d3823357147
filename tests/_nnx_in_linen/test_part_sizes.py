"""`sizes_of_parts` tells an NNX constructor what the parts of the module are called with."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge


class Chain(nnx.Module):
    def __init__(self, widths, *, layers_in_features, head_in_features, rngs):
        sizes = iter(layers_in_features)
        self.layers = nnx.List([nnx.Linear(next(sizes), each, rngs=rngs) for each in widths])
        self.head = nnx.Linear(head_in_features, 2, rngs=rngs)

    def encode(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def __call__(self, x):
        x = self.encode(x)
        return self.head(x.reshape((x.shape[0], -1)))


PARTS = {"layers_in_features": ("layers", -1), "head_in_features": ("head", -1)}


@bridge.implemented_by(Chain, sizes_of_parts=PARTS)
class LinenChain(nn.Module):
    widths: tuple[int, ...]

    def encode(self, x): ...

    def __call__(self, x): ...


@pytest.mark.parametrize("widths", [(4, 4, 6), (5,), (3, 7)])
def test_each_part_has_the_size_that_it_is_called_with(widths):
    x = jnp.ones((2, 3, 5))
    variables = LinenChain(widths).init(jax.random.key(0), x)
    params: Any = variables["params"]
    layers = params["layers"].values()
    assert [each["kernel"].shape for each in layers] == [*zip((5, *widths), widths, strict=False)]
    assert params["head"]["kernel"].shape == (3 * widths[-1], 2)
    assert jax.jit(LinenChain(widths).apply)(variables, x).shape == (2, 2)


def test_a_method_that_does_not_call_a_part_is_told():
    with pytest.raises(bridge.InvalidModuleError, match=r"a method that calls self\.head"):
        LinenChain((4,)).init(jax.random.key(0), jnp.ones((2, 3, 5)), method="encode")
