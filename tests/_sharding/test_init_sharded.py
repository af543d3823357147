"""`init_sharded`: every array in its annotated shards, with the values of a native init."""

import contextlib
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import bridge
from tests._sharding.sharded_models import (
    AXIS_TYPES,
    BUILDS,
    KEY,
    RULES,
    LinenStack,
    NNXStack,
    X,
    computed_by_hand,
    expected_sharding,
    leaves_by_path,
    linen_init,
    mesh,
    nnx_init,
    shard_shape,
    uniform,
    variables_of,
    with_mesh,
)
from tests.models import assert_close, assert_identical

EVERY_BUILD = pytest.mark.parametrize("name", BUILDS)
EVERY_MESH = pytest.mark.parametrize("kind", AXIS_TYPES)


@functools.cache
def made(name, kind="auto"):
    make, rngs, _ = BUILDS[name]
    return bridge.init_sharded(make("mesh"), mesh(kind), X, rngs=rngs)


def assert_sharded(model, specs, on):
    leaves = leaves_by_path(model)
    assert leaves.keys() >= specs.keys()
    for path, leaf in leaves.items():
        expected = expected_sharding(specs, path, on)
        assert leaf.sharding.is_equivalent_to(expected, leaf.ndim), (path, leaf.sharding)
        assert leaf.sharding.mesh == on


@EVERY_BUILD
@EVERY_MESH
def test_every_array_has_the_sharding_of_its_annotation(name, kind):
    assert_sharded(made(name, kind), BUILDS[name][2], mesh(kind))


@EVERY_BUILD
def test_a_device_holds_its_shard_and_no_more(name):
    specs = BUILDS[name][2]
    for path, leaf in leaves_by_path(made(name)).items():
        shape = shard_shape(leaf.shape, specs.get(path, P()))
        assert [shard.data.shape for shard in leaf.addressable_shards] == [shape] * 8


@EVERY_MESH
def test_the_values_are_those_of_pure_linen_bit_for_bit(kind):
    expected = nn.unbox(jax.jit(LinenStack().init)(KEY, X))
    assert_identical(nn.unbox(made("ToNNX", kind).linen_variables()), expected)


@EVERY_MESH
def test_the_values_are_those_of_pure_nnx_bit_for_bit(kind):
    variables = nn.unbox(made("ToLinen", kind))
    types = {"params": nnx.Param, "batch_stats": nnx.BatchStat, "RngKey": nnx.RngKey}
    for collection, var_type in types.items():
        expected = nnx.to_pure_dict(nnx.filter_state(native_stack(), var_type))
        assert_identical(variables[collection], expected)


@functools.cache
def native_stack():
    with nnx.use_eager_sharding(False):
        return jax.jit(lambda key: nnx.state(NNXStack(rngs=nnx.Rngs(key))))(KEY)


@pytest.mark.parametrize("name", ["NNX holding ToNNX", "ToLinen of NNX holding ToNNX"])
@EVERY_MESH
def test_in_a_mixture_each_part_has_the_values_of_its_own_library(name, kind):
    model = made(name, kind)
    rngs = nnx.Rngs(KEY)
    # A wrapper takes a fork of the streams that it is given.
    stack = jax.jit(LinenStack().init)({"params": rngs.fork().default()}, X)
    with nnx.use_eager_sharding(False):
        last = nnx.Linear(16, 8, kernel_init=nnx_init("mesh", uniform, "embed", "mlp"), rngs=rngs)
    last = nnx.to_pure_dict(nnx.state(last))
    expected = {"stack": nn.unbox(stack["params"]), "last": last}
    assert_identical(variables_of(model)["params"], expected)


# With both types of axes, native Linen cannot read what is in its own boxes: JAX refuses to
# constrain over an Explicit axis. So no native Linen module is in these.
READABLE = {
    "auto": ("ToLinen", "NNX holding ToNNX", "Linen holding ToLinen"),
    "explicit": BUILDS,
    "mixed": ("ToNNX", "ToLinen of NNX holding ToNNX"),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for kind in AXIS_TYPES for name in READABLE[kind]],
)
def test_a_sharded_model_computes_what_pure_linen_computes_on_one_device(name, kind):
    model = made(name, kind)
    with jax.set_mesh(mesh(kind)):
        ours = forward(name)(model, X)
    # The sums over sharded dimensions are made in another order.
    np.testing.assert_allclose(ours, computed_by_hand(model, X), rtol=1e-5, atol=1e-6)


