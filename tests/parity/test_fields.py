"""Static fields are compared by Linen's names, without a false alarm between Flax's own layers."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

from bridge import parity, port
from bridge.parity._fields import field_differences, fields_of

N = 4


def rngs():
    return nnx.Rngs(0)


class Kind(nn.Module):
    kind: str


# Layers that do the same, each as its own library makes it.
SAME = {
    "Dense": (nn.Dense(N), lambda: nnx.Linear(N, N, rngs=rngs())),
    "DenseGeneral": (nn.DenseGeneral((2, 2)), lambda: nnx.LinearGeneral(N, (2, 2), rngs=rngs())),
    "DenseGeneral, one axis": (nn.DenseGeneral(N), lambda: nnx.LinearGeneral(N, N, rngs=rngs())),
    "Conv": (nn.Conv(N, (3, 3)), lambda: nnx.Conv(N, N, (3, 3), rngs=rngs())),
    "Conv, strides": (
        nn.Conv(N, (3, 3), strides=2),
        lambda: nnx.Conv(N, N, (3, 3), strides=(2, 2), rngs=rngs()),
    ),
    "ConvTranspose": (
        nn.ConvTranspose(N, (3,)),
        lambda: nnx.ConvTranspose(N, N, (3,), rngs=rngs()),
    ),
    "Embed": (nn.Embed(N, N), lambda: nnx.Embed(N, N, rngs=rngs())),
    "BatchNorm": (nn.BatchNorm(), lambda: nnx.BatchNorm(N, rngs=rngs())),
    "LayerNorm": (nn.LayerNorm(), lambda: nnx.LayerNorm(N, rngs=rngs())),
    "RMSNorm": (nn.RMSNorm(), lambda: nnx.RMSNorm(N, rngs=rngs())),
    "GroupNorm": (nn.GroupNorm(2), lambda: nnx.GroupNorm(N, 2, rngs=rngs())),
    "InstanceNorm": (nn.InstanceNorm(), lambda: nnx.InstanceNorm(N, rngs=rngs())),
    "attention": (
        nn.MultiHeadDotProductAttention(2),
        lambda: nnx.MultiHeadAttention(2, N, decode=False, rngs=rngs()),
    ),
    "attention without decode": (
        nn.SelfAttention(2),
        lambda: nnx.MultiHeadAttention(2, N, rngs=rngs()),
    ),
    "LSTMCell": (nn.LSTMCell(N), lambda: nnx.LSTMCell(N, N, rngs=rngs())),
    "OptimizedLSTMCell": (
        nn.OptimizedLSTMCell(N),
        lambda: nnx.OptimizedLSTMCell(N, N, rngs=rngs()),
    ),
    "GRUCell": (nn.GRUCell(N), lambda: nnx.GRUCell(N, N, rngs=rngs())),
    "SimpleCell": (nn.SimpleCell(N), lambda: nnx.SimpleCell(N, N, rngs=rngs())),
    "RNN": (nn.RNN(nn.GRUCell(N)), lambda: nnx.RNN(nnx.GRUCell(N, N, rngs=rngs()))),
    "Dropout": (nn.Dropout(0.1), lambda: nnx.Dropout(0.1, rngs=rngs())),
    "PReLU": (nn.PReLU(), nnx.PReLU),
    "precision": (
        nn.Dense(N, precision=jax.lax.Precision.HIGHEST),
        lambda: nnx.Linear(N, N, precision="highest", rngs=rngs()),
    ),
    "padding in another case": (
        nn.Conv(N, (3, 3), padding="same"),
        lambda: nnx.Conv(N, N, (3, 3), rngs=rngs()),
    ),
}

OTHER = {
    "epsilon": (nn.LayerNorm(epsilon=1e-5), lambda: nnx.LayerNorm(N, rngs=rngs())),
    "momentum": (nn.BatchNorm(momentum=0.9), lambda: nnx.BatchNorm(N, rngs=rngs())),
    "rate": (nn.Dropout(0.0), lambda: nnx.Dropout(0.1, rngs=rngs())),
    "use_bias": (nn.Dense(N, use_bias=False), lambda: nnx.Linear(N, N, rngs=rngs())),
    "param_dtype": (
        nn.Dense(N, param_dtype=jnp.bfloat16),
        lambda: nnx.Linear(N, N, rngs=rngs()),
    ),
    "precision": (nn.Dense(N, precision="highest"), lambda: nnx.Linear(N, N, rngs=rngs())),
    "strides": (nn.Conv(N, (3, 3), strides=2), lambda: nnx.Conv(N, N, (3, 3), rngs=rngs())),
    "padding": (
        nn.Conv(N, (3, 3), padding="VALID"),
        lambda: nnx.Conv(N, N, (3, 3), rngs=rngs()),
    ),
    "num_heads": (
        nn.MultiHeadDotProductAttention(4),
        lambda: nnx.MultiHeadAttention(2, N, rngs=rngs()),
    ),
    "features": (nn.Dense(8), lambda: nnx.Linear(N, N, rngs=rngs())),
    "class": (nn.LayerNorm(), lambda: nnx.RMSNorm(N, rngs=rngs())),
    "activation_fn": (
        nn.LSTMCell(N, activation_fn=nn.relu),
        lambda: nnx.LSTMCell(N, N, rngs=rngs()),
    ),
    "reverse": (
        nn.RNN(nn.GRUCell(N), reverse=True),
        lambda: nnx.RNN(nnx.GRUCell(N, N, rngs=rngs())),
    ),
    "axis_name": (nn.BatchNorm(axis_name="batch"), lambda: nnx.BatchNorm(N, rngs=rngs())),
    "kind": (Kind("gelu"), lambda: Kind("GELU")),
}


def differences(a, b, *, same_dtypes=True):
    classes = type(a), type(b)
    found = field_differences(classes, fields_of(a), fields_of(b), same_dtypes=same_dtypes)
    return [difference.name for difference in found]


@pytest.mark.parametrize("name", SAME)
def test_layers_of_both_libraries_that_do_the_same_have_no_difference(name):
    linen, make = SAME[name]

    assert differences(linen, make()) == []
    assert differences(make(), linen) == []


@pytest.mark.parametrize("name", OTHER)
def test_a_field_that_differs_is_named_as_linen_names_it(name):
    linen, make = OTHER[name]

    assert name in differences(linen, make())
    assert name in differences(make(), linen)


def test_text_in_a_field_is_shown_as_it_was_given():
    a, b = nn.Conv(N, (3,), padding="same"), nn.Conv(N, (3,), padding="Valid")

    [padding] = field_differences((nn.Conv,) * 2, fields_of(a), fields_of(b), same_dtypes=True)
    [kind] = field_differences(
        (Kind,) * 2, fields_of(Kind("gelu")), fields_of(Kind("tanh")), same_dtypes=True
    )

    assert str(padding) == "padding is 'same' in a and 'Valid' in b"
    assert str(kind) == "kind is 'gelu' in a and 'tanh' in b"


def test_an_open_dtype_counts_where_the_output_has_another_one():
    given, left_open = nn.Dense(N, dtype=jnp.bfloat16), nn.Dense(N)

    assert differences(given, left_open, same_dtypes=False) == ["dtype"]
    assert differences(given, left_open) == []
    assert differences(given, nn.Dense(N, dtype=jnp.float16)) == ["dtype"]


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.SimpleCell(3))(x)


class NativeRecurrent(nnx.Module):
    def __init__(self, rngs):
        cell = nnx.SimpleCell(4, 3, rngs=rngs)
        self.rnn = nnx.RNN(cell, reverse=True, keep_order=True, rngs=rngs)

    def __call__(self, x):
        return self.rnn(x)


def test_a_layer_whose_values_are_beside_it_has_its_fields_compared():
    x = jax.random.normal(jax.random.key(0), (2, 2, 4))
    variables = Recurrent().init(jax.random.key(1), x)
    native = NativeRecurrent(nnx.Rngs(0))
    port.plan(variables, native).apply()

    report = parity.check(
        (Recurrent(), variables),
        native,
        x,
        sections=("outputs", "layers", "fields"),
        options=parity.Options(jit=False),
    )

    named = {c.place for c in report.section("fields").differing}
    assert named == {"RNN_0 -> rnn: reverse", "RNN_0 -> rnn: keep_order"}
