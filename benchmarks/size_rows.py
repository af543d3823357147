"""Rows at the size of real models: conversion, training, decoding, threads, first calls."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

import bridge

from . import programs
from .gpt import GPTShape, gpt
from .models import VIT, Case, ViTShape, case_of, vit
from .rows import CONVERSIONS, PURE, Ratio, Row, Subject, variables_tree

ROOT = Path(__file__).parents[1]
GPT = "GPT, 12 blocks"
# Sizes that fill an accelerator.
VIT_LARGE, GPT_LARGE = "ViT-L/16", "GPT, 1 B parameters, bfloat16"
MODELS: Mapping[str, Callable[[], Case]] = {
    VIT: vit,
    GPT: gpt,
    VIT_LARGE: lambda: vit(ViTShape(layers=24, width=1024, heads=16)),
    GPT_LARGE: lambda: gpt(GPTShape(24, 1792, 14, 32_000, 1024, jnp.bfloat16)),
}
THREADS = 8


def model_of(size: int | str) -> Case:
    """The model of a size: one of `MODELS`, or a number of blocks."""
    return MODELS[size]() if isinstance(size, str) else case_of(size)


def _pairs(at_most: float | None) -> tuple[Ratio, ...]:
    """Either wrapper over what it wraps."""
    return Ratio("ToLinen", "NNX", at_most), Ratio("ToNNX", "Linen", at_most)


# Conversion.


def _variables_alone(tree: Any) -> Callable[[], Any]:
    leaves = jax.tree.leaves(tree)
    metadata = nnx.Param(leaves[0]).get_metadata()
    return lambda: [nnx.Param.from_metadata(leaf, metadata) for leaf in leaves]


class _Nothing(nn.Module):
    def __call__(self, x):
        return x


def _from_variables(tree: Any) -> Callable[[], Any]:
    return lambda: bridge.ToNNX.from_variables(_Nothing(), tree)


def _linen_variables(tree: Any) -> Callable[[], Any]:
    return bridge.ToNNX.from_variables(_Nothing(), tree).linen_variables


# One training step.

OPTIMIZER = optax.adamw(1e-3)


def training(form: str, case: Case) -> tuple[Callable[..., Any], Any, Any]:
    """A step as a pure function of the trained state and the input, and both of them.

    Args:
      form: one of `PURE`.
      case: the model; all of its state is trained.
    """
    function, variables, x = PURE[form](case)
    leaves, treedef = jax.tree.flatten(variables)
    # Keys and counts of streams are not trained.
    is_trained = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

    def step(state: tuple[Any, Any, Any], x: Any) -> tuple[Any, Any]:
        trained, rest, opt_state = state

        def loss(trained: Any) -> Any:
            floats, others = iter(trained), iter(rest)
            merged = [next(floats if is_float else others) for is_float in is_trained]
            output = function(treedef.unflatten(merged), x)
            return jnp.mean(output.astype(jnp.float32) ** 2)

        value, gradient = jax.value_and_grad(loss)(trained)
        updates, opt_state = OPTIMIZER.update(gradient, opt_state, trained)
        return value, (optax.apply_updates(trained, updates), rest, opt_state)

    # Donated, so the arrays are to be its own.
    copies = [jnp.copy(leaf) for leaf in leaves]
    trained = [leaf for leaf, is_float in zip(copies, is_trained, strict=True) if is_float]
    rest = [leaf for leaf, is_float in zip(copies, is_trained, strict=True) if not is_float]
    return step, (trained, rest, OPTIMIZER.init(trained)), x


def compiled_step(form: str, case: Case) -> Any:
    """The step compiled, its state donated."""
    step, state, x = training(form, case)
    return jax.jit(step, donate_argnums=0).lower(state, x).compile()


def _training(form: str) -> Subject:
    def prepared(case: Case) -> Callable[[], Any]:
        step, state, x = training(form, case)
        compiled = jax.jit(step, donate_argnums=0).lower(state, x).compile()
        held = [state]

        def call() -> Any:
            value, held[0] = compiled(held[0], x)
            return value

        return call

    return prepared


def step_bytes(form: str, case: Case) -> int:
    """The most memory that a compiled step holds, by XLA's own analysis."""
    return compiled_step(form, case).memory_analysis().peak_memory_in_bytes


