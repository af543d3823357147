"""Recurrent cells of the program's own, which derive from Flax's base class."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn


class Decaying(nn.RNNCellBase):
    """A carry that is drawn, and fades."""

    features: int
    rate: float = 0.5

    @nn.compact
    def __call__(self, carry, x):
        carry = self.rate * carry + nn.Dense(self.features)(x)
        return carry, nn.tanh(carry)

    @nn.nowrap
    def initialize_carry(self, rng, input_shape):
        """One row for each of the batch."""
        return nn.initializers.ones(rng, (*input_shape[:-1], self.features))

    @property
    def num_feature_axes(self) -> int:
        return 1


class Sampling(nn.RNNCellBase):
    """Sees what it drew itself; its state has the size of the carry that it is given."""

    features: int

    @nn.compact
    def __call__(self, carry, x):
        state, last = carry
        state, y = nn.LSTMCell(self.features)(state, x + last)
        logits = nn.Dense(x.shape[-1])(y)
        last = jax.nn.one_hot(jax.random.categorical(self.make_rng("draw"), logits), x.shape[-1])
        return (state, last), logits

    @nn.nowrap
    def initialize_carry(self, rng, input_shape):
        del rng
        return

    @property
    def num_feature_axes(self):
        return 1


class Recurrent(nn.Module):
    hidden: int = 5

    @nn.compact
    def __call__(self, x):
        y = nn.RNN(Decaying(4), name="first")(x)
        decoder = nn.RNN(Sampling(9), split_rngs={"params": False, "draw": True}, name="decoder")
        state = jnp.zeros((x.shape[0], self.hidden))
        return decoder(x, initial_carry=((state, state), x[:, 0])) + y.sum()
