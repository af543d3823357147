"""Models with lifted transforms of functions: lambdas, local functions and methods."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, deterministic=True):
        h = nn.relu(nn.Dense(self.width)(x))
        h = nn.Dropout(0.25, deterministic=deterministic)(h)
        return x + nn.Dense(x.shape[-1])(h)


class ScannedLayer(nn.Module):
    """A layer that is made outside of the function, and stacked."""

    depth: int = 3

    @nn.compact
    def __call__(self, x, train: bool = False):
        blocks = nn.scan(
            lambda block, x, _: (block(x, not train), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.depth,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        block = Block(5, name="blocks")
        x, _ = blocks(block, x, None)
        return x


class ScannedInSetup(nn.Module):
    """The layer is made in `setup`, and what is scanned over has its own axis."""

    depth: int = 2

    def setup(self):
        self.block = nn.Dense(4)

    def __call__(self, x):
        scales = jnp.arange(2.0 * self.depth).reshape(2, self.depth)
        scan = nn.scan(
            lambda block, x, scale, shift: (block(x) * scale[0] + shift, x.sum()),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(1, nn.broadcast),
            reverse=True,
        )
        x, sums = scan(self.block, x, scales, x.mean())
        return x + sums.sum()


class ScannedBody(nn.Module):
    """The function makes the layers itself."""

    depth: int = 3
    width: int = 5

    @nn.compact
    def __call__(self, x):
        def body(mdl, carry, scale):
            # Wide, and back.
            h = nn.tanh(nn.Dense(self.width)(carry))
            for i in range(2):
                h = nn.Dense(carry.shape[-1], name=f"out_{i}")(h)
            return carry + scale * h, None

        scan = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True})
        return scan(self, x, jnp.ones(self.depth))[0]


class Shifted(nn.Module):
    @nn.compact
    def __call__(self, x, mean):
        return nn.Dense(x.shape[-1])(x) + mean, None


class OtherAxes(nn.Module):
    """Parameters are stacked along another axis, as a class and as a function."""

    depth: int = 3
    axis: int = 1

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        axis = self.axis
        x, _ = nn.scan(
            lambda dense, x, _: (dense(x), None),
            variable_axes={"params": axis},
            split_rngs={"params": True},
            length=self.depth,
            metadata_params={nn.PARTITION_NAME: "stage"},
        )(nn.Dense(x.shape[-1], kernel_init=init, name="scanned"), x, None)
        # All layers are given the mean of what the first one gets.
        x, _ = nn.scan(
            Shifted,
            variable_axes={"params": axis},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=2,
        )(name="shifted")(x, x.mean())
        dense = nn.vmap(nn.Dense, variable_axes={"params": -1}, split_rngs={"params": True})
        return dense(x.shape[-1], name="mapped")(jnp.stack([x, 2 * x])).sum(0)


class Carried(nn.Module):
    """State goes from turn to turn, and the parameters are shared."""

    def setup(self):
        self.seen = self.variable("batch_stats", "seen", jnp.zeros, ())
        self.dense = nn.Dense(4)

    def turn(self, x, _):
        self.seen.value += 1
        return self.dense(x) * self.seen.value, None

    def __call__(self, x):
        scan = nn.scan(
            Carried.turn,
            variable_broadcast="params",
            variable_carry="batch_stats",
            split_rngs={"params": False},
            length=2,
        )
        return scan(self, x, None)[0]


class OverTime(nn.Module):
    """One cell for all steps, in a function of the module itself."""

    def setup(self):
        self.cell = nn.OptimizedLSTMCell(3)
        self.dropout = nn.Dropout(0.5)

    def step(self, carry, x, deterministic):
        carry, y = self.cell(carry, x)
        return carry, self.dropout(y, deterministic=deterministic)

    def __call__(self, x, train: bool = False):
        carry = (jnp.zeros((x.shape[0], 3)), jnp.zeros((x.shape[0], 3)))
        scan = nn.scan(
            lambda cell, carry, x: cell.step(carry, x, not train),
            variable_broadcast="params",
            split_rngs={"params": False, "dropout": True},
            in_axes=1,
            out_axes=1,
        )
        return scan(self, carry, x)[1]


class Rematted(nn.Module):
    """`nn.remat`, `nn.checkpoint` and `nn.jit` of lambdas, methods and local functions."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.remat(lambda block, x: block(x, not train))(Block(3), x)
        x = nn.checkpoint(Block.__call__, static_argnums=(2,), prevent_cse=False)(
            Block(4), x, not train
        )

        def body(mdl, x):
            return nn.Dense(4, name="inside")(x)

        @nn.remat
        def other(mdl, x):
            return nn.Dense(4, name="decorated")(x)

        x = nn.remat(body)(self, x)
        return nn.jit(lambda dense, x: dense(x))(nn.Dense(4), other(self, x))


class Mapped(nn.Module):
    """Layers for each item of an axis, and one layer for all items."""

    @nn.compact
    def __call__(self, x):
        pair = jnp.stack([x, 2 * x])
        each = nn.vmap(
            lambda dense, x: dense(x), variable_axes={"params": 0}, split_rngs={"params": True}
        )(nn.Dense(4, name="each"), pair)
        return nn.vmap(
            lambda dense, x: dense(x),
            variable_axes={"params": None},
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )(nn.Dense(4, name="all"), each).sum(0)


class Branches(nn.Module):
    """`nn.cond`, `nn.switch` and `nn.while_loop`."""

    def setup(self):
        self.one = nn.Dense(4)
        self.other = nn.Dense(4)

    def __call__(self, x):
        x = self.one(x) + self.other(x)
        x = nn.cond(x.sum() > 0, lambda m, x: m.one(x), lambda m, x: m.other(x), self, x)
        x = nn.switch(jnp.int32(1), [lambda m, x: m.one(x), lambda m, x: -m.other(x)], self, x)
        _, x = nn.while_loop(
            lambda m, state: state[0] < 2,
            lambda m, state: (state[0] + 1, m.one(state[1])),
            self,
            (0, x),
        )
        return x


class Alike(nn.Module):
    """Layers that start alike and have the same masks; the transform is made in `setup`."""

    def setup(self):
        self.block = Block(3)
        self.scan = nn.scan(
            lambda block, x, _: (block(x, False), x),
            variable_axes={"params": 0},
            split_rngs={"params": False, "dropout": False},
            length=3,
        )

    def __call__(self, x):
        return self.scan(self.block, x, None)


class Functions(nn.Module):
    """All of them as one program."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = ScannedLayer()(x, train)
        x = ScannedInSetup()(x)
        x = ScannedBody()(x)
        x = OtherAxes()(x)
        x = Carried()(x)
        x = Rematted()(x, train)
        x = Mapped()(x)
        x = Branches()(x)
        return OverTime()(jnp.stack([x, x], 1), train), jax.lax.stop_gradient(x)