def forward(name):
    build = BUILDS[name][0]("mesh")
    if isinstance(build, nn.Module):
        return jax.jit(build.apply)
    return nnx.jit(lambda model, x: model(x))


def test_it_can_be_called_inside_of_a_mesh_used_as_a_context():
    name = "NNX holding ToNNX"
    make, rngs, specs = BUILDS[name]
    with with_mesh(mesh()):
        model = bridge.init_sharded(make("mesh"), mesh(), X, rngs=rngs)
        ours = forward(name)(model, X)
    assert_sharded(model, specs, mesh())
    np.testing.assert_allclose(ours, computed_by_hand(model, X), rtol=1e-5, atol=1e-6)


@EVERY_BUILD
@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("argument", "auto"),
        ("dict", "auto"),
        ("context", "auto"),
        ("box", "auto"),
        ("context", "explicit"),
    ],
)
def test_logical_names_are_mapped_by_rules_wherever_these_are_given(name, given, kind):
    make, rngs, specs = BUILDS[name]
    build = make("own rules" if given == "box" else "logical")
    in_force = nn.logical_axis_rules(RULES if given == "context" else ())
    with in_force:
        rules = {"argument": RULES, "dict": dict(RULES)}.get(given)
        model = bridge.abstract(build, mesh(kind), X, rngs=rngs, rules=rules)
    assert_sharded(model, specs, mesh(kind))


@EVERY_BUILD
def test_the_rules_are_applied_once(name):
    """Each rule's right side is the left side of another: a second application would show."""
    make, rngs, specs = BUILDS[name]
    axes = {"data": "model", "model": "data", "embed": "model", "mlp": "data"}
    rules = (*axes.items(), ("both", ("model", "data")), ("layers", None))
    swapped = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
    model = bridge.abstract(make("logical"), swapped, X, rngs=rngs, rules=rules)
    turned = {
        path: P(*(axes.get(e, e) if not isinstance(e, tuple) else e[::-1] for e in spec))
        for path, spec in specs.items()
    }
    assert_sharded(model, turned, swapped)


@pytest.mark.parametrize("given", ["argument", "context"])
def test_rules_given_as_an_argument_come_before_those_in_force(given):
    make, rngs, specs = BUILDS["ToNNX"]
    others = (("embed", "model"), ("mlp", "data"), ("both", None))
    with nn.logical_axis_rules(others if given == "argument" else RULES):
        rules = RULES if given == "argument" else None
        model = bridge.abstract(make("logical"), mesh(), X, rngs=rngs, rules=rules)
    assert_sharded(model, specs, mesh())


@pytest.mark.parametrize("style", ["mesh", "logical", "own rules"])
def test_the_specs_are_those_that_pure_linen_computes(style):
    module = LinenStack(style)
    specs = nn.get_partition_spec(jax.eval_shape(module.init, KEY, X))
    rules = None if style == "mesh" else RULES
    specs = nn.logical_to_mesh(specs, rules) if rules else specs
    ours = bridge.abstract(module, mesh(), X, rngs=KEY, rules=rules)
    found = jax.tree.map(lambda leaf: leaf.sharding.spec, nn.unbox(ours))
    assert found == specs


def test_a_function_is_given_keys_by_stream_name():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(rngs.params.uniform((8, 16)), out_sharding=("data", "model"))
            self.noise = nnx.Param(rngs.noise.uniform((8,)))

    keys = {"params": jax.random.key(1), "noise": jax.random.key(2)}
    model = bridge.init_sharded(Model, mesh(), rngs=keys)
    with nnx.use_eager_sharding(False):
        assert_identical(values(model), values(Model(nnx.Rngs(**keys))))
    assert_sharded(model, {"kernel": P("data", "model")}, mesh())


def values(model):
    return nnx.to_pure_dict(nnx.state(model))


class Tower(nn.Module):
    """Two methods that make different variables, and an argument that is no array."""

    def setup(self):
        kernel = linen_init("mesh", uniform, "embed", "mlp")
        self.one = nn.Dense(8, kernel_init=kernel)
        self.two = nn.Dense(16, kernel_init=kernel)

    def __call__(self, x, *, train):
        if not isinstance(train, bool):
            raise TypeError(train)
        return self.one(x)

    def other(self, x):
        return self.two(x)


