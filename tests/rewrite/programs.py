"""Programs as people write them, as source text, each with a class `Model`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

HEAD = """from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn


"""


@dataclasses.dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        source: its text, without the imports of `HEAD`.
        values: values of the fields, for each of which the new class does what Linen's does.
        inputs: the shapes of what it is called with; `("tokens", 2, 5)` for integers.
        fields: those of the first entry point.
        also: those of other entry points.
        files: other files, by name.
        newline: what ends its lines.
        rtol: the tolerance, for a layer that Linen and NNX compute in different orders.
    """

    source: str
    values: Sequence[Mapping[str, Any]] = ()
    inputs: Sequence[tuple[Any, ...]] = ((2, 8),)
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    also: Sequence[Mapping[str, Any]] = ()
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    newline: str = "\n"
    rtol: float = 0


@dataclasses.dataclass(frozen=True)
class Of:
    """A value that an expression makes of a program's own classes: `Of("Kind.TANH")`."""

    expression: str

    def made(self, module: Any) -> Any:
        return eval(self.expression, vars(module))


FIELDS = {
    "a default that names another field": Program(
        """
class Model(nn.Module):
    a: int = 4
    b: int = a
    c: int = 2 * a + 1
    d: Sequence[int] = (a, b)

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.c)(nn.Dense(self.b)(nn.Dense(self.a)(x)))
        for width in self.d:
            x = nn.Dense(width)(x)
        return x
""",
        [{"a": 3}, {"a": 3, "b": 7}, {"d": (2,)}],
    ),
    "fields that are given by name": Program(
        """
class Inner(nn.Module):
    a: int
    b: int = dataclasses.field(default=5, kw_only=True)
    c: int = 3

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.c)(nn.Dense(self.b)(nn.Dense(self.a)(x)))


class Model(nn.Module):
    a: int = 4
    _: dataclasses.KW_ONLY
    c: int = 2

    @nn.compact
    def __call__(self, x):
        return Inner(self.a, self.c)(x)
""",
        [{"a": 3}, {"a": 3, "c": 4}],
    ),
    "an enum, a dataclass and constants": Program(
        """
WIDTH = 6


class Kind(enum.Enum):
    RELU = "relu"
    TANH = "tanh"
    NONE = "none"


@dataclasses.dataclass
class Config:
    width: int = WIDTH
    layers: tuple = (4, 5)
    out: int | None = None
    kind: Kind = Kind.RELU

    @property
    def double(self):
        return 2 * self.width


class Model(nn.Module):
    config: Config = dataclasses.field(default_factory=Config)

    @nn.compact
    def __call__(self, x):
        c = self.config
        x = nn.Dense(c.double)(x)
        for w in c.layers:
            x = nn.Dense(w)(x)
        if c.kind is Kind.RELU:
            x = nn.relu(x)
        elif c.kind is Kind.TANH:
            x = jnp.tanh(x)
        return nn.Dense(c.out or WIDTH)(x)
""",
        [{"config": Of("Config(3, (2,))")}, {"config": Of("Config(out=4, kind=Kind.TANH)")}],
    ),
}
TEXTS = {
    "a layer that a class below puts in the place of None": Program(
        """
class Base(nn.Module):
    width: int = 3
    norm_type: str = "layer"

    def setup(self):
        self.norm = nn.LayerNorm() if self.norm_type == "layer" else None
        self.layer = None

    def __call__(self, x):
        x = self.layer(x)
        if self.norm is not None:
            x = self.norm(x)
        return x


class Model(Base):
    def setup(self):
        super().setup()
        self.layer = nn.Dense(self.width)
""",
        [{"width": 4}, {"norm_type": "none"}],
    ),
    "values in parentheses": Program(
        """
class Model(nn.Module):
    size: int = 3
    wide: bool = False
    last: Callable[..., Any] | None = None

    @nn.compact
    def __call__(self, x):
        hidden = (self.size
                  + 2)
        width: int = (2 * hidden if self.wide
                      # As narrow as it is.
                      else hidden)
        for i in range(2):
            init = (self.last if i == 1 and self.last else nn.initializers.ones)
            x = nn.Dense(width, kernel_init=init)(x)
        return x
""",
        [{"size": 4}, {"wide": True}],
    ),
    "conditions and loops over several lines": Program(
        """
class Model(nn.Module):
    size: int = 3
    wide: bool = True
    sizes: Sequence[int] = (5, 4)

    @nn.compact
    def __call__(self, x):
        if (self.wide
                and self.size > 2):
            x = nn.LayerNorm()(x)
        elif (self.size > 5
              or self.sizes):
            x = nn.RMSNorm()(x)
        for size in (tuple(self.sizes)
                     + (6,)):
            x = nn.Dense(size)(x)
        for size, name in zip(
            self.sizes,
            ("first", "second"),
        ):
            x = nn.Dense(size, name=name)(x)
        return x
""",
        [{"size": 2}, {"wide": False, "sizes": (3,)}],
        also=[{"wide": False}],
    ),
    "class decorators that return the class": Program(
        """
KNOWN = {}


def register(name):
    def add(cls):
        KNOWN[name] = cls
        return cls

    return add


def plain(cls):
    KNOWN[cls.__name__] = cls
    return cls


@plain
class Block(nn.Module):
    width: int = 3

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)


@register("model")
class Model(nn.Module):
    width: int = 4

    def setup(self):
        self.a = nn.Dense(self.width)
        self.b = Block(3)

    def __call__(self, x):
        return self.b(self.a(x))
""",
        [{"width": 1}, {"width": 3}],
    ),
    "statements that complete a function": Program(
        """
@jax.custom_vjp
def clip(x):
    return x


def clip_fwd(x):
    return x, None


def clip_bwd(_, g):
    return (jnp.clip(g, -1, 1),)


clip.defvjp(clip_fwd, clip_bwd)
SCALES = {}
SCALES["two"] = 2.0


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scale(x, s):
    return x * s


scale.defvjp(lambda x, s: (x * s, None), lambda s, _, g: (g * s,))


class Model(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x):
        return scale(clip(nn.Dense(self.width)(x)), SCALES["two"])
""",
        [{"width": 1}, {"width": 3}],
    ),
    "merge_param by name": Program(
        """
class Model(nn.Module):
    width: int = 5
    use_running_average: bool | None = None

    @nn.compact
    def __call__(self, x, use_running_average: bool | None = True):
        average = nn.merge_param(
            name="use_running_average", a=self.use_running_average, b=use_running_average
        )
        return nn.BatchNorm()(nn.Dense(self.width)(x), use_running_average=average)
""",
        [{"width": 3}],
    ),
}
PROGRAMS = {**FIELDS, **TEXTS}
