"""Rows at the size of real models: conversion, training, decoding, threads, first calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax.numpy as jnp

import bridge

from . import conversions, decoding, first_calls, threads, training
from .conversions import CONVERSIONS, variables_tree
from .gpt import GPTShape, gpt
from .models import VIT, Case, ViTShape, case_of, vit
from .row import Ratio, Row

GPT = "GPT of 12 blocks"
# Sizes that fill an accelerator.
VIT_LARGE, GPT_LARGE = "ViT-L/16", "GPT of 1 B parameters in bfloat16"
MODELS: Mapping[str, Callable[[], Case]] = {
    VIT: vit,
    GPT: gpt,
    VIT_LARGE: lambda: vit(ViTShape(layers=24, width=1024, heads=16)),
    GPT_LARGE: lambda: gpt(GPTShape(24, 1792, 14, 32_000, 1024, jnp.bfloat16)),
}


def model_of(size: int | str) -> Case:
    """The model of a size: one of `MODELS`, or a number of blocks."""
    return MODELS[size]() if isinstance(size, str) else case_of(size)


def _pairs(at_most: float | None) -> tuple[Ratio, ...]:
    """Either wrapper over what it wraps."""
    return Ratio("ToLinen", "NNX", at_most), Ratio("ToNNX", "Linen", at_most)


def _first_call(wrapped: str, native: str, *others: tuple[str, str]) -> Row:
    pairs = (wrapped, native), *others
    return Row(
        f"first call of a {wrapped}, import included",
        "s",
        (1,),
        {
            name: first_calls.process(first_calls.FIRST_CALLS[name])
            for pair in pairs
            for name in pair
        },
        tuple(Ratio(*pair, 1.10) for pair in pairs),
        case=int,
        rounds=9,
    )


SIZE_ROWS: tuple[Row, ...] = (
    Row(
        "conversion over a bare dict",
        "s",
        (1_000, 10_000, 100_000),
        {
            **{name: CONVERSIONS[name] for name in CONVERSIONS if name != "State"},
            "Variables alone": conversions.variables_alone,
            "from_variables": conversions.from_variables,
            "linen_variables": conversions.linen_variables,
        },
        (
            Ratio("linen_to_nnx", "tree of arrays", 30.0, 10_000),
            Ratio("nnx_to_linen", "tree of arrays", 30.0, 10_000),
            Ratio("from_variables", "tree of arrays", 36.0, 10_000),
            Ratio("linen_variables", "tree of arrays", 36.0, 10_000),
            Ratio("Variables alone", "tree of arrays"),
            Ratio("flax to NNX", "tree of arrays"),
            Ratio("flax to Linen", "tree of arrays"),
        ),
        case=variables_tree,
        largest={"flax to NNX": 10_000, "flax to Linen": 10_000},
        rounds=15,
    ),
    Row(
        "constructor in a trace",
        "s",
        (8, 16, 32),
        first_calls.CONSTRUCTED,
        tuple(Ratio(name, "NNX") for name in first_calls.CONSTRUCTED if name != "NNX"),
        rounds=5,
    ),
    Row(
        "import",
        "s",
        (1,),
        {name: first_calls.process(program) for name, program in first_calls.IMPORTS.items()},
        (Ratio("bridge", "flax.nnx"),),
        case=int,
        rounds=9,
    ),
    _first_call("ToLinen", "NNX", ("ToLinen, init(key)", "NNX, no eager call")),
    _first_call("ToNNX", "Linen"),
    Row(
        "training step",
        "s",
        (VIT, GPT),
        {form: training.training_step(form) for form in ("NNX", "ToLinen", "Linen", "ToNNX")},
        _pairs(1.02),
        case=model_of,
        rounds=30,
        accelerator=(VIT_LARGE, GPT_LARGE),
    ),
    Row(
        "training step, peak memory",
        "bytes",
        (1, 8),
        training.of_forms(training.step_bytes),
        (*_pairs(1.0), Ratio("flax ToLinen", "NNX"), Ratio("flax ToNNX", "Linen")),
        case=model_of,
        accelerator=(VIT_LARGE, GPT_LARGE),
    ),
    Row(
        "training step, launched instructions",
        "instructions",
        (1, 8),
        training.of_forms(training.step_kernels),
        (*_pairs(1.0), Ratio("flax ToLinen", "NNX"), Ratio("flax ToNNX", "Linen")),
        case=model_of,
        accelerator=(VIT_LARGE, GPT_LARGE),
    ),
    Row(
        "decoding in a while_loop",
        "s",
        (128,),
        {form: decoding.compiled_decoding(form) for form in ("NNX", "ToLinen", "Linen", "ToNNX")},
        _pairs(1.05),
        case=decoding.decoder,
    ),
    Row(
        "decoding in a Python loop",
        "s",
        (128,),
        {
            "Linen": decoding.loop_of_jit("Linen"),
            "ToLinen": decoding.loop_of_jit("ToLinen"),
            "NNX": decoding.loop_of_jit("NNX"),
            "ToNNX, bridge.jit_partial": decoding.loop_of_partial("ToNNX", bridge.jit_partial),
            "NNX, bridge.jit_partial": decoding.loop_of_partial("NNX", bridge.jit_partial),
        },
        (
            Ratio("ToLinen", "NNX", 1.05),
            Ratio("ToNNX, bridge.jit_partial", "Linen", 1.05),
            Ratio("NNX, bridge.jit_partial", "NNX"),
        ),
        case=decoding.decoder,
    ),
    Row(
        "8 threads, eager calls",
        "s",
        (1, 8),
        threads.THREADED,
        _pairs(None),
        rounds=10,
    ),
    Row(
        "8 threads, compiled calls",
        "s",
        (1, 8),
        {
            **{
                form: threads.in_threads(threads.jitted(form))
                for form in ("NNX", "ToLinen", "Linen", "ToNNX")
            },
            "ToNNX, bridge.jit_partial": threads.in_threads(threads.bound),
        },
        (
            Ratio("ToLinen", "NNX", 1.05),
            # Both are given a State, which Python flattens.
            Ratio("ToNNX", "NNX", 1.05),
            # Calls run at once, and each looks at the attributes of the modules.
            Ratio("ToNNX, bridge.jit_partial", "Linen"),
        ),
    ),
)
