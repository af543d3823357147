"""Training goes on from a checkpoint as if it had never stopped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import bridge
from bridge import checkpoint
from bridge.checkpoint import CheckpointError
from tests.checkpoint.migrating_models import (
    INPUTS,
    LinenModel,
    NnxModelWithLinenBody,
    linen_variables,
    mixed_model,
)
from tests.models import snapshot
from tests.strategies import exact

TX = optax.adam(0.1)


def make_training(seed=5):
    model = mixed_model(seed)
    # Dropout draws keys; the statistics of the wrapped BatchNorm stay as they are.
    model.Dropout_0.deterministic = False
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def train(model, optimizer, steps):
    for _ in range(steps):
        gradients = nnx.grad(lambda m: jnp.sum(m(INPUTS) ** 2))(model)
        optimizer.update(model, gradients)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint after two steps, and the model and optimizer after two more."""
    path = tmp_path_factory.mktemp("training") / "checkpoint"
    model, optimizer = make_training()
    train(model, optimizer, 2)
    checkpoint.save(path, model, extra={"optimizer": optimizer, "epoch": 2, "rate": 0.1})
    train(model, optimizer, 2)
    return path, exact(nnx.state(model)), exact(nnx.state(optimizer))


def test_an_nnx_optimizer_around_a_mixed_model_goes_on_bit_for_bit(trained):
    path, model_after, optimizer_after = trained
    model, optimizer = make_training(seed=6)
    restored, extra = checkpoint.restore(
        path, model, extra={"optimizer": optimizer, "epoch": 0, "rate": 0.0}, rngs=True
    )
    assert restored is model
    assert extra["optimizer"] is optimizer
    assert (extra["epoch"], extra["rate"]) == (2, 0.1)
    train(model, optimizer, 2)
    assert exact(nnx.state(model)) == model_after
    assert exact(nnx.state(optimizer)) == optimizer_after


def test_an_optimizer_that_was_made_before_lazy_init_is_named(trained):
    model = NnxModelWithLinenBody(rngs=nnx.Rngs(5))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    bridge.lazy_init(model, INPUTS)
    with pytest.raises(CheckpointError, match="has another state than the one") as raised:
        checkpoint.restore(trained[0], model, extra={"optimizer": optimizer})
    assert "optimizer: OptVariable/opt_state/0/mu/Dense_0/kernel" in raised.value.unexpected


def test_trees_that_are_not_asked_for_are_left_alone(trained):
    path = trained[0]
    assert set(checkpoint.layout(path).extra) == {"optimizer", "epoch", "rate"}
    model, extra = checkpoint.restore(path, mixed_model(), extra={"epoch": 0})
    assert isinstance(model, nnx.Module)
    assert extra == {"epoch": 2}


def test_linen_training_goes_on_bit_for_bit(tmp_path):
    module = LinenModel()
    variables = linen_variables()
    stats = variables["batch_stats"]

    def step(params, opt_state):
        gradients = jax.grad(
            lambda p: jnp.sum(module.apply({"params": p, "batch_stats": stats}, INPUTS) ** 2)
        )(params)
        updates, opt_state = TX.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = step(variables["params"], TX.init(variables["params"]))
    extra = {"opt_state": opt_state, "step": jnp.asarray(1, jnp.int32)}
    checkpoint.save(tmp_path / "one", {"params": params, "batch_stats": stats}, extra=extra)
    expected = step(params, opt_state)

    fresh = linen_variables(seed=3)
    abstract = jax.eval_shape(lambda: TX.init(fresh["params"]))
    restored, extra = checkpoint.restore(
        tmp_path / "one", fresh, extra={"opt_state": abstract, "step": jnp.asarray(0, jnp.int32)}
    )
    assert exact(step(restored["params"], extra["opt_state"])) == exact(expected)
    assert int(extra["step"]) == 1


def keys_and_counts(model):
    return exact(nnx.state(model, nnx.RngState))


