"""Each construct of Linen models in a compact form and in a setup form, as source text."""

from __future__ import annotations

import textwrap
from typing import NamedTuple


class Construct(NamedTuple):
    """A construct in two forms; each maps `(n, m, 4)` to the same shape.

    Attributes:
        compact: the body of a compact `__call__(self, x, train=False)`.
        setup: the body of `setup`.
        call: the body of `__call__` behind it.
        fields: the lines of the fields.
        before: what stands above the classes.
    """

    compact: str
    setup: str
    call: str
    fields: str = ""
    before: str = ""


LOOP = "for layer in self.layers:\n    x = nn.relu(layer(x))\nreturn x"
SCANNED = """
class ScannedLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.relu(nn.Dense(x.shape[-1])(x)), None
"""
SCAN = 'nn.scan(ScannedLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)'
WITH_CHILD = """
class Child(nn.Module):
    norm: Any

    @nn.compact
    def __call__(self, x):
        return self.norm()(x)


class OtherChild(nn.Module):
    norm: Any

    def setup(self):
        self.inner = self.norm(use_bias=False)

    def __call__(self, x):
        return self.inner(x)
"""
PARENT = """
class Parent(nn.Module):
    width: int = 4

    def setup(self):
        self.first = nn.Dense(self.width)


class CompactParent(nn.Module):
    width: int = 4

    def double(self, x):
        return 2 * x
"""
CONFIG = """
@dataclasses.dataclass(frozen=True)
class Config:
    hidden: int = 6
    width: int = 4
"""
AXES = 'nn.initializers.ones_init(), ("embed",)'

PLAIN = {
    "Straight": Construct(
        "x = nn.relu(nn.Dense(5)(x))  # wide\nreturn nn.Dense(4)(x)",
        "self.a = nn.Dense(5)\nself.b = nn.Dense(4)",
        "return self.b(nn.relu(self.a(x)))",
    ),
    "Conditional": Construct(
        "if self.flag:\n    x = nn.Dense(4)(x)\nelse:\n    x = nn.LayerNorm()(x)\nreturn x",
        "if self.flag:\n    self.a = nn.Dense(4)\nelse:\n    self.b = nn.LayerNorm()",
        "return self.a(x) if self.flag else self.b(x)",
        "flag: bool = True",
    ),
    "Ternary": Construct(
        "y = nn.Dense(self.hidden)(x) if self.hidden else x\nreturn nn.Dense(4)(y)",
        "self.a = nn.Dense(self.hidden) if self.hidden else None\nself.b = nn.Dense(4)",
        "return self.b(x if self.a is None else self.a(x))",
        "hidden: int | None = 5",
    ),
    "Loop": Construct(
        "for size in self.sizes:\n    x = nn.relu(nn.Dense(size)(x))\nreturn x",
        "layers = []\nfor size in self.sizes:\n    layers.append(nn.Dense(size))\n"
        "self.layers = layers",
        LOOP,
        "sizes: tuple[int, ...] = (5, 4)",
    ),
    "Comprehension": Construct(
        "layers = [nn.Dense(size) for size in self.sizes]\nfor layer in layers:\n"
        "    x = nn.relu(layer(x))\nreturn x",
        "self.layers = [nn.Dense(size) for size in self.sizes]",
        LOOP,
        "sizes: tuple[int, ...] = (5, 4)",
    ),
    "Dictionary": Construct(
        'layers = {"a": nn.Dense(5), "b": nn.Dense(4)}\nreturn layers["b"](layers["a"](x))',
        'self.layers = {"a": nn.Dense(5), "b": nn.Dense(4)}',
        'return self.layers["b"](self.layers["a"](x))',
    ),
    "Named": Construct(
        'x = nn.Dense(5, name="first")(x)\nfor i in range(2):\n'
        '    x = nn.Dense(4, name=f"block_{i}")(x)\nreturn x',
        'self.first = nn.Dense(5, name="one")\nself.second = nn.Dense(4, name="two")',
        "return self.second(self.first(x))",
    ),
    "Partials": Construct(
        "dense = functools.partial(nn.Dense, use_bias=False)\nreturn dense(4)(dense(5)(x))",
        "dense = functools.partial(nn.Dense, use_bias=False)\nself.a = dense(5)\nself.b = dense(4)",
        "return self.b(self.a(x))",
    ),
    "InVariable": Construct(
        "layer = nn.Dense\nreturn layer(4)(layer(5)(x))",
        "layer = nn.Dense\nself.a = layer(5)\nself.b = layer(4)",
        "return self.b(self.a(x))",
    ),
    "InField": Construct(
        "return self.act(self.layer(4)(x))",
        "self.a = self.layer(4)",
        "return self.act(self.a(x))",
        "layer: Any = nn.Dense\nact: Any = nn.tanh",
    ),
    "Shapes": Construct(
        "y = nn.Dense(2 * x.shape[-1])(x)\nreturn nn.Dense(x.shape[-1])(y)",
        "self.a = nn.Dense(2 * self.width)\nself.b = nn.Dense(self.width)",
        "return self.b(self.a(x))",
        "width: int = 4",
    ),
    "Configured": Construct(
        "return nn.Dense(self.config.width)(nn.Dense(self.config.hidden)(x))",
        "self.a = nn.Dense(self.config.hidden)\nself.b = nn.Dense(self.config.width)",
        "return self.b(self.a(x))",
        "config: Config = Config()",
        CONFIG,
    ),
    "Parameters": Construct(
        'scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))\nreturn x * scale',
        'self.scale = self.param("scale", nn.initializers.ones, (4,))',
        "return x * self.scale",
    ),
    "Annotated": Construct(
        f'return x * self.param("scale", nn.with_partitioning({AXES}), (4,))',
        f"self.a = nn.LayerNorm(scale_init=nn.with_partitioning({AXES}))",
        "return self.a(x)",
    ),
    "Inherited": Construct(
        "return self.double(nn.Dense(self.width)(x))",
        "super().setup()\nself.second = nn.Dense(4)",
        "return self.second(nn.relu(self.first(x)))",
        before=PARENT,
    ),
    "Stacked": Construct(
        f'return {SCAN}(name="layers")(x, None)[0]',
        f"self.a = {SCAN}()",
        "return self.a(x, None)[0]",
        before=SCANNED,
    ),
    "Methods": Construct(
        "return self.twice(nn.Dense(4)(x))",
        "self.a = nn.Dense(4)",
        "return self.first(x)",
    ),
}

