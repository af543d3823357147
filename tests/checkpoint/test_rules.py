"""Restoring under rules, into a target whose names are others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx, serialization
from flax.training import train_state

from bridge import checkpoint
from bridge._conversion.neutral import nest
from tests.port.cases import random_values
from tests.port.models import shapes_of
from tests.strategies import exact

X = jnp.ones((2, 4))
RULES = {r"Dense_(\d+)": r"layers.\1"}


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(4)(x))
        return nn.Dense(4)(x)


class Native(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        return self.layers[1](nnx.relu(self.layers[0](x)))


@pytest.fixture
def variables():
    return random_values(shapes_of(Linen(), X))


@pytest.mark.parametrize("form", ["bridge", "variables", "params"])
def test_a_linen_checkpoint_goes_into_an_nnx_model_of_other_names_and_back(
    tmp_path, variables, form
):
    path = tmp_path / "checkpoint"
    if form == "bridge":
        checkpoint.save(path, variables)
    else:
        tree = variables if form == "variables" else variables["params"]
        path.write_bytes(serialization.to_bytes(tree))
    model = checkpoint.restore(path, Native(nnx.Rngs(0)), rules=RULES)
    np.testing.assert_array_equal(model(X), Linen().apply(variables, X))
    checkpoint.save(tmp_path / "back", model)
    back = checkpoint.restore(tmp_path / "back", shapes_of(Linen(), X), rules=RULES)
    assert exact(back) == exact(variables)


RENAMED = {
    ("block_3", "Dense_0", "kernel"): ("blocks", 3, "dense", 0, "kernel"),
    ("block_12", "Dense_1", "kernel"): ("blocks", 12, "dense", 1, "kernel"),
    ("block_12", "scale"): ("blocks", 12, "scale"),
    ("first", "kernel"): ("b", "kernel"),
    ("head", "kernel"): ("out", "linear", "kernel"),
    ("a.b", "kernel"): ("ab", "kernel"),
    ("x", "y", "w"): ("y", "x", "w"),
    ("same", "w"): ("same", "w"),
}
TABLE = {
    r"block_(\d+)": r"blocks.\1",
    r"block_(\d+)/Dense_(\d)": r"blocks.\1.dense.\2",
    # Neither can be read backwards.
    "first|second": "b",
    r"h\w+d": "out.linear",
    r"a\.b": "ab",
    "(x)/(y)": r"\2.\1",
}


def test_the_longest_path_that_a_rule_matches_is_renamed_and_back(tmp_path):
    values = {path: np.full(2, n, np.float32) for n, path in enumerate(RENAMED)}
    linen = {"params": nest(values)}
    new = {RENAMED[path]: value for path, value in values.items()}
    checkpoint.save(tmp_path / "linen", linen)
    target = nnx.State(nest({path: nnx.Param(jnp.zeros(2)) for path in new}))
    state = checkpoint.restore(tmp_path / "linen", target, rules=TABLE)
    assert exact(nnx.to_pure_dict(state)) == exact(jax.tree.map(jnp.asarray, nest(new)))
    checkpoint.save(tmp_path / "nnx", state)
    shapes = jax.tree.map(np.zeros_like, linen)
    assert exact(checkpoint.restore(tmp_path / "nnx", shapes, rules=TABLE)) == exact(linen)


@pytest.mark.parametrize(
    "rules", [{"layers": "blocks.*"}, {r"layers/(\w)": r"blocks.*.{\1_0,\1_1}"}]
)
def test_an_orbax_state_of_nnx_goes_into_stacked_linen_variables(tmp_path, rules):
    # Regression: the key `value` of each Variable hid the leaves from rules that split arrays.
    kernels = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    names = {"k": slice(4)} if "layers" in rules else {"k_0": slice(2), "k_1": slice(2, 4)}
    blocks = {n: {k: nnx.Param(w[:, s]) for k, s in names.items()} for n, w in enumerate(kernels)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        orbax.save(tmp_path / "state", args=ocp.args.PyTreeSave(nnx.State({"blocks": blocks})))
    linen = {"params": {"layers": {"k": np.zeros_like(kernels)}}}
    found = checkpoint.restore(tmp_path / "state", linen, rules=rules)
    assert exact(found) == exact({"params": {"layers": {"k": kernels}}})


def test_rules_that_cannot_be_followed_change_nothing(tmp_path, variables):
    checkpoint.save(tmp_path / "linen", variables)
    model = Native(nnx.Rngs(0))
    before = exact(nnx.state(model))
    for rules, text in (
        ({"Conv_0": "layers.0"}, "match no path"),
        ({r"Dense_\d": "layers.0"}, "one new path for several leaves"),
        ({"Dense_0": "layers.0", "Dense_1": "layers.0"}, "one new path for several leaves"),
        ({"h": "layers.*"}, "match no path"),
        ({"Dense_0": "layers.*.*"}, "one \\* or"),
        ({r"(Dense_\d)": r"layers[\1]"}, "'Dense_0' for the number"),
        (
            {r"Dense_(\d)/bias": r"layers.bias[\1@3]"},
            r"Dense_1/bias\): no axis of stacked layers.*its shape is \(4,\)",
        ),
        ({"(": "a"}, r"'\(': 'a' \(not a regular expression and a path: missing"),
        ({r"Dense_(\d)": r"layers.\2"}, "invalid group reference"),
        ({"Dense_0": 1}, "'Dense_0': 1"),
        ({"{Dense_0,Dense_1}": "layers.0"}, r"\(4, 4\) do not lie side by side in \(4, 4\)"),
        ({"{Dense_0,Dense_2}": "layers.0"}, "match no path"),
        ({"Dense_{0/bias,./bias}": "layers.0.bias"}, "3 leaves for the 2 parts"),
        ({"Dense_0": "layers.{0,5}"}, r"layers/5: not in the target, which has \{0,1\} there"),
    ):
        with pytest.raises(checkpoint.RulesError, match=text):
            checkpoint.restore(tmp_path / "linen", model, rules=rules)
    with pytest.raises(checkpoint.RulesError, match=r"found 'model.rules.toml' .* tomllib"):
        checkpoint.restore(tmp_path / "linen", model, rules="model.rules.toml")  # pyright: ignore
    with pytest.raises(checkpoint.RulesError, match="entries that match its NNX paths"):
        checkpoint.restore(tmp_path / "linen", variables, rules=RULES)
    with pytest.raises(checkpoint.RulesError, match="no target"):
        checkpoint.restore(tmp_path / "linen", rules=RULES)
    assert exact(nnx.state(model)) == before


class Blocks(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List(
            [nnx.Dict(q=nnx.Linear(2, 2, rngs=rngs), k=nnx.Linear(2, 2, rngs=rngs)) for _ in "1234"]
        )


def test_a_part_that_the_target_lacks_is_named_once_with_its_neighbours(tmp_path):
    apart = "do not lie side by side in"
    fused = {"kernel": np.ones((2, 5), np.float32), "bias": np.ones(5, np.float32)}
    checkpoint.save(tmp_path / "linen", {"params": {f"block_{n}": fused for n in range(4)}})
    missing, kernels, biases = (
        ", ".join(names.format(n) for n in range(4))
        for names in (
            "blocks/{0}/kk",
            "blocks/{0}/q/kernel and blocks/{0}/k/kernel",
            "blocks/{0}/q/bias and blocks/{0}/k/bias",
        )
    )
    for value, lines in (
        (r"blocks.\1.{q,kk}", [f"4 leaves ({missing}): not in the target, which has k, q there"]),
        (r"bloks.\1.{q,k}", ["bloks: not in the target, which has blocks there"]),
        (
            r"blocks.\1.{q,k}",
            [
                f"4 leaves ({kernels}): (2, 2) {apart} (2, 5) on axis -1",
                f"4 leaves ({biases}): (2,) {apart} (5,) on axis -1",
            ],
        ),
    ):
        with pytest.raises(checkpoint.RulesError) as caught:
            checkpoint.restore(tmp_path / "linen", Blocks(), rules={r"block_(\d+)": value})
        assert sorted(caught.value.problems) == sorted(lines)
        assert all(line in str(caught.value) for line in lines)


class Training(nnx.Module):
    def __init__(self):
        self.net = Native(nnx.Rngs(0))
        self.adam = nnx.Optimizer(self.net, optax.adam(0.1), wrt=nnx.Param)


def test_a_state_for_an_old_train_state_is_given_in_its_parts(tmp_path, variables):
    old = train_state.TrainState.create(
        apply_fn=Linen().apply, params=variables["params"], tx=optax.adam(0.1)
    ).apply_gradients(grads=variables["params"])
    (tmp_path / "old").write_bytes(serialization.to_bytes(old))
    state = Training()
    parts = r"restore into the model alone, with the optimizer in extra="
    with pytest.raises(checkpoint.CheckpointError, match=parts):
        checkpoint.restore(tmp_path / "old", state, rules=RULES)
    checkpoint.restore(tmp_path / "old", state.net, extra={"adam": state.adam}, rules=RULES)
    np.testing.assert_array_equal(state.net(X), Linen().apply({"params": old.params}, X))
    assert state.adam.step[...] == 1
    mean = state.adam.opt_state[0].mu["layers"][1]["kernel"]
    np.testing.assert_array_equal(mean[...], old.opt_state[0].mu["Dense_1"]["kernel"])


def test_the_layout_of_linen_under_nnx_names_goes_into_linen_variables(tmp_path, variables):
    # Regression: both sides were taken for Linen's, and rules refused.
    tx = optax.adam(0.1)
    model = Native(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, nnx.state(model, nnx.Param))
    extra = {"optimizer": optimizer}
    checkpoint.save(tmp_path / "file", model, extra=extra, layout="linen")
    checkpoint.save(tmp_path / "bridge", model, extra=extra)
    target = {"opt_state": tx.init(variables["params"]), "step": 0}
    found, expected = (
        checkpoint.restore(tmp_path / name, variables, extra=target, rules=RULES)
        for name in ("file", "bridge")
    )
    assert exact(found) == exact(expected)
    np.testing.assert_allclose(Linen().apply(found[0], X), model(X), rtol=1e-6)