@pytest.mark.parametrize("abstractly", [False, True], ids=["arrays", "abstract"])
def test_inputs_may_be_shapes_alone_and_static_values(abstractly):
    x = jax.ShapeDtypeStruct(X.shape, X.dtype) if abstractly else X
    variables = bridge.init_sharded(Tower(), mesh(), x, train=True, rngs=KEY)
    assert_identical(nn.unbox(variables), nn.unbox(Tower().init(KEY, X, train=True)))
    assert_sharded(variables, {"one/kernel": P("data", "model")}, mesh())
    model = bridge.init_sharded(lambda: bridge.ToNNX(Tower(), KEY), mesh(), x, train=True)
    assert_identical(nn.unbox(model.linen_variables()), nn.unbox(variables))
    assert_sharded(model, {"one/kernel": P("data", "model")}, mesh())


@pytest.mark.parametrize("method", ["other", Tower.other], ids=["name", "function"])
def test_another_method_of_a_linen_module_can_be_initialised(method):
    variables = bridge.init_sharded(Tower(), mesh(), X, method=method, rngs=KEY)
    assert_identical(nn.unbox(variables), nn.unbox(Tower().init(KEY, X, method=method)))
    assert_sharded(variables, {"two/kernel": P("data", "model")}, mesh())


def test_another_method_of_an_nnx_model_can_be_initialised():
    class Model(nnx.Module):
        def __init__(self):
            self.inner = bridge.ToNNX(Tower(), KEY)

        def encode(self, x):
            return self.inner(x, method="other")

    model = bridge.init_sharded(Model, mesh(), X, method="encode")
    expected = nn.unbox(Tower().init(KEY, X, method="other"))
    assert_identical(nn.unbox(model.inner.linen_variables()), expected)
    assert_sharded(model, {"inner/two/kernel": P("data", "model")}, mesh())


def test_an_instance_is_left_as_it_is():
    given = bridge.ToNNX(Tower(), nnx.Rngs(0))
    streams = nnx.to_pure_dict(nnx.state(given))
    model = bridge.init_sharded(given, mesh(), X, train=True)
    assert model is not given
    assert_identical(nnx.to_pure_dict(nnx.state(given)), streams)
    expected = bridge.lazy_init(bridge.ToNNX(Tower(), nnx.Rngs(0)), X, train=True)
    assert_identical(values(model), values(expected))
    assert_sharded(model, {"one/kernel": P("data", "model")}, mesh())


def test_the_mesh_need_not_have_all_axes_in_use_nor_all_devices():
    small = jax.make_mesh(
        (2, 1, 2), ("data", "idle", "model"), (AxisType.Auto,) * 3, devices=jax.devices()[4:8]
    )
    variables = bridge.init_sharded(Tower(), small, X, train=True, rngs=KEY)
    assert_sharded(variables, {"one/kernel": P("data", "model")}, small)
    kernel = nn.unbox(variables)["params"]["one"]["kernel"]
    assert kernel.sharding.device_set == set(jax.devices()[4:8])


class SpeaksOfItsAxes(nnx.Module):
    """A model that only a mesh with Explicit axes can make."""

    def __init__(self, rngs):
        kernel = jax.random.uniform(rngs(), (8, 16), out_sharding=P("data", "model"))
        self.kernel = nnx.Param(kernel, out_sharding=("data", "model"))

    def __call__(self, x):
        return x @ self.kernel


def test_a_model_that_speaks_of_explicit_axes_is_made_with_them():
    on = mesh("explicit")
    model = bridge.init_sharded(SpeaksOfItsAxes, on, rngs=KEY)
    assert_identical(
        np.asarray(model.kernel), np.asarray(jax.random.uniform(nnx.Rngs(KEY)(), (8, 16)))
    )
    assert_sharded(model, {"kernel": P("data", "model")}, on)


