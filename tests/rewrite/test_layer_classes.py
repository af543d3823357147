"""Classes that derive from Flax's layers become classes that derive from NNX's."""

import jax
import pytest
from flax import linen as nn

import bridge
from tests.rewrite import models_layers as models

IMAGES = jax.ShapeDtypeStruct((2, 6, 6, 3), "float32")
LEFT = [
    models.OwnParamAndCall,
    models.OtherInitialiser,
    models.OtherName,
    models.MakesMore,
    models.OwnSetup,
]


@pytest.fixture(scope="module")
def rewritten():
    return bridge.rewrite(models.Model, IMAGES, kwargs={"train": False}, fast=True)


def test_a_program_of_such_classes_is_proven(rewritten):
    assert rewritten.ok, str(rewritten)
    assert rewritten.max_difference == 0
    assert len(rewritten.classes) == 6


def test_they_derive_from_the_layers_of_nnx(rewritten):
    (text,) = rewritten.sources.values()
    assert "class CentredConv(nnx.Conv):" in text
    assert "class MoreScaled(Scaled):" in text
    assert "self.gain / self.out_features" in text
    assert "super().__init__(*args, gain=gain, **kwargs)" in text
    assert "# The bias stays as it is." in text
    assert "ToNNX" not in text


def test_one_of_them_may_be_the_model():
    result = bridge.rewrite(models.CentredConv(4, (3, 3)), IMAGES, gradients=False, fast=True)
    assert result.ok, str(result)
    assert result.max_difference == 0


@pytest.mark.parametrize("cls", LEFT, ids=lambda cls: cls.__name__)
def test_one_that_does_more_stays_linen_and_says_why(cls):
    result = bridge.rewrite(cls(3), IMAGES, gradients=False)
    (found,) = (c for c in result.classes if c.name == cls.__name__)
    assert found.level == "left Linen"
    assert cls.__doc__ in found.notes[0]


def test_a_field_that_brings_a_layer_that_nnx_lacks_keeps_it():
    model = models.WrappedConv(nn.ConvLocal)
    result = bridge.rewrite(model, IMAGES, gradients=False, fast=True)
    assert result.is_proven, str(result)
    (text,) = result.sources.values()
    assert "bridge.ToNNX(conv(3, (2, 2)), rngs=rngs)" in text
    assert "conv: Any = nn.Conv" in text
