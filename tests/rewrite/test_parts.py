"""If a model's own class stays Linen, its parts are proven by themselves."""

import jax
import pytest

import bridge
from bridge.rewrite import RewriteError
from tests.rewrite import models_parts as models
from tests.rewrite.test_programs import spec

TOKENS = jax.ShapeDtypeStruct((2, 3), "int32")


@pytest.fixture(scope="module")
def result():
    options = {"kwargs": {"train": False}, "gradients": False, "fast": True}
    return bridge.rewrite(models.Model, TOKENS, **options)


def levels(result):
    return {each.name: each.level for each in result.classes}


def test_the_parts_are_proven_and_the_rest_says_why_not(result):
    assert result.is_proven, str(result)
    assert not result.ok
    assert result.max_difference == 0
    found = levels(result)
    assert {name for name in found if found[name] != "left Linen"} == {"Layer", "Tower", "Table"}
    reasons = {each.name: each.notes for each in result.classes if each.level == "left Linen"}
    assert reasons.keys() == {"Model", "Shares", "Summed"}
    assert "self.path" in reasons["Model"][0]
    assert models.Shares.__doc__ in reasons["Shares"][0]
    assert models.Summed.__doc__ in reasons["Summed"][0]


def test_each_part_is_proven_as_the_model_makes_and_calls_it(result):
    made = {label.split(",")[0] for label in result.reports}
    assert made == {"Layer", "Tower", "Table"}
    # Two depths, and two methods.
    entries = [tuple(label.split(", ")[:2]) for label in result.reports]
    assert len({number for name, number in entries if name == "Tower"}) == 2
    assert len({number for name, number in entries if name == "Table"}) == 2
    assert set(result.parts) == made
    assert "its parts are proven" in str(result)
    assert "run and compared by themselves: " in str(result)


def test_what_is_of_the_whole_alone_is_not_given(result):
    assert not result.rules
    with pytest.raises(RewriteError, match="the test cannot be written"):
        result.write(test=True)
    with pytest.raises(RewriteError):
        result.in_place()


def test_a_model_without_parts_is_not_proven():
    result = bridge.rewrite(models.Alone, spec(2, 3), gradients=False)
    assert not result.is_proven
    assert levels(result) == {"Alone": "left Linen"}
    assert not result.sources
