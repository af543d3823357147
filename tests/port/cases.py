"""Every built-in layer in both systems, with inputs, and random values for either side."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer twice.

    Attributes:
      linen: the Linen layer.
      native: makes the NNX layer from rngs.
      shapes: of the inputs.
      linen_kwargs: of the Linen call.
      native_kwargs: of the NNX call.
      same_operations: whether both compute the same operations in the same order, so that the
        outputs are equal and not only close.
      updates: whether the call is one that updates state.
    """

    linen: nn.Module
    native: Callable[[nnx.Rngs], nnx.Module]
    shapes: tuple[tuple[int, ...], ...] = ((2, 4),)
    linen_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    native_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    same_operations: bool = True
    updates: bool = False

    def inputs(self, seed=7):
        rng = np.random.default_rng(seed)
        return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in self.shapes]

    def model(self):
        """The NNX layer, without values but for RNG streams: a port gives it all else."""
        model = nnx.eval_shape(lambda: self.native(nnx.Rngs(3)))
        nnx.update(model, jax.tree.map(_stream_value, nnx.state(model, nnx.RngState)))
        return model

    def shapes_of_variables(self):
        key = jax.random.key(0)
        arguments = cell_arguments(self.linen, self.inputs())
        return jax.eval_shape(lambda: self.linen.init(key, *arguments, **self.linen_kwargs))


