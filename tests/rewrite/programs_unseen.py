"""Programs as text, as in `programs`: constructs of public models that no other program has."""

from __future__ import annotations

from tests.rewrite.programs import Of, Program

PROGRAMS = {
    "a layer behind classes whose loops may have no turn": Program(
        """
class Items(nn.Module):
    widths: Sequence[int]
    final: bool = False

    @nn.compact
    def __call__(self, x):
        for i, width in enumerate(self.widths):
            x = nn.Dense(width)(x)
            if i + 1 < len(self.widths) or self.final:
                x = nn.relu(x)
        return x


class Numbers(nn.Module):
    widths: Sequence[int]
    head: int | None = None

    @nn.compact
    def __call__(self, x):
        for i in range(len(self.widths)):
            x = nn.relu(nn.Dense(self.widths[i])(x))
        if self.head is not None:
            x = nn.Dense(self.head)(x)
        return x


class Turns(nn.Module):
    depth: int
    width: int = 4

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x = nn.Dense(self.width)(x)
        return x


class Listed(nn.Module):
    widths: Sequence[int]

    def setup(self):
        self.layers = [nn.Dense(n) for n in self.widths]

    def __call__(self, x):
        for layer in self.layers:
            x = nn.relu(layer(x))
        return x


class Model(nn.Module):
    widths: Sequence[int] = (4, 6)
    depth: int = 1

    @nn.compact
    def __call__(self, x):
        parts = [nn.Dense(2)(Items(self.widths, final=True)(x))]
        parts.append(nn.Dense(3)(Items((*self.widths, 5))(x)))
        parts.append(nn.Dense(4)(Items(self.widths[:-1])(x)))
        parts.append(nn.Dense(5)(Numbers(self.widths)(x)))
        parts.append(nn.Dense(6)(Numbers(self.widths, 7)(x)))
        parts.append(nn.Dense(7)(Turns(self.depth)(x)))
        parts.append(nn.Dense(8)(Listed(self.widths)(x)))
        return jnp.concatenate(parts, axis=-1)
""",
        [{"widths": ()}, {"widths": (3,)}, {"widths": (3, 5, 2), "depth": 0}],
    ),
    "a flag makes layers an ensemble, by a function and in place": Program(
        """
def ensemble_of(cls, count, **options):
    return nn.vmap(
        cls,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=None,
        out_axes=0,
        axis_size=count,
        **options,
    )


class Net(nn.Module):
    widths: Sequence[int]

    @nn.compact
    def __call__(self, x):
        for width in self.widths:
            x = nn.relu(nn.Dense(width)(x))
        return x


class Kept(nn.Module):
    is_many: bool = True
    count: int = 3

    def setup(self):
        cls = Net
        if self.is_many:
            cls = ensemble_of(cls, self.count)
        first = cls((4, 2))
        self.first = first
        self.second = cls((5, 2))

    def __call__(self, x):
        return (self.first(x) * self.second(x)).sum(-1)


class Branches(nn.Module):
    is_many: bool = True

    @nn.compact
    def __call__(self, x):
        if self.is_many:
            net = ensemble_of(Net, 2)((4, 3))
        else:
            net = Net((4, 3))
        return net(x)


class Model(nn.Module):
    is_many: bool = True
    count: int = 3

    @nn.compact
    def __call__(self, x):
        cls = Net
        if self.is_many:
            cls = nn.vmap(
                cls,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=None,
                out_axes=0,
                axis_size=self.count,
            )
        here = cls((4, 6))(x).sum()
        return Kept(self.is_many, self.count)(x).sum() + Branches(self.is_many)(x).sum() + here
""",
        [{"is_many": False}, {"count": 2}],
    ),
    "layers behind the parts of a split array": Program(
        """
class Gate(nn.Module):
    def __call__(self, x):
        a, b = jnp.split(x, 2, axis=-1)
        return a * nn.sigmoid(b)


class Model(nn.Module):
    width: int = 8
    rate: int = 2

    @nn.compact
    def __call__(self, x):
        wide = self.width * self.rate
        a, b = jnp.split(nn.Dense(wide)(x), indices_or_sections=2, axis=-1)
        x = nn.Dense(self.width)(a * b)
        q, k, v = jnp.split(nn.Dense(3 * self.width)(x), 3, axis=-1)
        x = nn.Dense(5)(q + k * v)
        x = Gate()(nn.Dense(self.width * 2)(x))
        return nn.Dense(3)(x)
""",
        [{"width": 6}, {"rate": 4}, {"width": 2, "rate": 3}],
    ),
    "a condition on a transform that reads what setup names": Program(
        """
@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 4
    depth: int = 2
    is_saving: bool = False


class Block(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        return nn.tanh(nn.Dense(self.config.width)(x))


class Model(nn.Module):
    config: Config = Config()
    may_save: bool = True

    def setup(self):
        config = self.config
        is_saving = config.is_saving and self.may_save
        block = nn.remat(Block) if is_saving else Block
        self.blocks = [block(config) for _ in range(config.depth)]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x
""",
        [{"config": Of("Config(3, 1, True)")}, {"may_save": False}],
    ),
    "a model whose training needs a key that its callers may leave out": Program(
        """
class Labels(nn.Module):
    count: int
    width: int
    rate: float = 0.5

    def setup(self):
        self.table = nn.Embed(self.count + 1, self.width)

    def dropped(self, labels, key=None):
        is_dropped = jax.random.uniform(key, labels.shape) < self.rate
        return jnp.where(is_dropped, self.count, labels)

    def __call__(self, labels, train, key=None):
        if train and self.rate > 0:
            labels = self.dropped(labels, key)
        return self.table(labels)


class Model(nn.Module):
    width: int = 4

    def setup(self):
        self.labels = Labels(6, self.width)

    def __call__(self, labels, train=False, key=None):
        return self.labels(labels, train, key)
""",
        [{"width": 3}],
        inputs=[("tokens", 2, 5)],
    ),
    "initialisers with axis names by a function of another file": Program(
        """
import initialisers_with_axes as initialisers
from initialisers_with_axes import of_table


class Inner(nn.Module):
    width: int
    is_split: bool

    def setup(self):
        self.dense = nn.Dense(self.width, kernel_init=initialisers.of_kernel(self.is_split))

    def __call__(self, x):
        return self.dense(x)


class Model(nn.Module):
    width: int = 4
    is_split: bool = True

    @nn.compact
    def __call__(self, x):
        x = Inner(self.width, self.is_split)(x)
        table = self.param("table", of_table(self.is_split), (3, self.width))
        kernel = initialisers.of_kernel(self.is_split)
        return nn.Dense(2, kernel_init=kernel)(x + table.sum(0))
""",
        [{"width": 3}, {"is_split": False}],
        files={
            "initialisers_with_axes.py": """
def of_kernel(is_split):
    return over(is_split, nn.initializers.lecun_normal(), (None, "data"))


def of_table(is_split):
    return over(is_split, nn.initializers.ones, ("data", None))


def over(is_split, initialiser, axes):
    return nn.with_partitioning(initialiser, axes) if is_split else initialiser
"""
        },
    ),
    "classes and partials of layers by functions of another file": Program(
        """
import choosing_layers
from choosing_layers import norm_of


class Model(nn.Module):
    width: int = 4
    kind: str = "layer"

    @nn.compact
    def __call__(self, x):
        dense = choosing_layers.dense_of(self.width)
        x = norm_of(self.kind)()(dense()(x))
        return choosing_layers.block()(self.width + 1)(x)
""",
        [{"width": 3}, {"kind": "rms"}],
        files={
            "choosing_layers.py": """
class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.Dense(self.width)(x))


def norm_of(kind):
    if kind == "layer":
        return functools.partial(nn.LayerNorm, use_bias=False)
    return nn.RMSNorm


def dense_of(width):
    return functools.partial(nn.Dense, width, use_bias=False)


def block():
    return Block
"""
        },
    ),
    "layers in functions that read the names around them": Program(
        """
class Model(nn.Module):
    width: int = 4
    rate: float = 0.5
    is_deep: bool = True

    @nn.compact
    def __call__(self, x, deterministic: bool = True):
        skip = nn.Dense(self.width)(x)

        def block(y):
            size = 2 * self.width

            def last(y):
                return nn.Dense(self.width, use_bias=False)(y)

            y = nn.gelu(nn.Dense(size)(y))
            y = nn.Dropout(self.rate)(y, deterministic=deterministic)
            return skip + last(y)

        def deeper(x):
            return nn.relu(nn.Dense(self.width)(x))

        if self.is_deep:
            skip = deeper(skip)
        return block(nn.LayerNorm()(x))
""",
        [{"width": 3}, {"is_deep": False}],
    ),
}

FLAG_OF_SIZES = Program(
    """
class Combine(nn.Module):
    is_projected: bool = False

    @nn.compact
    def __call__(self, *, residual, skip):
        if self.is_projected:
            skip = nn.Dense(residual.shape[-1])(skip)
        return skip + residual


class Model(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(self.width)(x)
        h = Combine(is_projected=x.shape[-1] != self.width)(residual=h, skip=x)
        g = nn.Dense(4)(h)
        return Combine(is_projected=g.shape[-1] != h.shape[-1])(residual=g, skip=h)
""",
    [{"width": 3}, {"width": 8}],
)
