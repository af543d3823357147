"""Axis names of wrapped modules come and go under NNX transforms as natively and in Linen."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from tests._sharding.sharded_models import with_mesh
from tests.models import assert_identical
from tests.transforms.nnx_states import PARTITION, Partitioned, X

AxisType = jax.sharding.AxisType
MESHES = {
    "no_mesh": contextlib.nullcontext,
    "auto_mesh": lambda: jax.set_mesh(mesh_of(AxisType.Auto)),
    "with_mesh": lambda: with_mesh(mesh_of(AxisType.Auto)),
}


def mesh_of(axis_type):
    return jax.make_mesh((2, 2, 2), ("layers", "in", "out"), (axis_type,) * 3)


class Native(nnx.Module):
    """The native module with the values and names of `Partitioned`."""

    def __init__(self, rngs):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("in", "out"))
        bias = nnx.with_partitioning(nnx.initializers.ones, ("out",))
        self.Dense_0 = nnx.Linear(4, 4, kernel_init=kernel, bias_init=bias, rngs=rngs)

    def __call__(self, x):
        return self.Dense_0(x)


class Holder(nnx.Module):
    """An NNX module that holds a wrapped one and nothing else."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, x):
        return self.inner(x)


def make_wrapped(rngs):
    return bridge.ToNNX(Partitioned(), rngs).lazy_init(X)


def in_parent(rngs):
    return Holder(make_wrapped(rngs))


def linen_part(model):
    return model.inner if isinstance(model, Holder) else model


def names(model):
    """The axis names of kernel and bias, as the Variables say it."""
    inner = linen_part(model)
    found = inner.Dense_0
    get = (lambda n: found[n]) if isinstance(inner, bridge.ToNNX) else (lambda n: getattr(found, n))
    return tuple(get(name).get_metadata().get("out_sharding") for name in ("kernel", "bias"))


def made_by_vmap(make, axis, metadata):
    """Three layers, stacked at `axis` by vmap."""
    with nnx.use_eager_sharding(False):
        return nnx.vmap(
            lambda key: make(nnx.Rngs(key)),
            out_axes=nnx.StateAxes({nnx.Param: axis, ...: 0}),
            transform_metadata=metadata,
        )(jax.random.split(jax.random.key(0), 3))


def linen_layers(axis, metadata):
    return nn.vmap(
        Partitioned,
        variable_axes={"params": axis},
        split_rngs={"params": True},
        metadata_params=metadata,
        in_axes=None,
        axis_size=3,
    )()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("make", [make_wrapped, in_parent])
def test_layers_made_by_vmap_have_the_names_that_pure_linen_gives(make, axis, mesh):
    linen = linen_layers(axis, {nn.PARTITION_NAME: "layers"})
    expected = nn.get_partition_spec(jax.eval_shape(linen.init, jax.random.key(0), X))
    expected = expected["params"]["Dense_0"]
    with MESHES[mesh]():
        model = made_by_vmap(make, axis, PARTITION)
        specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model, nnx.Param)))
        linen_specs = nn.get_partition_spec(linen_part(model).linen_variables())
    assert specs.get("inner", specs)["Dense_0"] == expected
    assert linen_specs["params"]["Dense_0"] == expected


@pytest.mark.parametrize("metadata", [PARTITION, {nnx.PARTITION_NAME: None}, {}], ids=str)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_layers_made_by_vmap_have_native_names_and_shapes(axis, metadata):
    wrapped, native = (made_by_vmap(m, axis, metadata) for m in (make_wrapped, Native))
    assert names(wrapped) == names(native)
    assert wrapped.Dense_0["kernel"].shape == native.Dense_0.kernel.shape


def seen_inside(transform, model, axis, metadata):
    """(output, the names inside, the names afterwards) of a transform over stacked layers."""
    seen = []

    def body(h, layer):
        seen.append(names(layer))
        return layer(h)

    axes = nnx.StateAxes({nnx.Param: axis, ...: 0})
    if transform == "scan":
        run = nnx.scan(
            body, in_axes=(nnx.Carry, axes), out_axes=nnx.Carry, transform_metadata=metadata
        )
    else:
        run = nnx.vmap(body, in_axes=(None, axes), transform_metadata=metadata)
    if transform == "scan_in_jit":
        run = nnx.jit(run)
    with nnx.use_eager_sharding(False):
        return run(X, model), seen[0], names(model)


