"""Inner functions become classes, parameters of a function are its module's, and loops are cut."""

import jax
import pytest

import bridge
from tests.rewrite import models_inner_functions as models


@pytest.fixture(scope="module")
def result():
    given = jax.ShapeDtypeStruct((2, 3), "float32")
    options = {"kwargs": {"train": False}, "gradients": False, "fast": True}
    return bridge.rewrite(models.Root, given, **options)


def test_the_program_is_proven_and_nothing_stays_linen(result):
    (text,) = result.sources.values()
    assert result.ok, str(result)
    assert result.max_difference == 0
    assert "left Linen" not in {each.level for each in result.classes}, str(result)
    assert "ToNNX" not in text


def test_an_inner_function_is_a_class_beside_that_of_its_method(result):
    (text,) = result.sources.values()
    assert "# Norm, then a layer.\nclass NestedBlock(nnx.Module):" in text
    assert "self.blocks.append(NestedBlock(width, in_features=features_in, rngs=rngs))" in text
    assert "        return self.last(y) + self.block_1(x, train)" in text
    assert "def block" not in text
    assert "self.inner = TwoLevelsInner(" in text


def test_a_parameter_that_a_function_makes_keeps_its_path_in_linen(result):
    assert result.rules["Given_0/table"] == "given.add_table.table"


def test_a_loop_over_arrays_and_sizes_is_one_over_sizes_in_the_constructor(result):
    (text,) = result.sources.values()
    assert "for skip_features, width in reversed(list(zip(skips_features, self.widths" in text
    assert "        for i, width in enumerate(self.widths):" in text
    assert "for skip_features, low, high in zip(skips_features, self.widths, self" in text
    assert "for w in self.widths])" in text
