"""A checkpoint of one stage of a migration goes into every other stage."""

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge import checkpoint
from tests.checkpoint.migrating_models import (
    INPUTS,
    LinenModel,
    LinenModelWithNnxHead,
    NnxModelWithLinenBody,
    linen_variables,
    mixed_model,
    to_nnx_model,
)
from tests.strategies import exact

LEAVES = {
    ("params", "Dense_0", "kernel"),
    ("params", "Dense_0", "bias"),
    ("params", "BatchNorm_0", "scale"),
    ("params", "BatchNorm_0", "bias"),
    ("params", "Dense_1", "kernel"),
    ("params", "Dense_1", "bias"),
    ("batch_stats", "BatchNorm_0", "mean"),
    ("batch_stats", "BatchNorm_0", "var"),
}


@pytest.fixture(scope="module")
def variables():
    return linen_variables()


@pytest.fixture(scope="module")
def saved(variables, tmp_path_factory):
    """The same weights, saved at four stages of the migration."""
    directory = tmp_path_factory.mktemp("stages")
    checkpoint.save(directory / "linen", variables)
    model = checkpoint.restore(directory / "linen", to_nnx_model())
    checkpoint.save(directory / "to_nnx", model)
    checkpoint.save(directory / "mixed", checkpoint.restore(directory / "linen", mixed_model()))
    headed = linen_variables(LinenModelWithNnxHead(), seed=3)
    headed = checkpoint.restore(directory / "linen", headed)
    checkpoint.save(directory / "nnx_head", headed)
    return directory


def leaves(tree):
    """The arrays of variables by full path, without RNG state."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = {tuple(getattr(entry, "key", "") for entry in keys): value for keys, value in flat}
    return {path: np.asarray(value) for path, value in named.items() if path in LEAVES}


def leaves_of_module(model):
    """The same of an NNX model, by hand."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat)))
    collections = {nnx.Param: "params", nnx.BatchStat: "batch_stats"}
    return {(collections[v.var_type], *path): np.asarray(v.get_value()) for path, v in flat}


def assert_same_leaves(found, variables):
    expected = leaves(variables)
    assert found.keys() == expected.keys() == LEAVES
    for path, value in expected.items():
        assert found[path].tobytes() == value.tobytes(), path


STAGES = ("linen", "to_nnx", "mixed", "nnx_head")


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_goes_back_to_pure_linen_variables(saved, variables, stage):
    fresh = linen_variables(seed=7)
    before = exact(fresh)
    restored = checkpoint.restore(saved / stage, fresh)
    assert exact(restored) == exact(variables)
    assert exact(fresh) == before


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_applies_in_linen_without_a_target(saved, variables, stage):
    restored = checkpoint.restore(saved / stage)
    expected = LinenModel().apply(variables, INPUTS)
    np.testing.assert_array_equal(LinenModel().apply(restored, INPUTS), expected)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_goes_into_the_wrapped_linen_model(saved, variables, stage):
    model = to_nnx_model()
    kernel = model.Dense_0["kernel"]
    assert checkpoint.restore(saved / stage, model) is model
    # In place: an optimizer or another module may hold the same Variable.
    assert model.Dense_0["kernel"] is kernel
    assert_same_leaves(leaves_of_module(model), variables)
    np.testing.assert_array_equal(model(INPUTS), LinenModel().apply(variables, INPUTS))


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_goes_into_the_partly_migrated_model(saved, variables, stage):
    model = checkpoint.restore(saved / stage, mixed_model())
    assert_same_leaves(leaves_of_module(model), variables)
    np.testing.assert_array_equal(model(INPUTS), LinenModel().apply(variables, INPUTS))


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_goes_into_the_linen_model_with_an_nnx_module(saved, variables, stage):
    module = LinenModelWithNnxHead()
    target = module.init(jax.random.key(9), INPUTS)
    restored = checkpoint.restore(saved / stage, target)
    assert_same_leaves(leaves(restored), variables)
    # The static definition is the target's.
    assert restored["nnx"]["Dense_1"]["graphdef"] is target["nnx"]["Dense_1"]["graphdef"]
    expected = LinenModel().apply(variables, INPUTS)
    np.testing.assert_array_equal(module.apply(restored, INPUTS), expected)


