"""Models with lifted transforms: around layers, in loops and lists, and around methods."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, mask=None, deterministic=True):
        h = nn.relu(nn.Dense(self.width)(x))
        if mask is not None:
            h = h * mask
        h = nn.Dropout(0.25)(h, deterministic=deterministic)
        return x + nn.Dense(x.shape[-1])(h)


class RematLoop(nn.Module):
    """A flag decides about `nn.remat`."""

    depth: int = 2
    remat: bool = True

    @nn.compact
    def __call__(self, x, train: bool = False):
        block = Block
        if self.remat:
            block = nn.remat(block, static_argnums=(3,))
        for i in range(self.depth):
            x = block(3, name=f"block_{i}")(x, (x > 0).any(-1, keepdims=True), not train)
        return x


class RematSetup(nn.Module):
    """A layer and a list in `setup`."""

    def setup(self):
        block = nn.remat(Block)
        self.first = block(5)
        self.rest = [nn.remat(Block, prevent_cse=False)(3) for _ in range(2)]

    def __call__(self, x):
        x = self.first(x)
        for layer in self.rest:
            x = layer(x)
        return x


class Step(nn.Module):
    """A layer that is scanned over: what comes in is the carry, and something of its own."""

    width: int

    @nn.compact
    def __call__(self, x, scale, mask, deterministic):
        h = nn.Dropout(0.25)(nn.tanh(nn.Dense(self.width)(x)), deterministic=deterministic)
        return x + nn.Dense(x.shape[-1])(h * mask) * scale, h.sum()


class Scanned(nn.Module):
    """Stacked layers under `nn.remat`, with arguments that all of them share."""

    depth: int = 3

    @nn.compact
    def __call__(self, x, train: bool = False):
        mask = (x > 0).any(-1, keepdims=True)
        scales = jnp.arange(self.depth, dtype=x.dtype)
        x, sums = nn.scan(
            nn.remat(Step, static_argnums=(4,), prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            length=self.depth,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(5, name="layers")(x, scales, mask, not train)
        return x, sums


class Critic(nn.Module):
    hidden: int = 5

    @nn.compact
    def __call__(self, state, action):
        x = nn.relu(nn.Dense(self.hidden)(jnp.concatenate([state, action], -1)))
        return nn.Dense(1)(x).squeeze(-1)


class Ensemble(nn.Module):
    members: int = 2

    @nn.compact
    def __call__(self, state, action):
        critics = nn.vmap(
            Critic,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            out_axes=1,
            axis_size=self.members,
        )
        return critics(hidden=4)(state, action)


class Mapped(nn.Module):
    """A layer of Flax for each item of an axis, whose size nobody writes."""

    @nn.compact
    def __call__(self, x):
        dense = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})
        return dense(x.shape[-1])(jnp.stack([x, 2 * x])).sum(0)


class Cell(nn.Module):
    """A cell over time, by a decorator; the carry is made by a cell that is part of nothing."""

    hidden: int

    @functools.partial(
        nn.scan, variable_broadcast="params", in_axes=1, out_axes=1, split_rngs={"params": False}
    )
    @nn.compact
    def __call__(self, carry, x):
        return nn.OptimizedLSTMCell(self.hidden)(carry, x)

    def start(self, shape):
        cell = nn.OptimizedLSTMCell(self.hidden, parent=None)
        return cell.initialize_carry(jax.random.key(0), shape)


class Compiled(nn.Module):
    """Methods under transforms, and a cell under one in a compact method."""

    def setup(self):
        self.cell = Cell(4)

    @nn.jit
    def __call__(self, x):
        return self.cell(self.cell.start(x[:, 0].shape), x)[1]


class OverTime(nn.Module):
    @nn.compact
    def __call__(self, x):
        cell = nn.scan(
            nn.SimpleCell,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )(3)
        carry = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
        return nn.jit(nn.Dense)(2)(cell(carry, x)[1])


class Transformed(nn.Module):
    """All of them as one program."""

    remat: bool = True

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = RematLoop(remat=self.remat)(x, train)
        x = RematSetup()(x)
        x, sums = Scanned()(x, train)
        q = Ensemble()(x, x[:, :2])
        y = OverTime()(Compiled()(jnp.stack([x, Mapped()(x)], 1)))
        return x, sums, q, y


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(x.shape[-1])(x)


class ChosenCompact(nn.Module):
    """A flag decides about `nn.remat` of all blocks, and another one about one of them."""

    remat: bool = False
    deep: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Residual) if self.remat else Residual
        x = block()(x)
        if self.deep:
            x = block()(x)
        return x


class ChosenSetup(nn.Module):
    """The same in `setup`, beside a list without it whose loop has the same variable."""

    remat: bool = False
    deep: bool = False

    def setup(self):
        block = nn.remat(Residual) if self.remat else Residual
        self.plain = [Residual() for _ in range(2)]
        self.blocks = [block() for _ in range(2)]
        if self.deep:
            self.last = block()

    def __call__(self, x):
        for layer in self.plain:
            x = layer(x)
        for layer in self.blocks:
            x = layer(x)
        return self.last(x) if self.deep else x


class Chosen(nn.Module):
    remat: bool = False
    deep: bool = False

    @nn.compact
    def __call__(self, x):
        x = ChosenCompact(self.remat, self.deep)(x)
        return ChosenSetup(self.remat, self.deep)(x)


class Carried(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(x.shape[-1])(x), None


class ScannedOrNot(nn.Module):
    """Two flags together decide about `nn.remat`, its option, and a scan around it."""

    remat: bool = False
    scan: bool = False

    @nn.compact
    def __call__(self, x):
        block = Carried
        if self.remat:
            block = nn.remat(block, prevent_cse=not self.scan)
        if self.scan:
            layers = nn.scan(
                block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )
            x, _ = layers(name="layers")(x, None)
        else:
            for i in range(2):
                x, _ = block(name=f"layers_{i}")(x, None)
        return nn.remat(nn.Dense, prevent_cse=self.remat)(4)(x)
