"""Linen sources that hypothesis writes are rewritten, and proven the same."""

import importlib
import itertools
import sys

import jax
import numpy as np
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from bridge import port
from bridge.rewrite._rewriter import Rewriter
from bridge.rewrite.observe._entries import Entry
from bridge.rewrite.prove._build import Maker, importable
from bridge.rewrite.prove._draws import same_key, with_same_keys
from bridge.rewrite.prove._pairing import made
from bridge.rewrite.prove._paths import rules_of
from bridge.rewrite.prove._same_program import is_same_program
from bridge.rewrite.prove._weights import random_inputs, random_variables
from tests.drawing import drawing

HEAD = '''"""Generated."""

from __future__ import annotations

import functools
from typing import Any

from flax import linen as nn


'''
INPUT = jax.ShapeDtypeStruct((2, 3), "float32")
CLASSES = 20
EXAMPLES = 10
COMPUTED: list[str] = []
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
    """Twenty classes, and one that calls them one after the other."""
    parts = [draw(classes(number)) for number in range(CLASSES)]
    calls_ = [
        f"        x = Part{n}(width={draw(st.integers(2, 6))})(x, train=train)"
        for n in range(CLASSES)
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
@drawing(
    EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_generated_sources_are_rewritten_and_do_the_same(tmp_path, source):
    name = f"generated_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(source)
    sys.path.insert(0, str(tmp_path))
    try:
        root = importlib.import_module(name).Root
        entry = Entry(root, (INPUT,))
        rewriter = Rewriter([entry], keep_names=False, only=None, skip=(), told=lambda text: None)
        rewriter.trace()
        rewriter.write()
        assert not rewriter.left, f"{rewriter.left}\n{source}"
        check(rewriter, root(), source)
    finally:
        sys.path.remove(str(tmp_path))


def check(rewriter, linen, source):
    """Both models are one program, also where elements are dropped."""
    run = rewriter.program.records.instances[(0, ())]
    x = random_inputs(INPUT)
    variables = random_variables(rewriter.program.records.variables[0])
    with importable(rewriter.texts):
        modules = {f.module: importlib.import_module(f.name) for f in rewriter.files}
        model = made(Maker(rewriter.program, modules), run)
    port.plan(variables, model, rules_of(rewriter.program, 0)).apply()
    with_same_keys(model)
    keys = {"dropout": same_key()}
    pair = (linen, variables), model
    assert is_same_program(*pair, (x,), {"train": True}, keys=keys), source
    if not COMPUTED:
        # Programs that are the same compute the same; one of them shows it.
        COMPUTED.append(source)
        for train in (False, True):
            expected = linen.apply(variables, x, train=train, rngs=keys)
            np.testing.assert_array_equal(model(x, train=train), expected, err_msg=source)
