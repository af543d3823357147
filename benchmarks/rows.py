"""The rows of the table, as data: what is measured, at which sizes, and what it should cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import compiled_calls, forms, initialization, linen_style, programs
from .compiled_calls import HOT_LOOPS
from .conversions import CONVERSIONS, variables_tree
from .forms import PURE
from .initialization import INITS, INITS_TO_LINEN
from .linen_style import StyleCase
from .models import VIT
from .row import Ratio, Row, Subject

# A Linen class on another base class: `apply` on variables, and the module that keeps them.


def _applied(library: Any, measured: Callable[..., Any]) -> Subject:
    return lambda case: measured(*case.applying(library))


def _each_applied(measured: Callable[..., Any]) -> dict[str, Subject]:
    return {n: _applied(library, measured) for n, library in linen_style.APPLIED.items()}


ROWS: tuple[Row, ...] = (
    Row(
        "jaxpr equations",
        "equations",
        (1, 8, 32, 128, 1024, VIT),
        forms.each(programs.equations),
        forms.both(1.0),
        # It runs the constructor in the trace, and that time grows with the square of the size.
        largest={"flax ToLinen": 32},
    ),
    Row(
        "optimised HLO instructions",
        "instructions",
        (1, 8, 32, 128, VIT),
        forms.each(lambda *program: programs.instructions(*program).total()),
        forms.both(1.0),
        largest={"flax ToLinen": 32},
    ),
    Row(
        "eager call",
        "s",
        (1, 8, 32, VIT),
        {
            **forms.each(forms.calling),
            # A native model is called as it is.
            "NNX": forms.call_module("nnx"),
            "ToNNX": forms.call_module("to_nnx"),
            "flax ToNNX": forms.call_module("flax_to_nnx"),
        },
        (
            Ratio("ToLinen", "NNX", 1.25, 8),
            Ratio("flax ToLinen", "NNX"),
            Ratio("ToNNX", "Linen", 1.10, 8),
            Ratio("flax ToNNX", "Linen"),
        ),
    ),
    Row("trace and lower", "s", (1, 8, 32, VIT), forms.each(forms.lowering), forms.both(1.15)),
    Row(
        "jit dispatch, variables as argument",
        "s",
        (1, 8, 32, 256, 1024),
        {
            "without nnx": forms.without_nnx,
            "ToLinen": forms.dispatch_variables("to_linen_variables"),
            "flax ToLinen": forms.dispatch_variables("flax_to_linen_variables"),
        },
        (Ratio("ToLinen", "without nnx", 1.05, 256), Ratio("flax ToLinen", "without nnx")),
    ),
    Row(
        "init",
        "s",
        (1, 8, 32),
        INITS,
        (
            Ratio("ToLinen", "NNX", 1.10),
            Ratio("flax ToLinen", "NNX"),
            # What no wrapper can be without.
            Ratio("no more than stored", "NNX"),
            Ratio("ToNNX", "Linen"),
            Ratio("flax ToNNX", "Linen"),
        ),
    ),
    Row(
        "init, peak of live arrays",
        "bytes",
        (1, 2),
        {name: initialization.peak_live(init) for name, init in INITS_TO_LINEN.items()},
        (Ratio("ToLinen", "NNX", 1.02), Ratio("flax ToLinen", "NNX")),
    ),
    Row(
        "init under jit, peak memory",
        "bytes",
        (1, 8),
        {name: initialization.compiled_peak(init) for name, init in INITS_TO_LINEN.items()},
        (Ratio("ToLinen", "NNX", 1.02), Ratio("flax ToLinen", "NNX")),
    ),
    Row(
        "init in shards",
        "s",
        (2,),
        {
            "NNX": initialization.jitted_in_shards(INITS["NNX"]),
            "ToLinen": initialization.to_linen_in_shards,
            "flax ToLinen": initialization.jitted_in_shards(INITS["flax ToLinen"]),
            "Linen": initialization.jitted_in_shards(INITS["Linen"]),
            "ToNNX": initialization.to_nnx_in_shards,
        },
        (
            Ratio("ToLinen", "NNX"),
            Ratio("flax ToLinen", "NNX"),
            Ratio("ToNNX", "Linen"),
        ),
        # Every call compiles.
        rounds=9,
    ),
    Row(
        "nnx.jit call",
        "s",
        (1, 8, 32, 128, VIT),
        {
            "NNX": compiled_calls.nnx_jit(compiled_calls.forward, "nnx"),
            "ToNNX": compiled_calls.nnx_jit(compiled_calls.forward, "to_nnx"),
            "flax ToNNX": compiled_calls.nnx_jit(compiled_calls.forward, "flax_to_nnx"),
        },
        (Ratio("ToNNX", "NNX", 0.57, 8, is_for_stacks=True), Ratio("flax ToNNX", "NNX")),
    ),
    Row(
        "call in a hot loop, dispatch",
        "s",
        (1, 8, 32, 128, VIT),
        HOT_LOOPS,
        compiled_calls.hot_loop(1.10, 8),
        is_dispatch=True,
    ),
    Row(
        "call in a hot loop, throughput",
        "s",
        (1, 8, 32, 128, VIT),
        HOT_LOOPS,
        compiled_calls.hot_loop(),
    ),
    Row(
        "gradient step",
        "s",
        (1, 8, 32),
        {
            "Linen": lambda case: compiled_calls.pure_step(*PURE["Linen"](case)),
            "ToLinen": lambda case: compiled_calls.pure_step(*PURE["ToLinen"](case)),
            "flax ToLinen": lambda case: compiled_calls.pure_step(*PURE["flax ToLinen"](case)),
            "NNX": compiled_calls.nnx_jit(compiled_calls.nnx_step, "nnx"),
            "ToNNX": compiled_calls.nnx_jit(compiled_calls.nnx_step, "to_nnx"),
            "flax ToNNX": compiled_calls.nnx_jit(compiled_calls.nnx_step, "flax_to_nnx"),
            "ToNNX, bridge.jit_partial": compiled_calls.jit_partial(compiled_calls.nnx_step),
        },
        (
            Ratio("ToLinen", "Linen"),
            Ratio("flax ToLinen", "Linen"),
            Ratio("ToNNX", "NNX"),
            Ratio("flax ToNNX", "NNX"),
            Ratio("ToNNX, bridge.jit_partial", "Linen"),
        ),
    ),
    Row(
        "conversion of a variables tree",
        "s",
        (1_000, 10_000, 30_000),
        CONVERSIONS,
        (
            Ratio("linen_to_nnx", "State", 3.0, 10_000),
            Ratio("nnx_to_linen", "State", 3.0, 10_000),
            Ratio("flax to NNX", "State"),
            Ratio("flax to Linen", "State"),
        ),
        case=variables_tree,
    ),
    Row(
        "a Linen class on bridge.Module: jaxpr equations",
        "equations",
        (1, 8, 32),
        _each_applied(programs.equations),
        (Ratio("bridge.Module", "Linen", 1.0), Ratio("flax bridge.Module", "Linen")),
        case=StyleCase,
    ),
    Row(
        "a Linen class on bridge.Module: eager call",
        "s",
        (1, 8, 32),
        {
            **_each_applied(forms.calling),
            "kept": lambda case: forms.calling(*case.kept()),
            "NNX": lambda case: forms.calling(*case.native()),
        },
        (
            Ratio("bridge.Module", "Linen", 1.15, 8),
            Ratio("kept", "Linen", 1.15, 8),
            Ratio("kept", "NNX"),
            Ratio("flax bridge.Module", "Linen"),
        ),
        case=StyleCase,
    ),
)
