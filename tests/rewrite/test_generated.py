"""Linen sources that hypothesis writes are rewritten, and hold for other values of the fields."""

import importlib
import itertools
import sys

import jax
import numpy as np
from flax import nnx
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from bridge import port
from bridge.rewrite._rewriter import Rewriter
from bridge.rewrite.observe._entries import Entry
from bridge.rewrite.observe._runs import run
from bridge.rewrite.prove._build import importable
from bridge.rewrite.prove._draws import same_key, with_same_keys
from bridge.rewrite.prove._paths import rules_of
from bridge.rewrite.prove._same_program import compare_programs
from bridge.rewrite.prove._weights import random_inputs, random_variables
from tests.drawing import drawing
from tests.rewrite.weights import without_weights

HEAD = '''"""Generated."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn


'''
INPUT = jax.ShapeDtypeStruct((2, 6), "float32")
CLASSES = 30
EXAMPLES = 2
COMPUTED: list[str] = []
NUMBERS = itertools.count()

FIELDS = {
    "width": st.integers(2, 6),
    "out": st.none() | st.integers(2, 6),
    "groups": st.integers(1, 8),
    "ratio": st.sampled_from([0.5, 1.5, 2.0]),
    "depth": st.integers(0, 3),
    "sizes": st.lists(st.integers(2, 5), max_size=3).map(tuple),
    "flag": st.booleans(),
    "kind": st.sampled_from(["plain", "norm", "wide"]),
}
ANNOTATIONS = """
    width: int = 5
    out: int | None = None
    groups: int = 4
    ratio: float = 1.5
    depth: int = 2
    sizes: Sequence[int] = (4, 3)
    flag: bool = True
    kind: str = "norm"
"""
of_fields = st.sampled_from(
    [
        "4",
        "self.width",
        "2 * self.width",
        "self.width + self.groups",
        "self.out or self.width",
        "self.width if self.out is None else self.out",
        "self.width if self.flag else 2 * self.width",
        "max(self.sizes, default=3)",
        "len(self.sizes) + 1",
        "int(self.width * self.ratio)",
    ]
)
of_inputs = st.sampled_from(
    [
        "x.shape[-1]",
        "x.shape[-1] + 1",
        "self.out or x.shape[-1]",
        "x.shape[-1] if self.out is None else self.out",
        "min(self.groups, x.shape[-1])",
        "max(self.width, x.shape[-1] // 2)",
        "int(x.shape[-1] * self.ratio)",
        "x.shape[-1] if self.flag else self.width",
    ]
)
sizes = of_fields | of_inputs
CONDITIONS = ["self.flag", "self.out is not None", "self.depth > 1", 'self.kind == "wide"']
conditions = st.sampled_from(CONDITIONS)
calls = st.sampled_from(
    ["nn.Dense({size}{name})(x)", "dense({size}{name})(x)", "nn.relu(nn.Dense({size}{name})(x))"]
)


DROPPING = [", deterministic=not train)(x)", ")(x, not train)"]


@st.composite
def statements(draw, names, depth=0):
    """Lines of a compact method."""
    kinds = ["layer", "norm", "dropout", "local"]
    if depth == 0:
        kinds += ["param", "loop", "loop", "if", "if", "ternary", "shortcut", "concat", "list"]
        kinds += ["match", "given"]
    name = f', name="n{next(names)}"' if draw(st.booleans()) and depth == 0 else ""
    size, number = draw(sizes), next(names)
    layer = draw(calls).format(size=size, name=name)
    match draw(st.sampled_from(kinds)):
        case "layer":
            lines = [f"x = {layer}  # a layer"]
        case "norm":
            lines = [f"x = nn.{draw(st.sampled_from(['LayerNorm()', 'RMSNorm()']))}(x)"]
        case "dropout":
            lines = [f"x = nn.Dropout(0.1{draw(st.sampled_from(DROPPING))}"]
        case "local":
            lines = draw(st.sampled_from([LOCAL, DEFAULTED, PARTED])).format(n=number, size=size)
            lines = lines.strip().split("\n")
        case "param":
            shape = draw(st.sampled_from(["(x.shape[-1],)", "(1, x.shape[-1])"]))
            lines = [
                f'p{number} = self.param("p{number}", nn.initializers.ones, {shape})',
                f"x = x * p{number}",
            ]
        case "if":
            first, second, *_ = draw(st.permutations(CONDITIONS))
            lines = [f"if {first}:", *draw(statements(names, 1))]
            if draw(st.booleans()):
                lines += [f"elif {second}:", *draw(statements(names, 1))]
            if draw(st.booleans()):
                lines += ["else:", *draw(statements(names, 1))]
        case "match":
            lines = ["match self.kind:", '    case "norm":', "        x = nn.LayerNorm()(x)"]
            lines += ['    case "wide":', f"        x = nn.Dense({size})(x)"]
        case "ternary":
            lines = [f"x = {layer} if {draw(conditions)} else x"]
        case "shortcut":
            lines = SHORTCUT.format(n=number, size=size).strip().split("\n")
        case "concat":
            lines = [f"h{number} = {layer}", f"x = jnp.concatenate([x, h{number}], axis=-1)"]
        case "given":
            lines = [f"v{number} = nn.Dense({size})", f"x = nn.tanh(v{number}(x))"]
        case "list":
            lines = draw(st.sampled_from([STACK, SKIPS])).format(n=number).strip().split("\n")
        case _:
            headers = ["for i in range(self.depth):", "for size in self.sizes:"]
            header = draw(st.sampled_from([*headers, "for i, size in enumerate(self.sizes):"]))
            own = "size" if "size" in header else draw(of_fields)
            numbered = f', name=f"l{number}_{{i}}"' if header.startswith("for i") else ""
            lines = [header, f"    x = nn.Dense({own}{numbered})(x)"]
            if draw(st.booleans()):
                lines += draw(statements(names, 1))
    return [f"{'    ' * depth}{line}" for line in lines]


