"""Sizes that are the defaults of fields."""

import importlib

import jax

import bridge

PART = """from flax import linen as nn


class Part(nn.Module):
    width: int = 3

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)
"""
NET = """from flax import linen as nn

from {name}_part import Part


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(Part()(x))
"""


def test_a_size_is_the_default_of_a_field_in_another_file(tmp_path, monkeypatch):
    name = f"sizes_{abs(hash(str(tmp_path))) % 10**8}"
    (tmp_path / f"{name}_part.py").write_text(PART)
    (tmp_path / f"{name}_net.py").write_text(NET.format(name=name))
    monkeypatch.syspath_prepend(tmp_path)
    net = importlib.import_module(f"{name}_net").Net
    x = jax.ShapeDtypeStruct((2, 7), "float32")
    result = bridge.rewrite(net, x, gradients=False, fast=True)
    assert result.native_share == 1
    assert "nnx.Linear(3, 2, rngs=rngs)" in result.sources[str(tmp_path / f"{name}_net_nnx.py")]


def test_a_size_inside_of_the_call_is_none_of_the_input(imported_program):
    """The first call is the one that began first: `last` ends before the call around it."""
    source = """
class Model(nn.Module):
    def setup(self):
        self.layers = [nn.Dense(width) for width in (3, 3)]
        self.norm = nn.LayerNorm()

    def last(self, x):
        return self.norm(x)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)
"""
    x = jax.ShapeDtypeStruct((2, 8), "float32")
    result = bridge.rewrite(imported_program(source).Model, x, gradients=False, fast=True)
    assert dict(result.sizes[0]) == {"in_features": 8, "norm_num_features": 3}
