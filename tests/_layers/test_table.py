"""Layers that users register: their values are ported, their fields compared, and all is told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge import parity, port
from bridge._cli.report import _document
from bridge._layers import table

KEY, X = jax.random.key(0), jnp.arange(1.0, 5.0)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Takes back what a test registers."""
    for name in ("_by_linen", "_by_nnx", "_linen_names"):
        monkeypatch.setattr(table, name, getattr(table, name).copy())


class LinenScaleNorm(nn.Module):
    epsilon: float = 1e-6
    gain_init: nn.initializers.Initializer = nn.initializers.normal(1.0)

    @nn.compact
    def __call__(self, x):
        gain = self.param("gain", self.gain_init, (x.shape[-1],))
        return gain * x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + self.epsilon)


class ScaleNorm(nnx.Module):
    def __init__(self, size, eps=1e-6, *, rngs):
        self.scale = nnx.Param(jnp.zeros(size))
        self.eps = eps

    def __call__(self, x):
        return self.scale * x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + self.eps)


class OtherNorm(ScaleNorm):
    """Other than `ScaleNorm` in the name alone."""


class LinenModel(nn.Module):
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x):
        return LinenScaleNorm(self.epsilon)(nn.Dense(4)(x))


class Model(nnx.Module):
    def __init__(self, eps=1e-6, norm=ScaleNorm, *, rngs):
        self.fc = nnx.Linear(4, 4, rngs=rngs)
        self.norm = norm(4, eps, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.fc(x))


def register(linen=LinenScaleNorm, native=ScaleNorm, **options):
    given = {"leaves": {"gain": "scale"}, "fields": {"epsilon": "eps"}, **options}
    bridge.register_layer(linen, native, **given)


@pytest.mark.parametrize("norm", [ScaleNorm, OtherNorm])
def test_a_registered_layer_is_ported_by_its_names(norm):
    variables, model = LinenModel().init(KEY, X), Model(norm=norm, rngs=nnx.Rngs(1))
    assert not port.plan(variables, model).ok

    register()
    plan = port.plan(variables, model)
    plan.apply()

    assert np.array_equal(model(X), LinenModel().apply(variables, X))
    assert any(entry.rule.startswith("LinenScaleNorm") for entry in plan.entries)


def test_a_registered_layer_is_ported_back():
    register()
    model = Model(rngs=nnx.Rngs(1))
    model.norm.scale[...] = jnp.arange(4.0)

    variables = port.plan(model, LinenModel().init(KEY, X)).apply()

    assert np.array_equal(LinenModel().apply(variables, X), model(X))


def test_fields_of_a_registered_layer_are_compared():
    def different():
        variables, model = LinenModel(1e-3).init(KEY, X), Model(rngs=nnx.Rngs(1))
        rules = {"Dense_0": "fc", "LinenScaleNorm_0/gain": "norm.scale"}
        report = parity.check((LinenModel(1e-3), variables), model, X, rules=rules)
        compared = {each.place: each.values for each in report.section("fields").compared}
        return compared.get("LinenScaleNorm_0 -> norm: epsilon") == ("0.001", "1e-06")

    assert not different()
    register()
    assert different()


def test_the_report_counts_a_registered_layer_as_one_with_a_counterpart():
    assert _document.counterpart_of(LinenScaleNorm) is None
    register()
    assert _document.counterpart_of(LinenScaleNorm) is ScaleNorm


class LinenGates(nn.Module):
    @nn.compact
    def __call__(self, x):
        first, second = nn.Dense(3, name="a")(x), nn.Dense(3, name="b")(x)
        shift = self.param("shift", nn.initializers.normal(1.0), (3,))
        return jnp.tanh(first) * nn.sigmoid(second) + shift


class Gates(nnx.Module):
    def __init__(self, *, rngs):
        self.both = nnx.Linear(4, 6, rngs=rngs)
        self.offset = nnx.Param(jnp.zeros(3))

    def __call__(self, x):
        first, second = jnp.split(self.both(x), 2, axis=-1)
        return jnp.tanh(first) * nnx.sigmoid(second) + self.offset


