"""Each wrapper chooses if annotated variables are sharded as soon as they are made."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import bridge
from tests._sharding.sharded_models import AXIS_TYPES, KEY, linen_init, mesh, with_mesh
from tests.models import assert_identical

X = jnp.ones((2, 8))


def numbered(key, shape, dtype=jnp.float32):
    """An initializer that compiles nothing for each mesh."""
    return jnp.asarray(np.arange(np.prod(shape)).reshape(shape), dtype)


KERNEL = linen_init("mesh", numbered, "embed", "mlp")
DENSE = nn.Dense(16, use_bias=False, kernel_init=KERNEL)
LOGICAL = nn.Dense(
    16, use_bias=False, kernel_init=linen_init("own rules", numbered, "embed", "mlp")
)
SHARDED, WHOLE = P("data", "model"), P()


class Native(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(numbered, ("data", "model"))
        self.dense = nnx.Linear(8, 16, use_bias=False, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return self.dense(x)


def lazily(variables, **options):
    return bridge.lazy_init(bridge.ToNNX(DENSE, KEY, **options), X)


def taken_in(variables, **options):
    return bridge.ToNNX.from_variables(DENSE, variables, **options)


def logical(variables, **options):
    return bridge.lazy_init(bridge.ToNNX(LOGICAL, KEY, **options), X)


MAKERS = {"lazy_init": lazily, "from_variables": taken_in, "logical names": logical}


def assert_is(array, spec, on):
    assert array.sharding.is_equivalent_to(NamedSharding(on, spec), array.ndim), array.sharding


@pytest.mark.parametrize("compiled", [False, True], ids=["eagerly", "in jit"])
@pytest.mark.parametrize("kind", AXIS_TYPES)
@pytest.mark.parametrize("maker", MAKERS)
def test_with_the_option_a_wrapper_has_its_variables_in_shards(maker, kind, compiled):
    variables = DENSE.init(KEY, X)
    make = lambda variables: MAKERS[maker](variables, eager_sharding=True)  # noqa: E731
    with jax.set_mesh(mesh(kind)):
        model = (nnx.jit(make) if compiled else make)(variables)
    assert_is(model.kernel[...], SHARDED, mesh(kind))
    assert {shard.data.shape for shard in model.kernel[...].addressable_shards} == {(4, 4)}
    assert_identical(
        np.asarray(model.kernel[...]), np.asarray(nn.unbox(variables)["params"]["kernel"])
    )


@pytest.mark.parametrize("maker", MAKERS)
def test_the_option_works_where_the_mesh_is_used_as_a_context(maker):
    variables = DENSE.init(KEY, X)
    with with_mesh(mesh()):
        model = MAKERS[maker](variables, eager_sharding=True)
    assert_is(model.kernel[...], SHARDED, mesh())


@pytest.mark.parametrize("compiled", [False, True], ids=["eagerly", "in jit"])
@pytest.mark.parametrize("kind", AXIS_TYPES)
@pytest.mark.parametrize("maker", MAKERS)
def test_by_default_a_wrapper_has_its_variables_in_shards_as_natively(maker, kind, compiled):
    variables = DENSE.init(KEY, X)
    with jax.set_mesh(mesh(kind)):
        model = (nnx.jit(MAKERS[maker]) if compiled else MAKERS[maker])(variables)
        if kind != "mixed":
            native = (nnx.jit(Native) if compiled else Native)(nnx.Rngs(0)).dense.kernel[...]
            assert model.kernel[...].sharding == native.sharding
    assert_is(model.kernel[...], SHARDED, mesh(kind))
    assert model.kernel.get_metadata()["out_sharding"] in (("data", "model"), ("embed", "mlp"))
    assert_identical(
        np.asarray(model.kernel[...]), np.asarray(nn.unbox(variables)["params"]["kernel"])
    )


@pytest.mark.parametrize("maker", MAKERS)
def test_by_default_a_mesh_used_as_a_context_counts(maker):
    variables = DENSE.init(KEY, X)
    with with_mesh(mesh()):
        model = MAKERS[maker](variables)
        linen = bridge.ToLinen(Native).init(KEY, X)
    assert_is(model.kernel[...], SHARDED, mesh())
    assert_is(linen["params"]["dense"]["kernel"].value, SHARDED, mesh())


def whole(array):
    return {shard.data.shape for shard in array.addressable_shards} == {array.shape}


@pytest.mark.parametrize("kind", AXIS_TYPES)
@pytest.mark.parametrize("maker", MAKERS)
def test_nothing_is_sharded_where_the_wrapper_or_flax_says_so(maker, kind):
    variables = DENSE.init(KEY, X)
    with jax.set_mesh(mesh(kind)):
        told = MAKERS[maker](variables, eager_sharding=False)
        with nnx.use_eager_sharding(False):
            by_flax = MAKERS[maker](variables)
            both = MAKERS[maker](variables, eager_sharding=True)
            native = Native(nnx.Rngs(0)).dense.kernel[...]
    assert whole(native)
    assert whole(told.kernel[...])
    assert whole(by_flax.kernel[...])
    assert_is(both.kernel[...], SHARDED, mesh(kind))


class Named(nnx.Module):
    """Two Variables, one of them with names that the mesh does not have."""

    def __init__(self, names, rngs):
        init = nnx.with_partitioning(numbered, names)
        self.other = nnx.Param(init(rngs.params(), (8, 16)))
        self.dense = nnx.Linear(8, 16, use_bias=False, kernel_init=KERNEL_OF_MESH, rngs=rngs)

    def __call__(self, x):
        return self.dense(x)


KERNEL_OF_MESH = nnx.with_partitioning(numbered, ("data", "model"))
FOREIGN = [("stage", "expert"), ("data", "expert"), (None, "embed")]


@pytest.mark.parametrize("names", FOREIGN, ids=str)
@pytest.mark.parametrize("context", [*AXIS_TYPES, "with"])
def test_a_leaf_whose_names_are_no_axes_of_the_mesh_is_left_as_it_is(names, context):
    foreign = nn.Partitioned(jnp.ones((8, 16)), names)
    variables = DENSE.init(KEY, X)
    variables = {"params": {**variables["params"], "other": foreign}}
    on = mesh("auto" if context == "with" else context)
    with with_mesh(on) if context == "with" else jax.set_mesh(on):
        model = bridge.ToNNX.from_variables(DENSE, variables)
        linen = bridge.ToLinen(Named, args=(names,)).init(KEY, X)["params"]
        with pytest.raises(bridge.ShardingError, match="no axis"):
            bridge.ToNNX.from_variables(DENSE, variables, eager_sharding=True)
    assert_is(model.kernel[...], SHARDED, on)
    assert_is(linen["dense"]["kernel"].value, SHARDED, on)
    assert whole(model.other[...])
    assert whole(linen["other"].value)
    assert model.other.get_metadata()["out_sharding"] == names
    assert linen["other"].metadata["out_sharding"] == names
    assert linen["other"].metadata["eager_sharding"] is True


def test_names_are_axes_of_the_mesh_after_the_rules():
    init = nnx.with_partitioning(numbered, ("embed", "mlp"))
    linen = nn.Dense(16, kernel_init=linen_init("logical", numbered, "embed", "mlp"))
    variables = linen.init(KEY, X)
    with jax.set_mesh(mesh()):
        assert whole(bridge.ToNNX.from_variables(linen, variables).kernel[...])
        with nn.logical_axis_rules([("embed", "data"), ("mlp", "model")]):
            models = [
                nnx.Linear(8, 16, kernel_init=init, rngs=nnx.Rngs(0)),
                bridge.ToNNX.from_variables(linen, variables),
                bridge.lazy_init(bridge.ToNNX(linen, KEY), X),
            ]
    for model in models:
        assert_is(model.kernel[...], SHARDED, mesh())


class Late(nn.Module):
    """A module that creates an annotated variable in a later call."""

    @nn.compact
    def __call__(self, x, late):
        if late:
            self.variable(
                "cache", "k", lambda: nn.Partitioned(jnp.ones((8, 16)), ("data", "model"))
            )
        return x


def test_an_annotated_variable_that_a_call_creates_is_sharded_too():
    model = bridge.lazy_init(bridge.ToNNX(Late(), mutable=["cache"]), X, False)
    with jax.set_mesh(mesh()):
        model(X, True)
    assert_is(model.k[...], SHARDED, mesh())


def test_abstract_variables_are_taken_in_as_they_are():
    shapes = jax.eval_shape(DENSE.init, KEY, X)
    with jax.set_mesh(mesh()):
        model = bridge.ToNNX.from_variables(DENSE, shapes)
        abstract = jax.eval_shape(lambda: nnx.state(lazily(None)))
    assert model.kernel.get_value() == shapes["params"]["kernel"].value
    assert abstract["kernel"].get_value().shape == (8, 16)


def test_by_default_an_annotation_that_cannot_divide_is_an_error():
    odd = nn.Dense(15, kernel_init=KERNEL)
    variables = odd.init(KEY, X)
    native = lambda: nnx.Linear(8, 15, kernel_init=KERNEL_OF_MESH, rngs=nnx.Rngs(0))  # noqa: E731
    with jax.set_mesh(mesh()):
        for make in (
            native,
            lambda: bridge.lazy_init(bridge.ToNNX(odd, KEY), X),
            lambda: bridge.ToNNX.from_variables(odd, variables),
            lambda: bridge.to_linen(nnx.Linear, 8, 15, kernel_init=KERNEL_OF_MESH).init(KEY, X),
        ):
            with pytest.raises(ValueError, match="15"):
                make()
        # In a program XLA may divide unevenly.
        assert nnx.jit(native)().kernel.shape == (8, 15)
        assert nnx.jit(lambda: bridge.lazy_init(bridge.ToNNX(odd, KEY), X))().kernel.shape == (
            8,
            15,
        )


def test_an_error_of_the_constructor_comes_through_where_there_is_a_mesh():
    class Failing(nnx.Module):
        def __init__(self):
            raise ValueError("not this way")

    with jax.set_mesh(mesh()), pytest.raises(ValueError, match="not this way"):
        bridge.to_linen(Failing).init(KEY, X)


def test_without_a_mesh_the_option_is_an_error_that_names_the_leaf():
    for make in (lazily, taken_in):
        with pytest.raises(bridge.ShardingError) as raised:
            make(DENSE.init(KEY, X), eager_sharding=True)
        assert [path for path, *_ in raised.value.problems] == ["params/kernel"]
        assert raised.value.mesh == {}


def test_without_annotations_the_option_asks_for_nothing():
    model = bridge.lazy_init(bridge.ToNNX(nn.Dense(3), KEY, eager_sharding=True), X)
    assert_identical(
        {"params": nnx.to_pure_dict(nnx.state(model, nnx.Param))}, nn.Dense(3).init(KEY, X)
    )


@pytest.mark.parametrize("kind", AXIS_TYPES)
def test_what_does_not_fit_the_mesh_is_an_error(kind):
    odd = nn.Dense(15, kernel_init=KERNEL)
    variables = odd.init(KEY, X)
    with jax.set_mesh(mesh(kind)), pytest.raises(bridge.ShardingError, match="size 15"):
        bridge.ToNNX.from_variables(odd, variables, eager_sharding=True)


@pytest.mark.parametrize("kind", AXIS_TYPES)
def test_lazy_init_that_does_not_fit_names_every_leaf_and_changes_nothing(kind):
    odd = nn.Sequential([nn.Dense(15, kernel_init=KERNEL), nn.Dense(4, kernel_init=KERNEL)])
    model = bridge.ToNNX(odd, KEY, eager_sharding=True)
    with jax.set_mesh(mesh(kind)), pytest.raises(bridge.ShardingError) as raised:
        bridge.lazy_init(model, X)
    assert [(path, wrong.split()[4]) for path, _, wrong in raised.value.problems] == [
        ("params/layers_0/kernel", "15"),
        ("params/layers_1/kernel", "15"),
    ]
    assert not model.linen_variables()


CONTEXTS = {"no mesh": contextlib.nullcontext, "auto": lambda: jax.set_mesh(mesh())}


@pytest.mark.parametrize(
    ("option", "context", "spec"),
    [
        (None, "auto", SHARDED),
        (True, "auto", SHARDED),
        (False, "auto", WHOLE),
        (None, "no mesh", None),
        (False, "no mesh", None),
    ],
)
def test_a_wrapped_nnx_module_is_sharded_as_natively_unless_told_otherwise(option, context, spec):
    module = bridge.ToLinen(Native, eager_sharding=option)
    with CONTEXTS[context]():
        variables = module.init(KEY, X)
    kernel = variables["params"]["dense"]["kernel"]
    assert nn.get_partition_spec(variables)["params"]["dense"]["kernel"] == SHARDED
    if spec is None:
        assert len(kernel.value.sharding.device_set) == 1
    else:
        assert_is(kernel.value, spec, mesh())


def test_a_wrapped_module_needs_no_mesh_where_native_construction_does():
    with pytest.raises(ValueError, match="mesh"):
        Native(nnx.Rngs(0))
    module = bridge.ToLinen(Native)
    variables = module.init(KEY, X)
    expected = X @ variables["params"]["dense"]["kernel"].value
    # `apply` rebuilds the definition when it is not given.
    for given in (variables, {"params": variables["params"]}):
        np.testing.assert_allclose(module.apply(given, X), expected, rtol=1e-6)


def test_shards_of_a_wrapped_nnx_module_without_a_mesh_raise_as_natively():
    with pytest.raises(ValueError, match="mesh"):
        bridge.ToLinen(Native, eager_sharding=True).init(KEY, X)


def test_flaxs_own_setting_is_left_alone():
    assert nnx.using_eager_sharding()
    with jax.set_mesh(mesh()):
        lazily(None, eager_sharding=True)
        bridge.ToLinen(Native, eager_sharding=False).init(KEY, X)
        assert nnx.using_eager_sharding()


def test_a_variable_that_is_not_to_be_sharded_says_so_without_a_mesh_too():
    metadata = {"out_sharding": ("data", "model"), "eager_sharding": False}
    model = bridge.to_linen(nnx.Linear, 8, 16, kernel_metadata=metadata)
    with jax.set_mesh(mesh()):
        native = nnx.Linear(8, 16, kernel_metadata=metadata, rngs=nnx.Rngs(0))
    variables = model.init(KEY, X)
    assert variables["params"]["kernel"].metadata == native.kernel.get_metadata()
    del variables["nnx"]
    _, updates = model.apply(variables, X, mutable=True)
    assert updates["params"]["kernel"].metadata == native.kernel.get_metadata()