def _stream_value(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key(3) if is_key else jnp.zeros(leaf.shape, leaf.dtype)


def cell_arguments(module, inputs):
    """A cell's carry comes first; an LSTM's is a pair."""
    if isinstance(module, nn.LSTMCell | nn.OptimizedLSTMCell):
        return [tuple(inputs[:2]), *inputs[2:]]
    return inputs


def random_values(shapes, seed=0):
    """Random variables of given shapes, such as a trained model could have."""
    rng = np.random.default_rng(seed)

    def value(path, leaf):
        text = jax.tree_util.keystr(path)
        if "hn" in text and "bias" in text:
            return jnp.zeros(leaf.shape, leaf.dtype)
        values = rng.normal(size=leaf.shape)
        if "var" in text or "sigma" in text:
            values = np.abs(values) + 0.5
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(value, shapes)


def _conv(**fields):
    return lambda rngs: nnx.Conv(4, 6, rngs=rngs, **fields)


CELL = ((2, 3), (2, 4))
LSTM = ((2, 3), (2, 3), (2, 4))
SEQUENCE = ((2, 5, 4),)
IMAGE = ((2, 5, 5, 4),)

CASES = {
    "Dense": Case(nn.Dense(3), lambda r: nnx.Linear(4, 3, rngs=r)),
    "Dense without bias": Case(
        nn.Dense(3, use_bias=False), lambda r: nnx.Linear(4, 3, use_bias=False, rngs=r)
    ),
    "DenseGeneral": Case(
        nn.DenseGeneral((2, 3), axis=(-2, -1)),
        lambda r: nnx.LinearGeneral((3, 4), (2, 3), axis=(-2, -1), rngs=r),
        ((2, 3, 4),),
    ),
    "DenseGeneral of batches": Case(
        nn.DenseGeneral((2, 3), axis=(-1,), batch_dims=(0,)),
        lambda r: nnx.LinearGeneral(4, (2, 3), axis=(-1,), batch_axis={0: 2}, rngs=r),
        ((2, 5, 4),),
    ),
    "Einsum": Case(
        nn.Einsum((4, 2, 3), "ba,ahc->bhc"),
        lambda r: nnx.Einsum("ba,ahc->bhc", (4, 2, 3), (2, 3), rngs=r),
    ),
    "Einsum without bias": Case(
        nn.Einsum((4, 3), "ba,ac->bc", use_bias=False),
        lambda r: nnx.Einsum("ba,ac->bc", (4, 3), rngs=r),
    ),
    "Conv": Case(nn.Conv(6, (3, 3)), _conv(kernel_size=(3, 3)), IMAGE),
    "Conv in groups, dilated": Case(
        nn.Conv(6, (2,), feature_group_count=2, kernel_dilation=2, strides=2, use_bias=False),
        _conv(
            kernel_size=(2,), feature_group_count=2, kernel_dilation=2, strides=2, use_bias=False
        ),
        SEQUENCE,
    ),
    "Conv causal": Case(
        nn.Conv(6, (3,), padding="CAUSAL"), _conv(kernel_size=(3,), padding="CAUSAL"), SEQUENCE
    ),
    "ConvTranspose": Case(
        nn.ConvTranspose(6, (3,), strides=(2,)),
        lambda r: nnx.ConvTranspose(4, 6, (3,), strides=(2,), rngs=r),
        SEQUENCE,
    ),
    "ConvTranspose, kernel transposed": Case(
        nn.ConvTranspose(6, (3,), strides=(2,), transpose_kernel=True),
        lambda r: nnx.ConvTranspose(4, 6, (3,), strides=(2,), transpose_kernel=True, rngs=r),
        SEQUENCE,
    ),
    "BatchNorm": Case(
        nn.BatchNorm(use_running_average=True),
        lambda r: nnx.BatchNorm(4, use_running_average=True, rngs=r),
    ),
    "BatchNorm in training": Case(
        nn.BatchNorm(use_running_average=False, momentum=0.9),
        lambda r: nnx.BatchNorm(4, momentum=0.9, rngs=r),
        updates=True,
    ),
    "LayerNorm": Case(nn.LayerNorm(), lambda r: nnx.LayerNorm(4, rngs=r)),
    "LayerNorm without bias": Case(
        nn.LayerNorm(use_bias=False), lambda r: nnx.LayerNorm(4, use_bias=False, rngs=r)
    ),
    "RMSNorm": Case(nn.RMSNorm(), lambda r: nnx.RMSNorm(4, rngs=r)),
    "GroupNorm": Case(
        nn.GroupNorm(num_groups=2), lambda r: nnx.GroupNorm(4, num_groups=2, rngs=r), SEQUENCE
    ),
    "GroupNorm by size": Case(
        nn.GroupNorm(num_groups=None, group_size=2),
        lambda r: nnx.GroupNorm(4, num_groups=None, group_size=2, rngs=r),
        SEQUENCE,
    ),
    "InstanceNorm": Case(nn.InstanceNorm(), lambda r: nnx.InstanceNorm(4, rngs=r), SEQUENCE),
    "PReLU": Case(nn.PReLU(), lambda r: nnx.PReLU()),
    "MultiHeadDotProductAttention": Case(
        nn.MultiHeadDotProductAttention(2),
        lambda r: nnx.MultiHeadAttention(2, 4, decode=False, rngs=r),
        ((2, 5, 4), (2, 3, 4)),
        same_operations=False,
    ),
    "MultiHeadDotProductAttention, qk-norm": Case(
        nn.MultiHeadDotProductAttention(2, qkv_features=8, out_features=3, normalize_qk=True),
        lambda r: nnx.MultiHeadAttention(
            2, 4, qkv_features=8, out_features=3, normalize_qk=True, decode=False, rngs=r
        ),
        ((2, 5, 4), (2, 3, 4)),
        same_operations=False,
    ),
    "SelfAttention": Case(
        nn.SelfAttention(2, use_bias=False),
        lambda r: nnx.MultiHeadAttention(2, 4, use_bias=False, decode=False, rngs=r),
        SEQUENCE,
        same_operations=False,
    ),
    "LSTMCell": Case(nn.LSTMCell(3), lambda r: nnx.LSTMCell(4, 3, rngs=r), LSTM),
    "OptimizedLSTMCell": Case(
        nn.OptimizedLSTMCell(3),
        lambda r: nnx.OptimizedLSTMCell(4, 3, rngs=r),
        LSTM,
        same_operations=False,
    ),
    "LSTMCell to OptimizedLSTMCell": Case(
        nn.LSTMCell(3), lambda r: nnx.OptimizedLSTMCell(4, 3, rngs=r), LSTM, same_operations=False
    ),
    "OptimizedLSTMCell to LSTMCell": Case(
        nn.OptimizedLSTMCell(3), lambda r: nnx.LSTMCell(4, 3, rngs=r), LSTM, same_operations=False
    ),
    "SimpleCell": Case(nn.SimpleCell(3), lambda r: nnx.SimpleCell(4, 3, rngs=r), CELL),
    "GRUCell": Case(
        nn.GRUCell(3), lambda r: nnx.GRUCell(4, 3, rngs=r), CELL, same_operations=False
    ),
    "RNN": Case(
        nn.RNN(nn.LSTMCell(3)),
        lambda r: nnx.RNN(nnx.LSTMCell(4, 3, rngs=r), rngs=r),
        SEQUENCE,
        {"return_carry": True},
        {"return_carry": True},
        same_operations=False,
    ),
    "Bidirectional": Case(
        nn.Bidirectional(nn.RNN(nn.GRUCell(3)), nn.RNN(nn.SimpleCell(3))),
        lambda r: nnx.Bidirectional(
            nnx.RNN(nnx.GRUCell(4, 3, rngs=r), rngs=r),
            nnx.RNN(nnx.SimpleCell(4, 3, rngs=r), rngs=r),
            rngs=r,
        ),
        SEQUENCE,
        same_operations=False,
    ),
    "Sequential": Case(
        nn.Sequential([nn.Dense(3), nn.relu, nn.Dense(3)]),
        lambda r: nnx.Sequential(nnx.Linear(4, 3, rngs=r), nnx.relu, nnx.Linear(3, 3, rngs=r)),
    ),
    "SpectralNorm": Case(
        nn.SpectralNorm(nn.Dense(3)),
        lambda r: nnx.SpectralNorm(nnx.Linear(4, 3, rngs=r), update_stats=False, rngs=r),
        linen_kwargs={"update_stats": False},
    ),
    "SpectralNorm in training": Case(
        nn.SpectralNorm(nn.Conv(3, (2,)), n_steps=2),
        lambda r: nnx.SpectralNorm(nnx.Conv(4, 3, (2,), rngs=r), n_steps=2, rngs=r),
        SEQUENCE,
        linen_kwargs={"update_stats": True},
        updates=True,
    ),
    "WeightNorm": Case(
        nn.WeightNorm(nn.Dense(3)), lambda r: nnx.WeightNorm(nnx.Linear(4, 3, rngs=r), rngs=r)
    ),
    "WeightNorm of several layers": Case(
        nn.WeightNorm(nn.Sequential([nn.Dense(3), nn.Dense(2)]), variable_filter={"kernel"}),
        lambda r: nnx.WeightNorm(
            nnx.Sequential(nnx.Linear(4, 3, rngs=r), nnx.Linear(3, 2, rngs=r)), rngs=r
        ),
    ),
}