STATEFUL = {
    "State": Construct(
        'mean = self.variable("batch_stats", "mean", jnp.zeros, (4,))\n'
        "if train and not self.is_initializing():\n    mean.value = 0.9 * mean.value + 1.0\n"
        "return x - mean.value",
        'self.mean = self.variable("batch_stats", "mean", jnp.zeros, (4,))',
        "if train and not self.is_initializing():\n"
        "    self.mean.value = 0.9 * self.mean.value + 1.0\nreturn x - self.mean.value",
    ),
    "Sown": Construct(
        'x = nn.Dense(4)(x)\nself.sow("intermediates", "dense", x)\nreturn x',
        "self.a = nn.Dense(4)",
        'x = self.a(x)\nself.sow("intermediates", "seen", x)\nreturn x',
    ),
    "Dropped": Construct(
        "x = nn.Dropout(0.5)(nn.Dense(4)(x), deterministic=not train)\n"
        "return nn.Dropout(0.5, deterministic=not train)(x)",
        "self.a = nn.Dropout(0.5)",
        "return self.a(x, not train)",
    ),
    "Normed": Construct(
        "x = nn.BatchNorm(use_running_average=not train)(x)\n"
        "norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.8)\n"
        "return norm()(nn.Dense(4)(x))",
        "self.a = nn.BatchNorm(momentum=0.8)",
        "return self.a(x, use_running_average=not train)",
    ),
    "HandedOn": Construct(
        "norm = functools.partial(nn.BatchNorm, use_running_average=not train)\n"
        "return Child(norm)(x)",
        "self.a = OtherChild(functools.partial(nn.LayerNorm, epsilon=1e-3))",
        "return self.a(x)",
        before=WITH_CHILD,
    ),
    "Norms": Construct(
        "x = nn.GroupNorm(2)(nn.RMSNorm()(nn.LayerNorm(1e-5)(x)))\n"
        "return nn.GroupNorm(num_groups=None, group_size=2)(x)",
        "self.a, self.b = nn.GroupNorm(2), nn.RMSNorm()",
        "return self.b(self.a(x))",
    ),
    "General": Construct(
        "y = nn.DenseGeneral((2, 2))(x)\nreturn nn.DenseGeneral(4, axis=(-2, -1))(y)",
        "self.a = nn.DenseGeneral((2, 2))\nself.b = nn.DenseGeneral(4, axis=(-2, -1))",
        "return self.b(self.a(x))",
    ),
    "Convolved": Construct(
        "x = nn.Conv(5, (2,), strides=1)(x)\nreturn nn.ConvTranspose(4, (2,))(x)",
        'self.a = nn.Conv(4, (2,), padding="SAME", feature_group_count=2)',
        "return self.a(x)",
    ),
    "Rematerialised": Construct(
        "return nn.remat(nn.Dense)(4)(nn.jit(nn.Dense)(5)(x))",
        "self.a = nn.remat(nn.Dense)(4)",
        "return self.a(x)",
    ),
}
SEQUENCES = {
    "Perturbed": Construct(
        'return self.perturb("dense", nn.Dense(4)(x))',
        "self.a = nn.Dense(4)",
        'return self.perturb("seen", self.a(x))',
    ),
    "Attending": Construct(
        "mask = nn.make_causal_mask(x[..., 0])\n"
        "return nn.MultiHeadDotProductAttention(2, deterministic=not train)(x, mask=mask)",
        "self.a = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=6)",
        "return self.a(x, x, deterministic=not train)",
    ),
    "Recurrent": Construct(
        "x = nn.RNN(nn.LSTMCell(4))(x)\nreturn nn.RNN(nn.SimpleCell(4))(x)",
        "self.cell = nn.RNN(nn.OptimizedLSTMCell(4))",
        "return self.cell(x)",
    ),
}
EXTRA = {
    "CompactMethods": "@nn.nowrap\ndef twice(self, x):\n    return 2 * x * self.factor\n\n"
    "@property\ndef factor(self):\n    return 3",
    "SetupMethods": "def first(self, x):\n    return self.a(x)",
}
HEAD = '''"""Constructs."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
'''


