"""Agents: arrays as fields, and ensembles of what a field brings."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn


class Bounded(nn.Module):
    actions: int
    scale: Any
    shift: Any

    @nn.compact
    def __call__(self, x):
        return nn.tanh(nn.Dense(self.actions)(x)) * self.scale + self.shift


def make_bounded():
    return Bounded(2, np.array([1.0, 2.0], "float32"), jnp.full((2,), 0.5))


class Value(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, observed, action):
        x = jnp.concatenate([observed, action], -1)
        return nn.Dense(1)(nn.relu(nn.Dense(self.hidden)(x)))


class Ensemble(nn.Module):
    member: Any
    count: int = 3

    @nn.compact
    def __call__(self, *args):
        members = nn.vmap(
            self.member,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            out_axes=1,
            axis_size=self.count,
        )
        return members(name="members")(*args)


def make_ensemble():
    return Ensemble(functools.partial(Value, hidden=4))
