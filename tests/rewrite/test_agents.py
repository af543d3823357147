"""Agents with arrays as fields, and ensembles of what a field brings, are rewritten."""

import jax

import bridge
from tests.rewrite import models_agents as models


def spec(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def test_arrays_as_fields_keep_their_values():
    result = bridge.rewrite(models.make_bounded, spec(2, 3), gradients=False)
    assert result.ok, str(result)
    assert {each.level for each in result.classes} == {"proven"}
    assert result.max_difference == 0


def test_an_ensemble_of_a_partial_is_made_by_vmap():
    inputs = spec(2, 3), spec(2, 2)
    result = bridge.rewrite(models.make_ensemble, *inputs, gradients=False, fast=True)
    (text,) = result.sources.values()
    assert result.ok, str(result)
    assert result.max_difference == 0
    assert "lambda rngs: self.member(" in text
    assert "lambda member: member(*args), out_axes=1)(self.members)" in text
