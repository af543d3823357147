"""Programs as text, as in `programs`: where the sizes of layers come from."""

from __future__ import annotations

from tests.rewrite.programs import Program

PROGRAMS = {
    "heads that are as many as others where a field is None": Program(
        """
class Model(nn.Module):
    heads: int = 2
    kv_heads: int | None = None

    @nn.compact
    def __call__(self, x):
        kv_heads = self.kv_heads or self.heads
        q = nn.DenseGeneral((self.heads, 3), name="q")(x)
        v = nn.DenseGeneral((kv_heads, 3), name="v")(x)
        y = q * jnp.repeat(v, self.heads // kv_heads, axis=-2)
        return nn.DenseGeneral(5, axis=(-2, -1), name="o")(y)
""",
        [{"kv_heads": 1}, {"heads": 4, "kv_heads": 2}],
    ),
    "lists of arrays that loops go over": Program(
        """
class Model(nn.Module):
    down: Sequence[int] = (8, 16, 32)

    @nn.compact
    def __call__(self, x):
        hs, skips = [], []
        for i, width in enumerate(self.down):
            x = nn.Dense(width)(x)
            hs.append(x)
            if i != 0:
                skips.append(x)
        for width, h in zip(reversed(self.down), reversed(hs)):
            x = nn.relu(nn.Dense(width)(jnp.concatenate((x, h), axis=-1)))
        for width, h in reversed(list(zip(self.down[:-1], skips, strict=False))):
            x = jnp.concatenate((x, h), axis=-1)
            x = nn.Dense(width)(x)
        for h in hs:
            x = nn.Dense(3)(jnp.concatenate((x, h), axis=-1))
        return x
""",
        [{"down": (5, 3)}, {"down": (4,)}, {"down": (7, 7, 9, 2)}],
    ),
    "a layer that is made before its input grows": Program(
        """
class Model(nn.Module):
    depth: int = 3
    width: int = 8
    skips: Sequence[int] = (1,)

    @nn.compact
    def __call__(self, x):
        inputs = x
        for i in range(self.depth):
            layer = nn.Dense(self.width)
            if i in self.skips:
                x = jnp.concatenate([x, inputs], axis=-1)
            x = nn.relu(layer(x))
        return x
""",
        [{"depth": 1}, {"skips": (0, 2), "width": 3}, {"depth": 4, "skips": ()}],
    ),
    "layers of setup that are called by number": Program(
        """
class Model(nn.Module):
    widths: Sequence[int] = (8, 8, 8)
    act: Callable = nn.relu
    final: bool = False

    def setup(self):
        self.layers = [nn.Dense(n) for n in self.widths]
        self.more = [nn.Dense(n + 1) for n in self.widths]
        self.last = nn.Dense(3)

    def __call__(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i + 1 < len(self.layers) or self.final:
                x = self.act(x)
        for i in range(len(self.widths)):
            layer = self.more[i]
            x = nn.tanh(layer(x))
        return self.last(x)
""",
        [{"widths": (5, 3)}, {"widths": (4,), "final": True}, {"widths": (7, 2, 9, 2)}],
    ),
    "fields that a partial gives": Program(
        """
class Block(nn.Module):
    filters: int
    wide: bool = True

    @nn.compact
    def __call__(self, x):
        n = self.filters * 4 if self.wide else self.filters
        x = nn.Dense(self.filters)(x)
        return nn.Dense(n)(x)


class Model(nn.Module):
    filters: int = 4
    wide: bool = False

    @nn.compact
    def __call__(self, x):
        block = functools.partial(Block, wide=self.wide)
        for i in range(2):
            x = block(filters=self.filters)(x)
        for i in range(2):
            x = Block(self.filters)(x)
        return x
""",
        [{"filters": 3}, {"wide": True}, {"filters": 5, "wide": True}],
    ),
    "one-hot vectors beside the input": Program(
        """
class Model(nn.Module):
    kinds: int = 4
    width: int = 8

    @nn.compact
    def __call__(self, x):
        kind = jnp.argmax(x, -1)
        one = jax.nn.one_hot(kind, self.kinds)
        other = jax.nn.one_hot(kind, num_classes=2 * self.kinds)
        x = nn.Dense(self.width)(jnp.concatenate([x, one, other], axis=-1))
        return nn.Dense(3)(nn.glu(nn.Dense(2 * self.width)(x)))
""",
        [{"kinds": 3}, {"kinds": 8, "width": 2}],
    ),
    "a field that is annotated twice": Program(
        """
class Model(nn.Module):
    width: int = 8
    heads: int = 2
    width: int

    @nn.compact
    def __call__(self, x):
        y = nn.MultiHeadDotProductAttention(num_heads=self.heads, qkv_features=self.width)(
            x, x)
        return nn.LayerNorm()(x + y)
""",
        [{"width": 4}, {"width": 16, "heads": 4}],
        rtol=1e-5,
    ),
    "a chosen class of layers in a loop that no run turned": Program(
        """
class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)


class Other(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(nn.relu(x))


class Stage(nn.Module):
    kinds: Any
    width: int = 8
    depth: int = 1

    def setup(self):
        layer = Block if self.kinds.first == "a" else Other
        layers = [layer(self.width, name="0")]
        for i in range(self.depth - 1):
            layers.append(layer(self.width, name=str(i + 1)))
        self.layers = layers

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Kinds:
    first = "a"


class Model(nn.Module):
    kinds: Any = Kinds()
    depths: Sequence[int] = (1, 1)

    def setup(self):
        self.stages = [Stage(self.kinds, 4 * i, d) for i, d in enumerate(self.depths, 1)]

    def __call__(self, x):
        for stage in self.stages:
            x = stage(x)
        return x
""",
        [{"depths": (3,)}, {"depths": (1, 2, 1)}],
    ),
    "a token of the classes and a pooling that a field chooses": Program(
        """
class Pass(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x


class Model(nn.Module):
    hidden: int = 6
    pool: str = "mean"
    represented: int | None = 5
    classes: int = 3

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.hidden, (2, 2), strides=(2, 2))(x)
        n, h, w, c = x.shape
        x = jnp.reshape(x, [n, h * w, c])
        if self.pool in ["token", "all"]:
            token = self.param("token", nn.initializers.normal(), (1, 1, c))
            x = jnp.concatenate([jnp.tile(token, [n, 1, 1]), x], axis=1)
        x = x + nn.Dense(c)(nn.LayerNorm()(x))
        if self.pool == "token":
            x = x[:, 0]
        elif self.pool == "mean":
            x = jnp.mean(x, axis=list(range(1, x.ndim - 1)))
        elif self.pool == "all":
            x = x[..., None, :].sum(-2)
        else:
            raise ValueError(self.pool)
        if self.represented is not None:
            x = nn.tanh(nn.Dense(self.represented, name="pre")(x))
        else:
            x = Pass(name="pre")(x)
        if self.classes:
            x = nn.Dense(self.classes, name="head")(x)
        return x
""",
        [
            {"represented": None, "hidden": 4},
            {"pool": "token", "represented": 7},
            {"pool": "all", "represented": None},
            {"pool": "token", "classes": 0},
        ],
        inputs=[(2, 4, 4, 3)],
    ),
    "arrays beside each other on an axis of the middle and on the last one": Program(
        """
class Model(nn.Module):
    width: int = 4
    many: int = 3
    is_wide: bool = True

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width)(x)
        y = nn.Dense(self.width)(x)[:, None, :]
        for _ in range(self.many - 1):
            y = jnp.concatenate([y, nn.Dense(self.width)(x)[:, None, :]], axis=1)
        if self.is_wide:
            x = jnp.concatenate([x, y[:, -1]], axis=1)
        else:
            x = jnp.concatenate([x, y.sum(1)], axis=0)
        return nn.Dense(x.shape[-1] + 1, name="last")(x)
""",
        [{"width": 5}, {"many": 1}, {"is_wide": False, "width": 3}],
        inputs=[(2, 4)],
    ),
}
