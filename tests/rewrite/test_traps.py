"""Differences of Linen and NNX are acted on in the new source, and proven."""

import re

import jax
import pytest

import bridge
from tests.rewrite.programs_traps import KEPT, NORM_OVER_DEVICES, TRAPS, together

INPUT = jax.ShapeDtypeStruct((2, 6, 4), "float32")
RESULTS = {}


@pytest.fixture(params=TRAPS)
def rewritten(request, imported_program):
    """The name of some traps, and the result of the program of all of them."""
    name = request.param
    if name not in RESULTS:
        root = imported_program(together(TRAPS[name])).Root
        RESULTS[name] = bridge.rewrite(
            root, INPUT, kwargs={"train": False}, gradients=False, fast=True
        )
    return name, RESULTS[name]


def test_the_program_is_proven(rewritten):
    name, result = rewritten
    assert result.is_proven, str(result)
    # What stays Linen is another program, and attention multiplies in another order.
    assert result.max_difference <= (1e-5 if name == "kept" else 0)


def test_no_class_stays_linen(rewritten):
    _, result = rewritten
    levels = {each.name: each.level for each in result.classes}
    reviewed = {each for each, level in levels.items() if level == "needs review"}
    assert reviewed == set()
    assert "left Linen" not in levels.values(), str(result)


def test_the_difference_is_acted_on(rewritten):
    name, result = rewritten
    (text,) = result.sources.values()
    classes = dict(re.findall(r"^class (\w+)(.*?)(?=^class |\Z)", text, flags=re.M | re.S))
    lacking = [
        trap.acted_on
        for trap in TRAPS[name]
        if not any(trap.acted_on in classes[each] for each in trap.classes)
    ]
    assert lacking == []


def test_what_is_wrapped_is_told_with_its_reason(imported_program):
    (trap,) = (each for each in KEPT if "NormFeatureAxes" in each.classes)
    module = imported_program(trap.source)
    (found,) = bridge.rewrite(module.NormFeatureAxes, INPUT, gradients=False).classes
    assert found.level == "proven"
    assert "layer_norm stays Linen: its num_features could not be determined" in found.notes[0]


def test_a_norm_over_a_named_axis_is_compared_under_that_axis(imported_program):
    model = imported_program(NORM_OVER_DEVICES).Model
    result = bridge.rewrite(model, INPUT, kwargs={"train": False}, gradients=False, fast=True)
    assert result.is_proven, str(result)
    assert "entry, in training" in result.reports
    (text,) = result.sources.values()
    assert 'nnx.BatchNorm(in_features, axis_name="devices", rngs=rngs)' in text
