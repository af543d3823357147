"""A checkpoint that does not fit: every problem in one error, and nothing changed."""

import os
import pathlib
import pickle
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state

import bridge
from bridge import ConversionError, checkpoint
from bridge.checkpoint import CheckpointError, CheckpointNotFoundError
from tests.checkpoint.migrating_models import linen_variables, mixed_model, to_nnx_model
from tests.models import snapshot
from tests.strategies import exact

VARIABLES = {
    "params": {"a": jnp.ones((2, 3)), "b": jnp.ones(4), "c": jnp.ones(5), "extra": jnp.ones(1)},
    "cache": {"deep": {10: (jnp.ones(1), jnp.ones(2))}},
}
TARGET = {
    "params": {"a": jnp.zeros((2, 4)), "b": jnp.zeros(4, jnp.bfloat16), "c": jnp.zeros(5)},
    "batch_stats": {"mean": jnp.zeros(6)},
    "cache": {"deep": {10: (jnp.zeros(1), jnp.zeros(3))}},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("errors") / "checkpoint"
    checkpoint.save(path, VARIABLES)
    return path


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("errors") / "model"
    checkpoint.save(path, linen_variables())
    return path


def test_one_error_lists_everything_that_does_not_fit(path):
    before = exact(TARGET)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(path, TARGET)
    error = caught.value
    assert error.path == str(path)
    assert error.missing == (("batch_stats/mean", "float32[6]"),)
    assert set(error.mis_shaped) == {
        ("params/a", "float32[2, 4]", "float32[2, 3]"),
        ("cache/deep/10/1", "float32[3]", "float32[2]"),
    }
    assert error.mis_typed == (("params/b", "bfloat16[4]", "float32[4]"),)
    assert error.unexpected == ("params/extra",)
    for where in ("batch_stats/mean", "params/a", "cache/deep/10/1", "params/b", "params/extra"):
        assert f"- {where}: " in str(error)
    assert isinstance(error, bridge.BridgeError)
    assert isinstance(error, ValueError)
    assert exact(TARGET) == before


def test_the_error_pickles(path):
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(path, TARGET)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.missing) == (str(caught.value), caught.value.missing)


def test_missing_and_unexpected_leaves_are_allowed_on_request(path):
    target = {"params": {"a": jnp.zeros((2, 3)), "new": jnp.full((2,), 7.0)}}
    with pytest.raises(CheckpointError, match="allow_missing=True"):
        checkpoint.restore(path, target, allow_unexpected=True)
    with pytest.raises(CheckpointError, match="allow_unexpected=True"):
        checkpoint.restore(path, target, allow_missing=True)
    restored = checkpoint.restore(path, target, allow_missing=True, allow_unexpected=True)
    expected = {"params": {"a": jnp.ones((2, 3)), "new": target["params"]["new"]}}
    assert exact(restored) == exact(expected)


def test_what_is_allowed_to_be_missing_cannot_stay_abstract(path):
    target = {"params": {"new": jax.ShapeDtypeStruct((2,), jnp.float32)}}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(path, target, allow_missing=True, allow_unexpected=True)
    assert caught.value.missing == (("params/new", "float32[2]"),)


@pytest.mark.parametrize("make", [to_nnx_model, mixed_model])
def test_a_model_that_does_not_fit_stays_as_it_was(model_path, tmp_path, make):
    variables = linen_variables()
    variables["params"]["Dense_1"]["kernel"] = jnp.ones((4, 3))
    checkpoint.save(tmp_path / "other", variables)
    model = make()
    before = snapshot(model)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path / "other", model)
    assert caught.value.mis_shaped == (("params/Dense_1/kernel", "float32[4, 2]", "float32[4, 3]"),)
    assert snapshot(model) == before


def test_a_model_stays_as_it_was_if_only_an_extra_tree_does_not_fit(model_path, tmp_path):
    checkpoint.save(tmp_path / "one", linen_variables(), extra={"step": 3, "ema": [jnp.ones(2)]})
    model = mixed_model()
    before = snapshot(model)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path / "one", model, extra={"ema": [jnp.ones(3)], "other": 1})
    assert caught.value.mis_shaped == (("ema: 0", "float32[3]", "float32[2]"),)
    assert [where for where, _ in caught.value.missing] == ["other"]
    assert snapshot(model) == before


def test_a_model_stays_as_it_was_if_it_cannot_be_written(model_path):
    model = mixed_model()
    before = snapshot(model)

    def restore_inside():
        checkpoint.restore(model_path, model)
        return jnp.zeros(())

    # Under a trace the Variables belong to another level, so the first assignment raises.
    with pytest.raises(Exception, match="trace level"):
        jax.eval_shape(restore_inside)
    assert snapshot(model) == before


