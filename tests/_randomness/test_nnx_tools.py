"""The tools of NNX's randomness guide, on wrapped modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from tests._randomness.random_models import mask
from tests.models import assert_identical, rng_counts

X = jnp.ones((1, 20))


class LinenModel(nn.Module):
    """The guide's Model."""

    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.Dropout(0.1, deterministic=False)(nn.Dense(10)(x)))


class Model(nnx.Module):
    """The guide's Model, half of it native."""

    def __init__(self, rngs):
        self.native = nnx.Linear(20, 20, rngs=rngs)
        self.native_drop = nnx.Dropout(0.1, rngs=rngs)
        self.wrapped = bridge.ToNNX(LinenModel(), rngs)

    def __call__(self, x):
        return self.wrapped(self.native_drop(self.native(x)))


def make(*args, x=X, **seeds):
    return bridge.lazy_init(Model(nnx.Rngs(*args, **seeds)), x)


def tags(state):
    return sorted({leaf.tag for leaf in jax.tree.leaves(state, is_leaf=is_variable)})


def is_variable(leaf):
    return isinstance(leaf, nnx.Variable)


def test_streams_are_found_by_type_by_name_and_by_both():
    model = make(params=0, dropout=1)
    # Two streams of the wrapper; the native Dropout has a fork of one.
    counts = {
        filter_: len(jax.tree.leaves(nnx.state(model, filter_)))
        for filter_ in (nnx.RngState, nnx.RngKey, nnx.RngCount, "params", "dropout")
    }
    assert counts == {nnx.RngState: 6, nnx.RngKey: 3, nnx.RngCount: 3, "params": 2, "dropout": 4}
    both = nnx.state(model, nnx.All("params", nnx.RngKey))
    assert [path for path, _ in nnx.to_flat_state(both)] == [
        ("wrapped", "to_nnx__rngs", "params", "key")
    ]
    assert tags(nnx.state(model, nnx.RngCount)) == ["dropout", "params"]


def test_streams_split_off_by_a_filter_come_back():
    model = make(params=0, dropout=1)
    graphdef, keys, counts, rest = nnx.split(model, nnx.RngKey, nnx.RngCount, ...)
    again = nnx.merge(graphdef, keys, counts, rest, copy=True)
    for _ in range(2):
        assert_identical(again(X), model(X))


def test_reseed_brings_back_the_first_call_as_in_the_guide():
    model = make(params=0, dropout=1)
    nnx.reseed(model, dropout=1)
    y1, y2 = model(X), model(X)
    nnx.reseed(model, dropout=1)
    y3 = model(X)
    assert not jnp.allclose(y1, y2)
    assert_identical(y1, y3)


@pytest.mark.parametrize("seed", [5, jax.random.key(5)], ids=["int", "key"])
def test_reseed_gives_a_wrapped_dropout_the_new_stream_and_no_other(seed):
    module = nn.Dropout(0.5, deterministic=False)
    model = bridge.ToNNX(module, nnx.Rngs(params=0, dropout=1, other=2))
    x = jnp.ones((4, 16))
    model(x)
    before = rng_counts(model)
    other = model.to_nnx__rngs.other.key.get_value()
    nnx.reseed(model, dropout=seed)
    # As any stream that is reseeded, it starts from the first key of the new seed.
    stream = nnx.Rngs(dropout=nnx.Rngs(dropout=seed).dropout())
    for _ in range(2):
        assert_identical(model(x), module.apply({}, x, rngs={"dropout": stream.dropout()}))
    assert before[("to_nnx__rngs", "dropout", "count")] == 1
    assert rng_counts(model)[("to_nnx__rngs", "other", "count")] == 0
    assert_identical(model.to_nnx__rngs.other.key.get_value(), other)


def native_stream(seed=1):
    return nnx.Rngs(params=0, dropout=seed).fork()


def test_split_rngs_as_a_decorator_splits_what_it_is_told_and_restores_it():
    model = bridge.ToNNX(nn.Dropout(0.5, deterministic=False), nnx.Rngs(params=0, dropout=1))
    native = native_stream()

    def shapes(rngs):
        return {name: (rngs[name].key.shape, rngs[name].count.shape) for name in rngs}

    def wrapped_inside(model):
        return shapes(model.to_nnx__rngs)

    split = nnx.split_rngs(splits=5, only="dropout")
    found = split(wrapped_inside)(model)
    assert found == split(shapes)(native)
    assert found["params"] == ((), ())
    assert found["dropout"][0] == (5,)
    assert shapes(model.to_nnx__rngs) == shapes(native)
    assert rng_counts(model.to_nnx__rngs) == rng_counts(native)
    x = jnp.ones((4, 16))
    module = nn.Dropout(0.5, deterministic=False)
    assert_identical(model(x), module.apply({}, x, rngs={"dropout": native.dropout()}))