def step_kernels(form: str, case: Case) -> int:
    """What a step launches one after the other: the instructions of its entry computation."""
    return programs.entry_instructions(compiled_step(form, case).as_text())


def _of_forms(measured: Callable[[str, Case], Any]) -> dict[str, Subject]:
    return {form: functools.partial(measured, form) for form in TRAINED}


TRAINED = ("NNX", "ToLinen", "flax ToLinen", "Linen", "ToNNX", "flax ToNNX")


# Decoding.


def decoder(size: int) -> Case:
    """A small decoder with a cache for that many tokens."""
    return gpt(GPTShape(4, 64, 4, 256, size, decode=True))


def next_token(form: str, case: Case) -> tuple[Callable[..., Any], Any]:
    """`(state, token, position) -> (token, state)` of a form, and its first state."""
    if form in ("Linen", "ToLinen"):
        module, variables = {
            "Linen": lambda: (case.linen, case.variables),
            "ToLinen": lambda: (case.to_linen, case.to_linen_variables),
        }[form]()
        fixed = {name: tree for name, tree in variables.items() if name != "cache"}

        def apply(cache: Any, token: Any, position: Any) -> Any:
            variables = {**fixed, "cache": cache}
            logits, updates = module.apply(variables, token, position, mutable=["cache"])
            return chosen(logits), updates["cache"]

        return apply, variables["cache"]
    model = case.nnx if form == "NNX" else case.to_nnx
    graphdef, cache, rest = nnx.split(model, nnx.Cache, ...)

    def call(cache: Any, token: Any, position: Any) -> Any:
        model = nnx.merge(graphdef, cache, rest)
        token = step_of(form)(model, token, position)
        return token, nnx.state(model, nnx.Cache)

    return call, cache


def step_of(form: str) -> Callable[..., Any]:
    """One step of a module that keeps its cache."""
    options = {"mutable": ["cache"]} if form == "ToNNX" else {}
    return lambda model, token, position: chosen(model(token, position, **options))


def chosen(logits: Any) -> Any:
    """The likeliest token."""
    return jnp.argmax(logits, -1).astype(jnp.int32)


def decoding(form: str, case: Case) -> tuple[Callable[..., Any], Any, Any]:
    """The whole sequence in one program: a function of cache and first token, and both."""
    step, cache = next_token(form, case)

    def run(cache: Any, token: Any) -> Any:
        def go_on(carry: Any) -> Any:
            return carry[0] < case.argument.length

        def body(carry: Any) -> Any:
            position, token, cache = carry
            token, cache = step(cache, token, position)
            return position + 1, token, cache

        return jax.lax.while_loop(go_on, body, (jnp.int32(0), token, cache))[1]

    return run, cache, case.x


def _decoding(form: str) -> Subject:
    def prepared(case: Case) -> Callable[[], Any]:
        run, *arguments = decoding(form, case)
        return functools.partial(jax.jit(run), *arguments)

    return prepared


def _loop_of_jit(form: str) -> Subject:
    """A loop in Python around a jitted function of the cache."""

    def prepared(case: Case) -> Callable[[], Any]:
        step, start = next_token(form, case)
        jitted = jax.jit(step)

        def call() -> Any:
            cache, token = start, case.x
            for position in range(case.argument.length):
                token, cache = jitted(cache, token, position)
            return token

        return call

    return prepared


def _loop_of_partial(form: str, make: Callable[..., Any]) -> Subject:
    """A loop in Python around a function with the model bound, which keeps its cache."""

    def prepared(case: Case) -> Callable[[], Any]:
        model = nnx.clone(case.nnx if form == "NNX" else case.to_nnx)
        bound = make(step_of(form), model)

        def call() -> Any:
            token = case.x
            for position in range(case.argument.length):
                token = bound(token, position)
            return token

        return call

    return prepared


# Threads.


def _in_threads(prepared: Callable[[Case], Callable[[], Any]]) -> Subject:
    def of_case(case: Case) -> Callable[[], Any]:
        call = prepared(case)
        pool = ThreadPoolExecutor(THREADS)

        def calls() -> Any:
            return list(pool.map(lambda _: jax.block_until_ready(call()), range(4 * THREADS)))

        return calls

    return of_case


