"""Programs as text, as in `programs`: arrays of `setup`, ties, and layers made in other places."""

from __future__ import annotations

from tests.rewrite.programs import Of, Program

ARRAYS = {
    "arrays that setup makes": Program(
        """
class Model(nn.Module):
    width: int = 8

    def setup(self):
        self.freqs = jnp.arange(self.width, dtype=jnp.float32)
        self.tables = [jnp.arange(i + 1.0) for i in range(2)]
        self.dense = nn.Dense(self.width)

    def __call__(self, x):
        return self.dense(x) * jnp.cos(self.freqs) + self.tables[1].sum()
""",
        [{"width": 5}, {"width": 12}],
    ),
    "arrays of NumPy as fields": Program(
        """
class Model(nn.Module):
    low: np.ndarray
    high: np.ndarray

    def setup(self):
        self.action_scale = jnp.array((self.high - self.low) / 2)
        self.dense = nn.Dense(self.low.shape[0])

    def __call__(self, x):
        return jnp.tanh(self.dense(x)) * self.action_scale
""",
        [{"low": Of("np.zeros(4)"), "high": Of("2 * np.ones(4)")}],
        fields={"low": Of("-np.ones(3)"), "high": Of("np.ones(3)")},
    ),
    "arrays that setup computes from parameters": Program(
        """
class Model(nn.Module):
    width: int = 6
    bound: bool = True

    def setup(self):
        # Half of it.
        half = self.width // 2
        n = 2 * half
        w = self.param("w", nn.initializers.normal(), (8, n))
        self.unit = w / jnp.linalg.norm(w, axis=0, keepdims=True)
        if self.bound:
            low, self.high = nn.sigmoid(self.param("a", nn.initializers.normal(), (n,))), n
            self.a = low * self.high
        else:
            self.a = 2 * self.param("a", nn.initializers.normal(), (n,))
        self.b = self.param("b", nn.initializers.normal(), (n,))
        self.both = self.a, self.b

    def __call__(self, x):
        a, b = self.both
        return (x @ self.unit) * a + b
""",
        [{"width": 8}, {"bound": False}],
    ),
    "parameters that are initialised with others": Program(
        """
def gain_init(key, both):
    a, b = both
    return jnp.log(1 + a * a + b * b)


class Model(nn.Module):
    width: int = 6

    def setup(self):
        self.a = self.param("a", nn.initializers.normal(), (self.width,))
        self.b = self.param("b", nn.initializers.normal(), self.a.shape)
        self.gain = self.param("gain", gain_init, (self.a, self.b))

    def __call__(self, x):
        return x[..., :1] * self.gain + self.a - self.b
""",
        [{"width": 4}],
    ),
    "attributes of parameters that are set again": Program(
        """
class Model(nn.Module):
    width: int = 6

    def setup(self):
        self.c = self.param("c", nn.initializers.normal(), (self.width, 2))
        # A complex number.
        self.c = self.c[..., 0] + 1j * self.c[..., 1]
        self.turned = self.c * 1j

    def __call__(self, x):
        return x[..., :1] * self.c.real + self.turned.real
""",
        [{"width": 4}],
    ),
}
LISTS = {
    "layers of lists that pass sizes on, called beside others": Program(
        """
class Block(nn.Module):
    width: int

    def setup(self):
        self.inner = nn.Dense(self.width)

    def __call__(self, x):
        return nn.relu(self.inner(x))


class Model(nn.Module):
    growth: int = 3
    depth: int = 2
    heads: Sequence[int] = (4, 5)

    def setup(self):
        self.dense = [Block(self.growth) for _ in range(self.depth)]
        self.body = [nn.Dense(n) for n in self.heads]
        self.gates = [nn.Dense(1) for _ in self.heads]
        self.out = nn.Dense(2)

    def __call__(self, x):
        for block in self.dense:
            x = jnp.concatenate([x, block(x)], axis=-1)
        for i, (layer, gate) in enumerate(zip(self.body, self.gates)):
            x = layer(x)
            x = x * nn.sigmoid(gate(x)) + i
        return self.out(x)
""",
        [{"depth": 3, "growth": 2}, {"heads": (3, 7, 2)}],
    ),
    "named layers of a list that grows": Program(
        """
class Block(nn.Module):
    width: int

    def setup(self):
        self.inner = [nn.Dense(2, name="0"), nn.Dense(self.width, name="1")]

    def __call__(self, x):
        for layer in self.inner:
            x = nn.relu(layer(x))
        return x


class Model(nn.Module):
    widths: Sequence[int] = (4, 8)

    def setup(self):
        blocks = [Block(self.widths[0], name="0")]
        for i, width in enumerate(self.widths[1:]):
            blocks.append(Block(width, name=str(i + 1)))
        self.blocks = blocks

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x
""",
        [{"widths": (3, 5, 4)}, {"widths": (6,)}],
    ),
    "shapes with the items of a field": Program(
        """
class Model(nn.Module):
    grid: Sequence[int] = (2, 2)
    width: int = 5

    @nn.compact
    def __call__(self, x):
        shape = self.grid
        x = x[:, : self.grid[0] * self.grid[1]].reshape((x.shape[0], *shape))
        return nn.Dense(self.width)(x)
""",
        [{"width": 2}, {"grid": (2, 4)}, {"grid": (1, 3)}],
    ),
}
FIELDS = {
    "fields named as NNX's methods": Program(
        """
class Block(nn.Module):
    width: int
    train: bool
    sow: int = 3

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=not self.train)(nn.Dense(self.width)(x))
        return nn.Dropout(0.1, deterministic=not self.train)(x) * self.sow


class Model(nn.Module):
    width: int = 6
    train: bool = False

    @nn.compact
    def __call__(self, x):
        x = Block(self.width, train=self.train)(x)
        return Block(self.width + 1, False)(x)
""",
        [{"width": 3}],
    ),
    "layers that no entry point makes": Program(
        """
class Pool(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(x.shape[-1])(x))


class Model(nn.Module):
    width: int = 6
    pool: bool = False
    kind: str = "layer"

    def setup(self):
        self.body = nn.Dense(self.width)
        if self.kind == "layer":
            self.norm = nn.LayerNorm()
        elif self.kind == "rms":
            self.norm = nn.RMSNorm()
        else:
            self.norm = nn.Dense(self.width)
        self.pooler = Pool() if self.pool else None

    def __call__(self, x):
        x = self.norm(self.body(x))
        return self.pooler(x) if self.pool else x
""",
        [{"width": 3}, {"pool": True}, {"kind": "rms", "width": 9}, {"kind": "dense"}],
    ),
    "modules without sizes as the defaults of fields": Program(
        """
class Times(nn.Module):
    factor: float = 2.0

    @nn.compact
    def __call__(self, x):
        return x * self.factor


class Model(nn.Module):
    width: int = 5
    before: nn.Module = Times(3.0)
    after: nn.Module = dataclasses.field(default=Times())

    @nn.compact
    def __call__(self, x):
        return self.after(nn.Dense(self.width)(self.before(x)))
""",
        [{"width": 3}],
    ),
}
BLOCKS = {
    "layers under match": Program(
        """
class Model(nn.Module):
    act: str = "relu"
    norm: str = "layer"

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        match self.act:
            case "relu":
                x = nn.relu(x)
            case "tanh" | "t":
                x = jnp.tanh(x)
            case _:
                raise ValueError(self.act)
        match self.norm:
            case "layer":
                x = nn.LayerNorm()(x)
            case "none":
                pass
            case "rms":
                x = nn.RMSNorm()(x)
        return nn.Dense(3)(x)
""",
        [{"act": "t"}, {"norm": "none"}, {"norm": "rms"}],
    ),
    "layers in try": Program(
        """
class Model(nn.Module):
    act: str = "relu"
    width: str = "4"

    @nn.compact
    def __call__(self, x):
        try:
            act = getattr(nn, self.act)
        except AttributeError:
            act = jnp.tanh
        try:
            width = int(self.width)
        except (TypeError, ValueError):  # Another width.
            width = 7
        x = act(nn.Dense(width)(x))
        try:
            x = nn.Dense(5)(x)
        finally:
            x = x + 1
        return x
""",
        [{"act": "gelu"}, {"act": "nothing"}, {"width": "7"}, {"width": "wide"}],
    ),
}
TIES = {
    "weights that are tied by their path": Program(
        """
class Body(nn.Module):
    vocab: int
    width: int

    def setup(self):
        self.wte = nn.Embed(self.vocab, self.width)
        self.mix = nn.Dense(self.width)

    def __call__(self, ids):
        return self.mix(self.wte(ids))


class Model(nn.Module):
    vocab: int = 7
    width: int = 6
    tie: bool = True

    def setup(self):
        self.body = Body(self.vocab, self.width)
        self.head = nn.Dense(self.vocab, use_bias=False)

    def __call__(self, ids):
        h = self.body(ids)
        if self.tie:
            kernel = self.body.variables["params"]["wte"]["embedding"].T
            return self.head.apply({"params": {"kernel": kernel}}, h)
        return self.head(h)
""",
        [{"width": 3}, {"vocab": 9}, {"tie": False, "width": 5}],
        inputs=[("tokens", 2, 5)],
    ),
    "the table of an embedding": Program(
        """
class Model(nn.Module):
    vocab: int = 7
    width: int = 6
    head: bool = False

    def setup(self):
        self.wte = nn.Embed(self.vocab, self.width)
        if self.head:
            self.lm_head = nn.Dense(self.vocab)

    def __call__(self, ids):
        h = nn.tanh(self.wte(ids))
        if self.head:
            return self.lm_head(h)
        return jnp.dot(h, self.variables["params"]["wte"]["embedding"].T)
""",
        [{"width": 3}, {"head": True}],
        inputs=[("tokens", 2, 5)],
    ),
    "a head whose weights are tied where its caller says so": Program(
        """
@dataclasses.dataclass(frozen=True)
class Config:
    vocab: int = 7
    width: int = 6
    tie: bool = True
    more: bool = True


class Head(nn.Module):
    config: Config

    def setup(self):
        self.transform = nn.Dense(self.config.width)
        self.decoder = nn.Dense(self.config.vocab, use_bias=False)
        self.bias = self.param("bias", nn.initializers.ones, (self.config.vocab,))

    def __call__(self, h, shared=None):
        h = self.transform(h)
        if shared is not None:
            h = self.decoder.apply({"params": {"kernel": shared.T}}, h)
        else:
            h = self.decoder(h)
        return h + self.bias


class Heads(nn.Module):
    config: Config

    def setup(self):
        self.predictions = Head(self.config)

    def __call__(self, h, shared=None):
        return self.predictions(h, shared=shared)


class Body(nn.Module):
    config: Config

    def setup(self):
        self.wte = nn.Embed(self.config.vocab, self.config.width)

    def __call__(self, ids):
        return self.wte(ids)


class Model(nn.Module):
    config: Config = Config()

    def setup(self):
        self.body = Body(self.config)
        self.head = Heads(self.config)

    def __call__(self, ids):
        h = nn.tanh(self.body(ids))
        if self.config.tie:
            shared = self.body.variables["params"]["wte"]["embedding"]
        else:
            shared = None
        return self.head(h, shared=shared)
""",
        [{"config": Of("Config(width=3)")}, {"config": Of("Config(vocab=9, tie=False)")}],
        inputs=[("tokens", 2, 5)],
    ),
}
ELSEWHERE = {
    "functions of another file that make layers": Program(
        """
from making_layers import block as wide_block
from making_layers import default_init, dense as plain


class Model(nn.Module):
    width: int = 6

    @nn.compact
    def __call__(self, x):
        x = wide_block(x, self.width)
        x = nn.Dense(self.width + 1, kernel_init=default_init(0.5))(x)
        return plain(3)(x)
""",
        [{"width": 3}, {"width": 9}],
        files={
            "making_layers.py": """
def default_init(scale=1.0):
    return nn.initializers.variance_scaling(scale, "fan_avg", "uniform")


def dense(features, **kwargs):
    return nn.Dense(features, kernel_init=default_init(), **kwargs)


def block(x, features):
    return nn.relu(nn.Dense(features)(x))
"""
        },
    ),
    "remat of flax.linen.partitioning": Program(
        """
from flax.linen import partitioning as nn_partitioning

remat = nn_partitioning.remat


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.Dense(self.width)(x))


class Model(nn.Module):
    width: int = 8
    policy: str = "minimal"

    @nn.compact
    def __call__(self, x):
        if self.policy == "minimal":
            policy = jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims
        else:
            policy = None
        block = remat(Block, prevent_cse=True, policy=policy)
        for i in range(2):
            x = block(self.width, name=f"block_{i}")(x)
        return x
""",
        [{"width": 3}, {"policy": "full"}],
    ),
    "functions that return layers, given sizes and the mode": Program(
        """
from layer_helpers import norm, projection


class Mlp(nn.Module):
    depth: int

    @nn.compact
    def __call__(self, x, double):
        width = x.shape[-1]
        y = nn.relu(nn.Dense(2 * width)(2 * x if double else x))
        return x + projection(width, depth=self.depth, name="down")(y), None


class Model(nn.Module):
    width: int = 6
    depth: int = 2
    kind: str = "batch"

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = projection(self.width, use_bias=False)(x)
        x = norm(kind=self.kind, train=train, name="first")(x)
        axes, keys = {"params": 0}, {"params": True}
        layers = nn.scan(Mlp, variable_axes=axes, split_rngs=keys, in_axes=nn.broadcast, length=2)
        return layers(self.depth)(x, True)[0]
""",
        [{"width": 3}, {"kind": "layer"}, {"kind": "layer", "width": 5, "depth": 3}],
        files={
            "layer_helpers.py": """
def norm(kind, train, name=None):
    if kind == "batch":
        return nn.BatchNorm(use_running_average=not train, name=name)
    return nn.LayerNorm(name=name)


def projection(width, *, depth=1, use_bias=True, name=None):
    kernel_init = nn.initializers.normal(0.02 / depth)
    return nn.Dense(width, use_bias=use_bias, kernel_init=kernel_init, name=name)
"""
        },
    ),
    "functions inside of methods that return layers": Program(
        """
class Parts(nn.Module):
    width: int

    def setup(self):
        def dense(width):
            return nn.Dense(width, use_bias=False)

        norm = lambda: nn.LayerNorm()
        self.first = dense(self.width)
        self.rest = [dense(self.width) for _ in range(2)]
        self.norm = norm()

    def __call__(self, x):
        x = self.first(x)
        for each in self.rest:
            x = nn.relu(each(x))
        return self.norm(x)


class Model(nn.Module):
    width: int = 6
    depth: int = 2

    @nn.compact
    def __call__(self, x, train: bool = False):
        norm = lambda: nn.BatchNorm(use_running_average=not train)

        def numbered(i):
            return nn.Dense(self.width, name=f"layer_{i}")

        def named(name, width=3):
            \"\"\"Its name is an argument.\"\"\"
            return nn.Dense(width, name=f"{name}_projection")

        for i in range(self.depth):
            x = norm()(numbered(i)(x))
        x = named("in", x.shape[-1])(x) + named("side", width=x.shape[-1])(x)
        return named("out")(norm()(Parts(5)(x)))
""",
        [{"width": 3}, {"depth": 3}, {"depth": 1, "width": 5}],
    ),
    "a list, or stacked layers, in one attribute of setup": Program(
        """
@dataclasses.dataclass(frozen=True)
class Config:
    scan: bool = False
    remat: bool = False
    layers: int = 2


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, double):
        y = x + nn.Dense(x.shape[-1])(nn.relu(nn.Dense(self.width)(x)))
        return (2 * y if double else y), None


class Model(nn.Module):
    config: Config = Config()
    width: int = 5

    def setup(self):
        cfg = self.config
        block = Block
        if cfg.remat:
            block = nn.remat(block, prevent_cse=not cfg.scan, static_argnums=(2,))
        if cfg.scan:
            self.layers = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=cfg.layers,
            )(self.width)
        else:
            self.layers = [block(self.width) for _ in range(cfg.layers)]

    def __call__(self, x):
        if self.config.scan:
            x, _ = self.layers(x, True)
        else:
            for layer in self.layers:
                x, _ = layer(x, True)
        return x
""",
        [
            {"width": 3},
            {"config": Of("Config(scan=True, layers=3)")},
            {"config": Of("Config(remat=True)")},
            {"config": Of("Config(scan=True, remat=True)")},
        ],
    ),
    "remat in one of two branches of setup": Program(
        """
from flax.linen import partitioning as nn_partitioning

remat = nn_partitioning.remat


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, mask, double, more=False):
        x = nn.relu(nn.Dense(self.width)(x))
        if more:
            x = x + 1
        return 2 * x if double else x


class Model(nn.Module):
    width: int = 8
    depth: int = 2
    remat: bool = False

    def setup(self):
        if self.remat:
            LightBlock = remat(Block, static_argnums=(2, 3))
            self.layers = [LightBlock(self.width, name=str(i)) for i in range(self.depth)]
        else:
            self.layers = [Block(self.width, name=str(i)) for i in range(self.depth)]
        if self.remat:
            self.last = nn.remat(Block, static_argnums=(3, 4))(4)
        else:
            self.last = Block(5)
        self.norm = nn.LayerNorm()

    def __call__(self, x, mask=None, double=True, more=False):
        for i, layer in enumerate(self.layers):
            x = layer(x, mask, double, more)
        return self.norm(self.last(x, None, double, more))
""",
        [{"width": 3}, {"depth": 3}, {"remat": True}, {"width": 3, "depth": 1, "remat": True}],
    ),
}
TABS = {
    "tabs": Program(
        """
class Model(nn.Module):
    \"\"\"A model.

    Its lines begin with tabs.
    \"\"\"

    width: int = 5
    flag: bool = True

    def setup(self):
        self.first = nn.Dense(self.width)
        self.layers = [
            nn.Dense(w)
            for w in (3, 3)
        ]
        if self.flag:
            self.norm = nn.LayerNorm()

    def last(self, x):
        if self.flag:
            x = self.norm(x)
        return x

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(self.first(x))
        x = nn.Dense(3)(x) if self.flag else nn.relu(nn.Dense(3, use_bias=False)(x))
        for layer in self.layers:
            x = layer(x)
        return self.last(x)
""".replace("    ", "\t"),
        [{"width": 3}, {"flag": False}],
    ),
}
INPUTS_KV = Program(
    """
class Model(nn.Module):
    heads: int = 2

    def setup(self):
        self.cross = nn.MultiHeadDotProductAttention(num_heads=self.heads)
        self.own = nn.MultiHeadDotProductAttention(num_heads=self.heads)

    def __call__(self, x, y, deterministic=True):
        x = self.cross(inputs_q=x, inputs_kv=y, deterministic=deterministic)
        return self.own(x, deterministic=deterministic)
""",
    [{"heads": 4}],
    inputs=[(2, 5, 8), (2, 4, 6)],
)
MODES = {
    "a mode that a parent gives, or a call": Program(
        """
class Child(nn.Module):
    rate: float = 0.1
    deterministic: bool | None = None

    @nn.compact
    def __call__(self, x, deterministic: bool | None = None):
        known = nn.merge_param("deterministic", self.deterministic, deterministic)
        x = nn.Dropout(self.rate, deterministic=known)(nn.Dense(3)(x))
        return nn.BatchNorm(known)(x)


class Inner(nn.Module):
    deterministic: bool | None = None
    depth: int = 2

    @nn.compact
    def __call__(self, x, deterministic: bool | None = None):
        deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        for _ in range(self.depth):
            x = Child(deterministic=deterministic)(x)
        return x


class Model(nn.Module):
    width: int = 4
    deterministic: bool | None = None

    @nn.compact
    def __call__(self, x, deterministic: bool | None = True):
        deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        x = Inner(depth=1)(nn.Dense(self.width)(x), deterministic)
        return Inner(deterministic, depth=3)(x)
""",
        [{"width": 3}],
    ),
    "partials with a rate that a call decides": Program(
        """
class Drop(nn.Module):
    axes: tuple[int, ...] = ()
    rate: float | None = None

    @nn.compact
    def __call__(self, x, train: bool, rate: float | None = None):
        if rate is None:
            rate = self.rate
        return x * rate if train else x * (1 - rate) + len(self.axes)


class Block(nn.Module):
    width: int
    flip: bool
    unread: float = 0.5

    @nn.compact
    def __call__(self, x, train: bool = False, unread: float = 0.25):
        x = nn.Dense(self.width)(x) * unread
        return jnp.flip(x, -1) if self.flip else x


class Model(nn.Module):
    width: int = 4
    depth: int = 3
    flip: bool = True

    @nn.compact
    def __call__(self, x, train: bool = False, rate: float = 0.125):
        drop = functools.partial(Drop, rate=rate)
        block = functools.partial(
            Block,
            unread=rate,
            flip=self.flip,
        )
        layers = [block(self.width)]
        n = self.width
        for _ in range(self.depth - 1):
            layers.append(block(n * 2))
            n *= 2
        last = block(n)
        for layer in layers:
            x = layer(drop(axes=(1,))(x, train), train)
        return functools.partial(Drop, (0, 1), rate=2 * rate)()(last(x, train), train)
""",
        [{"width": 3, "depth": 2}, {"flip": False}, {"depth": 1}],
    ),
    "a rate that a call decides": Program(
        """
class Drop(nn.Module):
    rate: float | None = None
    deterministic: bool | None = None

    @nn.compact
    def __call__(self, x, deterministic: bool | None = None, rate: float | None = None):
        deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        if rate is None:
            rate = self.rate
        if deterministic:
            return x * (1 - rate)
        return x * rate


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, train: bool, rate: float = 0.1):
        x = Drop(rate, deterministic=not train)(nn.Dense(self.width)(x))
        return Drop(rate, deterministic=not train)(x, rate=2 * rate)


class Model(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x, train: bool = False, rate: float = 0.25):
        x = Block(self.width)(x, train, rate)
        return Drop(0.5, deterministic=not train)(nn.Dense(3)(x))
""",
        [{"width": 3}],
    ),
    "a mode that setup gives on": Program(
        """
class Child(nn.Module):
    train: bool | None = None

    @nn.compact
    def __call__(self, x, train: bool | None = None):
        train = nn.merge_param("train", self.train, train)
        return nn.Dropout(0.5)(nn.Dense(3)(x), deterministic=not train)


class Outer(nn.Module):
    width: int = 4

    def setup(self):
        self.first = nn.Dense(self.width)
        self.child = Child()

    def __call__(self, x, train):
        return self.child(self.first(x), train)


class Model(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x, train: bool = False):
        return Child(train=train)(Outer(self.width)(x, train))
""",
        [{"width": 2}],
    ),
}
AXES = {
    "parameters with names of their axes": Program(
        """
from flax.linen import partitioning

param_with_axes = partitioning.param_with_axes


class Dense(nn.Module):
    features: int
    axes: tuple[str, ...] = ("embed", "mlp")
    kernel_init: Callable = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x):
        shape = (x.shape[-1], self.features)
        kernel = param_with_axes("kernel", self.kernel_init, shape, jnp.float32, axes=self.axes)
        return x @ jnp.asarray(kernel, jnp.float32)


class Table(nn.Module):
    width: int

    def setup(self):
        self.table = param_with_axes(
            "table", nn.initializers.normal(), (5, self.width), jnp.float32, axes=("vocab", "embed")
        )

    def __call__(self, x):
        return x @ self.table.T


class Model(nn.Module):
    width: int = 4
    names: tuple[str, ...] = ("embed", "mlp")

    @nn.compact
    def __call__(self, x):
        x = Dense(self.width, self.names, name="first")(x)
        scale = partitioning.param_with_axes(
            "scale", nn.initializers.ones, (self.width,), axes=("embed",)
        )
        x = partitioning.with_sharding_constraint(x * scale, ("batch", "embed"))
        return Table(self.width)(Dense(self.width)(x))
""",
        [{"width": 3}, {"names": ("a", "b")}],
    ),
    "shapes that functions compute": Program(
        """
def as_tuple(x):
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


class General(nn.Module):
    features: int | tuple[int, ...]

    @nn.compact
    def __call__(self, inputs):
        features = as_tuple(self.features)
        axis = tuple(each % inputs.ndim for each in (-1,))
        inputs = jnp.asarray(inputs, jnp.float32)
        shape = tuple([inputs.shape[each] for each in axis]) + features
        flat = (np.prod([inputs.shape[each] for each in axis]), np.prod(features))
        kernel = self.param("kernel", nn.initializers.lecun_normal(), flat, jnp.float32)
        own = tuple(range(len(axis)))
        return jax.lax.dot_general(inputs, kernel.reshape(shape), ((axis, own), ((), ())))


class Model(nn.Module):
    heads: int = 2
    dim: int = 3

    @nn.compact
    def __call__(self, x):
        return General(5)(General((self.heads, self.dim))(x))
""",
        [{"heads": 4}, {"dim": 7, "heads": 1}],
    ),
}
PARTIALS = {
    "partials with sizes of the input": Program(
        """
class Block(nn.Module):
    size: int
    bias: bool = True

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.size, use_bias=self.bias)(x)


class Inner(nn.Module):
    factor: int = 2

    @nn.compact
    def __call__(self, x, train):
        n, d = x.shape
        wide = functools.partial(nn.Dense, features=self.factor * d)
        norm = functools.partial(nn.BatchNorm, use_running_average=not train)
        y = nn.relu(norm()(wide()(x)))
        out = functools.partial(nn.Dense, d, use_bias=False)
        return x + out(name="out")(y)


class Model(nn.Module):
    depth: int = 2
    bias: bool = True

    @nn.compact
    def __call__(self, x, train: bool = False):
        width = x.shape[-1]
        block = functools.partial(Block, width, bias=self.bias)
        for i in range(self.depth):
            x = nn.tanh(x + block(name=f"block_{i}")(x))
        half = functools.partial(Block, size=width // 2)
        return half(name="half")(Inner(name="inner")(x, train))
""",
        [{"depth": 3, "bias": False}, {"depth": 0}],
        inputs=[(2, 6)],
    ),
    "partials with sizes of what setup's method is given": Program(
        """
class Head(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, x.shape[-1], kernel_init=nn.initializers.ones)
        return nn.Dense(self.classes)(dense(name="q")(x) * dense(name="k")(x))


class Model(nn.Module):
    width: int = 4
    classes: int = 3

    def setup(self):
        self.first = nn.Dense(self.width)
        self.head = Head(self.classes)

    def __call__(self, x):
        return self.head(self.first(x))
""",
        [{"width": 7}, {"classes": 1, "width": 2}],
    ),
}
EINOPS = {
    "axes put together by einops": Program(
        """
import einops
from einops import rearrange


class Attention(nn.Module):
    dim: int
    inner: int = 5

    @nn.compact
    def __call__(self, x):
        x = rearrange(x, "b h w c -> b (h w) c")
        q = nn.Dense(self.inner)(x)
        k = nn.Dense(self.inner)(einops.rearrange(x, "b n c -> b n c"))
        return nn.Dense(self.dim)(q * k)


class Model(nn.Module):
    dim: int = 6

    def setup(self):
        self.first = nn.Dense(self.dim)
        self.attention = Attention(self.dim)
        self.head = nn.Dense(3)

    def __call__(self, x):
        return self.head(self.attention(self.first(x)))
""",
        [{"dim": 4}],
        inputs=[(2, 3, 2, 6)],
        files={
            "einops.py": """
def rearrange(x, pattern):
    return x.reshape(x.shape[0], -1, x.shape[-1])
"""
        },
    ),
}
BY_MODULE = {
    "functions of a module beside its classes": Program(
        """
import blocks_with_functions as blocks


class Model(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x):
        x = blocks.Block(self.width)(x)
        return blocks.scaled(x) + blocks.SHIFT
""",
        [{"width": 3}],
        files={
            "blocks_with_functions.py": """
SHIFT = 2.0
FACTOR = 3.0


def scaled(x):
    return FACTOR * x


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)
"""
        },
    ),
}
UNCALLED = {
    "a layer of setup that a field turns off": Program(
        """
class Pool(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.tanh(nn.Dense(x.shape[-1])(x[:, 0]))


class Model(nn.Module):
    width: int = 4
    add_pooling: bool = False

    def setup(self):
        self.body = nn.Dense(self.width)
        self.pooler = Pool()

    def __call__(self, x):
        x = self.body(x)
        pooled = self.pooler(x) if self.add_pooling else None
        if not self.add_pooling:
            return x
        return x, pooled
""",
        [{"width": 3}, {"add_pooling": True}],
        inputs=[(2, 3, 8)],
    ),
}
FLOWS = {
    "sizes that classes with setup compute of a config": Program(
        """
class Config:
    def __init__(self, hidden, inner):
        self.hidden, self.inner = hidden, inner


class Embeddings(nn.Module):
    config: Config

    def setup(self):
        self.table = nn.Dense(self.config.hidden)
        self.norm = nn.LayerNorm()

    def __call__(self, x):
        return self.norm(self.table(x))


class Encoder(nn.Module):
    settings: Config
    factor: int = 2

    def setup(self):
        self.up = nn.Dense(self.settings.inner)
        self.out = nn.Dense(self.settings.hidden * self.factor)

    def __call__(self, x):
        return self.out(nn.relu(self.up(x)))


class Model(nn.Module):
    config: Config

    def setup(self):
        self.embeddings = Embeddings(self.config)
        self.encoder = Encoder(self.config)
        self.head = nn.Dense(3)

    def __call__(self, x):
        return self.head(self.encoder(self.embeddings(x)))
""",
        [{"config": Of("Config(4, 7)")}, {"config": Of("Config(5, 5)")}],
        fields={"config": Of("Config(6, 10)")},
    ),
    "shortcuts with a projection where the sizes differ": Program(
        """
class Block(nn.Module):
    width: int
    out: int | None = None

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(self.width)(x)
        y = nn.Dense(self.out or y.shape[-1])(nn.relu(y))
        if x.shape != y.shape:
            x = nn.Dense(y.shape[-1])(x)
        return nn.LayerNorm()(x + y)


class Model(nn.Module):
    width: int = 4
    out: int | None = None

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(Block(self.width, self.out)(x))
""",
        [{"width": 8}, {"out": 8}, {"width": 6, "out": 5}],
    ),
    "shortcuts with a projection where strides differ, or sizes that no run had": Program(
        """
class Block(nn.Module):
    width: int
    strides: int = 1

    @nn.compact
    def __call__(self, x):
        y = nn.Conv(self.width, (3,), self.strides)(x)
        if x.shape != y.shape:
            x = nn.Conv(self.width, (1,), self.strides, name="projection")(x)
        return nn.relu(x + y)


class Model(nn.Module):
    widths: Sequence[int] = (4, 4)
    strides: Sequence[int] = (1, 2)

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        for width, strides in zip(self.widths, self.strides):
            x = Block(width, strides)(x)
        return nn.Dense(2)(x.mean(1))
""",
        [{"widths": (4, 6), "strides": (1, 1)}, {"widths": (5, 5), "strides": (2, 1)}],
        inputs=((2, 8, 3),),
    ),
    "sizes that a match chooses": Program(
        """
class Model(nn.Module):
    kind: str = "wide"
    width: int = 8
    out: int = 5

    @nn.compact
    def __call__(self, x):
        match self.kind:
            case "norm":
                x = nn.LayerNorm()(x)
            case "wide" if self.width > 1:
                x = nn.Dense(max(self.width, x.shape[-1] // 2))(x)
            case name:
                x = nn.Dense(len(name))(x)
        scale = self.param("scale", nn.initializers.ones, (1, x.shape[-1]))
        return nn.Dense(self.out)(x * scale)
""",
        [{"kind": "norm"}, {"kind": "other"}, {"width": 1}, {"width": 3}, {"width": 9}],
    ),
    "sums and comparisons of sizes that a field chooses": Program(
        """
class Model(nn.Module):
    width: int = 4
    flag: bool = True

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(self.width if self.flag else 2 * self.width)(x)
        x = jnp.concatenate([x, h], axis=-1)
        y = nn.Dense(x.shape[-1] if self.flag else self.width)(x)
        if y.shape != x.shape:
            x = nn.Dense(y.shape[-1] * 2)(x)
        return nn.Dense(max(3, x.shape[-1] // 2))(x)
""",
        [{"flag": False}, {"width": 7}, {"width": 12, "flag": False}],
    ),
    "arrays that are repeated along the last axis": Program(
        """
class Model(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x):
        mask = jnp.mean(x, -1, keepdims=True)
        x = nn.Dense(self.width)(x)
        x = x * mask
        x = nn.Dense(self.width + 1)(x)
        return nn.Dense(3)(mask * x)
""",
        [{"width": 3}],
    ),
    "functions of a module that make layers": Program(
        """
import functions_that_normalize as ops


class Model(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = ops.normalized(nn.Dense(self.width)(x), train=train, momentum=0.8)
        return ops.normalized(nn.Dense(3)(x), train)
""",
        [{"width": 3}],
        files={
            "functions_that_normalize.py": """
class Norm(nn.Module):
    use_running_average: bool | None = None
    momentum: float = 0.9

    @nn.compact
    def __call__(self, x, use_running_average: bool | None = None):
        use_running_average = nn.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        shape = tuple(size for i, size in enumerate(x.shape) if i == x.ndim - 1)
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape)
        if use_running_average:
            own = mean.value
        else:
            own = jnp.mean(x, axis=0)
            if not self.is_initializing():
                mean.value = self.momentum * mean.value + (1 - self.momentum) * own
        return (x - own) * self.param("scale", nn.initializers.ones, shape)


def normalized(x, train, momentum=0.99):
    return Norm(momentum=momentum, use_running_average=not train)(x)
"""
        },
    ),
}
FUNCTIONS = {
    "a function that sets its arguments anew": Program(
        """
def torso(x, width, depth, act=None, scale=1.0):
    \"\"\"Layers.\"\"\"
    # Wider.
    width *= 2
    if act is None:
        act = nn.tanh
    for _ in range(depth):
        x = act(nn.Dense(width)(x))
        width = width + 1
    scale = scale * 3
    return x.mean() * scale / width


def attend(q, kv=None, heads=1, features=None):
    if kv is None:
        kv = q
    features = features or q.shape[-1]
    q = nn.Dense(features * heads)(q)
    return nn.Dense(2)(q + nn.Dense(features * heads)(kv))


class Model(nn.Module):
    width: int = 4
    depth: int = 2
    features: int | None = None

    @nn.compact
    def __call__(self, x):
        y = torso(x, self.width, self.depth, scale=0.5)
        return y + attend(x, heads=2, features=self.features)
""",
        [{"width": 3}, {"depth": 0}, {"depth": 3, "width": 5}, {"features": 6}],
    ),
}
HELD = {
    "layers in a list over which others are made": Program(
        """
class Model(nn.Module):
    width: int = 4
    depth: int = 3

    @nn.compact
    def __call__(self, x):
        layers = [nn.Dense(self.width)]
        n = self.width
        for _ in range(self.depth - 1):
            layers.append(nn.Dense(n * 2))
            n *= 2
        for layer in layers:
            wide = 0
            if x.shape[-1] > 9:
                wide = 1
            if wide:
                x = 2 * x
            x = nn.Dropout(0.1)(layer(x), deterministic=True)
        return x
""",
        [{"width": 3, "depth": 2}, {"depth": 1}],
    ),
}
RATES = {
    "dropout with a rate that a call decides": Program(
        """
def dropped(x, rate, train):
    return nn.Dropout(rate, (1,))(nn.Dense(5)(x), not train)


class Model(nn.Module):
    width: int = 6
    rate: float = 0.5
    depth: int = 2

    @nn.compact
    def __call__(self, x, rate=None, train=False):
        if rate is None:
            rate = self.rate
        for i in range(self.depth):
            x = nn.Dense(self.width)(x)
            own = rate / (i + 1)
            x = nn.Dropout(rate=own, broadcast_dims=(0,))(x, deterministic=not train)
        return dropped(x, rate, train)
""",
        [{"width": 3}, {"depth": 3}, {"rate": 0.0}],
    ),
}
MAKERS = {
    "norms from a function that takes the mode": Program(
        """
def norm_of(train, kind="batch", dtype=jnp.float32):
    if kind == "batch":
        made = functools.partial(nn.BatchNorm, use_running_average=not train, dtype=dtype)
    elif kind == "group":
        made = functools.partial(nn.GroupNorm, num_groups=2, dtype=dtype)
    else:
        raise ValueError(kind)
    return made


class Block(nn.Module):
    width: int
    norm: Any

    @nn.compact
    def __call__(self, x):
        x = nn.relu(self.norm()(nn.Dense(self.width)(x)))
        return self.norm(name="last")(x)


class Model(nn.Module):
    width: int = 6
    kind: str = "batch"
    depth: int = 2
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train=False):
        norm = norm_of(train, self.kind, dtype=self.dtype)
        x = Block(self.width, norm)(norm(name="first")(x))
        for i in range(self.depth):
            x = norm(name=f"norm_{i}")(x)
        return nn.Dense(2)(x)
""",
        [{"width": 4}, {"kind": "group"}, {"kind": "group", "width": 8, "depth": 1}],
        also=[{"kind": "group"}],
    ),
    "norms from a function of another file": Program(
        """
import making_norms as norms
from making_norms import only_batch


class Block(nn.Module):
    width: int
    kind: str = "batch"

    @nn.compact
    def __call__(self, x, train):
        norm = norms.norm_of(self.kind, train=train)
        x = nn.relu(norm()(nn.Dense(self.width)(x)))
        return norm(name="last")(x)


class Model(nn.Module):
    width: int = 6
    kind: str = "batch"

    @nn.compact
    def __call__(self, x, train: bool = False):
        norm = only_batch(train and self.width > 1)
        x = norm()(Block(self.width, self.kind)(x, train))
        return norm()(Block(self.width)(x, train=train))
""",
        [{"width": 4}, {"kind": "layer", "width": 3}],
        files={
            "making_norms.py": """
EPSILON = 1e-3


def only_batch(train):
    return functools.partial(nn.BatchNorm, use_running_average=not train)


def norm_of(kind, train):
    if kind == "batch":
        return functools.partial(nn.BatchNorm, use_running_average=not train, epsilon=EPSILON)
    return functools.partial(nn.LayerNorm, epsilon=EPSILON)
"""
        },
    ),
    "norms of which one takes a mode": Program(
        """
class Model(nn.Module):
    width: int = 6
    batch: bool = True

    @nn.compact
    def __call__(self, x, train=False):
        plain = functools.partial(nn.BatchNorm, use_running_average=not train)
        last = plain if self.batch else nn.LayerNorm
        return last()(nn.Dense(self.width)(x))
""",
        [{"width": 4}, {"batch": False, "width": 3}],
    ),
}
SCANS = {
    "remat in a scan that a flag chooses": Program(
        """
class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, shift):
        return x + nn.Dense(self.width)(x) * shift, None


class Model(nn.Module):
    width: int = 8
    depth: int = 3
    remat: str = "none"
    scan: bool = True

    @nn.compact
    def __call__(self, x, shift=2.0):
        block = Block
        if self.remat != "none":
            policy = getattr(jax.checkpoint_policies, self.remat)
            block = nn.remat(block, prevent_cse=not self.scan, static_argnums=(2,), policy=policy)
        if self.scan:
            stacked = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=self.depth,
            )
            x, _ = stacked(self.width, name="layers")(x, shift)
        else:
            for i in range(self.depth):
                x, _ = block(self.width, name=f"layer_{i}")(x, shift)
        return nn.Dense(3)(x)
""",
        [{"depth": 2}, {"remat": "dots_saveable"}, {"scan": False, "remat": "dots_saveable"}],
        also=[{"remat": "everything_saveable"}, {"scan": False}],
    ),
}
METHODS = {
    "methods that return a layer at each of their calls": Program(
        """
class Scale(nn.Module):
    shift: bool = True

    @nn.compact
    def __call__(self, x):
        x = x * self.param("scale", nn.initializers.normal(), (x.shape[-1],))
        return x + 1 if self.shift else x


class Model(nn.Module):
    width: int = 6
    norm: str = "pre"
    depth: int = 1

    @nn.nowrap
    def scaled(self, name):
        \"\"\"A norm.\"\"\"
        return Scale(name=name, shift=self.norm == "pre")

    def dense(self, width: int, name: str | None = None, plain: bool = False):
        # With a bias of ones.
        return nn.Dense(
            name=name,
            features=width,
            use_bias=False if plain else self.width > 2,
            bias_init=nn.initializers.ones,
        )

    @nn.compact
    def __call__(self, x):
        if self.norm == "pre":
            x = self.scaled(name="norm")(x)
        x = nn.tanh(self.dense(self.width, name="first")(x))
        for i in range(self.depth):
            x = self.dense(self.width + i)(x)
        if self.norm == "post":
            x = self.scaled(name="norm")(x)
        x = self.scaled("last_norm")(x)
        last = self.dense(3, "last", plain=True)
        return last(x)
""",
        [{"width": 2}, {"norm": "post"}, {"norm": "none", "width": 9, "depth": 3}],
    ),
}
GROWN = {
    "layers of a growing list that a field chooses": Program(
        """
def unchanged(x):
    return x


class Model(nn.Module):
    width: int = 6
    depth: int = 2
    normed: bool = True

    @nn.compact
    def __call__(self, x):
        layers = [nn.Dense(self.width), nn.LayerNorm() if self.normed else unchanged]
        for _ in range(self.depth):
            layers += [nn.Dense(self.width), nn.relu, nn.LayerNorm() if self.normed else unchanged]
        layers.append(nn.Dense(3) if self.normed else nn.Dense(5))
        return nn.Sequential(layers)(x)
""",
        [{"normed": False}, {"width": 4, "depth": 3}, {"depth": 0, "normed": False}],
    ),
    "a list of layers that are initialised by what the call is given": Program(
        """
class Model(nn.Module):
    width: int = 6
    depth: int = 1

    @nn.compact
    def __call__(self, x):
        inputs, width = x.shape[-1], self.width
        layers = [nn.Dense(width, bias_init=nn.initializers.constant(1 / inputs)), nn.tanh]
        for _ in range(self.depth):
            layers += [nn.Dense(width + 1, bias_init=nn.initializers.constant(1 / width))]
        layers += [nn.Dense(inputs)]
        return nn.Sequential(layers)(x)
""",
        [{"width": 4}, {"depth": 3}],
    ),
    "an activation behind the last layer that is None": Program(
        """
class Model(nn.Module):
    widths: tuple[int, ...] = (6, 4)
    last: Callable[..., Any] | None = None

    @nn.compact
    def __call__(self, x):
        for n, width in enumerate(self.widths):
            if n != len(self.widths) - 1:
                x = nn.tanh(nn.Dense(width)(x))
            else:
                x = nn.Dense(width, use_bias=False)(x)
                if self.last is not None:
                    x = self.last(x)
        return nn.Dense(3)(x)
""",
        [{"widths": (3, 5, 7), "last": Of("nn.tanh")}, {"widths": (8,)}],
    ),
    "a file that imports all names of another": Program(
        """
from starred_layers import *


class Model(nn.Module):
    width: int = 6

    @nn.compact
    def __call__(self, x):
        return Block(self.width * SCALE)(double(nn.Dense(self.width)(x)))
""",
        [{"width": 4}],
        files={
            "starred_layers.py": """
SCALE = 2


def double(x):
    return 2 * x


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.tanh(nn.Dense(self.width)(x))
"""
        },
    ),
    "a method is compiled by a decorator that has another name": Program(
        """
def summed(forward):
    def wrapped(self, x, **kwargs):
        y = forward(self, x, **kwargs)
        return y + y.sum()

    return wrapped


class Model(nn.Module):
    width: int = 6

    @nn.compact
    @summed
    def __call__(self, x):
        return nn.Dense(self.width)(nn.Dense(x.shape[-1])(x))
""",
        [{"width": 4}],
    ),
    "defaults that are tuples without parentheses": Program(
        """
class Model(nn.Module):
    widths: tuple[int, ...] = 6, 4
    pairs: tuple[Any, ...] = (2, 1), (3, 2)

    @nn.compact
    def __call__(self, x):
        for width in self.widths:
            x = nn.Dense(width)(x)
        for low, high in self.pairs:
            x = nn.Dense(low + high)(x)
        return x
""",
        [{"widths": (3,)}, {"pairs": ((1, 1),)}],
    ),
    "a lambda and a comprehension with names of the call": Program(
        """
class Stage(nn.Module):
    width: int
    act: Callable[..., Any] = nn.gelu

    @nn.compact
    def __call__(self, x):
        return self.act(nn.Dense(self.width)(x))


class Model(nn.Module):
    width: int = 6
    depth: int = 2
    act: Callable[..., Any] = nn.tanh

    @nn.compact
    def __call__(self, x):
        rates = [x / self.depth for x in range(self.depth)]
        for n in range(self.depth):
            act = self.act if rates[n] < 0.5 else lambda x: 2 * x / x.shape[-1]
            x = Stage(self.width, act)(x)
        return x
""",
        [{"width": 4, "depth": 3}, {"act": Of("nn.relu"), "depth": 1}],
    ),
}
LAYERS = {
    "layers of Flax with a call of their own": Program(
        """
class Positive(nn.Dense):
    shift: float = 1.0
    use_bias: bool = False

    @nn.compact
    def __call__(self, x):
        x = jnp.asarray(x, self.dtype)
        # Weights above zero.
        kernel = abs(self.param("kernel", self.kernel_init, (x.shape[-1], self.features)))
        y = x @ kernel + self.shift
        if self.use_bias:
            y = y + self.param("bias", self.bias_init, (self.features,))
        return y


class Scaled(nn.LayerNorm):
    @nn.compact
    def __call__(self, x):
        x = x - x.mean(-1, keepdims=True)
        return x * self.param("scale", self.scale_init, (x.shape[-1],), self.param_dtype)


class Model(nn.Module):
    width: int = 6
    bias: bool = True

    @nn.compact
    def __call__(self, x):
        x = Positive(self.width, use_bias=self.bias, bias_init=nn.initializers.ones)(x)
        x = Scaled(use_bias=False)(x)
        return nn.Dense(3)(nn.relu(Positive(4, shift=0.5)(x)))
""",
        [{"width": 3}, {"bias": False, "width": 8}],
    ),
}
PROGRAMS = {
    **HELD,
    **GROWN,
    **FUNCTIONS,
    **EINOPS,
    **PARTIALS,
    **TABS,
    **MODES,
    **FLOWS,
    **UNCALLED,
    **AXES,
    **BY_MODULE,
    **ELSEWHERE,
    **ARRAYS,
    **LISTS,
    **FIELDS,
    **BLOCKS,
    **TIES,
    **RATES,
    **MAKERS,
    **SCANS,
    **METHODS,
    **LAYERS,
}