def test_split_rngs_as_a_context_gives_every_copy_its_native_mask():
    module = nn.Dropout(0.5, deterministic=False)
    model = bridge.ToNNX(module, nnx.Rngs(params=0, dropout=1))
    native = native_stream()
    x = jnp.ones((4, 16))
    axes = nnx.StateAxes({"dropout": 0, ...: None})
    forward = nnx.vmap(lambda m, x: m(x), in_axes=(axes, None))
    draw = nnx.vmap(lambda rngs: rngs.dropout(), in_axes=(axes,))
    for _ in range(2):
        with nnx.split_rngs(model, splits=3, only="dropout"):
            masks = forward(model, x)
        with nnx.split_rngs(native, splits=3, only="dropout"):
            keys = draw(native)
        for y, key in zip(masks, keys, strict=True):
            assert_identical(y, module.apply({}, x, rngs={"dropout": key}))
        assert rng_counts(model.to_nnx__rngs) == rng_counts(native)
    assert len({mask(y) for y in masks}) == 3


def test_state_axes_without_a_split_give_every_copy_one_mask():
    model = bridge.ToNNX(nn.Dropout(0.5, deterministic=False), nnx.Rngs(dropout=1))
    axes = nnx.StateAxes({"dropout": None, ...: None})
    y = nnx.vmap(lambda m, x: m(x), in_axes=(axes, 0))(model, jnp.ones((3, 4, 16)))
    assert len({mask(row) for row in y}) == 1


def parallel(model, x):
    """The guide's data-parallel forward."""
    count = x.shape[0]
    axes = nnx.StateAxes({"dropout": 0, ...: None})

    @nnx.split_rngs(splits=count, only="dropout")
    @nnx.pmap(in_axes=(axes, 0), out_axes=0)
    def forward(model, x):
        return model(x)

    return forward(model, x)


class Parallel(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(8)(x)) + 1


def test_data_parallel_dropout_has_a_mask_for_every_device():
    count = jax.local_device_count()
    assert count == 8
    x = jnp.ones((count, 16, 20))
    model = bridge.ToNNX(Parallel(), nnx.Rngs(params=0, dropout=1)).lazy_init(x[0])
    first = parallel(model, x)
    assert first.shape == (count, 16, 8)
    second = parallel(model, x)
    masks = {np.asarray(y == 1).tobytes() for y in (*first, *second)}
    assert len(masks) == 2 * count


def test_data_parallel_dropout_has_the_masks_of_the_native_keys():
    module = nn.Dropout(0.5, deterministic=False)
    model = bridge.ToNNX(module, nnx.Rngs(params=0, dropout=1))
    native = native_stream()
    x = jnp.ones((8, 4, 16))
    y = parallel(model, x)
    with nnx.split_rngs(native, splits=8, only="dropout"):
        keys = jax.vmap(jax.random.fold_in)(
            native.dropout.key.get_value(), native.dropout.count.get_value()
        )
    for row, key in zip(y, keys, strict=True):
        assert_identical(row, module.apply({}, x[0], rngs={"dropout": key}))


class Cell(nn.Module):
    """The guide's cell, in Linen."""

    features: int = 16

    @nn.compact
    def __call__(self, h, x):
        h = nn.Dropout(0.5, deterministic=False, rng_collection="recurrent_dropout")(h)
        y = nn.relu(nn.Dense(self.features)(jnp.concatenate([h, x], axis=-1)))
        return y, h


class NativeCell(nnx.Module):
    """The guide's cell, without the parameters."""

    def __init__(self, rngs):
        self.drop = nnx.Dropout(0.5, rngs=rngs, rng_collection="recurrent_dropout")

    def __call__(self, h, x):
        return h, self.drop(h)


def unroll(cell, h, x, recurrent=None):
    axes = nnx.StateAxes({"recurrent_dropout": recurrent, ...: nnx.Carry})

    @nnx.scan(in_axes=(axes, nnx.Carry, 1), out_axes=(nnx.Carry, 1))
    def step(cell, h, x):
        # The state stays what it is, so that every step shows its mask.
        return h, cell(h, x)[1]

    return step(cell, h, x)[1]


STEPS = 6
H = jnp.ones((4, 16))
SEQUENCE = jnp.ones((4, STEPS, 8))


def test_recurrent_dropout_has_one_mask_for_all_steps():
    cell = bridge.ToNNX(Cell(), nnx.Rngs(params=0, recurrent_dropout=1))
    cell.lazy_init(H, SEQUENCE[:, 0])
    y = nnx.jit(unroll)(cell, H, SEQUENCE)
    assert y.shape == (4, STEPS, 16)
    assert {mask(y[:, i]) for i in range(STEPS)} == {mask(y[:, 0])}
    assert 0 < int((y[:, 0] == 0).sum()) < y[:, 0].size


