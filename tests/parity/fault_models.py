"""A GPT, a ResNet, a CNN and an RNN in Linen and in native NNX, and the faults planted in them.

Every fault changes one layer's definition, by a field or by a value, in the same way on both sides.
The entry "remat" rematerializes layers, and is no fault.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

import bridge
from bridge import port

WIDTH = 8
BLOCKS = 2
TOKENS = jnp.asarray([[1, 2, 3], [4, 0, 5]])
IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4, 2)), jnp.float32)
LARGER_IMAGES = jnp.asarray(np.random.default_rng(2).normal(size=(2, 8, 8, 2)), jnp.float32)
SERIES = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, WIDTH)), jnp.float32)


def call(layer, x):
    return layer(x)


# One function for all layers, so that the second one finds the trace of the first.
rematted_call = nnx.remat(call)


def caller(faults):
    return rematted_call if faults.get("remat") else call


def linen_class(cls, faults):
    return nn.remat(cls) if faults.get("remat") else cls


class LinenBlock(nn.Module):
    fault: Any

    @nn.compact
    def __call__(self, x):
        own = self.fault
        y = nn.LayerNorm(name="ln1", **own.get("ln1", {}))(x)
        attn = {"num_heads": 2, "deterministic": True, **own.get("attn", {})}
        y = nn.MultiHeadDotProductAttention(name="attn", **attn)(y)
        if "no drop" not in own:
            y = nn.Dropout(**{"rate": 0.1, **own.get("drop", {})}, deterministic=True)(y)
        x = x + y
        y = nn.LayerNorm(name="ln2", **own.get("ln2", {}))(x)
        y = nn.Dense(8, name="fc", **own.get("fc", {}))(y)
        return x + nn.Dense(WIDTH, name="proj")(own.get("act", nn.gelu)(y))


class LinenGPT(nn.Module):
    faults: Any

    def setup(self):
        self.embed = nn.Embed(6, WIDTH, **self.faults.get("embed", {}))
        block = linen_class(LinenBlock, self.faults)
        self.blocks = [block(self.faults.get(f"block {i}", {})) for i in range(BLOCKS)]
        self.norm = nn.LayerNorm(**self.faults.get("norm", {}))
        self.head = nn.Dense(6, **self.faults.get("head", {}))

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nnx.Module):
    def __init__(self, fault, rngs):
        self.ln1 = nnx.LayerNorm(WIDTH, rngs=rngs, **fault.get("ln1", {}))
        attn = {"decode": False, "deterministic": True, **fault.get("attn", {})}
        self.attn = nnx.MultiHeadAttention(attn.pop("num_heads", 2), WIDTH, rngs=rngs, **attn)
        rate = {"rate": 0.1, **fault.get("drop", {})}
        self.drop = None if "no drop" in fault else nnx.Dropout(**rate, rngs=rngs)
        self.ln2 = nnx.LayerNorm(WIDTH, rngs=rngs, **fault.get("ln2", {}))
        self.fc = nnx.Linear(WIDTH, 8, rngs=rngs, **fault.get("fc", {}))
        self.proj = nnx.Linear(8, WIDTH, rngs=rngs)
        self.act = fault.get("act", nnx.gelu)

    def __call__(self, x):
        y = self.attn(self.ln1(x))
        x = x + (y if self.drop is None else self.drop(y))
        return x + self.proj(self.act(self.fc(self.ln2(x))))


class GPT(nnx.Module):
    def __init__(self, faults, rngs):
        self.embed = nnx.Embed(6, WIDTH, rngs=rngs, **faults.get("embed", {}))
        blocks = [Block(faults.get(f"block {i}", {}), rngs) for i in range(BLOCKS)]
        self.blocks = nnx.List(blocks)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs, **faults.get("norm", {}))
        self.head = nnx.Linear(WIDTH, 6, rngs=rngs, **faults.get("head", {}))
        self.call = caller(faults)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(self.norm(x))


class LinenResNet(nn.Module):
    faults: Any

    @nn.compact
    def __call__(self, x, train=False):
        own = self.faults
        for i in range(BLOCKS):
            fault = own.get(f"conv{i}", {})
            y = linen_class(nn.Conv, own)(2, (3, 3), name=f"conv{i}", **fault)(x)
            fault = {"momentum": 0.9, **own.get(f"bn{i}", {})}
            y = nn.BatchNorm(use_running_average=not train, name=f"bn{i}", **fault)(y)
            x = x + own.get(f"act {i}", nn.relu)(y)
        x = nn.GroupNorm(**{"num_groups": 1, **own.get("gn", {})}, name="gn")(x)
        return nn.Dense(3, name="head", **own.get("head", {}))(x.mean(axis=(1, 2)))


class ResNet(nnx.Module):
    def __init__(self, faults, rngs):
        for i in range(BLOCKS):
            setattr(
                self, f"conv{i}", nnx.Conv(2, 2, (3, 3), rngs=rngs, **faults.get(f"conv{i}", {}))
            )
            fault = {"momentum": 0.9, **faults.get(f"bn{i}", {})}
            setattr(self, f"bn{i}", nnx.BatchNorm(2, rngs=rngs, **fault))
        self.gn = nnx.GroupNorm(2, **{"num_groups": 1, **faults.get("gn", {})}, rngs=rngs)
        self.head = nnx.Linear(2, 3, rngs=rngs, **faults.get("head", {}))
        self.acts = tuple(faults.get(f"act {i}", nnx.relu) for i in range(BLOCKS))
        self.call = caller(faults)

    def __call__(self, x):
        for i in range(BLOCKS):
            y = self.call(getattr(self, f"conv{i}"), x)
            x = x + self.acts[i](self.call(getattr(self, f"bn{i}"), y))
        return self.head(self.gn(x).mean(axis=(1, 2)))


CNN_LAYERS = {
    "conv0": ((3, 3), {"strides": 2}),
    "conv1": ((3, 3), {}),
    "up": ((2, 2), {"strides": (2, 2)}),
}


class LinenCNN(nn.Module):
    faults: Any

    @nn.compact
    def __call__(self, x):
        own = self.faults
        for name, (kernel, fields) in CNN_LAYERS.items():
            cls = linen_class(nn.ConvTranspose if name == "up" else nn.Conv, own)
            x = nn.relu(cls(2, kernel, name=name, **{**fields, **own.get(name, {})})(x))
            x = own.get(f"after {name}", lambda x: x)(x)
        return nn.Dense(3, name="head")(x.mean(axis=(1, 2)))


class CNN(nnx.Module):
    def __init__(self, faults, rngs):
        for name, (kernel, fields) in CNN_LAYERS.items():
            cls = nnx.ConvTranspose if name == "up" else nnx.Conv
            own = {**fields, **faults.get(name, {})}
            setattr(self, name, cls(2, 2, kernel, rngs=rngs, **own))
        self.head = nnx.Linear(2, 3, rngs=rngs)
        self.after = {name: faults.get(f"after {name}", lambda x: x) for name in CNN_LAYERS}
        self.call = caller(faults)

    def __call__(self, x):
        for name in CNN_LAYERS:
            x = self.after[name](nnx.relu(self.call(getattr(self, name), x)))
        return self.head(x.mean(axis=(1, 2)))


class LinenRNN(nn.Module):
    faults: Any

    @nn.compact
    def __call__(self, x):
        own = self.faults
        x = nn.Dense(WIDTH, name="inp", **own.get("inp", {}))(x)
        x = nn.RNN(
            nn.LSTMCell(WIDTH, name="cell", **own.get("cell", {})), **own.get("rnn", {}), name="rnn"
        )(x)
        x = linen_class(nn.RMSNorm, own)(name="norm", **own.get("norm", {}))(x)
        return nn.Dense(2, name="out", **own.get("out", {}))(x)


class RNN(nnx.Module):
    def __init__(self, faults, rngs):
        self.inp = nnx.Linear(WIDTH, WIDTH, rngs=rngs, **faults.get("inp", {}))
        cell = nnx.LSTMCell(WIDTH, WIDTH, rngs=rngs, **faults.get("cell", {}))
        self.rnn = nnx.RNN(cell, rngs=rngs, **faults.get("rnn", {}))
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs, **faults.get("norm", {}))
        self.out = nnx.Linear(WIDTH, 2, rngs=rngs, **faults.get("out", {}))
        self.call = caller(faults)

    def __call__(self, x):
        return self.out(self.call(self.norm, self.call(self.rnn, self.inp(x))))


@dataclasses.dataclass(frozen=True, eq=False)
class Architecture:
    """A model in both styles."""

    linen: Any
    native: Any
    inputs: Any


GPT_, RESNET, CNN_, RNN_ = (
    Architecture(LinenGPT, GPT, TOKENS),
    Architecture(LinenResNet, ResNet, IMAGES),
    Architecture(LinenCNN, CNN, LARGER_IMAGES),
    Architecture(LinenRNN, RNN, SERIES),
)


def variables_of(architecture):
    """Random values for every leaf of the Linen model."""
    module = architecture.linen({})
    shapes = jax.eval_shape(module.init, jax.random.key(0), architecture.inputs)
    draw = np.random.default_rng(3)

    def value(path, leaf):
        around = 0.0 if "kernel" in str(path[-1]) or "embedding" in str(path[-1]) else 1.0
        return jnp.asarray(around + 0.3 * draw.normal(size=leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(value, shapes)


def native(architecture, variables, faults):
    """The native model with a fault and the right values."""
    return port.plan(variables, architecture.native(faults, nnx.Rngs(0))).apply()


def wrapped_linen(architecture, variables, faults):
    """The Linen model with a fault as a ToNNX."""
    return bridge.ToNNX.from_variables(architecture.linen(faults), variables)


def wrapped_native(architecture, variables, faults):
    """The native model with a fault as a ToLinen."""
    return bridge.ToLinen.from_module(native(architecture, variables, faults))


KINDS = {"native": native, "ToNNX": wrapped_linen, "ToLinen": wrapped_native}