def test_without_a_target_the_nnx_module_gets_its_definition_anew(saved, variables):
    restored = checkpoint.restore(saved / "nnx_head")
    assert "nnx" not in restored
    expected = LinenModel().apply(variables, INPUTS)
    np.testing.assert_array_equal(LinenModelWithNnxHead().apply(restored, INPUTS), expected)


def test_a_state_and_an_abstract_state_come_back_as_new_states(saved, variables):
    state = nnx.state(mixed_model(), nnx.Not(nnx.RngState))
    before = exact(state)
    model = nnx.eval_shape(mixed_model)
    for target in (state, nnx.state(model, nnx.Not(nnx.RngState))):
        restored = checkpoint.restore(saved / "linen", target)
        assert isinstance(restored, nnx.State)
        assert_same_leaves(leaves(bridge.nnx_to_linen(restored)), variables)
    assert exact(state) == before


def test_an_abstract_model_is_filled_without_ever_being_initialised(saved, variables):
    model = nnx.eval_shape(mixed_model)
    checkpoint.restore(saved / "mixed", model)
    assert_same_leaves(leaves_of_module(model), variables)
    np.testing.assert_array_equal(model(INPUTS), LinenModel().apply(variables, INPUTS))


def test_an_abstract_model_cannot_keep_rng_state_that_the_checkpoint_lacks(saved):
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.restore(saved / "linen", nnx.eval_shape(mixed_model))
    missing = {path for path, _ in caught.value.missing}
    assert {"RngKey/Dropout_0/rngs/key", "RngCount/Dropout_0/rngs/count"} <= missing
    assert not any(path.startswith(("params", "batch_stats")) for path in missing)


def test_an_abstract_model_gets_its_streams_from_a_seed_instead(saved, variables):
    model = checkpoint.restore(saved / "linen", nnx.eval_shape(mixed_model), rngs=False)
    nnx.reseed(model, default=3)
    np.testing.assert_array_equal(model(INPUTS), LinenModel().apply(variables, INPUTS))
    never_abstract = mixed_model()
    nnx.reseed(never_abstract, default=3)
    streams = nnx.state(model, nnx.RngState), nnx.state(never_abstract, nnx.RngState)
    assert exact(streams[0]) == exact(streams[1])


def test_both_sides_write_the_same_checkpoint(saved, tmp_path):
    written = {}
    for stage in ("linen", "to_nnx", "mixed"):
        leaves = checkpoint.layout(saved / stage).leaves
        written[stage] = {leaf for leaf in leaves if not leaf.collection.startswith("Rng")}
    assert len(written["linen"]) == len(LEAVES)
    assert written["linen"] == written["to_nnx"] == written["mixed"]
    assert checkpoint.layout(saved / "linen").written_by == "linen"
    assert checkpoint.layout(saved / "mixed").written_by == "nnx"


def test_a_model_with_both_wrappers_nested_goes_both_ways(tmp_path):
    module = bridge.to_linen(NnxModelWithLinenBody)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = module.init(rngs, INPUTS)
    checkpoint.save(tmp_path / "linen", variables)
    model = bridge.lazy_init(NnxModelWithLinenBody(rngs=nnx.Rngs(4)), INPUTS)
    checkpoint.restore(tmp_path / "linen", model)
    assert_same_leaves(leaves_of_module(model), variables)
    checkpoint.save(tmp_path / "nnx", model)
    fresh = module.init({"params": jax.random.key(5), "dropout": jax.random.key(6)}, INPUTS)
    assert_same_leaves(leaves(checkpoint.restore(tmp_path / "nnx", fresh)), variables)


def test_a_migrated_module_without_variables_is_named_as_the_reason(saved):
    model = bridge.ToNNX(nn.Dense(4), rngs=nnx.Rngs(0))
    with pytest.raises(checkpoint.CheckpointError, match="lazy_init"):
        checkpoint.restore(saved / "linen", model)
