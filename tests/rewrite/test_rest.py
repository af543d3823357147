"""Layers that are given `**` arguments are rewritten where NNX's take them as they are."""

import jax

import bridge
from tests.rewrite import models_rest as models
from tests.rewrite.test_programs import spec


def test_dicts_of_a_method_a_field_and_a_file_are_given_on():
    result = bridge.rewrite(models.Model, spec(2, 4), gradients=False)
    assert result.is_proven, str(result)
    assert result.max_difference == 0.0
    assert {each.level for each in result.classes} == {"proven"}, str(result)
    (text,) = result.sources.values()
    assert "rngs=rngs, **inits)" in text
    assert "nnx.LayerNorm(2 * in_features, rngs=rngs, **self.options)" in text
    assert "bridge" not in text


def test_names_that_nnx_has_not_keep_their_layers_linen():
    result = bridge.rewrite(models.make_named, spec(2, 4), gradients=False, fast=True)
    assert result.is_proven, str(result)
    (text,) = result.sources.values()
    assert text.count("bridge.ToNNX(nn.") == 2
    assert "** arguments that its NNX counterpart does not take" in str(result)


def test_a_dict_that_changes_keeps_its_class_linen():
    result = bridge.rewrite(models.Changed, spec(2, 4), gradients=False)
    assert [each.level for each in result.classes] == ["left Linen"]
    assert "is changed before the layer is made" in str(result)


def test_a_function_that_is_given_a_dict_keeps_only_its_caller_linen():
    result = bridge.rewrite(models.Functions, spec(2, 4), gradients=False, fast=True)
    assert result.is_proven, str(result)
    assert [each.name for each in result.classes if each.level == "left Linen"] == ["Starred"]
    assert "a function that makes layers is called with * or ** arguments" in str(result)


def test_an_output_of_the_programs_own_class_is_compared_by_its_leaves():
    result = bridge.rewrite(models.Policy, spec(2, 4), gradients=False)
    assert [each.level for each in result.classes] == ["proven"], str(result)


def test_an_input_that_takes_no_other_size_is_run_as_it_is():
    # Regression: the run with other sizes raised, and on Python 3.13.0 the trace crashed.
    x = models.Labelled(jax.ShapeDtypeStruct((4, 2), "float32"), ("a", "b"))
    result = bridge.rewrite(models.OfLabelled, x, gradients=False, fast=True)
    assert result.is_proven, str(result)
    assert len(result.sources) == 1
