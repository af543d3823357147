"""Restoring layers that one side keeps stacked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bridge import checkpoint
from bridge.checkpoint import _arrays, _stored
from tests.port.cases import random_values
from tests.port.models import shapes_of
from tests.strategies import exact

X = jnp.ones((2, 4))
DEPTH = 3


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.BatchNorm(use_running_average=True)(nn.Dense(4)(x)), None


class Scanned(nn.Module):
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        axes = {"params": self.axis, "batch_stats": self.axis}
        layers = nn.scan(LinenLayer, axes, split_rngs={"params": True}, length=DEPTH)
        return layers(name="layers")(x, None)[0]


class OneByOne(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(DEPTH):
            x, _ = LinenLayer(name=f"layers_{i}")(x)
        return x


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.Dense_0 = nnx.Linear(4, 4, rngs=rngs)
        self.BatchNorm_0 = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)

    def __call__(self, x):
        return self.BatchNorm_0(self.Dense_0(x))


class List(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Layer(rngs) for _ in range(DEPTH)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Dict(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.Dict({str(i): Layer(rngs) for i in range(DEPTH)})

    def __call__(self, x):
        for i in range(DEPTH):
            x = self.blocks[str(i)](x)
        return x


class Stacked(nnx.Module):
    def __init__(self, rngs, axis=0):
        axes = nnx.StateAxes({...: axis})
        make = nnx.vmap(Layer, in_axes=(nnx.StateAxes({...: 0}),), out_axes=axes)
        self.blocks = make(rngs.split(DEPTH))
        self.axis = axis

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.StateAxes({...: self.axis}), nnx.Carry), out_axes=nnx.Carry)
        def body(block, x):
            return block(x)

        return body(self.blocks, x)


STACKED_IN_LINEN = {"layers": "blocks.*"}
STACKED_IN_NNX = {r"layers_(\d+)": r"blocks[\1]"}
ONE_BY_ONE = {r"layers_(\d+)": r"blocks.\1"}
CASES = {
    "scanned to list": (Scanned(), List, STACKED_IN_LINEN),
    "scanned on axis 1": (Scanned(1), List, {"layers": "blocks.*@1"}),
    "one by one to list": (OneByOne(), List, ONE_BY_ONE),
    "one by one to dict": (OneByOne(), Dict, ONE_BY_ONE),
    "one by one to stacked": (OneByOne(), Stacked, STACKED_IN_NNX),
    "one by one to stacked on axis 1": (
        OneByOne(),
        functools.partial(Stacked, axis=1),
        {r"layers_(\d+)": r"blocks[\1@1]"},
    ),
    "each layer by a rule of its own": (
        OneByOne(),
        Stacked,
        {f"layers_{i}": f"blocks[{i}]" for i in reversed(range(DEPTH))},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_either_side_goes_into_the_other(tmp_path, case):
    linen, native, rules = CASES[case]
    variables = random_values(shapes_of(linen, X))
    expected = linen.apply(variables, X)
    checkpoint.save(tmp_path / "linen", variables)
    model = checkpoint.restore(tmp_path / "linen", native(nnx.Rngs(0)), rules=rules, verify=True)
    np.testing.assert_allclose(model(X), expected, rtol=1e-6, atol=1e-6)
    checkpoint.save(tmp_path / "nnx", model)
    back = checkpoint.restore(tmp_path / "nnx", shapes_of(linen, X), rules=rules, verify=True)
    assert exact(back) == exact(variables)


@given(
    shape=st.lists(st.integers(1, 3), max_size=3),
    depth=st.integers(1, 4),
    axis=st.integers(-4, 3),
    in_linen=st.booleans(),
    seed=st.integers(0, 100),
)
def test_any_axis_is_that_of_numpy(tmp_path_factory, shape, depth, axis, in_linen, seed):
    if not -len(shape) - 1 <= axis <= len(shape):
        axis = 0
    path = tmp_path_factory.mktemp("axes") / "checkpoint"
    layers = np.random.default_rng(seed).normal(size=(depth, *shape)).astype(np.float32)
    stack = {"w": np.stack(layers, axis)}
    one_by_one = {f"layers_{i}": {"w": layer} for i, layer in enumerate(layers)}
    params = {"layers": stack} if in_linen else one_by_one
    state = (
        {"blocks": {i: {"w": nnx.Param(jnp.zeros(shape))} for i in range(depth)}}
        if in_linen
        else {"blocks": {"w": nnx.Param(jnp.zeros(stack["w"].shape))}}
    )
    checkpoint.save(path, {"params": params}, digests=False)
    table = {"layers": f"blocks.*@{axis}"} if in_linen else {r"layers_(\d+)": rf"blocks[\1@{axis}]"}
    restored = checkpoint.restore(path, nnx.State(state), rules=table)["blocks"]
    found = [restored[i]["w"][...] for i in range(depth)] if in_linen else restored["w"][...]
    np.testing.assert_array_equal(found, layers if in_linen else stack["w"])


def test_arrays_are_restored_into_the_shards_of_the_target(tmp_path):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    layers = np.arange(3 * 8 * 4, dtype=np.float32).reshape(3, 8, 4)

    def param(shape, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding))

    checkpoint.save(tmp_path / "stacked", {"params": {"layers": {"w": layers}}})
    target = nnx.State({"blocks": {i: {"w": param((8, 4), "data", "model")} for i in range(3)}})
    rules = STACKED_IN_LINEN
    found = checkpoint.restore(tmp_path / "stacked", target, rules=rules)["blocks"]
    for i in range(3):
        assert found[i]["w"][...].sharding.spec == PartitionSpec("data", "model")
        np.testing.assert_array_equal(found[i]["w"][...], layers[i])

    one_by_one = {f"layers_{i}": {"w": layer} for i, layer in enumerate(layers)}
    checkpoint.save(tmp_path / "one by one", {"params": one_by_one})
    target = nnx.State({"blocks": {"w": param((8, 3, 4), "data", None, "model")}})
    rules = {r"layers_(\d+)": r"blocks[\1@1]"}
    found = checkpoint.restore(tmp_path / "one by one", target, rules=rules)["blocks"]["w"][...]
    assert found.sharding.spec == PartitionSpec("data", None, "model")
    np.testing.assert_array_equal(found, layers.transpose(1, 0, 2))


@pytest.mark.parametrize("in_linen", [True, False])
def test_one_stack_is_read_at_a_time_so_that_few_arrays_are_there_twice(
    tmp_path, monkeypatch, in_linen
):
    one = np.ones(1, np.float32)
    stacks = {name: np.full((2, 3, 4), i, np.float32) for i, name in enumerate("abc")}
    layers = [{name: stack[i] for name, stack in stacks.items()} for i in range(2)]
    one_by_one = {f"layers_{i}": layer for i, layer in enumerate(layers)}
    params = {"layers": stacks} if in_linen else one_by_one
    checkpoint.save(tmp_path / "model", {"params": {**params, "x": one, "y": one}})
    blocks = layers if in_linen else stacks
    target = {"blocks": dict(enumerate(blocks)) if in_linen else blocks, "x": one}
    state = nnx.State(jax.tree.map(lambda leaf: nnx.Param(jnp.zeros_like(leaf)), target))
    reads, read = [], _arrays.read
    monkeypatch.setattr(_stored, "_BATCH", 1)

    def noted(directory, tree, wanted):
        reads.append(sorted("/".join(location) for location in wanted))
        return read(directory, tree, wanted)

    monkeypatch.setattr(_arrays, "read", noted)
    restored = checkpoint.restore(
        tmp_path / "model",
        state,
        rules=STACKED_IN_LINEN if in_linen else STACKED_IN_NNX,
        allow_unexpected=True,
        verify=True,
    )

    stacked = [[f"params/layers/{name}"] for name in "abc"]
    apart = [[f"params/layers_{i}/{name}" for i in range(2)] for name in "abc"]
    assert sorted(reads) == sorted([["params/x"], *(stacked if in_linen else apart)])
    assert exact(jax.tree.map(np.asarray, nnx.to_pure_dict(restored))) == exact(target)


def layers(depth, *, is_linen, is_stacked):
    """Layers with one leaf, under the names of the rules above."""
    stack = np.arange(2.0 * depth, dtype=np.float32).reshape(depth, 2)
    if is_linen:
        one_by_one = {f"layers_{i}": {"w": w} for i, w in enumerate(stack)}
        return {"params": {"layers": {"w": stack}} if is_stacked else one_by_one}
    blocks = {"w": stack} if is_stacked else {i: {"w": w} for i, w in enumerate(stack)}
    return nnx.State({"blocks": jax.tree.map(nnx.Param, blocks)})


@pytest.mark.parametrize("depth", [2, 4])
@pytest.mark.parametrize("in_linen", [True, False])
@pytest.mark.parametrize("to_nnx", [True, False])
def test_another_number_of_layers_does_not_fit(tmp_path, depth, in_linen, to_nnx):
    saved = layers(depth, is_linen=to_nnx, is_stacked=in_linen == to_nnx)
    target = layers(3, is_linen=not to_nnx, is_stacked=in_linen != to_nnx)
    checkpoint.save(tmp_path / "layers", saved)
    rules = STACKED_IN_LINEN if in_linen else STACKED_IN_NNX
    with pytest.raises((checkpoint.CheckpointError, checkpoint.RulesError)) as caught:
        checkpoint.restore(tmp_path / "layers", target, rules=rules)
    shapes = f"expected float32[3, 2], found float32[{depth}, 2]"
    assert any(text in str(caught.value) for text in ("3/w", "2/w", "missing are [3]", shapes))


def test_keys_that_differ_only_in_type_are_not_renamed(tmp_path):
    ones = np.ones(2, np.float32)
    checkpoint.save(tmp_path / "keys", nnx.State({"a": {0: ones, "0": ones}}))
    with pytest.raises(checkpoint.RulesError, match="a number or text"):
        checkpoint.restore(tmp_path / "keys", {"params": {"b_0": ones}}, rules={"b_(.)": r"a.\1"})


def test_what_is_not_a_whole_stack_is_refused(tmp_path):
    layers = {f"layers_{i}": {"w": np.ones(i // 2 + 1), "s": np.ones(())} for i in range(3)}
    checkpoint.save(tmp_path / "layers", {"params": layers})
    target = nnx.State({"blocks": {"w": nnx.Param(jnp.zeros((3, 2)))}})
    for rules, text in (
        (STACKED_IN_NNX, r"blocks/w: \(2,\) is not \(1,\)"),
        ({r"layers_([02])": r"blocks[\1]"}, r"blocks/s: the layers \[0, 2\].*missing are \[1\]"),
        ({r"layers_(\d)": r"blocks.*.x\1"}, "layers_1/s.*no axis of stacked layers"),
    ):
        with pytest.raises(checkpoint.RulesError, match=text):
            checkpoint.restore(tmp_path / "layers", target, rules=rules)
