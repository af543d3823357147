"""A Linen `TrainState` and an NNX model with its optimizer are one checkpoint in two layouts.

Each is trained on from the other's checkpoint, beside Linen and NNX trained without a break.
"""

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
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import bridge
from bridge import checkpoint
from bridge.checkpoint import CheckpointError
from tests.port import forms
from tests.port.cases import random_values
from tests.port.models import shapes_of
from tests.strategies import exact

X = jax.random.normal(jax.random.key(0), (8, 4))
Y = jax.random.normal(jax.random.key(1), (8, 4))
DEPTH = 3
TX = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.1, 0.01, 8)), optax.ema(0.9)
)
RULES = {"layers": "blocks.*", "Dense_0": "head"}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = nn.Dense(4, name="fc")(x)
        return jnp.tanh(nn.BatchNorm(use_running_average=False, name="norm")(x)), None


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "batch_stats": 0}
        scanned = nn.scan(Block, axes, split_rngs={"params": True}, length=DEPTH)
        return nn.Dense(4)(scanned(name="layers")(x, None)[0])


class NativeBlock(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.norm(self.fc(x)))


class Native(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NativeBlock(rngs) for _ in range(DEPTH)])
        self.head = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TrainState(train_state.TrainState):
    batch_stats: Any = None


def linen_training(seed=0):
    variables = Linen().init(jax.random.key(seed), X)
    return TrainState.create(apply_fn=Linen().apply, tx=TX, **variables)


@jax.jit
def linen_step(state):
    def loss(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        y, updates = state.apply_fn(variables, X, mutable=["batch_stats"])
        return jnp.mean((y - Y) ** 2), updates

    gradients, updates = jax.grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients, **updates)


