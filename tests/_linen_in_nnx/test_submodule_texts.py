"""An error about a submodule says where it is and what to do."""

import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge

X = jnp.ones((2, 3))


class Block(nn.Module):
    def setup(self):
        self.layers = [nn.Dense(3), nn.Dense(3)]

    def __call__(self, x):
        return self.layers[1](self.layers[0](x))


class Model(nn.Module):
    def setup(self):
        self.block = Block()

    def __call__(self, x):
        return nn.relu(self.block(x))


class Compact(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x)


class Computing(nn.Module):
    def setup(self):
        self.bias = self.param("bias", nn.initializers.ones, (3,))

    def __call__(self, x):
        return x + self.bias


def wrapped(module):
    return bridge.ToNNX(module, nnx.Rngs(0))


@pytest.mark.parametrize(
    ("use", "error", "parts"),
    [
        (lambda m: m.block.absent, AttributeError, ["ToNNX(Model).block", "'absent'"]),
        (lambda m: setattr(m.block, "items", 1), AttributeError, ["block['items'] = …"]),
        (
            lambda m: setattr(m.block, "layers", [nnx.Param(X)]),
            bridge.InvalidModuleError,
            ["ToNNX(Model).block.layers", "by its own name"],
        ),
        (
            lambda m: m.block.__setitem__("layers_0", 3),
            bridge.InvalidModuleError,
            ["ToNNX(Model).block['layers_0']", "nnx.Param(value)"],
        ),
    ],
)
def test_it_names_the_place_and_the_remedy(use, error, parts):
    model = wrapped(Model()).lazy_init(X)
    with pytest.raises(error) as caught:
        use(model)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_submodule_of_a_compact_method_says_why_its_fields_are_unknown():
    model = wrapped(Compact()).lazy_init(X)
    with pytest.raises(AttributeError, match=r"Dense_0 has no .*'features'.* Make it in setup"):
        _ = model.Dense_0.features


def test_an_attribute_of_variables_says_how_to_create_them():
    with pytest.raises(AttributeError, match=r"ToNNX\(Computing\).bias .*bridge.lazy_init"):
        _ = wrapped(Computing()).bias