def _jitted(form: str) -> Callable[[Case], Callable[[], Any]]:
    def prepared(case: Case) -> Callable[[], Any]:
        function, *arguments = PURE[form](case)
        return functools.partial(jax.jit(function), *arguments)

    return prepared


def _bound(case: Case) -> Callable[[], Any]:
    """The model bound by `jit_partial`, whose calls wait for each other."""
    bound = bridge.jit_partial(lambda model, x: model(x), nnx.clone(case.to_nnx))
    return functools.partial(bound, case.x)


THREADED: Mapping[str, Subject] = {
    "NNX": _in_threads(lambda case: functools.partial(case.nnx, case.x)),
    "ToLinen": _in_threads(
        lambda case: functools.partial(case.to_linen.apply, case.to_linen_variables, case.x)
    ),
    "Linen": _in_threads(lambda case: functools.partial(case.linen.apply, case.variables, case.x)),
    "ToNNX": _in_threads(lambda case: functools.partial(case.to_nnx, case.x)),
}


# A constructor in a trace.


def construct_abstractly(case: Case) -> Any:
    """The shapes of a native model."""
    return nnx.eval_shape(lambda: case.construct(nnx.Rngs(0)))


def abstract(case: Case) -> Any:
    """The same by this package."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    return bridge.abstract(lambda: case.construct(nnx.Rngs(0)), mesh)


def init_abstractly(case: Case) -> Any:
    """The shapes of a wrapped model."""
    init = bridge.to_linen(case.nnx_class, case.argument).init
    return jax.eval_shape(init, case.key, case.x)


def _without_result(function: Callable[[Case], Any]) -> Subject:
    # Shapes cannot be waited for.
    return lambda case: lambda: function(case) and None


CONSTRUCTED: Mapping[str, Subject] = {
    "NNX": _without_result(construct_abstractly),
    "bridge.abstract": _without_result(abstract),
    "ToLinen": _without_result(init_abstractly),
}


# Processes of their own.

_MODEL = """
import jax, jax.numpy as jnp
from flax import linen as nn
from flax import nnx
x = jnp.ones((4, 16))
class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
class NnxBlock(nnx.Module):
    def __init__(self, *, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.down = nnx.Linear(64, 16, rngs=rngs)
    def __call__(self, x):
        return self.down(nnx.gelu(self.up(self.norm(x))))
"""
FIRST_CALLS = {
    "Linen": f"""{_MODEL}
variables = Block().init(jax.random.key(0), x)
jax.jit(Block().apply)(variables, x).block_until_ready()
""",
    "ToNNX": f"""{_MODEL}
import bridge
model = bridge.ToNNX(Block(), rngs=nnx.Rngs(0)).lazy_init(x)
bridge.jit_partial(lambda model, x: model(x), model)(x).block_until_ready()
""",
    "NNX": f"""{_MODEL}
model = NnxBlock(rngs=nnx.Rngs(0))
nnx.jit(lambda model, x: model(x))(model, x).block_until_ready()
""",
    "ToLinen": f"""{_MODEL}
import bridge
model = bridge.to_linen(NnxBlock)
variables = model.init(jax.random.key(0), x)
jax.jit(model.apply)(variables, x).block_until_ready()
""",
}
IMPORTS = {"flax.nnx": "import flax.nnx", "bridge": "import flax.nnx, bridge"}


def _process(program: str) -> Subject:
    command = [sys.executable, "-c", program]
    return lambda _: lambda: subprocess.run(command, cwd=ROOT, check=True).returncode


SIZE_ROWS: tuple[Row, ...] = (
    Row(
        "conversion over a bare dict",
        "s",
        (1_000, 10_000, 100_000),
        {
            **{name: CONVERSIONS[name] for name in CONVERSIONS if name != "State"},
            "Variables alone": _variables_alone,
            "from_variables": _from_variables,
            "linen_variables": _linen_variables,
        },
        (
            Ratio("linen_to_nnx", "tree of arrays", 6.0, 10_000),
            Ratio("nnx_to_linen", "tree of arrays", 6.0, 10_000),
            Ratio("from_variables", "tree of arrays", 7.2, 10_000),
            Ratio("linen_variables", "tree of arrays", 7.2, 10_000),
            Ratio("Variables alone", "tree of arrays"),
            Ratio("flax to NNX", "tree of arrays"),
            Ratio("flax to Linen", "tree of arrays"),
        ),
        case=variables_tree,
        largest={"flax to NNX": 10_000, "flax to Linen": 10_000},
    ),
    Row(
        "constructor in a trace",
        "s",
        (8, 16, 32),
        CONSTRUCTED,
        (Ratio("bridge.abstract", "NNX"), Ratio("ToLinen", "NNX")),
        rounds=5,
    ),
    Row(
        "import",
        "s",
        (1,),
        {name: _process(program) for name, program in IMPORTS.items()},
        (Ratio("bridge", "flax.nnx"),),
        case=int,
        rounds=5,
    ),
    *(
        Row(
            f"first call of a {wrapped}, import included",
            "s",
            (1,),
            {name: _process(FIRST_CALLS[name]) for name in (native, wrapped)},
            (Ratio(wrapped, native, 1.10),),
            case=int,
            rounds=3,
        )
        for wrapped, native in (("ToLinen", "NNX"), ("ToNNX", "Linen"))
    ),
    Row(
        "training step",
        "s",
        (VIT, GPT),
        {form: _training(form) for form in ("NNX", "ToLinen", "Linen", "ToNNX")},
        _pairs(1.02),
        case=model_of,
        rounds=4,
        accelerator=(VIT_LARGE, GPT_LARGE),
    ),
    Row(
        "training step, peak memory",
        "bytes",
        (1, 8),
        _of_forms(step_bytes),
        (*_pairs(1.0), Ratio("flax ToLinen", "NNX"), Ratio("flax ToNNX", "Linen")),
        case=model_of,
        accelerator=(VIT_LARGE, GPT_LARGE),
    ),
    Row(
        "training step, launched instructions",
        "instructions",
        (1, 8),
        _of_forms(step_kernels),
        (*_pairs(1.0), Ratio("flax ToLinen", "NNX"), Ratio("flax ToNNX", "Linen")),
        case=model_of,
        accelerator=(VIT_LARGE, GPT_LARGE),
    ),
    Row(
        "decoding in a while_loop",
        "s",
        (128,),
        {form: _decoding(form) for form in ("NNX", "ToLinen", "Linen", "ToNNX")},
        _pairs(1.05),
        case=decoder,
        rounds=10,
    ),
    Row(
        "decoding in a Python loop",
        "s",
        (128,),
        {
            "Linen": _loop_of_jit("Linen"),
            "ToLinen": _loop_of_jit("ToLinen"),
            "NNX": _loop_of_jit("NNX"),
            "ToNNX, bridge.jit_partial": _loop_of_partial("ToNNX", bridge.jit_partial),
            "NNX, bridge.jit_partial": _loop_of_partial("NNX", bridge.jit_partial),
        },
        (
            Ratio("ToLinen", "NNX", 1.05),
            Ratio("ToNNX, bridge.jit_partial", "Linen", 1.05),
            Ratio("NNX, bridge.jit_partial", "NNX"),
        ),
        case=decoder,
        rounds=10,
    ),
    Row(
        "8 threads, eager calls",
        "s",
        (1, 8),
        THREADED,
        _pairs(None),
        rounds=10,
    ),
    Row(
        "8 threads, compiled calls",
        "s",
        (1, 8),
        {
            **{form: _in_threads(_jitted(form)) for form in ("NNX", "ToLinen", "Linen", "ToNNX")},
            "ToNNX, bridge.jit_partial": _in_threads(_bound),
        },
        (
            Ratio("ToLinen", "NNX", 1.05),
            # Both are given a State, which Python flattens.
            Ratio("ToNNX", "NNX", 1.05),
            # Calls of one bound function wait for each other.
            Ratio("ToNNX, bridge.jit_partial", "Linen"),
        ),
        rounds=10,
    ),
)