def test_rng_state_is_left_out_of_a_checkpoint_on_request(tmp_path):
    model = mixed_model(seed=1)
    checkpoint.save(tmp_path / "with", model)
    checkpoint.save(tmp_path / "without", model, rngs=False)
    streams = {
        (leaf.collection, leaf.path)
        for leaf in checkpoint.layout(tmp_path / "with").leaves
        if leaf.collection.startswith("Rng")
    }
    # The native stream, and the wrappers' own.
    assert ("RngKey", ("Dropout_0", "rngs", "key")) in streams
    assert ("RngKey", ("Dense_0", "to_nnx__rngs", "default", "key")) in streams
    leaves = checkpoint.layout(tmp_path / "without").leaves
    assert {leaf.collection for leaf in leaves} == {"params", "batch_stats"}
    assert not any("to_nnx__" in str(leaf.path) for leaf in leaves)


def test_rng_state_is_restored_where_both_sides_have_it(tmp_path):
    saved = mixed_model(seed=1)
    checkpoint.save(tmp_path / "with", saved)
    checkpoint.save(tmp_path / "without", saved, rngs=False)
    own = keys_and_counts(mixed_model(seed=2))
    assert keys_and_counts(saved) != own
    for name, rngs, expected in (
        ("with", None, keys_and_counts(saved)),
        ("with", True, keys_and_counts(saved)),
        ("with", False, own),
        ("without", None, own),
        ("without", False, own),
    ):
        model = checkpoint.restore(tmp_path / name, mixed_model(seed=2), rngs=rngs)
        assert keys_and_counts(model) == expected
        assert exact(nnx.state(model, nnx.Param)) == exact(nnx.state(saved, nnx.Param))


def test_rng_state_that_has_to_fit_is_listed_like_everything_else(tmp_path):
    checkpoint.save(tmp_path / "without", mixed_model(), rngs=False)
    model = mixed_model()
    before = snapshot(model)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path / "without", model, rngs=True)
    assert "RngKey/Dropout_0/rngs/key" in dict(caught.value.missing)
    assert snapshot(model) == before
    checkpoint.save(tmp_path / "with", mixed_model())
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path / "with", linen_variables(), rngs=True)
    assert "RngKey/Dropout_0/rngs/key" in caught.value.unexpected


def test_a_key_of_another_implementation_does_not_fit(tmp_path):
    checkpoint.save(tmp_path / "one", {"RngKey": {"key": jax.random.key(0, impl="rbg")}})
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path / "one", {"RngKey": {"key": jax.random.key(0)}})
    assert caught.value.mis_typed == (("RngKey/key", "key<fry>[]", "key<rbg>[]"),)


def test_the_streams_of_a_wrapped_nnx_module_go_on(tmp_path):
    module = bridge.to_linen(nnx.Dropout, 0.5)
    x = jnp.ones((4, 4))
    variables = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    _, updates = module.apply(variables, x, mutable=["RngCount"])
    variables = {**variables, **updates}
    checkpoint.save(tmp_path / "one", variables)
    expected = module.apply(variables, x, mutable=["RngCount"])[0]
    restored = checkpoint.restore(tmp_path / "one")
    np.testing.assert_array_equal(module.apply(restored, x, mutable=["RngCount"])[0], expected)
    bare = checkpoint.restore(tmp_path / "one", rngs=False)
    assert not bare


def test_a_checkpoint_manager_keeps_the_steps_and_restore_reads_them(tmp_path):
    model, optimizer = make_training()
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    after = {}
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        for step in range(3):
            train(model, optimizer, 1)
            after[step] = exact(nnx.state(model))
            args = checkpoint.save_args(model, extra={"optimizer": optimizer})
            manager.save(step, args=args)
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2]
        for step in manager.all_steps():
            other, own = make_training(seed=8)
            checkpoint.restore(manager.directory / str(step), other, extra={"optimizer": own})
            assert exact(nnx.state(other)) == after[step]
            assert int(own.step[...]) == step + 1
