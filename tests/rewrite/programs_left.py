"""Programs whose class `Model` stays Linen, as text, each with the reason that is given for it."""

from __future__ import annotations

from typing import NamedTuple


class Left(NamedTuple):
    """A program.

    Attributes:
        reason: why `Model` stays Linen.
        source: the program, without the imports of `programs.HEAD`. What is rewritten is `Root`, if
            there is one, or else `Model`.
    """

    reason: str
    source: str


# A file of a package, which some programs import.
ELSEWHERE = {
    "parts/elsewhere.py": """
def borrowed(self, x):
    return nn.Dense(3)(x)


class Lent:
    def lent(self, x):
        return nn.Dense(3)(x)


def head(x, size):
    return nn.Dense(size)(x)
"""
}
# Classes, and what they declare.
CLASSES = {
    "made by function": Left(
        "a function with * arguments makes a layer",
        """
def head(x, *sizes):
    return nn.Dense(sizes[-1], name="head")(x)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return head(nn.relu(nn.Dense(4)(x)), 3)
""",
    ),
    "mixed": Left(
        "it already uses both libraries: bridge.to_linen makes an NNX module",
        """
import bridge
from flax import nnx


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(bridge.to_linen(nnx.Linear, 3, 4, name="lin")(x))
""",
    ),
    "inner function": Left(
        "a module is made in a function inside a method",
        """
class Model(nn.Module):
    size: int = 4

    @nn.compact
    def __call__(self, x):
        def layer(y):
            return nn.relu(nn.Dense(self.size)(y))

        (x,) = map(layer, [x])
        return x
""",
    ),
    "method twice": Left(
        "a method or inner function that makes layers is called more than once",
        """
class Model(nn.Module):
    def block(self, x, size):
        return nn.relu(nn.Dense(size)(x))

    @nn.compact
    def __call__(self, x):
        return self.block(self.block(x, 4), 3)
""",
    ),
    "while loop": Left(
        "a module is made in a while loop",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        count = 0
        while count < 2:
            x = nn.Dense(4)(x)
            count += 1
        return x
""",
    ),
    "try block": Left(
        "a module is made where an exception was caught",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        try:
            x = nn.Dense(4)(x)
            raise ValueError
        except ValueError:
            x = x + 1
        return x
""",
    ),
    "own post init": Left(
        "the class defines its own __post_init__",
        """
class Model(nn.Module):
    size: int = 4

    def __post_init__(self):
        super().__post_init__()

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.size)(x)
""",
    ),
    "own train": Left(
        "train is already a method of every NNX module",
        """
class Model(nn.Module):
    def train(self):
        return True

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)
""",
    ),
    "reads path": Left(
        "NNX modules have no self.path",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x) + len(self.path)
""",
    ),
    "remat method": Left(
        "a method has the decorator @nn.remat",
        """
class Model(nn.Module):
    @nn.remat
    @nn.compact
    def __call__(self, x, scale=1.0):
        return nn.Dense(3)(x)
""",
    ),
    "cell that stays linen": Left(
        "a method under a transform makes a layer that stays Linen",
        """
class Model(nn.Module):
    @nn.remat
    @nn.compact
    def __call__(self, x):
        return nn.ConvLocal(3, (2,))(x)
""",
    ),
    "stacked in one expression": Left(
        "stacked layers are called with another layer's result",
        """
class ScanLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(x.shape[-1])(x), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            ScanLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        return layers()(nn.Dense(4)(x), None)[0]
""",
    ),
    "sows elsewhere": Left(
        "sow is called with another collection, or with its own reduction",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3)(x)
        self.sow("losses", "norm", (x**2).mean(), reduce_fn=lambda a, b: b)
        return x
""",
    ),
    "perturbed elsewhere": Left(
        "perturb is called with another collection",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return self.perturb("x", nn.Dense(3)(x), "others")
""",
    ),
    "cache of partial": Left(
        "a partial turns on the decode cache",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        attention = functools.partial(nn.MultiHeadDotProductAttention, decode=True)
        return attention(num_heads=1)(x)
""",
    ),
    "partial of an argument": Left(
        "nnx.BatchNorm has no argument force_float32_reductions",
        """
class Normed(nn.Module):
    norm: Any

    @nn.compact
    def __call__(self, x):
        return self.norm(use_running_average=True)(x)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Normed(functools.partial(nn.BatchNorm, force_float32_reductions=False))(x)
""",
    ),
    "cache in list": Left(
        "a layer with a decode cache is in a list",
        """
class Model(nn.Module):
    def setup(self):
        self.layers = [nn.MultiHeadDotProductAttention(1, decode=True) for _ in range(2)]

    def __call__(self, x):
        return self.layers[0](self.layers[1](x))
""",
    ),
    "cache in sequential": Left(
        "a decode cache is made under a transform or inside a layer",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Sequential([nn.Dense(3), nn.MultiHeadDotProductAttention(1, decode=True)])(x)
""",
    ),
    "caches of shapes": Left(
        "the decode caches have different shapes",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            y = x[:, : x.shape[1] - i]
            x = nn.MultiHeadDotProductAttention(1, decode=True)(y) if self.is_initializing() else x
        return x
""",
    ),
    "computed names": Left(
        "several variables have computed names",
        """
class Model(nn.Module):
    names: tuple[str, ...] = ("a", "b")

    @nn.compact
    def __call__(self, x):
        return sum(x * self.param(name, nn.initializers.ones, ()) for name in self.names)
""",
    ),
    "needs value": Left(
        "a constructor needs scale, which is only known in the call",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x, scale=0.5):
        return nn.Dense(3, kernel_init=nn.initializers.constant(scale))(x)
