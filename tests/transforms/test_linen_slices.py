"""A Linen transform of `ToLinen` creates and draws in each slice as native NNX does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from tests.models import assert_close, assert_identical
from tests.transforms import linen_states as states

KEY = jax.random.key(0)
SIZE = 3
X = jax.random.normal(jax.random.key(1), (SIZE, states.BATCH, states.FEATURES))
ONES = jnp.ones((SIZE, 8, states.FEATURES))


def slices(tree):
    return [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(SIZE)]


def lifted(transform, nnx_class, split, **options):
    """A transformed class, and its call on one input for each slice."""
    split_rngs = {"params": True, "dropout": split}
    if transform == "vmap":
        module = nn.vmap(
            bridge.ToLinen, variable_axes={"params": 0}, split_rngs=split_rngs, **options
        )
        return module(nnx_class), lambda x: (x,)

    class Step(nnx_class):
        def __call__(self, carry, x):
            return carry, super().__call__(x)

    module = nn.scan(bridge.ToLinen, variable_axes={"params": 0}, split_rngs=split_rngs, **options)
    return module(Step), lambda x: (None, x)


def output(result):
    return result[1] if isinstance(result, tuple) else result


@pytest.mark.parametrize("transform", ["vmap", "scan"])
def test_every_slice_is_what_native_construction_makes_of_its_own_key(transform):
    module, inputs = lifted(transform, states.Plain, split=True)
    variables = module.init(KEY, *inputs(X))
    y = output(module.apply(variables, *inputs(X)))
    keys = jax.random.split(KEY, SIZE)
    for i, own in enumerate(slices(variables["params"])):
        native = states.Plain(rngs=nnx.Rngs(keys[i]))
        expected = nnx.to_pure_dict(nnx.state(native))
        # Constructing and computing under a transform compile, which rounds differently.
        assert_close(own, expected)
        np.testing.assert_allclose(y[i], native(X[i]), rtol=1e-5, atol=1e-6)


def call_step(module, carry, x):
    return module(carry), None


NAMINGS = {
    "vmap axis 0": lambda module, x: nn.vmap(
        lambda module, x: module(x), variable_axes={"params": None, "nnx": 0}, axis_size=1
    )(module, x[None])[0],
    "vmap in, not out": lambda module, x: nn.vmap(
        lambda module, x: module(x),
        variable_axes={"params": None, "nnx": nn.transforms.lift.In(None)},
        axis_size=1,
    )(module, x[None])[0],
    "scan axis 0": lambda module, x: nn.scan(
        call_step, variable_broadcast="params", variable_axes={"nnx": 0}, length=1
    )(module, x, None)[0],
    "scan broadcast": lambda module, x: nn.scan(
        call_step, variable_broadcast=["params", "nnx"], length=1
    )(module, x, None)[0],
    "scan carry": lambda module, x: nn.scan(
        call_step, variable_broadcast="params", variable_carry="nnx", length=1
    )(module, x, None)[0],
    "scan carry of everything else": lambda module, x: nn.scan(
        call_step, variable_broadcast="params", variable_carry=True, length=1
    )(module, x, None)[0],
    "while_loop carry": lambda module, x: nn.while_loop(
        lambda module, carry: carry[0] < 1,
        lambda module, carry: (carry[0] + 1, module(carry[1])),
        module,
        (0, x),
        carry_variables="nnx",
    )[1],
    "map_variables": nn.map_variables(
        lambda module, x: module(x), ["params", "nnx"], trans_in_fn=lambda tree: tree
    ),
}

# As any collection that is carried, it then has to be mutable.
WAYS = [(n, m) for n in NAMINGS for m in ([], ["nnx"], True) if m or "carry" not in n]


@pytest.mark.parametrize(("name", "mutable"), WAYS)
def test_the_definition_may_be_lifted_in_every_way(name, mutable):
    def body(root, x):
        module = bridge.to_linen(states.Plain, name="m")
        return module(x) if root.is_initializing() else NAMINGS[name](module, x)

    program = states.Program(body)
    variables = program.init(KEY, X[0])
    native = states.Plain(rngs=nnx.Rngs(0))
    nnx.update(native, variables["params"]["m"])
    for given in (variables, {"params": variables["params"]}):
        if given is not variables and mutable:
            continue
        y, updates = program.apply(given, X[0], mutable=mutable)
        # Loops are compiled, and that rounds differently.
        np.testing.assert_allclose(y, native(X[0]), rtol=1e-5, atol=1e-6)
        assert all(tree == variables[name] for name, tree in updates.items() if name == "nnx")


@pytest.mark.parametrize("transform", ["vmap", "scan"])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("definition", ["with_nnx", "without_nnx"])
def test_masks_are_as_different_as_the_keys_of_the_slices(transform, split, definition):
    module, inputs = lifted(transform, states.Dropped, split=split)
    variables = module.init({"params": KEY, "dropout": KEY}, *inputs(ONES))
    if definition == "without_nnx":
        variables = {"params": variables["params"]}
    masks = output(module.apply(variables, *inputs(ONES), rngs={"dropout": KEY})) != 0
    again = output(module.apply(variables, *inputs(ONES), rngs={"dropout": KEY})) != 0
    assert_identical(masks, again)
    assert (masks[0] == masks[1]).all() == (not split)
    assert (masks[1] == masks[2]).all() == (not split)


@pytest.mark.parametrize("transform", ["vmap", "scan"])
def test_stored_streams_draw_what_native_modules_with_these_streams_draw(transform):
    options = {
        "variable_axes": dict.fromkeys(("params", *states.STREAMS), 0),
        "split_rngs": {"params": True, "dropout": True},
    }
    module, inputs = lifted(transform, states.Dropped, split=True)
    if transform == "vmap":
        module = nn.vmap(bridge.ToLinen, **options)(states.Dropped)
    else:
        module = nn.scan(bridge.ToLinen, **options)(module.nnx_class)
    variables = module.init({"params": KEY, "dropout": KEY}, *inputs(X))
    own = {name: nn.unbox(variables[name]) for name in ("params", *states.STREAMS)}
    natives = []
    for one in slices(own):
        native = states.Dropped(rngs=nnx.Rngs(0))
        nnx.update(native, one["params"])
        native.dropout.rngs.key.set_value(one["RngKey"]["dropout"]["rngs"]["key"])
        natives.append(native)
    for _ in range(2):
        y, updates = module.apply(variables, *inputs(X), mutable=["RngCount"])
        expected = jnp.stack([native(x) for native, x in zip(natives, X, strict=True)])
        # The native calls are not compiled in one program.
        assert_close(output(y), expected)
        variables = variables | updates
    counts = nn.unbox(variables["RngCount"])["dropout"]["rngs"]["count"]
    assert counts.tolist() == [2] * SIZE


@pytest.mark.parametrize("transform", [nn.jit, nn.remat, lambda f: f], ids=["jit", "remat", "none"])
def test_a_second_call_of_a_transformed_module_draws_another_mask(transform):
    """As Linen's Dropout does in the second call of a shared module."""

    def twice(root, x):
        module = bridge.to_linen(states.Dropped, name="m")
        call = transform(lambda module, x: module(x) != 0)
        return call(module, x), call(module, x)

    program = states.Program(twice)
    variables = program.init({"params": KEY, "dropout": KEY}, ONES[0])
    first, second = program.apply({"params": variables["params"]}, ONES[0], rngs={"dropout": KEY})
    assert not (first == second).all()


