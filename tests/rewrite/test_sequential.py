"""`nn.Sequential`: keywords reach its first layer only, and what it holds may stay Linen."""

import jax
import pytest
from flax import linen as nn

import bridge

INPUT = jax.ShapeDtypeStruct((2, 4), "float32")


class Scale(nn.Module):
    @nn.compact
    def __call__(self, x, factor=1.0):
        return nn.Dense(4)(x) * factor


class Free(nn.Module):
    @nn.compact
    def __call__(self, x, **options):
        return nn.Dense(4)(x) + len(options)


def shifted(x, *, factor=3.0):
    return x + factor


class TwoTakeIt(nn.Module):
    def setup(self):
        self.layers = nn.Sequential([Scale(), nn.relu, Scale()])

    def __call__(self, x):
        return self.layers(x, factor=2.0)


class OneTakesAll(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Sequential([Scale(), Free()])(x, factor=2.0)


class AFunctionTakesIt(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Sequential([Scale(), shifted])(x, factor=2.0)


class OnlyTheFirst(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Sequential([Scale(), nn.Dense(3), nn.relu])(x, factor=2.0)


class ByPosition(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Sequential([Scale(), Scale()])(x, 2.0)


class InputByName(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Sequential([Scale(), Scale(), Free()])(x=x)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.WeightNorm(nn.Dense(4))(x)


class HoldsLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Sequential([nn.Dense(4), nn.Sequential([Normed()]), nn.Dense(3)])(x)


@pytest.mark.parametrize("cls", [TwoTakeIt, OneTakesAll, AFunctionTakesIt])
def test_a_sequential_stays_linen_if_nnx_would_hand_on_a_keyword(cls):
    result = bridge.rewrite(cls, INPUT, gradients=False, fast=True)
    assert result.is_proven, str(result)
    (text,) = result.sources.values()
    assert "# Stays Linen: nnx.Sequential would pass factor to layers after the first." in text


@pytest.mark.parametrize("cls", [OnlyTheFirst, ByPosition, InputByName])
def test_a_sequential_is_rewritten_if_no_other_layer_takes_the_keyword(cls):
    result = bridge.rewrite(cls, INPUT, gradients=False, fast=True)
    assert result.is_proven, str(result)
    (text,) = result.sources.values()
    assert "nnx.Sequential(" in text
    assert "Stays Linen" not in text


def test_a_compact_sequential_with_a_layer_that_stays_linen_is_wrapped():
    result = bridge.rewrite(HoldsLinen, INPUT, gradients=False)
    assert result.is_proven, str(result)
    (found,) = [each for each in result.classes if each.name == "HoldsLinen"]
    assert found.level == "proven"
    assert "stays Linen: Normed stays Linen" in found.notes[0]