""",
    ),
    "needs root": Left(
        "a constructor needs bound, which is only known in the call",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jnp.sort(x)
        bound = 1 / np.sqrt(x.shape[-1])
        return nn.Dense(3, bias_init=nn.initializers.uniform(bound))(x)
""",
    ),
    "own layer": Left(
        "it derives from Sequential, which is in another package",
        """
class Model(nn.Sequential):
    pass


def Root():
    return Model([nn.Dense(3)])
""",
    ),
    "field cls": Left(
        "cls cannot be an argument of an NNX constructor",
        """
class Model(nn.Module):
    cls: Any = nn.Dense

    @nn.compact
    def __call__(self, x):
        return self.cls(3)(x)
""",
    ),
    "default module": Left(
        "a field has a module as its default",
        """
class Model(nn.Module):
    inner: Any = nn.Dense(3, parent=None)

    @nn.compact
    def __call__(self, x):
        return self.inner(x)
""",
    ),
    "several arrays": Left(
        "a parameter holds several arrays",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        both = self.param("both", lambda key: {"scale": jnp.ones(3), "bias": jnp.zeros(3)})
        return x * both["scale"] + both["bias"]
""",
    ),
    "spectral": Left(
        "nn.SpectralNorm names its variables after its layer",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.SpectralNorm(nn.Dense(3))(x, update_stats=False)
""",
    ),
    "counted": Left(
        "it makes modules of its own class, directly or through others",
        """
class Model(nn.Module):
    depth: int = 2

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3)(x)
        return Model(self.depth - 1)(x) if self.depth else x
""",
    ),
    "hidden": Left(
        "it is only used inside something that stays Linen",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class Root(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(Model, variables="params")()(x)
""",
    ),
    "differs": Left(
        "its values differ from those of the Linen class",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        # Something that no source shows: what came before.
        COUNT.append(1)
        return nn.Dense(3)(x) * len(COUNT)


COUNT: list[int] = []
""",
    ),
}
# Calls, variables and transforms.
CALLS = {
    "loop over input": Left(
        "a loop that makes layers depends on values that are only known in the call",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x, sizes=(4, 3)):
        for size in sizes:
            x = nn.Dense(4)(x) * size
        return x
""",
    ),
    "norm over axis": Left(
        "a norm over a named axis",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jax.vmap(nn.GroupNorm(1, axis_name="members"), axis_name="members")(x)
""",
    ),
    "shares scope": Left(
        "nn.share_scope has no counterpart",
        """
class Model(nn.Module):
    def setup(self):
        self.inner = nn.Dense(3)
        nn.share_scope(self, self.inner)

    def __call__(self, x):
        return self.inner(x)
""",
    ),
    "starred variable": Left(
        "a variable is declared with * arguments",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + self.param("a", *(nn.initializers.ones, (3,)))
""",
    ),
    "boxed variable": Left(
        "a variable is declared with `unbox`",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + self.param("a", nn.initializers.ones, (3,), unbox=False)
""",
    ),
    "computed collection": Left(
        "the name of a collection is computed",
        """
class Model(nn.Module):
    collection: str = "batch_stats"

    @nn.compact
    def __call__(self, x):
        return x + self.variable(self.collection, "mean", jnp.zeros, (3,)).value
""",
    ),
    "reads variable": Left(
        "self.get_variable has no counterpart here",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.param("a", nn.initializers.ones, (3,))
        return x + self.get_variable("params", "a")
""",
    ),
    "merges with stars": Left(
        "nn.merge_param is called in another form",
        """
class Model(nn.Module):
    deterministic: bool | None = None

    @nn.compact
    def __call__(self, x, deterministic: bool | None = True):
        both = (self.deterministic, deterministic)
        found = nn.merge_param("deterministic", *both)
        return nn.Dropout(0.5)(nn.Dense(3)(x), deterministic=found)
""",
    ),
    "reads amode": Left(
        "deterministic is a field and an argument of the call, and the field is also read directly",
        """
class Model(nn.Module):
    deterministic: bool | None = None

    @nn.compact
    def __call__(self, x, deterministic: bool | None = None):
        known = self.deterministic if deterministic is None else deterministic
        return nn.Dropout(0.5)(nn.Dense(3)(x), deterministic=known)


class Root(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic: bool = True):
        return Model(deterministic)(x)
""",
    ),
    "gives amode": Left(
        "only known in the call",
        """
class ReadsAMode(nn.Module):
    deterministic: bool | None = None

    @nn.compact
    def __call__(self, x, deterministic: bool | None = None):
        known = self.deterministic if deterministic is None else deterministic
        return nn.Dropout(0.5)(nn.Dense(3)(x), deterministic=known)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic: bool = True):
        return ReadsAMode(deterministic)(x)
