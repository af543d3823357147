"""Faults planted in a GPT, a ResNet, a CNN and an RNN: the layer at fault is named.

The reference is the Linen model with its variables. The other one is the native model, the Linen
model as a ToNNX, and the native model as a ToLinen, each with one fault, and every second one with
rematerialized layers.
"""

import functools

import jax.numpy as jnp
import pytest
from flax import linen as nn

from bridge import parity
from tests.parity import fault_models
from tests.parity.fault_models import CNN_, GPT_, KINDS, RESNET, RNN_

HALF = {"dtype": jnp.bfloat16}

# (architecture, fault, the layer that is named, the field that is named).
LAYER_FAULTS = {
    "embed in bf16": (GPT_, {"embed": HALF}, "embed", "dtype"),
    "fc of block 1 in bf16": (GPT_, {"block 1": {"fc": HALF}}, "blocks_1/fc", "dtype"),
    "fc of block 0 in bf16": (
        GPT_,
        {"block 0": {"fc": HALF}},
        "blocks_0/fc",
        "dtype",
    ),
    "another epsilon of ln2": (
        GPT_,
        {"block 1": {"ln2": {"epsilon": 1e-2}}},
        "blocks_1/ln2",
        "epsilon",
    ),
    "another epsilon of the last norm": (GPT_, {"norm": {"epsilon": 1e-1}}, "norm", "epsilon"),
    "relu for gelu in block 1": (GPT_, {"block 1": {"act": nn.relu}}, "blocks_1", ""),
    "tanh for gelu in block 0": (GPT_, {"block 0": {"act": nn.tanh}}, "blocks_0", ""),
    "head in bf16": (GPT_, {"head": HALF}, "head", "dtype"),
    "attention in bf16": (
        GPT_,
        {"block 0": {"attn": HALF}},
        "blocks_0/attn/query",
        "dtype",
    ),
    "no padding": (RESNET, {"conv1": {"padding": "CIRCULAR"}}, "conv1", "padding"),
    "dilated": (RESNET, {"conv0": {"kernel_dilation": 2}}, "conv0", "kernel_dilation"),
    "conv in bf16": (RESNET, {"conv1": HALF}, "conv1", "dtype"),
    "batch norm epsilon": (RESNET, {"bn1": {"epsilon": 1e-1}}, "bn1", "epsilon"),
    "batch norm in bf16": (RESNET, {"bn0": HALF}, "bn0", "dtype"),
    "groups": (RESNET, {"gn": {"num_groups": 2}}, "gn", "num_groups"),
    "gelu for relu": (RESNET, {"act 0": nn.gelu}, "the model itself", ""),
    "stride moved": (CNN_, {"conv0": {"strides": 1}, "conv1": {"strides": 2}}, "conv0", "strides"),
    "no stride": (CNN_, {"conv0": {"strides": 1}}, "conv0", "strides"),
    "padding VALID": (CNN_, {"conv1": {"padding": "VALID"}}, "conv1", "padding"),
    "padding VALID in lower case": (CNN_, {"conv0": {"padding": "valid"}}, "conv0", "padding"),
    "padding in numbers": (CNN_, {"conv1": {"padding": ((2, 2), (2, 2))}}, "conv1", "padding"),
    "dilated without padding": (
        CNN_,
        {"conv0": {"kernel_dilation": 2, "padding": "VALID"}},
        "conv0",
        "kernel_dilation",
    ),
    "less upsampled": (CNN_, {"up": {"strides": (1, 1)}}, "up", "strides"),
    "pooled": (CNN_, {"after conv0": lambda x: nn.avg_pool(x, (2, 2))}, "the model itself", ""),
    "reversed": (RNN_, {"rnn": {"reverse": True, "keep_order": True}}, "rnn", "reverse"),
    "not kept in order": (RNN_, {"rnn": {"reverse": True}}, "rnn", "reverse"),
    "another activation": (RNN_, {"cell": {"activation_fn": nn.relu}}, "cell", "activation_fn"),
    "another gate": (RNN_, {"cell": {"gate_fn": nn.hard_sigmoid}}, "cell", "gate_fn"),
    "RMSNorm epsilon": (RNN_, {"norm": {"epsilon": 1e-1}}, "norm", "epsilon"),
    "input in bf16": (RNN_, {"inp": HALF}, "inp", "dtype"),
    "output in bf16": (RNN_, {"out": HALF}, "out", "dtype"),
}

