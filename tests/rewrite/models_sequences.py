"""Sequence models: configs, encoders with decoders, recurrent layers, graphs, agents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

INIT = nn.initializers.xavier_uniform()


@dataclasses.dataclass(frozen=True)
class Config:
    vocab_size: int = 11
    emb_dim: int = 8
    num_heads: int = 2
    num_layers: int = 2
    qkv_dim: int = 8
    mlp_dim: int = 12
    dropout_rate: float = 0.1
    deterministic: bool = True
    logits_via_embedding: bool = True
    kernel_init: Callable = INIT


class ConfigMlp(nn.Module):
    config: Config
    out_dim: int | None = None

    @nn.compact
    def __call__(self, inputs):
        config = self.config
        actual_out_dim = inputs.shape[-1] if self.out_dim is None else self.out_dim
        x = nn.Dense(config.mlp_dim, kernel_init=config.kernel_init)(inputs)
        x = nn.relu(x)
        x = nn.Dropout(rate=config.dropout_rate)(x, deterministic=config.deterministic)
        return nn.Dense(actual_out_dim, kernel_init=config.kernel_init)(x)


class DecoderBlock(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, inputs, encoded, mask=None):
        config = self.config
        x = nn.LayerNorm()(inputs)
        x = nn.MultiHeadDotProductAttention(
            num_heads=config.num_heads,
            qkv_features=config.qkv_dim,
            use_bias=False,
            deterministic=config.deterministic,
        )(x, x, mask=mask)
        x = x + inputs
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(
            num_heads=config.num_heads, qkv_features=config.qkv_dim, deterministic=True
        )(y, encoded)
        y = y + x
        z = nn.LayerNorm()(y)
        return y + ConfigMlp(config=config)(z)


class Decoder(nn.Module):
    config: Config
    shared_embedding: Any = None

    @nn.compact
    def __call__(self, tokens, encoded):
        config = self.config
        if self.shared_embedding is None:
            output_embed = nn.Embed(config.vocab_size, config.emb_dim)
        else:
            output_embed = self.shared_embedding
        y = output_embed(tokens)
        mask = nn.make_causal_mask(tokens)
        for lyr in range(config.num_layers):
            y = DecoderBlock(config=config, name=f"block_{lyr}")(y, encoded, mask)
        y = nn.LayerNorm(name="norm")(y)
        if config.logits_via_embedding:
            logits = output_embed.attend(y)
            logits = logits / jnp.sqrt(y.shape[-1])
        else:
            logits = nn.Dense(config.vocab_size, name="logitdense")(y)
        return logits


class EncoderDecoder(nn.Module):
    """A transformer with methods for its two halves."""

    config: Config

    def setup(self):
        self.embed = nn.Embed(self.config.vocab_size, self.config.emb_dim)
        self.encoder = ConfigMlp(self.config)
        self.decoder = Decoder(config=self.config)

    def encode(self, tokens):
        return self.encoder(self.embed(tokens))

    def decode(self, encoded, tokens):
        return self.decoder(tokens, encoded)

    def __call__(self, inputs, targets):
        return self.decode(self.encode(inputs), targets)


class Recurrent(nn.Module):
    hidden: int = 5

    @nn.compact
    def __call__(self, x):
        forward = nn.RNN(nn.OptimizedLSTMCell(self.hidden))
        backward = nn.RNN(nn.GRUCell(self.hidden))
        y = nn.Bidirectional(forward, backward)(x)
        return nn.RNN(nn.LSTMCell(3))(y)


class Tagger(nn.Module):
    """Embedding, recurrent layers, and a stack in `nn.Sequential`."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(num_embeddings=9, features=4)(tokens)
        x = Recurrent()(x)
        return nn.Sequential([nn.Dense(6), nn.relu, nn.Dense(2)])(x)


class GraphMlp(nn.Module):
    feature_sizes: Sequence[int]
    dropout_rate: float = 0.0
    deterministic: bool = True
    activation: Callable = nn.relu

    @nn.compact
    def __call__(self, inputs):
        x = inputs
        for size in self.feature_sizes:
            x = nn.Dense(features=size)(x)
            x = self.activation(x)
            x = nn.Dropout(rate=self.dropout_rate, deterministic=self.deterministic)(x)
        return x


class Graph(nn.Module):
    """Functions that make layers' inputs, skip connections and norms in loops."""

    latent: int = 6
    steps: int = 2
    skip: bool = True
    layer_norm: bool = True

    @nn.compact
    def __call__(self, nodes, edges):
        nodes = nn.Dense(self.latent)(nodes)
        edges = nn.Dense(self.latent)(edges)
        sizes = [self.latent] * 2
        for _ in range(self.steps):
            messages = GraphMlp(sizes)(jnp.concatenate([nodes, edges], axis=-1))
            new = GraphMlp(sizes)(messages)
            nodes = nodes + new if self.skip else new
            if self.layer_norm:
                nodes = nn.LayerNorm()(nodes)
        return nn.Dense(2)(nodes)


class ActorCritic(nn.Module):
    num_outputs: int = 4

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(features=4, kernel_size=(4, 4), strides=(2, 2), name="conv1")(x)
        x = nn.relu(x)
        x = x.reshape((x.shape[0], -1))
        x = nn.Dense(features=8, name="hidden")(x)
        x = nn.relu(x)
        logits = nn.Dense(features=self.num_outputs, name="logits")(x)
        policy_log_probabilities = nn.log_softmax(logits)
        value = nn.Dense(features=1, name="value")(x)
        return policy_log_probabilities, value


class Actor(nn.Module):
    """An agent's policy with a state-independent deviation."""

    action_dim: int
    hidden: Sequence[int] = (6, 6)

    def setup(self):
        self.net = nn.Sequential([nn.Dense(self.hidden[0]), nn.tanh, nn.Dense(self.hidden[1])])
        self.mean = nn.Dense(self.action_dim, kernel_init=nn.initializers.orthogonal(0.01))
        self.log_std = self.param("log_std", nn.initializers.zeros, (self.action_dim,))

    def __call__(self, obs):
        h = nn.tanh(self.net(obs))
        return self.mean(h), jnp.exp(self.log_std)


class Critic(nn.Module):
    @nn.compact
    def __call__(self, obs, action):
        x = jnp.concatenate([obs, action], -1)
        for width in [6, 5]:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(1)(x).squeeze(-1)


class Agent(nn.Module):
    action_dim: int = 2

    def setup(self):
        self.actor = Actor(self.action_dim)
        self.critics = [Critic() for _ in range(2)]

    def __call__(self, obs):
        action, std = self.actor(obs)
        return action, std, jnp.stack([critic(obs, action) for critic in self.critics])


class VaeEncoder(nn.Module):
    latents: int

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(7, name="fc1")(x)
        x = nn.relu(x)
        mean_x = nn.Dense(self.latents, name="fc2_mean")(x)
        logvar_x = nn.Dense(self.latents, name="fc2_logvar")(x)
        return mean_x, logvar_x


class VaeDecoder(nn.Module):
    @nn.compact
    def __call__(self, z):
        z = nn.Dense(7, name="fc1")(z)
        z = nn.relu(z)
        return nn.Dense(12, name="fc2")(z)


class Vae(nn.Module):
    latents: int = 3

    def setup(self):
        self.encoder = VaeEncoder(self.latents)
        self.decoder = VaeDecoder()

    def __call__(self, x, z_rng):
        mean, logvar = self.encoder(x)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(z_rng, logvar.shape)
        return self.decoder(z), mean, logvar

    def generate(self, z):
        return nn.sigmoid(self.decoder(z))