@pytest.mark.parametrize("mesh", ["no_mesh", "auto_mesh"])
@pytest.mark.parametrize("make", [make_wrapped, in_parent])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("transform", ["scan", "vmap", "scan_in_jit"])
def test_names_go_inside_a_transform_and_come_back_as_natively(transform, axis, make, mesh):
    with MESHES[mesh]():
        model, native = (made_by_vmap(m, axis, PARTITION) for m in (make, Native))
        before = names(model)
        output, inside, after = seen_inside(transform, model, axis, PARTITION)
        _, native_inside, native_after = seen_inside(transform, native, axis, PARTITION)
    assert before == after == native_after
    assert inside == native_inside == (("in", "out"), ("out",))
    kernel, bias = (
        linen_part(model).linen_variables()["params"]["Dense_0"][n].value for n in PARTS
    )
    layer = lambda h, p: h @ p[0] + p[1][None]  # noqa: E731
    layers = (jnp.moveaxis(kernel, axis, 0), jnp.moveaxis(bias, axis, 0))
    if transform == "scan":
        expected = jax.lax.scan(lambda h, p: (layer(h, p), None), X, layers)[0]
    else:
        expected = jax.vmap(layer, in_axes=(None, 0))(X, layers)
    # The mesh lets XLA sum in another order.
    assert jnp.allclose(output, expected, rtol=1e-5, atol=1e-6)


PARTS = ("kernel", "bias")


def test_stacked_layers_give_what_pure_linen_gives_bit_for_bit():
    module = linen_layers(0, {nn.PARTITION_NAME: "layers"})
    model = made_by_vmap(make_wrapped, 0, PARTITION)
    inner = model.linen_variables()["params"]
    name = next(iter(jax.eval_shape(module.init, jax.random.key(0), X)["params"]))
    assert name == "Dense_0"
    run = nnx.vmap(lambda m, x: m(x), in_axes=(0, None), transform_metadata=PARTITION)
    assert_identical(run(model, X), module.apply({"params": inner}, X))


@pytest.mark.parametrize("axis", [0, 1])
def test_metadata_transforms_in_tree_mode_as_natively(axis):
    with nnx.set_graph_mode(False), nnx.use_eager_sharding(False):
        seen = []

        def make(kind, key):
            return kind(nnx.Rngs(key))

        def call(model):
            seen.append(names(model))
            return model(X)

        for kind in (make_wrapped, Native):
            maker = nnx.transform_metadata(
                functools.partial(make, kind), in_axes=None, out_axes=0, partition="layers"
            )
            model = nnx.vmap(maker)(jax.random.split(jax.random.key(0), 3))
            seen.append(names(model))
            run = nnx.transform_metadata(call, in_axes=0, partition="layers")
            seen.append(nnx.vmap(run)(model).shape)
            seen.append(names(model))
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
    assert seen[0] == (("layers", "in", "out"), ("layers", "out"))


def test_a_wrong_axis_name_raises_what_the_native_module_raises():
    for make in (make_wrapped, Native):
        model = made_by_vmap(make, 0, PARTITION)
        with pytest.raises(ValueError, match="Expected to remove 'other' at index 0"):
            seen_inside("vmap", model, 0, {nnx.PARTITION_NAME: "other"})


@pytest.mark.parametrize("eager", [True, False])
def test_a_wrapped_module_is_sharded_at_once_where_native_ones_are(eager):
    with nnx.use_eager_sharding(eager), jax.set_mesh(mesh_of(AxisType.Auto)):
        model, native = make_wrapped(nnx.Rngs(0)), Native(nnx.Rngs(0))
        kernel = model.Dense_0["kernel"].get_value()
        assert kernel.sharding.is_fully_replicated is not eager
        assert eager is False or kernel.sharding == native.Dense_0.kernel.get_value().sharding
        assert nnx.use_eager_sharding.current_value() is eager
    assert names(model) == (("in", "out"), ("out",))


def test_a_wrapped_module_is_called_with_explicit_axes_unlike_linen():
    """Linen constrains what it unboxes, and Explicit axes make that a check."""
    module = Partitioned()
    variables = module.init(jax.random.key(0), X)
    model = bridge.ToNNX.from_variables(module, variables)
    expected = module.apply(variables, X)
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        with pytest.raises(AssertionError, match="acts as an assert"):
            module.apply(variables, X)
        assert_identical(model(X), expected)
    assert_identical(model.linen_variables(), variables)
