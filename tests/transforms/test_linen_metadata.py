"""Axis names of partitioned variables under Linen transforms of `ToLinen`, with and without mesh.

Pure Linen is the reference wherever it can say where the axis goes. For negative axes flax 0.12.8
cannot (its box inserts -1 before the last axis, and its own removal then fails), so there the
reference is the array's true axis.
"""

import contextlib

import flax
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import bridge
from tests.models import assert_identical
from tests.transforms.linen_states import (
    FEATURES,
    LAYER_AXIS,
    LinenPartitioned,
    Partitioned,
    specs,
    stepping,
)

KEY = jax.random.key(0)
LENGTH = 2
X = jax.random.normal(jax.random.key(1), (LENGTH, 2, FEATURES))


class LinenBoxed(nnx.Module):
    """Its kernel is in a box of Linen's own, not of NNX."""

    def __init__(self, *, rngs):
        normal = nnx.initializers.normal()
        self.linear = nnx.Linear(
            FEATURES,
            FEATURES,
            kernel_init=bridge.with_partitioning(normal, ("in", "out")),
            bias_init=bridge.with_partitioning(normal, ("out",)),
            rngs=rngs,
        )

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Averaged(nnx.Module):
    """Partitioned state that every call updates."""

    def __init__(self, *, rngs):
        self.scale = nnx.Param(jnp.ones(FEATURES), out_sharding=("out",))
        self.mean = nnx.BatchStat(jnp.zeros(FEATURES), out_sharding=("out",))

    def __call__(self, x):
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * x.mean(0)
        return x * jnp.broadcast_to(self.scale[...], x.shape)


class LinenAveraged(nn.Module):
    @nn.compact
    def __call__(self, x):
        ones = nn.with_partitioning(nn.initializers.ones, ("out",))
        zeros = nn.with_partitioning(lambda: jnp.zeros(FEATURES), ("out",))
        scale = self.param("scale", ones, (FEATURES,))
        mean = self.variable("batch_stats", "mean", zeros)
        if not self.is_initializing():
            mean.value = 0.5 * mean.value + 0.5 * x.mean(0)
        return x * jnp.broadcast_to(scale, x.shape)


def lifted(transform, cls, axis, params, **fields):
    """The class transformed so that parameters and statistics get a new axis; and its inputs."""
    axes = {"params": axis, "batch_stats": axis}
    options = {"variable_axes": axes, "split_rngs": {"params": True}, "metadata_params": params}
    if transform == "vmap":
        return nn.vmap(cls, **options)(**fields), (X,)
    return nn.scan(cls, **options, length=LENGTH)(**fields), (X[0], None)


def bridged(transform, nnx_class, axis, params):
    cls = nnx_class if transform == "vmap" else stepping(nnx_class)
    return lifted(transform, bridge.ToLinen, axis, params, nnx_class=cls)


def twin(transform, linen_class, axis, params):
    cls = linen_class if transform == "vmap" else stepping(linen_class)
    return lifted(transform, cls, axis, params)


@pytest.fixture(params=["no_mesh", "mesh"], autouse=True)
def mesh(request):
    """Without a mesh nothing is sharded, with one everything is."""
    with contextlib.ExitStack() as stack:
        if request.param == "no_mesh":
            stack.enter_context(nnx.use_eager_sharding(False))
            yield None
        else:
            auto = (jax.sharding.AxisType.Auto,) * 3
            devices = jax.devices()[:8]
            made = jax.make_mesh((2, 2, 2), ("layers", "in", "out"), auto, devices=devices)
            stack.enter_context(jax.set_mesh(made))
            yield made


@pytest.mark.parametrize("transform", ["vmap", "scan"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("nnx_class", [Partitioned, LinenBoxed])
def test_a_new_axis_is_named_where_pure_linen_names_it(transform, axis, nnx_class):
    module, inputs = bridged(transform, nnx_class, axis, LAYER_AXIS)
    reference, _ = twin(transform, LinenPartitioned, axis, LAYER_AXIS)
    variables = module.init(KEY, *inputs)
    own = {"params": variables["params"]}
    expected = reference.init(KEY, *inputs)
    assert specs(own) == specs(expected)
    assert jax.tree.map(jnp.shape, nn.unbox(own)) == jax.tree.map(jnp.shape, nn.unbox(expected))
    given = flax.core.meta.replace_boxed(expected, nn.unbox(own))
    assert_identical(module.apply(variables, *inputs), reference.apply(given, *inputs))
    assert_identical(module.apply(own, *inputs), reference.apply(given, *inputs))


@pytest.mark.parametrize("transform", ["vmap", "scan"])
@pytest.mark.parametrize("axis", [0, 1])
def test_an_updated_variable_keeps_the_names_that_pure_linen_keeps(transform, axis):
    module, inputs = bridged(transform, Averaged, axis, LAYER_AXIS)
    reference, _ = twin(transform, LinenAveraged, axis, LAYER_AXIS)
    variables, expected = module.init(KEY, *inputs), reference.init(KEY, *inputs)
    for _ in range(2):
        y, updates = module.apply(variables, *inputs, mutable=["batch_stats"])
        expected_y, expected_updates = reference.apply(expected, *inputs, mutable=["batch_stats"])
        assert specs(updates) == specs(expected_updates)
        assert_identical(nn.unbox((y, updates)), nn.unbox((expected_y, expected_updates)))
        variables, expected = variables | updates, expected | expected_updates


@pytest.mark.parametrize("transform", ["vmap", "scan"])
def test_a_last_axis_is_named_where_the_array_has_it(transform):
    module, inputs = bridged(transform, Partitioned, -1, LAYER_AXIS)
    variables = module.init(KEY, *inputs)
    kernel = variables["params"]["linear"]["kernel"]
    assert kernel.value.shape == (FEATURES, FEATURES, LENGTH)
    assert kernel.get_partition_spec() == P("in", "out", "layers")
    bias = variables["params"]["linear"]["bias"]
    assert bias.value.shape == (FEATURES, LENGTH)
    assert bias.get_partition_spec() == P("out", "layers")
    first, _ = bridged(transform, Partitioned, 0, LAYER_AXIS)
    moved = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), nn.unbox(variables["params"]))
    assert_identical(
        module.apply(variables, *inputs),
        first.apply({"params": moved}, *inputs),
    )