LOCAL = """
d{n} = {size}
x = nn.Dense(d{n})(x)
"""
DEFAULTED = """
d{n} = self.out
if d{n} is None:
    d{n} = {size}
x = nn.Dense(d{n})(x)
"""
PARTED = """
d{n} = {size}
half{n} = d{n} // 2 + 1
x = nn.Dense(half{n})(x) * 2
"""
SHORTCUT = """
h{n} = nn.Dense({size})(x)
if h{n}.shape != x.shape:
    x = nn.Dense(h{n}.shape[-1])(x)
x = x + h{n}
"""
STACK = """
hs{n} = [x]
for size in self.sizes:
    x = nn.Dense(size)(x)
    hs{n}.append(x)
x = jnp.concatenate(hs{n}, axis=-1)
"""
SKIPS = """
hs{n} = []
for size in self.sizes:
    x = nn.Dense(size)(x)
    hs{n}.append(x)
for size in reversed(self.sizes):
    x = nn.Dense(size + 1)(jnp.concatenate([x, hs{n}.pop()], axis=-1))
"""
SETUPS = [
    "self.rest = [nn.Dense(size) for size in self.sizes]",
    "self.rest = [nn.Dense(5), nn.Dense(self.width)]",
    "self.rest = tuple(nn.LayerNorm() for _ in range(self.depth))",
    "self.rest = [nn.Dense(self.width) if self.flag else nn.Dense(self.groups)]",
    "self.rest = [nn.Dense(self.out)] if self.out else []",
]


@st.composite
def classes(draw, number):
    """A compact or setup class with fields; every second compact one may make the one before."""
    names = itertools.count()
    if draw(st.integers(0, 3)):
        lines = ["dense = functools.partial(nn.Dense, use_bias=False)"]
        for _ in range(draw(st.integers(1, 4))):
            lines += draw(statements(names))
        if number % 2 and draw(st.booleans()):
            lines.append(f"x = Part{number - 1}(width={draw(of_fields)}, flag=self.flag)(x, train)")
        body = [
            "    @nn.compact",
            "    def __call__(self, x, train=False):",
            *(f"        {line}" for line in lines),
            "        return x",
        ]
    else:
        body = [
            "    def setup(self):",
            f"        self.first = nn.Dense({draw(of_fields)})",
            f"        {draw(st.sampled_from(SETUPS))}",
            "        self.drop = nn.Dropout(0.2)",
            "",
            "    def __call__(self, x, train=False):",
            "        x = self.drop(self.first(x), not train)",
            "        for layer in self.rest:",
            "            x = layer(x)",
            "        return x",
        ]
    return "\n".join([f"class Part{number}(nn.Module):", ANNOTATIONS.strip("\n"), "", *body, ""])


@st.composite
def programs(draw):
    """Thirty classes, and one that calls each of them."""
    parts = [draw(classes(number)) for number in range(CLASSES)]
    given_ = ", ".join(f"{name}=self.{name}" for name in FIELDS)
    root = [
        "class Root(nn.Module):",
        ANNOTATIONS.strip("\n"),
        "",
        "    @nn.compact",
        "    def __call__(self, x, train=False):",
        "        results = []",
        *(f"        results.append(Part{n}({given_})(x, train))" for n in range(CLASSES)),
        "        return results",
        "",
    ]
    return HEAD + "\n\n".join([*parts, "\n".join(root)])


@given(programs(), *[st.fixed_dictionaries(FIELDS)] * 3)
@drawing(
    EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    # A smaller program takes as long to rewrite, so none is looked for.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_generated_sources_are_rewritten_and_do_the_same(tmp_path, source, own, second, third):
    name = f"generated_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(source)
    sys.path.insert(0, str(tmp_path))
    try:
        root = importlib.import_module(name).Root
        entry = Entry(lambda: root(**own), (INPUT,))
        rewriter = Rewriter(
            [entry], keep_names=False, only=None, skip=(), on_progress=lambda text: None
        )
        rewriter.trace()
        rewriter.write()
        assert not rewriter.left, f"{rewriter.left}\n{source}"
        for fields in (own, second, third):
            check(rewriter, entry, fields, source)
    finally:
        sys.path.remove(str(tmp_path))


def check(rewriter, entry, fields, source):
    """Both models are one program, also where elements are dropped."""
    x = random_inputs(INPUT)
    linen = entry.make().clone(**fields)
    number = run(rewriter.watch, linen, *entry.called)
    variables = random_variables(rewriter.program.records.variables[number])
    with importable(rewriter.texts):
        (file,) = rewriter.files
        new = importlib.import_module(file.name).Root
        size = x.shape[-1]
        model = without_weights(lambda: new(**fields, in_features=size, rngs=nnx.Rngs(0)))
    port.plan(variables, model, rules_of(rewriter.program, number, model)).apply()
    with_same_keys(model)
    keys = {"dropout": same_key()}
    pair = (linen, variables), model
    is_same = compare_programs(*pair, (x,), {"train": True}, keys=keys).same
    # A layer of size 0, such as `int(1 * 0.5)`, leaves operations on nothing that have no order.
    is_told = all(leaf.size for leaf in jax.tree.leaves(variables))
    assert is_same or not is_told, f"{fields}\n{source}"
    if not is_same or not COMPUTED:
        # Programs that are the same compute the same; one of them shows it.
        COMPUTED.append(source)
        for train in (False, True):
            expected = linen.apply(variables, x, train=train, rngs=keys)
            for one, other in zip(model(x, train=train), expected, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=source)
