"""Measures what is done once: imports and first calls in processes, constructors in a trace."""

from __future__ import annotations

import compileall
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx

import bridge

from .models import Case
from .row import Subject

ROOT = Path(__file__).parents[1]


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
_LINEN = f"""{_MODEL}
variables = Block().init(jax.random.key(0), x)
jax.jit(Block().apply)(variables, x).block_until_ready()
"""
_TO_NNX = f"""{_MODEL}
import bridge
model = bridge.ToNNX(Block(), rngs=nnx.Rngs(0)).lazy_init(x)
bridge.jit_partial(lambda model, x: model(x), model)(x).block_until_ready()
"""
# `init` with an input calls the model, so the native program does so too.
_NNX = f"""{_MODEL}
model = NnxBlock(rngs=nnx.Rngs(0))
model(x)
nnx.jit(lambda model, x: model(x))(model, x).block_until_ready()
"""
_TO_LINEN = f"""{_MODEL}
import bridge
model = bridge.to_linen(NnxBlock)
variables = model.init(jax.random.key(0), x)
jax.jit(model.apply)(variables, x).block_until_ready()
"""
FIRST_CALLS = {
    "Linen": _LINEN,
    "ToNNX": _TO_NNX,
    "NNX": _NNX,
    "ToLinen": _TO_LINEN,
    "NNX, no eager call": _NNX.replace("\nmodel(x)\n", "\n"),
    "ToLinen, init(key)": _TO_LINEN.replace("key(0), x)", "key(0))"),
}
IMPORTS = {"flax.nnx": "import flax.nnx", "bridge": "import flax.nnx, bridge"}


def process(program: str) -> Subject:
    """A program in a process of its own, the start of which is included."""
    command = [sys.executable, "-c", program]

    def prepared(_: Any) -> Callable[[], int]:
        # As in an installed package; a process that may not write bytecode compiles the source.
        for package in ("bridge", "registry"):
            compileall.compile_dir(ROOT / package, quiet=2)
        return lambda: subprocess.run(command, cwd=ROOT, check=True).returncode

    return prepared
