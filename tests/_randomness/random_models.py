"""Modules that give back the keys they draw, written natively in Linen and in NNX.

A specification is a nested tuple: `("draw", streams)`, `("drop", stream)`, or a kind of node and
its parts.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

ONES = jnp.ones((4, 16))
SPLIT = {"params": True, "dropout": True, "noise": False}


class LinenTree(nn.Module):
    """A tree of Linen modules, also lifted ones; a call returns what was drawn."""

    spec: tuple

    @nn.compact
    def __call__(self):
        kind, part = self.spec
        if kind == "draw":
            return tuple(jax.random.key_data(self.make_rng(stream)) for stream in part)
        if kind == "drop":
            return nn.Dropout(0.5, deterministic=False, rng_collection=part)(ONES)
        if kind == "seq":
            return tuple(LinenTree(child)() for child in part)
        if kind == "named":
            return tuple(LinenTree(child, name=name)() for name, child in part)
        if kind == "twice":
            shared = LinenTree(part)
            return shared(), shared()
        if kind == "vmap":
            lifted = nn.vmap(LinenTree, variable_axes={}, split_rngs=SPLIT, in_axes=(), axis_size=2)
            return lifted(part)()
        if kind == "scan":
            lifted = nn.scan(LinenStep, variable_axes={}, split_rngs=SPLIT, length=2)
            return lifted(part)(jnp.zeros(()), None)[1]
        return {"remat": nn.remat, "jit": nn.jit}[kind](LinenTree)(part)()


class LinenStep(nn.Module):
    """A tree as the body of `nn.scan`."""

    spec: tuple

    @nn.compact
    def __call__(self, carry, _):
        return carry, LinenTree(self.spec)()


class NnxTree(nnx.Module):
    """A tree of NNX modules; a call returns what was drawn."""

    def __init__(self, spec, *, rngs):
        self.kind, part = spec
        if self.kind in ("draw", "draw shared"):
            self.streams = part
            self.rngs = rngs.fork() if self.kind == "draw" else rngs
        elif self.kind == "drop":
            self.dropout = nnx.Dropout(0.5, rngs=rngs, rng_collection=part)
        elif self.kind == "seq":
            self.parts = nnx.List([NnxTree(child, rngs=rngs) for child in part])
        elif self.kind == "list":
            self.parts = nnx.List([_nested(child, rngs) for child in part])
        elif self.kind == "named":
            self.names = tuple(name for name, _ in part)
            for name, child in part:
                setattr(self, name, NnxTree(child, rngs=rngs))
        elif self.kind == "twice":
            self.part = NnxTree(part, rngs=rngs)

    def __call__(self):
        if self.kind in ("draw", "draw shared"):
            return tuple(jax.random.key_data(self.rngs[stream]()) for stream in self.streams)
        if self.kind == "drop":
            return self.dropout(ONES)
        if self.kind in ("seq", "list"):
            return _called(self.parts)
        if self.kind == "named":
            return tuple(getattr(self, name)() for name in self.names)
        return self.part(), self.part()


def _nested(spec, rngs):
    """Lists in lists, as `nnx.List` allows: their items have integers for names."""
    if spec[0] == "list":
        return nnx.List([_nested(child, rngs) for child in spec[1]])
    return NnxTree(spec, rngs=rngs)


def _called(parts):
    return tuple(_called(part) if isinstance(part, nnx.List) else part() for part in parts)


def drawn(output):
    """The keys in an output, in order, as bytes; those of a lifted module one by one."""
    keys = [leaf for leaf in jax.tree.leaves(output) if leaf.dtype == jnp.uint32]
    return [row.tobytes() for key in keys for row in np.asarray(key).reshape(-1, key.shape[-1])]


def shared(keys):
    """Which pairs of draws had one key."""
    return {(i, j) for j in range(len(keys)) for i in range(j) if keys[i] == keys[j]}


def mask(y):
    """What a dropout kept, as bytes."""
    return np.asarray(y != 0).tobytes()


def by_path(variables):
    """Linen variables without their boxes: {(collection, path): leaf}."""
    flat = jax.tree_util.tree_flatten_with_path(nn.unbox(variables))[0]
    return {(path[0].key, tuple(key.key for key in path[1:])): leaf for path, leaf in flat}


def native_by_path(module):
    """The same of an NNX module's state, from Flax alone."""
    collections = {nnx.Param: "params", nnx.BatchStat: "batch_stats"}
    return {
        (collections.get(leaf.var_type, leaf.var_type.__name__), path): leaf.get_value()
        for path, leaf in nnx.to_flat_state(nnx.state(module))
    }
