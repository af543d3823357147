"""The nouns' types, and how many parameters of the core have none."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bridge._types import is_shaped

ROOT = Path(__file__).parents[1]
TOOLS = {"_cli", "_demo", "_layers", "_rules", "checkpoint", "parity", "port", "rewrite"}
# Per cent of the core's parameters. It may only fall.
MOST_UNTYPED = 3.7


def parameters(function):
    """All of them but `self` and `cls`; `*args` and `**kwargs` count as one each."""
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    starred = [p for p in (given.vararg, given.kwarg) if p]
    return [p for p in [*named, *starred] if p.arg not in ("self", "cls")]


def is_untyped(parameter):
    """Whether there is no annotation, or one that takes anything without a question.

    `Any` inside of another type, such as `Mapping[str, Any]`, is no such annotation: nearly all are
    the type parameters of Flax's own classes.
    """
    text = ast.unparse(parameter.annotation) if parameter.annotation else "Any"
    return "Any" in text.split(" | ") or text == "Key"


def untyped_parameters():
    found = {True: [], False: []}
    for path in sorted([*(ROOT / "registry").rglob("*.py"), *(ROOT / "bridge").rglob("*.py")]):
        place = path.relative_to(ROOT)
        if TOOLS.intersection(place.parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for parameter in parameters(node):
                    line = f"{place}:{parameter.lineno} {node.name}({parameter.arg})"
                    found[is_untyped(parameter)].append(line)
    return found[True], found[False]


def test_nearly_all_parameters_of_the_core_have_a_type():
    untyped, typed = untyped_parameters()
    share = 100 * len(untyped) / (len(untyped) + len(typed))
    assert share <= MOST_UNTYPED, "\n".join(untyped)


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (jnp.ones(2), True),
        (np.float32(1), True),
        (jax.ShapeDtypeStruct((2,), "float32"), True),
        (nnx.Param(jnp.ones(2)), True),
        (1.0, False),
        ("text", False),
        ({"shape": (2,)}, False),
    ],
)
def test_a_leaf_with_a_shape_and_a_dtype_is_shaped(leaf, expected):
    assert is_shaped(leaf) is expected