class HoldsGates(nnx.Module):
    def __init__(self, *, rngs):
        self.gates = Gates(rngs=rngs)


class LinenHoldsGates(nn.Module):
    @nn.compact
    def __call__(self, x):
        return LinenGates(name="under_another_name")(x)


def test_leaves_that_nnx_has_as_one_are_ported_for_any_name_of_the_layer():
    bridge.register_layer(
        LinenGates,
        Gates,
        leaves={
            ("a/kernel", "b/kernel"): "both/kernel",
            ("a/bias", "b/bias"): "both/bias",
            "shift": "offset",
        },
    )
    variables, model = LinenHoldsGates().init(KEY, X), HoldsGates(rngs=nnx.Rngs(1))

    port.plan(variables, model).apply()

    # Sums of four products, in another order: the kernels are side by side.
    expected = LinenHoldsGates().apply(variables, X)
    assert np.allclose(model.gates(X), expected, rtol=1e-6, atol=1e-6)


class LinenOwnDense(nn.Dense):
    """A class of its own, as one with logical axes is."""


class LinenDenseModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        return LinenOwnDense(4)(x)


def test_a_class_of_flax_can_be_the_counterpart():
    bridge.register_layer(LinenOwnDense, nnx.Linear)

    assert _document.counterpart_of(LinenOwnDense) is nnx.Linear
    assert _document.counterpart_of(nn.Dense) is nnx.Linear


def test_a_layer_that_nnx_lacks_may_get_one():
    class Local(nnx.Module):
        pass

    bridge.register_layer(nn.ConvLocal, Local)

    assert _document.counterpart_of(nn.ConvLocal) is Local
    assert table.without_nnx_class("params", ("ConvLocal_0", "kernel"), ()) is None
    assert table.without_nnx_class("params", ("MGUCell_0", "in", "kernel"), ()) == "MGUCell"


def test_the_same_layer_may_be_registered_again():
    register()
    register()
    # A cell of a notebook that is run again defines its classes again.
    again = type(LinenScaleNorm)("LinenScaleNorm", (nn.Module,), {**_namespace(LinenScaleNorm)})
    register(linen=again)
    assert _document.counterpart_of(again) is ScaleNorm


def _namespace(cls):
    return {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__annotations__": {"epsilon": float},
        "epsilon": 1e-6,
    }


def test_another_counterpart_is_a_conflict_that_names_both():
    register()
    with pytest.raises(bridge.LayerRegistrationError, match="overwrite=True") as caught:
        register(native=OtherNorm)
    assert (caught.value.linen_class, caught.value.nnx_class) == (LinenScaleNorm, OtherNorm)
    assert caught.value.found.nnx is ScaleNorm
    assert all(name in str(caught.value) for name in ("LinenScaleNorm", "OtherNorm", ".ScaleNorm"))

    register(native=OtherNorm, overwrite=True)
    assert _document.counterpart_of(LinenScaleNorm) is OtherNorm


@pytest.mark.parametrize("other", [{"leaves": {"gain": "weight"}}, {"fields": {}}])
def test_other_names_are_a_conflict(other):
    register()
    with pytest.raises(bridge.LayerRegistrationError, match=r"leaves \{'gain': 'scale'\}"):
        register(**other)


def test_a_layer_of_flax_is_not_taken_without_overwrite():
    with pytest.raises(bridge.LayerRegistrationError, match="Dense"):
        bridge.register_layer(nn.Dense, ScaleNorm)
    assert _document.counterpart_of(nn.Dense) is nnx.Linear


@pytest.mark.parametrize("swapped", [True, False])
def test_what_is_no_pair_of_classes_is_refused(swapped):
    pair = (ScaleNorm, LinenScaleNorm) if swapped else (LinenScaleNorm(), ScaleNorm)
    with pytest.raises(bridge.LayerRegistrationError, match="expected a Linen class"):
        bridge.register_layer(*pair)


def test_a_field_that_the_linen_class_lacks_is_refused():
    with pytest.raises(bridge.LayerRegistrationError, match="fields are epsilon") as caught:
        register(fields={"eps": "epsilon"})
    assert caught.value.found == ("eps",)
