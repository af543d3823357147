"""The tables of Flax's layers: each tool keeps its own, and they say the same of every layer."""

import pytest
from flax import linen as nn
from flax import nnx

from bridge._cli.report._counterparts import COUNTERPARTS
from bridge.parity._fields import _ALIASES
from bridge.port._layers import RULES, without_nnx_class
from bridge.rewrite._layers import LAYERS

LINEN = {
    name: cls
    for name, cls in vars(nn).items()
    if isinstance(cls, type) and issubclass(cls, nn.Module)
}
NATIVE = {
    name: cls
    for name, cls in vars(nnx).items()
    if isinstance(cls, type) and issubclass(cls, nnx.Module)
}
# They are base classes and containers, not layers.
NO_LAYERS = {"Module", "RNNCellBase"}
NO_NATIVE_LAYERS = {"Module", "RNNCellBase", "Dict", "List"}
# Without variables, there is nothing to port.
WITHOUT_VARIABLES = {nn.Dropout}
# Qwix has the Linen class of the first two, and programs write the last themselves: Flax has none.
WITHOUT_LINEN_CLASS = {"LoRA", "LoRALinear", "RoPE"}
# The rewriter leaves these as they are: its Linen field has no place there, or the layer has none.
NOT_REWRITTEN = {nn.GRUCell, nn.SpectralNorm, nn.WeightNorm}


def has_no_native_class(name):
    return without_nnx_class("params", (f"{name}_0", "kernel"), frozenset()) is not None


@pytest.mark.parametrize("name", sorted(LINEN.keys() - NO_LAYERS))
def test_every_linen_layer_has_a_counterpart_or_is_known_to_have_none(name):
    assert (LINEN[name] in COUNTERPARTS) != has_no_native_class(name)


@pytest.mark.parametrize("name", sorted(NATIVE.keys() - NO_NATIVE_LAYERS))
def test_every_nnx_layer_is_a_counterpart(name):
    assert (NATIVE[name] in COUNTERPARTS.values()) != (name in WITHOUT_LINEN_CLASS)
    assert (NATIVE[name] in RULES) != (name in {cls.__name__ for cls in WITHOUT_VARIABLES})


@pytest.mark.parametrize("linen", COUNTERPARTS, ids=lambda cls: cls.__name__)
def test_what_the_report_shows_is_ported_and_rewritten(linen):
    native = COUNTERPARTS[linen]
    if linen not in WITHOUT_VARIABLES:
        assert linen.__name__ in RULES[native].linen
    assert (linen in LAYERS) != (linen in NOT_REWRITTEN)
    if linen in LAYERS:
        assert getattr(nnx, LAYERS[linen].name) is native


def test_what_is_ported_or_rewritten_is_in_the_report():
    ported = {name for rule in RULES.values() for name in rule.linen} & LINEN.keys()
    assert {LINEN[name] for name in ported} <= COUNTERPARTS.keys()
    assert LAYERS.keys() <= COUNTERPARTS.keys()


@pytest.mark.parametrize("linen", LAYERS, ids=lambda cls: cls.__name__)
def test_fields_have_the_names_in_a_comparison_that_the_rewriter_gives_them(linen):
    layer = LAYERS[linen]
    compared = {
        theirs: ours
        for theirs, ours in _ALIASES.get(getattr(nnx, layer.name), {}).items()
        if ours not in layer.unsupported
    }
    assert compared == {theirs: ours for ours, theirs in layer.renames.items()}


def test_every_layer_with_other_names_of_fields_is_a_counterpart():
    assert set(_ALIASES) <= set(COUNTERPARTS.values())