""",
    ),
    "layers of kinds": Left(
        "one expression makes layers of different kinds",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for layer in (nn.Dense, nn.Embed):
            x = layer(5, features=3)(x.astype(int)) if layer is nn.Embed else layer(5)(x)
        for own in (functools.partial(nn.Dense, 3), nn.LayerNorm):
            x = own()(x)
        return x


def own(cls):
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__})
""",
    ),
    "decorated": Left(
        "the decorator @own returns another class",
        """
def own(cls):
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__})


@own
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)
""",
    ),
    "of forbidden": Left(
        "it derives from ForbiddenParent, which stays Linen",
        """
class ForbiddenParent(nn.Module):
    def __post_init__(self):
        super().__post_init__()

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class Model(ForbiddenParent):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x)
""",
    ),
    "stacked twice": Left(
        "the layers are stacked twice",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        inner = nn.scan(Step, **STACKED, length=2)
        return nn.vmap(inner, **STACKED, in_axes=(0, None))()(x, None)[0]


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, scale):
        return nn.Dense(x.shape[-1])(x), None


STACKED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
""",
    ),
    "carry by keyword": Left(
        "a carry is made in another form",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        cell = nn.SimpleCell(3)
        carry = cell.initialize_carry(rng=jax.random.key(0), input_shape=x[:, 0].shape)
        return cell(carry, x[:, 0])[1]
""",
    ),
    "never seen": Left(
        "it was never called",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class Root(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = Model()
        return nn.Dense(3)(x) if layer.name else x
""",
    ),
    "cache not made": Left(
        "the decode cache was never made",
        """
class Model(nn.Module):
    def setup(self):
        self.dense = nn.Dense(3)
        self.attention = nn.MultiHeadDotProductAttention(2, decode=True, qkv_features=4)

    def __call__(self, x):
        return self.dense(x)
""",
    ),
}
# What constructors and transforms are given.
ARGUMENTS = {
    "star of partial": Left(
        "a constructor is called with * arguments",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, use_bias=False)
        return dense(*(3,))(x)
""",
    ),
    "needs result": Left(
        "a constructor needs the result of a layer",
        """
class Model(nn.Module):
    def start(self, x):
        return nn.initializers.ones

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, kernel_init=self.start(x))(x)
""",
    ),
    "of other file": Left(
        "a function in another file makes one of its layers",
        """
import parts.elsewhere


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return parts.elsewhere.head(x, 3)
""",
    ),
    "borrows": Left(
        "a function in another file makes one of its layers",
        """
import parts.elsewhere


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return parts.elsewhere.borrowed(self, x)
""",
    ),
    "borrows of class": Left(
        "a function outside the class makes one of its layers",
        """
import parts.elsewhere


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return parts.elsewhere.Lent.lent(self, x)
""",
    ),
    "hands on": Left(
        "self.param is passed on instead of called",
        """
def scaled_by(param, size):
    return param("scale", nn.initializers.ones, (size,))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * scaled_by(self.param, x.shape[-1])
""",
    ),
    "of module": Left(
        "a parameter is declared in a module that is passed as an argument",
        """
from flax.linen import partitioning


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.ones
        return x * partitioning.param_with_axes("scale", init, (3,), axes=("a",), module=self)
""",
    ),
    "declared": Left(
        "declared, from another package, makes one of its parameters",
        r"""
ELSEWHERE: dict[str, Any] = {}
TEXT = "def declared(module, start):\n    return module.param('scale', start, (3,))\n"
exec(compile(TEXT, "elsewhere.py", "exec"), ELSEWHERE)


class Model(nn.Module):
    start: Callable[..., Any] = nn.initializers.ones

    @nn.compact
    def __call__(self, x):
        return x * ELSEWHERE["declared"](self, self.start)
""",
    ),
    "axis of call": Left(
        "an axis is not known in setup",
        """
class Model(nn.Module):
    axis: int = 1

    def setup(self):
        self.layer = nn.Dense(3)

    def __call__(self, x):
        mapped = nn.vmap(
            lambda layer, x: layer(x),
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
        )
        return mapped(self.layer, x)
""",
    ),
    "keyword mapped": Left(
        "what nn.vmap returns is called with keywords",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        mapped = nn.vmap(
            lambda layer, x, scale=1.0: layer(x) * scale,
            variable_axes={"params": 0},
            split_rngs={"params": True},
        )
        return mapped(nn.Dense(3), x, scale=2.0)
""",
    ),
    "fitted": Left(
        "fitted makes one of its layers: the value of a condition is not known",
        """
def fitted(x, size):
    if x.shape[-1] != size:
        x = nn.Dense(size)(x)
    return x


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return fitted(fitted(x, 5), 3)
""",
    ),
    "computed for layer": Left(
        "a layer takes a value that setup computes",
        """
class Model(nn.Module):
    def setup(self):
        scale = 2 * self.param("scale", nn.initializers.ones, (3,))
        self.dense = nn.Dense(3, bias_init=lambda key, shape, dtype: jnp.ones(shape) * scale)

    def __call__(self, x):
        return self.dense(x)
""",
    ),
    "computed for parameter": Left(
        "a parameter's initialiser uses a value that setup computes from parameters",
        """
class Model(nn.Module):
    def setup(self):
        half = self.param("scale", nn.initializers.ones, (3,)) / 2
        self.shift = self.param("shift", lambda key, value: value, half)

    def __call__(self, x):
        return x + self.shift
""",
    ),
    "computed again": Left(
        "setup reads self.scale before it sets it again",
        """
class Model(nn.Module):
    def setup(self):
        self.scale = self.param("scale", nn.initializers.ones, (3,))
        self.half = self.scale / 2
        self.scale = 2 * self.scale

    def __call__(self, x):
        return x * self.scale + self.half
""",
    ),
    "computed in block": Left(
        "setup computes with parameters inside a block",
        """
class Model(nn.Module):
    def setup(self):
        scale = self.param("scale", nn.initializers.ones, (3,))
        for factor in (1, 2):
            self.scale = factor * scale

    def __call__(self, x):
        return x * self.scale
""",
    ),
    "computed name": Left(
        "a variable in setup has the name of an attribute",
        """
class Model(nn.Module):
    doubles: bool = True

    def setup(self):
        scale = self.param("w", nn.initializers.ones, (3,))
        if self.doubles:
            self.scale = 2 * scale
        else:
            self.scale = 3 * scale

    def __call__(self, x):
        return x * self.scale
""",
    ),
}
# Transforms of functions.
TRANSFORMS = {
    "same masks": Left(
        "nn.scan gives its layers the same keys at init, and keys of their own in a call",
        """
STACKED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=True)(nn.Dense(3)(x))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        keys = {"params": False, "dropout": True}
        scan = nn.scan(lambda m, x, _: (m(x), None), **{**STACKED, "split_rngs": keys})
        return scan(Dropped(), x, None)[0]
""",
    ),
    "other masks": Left(
        "nn.scan gives its layers keys of their own at init, and the same keys in a call",
        """
STACKED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=True)(nn.Dense(3)(x))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        keys = {"params": True, "dropout": False}
        scan = nn.scan(lambda m, x, _: (m(x), None), **{**STACKED, "split_rngs": keys})
        return scan(Dropped(), x, None)[0]
