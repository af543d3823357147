"""Functions that make layers become classes, or functions that return NNX's layers."""

import functools

import jax
import pytest

import bridge
from tests.rewrite import models_layer_functions as models

INPUT = jax.ShapeDtypeStruct((2, 3), "float32")
TRAINED = (models.Gated, models.ThreeLevels)
PROGRAMS = [
    models.Applied,
    models.Gated,
    models.Stacks,
    models.Compact,
    models.Both,
    models.ThreeLevels,
]


@functools.cache
def rewritten(cls):
    kwargs = {"train": False} if cls in TRAINED else {}
    return bridge.rewrite(cls, INPUT, kwargs=kwargs, gradients=False, fast=True)


@pytest.mark.parametrize("cls", PROGRAMS, ids=lambda cls: cls.__name__)
def test_a_program_with_functions_is_proven_and_nothing_stays_linen(cls):
    result = rewritten(cls)
    (text,) = result.sources.values()
    assert result.ok, str(result)
    assert result.max_difference == 0
    assert "ToNNX" not in text


def test_a_function_that_calls_its_layers_becomes_a_class():
    (text,) = rewritten(models.Applied).sources.values()
    assert "class Block(nnx.Module):" in text
    assert "self.blocks.append(Block(size, in_features=features_in, rngs=rngs))" in text
    assert "    def __call__(self, x):\n" in text
    assert "# Wide first." in text
    assert "self.block_1(self.block_0(x))" in text


def test_a_function_that_returns_layers_stays_a_function():
    (text,) = rewritten(models.Compact).sources.values()
    assert "def dense(size, *, in_features: int, rngs: nnx.Rngs, **options):" in text
    assert "self.out = dense(2, in_features=6, rngs=rngs)" in text