def program(constructs: dict[str, Construct]) -> str:
    """A module with three classes for each construct, and `Root`, which calls them in turn."""
    parts, calls = [HEAD], []
    for name, each in constructs.items():
        parts.append(each.before)
        setup = [
            "def setup(self):",
            _indented(each.setup),
            "",
            "def __call__(self, x, train=False):",
        ]
        compact = ["@nn.compact", "def __call__(self, x, train=False):"]
        forms = {
            f"Compact{name}": [*compact, _indented(each.compact)],
            f"Setup{name}": [*setup, _indented(each.call)],
            f"Nested{name}": [
                *compact,
                f"    x = Setup{name}()(x, train)",
                f'    x = Compact{name}(name="inner")(x, train)',
                "    return nn.Dense(4)(x)",
            ],
        }
        for cls, lines in forms.items():
            body = [each.fields] if each.fields and not cls.startswith("Nested") else []
            body += ["\n".join(lines)] + ([EXTRA[cls]] if cls in EXTRA else [])
            base = {"SetupInherited": "Parent", "CompactInherited": "CompactParent"}.get(cls)
            parts.append(f"class {cls}({base or 'nn.Module'}):\n" + _indented("\n\n".join(body)))
        calls.append(f"x = x + Nested{name}()(x, train)")
    root = ["class Root(nn.Module):", "    @nn.compact", "    def __call__(self, x, train=False):"]
    parts.append("\n".join([*root, _indented("\n".join([*calls, "return x"]), 8)]))
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _indented(text: str, column: int = 4) -> str:
    return textwrap.indent(text, " " * column)