""",
    ),
    "same mask in turns": Left(
        "nn.scan gives a layer the same keys in each iteration",
        """
SHARED = {"variable_broadcast": "params", "length": 2}


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=True)(nn.Dense(3)(x))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        keys = {"params": False, "dropout": False}
        scan = nn.scan(lambda m, x, _: (m(x), None), **SHARED, split_rngs=keys)
        return scan(Dropped(), x, None)[0]
""",
    ),
    "other masks mapped": Left(
        "nn.vmap gives a layer different keys in each iteration",
        """
class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=True)(nn.Dense(3)(x))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        keys = {"params": False, "dropout": True}
        return nn.vmap(lambda m, x: m(x), variable_axes={"params": None}, split_rngs=keys)(
            Dropped(), x
        )
""",
    ),
    "by position": Left(
        "nn.remat takes its options by position",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(lambda m, x: m(x), True)(nn.Dense(3), x)
""",
    ),
    "filtered": Left(
        "nn.remat is called with variables",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(lambda m, x: m(x), variables="params")(nn.Dense(3), x)
""",
    ),
    "with default": Left(
        "nn.remat is applied to a function with defaults",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(lambda m, x, scale=2.0: m(x) * scale)(nn.Dense(3), x)
""",
    ),
    "other metadata": Left(
        "nn.scan is called with metadata besides a partition name",
        """
STACKED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(lambda m, x, _: (m(x), None), **STACKED, metadata_params={"axis": 1})
        return scan(nn.Dense(3), x, None)[0]
""",
    ),
    "nested axes": Left(
        "nn.scan is called with in_axes=",
        """
STACKED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            lambda m, x, given: (m(x) + given["a"], None), **STACKED, in_axes=({"a": 0},)
        )
        return scan(nn.Dense(3), x, {"a": jnp.ones((2, 3))})[0]
""",
    ),
    "stacks field": Left(
        "nn.scan is applied to a layer that another class makes",
        """
STACKED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}


class Model(nn.Module):
    inner: Any

    @nn.compact
    def __call__(self, x):
        return nn.scan(lambda m, x, _: (m(x), None), **STACKED)(self.inner, x, None)[0]


class Root(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Model(nn.Dense(3))(x)
""",
    ),
    "with linen inside": Left(
        "a transform contains something that stays Linen",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(lambda m, x: m(x))(nn.ConvLocal(3, (1,)), x)
""",
    ),
    "branches by name": Left(
        "nn.cond takes its arguments by keyword",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3)(x)
        return nn.cond(x.sum() > 0, lambda m, x: x, lambda m, x: -x, self, x, rngs=True)
""",
    ),
}
# Functions inside of methods.
INNER_FUNCTIONS = {
    "given more": Left(
        "a function that takes the module does more with it than make layers",
        """
def scaled(module, x):
    return nn.Dense(3)(x) * module.scale


class Model(nn.Module):
    scale: float = 2.0

    @nn.compact
    def __call__(self, x):
        return scaled(self, x)
""",
    ),
    "in function": Left(
        "a function inside a function makes a layer",
        """
def around(x):
    def inner(x):
        return nn.Dense(3)(x)

    return inner(x)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return around(x)
""",
    ),
    "inner returns": Left(
        "a function inside a method returns layers",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        def denses(width):
            return [nn.Dense(width), nn.Dense(width)]

        for layer in denses(3):
            x = layer(x)
        return x
""",
    ),
    "inner defaults": Left(
        "a function inside a method takes defaults from the method",
        """
class Model(nn.Module):
    width: int = 3

    @nn.compact
    def __call__(self, x):
        width = self.width

        def dense(x, width=width):
            return nn.Dense(width)(x)

        return dense(x)
""",
    ),
    "inner of left": Left(
        "a module is made in a while loop",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        def dense(x):
            return nn.Dense(3)(x)

        while x.ndim < 4:
            x = nn.Dense(3)(x)[None]
        return dense(x)
""",
    ),
    "inner of other": Left(
        "a module is made where an exception was caught",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        def dense(x):
            return nn.Dense(3)(x)

        try:
            x = dense(x)
            raise ValueError
        except ValueError:
            pass
        return x
""",
    ),
    "inner in loop": Left(
        "a function inside a method is not only called",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        def dense(x):
            return nn.Dense(3)(x)

        for function in (dense, dense):
            x = function(x)
        return x
""",
    ),
}
# Functions that make layers, and transforms of them.
FUNCTIONS = {
    "by decorated": Left(
        "a decorated function makes a layer",
        """
def same(function):
    return function


@same
def decorated(x):
    return nn.Dense(3)(x)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return decorated(x)
""",
    ),
    "by mode": Left(
        "a function passes on values that are only known in the call",
        """
def normed(**rest):
    return nn.BatchNorm(**rest)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return normed(use_running_average=not train)(x)
""",
    ),
    "by rest": Left(
        "a layer is made with ** arguments that its NNX counterpart does not take",
        """
def dense(**rest):
    return nn.Dense(**rest)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return dense(features=3)(x)
""",
    ),
    "by star": Left(
        "a function that makes layers is called with * or ** arguments",
        """
def sized(x, size):
    return nn.Dense(size)(x)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return sized(x, *(3,))
""",
    ),
    "changed options": Left(
        "the dict of a layer's ** arguments is changed before the layer is made",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        options = {"use_bias": False}
        x = nn.Dense(4, **options)(x)
        options["use_bias"] = True
        return nn.Dense(3, **options)(x)
""",
    ),
    "by arrays": Left(
        "a function that returns layers is given what only the call knows",
        """
def as_wide(x):
    return nn.Dense(x.shape[-1])


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return as_wide(nn.relu(x))(x)
""",
    ),
    "by several modes": Left(
        "a function that returns layers computes their modes from more than it is given",
        """
def norms(train):
    return [nn.BatchNorm(use_running_average=not train), nn.LayerNorm()]


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        for norm in norms(train):
            x = norm(x)
        return x
""",
    ),
    "by scaled": Left(
        "a function that returns layers makes parameters",
        """
def scaled(module):
    module.param("scale", nn.initializers.ones, (3,))
    return nn.Dense(3)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return scaled(self)(x)
""",
    ),
    "axes by filter": Left(
        "nn.vmap does not list the collections of variable_axes by name",
        """
SPLIT = {"params": True}


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.vmap(lambda m, x: m(x), variable_axes={True: 0}, split_rngs=SPLIT)(nn.Dense(3), x)
""",
    ),
    "axis of its own": Left(
        "nn.vmap uses something other than an integer as the axis of params",
        """
import flax


SPLIT = {"params": True}


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"params": flax.core.lift.Out(0)}
        return nn.vmap(lambda m, x: m(x), variable_axes=axes, split_rngs=SPLIT)(nn.Dense(3), x)
""",
    ),
    "more and fewer": Left(
        "what nn.vmap returns is called with different numbers of arguments",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(3)
        apply = nn.vmap(
            lambda m, x, y=None: m(x), variable_axes={"params": None}, split_rngs={"params": False}
        )
        return apply(layer, x) + apply(layer, x, x)
""",
    ),
    "several outs": Left(
        "nn.vmap is called with out_axes=(0, 1)",
        """
STACKED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        a, b = nn.vmap(lambda m, x: (m(x), m(x)), **STACKED, out_axes=(0, 1))(nn.Dense(3), x)
        return a + b.swapaxes(0, 1)
""",
    ),
    "options elsewhere": Left(
        "nn.remat is called with policy",
        """
SAVED = {"policy": jax.checkpoint_policies.everything_saveable}


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(lambda m, x: m(x), **SAVED)(nn.Dense(3), x)
""",
    ),
    "while by name": Left(
        "nn.while_loop is called with arguments by name",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(3)
        x = layer(x)
        return nn.while_loop(lambda m, x: x.sum() < 0, lambda m, x: m(x), mdl=layer, init=x)
""",
    ),
    "while with keys": Left(
        "nn.while_loop draws keys",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        layer = nn.Dropout(0.5, deterministic=not train)
        x = layer(x)
        split = {"dropout": True}
        return nn.while_loop(
            lambda m, x: x.sum() < 0, lambda m, x: m(x) + 1, layer, x, split_rngs=split
        )
""",
    ),
    "calls elsewhere": Left(
        "the calls of the stacked layers were not found",
        """
STACKED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}


def called(layer, *given):
    return layer(*given)


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, scale=None):
        return nn.Dense(x.shape[-1])(x), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return called(nn.scan(Step, **STACKED, length=2)(), x, None)[0]
""",
    ),
    "step by star": Left(
        "nn.vmap is called with keyword or * arguments",
        """
STACKED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, scale=None):
        return nn.Dense(x.shape[-1])(x), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.vmap(Step, **STACKED)()(*(x,))[0]
""",
    ),
    "stacked stateless": Left(
        "nn.vmap is applied to layers without variables",
        """
STACKED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}


class Stateless(nn.Module):
    @nn.compact
    def __call__(self, x):
        return 2 * x


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.vmap(Stateless, **STACKED)()(x))
""",
    ),
    "uncalled": Left(
        "a module that was passed to the model was never called",
        """
class Model(nn.Module):
    inner: Any

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


def Root():
    return Model(nn.Dense(3))
""",
    ),
    "given sequential": Left(
        "a Sequential was passed to the model as a field",
        """
class Model(nn.Module):
    inner: Any

    @nn.compact
    def __call__(self, x):
        return self.inner(x)


def Root():
    return Model(nn.Sequential([nn.Dense(3)]))
""",
    ),
}
# Layers that are made where no constructor can.
PLACES = {
    "made by object": Left(
        "a function outside the class makes one of its layers",
        """
class Maker:
    def __call__(self, x):
        return nn.Dense(3)(x)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Maker()(x)
""",
    ),
    "made by module": Left(
        "a module is made outside the class: SHARED",
        """
SHARED = nn.Dense(3)


class Model(nn.Module):
    def setup(self):
        self.layer = SHARED

    def __call__(self, x):
        return self.layer(x)
""",
    ),
    "of two levels": Left(
        "one expression makes classes that are rewritten and classes that stay Linen",
        """
class WhileLoop(nn.Module):
    @nn.compact
    def __call__(self, x):
        count = 0
        while count < 2:
            x = nn.Dense(4)(x)
            count += 1
        return x


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for cls in (Plain, WhileLoop):
            x = cls()(x)
        return x
""",
    ),
    "a field that is None": Left(
        "a layer is made in code that never ran",
        """
class Model(nn.Module):
    norm: Any = None

    @nn.compact
    def __call__(self, x):
        x = x if self.norm is None else self.norm()(x)
        return nn.Dense(3)(x)
""",
    ),
    "unrun expression": Left(
        "a layer is made in code that never ran",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3)(x)
        return nn.Dense(8)(x) if x.ndim == 7 else x
""",
    ),
    "unrun lambda": Left(
        "a layer is made in code that never ran",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        wide = lambda x: 2 * nn.Dense(8)(x)  # noqa: E731
        return wide(x) if x.ndim == 7 else nn.Dense(3)(x)
""",
    ),
    "over inputs": Left(
        "a loop that makes layers depends on values that are only known in the call",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = [nn.Dense(3, name=f"layer_{i}") for i, _ in enumerate(jnp.split(x, 2))]
        return sum(layer(x) for layer in layers)
""",
    ),
    "norm elsewhere": Left(
        "the call that should take a mode was not found",
        """
def called(layer, *given):
    return layer(*given)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return called(nn.BatchNorm(use_running_average=not train), x)
""",
    ),
    "norm in other": Left(
        "a mode is passed on to another method",
        """
class Model(nn.Module):
    norm: Any

    @nn.compact
    def encode(self, x):
        return self.norm()(x)

    def __call__(self, x):
        return self.encode(x)


class Root(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return Model(functools.partial(nn.BatchNorm, use_running_average=not train))(x)
""",
    ),
    "norm in rest": Left(
        "a mode is passed on to a method with ** arguments",
        """
class Model(nn.Module):
    norm: Any

    @nn.compact
    def __call__(self, x, **rest):
        return self.norm()(x)


class Root(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return Model(functools.partial(nn.BatchNorm, use_running_average=not train))(x)
""",
    ),
    "reads mode": Left(
        "self.deterministic is passed in the call, and rate reads it",
        """
class Model(nn.Module):
    deterministic: bool

    def rate(self):
        return 0.0 if self.deterministic else 0.5

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(self.rate(), deterministic=True)(nn.Dense(3)(x))


class Root(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return Model(deterministic=not train)(x)
""",
    ),
    "mode by position": Left(
        "a mode is passed by position before other arguments",
        """
class ModeFirst(nn.Module):
    deterministic: bool
    size: int

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=self.deterministic)(nn.Dense(self.size)(x))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return ModeFirst(not train, 3)(x)
""",
    ),
    "layer in training": Left(
        "an argument of the call decides which layers exist, and it was not always the same",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x, wide):
        if wide:
            x = nn.Dense(3)(x)
        return x


class Root(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return Model()(Model()(x, True), train)
""",
    ),
    "size of mode": Left(
        "a constructor needs self.deterministic, which is an argument of the call",
        """
class Model(nn.Module):
    deterministic: bool

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, kernel_init=nn.initializers.constant(float(self.deterministic)))(x)


class Root(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return Model(deterministic=not train)(x)
""",
    ),
    "several dtypes": Left(
        "the decode caches have different dtypes",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for dtype in (jnp.float32, jnp.bfloat16):
            x = nn.MultiHeadDotProductAttention(2, qkv_features=4, dtype=dtype, decode=True)(x)
        return x
""",
    ),
    "carry with scale": Left(
        "initialize_carry takes other arguments than those of Flax's cells",
        """
class Model(nn.RNNCellBase):
    def initialize_carry(self, rng, input_shape, scale=0.0):
        return jnp.full((*input_shape[:-1], 3), scale)

    @nn.compact
    def __call__(self, carry, x):
        carry = nn.tanh(nn.Dense(3)(x) + carry)
        return carry, carry

    @property
    def num_feature_axes(self):
        return 1


class Root(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.RNN(Model())(x)
""",
    ),
    "calls by star": Left(
        "nnx.Linear cannot be called in this way",
        """
class Model(nn.Dense):
    def __call__(self, *given):
        return super().__call__(*given)


class Root(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Model(3)(x)
""",
    ),
    "default by function": Left(
        "a subclass of a Flax layer has a field with a default_factory",
        """
class Model(nn.Dense):
    tags: dict[str, int] = dataclasses.field(default_factory=dict)


class Root(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Model(3)(x)
""",
    ),
    "jit static": Left(
        "a method is compiled by jax.jit",
        """
class Model(nn.Module):
    @staticmethod
    @jax.jit
    def double(x):
        return 2 * x

    @nn.compact
    def __call__(self, x):
        return self.double(nn.Dense(3)(x))
""",
    ),
}
# Weights that are tied in other ways.
TIES = {
    "reads all variables": Left(
        "variables are read in a form that cannot be rewritten",
        """
class Model(nn.Module):
    def setup(self):
        self.layer = nn.Dense(3)

    def __call__(self, x):
        return self.layer(x) + sum(map(jnp.sum, self.layer.variables["params"].values()))
""",
    ),
    "applies with local": Left(
        "a layer that is applied takes values that setup computes",
        """
class Model(nn.Module):
    def setup(self):
        width = 3
        self.layer = nn.Dense(width, use_bias=False)

    def __call__(self, x):
        return self.layer.apply({"params": {"kernel": jnp.ones((3, 3))}}, x)
""",
    ),
    "applies and calls": Left(
        "a layer is both called and applied to other weights",
        """
class Model(nn.Module):
    def setup(self):
        self.layer = nn.Dense(3, use_bias=False)

    def __call__(self, x):
        return self.layer.apply({"params": {"kernel": jnp.ones((3, 3))}}, self.layer(x))
""",
    ),
    "applies in call": Left(
        "the call decides whether a layer has weights of its own",
        """
class Model(nn.Module):
    def setup(self):
        self.layer = nn.Dense(3, use_bias=False)

    def __call__(self, x):
        if x.ndim > 0:
            return self.layer.apply({"params": {"kernel": jnp.ones((x.shape[-1], 3))}}, x)
        return self.layer(x)
""",
    ),
    "matches argument": Left(
        "a match on an argument of the call decides which layers exist",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x, kind="wide"):
        match kind:
            case "wide":
                x = nn.Dense(8)(x)
            case "deep":
                x = nn.Dense(3)(nn.Dense(3)(x))
        return x
""",
    ),
}
LEFT = {
    **CLASSES,
    **CALLS,
    **ARGUMENTS,
    **TRANSFORMS,
    **INNER_FUNCTIONS,
    **FUNCTIONS,
    **PLACES,
    **TIES,
}
# `Model` is rewritten, and has to be reviewed for this reason.
REVIEWED = {
    "counts when mutable": Left(
        "NNX state is always mutable, in evaluation too",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        count = self.variable("stats", "count", lambda: jnp.zeros((), jnp.float32))
        if self.is_mutable_collection("stats"):
            count.value += 1
        return nn.Dense(3)(x)
""",
    ),
    "counts under flag": Left(
        "NNX state is always mutable, in evaluation too",
        """
class Model(nn.Module):
    counts: bool = False

    @nn.compact
    def __call__(self, x):
        count = self.variable("stats", "count", lambda: jnp.zeros((), jnp.float32))
        if self.counts and self.is_mutable_collection("stats"):
            count.value += 1
        return nn.Dense(3)(x)
""",
    ),
    "applies itself": Left(
        "self.apply is called where nothing ran",
        """
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(x.shape[-1])(x)

    def generate(self, params, x, steps: int):
        return jax.lax.fori_loop(0, steps, lambda _, y: self.apply({"params": params}, y), x)
""",
    ),
}