# Faults that no output shows: (architecture, fault, the place that is named, what is named there).
SILENT_FAULTS = {
    "dropout never": (GPT_, {"block 1": {"drop": {"rate": 0.0}}}, "blocks_1/", "rate"),
    "no dropout": (GPT_, {"block 1": {"no drop": True}}, "blocks_1/", "rate"),
    "dropout too often": (GPT_, {"block 0": {"drop": {"rate": 0.5}}}, "blocks_0/", "rate"),
    "attention dropout": (
        GPT_,
        {"block 0": {"attn": {"dropout_rate": 0.3}}},
        "blocks_0/attn",
        "dropout_rate",
    ),
    "a small epsilon": (
        GPT_,
        {"block 1": {"ln1": {"epsilon": 1.1e-6}}},
        "blocks_1/ln1",
        "epsilon",
    ),
    "precision": (GPT_, {"head": {"precision": "highest"}}, "head", "precision"),
    "momentum": (RESNET, {"bn1": {"momentum": 0.99}}, "bn1", "momentum"),
    "an axis to reduce over": (RESNET, {"bn0": {"use_fast_variance": False}}, "bn0", "use_fast"),
}


def is_fault_field(compared):
    """Whether this is the field in which the Linen models hold their faults."""
    return compared.place.endswith((": fault", ": faults"))


@functools.cache
def variables_of(architecture):
    return fault_models.variables_of(architecture)


def report_of(kind, architecture, faults, sections, remat=False):
    variables = variables_of(architecture)
    other = KINDS[kind](architecture, variables, {**faults, "remat": remat})
    reference = architecture.linen({}), variables
    return parity.check(reference, other, architecture.inputs, sections=sections)


ARCHITECTURES = {"GPT": GPT_, "ResNet": RESNET, "CNN": CNN_, "RNN": RNN_}


def in_each_kind(name, rows):
    """Parametrizes a test over rows and kinds of models, every second one rematerialized.

    So each row and each kind is there with rematerialized layers and without.
    """
    cases = [
        pytest.param(row, kind, remat, id=f"{row}-{kind}-{'remat' if remat else 'plain'}")
        for i, row in enumerate(rows)
        for j, kind in enumerate(KINDS)
        for remat in [(i + j) % 2 == 1]
    ]
    return pytest.mark.parametrize((name, "kind", "remat"), cases)


@in_each_kind("architecture", ARCHITECTURES)
def test_models_without_a_fault_agree_in_every_section(kind, architecture, remat):
    report = report_of(kind, ARCHITECTURES[architecture], {}, parity.SECTIONS[:5], remat)

    assert "without a counterpart" not in str(report)
    assert [c.place for s in report.sections for c in s.differing if not is_fault_field(c)] == []


@in_each_kind("fault", LAYER_FAULTS)
def test_the_layer_at_fault_is_named_with_the_field(kind, fault, remat):
    architecture, faults, place, field = LAYER_FAULTS[fault]

    report = report_of(kind, architecture, faults, ("outputs", "layers"), remat)

    assert not report.section("layers").ok
    found = report.first_divergence
    assert found.place.split(" -> ")[0].split(",")[0] == place
    assert found.inputs_agree
    assert field in {difference.name for difference in found.fields} | {""}


@in_each_kind("fault", SILENT_FAULTS)
def test_a_fault_that_no_output_shows_is_named_by_the_static_fields(kind, fault, remat):
    architecture, faults, place, field = SILENT_FAULTS[fault]

    report = report_of(kind, architecture, faults, ("outputs", "layers", "fields"), remat)

    assert report.section("outputs").ok
    # Named, static fields count.
    assert not report.ok
    assert "they DIFFER in fields" in str(report)
    named = [c.place for c in report.section("fields").differing if not is_fault_field(c)]
    assert named
    assert all(where.startswith(place) and field in where for where in named)
