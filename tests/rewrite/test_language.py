"""Language models whose configuration sets modes, precision, caches and sharing."""

import functools

import jax.numpy as jnp
import pytest
from flax import linen as nn

import bridge
from tests.rewrite import models_language as models
from tests.rewrite.test_programs import tokens

DROPPING = {"deterministic": False}
CONFIGS = {
    "dropout is on in the configuration": DROPPING,
    "one table for two halves": {"share": True},
    "a table of positions": {"table_init": nn.initializers.normal()},
}


@functools.cache
def rewritten(**fields):
    return bridge.rewrite(
        lambda: models.Model(models.Config(**fields)), tokens(2, 5), gradients=False, fast=True
    )


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_every_class_is_proven(fields):
    result = rewritten(**fields)
    assert result.is_proven, str(result)
    assert result.ok, str(result)
    assert result.max_difference == 0.0


def test_the_mode_of_a_constructor_is_in_the_call_and_stays_under_train():
    (text,) = rewritten(**DROPPING).sources.values()
    assert "self.layer_norm(x), mask=mask, deterministic=config.deterministic)" in text
    assert "self.drop(self.dense(x), deterministic=self.config.deterministic)" in text


def test_a_model_that_drops_is_compared_while_it_decodes():
    result = rewritten(decode=True, **DROPPING)
    assert result.is_proven, str(result)
    assert "left Linen" not in {each.level for each in result.classes}
    assert {"with config.deterministic=True, step 3 of decoding"} <= set(result.reports)


def test_weights_that_are_shared_have_the_path_that_nnx_takes_first():
    assert rewritten(share=True).rules["table"] == "first.embed"


def test_a_shape_is_written_out_where_a_parameter_needs_it():
    (text,) = rewritten(**CONFIGS["a table of positions"]).sources.values()
    assert "(1, config.length, in_features)" in text


def test_a_model_of_lower_precision_is_compared_in_both():
    result = rewritten(dtype=jnp.bfloat16)
    assert result.ok, str(result)
    assert "with config.dtype=float32" in result.reports


def test_arguments_by_name_have_the_larger_batch_too():
    result = bridge.rewrite(
        lambda: models.Model(models.Config()),
        tokens(2, 5),
        kwargs={"positions": tokens(2, 5)},
        gradients=False,
        fast=True,
    )
    assert result.is_proven, str(result)
    assert "entry, another batch size" in {*result.reports, *result.programs}
    assert "left Linen" not in {each.level for each in result.classes}