@nn.logical_axis_rules((("embed", "model"),))
def test_threads_with_rules_of_their_own_do_not_disturb_each_other():
    class Model(nnx.Module):
        def __init__(self, rngs):
            barrier.wait(timeout=60)
            kernel = nn.with_logical_partitioning(uniform, ("embed", "mlp"))
            self.dense = bridge.ToNNX(nn.Dense(8, kernel_init=kernel), rngs)

        def __call__(self, x):
            return self.dense(x)

    def run(place, rules):
        with contextlib.suppress(threading.BrokenBarrierError):
            found[place] = bridge.init_sharded(Model, mesh(), X, rules=rules, rngs=KEY)

    barrier = threading.Barrier(2)
    found = {}
    rules = [(("embed", "data"), ("mlp", "model")), (("embed", None), ("mlp", "data"))]
    threads = [threading.Thread(target=run, args=item) for item in enumerate(rules)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_sharded(found[0], {"dense/kernel": P("data", "model")}, mesh())
    assert_sharded(found[1], {"dense/kernel": P(None, "data")}, mesh())
    assert nn.get_logical_axis_rules() == (("embed", "model"),)


def _closing(table):
    class Closing(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.linear(x) * jnp.broadcast_to(table, (len(x), 3))

    return Closing


def _keeping(keep):
    class Keeping(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 3, rngs=rngs)
            self.kept = keep(jnp.broadcast_to(jnp.arange(3.0), (len(X), 3)))

        def __call__(self, x):
            kept = self.kept
            is_array = isinstance(kept, jax.Array | nnx.Variable)
            return self.linear(x) * kept if is_array else kept(self.linear(x))

    return Keeping


CONSTANTS = {
    "closed over": lambda: _closing(jnp.arange(3.0)),
    "attribute": lambda: _keeping(lambda table: table),
    "Variable": lambda: _keeping(nnx.BatchStat),
    "function": lambda: _keeping(lambda table: lambda y: y * table),
    "partial": lambda: _keeping(lambda table: functools.partial(jnp.multiply, table)),
}


# Axes of one type each take turns.
CONSTANT_CASES = [
    (kind, name, is_inside)
    for row, name in enumerate(CONSTANTS)
    for kind, is_inside in (
        ("explicit", False),
        ("explicit", True),
        (("auto", "mixed")[row % 2], row > 1),
    )
]


@pytest.mark.parametrize(("kind", "name", "is_inside"), CONSTANT_CASES)
def test_a_constant_of_the_model_belongs_to_the_mesh_that_it_is_used_in(kind, name, is_inside):
    """Regression: those of the definition were arrays of a mesh with other types of axes."""
    on = mesh(kind)
    with jax.set_mesh(on) if is_inside else contextlib.nullcontext():
        model_class = CONSTANTS[name]()
        key, x = jax.random.key(3), jnp.asarray(X[:, :8])
    expected = model_class(rngs=nnx.Rngs(key))(x) if not is_inside else None
    with jax.set_mesh(on):
        native = model_class(rngs=nnx.Rngs(key))(x)
    if expected is not None:
        assert_identical(native, expected)
    model = bridge.to_linen(model_class)
    with jax.set_mesh(on) if is_inside else contextlib.nullcontext():
        variables = bridge.init_sharded(model, on, x, rngs=key)
        assert_close(model.apply(variables, x), native)
    with jax.set_mesh(on):
        assert_close(model.apply(variables, x), native)
        assert_close(jax.jit(model.apply)(variables, x), native)
    if name not in ("function", "partial"):
        # What NNX keeps of a trace in something static is lost natively too.
        made = bridge.init_sharded(model_class, on, rngs=key)
        with jax.set_mesh(on):
            assert_close(made(x), native)


@EVERY_MESH
def test_a_linen_module_may_close_over_an_array_of_the_mesh(kind):
    """Regression: a ToNNX made its variables with all axes Auto, to which the array is foreign."""
    on = mesh(kind)
    with jax.set_mesh(on):
        table, x = jnp.ones((len(X), 3)) * 2, jnp.ones((len(X), 8))

        class Closing(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(3)(x) * table

        expected = Closing().init_with_output(KEY, x)
        model = bridge.ToNNX(Closing(), KEY).lazy_init(x)
        assert_identical((model(x), model.linen_variables()), expected)
        variables = bridge.init_sharded(Closing(), on, x, rngs=KEY)
        assert_close(Closing().apply(variables, x), expected[0])
