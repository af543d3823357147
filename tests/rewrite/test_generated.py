"""Linen sources that hypothesis writes are rewritten, and proven the same."""

import importlib
import itertools
import sys

import jax
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bridge

HEAD = '''"""Generated."""

from __future__ import annotations

import functools
from typing import Any

from flax import linen as nn


'''
INPUT = jax.ShapeDtypeStruct((2, 3), "float32")
NUMBERS = itertools.count()

sizes = st.sampled_from(
    ["4", "5", "self.width", "2 * self.width", "x.shape[-1]", "x.shape[-1] + 1"]
)
calls = st.sampled_from(
    ["nn.Dense({size}{name})(x)", "dense({size}{name})(x)", "nn.relu(nn.Dense({size}{name})(x))"]
)


@st.composite
def statements(draw, names, depth=0):
    """Lines of a compact method."""
    kind = draw(
        st.sampled_from(
            ["layer", "layer", "norm", "variable", "param", "loop", "if", "ternary", "dropout"]
            if depth == 0
            else ["layer", "norm", "dropout"]
        )
    )
    indent = "    " * depth
    name = f', name="n{next(names)}"' if draw(st.booleans()) and depth == 0 else ""
    layer = draw(calls).format(size=draw(sizes), name=name)
    match kind:
        case "layer":
            return [f"{indent}x = {layer}  # a layer"]
        case "norm":
            norm = draw(st.sampled_from(["LayerNorm()", "RMSNorm()", "LayerNorm(1e-5)"]))
            return [f"{indent}x = nn.{norm}(x)"]
        case "dropout":
            form = draw(
                st.sampled_from(
                    ["nn.Dropout(0.1, deterministic=not train)(x)", "nn.Dropout(0.1)(x, not train)"]
                )
            )
            return [f"{indent}x = {form}"]
        case "variable":
            local = f"v{next(names)}"
            return [f"{local} = nn.Dense({draw(sizes)})", f"x = {local}(x)"]
        case "param":
            local = f"p{next(names)}"
            return [
                f'{local} = self.param("{local}", nn.initializers.ones, (x.shape[-1],))',
                f"x = x * {local}",
            ]
        case "if":
            body = draw(statements(names, 1))
            return [
                f"if self.{draw(st.sampled_from(['flag', 'other']))}:",
                *body,
                "else:",
                f"    x = nn.Dense({draw(sizes)})(x)",
            ]
        case "ternary":
            return [f"x = {layer} if self.flag else x"]
        case _:
            header = draw(
                st.sampled_from(
                    [
                        "for i in range(self.depth):",
                        "for size in self.sizes:",
                        "for i, size in enumerate(self.sizes):",
                    ]
                )
            )
            own = "size" if "size" in header else draw(sizes)
            numbered = (
                f', name=f"l{next(names)}_{{i}}"'
                if "i" in header.split("in")[0].split()[1:2] or "i," in header
                else ""
            )
            body = [f"    x = nn.Dense({own}{numbered})(x)"]
            if draw(st.booleans()):
                body += draw(statements(names, 1))
            return [header, *body]


@st.composite
def classes(draw, number):
    """A compact or setup class with fields."""
    names = itertools.count()
    fields = [
        "    width: int = 6",
        "    depth: int = 2",
        "    sizes: tuple[int, ...] = (4, 7)",
        "    flag: bool = True",
        "    other: bool = False",
    ]
    if draw(st.booleans()):
        lines = ["dense = functools.partial(nn.Dense, use_bias=False)"]
        for _ in range(draw(st.integers(1, 4))):
            lines += draw(statements(names))
        body = [
            "    @nn.compact",
            "    def __call__(self, x, train=False):",
            *(f"        {line}" for line in lines),
            "        return x",
        ]
    else:
        lines = [
            "self.first = nn.Dense(self.width)",
            draw(
                st.sampled_from(
                    [
                        "self.rest = [nn.Dense(size) for size in self.sizes]",
                        "self.rest = [nn.Dense(5), nn.Dense(self.width)]",
                        "self.rest = tuple(nn.LayerNorm() for _ in range(self.depth))",
                    ]
                )
            ),
            "self.drop = nn.Dropout(0.2)",
        ]
        body = [
            "    def setup(self):",
            *(f"        {line}" for line in lines),
            "",
            "    def __call__(self, x, train=False):",
            "        x = self.drop(self.first(x), not train)",
            "        for layer in self.rest:",
            "            x = layer(x)",
            "        return x",
        ]
    return "\n".join([f"class Part{number}(nn.Module):", *fields, "", *body, ""])


@st.composite
def programs(draw):
    """Eight classes, and one that calls them one after the other."""
    parts = [draw(classes(number)) for number in range(8)]
    calls_ = [
        f"        x = Part{n}(width={draw(st.integers(2, 6))})(x, train=train)" for n in range(8)
    ]
    root = [
        "class Root(nn.Module):",
        "    @nn.compact",
        "    def __call__(self, x, train=False):",
        *calls_,
        "        return x",
        "",
    ]
    return HEAD + "\n\n".join([*parts, "\n".join(root)])


@given(programs())
@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_generated_sources_are_rewritten_and_proven(tmp_path, source):
    name = f"generated_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(source)
    sys.path.insert(0, str(tmp_path))
    try:
        module = importlib.import_module(name)
        result = bridge.rewrite(module.Root, INPUT, gradients=False)
    finally:
        sys.path.remove(str(tmp_path))
    assert result.is_proven, f"{result}\n{source}"
    assert not [c for c in result.classes if c.level == "left Linen"], f"{result}\n{source}"
    assert result.max_difference == 0.0
