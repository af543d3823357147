"""Every layer of Flax has its row, and a row says what the classes of both sides are made of."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

from bridge._layers.flax_layers import ROWS
from bridge._layers.layer import Seen

LINEN = {
    cls
    for cls in vars(nn).values()
    if isinstance(cls, type) and issubclass(cls, nn.Module) and cls is not nn.Module
} - {nn.RNNCellBase}
NATIVE = {
    cls
    for cls in vars(nnx).values()
    if isinstance(cls, type) and issubclass(cls, nnx.Module) and cls is not nnx.Module
} - {nnx.RNNCellBase, nnx.Dict, nnx.List}
PAIRS = [pytest.param(row, cls, id=cls.__name__) for row in ROWS if row.nnx for cls in row.linen]


@pytest.mark.parametrize("cls", sorted(LINEN, key=lambda cls: cls.__name__))
def test_every_linen_layer_has_one_row(cls):
    assert len([row for row in ROWS if cls in row.linen]) == 1


@pytest.mark.parametrize("cls", sorted(NATIVE, key=lambda cls: cls.__name__))
def test_every_nnx_layer_has_one_row(cls):
    assert len([row for row in ROWS if row.nnx is cls]) == 1


def test_a_linen_layer_without_an_nnx_class_is_told_by_its_row():
    names = {cls.__name__ for row in ROWS if row.nnx is None for cls in row.linen}
    assert not any(hasattr(nnx, name) for name in names)


@pytest.mark.parametrize(("row", "cls"), PAIRS)
def test_the_names_of_fields_are_those_of_both_classes(row, cls):
    fields = {field.name for field in dataclasses.fields(cls)}
    taken = inspect.signature(row.nnx.__init__).parameters
    assert {*row.fields, *row.other_fields, *row.sized, *row.carried} <= fields
    assert {*row.fields.values(), *row.sizes, *row.defaults} <= taken.keys()


X = jnp.ones((2, 6, 4))
# What each size of an NNX constructor is, of a Linen layer that is called with `X`.
SIZES = {
    "Dense": (nn.Dense(3), (X,), {"in_features": 4}),
    "DenseGeneral": (nn.DenseGeneral(3), (X,), {"in_features": 4}),
    "DenseGeneral, two axes": (nn.DenseGeneral(3, axis=(1, 2)), (X,), {"in_features": (6, 4)}),
    "Einsum": (nn.Einsum((4, 3), "btd,dk->btk"), (X,), {"bias_shape": (3,)}),
    "Einsum without bias": (
        nn.Einsum((4, 3), "btd,dk->btk", use_bias=False),
        (X,),
        {"bias_shape": None},
    ),
    "Conv": (nn.Conv(2, (3,), feature_group_count=2), (X,), {"in_features": 4}),
    "ConvTranspose": (nn.ConvTranspose(3, (3,)), (X,), {"in_features": 4}),
    "ConvTranspose, transposed": (
        nn.ConvTranspose(3, (3,), transpose_kernel=True),
        (X,),
        {"in_features": 4},
    ),
    "BatchNorm": (nn.BatchNorm(use_running_average=True), (X,), {"num_features": 4}),
    "LayerNorm": (nn.LayerNorm(), (X,), {"num_features": 4}),
    "LayerNorm without parameters": (
        nn.LayerNorm(use_bias=False, use_scale=False),
        (X,),
        {"num_features": 4},
    ),
    "RMSNorm": (nn.RMSNorm(), (X,), {"num_features": 4}),
    "GroupNorm": (nn.GroupNorm(2), (X,), {"num_features": 4}),
    "InstanceNorm": (nn.InstanceNorm(), (X,), {"num_features": 4}),
    "attention": (
        nn.MultiHeadAttention(2, qkv_features=8, out_features=5),
        (X,),
        {"in_features": 4, "in_kv_features": None},
    ),
    "attention over another width": (
        nn.MultiHeadAttention(2, qkv_features=8),
        (X, jnp.ones((2, 6, 3))),
        {"in_features": 4, "in_kv_features": 3},
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_sizes_make_an_nnx_layer_with_leaves_of_the_same_shapes(name):
    module, inputs, expected = SIZES[name]
    variables = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    row = next(row for row in ROWS if type(module) in row.linen)
    fields = {field.name: getattr(module, field.name) for field in dataclasses.fields(module)}

    seen = Seen(fields, X.shape, variables)

    assert {size: find(seen) for size, find in row.sizes.items()} == expected
