"""A model of 50 layers with a fault in layer 31: parity names layer 31, whatever the kinds."""

import pytest

import bridge
from bridge import parity
from tests.parity.parity_models import X, linen_deep, nnx_deep, transposed

DEPTH = 50
FAULTY = 31


@pytest.fixture(scope="module")
def linen():
    return linen_deep(DEPTH)


def native(linen):
    return nnx_deep(linen[1], DEPTH)


def as_nnx(linen, native):
    return native


def as_to_linen(linen, native):
    return bridge.ToLinen.from_module(native)


def as_to_nnx(linen, native):
    """The Linen module wrapped, with the weights that the native model has."""
    variables = {
        "params": {
            f"layers_{index}": {
                "norm": {"scale": block.norm.scale[...], "bias": block.norm.bias[...]},
                "dense": {"kernel": block.dense.kernel[...], "bias": block.dense.bias[...]},
            }
            for index, block in enumerate(native.layers)
        }
    }
    return bridge.ToNNX.from_variables(linen[0], variables)


@pytest.mark.parametrize("kind", [as_nnx, as_to_linen, as_to_nnx])
def test_a_transposed_kernel_in_layer_31_of_50_is_named(linen, kind):
    model = native(linen)
    kernel = model.layers[FAULTY].dense.kernel
    kernel[...] = transposed(kernel[...])

    report = parity.check(linen, kind(linen, model), X, gradients=False)

    assert not report.ok
    assert report.first_divergence.path == (f"layers_{FAULTY}", "dense")
    assert report.first_divergence.inputs.verdict == "bitwise"
    [weight] = report.section("weights").differing
    assert weight.place.startswith(f"params/layers_{FAULTY}/dense/kernel")
    assert f"first layer that diverges: layers_{FAULTY}/dense" in str(report)
