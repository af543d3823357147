"""Checkpoints that orbax and `flax.serialization` wrote are read into every kind of target."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx, serialization
from flax.training import train_state

import bridge
from bridge import checkpoint
from bridge.checkpoint import CheckpointError, CheckpointNotFoundError
from tests.checkpoint.migrating_models import (
    INPUTS,
    LinenModel,
    LinenModelWithNnxHead,
    linen_variables,
    mixed_model,
    to_nnx_model,
)
from tests.strategies import exact

TX = optax.adam(0.1)


def write_pytree(path, tree):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def write_standard(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def write_step(path, tree):
    with ocp.CheckpointManager(path) as manager:
        manager.save(7, args=ocp.args.StandardSave(tree))
    return path / "7"


def write_msgpack(path, tree):
    path.write_bytes(serialization.to_bytes(tree))
    return path


WRITERS = [write_pytree, write_standard, write_step, write_msgpack]


@pytest.fixture(scope="module")
def variables():
    return linen_variables()


@pytest.fixture(scope="module", params=WRITERS, ids=lambda writer: writer.__name__)
def linen_path(request, variables, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("linen") / "checkpoint", variables)


@pytest.fixture(scope="module")
def expected(variables):
    return LinenModel().apply(variables, INPUTS)


def test_a_linen_checkpoint_applies_without_a_target(linen_path, expected):
    restored = checkpoint.restore(linen_path)
    np.testing.assert_array_equal(LinenModel().apply(restored, INPUTS), expected)


def test_a_linen_checkpoint_goes_into_linen_variables(linen_path, variables):
    assert exact(checkpoint.restore(linen_path, linen_variables(seed=4))) == exact(variables)


@pytest.mark.parametrize("make", [to_nnx_model, mixed_model])
def test_a_linen_checkpoint_goes_into_a_migrated_model(linen_path, expected, make):
    model = checkpoint.restore(linen_path, make())
    np.testing.assert_array_equal(model(INPUTS), expected)


def test_the_layout_of_a_linen_checkpoint_is_recognised(linen_path):
    found = checkpoint.layout(linen_path)
    is_file = linen_path.is_file()
    assert (found.layout, found.format) == ("linen", "msgpack" if is_file else "orbax")
    leaves = {(leaf.collection, leaf.path): (leaf.shape, leaf.dtype) for leaf in found.leaves}
    assert leaves["params", ("Dense_0", "kernel")] == ((3, 4), "float32")
    assert len(leaves) == 8


def pure(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState)))


@pytest.mark.parametrize(
    ("write", "content"),
    [
        (write_standard, nnx.state),
        (write_pytree, pure),
        (write_step, pure),
        (write_msgpack, pure),
    ],
)
def test_an_nnx_checkpoint_goes_into_both_sides(tmp_path, variables, expected, write, content):
    state = checkpoint.restore(_saved(tmp_path, variables), to_nnx_model(seed=8))
    path = write(tmp_path / "nnx", content(state))
    assert checkpoint.layout(path).layout == "nnx"
    np.testing.assert_array_equal(checkpoint.restore(path, mixed_model())(INPUTS), expected)
    np.testing.assert_array_equal(checkpoint.restore(path, to_nnx_model())(INPUTS), expected)
    linen = checkpoint.restore(path, linen_variables(seed=4))
    assert exact(linen) == exact(variables)
    module = LinenModelWithNnxHead()
    target = module.init(jax.random.key(2), INPUTS)
    headed = checkpoint.restore(path, target)
    np.testing.assert_array_equal(module.apply(headed, INPUTS), expected)
    with pytest.raises(CheckpointError, match="target"):
        checkpoint.restore(path)


def _saved(tmp_path, variables):
    checkpoint.save(tmp_path / "bridge", variables)
    return tmp_path / "bridge"


def test_typed_keys_of_an_nnx_checkpoint_come_back(tmp_path):
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(3))
    model(jnp.ones(2))
    path = write_standard(tmp_path / "nnx", nnx.state(model))
    other = checkpoint.restore(path, nnx.Dropout(0.5, rngs=nnx.Rngs(4)), rngs=True)
    assert exact(nnx.state(other)) == exact(nnx.state(model))


def test_integer_keys_of_an_nnx_checkpoint_come_back(tmp_path):
    def make(seed):
        rngs = nnx.Rngs(seed)
        return nnx.Sequential(*[nnx.Linear(2, 2, rngs=rngs) for _ in range(11)])

    model = make(0)
    for write, content in ((write_standard, nnx.state(model)), (write_msgpack, pure(model))):
        path = write(tmp_path / write.__name__, content)
        other = checkpoint.restore(path, make(1))
        assert exact(nnx.state(other)) == exact(nnx.state(model))


@pytest.mark.parametrize("write", [write_pytree, write_msgpack])
@pytest.mark.parametrize(
    "box",
    [
        lambda value: nn.Partitioned(value, ("a", None)),
        lambda value: nn.LogicallyPartitioned(value, ("a", None)),
        lambda value: bridge.NNXMeta(nnx.Param, value, {"out_sharding": ("a", None)}),
    ],
)
def test_boxes_that_another_writer_took_for_subtrees_come_back(tmp_path, write, box):
    path = write(tmp_path / "boxed", {"params": {"w": box(jnp.ones((2, 2)))}})
    boxed = checkpoint.restore(path, {"params": {"w": box(jnp.zeros((2, 2)))}})
    assert exact(boxed) == exact({"params": {"w": box(jnp.ones((2, 2)))}})
    bare = checkpoint.restore(path, {"params": {"w": jnp.zeros((2, 2))}})
    assert exact(bare) == exact({"params": {"w": jnp.ones((2, 2))}})


class AveragedState(train_state.TrainState):
    average: Any


def make_train_state(variables, cls=train_state.TrainState, **fields):
    state = cls.create(apply_fn=LinenModel().apply, params=variables["params"], tx=TX, **fields)
    gradients = jax.tree.map(jnp.ones_like, state.params)
    return state.apply_gradients(grads=gradients)


@pytest.mark.parametrize("write", WRITERS)
def test_a_train_state_gives_its_parameters_and_on_request_the_rest(tmp_path, variables, write):
    state = make_train_state(variables)
    path = write(tmp_path / "train", state)
    found = checkpoint.layout(path)
    assert found.layout == "linen"
    assert {leaf.collection for leaf in found.leaves} == {"params"}
    assert set(found.extra) == {"opt_state", "step"}
    fresh = make_train_state(linen_variables(seed=4))
    target = {"params": fresh.params}
    restored, extra = checkpoint.restore(
        path, target, extra={"opt_state": fresh.opt_state, "step": 0}
    )
    assert exact(restored["params"]) == exact(state.params)
    assert exact(extra["opt_state"]) == exact(state.opt_state)
    assert type(extra["step"]) is int
    assert extra["step"] == 1
    # The statistics are in no TrainState.
    model = checkpoint.restore(path, mixed_model(), allow_missing=True)
    np.testing.assert_array_equal(model.Dense_1.kernel[...], state.params["Dense_1"]["kernel"])


def test_a_field_of_a_train_state_that_holds_a_tree_is_no_collection(tmp_path, variables):
    average = jax.tree.map(jnp.negative, variables["params"])
    path = write_pytree(
        tmp_path / "train", make_train_state(variables, AveragedState, average=average)
    )
    with pytest.raises(CheckpointError, match="average/Dense_0/bias: not in the target"):
        checkpoint.restore(path, {"params": variables["params"]})
    zeros = jax.tree.map(jnp.zeros_like, variables["params"])
    _, extra = checkpoint.restore(path, {"params": zeros}, extra={"average": zeros})
    assert exact(extra["average"]) == exact(average)


@pytest.mark.parametrize("write", [write_pytree, write_msgpack])
def test_a_model_inside_a_larger_checkpoint_is_found_by_its_keys(tmp_path, variables, write):
    state = pure(checkpoint.restore(_saved(tmp_path, variables), mixed_model()))
    for name, tree in {"linen": variables, "nnx": state}.items():
        path = write(tmp_path / name, {"model": {"ema": tree}, "step": 5, "note": jnp.ones(1)})
        model, extra = checkpoint.restore(
            path, mixed_model(), within=["model", "ema"], extra={"step": 0}
        )
        expected = LinenModel().apply(variables, INPUTS)
        np.testing.assert_array_equal(model(INPUTS), expected)
        assert extra == {"step": 5}
        path = write(tmp_path / f"{name}_at_the_top", {"model": tree, "params": jnp.ones(1)})
        assert checkpoint.layout(path, within="model").layout == name
        model = checkpoint.restore(path, mixed_model(), within="model")
        np.testing.assert_array_equal(model(INPUTS), expected)


def test_a_checkpoint_of_the_bridge_has_one_model(tmp_path, variables):
    with pytest.raises(CheckpointError, match="extra="):
        checkpoint.restore(_saved(tmp_path, variables), within="model")


def test_a_mismatch_with_another_writers_checkpoint_lists_paths(linen_path):
    target = linen_variables()
    target["params"]["Dense_0"]["kernel"] = jnp.zeros((3, 5))
    target["params"]["Dense_9"] = {"kernel": jnp.zeros(1)}
    del target["params"]["Dense_1"]
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(linen_path, target)
    error = caught.value
    assert error.missing == (("params/Dense_9/kernel", "float32[1]"),)
    assert error.mis_shaped == (("params/Dense_0/kernel", "float32[3, 5]", "float32[3, 4]"),)
    assert set(error.unexpected) == {"params/Dense_1/kernel", "params/Dense_1/bias"}


@pytest.mark.parametrize(
    ("tree", "layout", "extra"),
    [
        ({"batch_stats": {"mean": 1.0}, "step": 3}, "linen", ("step",)),
        ({"params": {"w": 1.0}, "ema": {"w": 1.0}, "seed": 3}, "linen", ("seed",)),
        # Parameters alone, as to_bytes(state.params) writes them.
        ({"Dense_0": {"kernel": 1.0}, "scale": 2.0}, "linen", ()),
        # As Hugging Face's models have them: in a file, a number is no sign of an `nnx.List`.
        ({"h": {"0": {"attn": {"kernel": 1.0}}}, "wte": {"embedding": 2.0}}, "linen", ()),
        ({"layers": {"0": {"kernel": {"value": 1.0}}}}, "nnx", ("layers",)),
        ({"norm": {"scale": 1.0, "mean": 2.0, "var": 3.0}}, "nnx", ("norm",)),
    ],
)
def test_the_first_keys_tell_whose_checkpoint_it_is(tmp_path, tree, layout, extra):
    found = checkpoint.layout(write_msgpack(tmp_path / "file", tree))
    assert (found.layout, found.extra) == (layout, extra)


HUGGING_FACE = {"h": {"0": {"attn": {"kernel": np.ones((2, 2))}}}, "wte": {"scale": np.ones(2)}}


def test_the_caller_says_whose_paths_a_file_has(tmp_path):
    path = write_msgpack(tmp_path / "file", HUGGING_FACE)

    assert exact(checkpoint.restore(path, layout="linen")) == exact({"params": HUGGING_FACE})
    assert checkpoint.layout(path, layout="nnx").layout == "nnx"
    with pytest.raises(CheckpointError, match="layout='linen'"):
        checkpoint.restore(path, layout="nnx")
    with pytest.raises(CheckpointError, match="no layout 'torch'"):
        checkpoint.layout(path, layout="torch")


class Lists(nnx.Module):
    """A model whose file has numbers, and a Variable that is no parameter."""

    def __init__(self, seed):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(seed)) for _ in range(2)])
        self.seen = nnx.Cache(jnp.full(2, seed, jnp.float32))


@pytest.mark.parametrize("layout", [None, "nnx", "linen"])
def test_a_file_without_collections_goes_into_a_model_by_path(tmp_path, layout):
    pure = nnx.to_pure_dict(nnx.state(Lists(1)))
    path = write_msgpack(tmp_path / "file", pure)

    restored = checkpoint.restore(path, Lists(0), layout=layout)

    assert exact(nnx.to_pure_dict(nnx.state(restored))) == exact(pure)


def test_a_directory_of_steps_or_of_several_trees_says_what_it_holds(tmp_path, variables):
    write_step(tmp_path / "manager", variables)
    with pytest.raises(CheckpointNotFoundError, match="'7'"):
        checkpoint.restore(tmp_path / "manager")
    args = ocp.args.Composite(
        first=ocp.args.PyTreeSave(variables), second=ocp.args.PyTreeSave(variables)
    )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "several", args=args)
    with pytest.raises(CheckpointNotFoundError, match="'first', 'second'"):
        checkpoint.restore(tmp_path / "several")
    restored = checkpoint.restore(tmp_path / "several" / "second", linen_variables(seed=4))
    assert exact(restored) == exact(variables)


def test_other_readers_shards_are_the_targets(tmp_path):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    values = np.arange(16, dtype=np.float32)
    for write in (write_pytree, write_msgpack):
        path = write(tmp_path / write.__name__, {"params": {"w": jnp.asarray(values)}})
        target = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=sharding)
        restored = checkpoint.restore(path, {"params": {"w": target}})["params"]["w"]
        assert restored.sharding.is_equivalent_to(sharding, 1)
        np.testing.assert_array_equal(restored, values)


def test_keys_that_lead_nowhere_are_named_with_those_that_are_there(tmp_path):
    path = write_msgpack(tmp_path / "file", {"state": {"model": {"params": {"w": 1.0}}}})

    with pytest.raises(CheckpointNotFoundError, match=r"within state .*Did you mean model\?"):
        checkpoint.layout(path, within=["state", "modle"])
    with pytest.raises(CheckpointNotFoundError, match="'state/model/params/w/x'"):
        checkpoint.restore(path, within=["state", "model", "params", "w", "x"])