class Normed(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(states.FEATURES, states.FEATURES, rngs=rngs)
        self.norm = nnx.BatchNorm(states.FEATURES, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


@pytest.mark.parametrize("transform", [nn.jit, nn.remat], ids=["jit", "remat"])
def test_a_transformed_module_keeps_its_results_without_tracing_again(transform):
    """Outside of any other transform, where only the lifted one compiles."""
    module = transform(bridge.ToLinen)(Normed)
    variables = module.init(KEY, X[0])
    native = Normed(rngs=nnx.Rngs(0))
    nnx.update(native, {**variables["params"], "norm": nnx.to_pure_dict(nnx.state(native.norm))})
    nnx.update(native.linear, variables["params"]["linear"])
    for step in range(2):
        y, updates = module.apply(variables, X[step], mutable=["batch_stats"])
        # One compiled program rounds differently from the native operations one by one.
        np.testing.assert_allclose(y, native(X[step]), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            updates["batch_stats"]["norm"]["mean"], native.norm.mean[...], rtol=1e-5, atol=1e-7
        )
        variables = variables | updates


class Nested(nnx.Module):
    """An NNX module that holds a Linen module which is initialised lazily."""

    def __init__(self, *, rngs):
        self.dense = bridge.ToNNX(nn.Dense(states.FEATURES), rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.dense(x))


@pytest.mark.parametrize("transform", ["vmap", "scan"])
@pytest.mark.parametrize("definition", ["with_nnx", "without_nnx"])
def test_a_linen_module_in_the_nnx_module_is_initialised_in_every_slice(transform, definition):
    module, inputs = lifted(transform, Nested, split=True)
    variables = module.init(KEY, *inputs(X))
    dense = variables["params"]["dense"]
    assert dense["kernel"].shape == (SIZE, states.FEATURES, states.FEATURES)
    assert not (dense["kernel"][0] == dense["kernel"][1]).all()
    if definition == "without_nnx":
        variables = {"params": variables["params"]}
    y = output(module.apply(variables, *inputs(X)))
    expected = [
        jnp.tanh(nn.Dense(states.FEATURES).apply({"params": own}, x))
        for own, x in zip(slices(dense), X, strict=True)
    ]
    # The slices are computed in one batched program.
    np.testing.assert_allclose(y, jnp.stack(expected), rtol=1e-5, atol=1e-6)


class Encoder(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(states.FEATURES, states.FEATURES, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)

    def encode(self, x):
        return 2 * self.linear(x)


class LinenEncoder(nn.Module):
    def setup(self):
        self.linear = nn.Dense(states.FEATURES)

    def __call__(self, x):
        return self.linear(x)

    def encode(self, x):
        return 2 * self.linear(x)


def test_the_methods_to_transform_can_be_named():
    """`methods=` of a class transform, as with a native class."""
    options = {
        "variable_axes": {"params": 0},
        "split_rngs": {"params": True},
        "methods": ["__call__", "encode"],
    }
    module = nn.vmap(bridge.to_linen_class(Encoder), **options)()
    native = nn.vmap(LinenEncoder, **options)()
    variables = module.init(KEY, X)
    expected = native.apply({"params": variables["params"]}, X, method="encode")
    assert_identical(module.apply(variables, X, method="encode"), expected)


@pytest.mark.parametrize("transform", ["vmap", "scan", "jit"])
def test_a_method_that_is_not_transformed_runs_as_it_is(transform):
    """As `initialize_carry` of a scanned native cell does."""
    transforms = {
        "vmap": lambda cls: nn.vmap(cls, variable_axes={"params": 0}, split_rngs={"params": True}),
        "scan": lambda cls: nn.scan(cls, variable_axes={"params": 0}, split_rngs={"params": True}),
        "jit": nn.jit,
    }
    x = X[0]
    variables = bridge.to_linen_class(Encoder)().init(KEY, x)
    native = transforms[transform](LinenEncoder)()
    module = transforms[transform](bridge.to_linen_class(Encoder))()
    expected = native.apply({"params": variables["params"]}, x, method="encode")
    assert_identical(module.apply(variables, x, method="encode"), expected)