def native_training(seed=0):
    model = Native(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


@nnx.jit
def native_step(model, optimizer):
    gradients = nnx.grad(lambda model: jnp.mean((model(X) - Y) ** 2))(model)
    optimizer.update(model, gradients)


def linen_trained(state, steps):
    for _ in range(steps):
        state = linen_step(state)
    return state


def native_trained(model, optimizer, steps):
    for _ in range(steps):
        native_step(model, optimizer)
    return model, optimizer


def values_of_linen(state):
    """Parameters, statistics and first moments by the names of the native model."""
    found = {}
    moments = state.opt_state[1][0].mu
    for kind, tree in (("", state.params), ("", state.batch_stats), ("mu ", moments)):
        for keys, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
            first, *rest = (key.key for key in keys)
            for i, part in enumerate(value) if first == "layers" else [(None, value)]:
                place = f"blocks.{i}." if first == "layers" else "head."
                found[kind + place + ".".join(rest)] = np.asarray(part)
    return found | {"step": int(state.step), "count": int(state.opt_state[1][0].count)}


def values_of_native(model, optimizer):
    found = {}
    adam = optimizer.opt_state[1][0]
    for kind, state in (("", nnx.state(model)), ("mu ", adam.mu)):
        for path, variable in nnx.to_flat_state(state):
            found[kind + ".".join(map(str, path))] = np.asarray(variable[...])
    return found | {"step": int(optimizer.step[...]), "count": int(adam.count[...])}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def write_orbax(path, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def write_msgpack(path, state):
    path.write_bytes(serialization.to_bytes(state))


def write_bridge(path, state):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    checkpoint.save(path, variables, extra={"opt_state": state.opt_state, "step": state.step})


def write_linen_layout(path, state):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    extra = {"opt_state": state.opt_state, "step": state.step}
    checkpoint.save(path, variables, extra=extra, layout="linen")


WRITERS = [write_orbax, write_msgpack, write_bridge, write_linen_layout]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("is_abstract", [True, False])
def test_nnx_training_goes_on_from_a_linen_train_state(tmp_path, write, is_abstract):
    state = linen_trained(linen_training(), 5)
    write(tmp_path / "linen", state)
    model, optimizer = nnx.eval_shape(native_training) if is_abstract else native_training(7)

    restored, extra = checkpoint.restore(
        tmp_path / "linen", model, extra={"optimizer": optimizer}, rules=RULES
    )

    assert (restored, extra) == (model, {"optimizer": optimizer})
    native_trained(model, optimizer, 5)
    assert_same(values_of_native(model, optimizer), values_of_linen(linen_trained(state, 5)))


@pytest.mark.parametrize("is_abstract", [True, False])
@pytest.mark.parametrize("step", [0, jnp.zeros((), jnp.int32)])
def test_linen_training_goes_on_from_an_nnx_model_and_its_optimizer(tmp_path, is_abstract, step):
    model, optimizer = native_trained(*native_training(), 5)
    checkpoint.save(tmp_path / "nnx", model, extra={"optimizer": optimizer})
    native_trained(model, optimizer, 5)
    state = linen_training(7)
    target = jax.eval_shape(lambda: state) if is_abstract else state
    variables = {"params": target.params, "batch_stats": target.batch_stats}

    variables, extra = checkpoint.restore(
        tmp_path / "nnx",
        variables,
        extra={"opt_state": target.opt_state, "step": step},
        rules=RULES,
        verify=True,
    )

    assert type(extra["step"]) is type(step)
    assert jax.tree.structure(extra["opt_state"]) == jax.tree.structure(state.opt_state)
    state = linen_trained(state.replace(**variables, **extra), 5)
    assert_same(values_of_linen(state), values_of_native(model, optimizer))


class SameNames(nnx.Module):
    """The names that Linen gives, so that no rules are needed."""

    def __init__(self, rngs):
        self.Dense_0 = nnx.Linear(4, 4, rngs=rngs)
        self.BatchNorm_0 = nnx.BatchNorm(4, rngs=rngs)
        self.Dropout_0 = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x):
        return self.Dropout_0(self.BatchNorm_0(self.Dense_0(x)))


class LinenOfSameNames(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        return nn.Dropout(0.0, deterministic=False)(x)


def small_linen_training():
    variables = LinenOfSameNames().init(jax.random.key(3), X)
    return TrainState.create(apply_fn=LinenOfSameNames().apply, tx=TX, **variables)


def small_native_training():
    model = SameNames(nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


@pytest.mark.parametrize("read", ["orbax", "bridge"])
def test_a_linen_program_without_the_bridge_goes_on_from_the_linen_layout(tmp_path, read):
    model, optimizer = native_trained(*small_native_training(), 5)
    checkpoint.save(tmp_path / "state", model, extra={"optimizer": optimizer}, layout="linen")
    native_trained(model, optimizer, 5)
    fresh = linen_trained(small_linen_training(), 1)

    if read == "orbax":
        with ocp.StandardCheckpointer() as checkpointer:
            state = checkpointer.restore(tmp_path / "state", fresh)
    else:
        variables = {"params": fresh.params, "batch_stats": fresh.batch_stats}
        extra = {"opt_state": fresh.opt_state, "step": fresh.step}
        variables, extra = checkpoint.restore(tmp_path / "state", variables, extra=extra)
        state = fresh.replace(**variables, **extra)

    assert int(state.step) == 5
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(fresh.opt_state)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, fresh)
    assert jax.tree.map(lambda leaf: leaf.dtype, state) == dtypes
    state = linen_trained(state, 5)
    for name, layer in nnx.to_pure_dict(nnx.state(model, nnx.Param)).items():
        for leaf, value in layer.items():
            np.testing.assert_allclose(state.params[name][leaf], value, rtol=2e-5, atol=2e-6)


def test_the_linen_layout_is_the_tree_that_orbax_writes_of_a_train_state(tmp_path):
    model, optimizer = small_native_training()
    checkpoint.save(tmp_path / "ours", model, extra={"optimizer": optimizer}, layout="linen")
    write_orbax(tmp_path / "theirs", linen_trained(small_linen_training(), 1))
    found, expected = (
        ocp.PyTreeCheckpointer().metadata(tmp_path / name).item_metadata.tree
        for name in ("ours", "theirs")
    )

    def leaves(tree):
        return {
            jax.tree_util.keystr(keys): (getattr(leaf, "shape", None), getattr(leaf, "dtype", None))
            for keys, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)[0]
        }

    assert leaves(found) == leaves(expected)


def _is_leaf(node):
    return node is None or isinstance(node, ocp.metadata.value.Metadata) or node == {}


def test_an_optimizers_state_is_restored_into_the_shards_of_the_target(tmp_path):
    state = linen_trained(linen_training(), 2)
    write_orbax(tmp_path / "linen", state)
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    row, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (["model"], []))
    model, optimizer = nnx.eval_shape(native_training)
    for node in (model, optimizer):
        abstract = jax.tree.map(
            lambda leaf: leaf.update(sharding=row if leaf.ndim else whole), nnx.state(node)
        )
        nnx.update(node, abstract)

    checkpoint.restore(tmp_path / "linen", model, extra={"optimizer": optimizer}, rules=RULES)

    leaves = jax.tree.leaves((nnx.state(model), nnx.state(optimizer)))
    assert [leaf.sharding for leaf in leaves] == [row if leaf.ndim else whole for leaf in leaves]
    assert_same(values_of_native(model, optimizer), values_of_linen(state))


