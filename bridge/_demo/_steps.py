"""The five steps of the migration: what changes, which paths move, how the model is built."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh

from bridge import ToNNX, lazy_init
from bridge._demo import _models, _training, _weights

Build = Callable[[_weights.Weights, int, Mesh], _training.Trainee]

_SAMPLE = jax.ShapeDtypeStruct((1, 8, 8, 1), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the migration.

    Attributes:
        name: a short name.
        change: what the team changes, in a few words.
        renames: path prefix in the step before to path prefix in this one.
        build: makes the model from the renamed weights, a seed and the mesh.
    """

    name: str
    change: str
    renames: Mapping[str, str]
    build: Build


def _baseline(weights: _weights.Weights, seed: int, mesh: Mesh) -> _training.Trainee:
    module = _models.DigitsCNN()
    variables = _init(module, seed)
    # There is no step before the first: it starts from its own initial values.
    return _training.LinenTrainee(module, variables, seed, mesh)


def _wrapped(weights: _weights.Weights, seed: int, mesh: Mesh) -> _training.Trainee:
    module = _models.DigitsCNN()
    variables = _weights.to_linen_variables(weights)
    model = ToNNX.from_variables(module, variables, rngs=nnx.Rngs(dropout=seed))
    return _training.NnxTrainee(model, mesh)


def _mixed(weights: _weights.Weights, seed: int, mesh: Mesh) -> _training.Trainee:
    module = _models.MixedDigitsCNN()
    variables = _weights.into_linen(_init(module, seed), weights)
    return _training.LinenTrainee(module, variables, seed, mesh)


def _nnx_over_linen(weights: _weights.Weights, seed: int, mesh: Mesh) -> _training.Trainee:
    model = lazy_init(_models.NnxOverLinenCNN(rngs=nnx.Rngs(seed)), _SAMPLE)
    _weights.into_nnx(model, weights)
    return _training.NnxTrainee(model, mesh)


def _nnx_only(weights: _weights.Weights, seed: int, mesh: Mesh) -> _training.Trainee:
    model = _models.NnxDigitsCNN(rngs=nnx.Rngs(seed))
    _weights.into_nnx(model, weights)
    return _training.NnxTrainee(model, mesh)


def _init(module: nn.Module, seed: int) -> dict[str, Any]:
    variables = jax.jit(module.init)(jax.random.key(seed), jnp.zeros(_SAMPLE.shape))
    return dict(variables)


STEPS = (
    Step("linen", "pure Linen baseline, trained from scratch", {}, _baseline),
    Step("wrapped", "the whole model wrapped in ToNNX, NNX training loop", {}, _wrapped),
    Step(
        "mixed",
        "Linen again, second block native NNX through to_linen",
        {
            "ConvBlock_1/Conv_0": "ToLinen_0/conv",
            "ConvBlock_1/BatchNorm_0": "ToLinen_0/norm",
            # Linen counts names per class, so the block after the replaced one moves up.
            "ConvBlock_2": "ConvBlock_1",
        },
        _mixed,
    ),
    Step(
        "nnx-over-linen",
        "NNX on top, the remaining Linen blocks as ToNNX leaves",
        {
            "ConvBlock_0": "block1",
            "ToLinen_0": "block2",
            "ConvBlock_1": "block3",
            "Dense_0": "head",
        },
        _nnx_over_linen,
    ),
    Step(
        "nnx",
        "everything in NNX",
        {
            "block1/Conv_0": "block1/conv",
            "block1/BatchNorm_0": "block1/norm",
            "block3/Conv_0": "block3/conv",
            "block3/BatchNorm_0": "block3/norm",
        },
        _nnx_only,
    ),
)