def test_recurrent_dropout_has_linen_s_mask_of_the_stream_s_next_key():
    rngs = nnx.Rngs(params=0, recurrent_dropout=1)
    cell = bridge.ToNNX(Cell(), rngs).lazy_init(H, SEQUENCE[:, 0])
    native = nnx.clone(cell.to_nnx__rngs.recurrent_dropout)
    variables = cell.linen_variables()
    y = unroll(cell, H, SEQUENCE)
    expected = Cell().apply(
        variables,
        H,
        SEQUENCE[:, 0],
        rngs={"recurrent_dropout": native()},
    )[1]
    assert mask(expected) == mask(y[:, 0])


def test_a_carried_stream_has_another_mask_in_every_step():
    cell = bridge.ToNNX(Cell(), nnx.Rngs(params=0, recurrent_dropout=1))
    cell.lazy_init(H, SEQUENCE[:, 0])
    y = nnx.jit(lambda c, h, x: unroll(c, h, x, nnx.Carry))(cell, H, SEQUENCE)
    assert len({mask(y[:, i]) for i in range(STEPS)}) == STEPS


def test_a_broadcast_stream_is_left_as_the_native_one_is():
    wrapped = bridge.ToNNX(Cell(), nnx.Rngs(params=0, recurrent_dropout=1))
    wrapped.lazy_init(H, SEQUENCE[:, 0])
    native = NativeCell(nnx.Rngs(params=0, recurrent_dropout=1))
    for _ in range(2):
        unroll(wrapped, H, SEQUENCE)
        unroll(native, H, SEQUENCE)
        assert int(wrapped.to_nnx__rngs.recurrent_dropout.count[...]) == int(
            native.drop.rngs.count[...]
        )


def test_a_linen_rnn_with_broadcast_keys_has_one_mask_for_all_steps():
    class Unrolled(nn.Module):
        @nn.compact
        def __call__(self, h, x):
            def step(cell, h, x):
                return h, cell(h, x)[1]

            scan = nn.scan(
                step,
                variable_broadcast="params",
                split_rngs={"params": False, "recurrent_dropout": False},
                in_axes=1,
                out_axes=1,
            )
            return scan(Cell(name="cell"), h, x)[1]

    model = bridge.ToNNX(Unrolled(), nnx.Rngs(params=0, recurrent_dropout=1))
    model.lazy_init(H, SEQUENCE)
    key = jax.random.key(4)
    variables = model.linen_variables()
    y = model(H, SEQUENCE, rngs={"recurrent_dropout": key})
    assert {mask(y[:, i]) for i in range(STEPS)} == {mask(y[:, 0])}
    expected = Unrolled().apply(variables, H, SEQUENCE, rngs={"recurrent_dropout": key})
    assert_identical(y, expected)
    assert mask(model(H, SEQUENCE)) != mask(model(H, SEQUENCE))


@pytest.mark.parametrize("name", ["params", "dropout", "recurrent_dropout", "anything"])
def test_the_default_stream_serves_every_stream(name):
    module = nn.Dropout(0.5, deterministic=False, rng_collection=name)
    x = jnp.ones((4, 16))
    model = bridge.ToNNX(module, nnx.Rngs(0))
    stream = nnx.Rngs(0).fork()
    for count in (1, 2):
        expected = module.apply({}, x, rngs={"params": stream()})
        assert_identical(model(x), expected)
        assert list(rng_counts(model).values()) == [count]
    to_linen = bridge.to_linen(nnx.Dropout, 0.5, rng_collection=name)
    y, variables = to_linen.init_with_output(jax.random.key(0), x)
    native = nnx.Dropout(0.5, rngs=nnx.Rngs(0), rng_collection=name)
    assert_identical(y, native(x))
    assert len(jax.tree.leaves(variables["RngKey"])) == 1


def wrapped_nnx():
    class Inner(nnx.Module):
        def __init__(self, *, rngs):
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(x)

    class Native(nnx.Module):
        """NNX around Linen around NNX."""

        def __init__(self, rngs):
            self.wrapped = bridge.ToNNX(bridge.to_linen(Inner), rngs, mutable="existing")

        def __call__(self, x):
            return self.wrapped(x)

    return bridge.lazy_init(Native(nnx.Rngs(params=0, dropout=1)), H)


def test_streams_of_an_nnx_module_inside_linen_are_filtered_and_reseeded():
    model = wrapped_nnx()
    keys = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.All("dropout", nnx.RngKey)))]
    assert ("wrapped", "dropout", "rngs", "key") in keys
    nnx.reseed(model, dropout=3, params=4)
    first, second = model(H), model(H)
    assert mask(first) != mask(second)
    nnx.reseed(model, dropout=3, params=4)
    assert_identical(model(H), first)