@pytest.mark.parametrize("case", forms.CASES)
def test_moments_are_reshaped_split_and_joined_as_their_parameters(tmp_path, case):
    linen, native, rules, by_hand = forms.CASES[case]
    rules = {**rules, "norm": "norms.{q,k,v}"} if "norm" in rules else rules
    variables = random_values(shapes_of(linen, forms.X))
    adam, *rest = optax.adam(0.1).init(variables["params"])
    moments = jax.tree.map(lambda leaf: 2 * leaf, variables["params"])
    opt_state = (adam._replace(mu=moments), *rest)
    checkpoint.save(tmp_path / "linen", variables, extra={"opt_state": opt_state, "step": 3})
    model = native(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    checkpoint.restore(tmp_path / "linen", model, extra={"optimizer": optimizer}, rules=rules)

    expected = by_hand(jax.tree.map(np.asarray, moments))
    for name, (kernel, bias) in expected.items():
        found = optimizer.opt_state[0].mu[name]
        np.testing.assert_array_equal(found["kernel"][...], kernel)
        np.testing.assert_array_equal(found["bias"][...], bias)
    checkpoint.save(tmp_path / "nnx", model, extra={"optimizer": optimizer})
    target = {"opt_state": jax.eval_shape(lambda: opt_state), "step": 0}
    _, extra = checkpoint.restore(
        tmp_path / "nnx", shapes_of(linen, forms.X), extra=target, rules=rules, verify=True
    )
    assert exact(extra) == exact({"opt_state": opt_state, "step": 3})


def test_what_does_not_fit_changes_neither_model_nor_optimizer(tmp_path):
    write_bridge(tmp_path / "linen", linen_training())
    model = Native(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    before = exact(nnx.state((model, optimizer)))

    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path / "linen", model, extra={"optimizer": optimizer}, rules=RULES)

    missing = [where for where, _ in caught.value.missing]
    assert "optimizer: OptVariable/opt_state/0/mu/head/kernel" in missing
    assert "optimizer: opt_state/1/0/mu/Dense_0/kernel" in caught.value.unexpected
    assert exact(nnx.state((model, optimizer))) == before


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)])
@pytest.mark.parametrize("case", forms.CASES)
def test_moments_that_the_target_has_no_place_for_are_never_dropped(tmp_path, case, tx):
    # Regression: without a word where the target keeps none, and a fault of the rules elsewhere.
    linen, native, rules, _ = forms.CASES[case]
    rules = {**rules, "norm": "norms.{q,k,v}"} if "norm" in rules else rules
    variables = random_values(shapes_of(linen, forms.X))
    opt_state = optax.adam(0.1).init(variables["params"])
    checkpoint.save(tmp_path / "linen", variables, extra={"opt_state": opt_state, "step": 3})
    model = native(nnx.Rngs(0))
    extra = {"optimizer": nnx.Optimizer(model, tx, wrt=nnx.Param)}
    before = exact(nnx.state((model, extra["optimizer"])))
    with pytest.raises(CheckpointError, match="the same optax transformation") as caught:
        checkpoint.restore(tmp_path / "linen", model, extra=extra, rules=rules)
    names = [name for name in caught.value.unexpected if "/mu/" in name]
    assert len(names) == len(jax.tree.leaves(variables["params"]))
    assert exact(nnx.state((model, extra["optimizer"]))) == before

    adam = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    checkpoint.save(tmp_path / "nnx", model, extra={"optimizer": adam})
    target = {"opt_state": tx.init(variables["params"]), "step": 0}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path / "nnx", variables, extra=target, rules=rules)
    assert [name for name in caught.value.unexpected if "/mu/" in name]


def test_an_optimizer_that_no_checkpoint_has_is_named(tmp_path):
    checkpoint.save(tmp_path / "model", Linen().init(jax.random.key(0), X))
    model, optimizer = native_training()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path / "model", model, extra={"optimizer": optimizer}, rules=RULES)
    assert [name for name, _ in caught.value.missing] == ["optimizer"]


def test_a_manager_saves_steps_that_a_linen_program_restores(tmp_path):
    # Regression: only save had layout=.
    model, optimizer = small_native_training()
    extra = {"optimizer": optimizer}
    fresh = small_linen_training()
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(4, args=checkpoint.save_args(model, extra=extra, layout="linen"))
        manager.wait_until_finished()
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        state = manager.restore(4, args=ocp.args.StandardRestore(fresh))
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    assert exact(state.params) == exact(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert int(state.step) == 0
    with pytest.raises(CheckpointError, match="there is no layout 'nnx'"):
        checkpoint.save_args(model, layout="nnx")


def test_what_the_linen_layout_has_no_place_for_is_refused(tmp_path):
    model, optimizer = small_native_training()
    cases = [
        ({"layout": "nnx"}, "there is no layout 'nnx'"),
        ({"layout": "linen", "extra": {"ema": nnx.state(model)}}, "the tree 'ema' is one of NNX"),
        ({"layout": "linen", "extra": {"params": 3}}, r"two trees called \['params'\]"),
        ({"layout": "linen", "extra": {"a": optimizer, "b": optimizer}}, "two trees called"),
        ({"layout": "linen", "extra": {"a": object()}}, "cannot be stored"),
    ]
    wrapper = bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0))
    with pytest.raises(CheckpointError, match=r"Call bridge\.lazy_init first"):
        checkpoint.save(tmp_path / "state", wrapper, layout="linen")
    for options, text in cases:
        with pytest.raises(CheckpointError, match=text):
            checkpoint.save(tmp_path / "state", model, **options)
    assert not list(tmp_path.iterdir())


def test_an_optimizer_of_another_model_is_refused_with_what_is_missing(tmp_path):
    one, other = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.LayerNorm(2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(other, optax.adam(1e-2), wrt=nnx.Param)

    with pytest.raises(CheckpointError, match="belongs to another model") as raised:
        checkpoint.save(tmp_path / "x", one, extra={"optimizer": optimizer}, layout="linen")

    assert raised.value.unsupported == (("scale", "not in the model"),)
    assert not list(tmp_path.iterdir())
