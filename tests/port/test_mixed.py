import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from bridge import port
from tests.drawing import drawing
from tests.port.cases import random_values
from tests.port.models import shapes_of
from tests.strategies import exact

X = jnp.asarray(np.random.default_rng(2).normal(size=(2, 3, 4)), jnp.float32)


class LinenStep(nn.Module):
    """One step of a cell, from a carry of ones."""

    cell: nn.Module

    def __call__(self, x):
        return self.cell(carry_of(self.cell, x), x)[1]


class Step(nnx.Module):
    """`LinenStep` in NNX."""

    def __init__(self, cell):
        self.cell = cell

    def __call__(self, x):
        return self.cell(carry_of(self.cell, x), x)[1]


def carry_of(cell, x):
    ones = jnp.ones_like(x)
    return (ones, ones) if isinstance(cell, nn.OptimizedLSTMCell | nnx.OptimizedLSTMCell) else ones


# Layers from (2, 3, 4) to (2, 3, 4): the Linen one and the NNX one.
LAYERS = {
    "dense": (lambda: nn.Dense(4), lambda r: nnx.Linear(4, 4, rngs=r)),
    "conv": (lambda: nn.Conv(4, (2,)), lambda r: nnx.Conv(4, 4, (2,), rngs=r)),
    "norm": (nn.LayerNorm, lambda r: nnx.LayerNorm(4, rngs=r)),
    "batch": (
        lambda: nn.BatchNorm(use_running_average=True),
        lambda r: nnx.BatchNorm(4, use_running_average=True, rngs=r),
    ),
    "gru": (lambda: LinenStep(nn.GRUCell(4)), lambda r: Step(nnx.GRUCell(4, 4, rngs=r))),
    "lstm": (
        lambda: LinenStep(nn.OptimizedLSTMCell(4)),
        lambda r: Step(nnx.OptimizedLSTMCell(4, 4, rngs=r)),
    ),
    "weight norm": (
        lambda: nn.WeightNorm(nn.Dense(4)),
        lambda r: nnx.WeightNorm(nnx.Linear(4, 4, rngs=r), rngs=r),
    ),
    "prelu": (nn.PReLU, lambda r: nnx.PReLU()),
}


class LinenGroup(nn.Module):
    specs: tuple

    def setup(self):
        self.parts = [LAYERS[s][0]() if isinstance(s, str) else LinenGroup(s) for s in self.specs]

    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Group(nnx.Module):
    """`LinenGroup`; the list is called after the group's depth, so that a name never helps."""

    def __init__(self, specs, rngs, depth=0):
        self.depth = depth
        made = [
            LAYERS[s][1](rngs) if isinstance(s, str) else Group(s, rngs, depth + 1) for s in specs
        ]
        setattr(self, f"level{depth}", nnx.List(made))

    def __call__(self, x):
        for part in getattr(self, f"level{self.depth}"):
            x = part(x)
        return x


RULES = {
    r"parts_(\d+)": r"level0.\1",
    r"parts_(\d+)/parts_(\d+)": r"level0.\1.level1.\2",
}
LAYER = st.sampled_from(sorted(LAYERS))
SPECS = st.lists(
    st.one_of(LAYER, st.lists(LAYER, min_size=1, max_size=2).map(tuple)), min_size=1, max_size=4
).map(tuple)


@given(SPECS, st.integers(0, 2**32 - 1))
@drawing(8)
def test_models_of_mixed_layers_agree_and_come_back_bitwise(specs, seed):
    linen = LinenGroup(specs)
    shapes = shapes_of(linen, X)
    variables = random_values(shapes, seed)
    # Without values of its own, so that all it has came from Linen.
    model = nnx.eval_shape(lambda: Group(specs, nnx.Rngs(0)))
    rules = dict(list(RULES.items())[: 2 if any(not isinstance(s, str) for s in specs) else 1])
    plan = port.plan(variables, model, rules)
    assert plan.ok, str(plan)
    plan.apply()
    assert exact(port.plan(model, shapes, rules).apply()) == exact(variables)
    expected = linen.apply(variables, X)
    # Rounding differs in the fused cells alone, and grows through the layers behind them.
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@given(SPECS, st.data())
@drawing(8)
def test_any_leaf_taken_away_from_a_model_of_mixed_layers_is_found(specs, data):
    variables = jax.tree.map(np.asarray, random_values(shapes_of(LinenGroup(specs), X)))
    model = nnx.eval_shape(lambda: Group(specs, nnx.Rngs(0)))
    before = exact(nnx.state(model))
    rules = dict(list(RULES.items())[: 2 if any(not isinstance(s, str) for s in specs) else 1])
    addresses = [(c, p) for c in variables for p in nnx.traversals.flatten_mapping(variables[c])]
    collection, path = data.draw(st.sampled_from(addresses))
    node = variables[collection]
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    if path[-2:] == ("hn", "bias"):
        # Zero, and NNX does not have it.
        assert port.plan(variables, model, rules).ok
        return
    plan = port.plan(variables, model, rules)
    assert "missing" in {e.kind for e in plan.problems}
    try:
        plan.apply()
    except port.PortError:
        assert exact(nnx.state(model)) == before
    else:
        raise AssertionError("an incomplete plan was applied")
