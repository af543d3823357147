"""Cells that derive from `nn.RNNCellBase` become cells that derive from `nnx.RNNCellBase`."""

import functools

import jax
import numpy as np
from flax import nnx

import bridge
from tests.rewrite import models_cells as models
from tests.rewrite.test_programs import imported, spec


@functools.cache
def rewritten():
    return bridge.rewrite(models.Recurrent, spec(2, 3, 6), gradients=False, fast=True)


def test_cells_of_the_program_s_own_are_rewritten_and_proven():
    result = rewritten()
    assert result.is_proven, str(result)
    assert "left Linen" not in {each.level for each in result.classes}, str(result)
    assert result.max_difference == 0.0
    (text,) = result.sources.values()
    assert text.count("(nnx.RNNCellBase)") == 2


def test_a_cell_has_the_size_of_the_carry_that_it_is_given():
    (text,) = rewritten().sources.values()
    assert "nnx.LSTMCell(x_features, self.features" not in text
    assert "lstm_cell_features=self.hidden" in text


def test_the_first_carry_is_made_by_nnx_s_streams_or_without_any():
    (module,) = imported(rewritten())
    cell = module.Decaying(4, x_features=6, rngs=nnx.Rngs(0))
    for streams in (None, nnx.Rngs(0), nnx.Rngs(0).carry):
        np.testing.assert_array_equal(cell.initialize_carry((2, 6), streams), np.ones((2, 4)))
    assert nnx.RNN(cell, rngs=nnx.Rngs(0))(jax.numpy.ones((2, 3, 6))).shape == (2, 3, 4)
