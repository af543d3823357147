"""Programs written for flax.nnx.bridge's ToLinen do the same with `import bridge`."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, serialization
from flax.core import FrozenDict, freeze, meta
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import bridge
from tests.bridge.peer import described, on_both
from tests.models import assert_identical

KEY = jax.random.key(0)
X = jnp.arange(12.0).reshape(4, 3)


class Block(nnx.Module):
    """Three collections and an nnx.List of eleven."""

    def __init__(self, features=3, *, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(11)])
        self.lora = nnx.LoRA(3, 2, features, rngs=rngs)

    def __call__(self, x):
        x = self.norm(x)
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.lora(x)

    def normalise(self, x):
        return self.norm(x)


class Partitioned(nnx.Module):
    def __init__(self, *, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "out"))
        self.w = nnx.Param(init(rngs.params(), (3, 2)))

    def __call__(self, x):
        return x @ self.w


class Counting(nnx.Module):
    def __init__(self):
        self.count = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.count[...] += 1
        return x


class Outer(nn.Module):
    bridge: object

    @nn.compact
    def __call__(self, x):
        b = self.bridge
        x = b.to_linen(nnx.Linear, 3, 3)(nn.Dense(3)(x))
        x = b.ToLinen(nnx.Linear, args=(3, 3), name="named")(x)
        return b.ToLinen(nnx.Linear, args=(3, 2))(x)


class Reusing(nn.Module):
    bridge: object

    def setup(self):
        self.inner = self.bridge.to_linen(Block)

    def __call__(self, x):
        return self.inner(self.inner(x)), self.inner.normalise(x)


def initialised(bridge, module):
    return described(module.init(KEY, X))


def block(bridge):
    return bridge.ToLinen(Block)


def with_given_parameters(bridge, module, **apply):
    """A call with parameters that do not depend on how the bridge draws keys."""
    variables = module.init(KEY, X)
    params = jax.tree.map(
        lambda p: jnp.cos(jnp.arange(p.size)).reshape(p.shape), variables["params"]
    )
    out = module.apply({**variables, "params": params}, X, **apply)
    return described({"out": {"updates": out[1]["batch_stats"]}}) if "mutable" in apply else out


def partitioned(bridge):
    with jax.set_mesh(jax.make_mesh((2,), ("out",), (jax.sharding.AxisType.Auto,))):
        variables = bridge.ToLinen(Partitioned).init(KEY, X)
        box = variables["params"]["w"]
        assert type(box) is bridge.NNXMeta
        spec = nn.get_partition_spec(variables)["params"]["w"]
    return box.var_type is nnx.Param, str(box.metadata["out_sharding"]), str(spec)


def through_metadata_fn(metadata_fn, bridge):
    module = bridge.ToLinen(nnx.Linear, args=(3, 2), metadata_fn=metadata_fn)
    variables = module.init(KEY, X)
    kernel = variables["params"]["kernel"]
    assert_reads_its_own(module, variables)
    return type(kernel).__name__, getattr(kernel, "names", None), jnp.shape(nn.unbox(kernel))


def assert_reads_its_own(module, variables):
    y = module.apply(variables, X)
    kernel, bias = (nn.unbox(variables["params"][name]) for name in ("kernel", "bias"))
    np.testing.assert_array_equal(y, X @ kernel + bias[None])


def subclassed(bridge):
    class Named(bridge.ToLinen):
        pass

    class Holder(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Named(nnx.Linear, args=(3, 2))(x)

    return described(Holder().init(KEY, X))


def made_classes(bridge):
    class Class(bridge.wrappers.to_linen_class(nnx.Linear, use_bias=False)):
        pass

    class Holder(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Class(args=(3,), out_features=2)(x), Class(
                in_features=3, out_features=2, name="b"
            )(x)

    return described(Holder().init(KEY, X))


def train_state(bridge):
    module = bridge.ToLinen(Block)
    variables = module.init(KEY, X)
    params = jax.tree.map(
        lambda p: jnp.cos(jnp.arange(p.size)).reshape(p.shape), variables["params"]
    )
    state = TrainState.create(apply_fn=module.apply, params=params, tx=optax.sgd(0.1))
    rest = {k: v for k, v in variables.items() if k != "params"}

    @jax.jit
    def step(state, rest):
        def loss(params):
            y, updates = state.apply_fn({**rest, "params": params}, X, mutable=["batch_stats"])
            return (y**2).mean(), updates

        (value, updates), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {**rest, **updates}, value

    losses = []
    for _ in range(3):
        state, rest, value = step(state, rest)
        losses.append(value)
    return losses, state.params, rest["batch_stats"]


def mapped(bridge):
    linear = nn.vmap(
        bridge.ToLinen, variable_axes={"params": 0, "nnx": None}, split_rngs={"params": True}
    )

    class Holder(nn.Module):
        @nn.compact
        def __call__(self, x):
            return linear(nnx.Linear, args=(3, 2))(x)

    variables = Holder().init(KEY, X)
    return jax.tree.map(jnp.shape, variables["params"])


def functional(bridge):
    model = bridge.functional(nnx.Linear)(3, 2)
    assert isinstance(model, bridge.Functional)
    state = model.init(rngs=nnx.Rngs(0))
    y, (_, new) = model.apply(state)(X)
    return y, described(state), described(new)


PROGRAMS = {
    "the variables of a module": lambda b: [(p, n, m) for p, n, m, _ in initialised(b, block(b))],
    "the variables of a tree": lambda b: [(p, n, m) for p, n, m, _ in initialised(b, Outer(b))],
    "a call": lambda b: with_given_parameters(b, block(b)),
    "a call with updates": lambda b: with_given_parameters(b, block(b), mutable=["batch_stats"]),
    "nnx_method by name": lambda b: with_given_parameters(b, block(b), nnx_method="normalise"),
    "nnx_method by function": lambda b: with_given_parameters(
        b, block(b), nnx_method=Block.normalise
    ),
    "method": lambda b: with_given_parameters(b, block(b), method=lambda m, x: m.normalise(x)),
    "a call of a tree": lambda b: with_given_parameters(b, Outer(b)),
    "a shared submodule": lambda b: with_given_parameters(b, Reusing(b)),
    "partitioned": partitioned,
    "metadata_fn None": functools.partial(through_metadata_fn, None),
    "metadata_fn to Partitioned": functools.partial(
        through_metadata_fn, lambda v: nn.Partitioned(v.get_value(), (None,) * v.get_value().ndim)
    ),
    "a subclass": lambda b: [(p, n, m) for p, n, m, _ in subclassed(b)],
    "to_linen_class": lambda b: [(p, n, m) for p, n, m, _ in made_classes(b)],
    "a TrainState": train_state,
    "under nn.vmap": mapped,
    "functional": functional,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_the_program_does_what_it_does_with_flax_nnx_bridge(program):
    theirs, ours = on_both(program)
    assert_identical(ours, theirs)


@pytest.mark.parametrize(
    ("collection", "typ"),
    [("params", nnx.Param), ("batch_stats", nnx.BatchStat), ("LoRAParam", nnx.LoRAParam)],
)
def test_at_the_root_the_values_are_those_of_the_native_constructor(collection, typ):
    native = Block(rngs=nnx.Rngs(KEY))
    expected = nnx.state(native, lambda path, leaf: type(leaf) is typ)
    assert_identical(bridge.ToLinen(Block).init(KEY, X)[collection], nnx.to_pure_dict(expected))


def test_collection_nnx_is_added_to_those_of_flax_nnx_bridge():
    theirs, ours = on_both(lambda b: sorted(b.ToLinen(Block).init(KEY, X)))
    assert ours == sorted([*theirs, "nnx"])


def test_integer_keys_stay_integers_in_their_order():
    variables = bridge.ToLinen(Block).init(KEY, X)
    assert list(variables["params"]["layers"]) == list(range(11))
    leaves = [path for path, *_ in described(variables) if "layers" in path]
    assert [path[2] for path in leaves[::2]] == list(range(11))


@pytest.mark.parametrize(
    "restore",
    [
        lambda params: serialization.msgpack_restore(serialization.to_bytes(params)),
        serialization.to_state_dict,
        lambda params: jax.tree.map(np.asarray, params),
    ],
    ids=["msgpack", "state dict", "arrays of NumPy"],
)
def test_what_a_restore_makes_of_the_variables_is_accepted(restore):
    module = bridge.ToLinen(Block)
    variables = module.init(KEY, X)
    restored = {**variables, "params": restore(variables["params"])}
    np.testing.assert_array_equal(module.apply(restored, X), Block(rngs=nnx.Rngs(KEY))(X))


def test_an_option_writes_strings_for_integer_keys():
    module = bridge.ToLinen(Block, string_keys=True)
    variables = module.init(KEY, X)
    assert set(variables["params"]["layers"]) == set(map(str, range(11)))
    y = Block(rngs=nnx.Rngs(KEY))(X)
    np.testing.assert_array_equal(module.apply(variables, X), y)
    # Without the option, what it wrote is read all the same.
    np.testing.assert_array_equal(bridge.ToLinen(Block).apply(variables, X), y)


def test_automatic_names_are_those_of_flax_nnx_bridge():
    variables = Outer(bridge).init(KEY, X)
    assert list(variables["params"]) == ["Dense_0", "ToLinen_0", "named", "ToLinen_1"]


def test_classes_of_to_linen_class_are_named_after_the_nnx_class():
    class Holder(nn.Module):
        @nn.compact
        def __call__(self, x):
            linear = bridge.to_linen_class(nnx.Linear, in_features=3)
            return linear(out_features=2)(x) + linear(out_features=2)(x)

    variables = Holder().init(KEY, X)
    assert list(variables["params"]) == ["LinearToLinen_0", "LinearToLinen_1"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"nnx_class": nnx.Linear, "args": (3, 2)},
        {"nnx_class": nnx.Linear, "args": [3, 2]},
        {"nnx_class": nnx.Linear, "kwargs": {"in_features": 3, "out_features": 2}},
        {"nnx_class": Block, "kwargs": FrozenDict(features=2)},
    ],
    ids=["tuple", "list", "dict", "FrozenDict"],
)
def test_a_to_linen_is_hashable_and_equal_by_value(arguments):
    first, second = bridge.ToLinen(**arguments), bridge.ToLinen(**arguments)
    assert first == second
    assert hash(first) == hash(second)
    assert first != bridge.ToLinen(**arguments, skip_rng=True)
    jitted = jax.jit(lambda module, key: module.init(key, X)["params"], static_argnums=0)
    jitted(first, KEY)
    jitted(second, KEY)
    assert jitted._cache_size() == 1


def test_a_to_linen_may_be_called_repeatedly_in_one_pass():
    module = bridge.ToLinen(Counting)
    variables = module.init(KEY, X)

    class Thrice(nn.Module):
        def setup(self):
            self.inner = bridge.ToLinen(Counting)

        def __call__(self, x):
            return self.inner(self.inner(self.inner(x)))

    outer = {c: {"inner": tree} if c != "nnx" else tree for c, tree in variables.items()}
    outer["nnx"] = {"inner": variables["nnx"]}
    _, updates = Thrice().apply(outer, X, mutable=["batch_stats"])
    assert updates["batch_stats"]["inner"]["count"] == 3


def test_constructor_arguments_can_be_read():
    module = bridge.to_linen(nnx.Linear, 3, out_features=2)
    assert module.out_features == 2


def test_initialising_under_map_variables_uses_the_mapped_variables():
    def scaled_by(factor):
        return lambda tree: jax.tree.map(lambda parameter: factor * parameter, tree)

    class Mapped(nn.Module):
        @nn.compact
        def __call__(self, x):
            halved = nn.map_variables(
                bridge.ToLinen, "params", scaled_by(0.5), scaled_by(2.0), init=True, mutable=True
            )
            return halved(nnx.Linear, args=(3, 2))(x)

    y, variables = Mapped().init_with_output({"params": KEY}, X)
    layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    nnx.update(layer, scaled_by(0.5)(nn.unbox(variables["params"]["Map_variablesToLinen_0"])))
    np.testing.assert_array_equal(y, layer(X))
    np.testing.assert_array_equal(Mapped().apply(variables, X), layer(X))


def test_a_box_is_read_and_written_as_with_flax_nnx_bridge():
    def program(bridge):
        box = bridge.NNXMeta(nnx.Param, jnp.ones(2), {"note": "kept"})
        variable = bridge.variables.to_nnx_var("params", box)
        back = bridge.variables.to_linen_var(variable)
        assert isinstance(box, meta.AxisMetadata)
        assert type(back) is bridge.NNXMeta
        return (
            variable.note,
            back.metadata["note"],
            box.unbox(),
            box.replace_boxed(jnp.zeros(2)).unbox(),
            box.to_nnx_variable().get_value(),
        )

    theirs, ours = on_both(program)
    assert_identical(ours, theirs)


def test_with_partitioning_makes_a_linen_box():
    class Model(nnx.Module):
        def __init__(self, *, rngs):
            init = bridge.with_partitioning(nnx.initializers.ones, ("in", None))
            self.w = nnx.Param(init(rngs.params(), (3, 2)), eager_sharding=False)

        def __call__(self, x):
            return x @ self.w

    variables = bridge.ToLinen(Model).init(KEY, X)
    assert type(variables["params"]["w"]) is nn.Partitioned
    assert nn.get_partition_spec(variables)["params"]["w"] == PartitionSpec("in", None)


def test_frozen_variables_are_accepted():
    module = bridge.ToLinen(Block)
    variables = module.init(KEY, X)
    np.testing.assert_array_equal(module.apply(freeze(variables), X), Block(rngs=nnx.Rngs(KEY))(X))


def test_a_call_of_an_existing_program_raises_no_warning():
    module = bridge.ToLinen(nnx.Linear, args=(3, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        variables = module.init(KEY, X)
        module.apply(variables, X)
        jax.jit(module.apply)({"params": variables["params"]}, X)
