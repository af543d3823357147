"""Functions inside of methods, functions given the module, and loops over arrays and sizes."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from flax import linen as nn


def add_table(module, x):
    return x + module.param("table", nn.initializers.normal(), x.shape[1:])


def add_seen(module, x):
    return x + module.variable("batch_stats", "seen", jnp.ones, (x.shape[-1],)).value


class Given(nn.Module):
    """Parameters are the module's, also where a function makes them."""

    @nn.compact
    def __call__(self, x):
        x = add_table(self, nn.Dense(4)(x))
        return add_seen(self, nn.Dense(5)(x))


class Nested(nn.Module):
    """Each call of an inner function makes layers of its own."""

    widths: Sequence[int] = (4, 5)

    @nn.compact
    def __call__(self, x, train: bool = False):
        # Norm, then a layer.
        def block(x, width, train, act=nn.relu):
            """A block."""
            x = nn.BatchNorm(use_running_average=not train)(x)
            return act(nn.Dense(width)(x))

        for width in self.widths:
            x = block(x, width, train)
        y = block(x, 3, train)

        def last(x):
            return nn.Dense(3, name="last")(x)

        return last(y) + block(x, 3, train, act=nn.tanh)


class TwoLevels(nn.Module):
    @nn.compact
    def __call__(self, x):
        def outer(x, width):
            def inner(x):
                return nn.Dense(3)(x)

            return inner(nn.Dense(width)(x))

        return outer(outer(x, 4), 5)


class TwoMethods(nn.Module):
    """Functions of one name are two functions."""

    @nn.compact
    def __call__(self, x):
        def block(x):
            return nn.tanh(nn.Dense(3)(x))

        return block(self.before(x))

    def before(self, x):
        def block(x):
            return nn.relu(nn.Dense(3)(x))

        return block(x)


class Skips(nn.Module):
    """What comes back up is concatenated with what went down."""

    widths: Sequence[int] = (4, 6, 5)

    @nn.compact
    def __call__(self, x):
        skips = []
        for width in self.widths:
            x = nn.Dense(width)(x)
            skips.append(x)
        for skip, width in reversed(list(zip(skips, self.widths, strict=True))):
            x = nn.Dense(width)(jnp.concatenate([x, skip], -1))
        for i, (skip, width) in enumerate(zip(skips, self.widths, strict=True)):
            x = nn.Dense(width, name=f"again_{i}")(x) + skip.sum()
        for skip, low, high in zip(skips, self.widths, self.widths[::-1], strict=True):
            x = nn.Dense(low)(nn.Dense(high)(x)) + nn.Dense(low)(skip)
        parts = [nn.Dense(w)(x + s.sum()) for s, w in zip(skips, self.widths, strict=True)]
        return sum(part.sum(-1, keepdims=True) for part in parts)


class Root(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = Given()(x)
        x = Nested()(x, train)
        x = TwoMethods()(TwoLevels()(x))
        return Skips()(x)