def test_a_checkpoint_is_replaced_only_on_request(tmp_path):
    checkpoint.save(tmp_path / "one", {"params": {"w": jnp.ones(2)}})
    with pytest.raises(CheckpointError, match="overwrite=True"):
        checkpoint.save(tmp_path / "one", {"params": {"w": jnp.zeros(2)}})
    np.testing.assert_array_equal(checkpoint.restore(tmp_path / "one")["params"]["w"], np.ones(2))
    checkpoint.save(tmp_path / "one", {"params": {"v": jnp.zeros(3)}}, overwrite=True)
    assert exact(checkpoint.restore(tmp_path / "one")) == exact({"params": {"v": jnp.zeros(3)}})
    assert [child.name for child in tmp_path.iterdir()] == ["one"]


def test_where_there_is_no_checkpoint_the_error_says_what_there_is(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        checkpoint.restore(tmp_path / "nothing")
    (tmp_path / "10").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="10"):
        checkpoint.restore(tmp_path)


def test_numbers_and_arrays_without_axes_of_one_kind_are_alike(tmp_path):
    checkpoint.save(tmp_path / "one", {"cache": {"i": 3, "f": 0.5, "a": jnp.asarray(4, jnp.int32)}})
    target = {"cache": {"i": jnp.zeros((), jnp.int32), "f": np.float32(0), "a": 0}}
    restored = checkpoint.restore(tmp_path / "one", target)
    expected = {"i": jnp.asarray(3, jnp.int32), "f": np.float32(0.5), "a": 4}
    assert exact(restored) == exact({"cache": expected})
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(
            tmp_path / "one", {"cache": {"i": jnp.zeros(()), "f": jnp.zeros(1), "a": "text"}}
        )
    assert {path for path, *_ in caught.value.mis_typed} == {"cache/i", "cache/a"}
    assert caught.value.mis_shaped == (("cache/f", "float32[1]", "float"),)


def test_values_that_were_assigned_are_taken_back_if_a_later_one_cannot_be(tmp_path):
    checkpoint.save(tmp_path / "one", {"params": {"a": jnp.ones(2), "b": jnp.ones(3)}})
    outside = nnx.Param(jnp.zeros(3))
    kept = []

    def restore_inside():
        # The first Variable belongs to this trace and can be written, the second one cannot.
        inside = nnx.Param(jnp.zeros(2))
        before = inside.get_raw_value()
        model = nnx.Dict(a=inside, b=outside)
        with pytest.raises(Exception, match="trace level"):
            checkpoint.restore(tmp_path / "one", model)
        kept.append(inside.get_raw_value() is before)
        return jnp.zeros(())

    jax.eval_shape(restore_inside)
    assert kept == [True]
    np.testing.assert_array_equal(outside[...], np.zeros(3))


def test_every_leaf_that_cannot_be_stored_is_named(tmp_path):
    variables = {
        "params": {
            "abstract": jax.ShapeDtypeStruct((2,), jnp.float32),
            "object": object(),
            "fine": jnp.ones(1),
            2.5: jnp.ones(1),
        },
        "cache": {"function": len},
    }
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path / "one", variables)
    assert {where for where, _ in caught.value.unsupported} == {
        "params/abstract",
        "params/object",
        "params/2.5",
        "cache/function",
    }
    assert not list(tmp_path.iterdir())


def test_saving_inside_of_a_transformation_says_so(tmp_path):
    def inside(x):
        checkpoint.save(tmp_path / "one", {"params": {"w": x}})
        return x

    with pytest.raises(CheckpointError, match="jit"):
        jax.jit(inside)(jnp.ones(2))


@pytest.mark.parametrize("name", ["bridge", "variables", "a/b", "", "../up"])
def test_an_extra_tree_needs_a_free_name_that_is_an_identifier(tmp_path, name):
    with pytest.raises(CheckpointError):
        checkpoint.save(tmp_path / "one", VARIABLES, extra={name: 1})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tree", [3, [1, 2], None, nn.Dense(2), {"params": 3}])
def test_what_is_no_model_is_refused(tmp_path, tree):
    with pytest.raises(bridge.ConversionError):
        checkpoint.save(tmp_path / "one", tree)


@pytest.mark.parametrize("tree", [nnx.Linear(2, 3, rngs=nnx.Rngs(0)), VARIABLES, None])
def test_the_path_comes_first(tmp_path, tree):
    with pytest.raises(bridge.ConversionError, match=r"save\(path, tree\), restore\(path"):
        checkpoint.save(tree, tmp_path / "one")
    for read in (checkpoint.restore, checkpoint.layout):
        with pytest.raises(bridge.ConversionError, match="expected a path"):
            read(tree)
    assert not list(tmp_path.iterdir())


