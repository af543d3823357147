"""The fields of a Linen module, and what is no Linen module."""

import pytest
from flax import nnx

import bridge
from bridge._linen_in_nnx.methods import check_module, field_names
from tests.models import LinenAutoencoder

MODULE = LinenAutoencoder(features=7)


def scaled(module, x):
    return module.features * x


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