@pytest.mark.parametrize("transform", ["vmap", "scan"])
@pytest.mark.parametrize(
    ("axis", "spec"),
    [(0, P(None, "in", "out")), (1, P("in", None, "out")), (-1, P("in", "out", None))],
)
def test_without_a_name_the_new_axis_is_unpartitioned(transform, axis, spec):
    """Where pure Linen's box refuses: an NNX Variable's axes need no names."""
    module, inputs = bridged(transform, Partitioned, axis, {})
    variables = module.init(KEY, *inputs)
    assert variables["params"]["linear"]["kernel"].get_partition_spec() == spec
    module.apply(variables, *inputs)


@pytest.mark.parametrize("transform", ["vmap", "scan"])
def test_a_linen_box_without_a_name_is_refused_as_in_pure_linen(transform):
    for make, cls in ((twin, LinenPartitioned), (bridged, LinenBoxed)):
        module, inputs = make(transform, cls, 0, {})
        with pytest.raises(flax.errors.PartitioningUnspecifiedError):
            module.init(KEY, *inputs)


def test_remat_scan_adds_one_unnamed_axis_for_each_level():
    """It takes no metadata_params."""
    module = nn.remat_scan(bridge.ToLinen, lengths=(2, 1))(Partitioned)
    variables = module.init(KEY, X[0])
    assert specs(variables["params"]) == {
        "['linear']['bias']": P(None, None, "out"),
        "['linear']['kernel']": P(None, None, "in", "out"),
    }
    module.apply(variables, X[0])


@pytest.mark.parametrize("axis", [0, 1])
def test_add_metadata_axis_renames_without_touching_the_values(axis):
    def renamed(cls, **fields):
        return nn.add_metadata_axis(
            cls, variable_axes={"params": axis}, metadata_params=LAYER_AXIS
        )(**fields)

    module, reference = renamed(bridge.ToLinen, nnx_class=Partitioned), renamed(LinenPartitioned)
    # The names are those of arrays with one more axis, which these are not: shapes only.
    with nnx.use_eager_sharding(False):
        variables = jax.eval_shape(module.init, KEY, X[0])
        expected = jax.eval_shape(Unconstrained(reference).init, KEY, X[0])
    assert specs(variables["params"]) == specs(expected["params"]["wrapped"])


class Unconstrained(nn.Module):
    """Holds another module."""

    wrapped: nn.Module

    def __call__(self, x):
        return self.wrapped(x)


def test_nested_transforms_add_their_names_from_inside_to_outside():
    def nested(cls, **fields):
        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        inner = nn.scan(cls, **options, length=LENGTH, metadata_params=LAYER_AXIS)
        outer = nn.vmap(
            inner, **options, in_axes=(0, None), metadata_params={nn.PARTITION_NAME: None}
        )
        return outer(**fields)

    module = nested(bridge.ToLinen, nnx_class=stepping(Partitioned))
    reference = nested(stepping(LinenPartitioned))
    variables, expected = module.init(KEY, X, None), reference.init(KEY, X, None)
    assert specs(variables["params"]) == specs(expected["params"])
    given = flax.core.meta.replace_boxed(expected, {"params": nn.unbox(variables["params"])})
    assert_identical(module.apply(variables, X, None), reference.apply(given, X, None))


@pytest.mark.parametrize("mesh", ["mesh"], indirect=True)
def test_stacked_layers_are_created_in_their_shards(mesh):
    module, inputs = bridged("scan", Partitioned, 0, LAYER_AXIS)
    abstract = jax.eval_shape(module.init, KEY, *inputs)
    shardings = nn.get_sharding(abstract, mesh)
    variables = jax.jit(module.init, out_shardings=shardings)(KEY, *inputs)
    kernel = variables["params"]["linear"]["kernel"].value
    assert kernel.sharding.spec == P("layers", "in", "out")
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(1, 2, 2)}
    reference, _ = twin("scan", LinenPartitioned, 0, LAYER_AXIS)
    given = flax.core.meta.replace_boxed(
        reference.init(KEY, *inputs), {"params": nn.unbox(variables["params"])}
    )
    assert_identical(
        jax.jit(module.apply)(variables, *inputs), jax.jit(reference.apply)(given, *inputs)
    )