def test_a_named_pipe_is_no_checkpoint_and_is_not_waited_for(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        checkpoint.restore(pipe)
    with pytest.raises(CheckpointError, match="neither a directory nor a file"):
        checkpoint.save(pipe, {"params": {"w": jnp.ones(2)}}, overwrite=True)


DTYPES = sorted(
    name
    for name, value in vars(ml_dtypes).items()
    if isinstance(value, type) and name[-1].isalnum()
)


@pytest.mark.parametrize("name", [name for name in DTYPES if name not in ("finfo", "iinfo")])
def test_a_dtype_is_saved_or_its_leaf_is_named(tmp_path, name):
    array = np.ones(3, getattr(ml_dtypes, name))
    tree = {"params": {"layer": {"w": array, "b": jnp.ones(2)}}}

    try:
        checkpoint.save(tmp_path / "model", tree)
    except CheckpointError as error:
        [(leaf, reason)] = error.unsupported
        assert leaf == "params/layer/w"
        assert name in reason
        assert not list(tmp_path.iterdir())
    else:
        assert exact(checkpoint.restore(tmp_path / "model")["params"]["layer"]["w"]) == exact(array)


def test_a_train_state_is_refused_with_what_to_give_instead(tmp_path, path):
    class State(train_state.TrainState):
        batch_stats: dict[str, jax.Array]

    state = State.create(
        apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1), batch_stats={"m": jnp.ones(2)}
    )
    remedy = (
        "give {'params': state.params, 'batch_stats': state.batch_stats} and "
        "extra={'opt_state': state.opt_state, 'step': state.step}"
    )

    with pytest.raises(ConversionError, match=re.escape(remedy)):
        checkpoint.save(tmp_path / "model", state)
    with pytest.raises(ConversionError, match=re.escape(remedy)):
        checkpoint.restore(path, state)
    assert not list(tmp_path.iterdir())


def test_a_tree_beside_the_model_of_another_name_is_named_in_one_line(tmp_path):
    tree, state = {"params": {"w": jnp.ones(2)}}, {f"m{i}": jnp.ones(1) for i in range(20)}
    checkpoint.save(tmp_path / "model", tree, extra={"opt_state": state, "step": 3})

    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path / "model", tree, extra={"optstate": state, "step": 0})

    [(name, expected)] = caught.value.missing
    assert name == "optstate"
    assert "'opt_state', 'step'" in expected
    assert "Did you mean opt_state?" in str(caught.value)


def test_what_to_do_stands_above_a_long_list(tmp_path):
    checkpoint.save(tmp_path / "model", {"params": {"w": jnp.ones(2)}})
    target = {"params": {f"w{i}": jnp.ones(2) for i in range(20)}}

    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path / "model", target)

    first, *others = str(caught.value).splitlines()
    assert "21 problems. allow_missing=True keeps" in first
    assert len(others) == 21
    assert all(line.startswith("  - ") for line in others)


def test_a_path_may_begin_with_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    checkpoint.save("~/model", VARIABLES)

    assert exact(checkpoint.restore(pathlib.Path("~/model"))) == exact(VARIABLES)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_directory_with_a_checkpoint_called_bridge_is_none_itself(tmp_path):
    checkpoint.save(tmp_path / "bridge", {"params": {"w": jnp.ones(2)}})
    with pytest.raises(CheckpointNotFoundError, match=r"It holds \['bridge'\]"):
        checkpoint.layout(tmp_path)


def test_a_model_that_lazy_init_has_not_seen_is_not_saved(tmp_path):
    blocks = [bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0)) for _ in range(2)]
    model = nnx.Sequential(*blocks)
    with pytest.raises(CheckpointError, match=r"Call bridge\.lazy_init first") as raised:
        checkpoint.save(tmp_path / "model", model)
    assert [path for path, _ in raised.value.unsupported] == ["layers/0", "layers/1"]
    assert not list(tmp_path.iterdir())

    blocks.insert(0, bridge.ToNNX(nn.Dropout(0.5, deterministic=True)))
    model = nnx.Sequential(*blocks, nnx.Linear(3, 3, rngs=nnx.Rngs(0)))
    with pytest.warns(bridge.BridgeWarning, match=r"(\n  - layers/\d){3}\nCall bridge.lazy_init"):
        checkpoint.save(tmp_path / "partly", model)
    # The dropout has no variables then either.
    checkpoint.save(tmp_path / "whole", bridge.lazy_init(model, jnp.ones((1, 3))))


def test_a_misspelled_path_is_answered_with_the_name_beside_it(path):
    with pytest.raises(CheckpointNotFoundError, match=r"Did you mean checkpoint\?"):
        checkpoint.restore(path.with_name("chekpoint"))


def test_the_latest_step_is_the_newest_that_holds_anything(tmp_path):
    for step in (1, 9):
        checkpoint.save(tmp_path / str(step), {"params": {"w": jnp.full(2, step)}})
    (tmp_path / "10").mkdir()

    assert checkpoint.restore(tmp_path / "latest")["params"]["w"].tolist() == [9, 9]
