"""Which function of a Linen module a call means, and what is no Linen module."""

import pytest
from flax import nnx

import bridge
from bridge._linen_in_nnx.methods import check_module, field_names, function_of
from tests.models import LinenAutoencoder

MODULE = LinenAutoencoder(features=7)


def scaled(module, x):
    return module.features * x


@pytest.mark.parametrize("method", ["encode", LinenAutoencoder.encode, MODULE.encode])
def test_a_method_is_meant_by_its_name_by_its_function_and_bound(method):
    assert function_of(MODULE, method).__name__ == "encode"


def test_without_a_method_the_call_is_meant():
    assert function_of(MODULE, None).__name__ == "__call__"


def test_any_function_of_a_module_will_do():
    assert function_of(MODULE, scaled)(MODULE, 2) == 14


@pytest.mark.parametrize("method", ["encod", "features", "missing", 3])
def test_what_is_no_method_is_an_error_that_lists_those_that_are(method):
    with pytest.raises(bridge.InvalidMethodError) as caught:
        function_of(MODULE, method)
    for name in ("__call__", "decode", "encode"):
        assert name in str(caught.value)
    # Neither what every Linen module has nor fields are offered.
    assert "apply" not in str(caught.value)


def test_the_fields_of_a_module_are_those_of_its_class():
    assert {"features", "name_of_owner", "parent", "name"} == set(field_names(MODULE))


def test_a_linen_module_is_one():
    assert check_module(MODULE) is None


@pytest.mark.parametrize(
    ("module", "hint"),
    [
        (LinenAutoencoder, "ToNNX(LinenAutoencoder("),
        (nnx.Linear(1, 1, rngs=nnx.Rngs(0)), "it is NNX already"),
        (nnx.Linear, "it is NNX already"),
        (3, "pass an instance of a subclass of flax.linen.Module"),
        (scaled, "pass an instance of a subclass of flax.linen.Module"),
    ],
)
def test_what_is_no_linen_module_is_an_error_with_the_remedy(module, hint):
    with pytest.raises(bridge.InvalidModuleError) as caught:
        check_module(module)
    assert hint in str(caught.value)
