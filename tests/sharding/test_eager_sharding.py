"""Whether annotated variables are sharded as soon as they are made: a choice of each wrapper."""

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
from tests.models import assert_identical
from tests.sharding.sharded_models import AXIS_TYPES, KEY, linen_init, mesh, with_mesh

X = jnp.ones((2, 8))
KERNEL = linen_init("mesh", nn.initializers.uniform(), "embed", "mlp")
DENSE = nn.Dense(16, kernel_init=KERNEL)
LOGICAL = nn.Dense(
    16, kernel_init=linen_init("own rules", nn.initializers.uniform(), "embed", "mlp")
)
SHARDED, WHOLE = P("data", "model"), P()


class Native(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nn.initializers.uniform(), ("data", "model"))
        self.dense = nnx.Linear(8, 16, kernel_init=init, rngs=rngs)

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


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("context", [jax.set_mesh, with_mesh])
def test_by_default_nothing_is_sharded_over_auto_axes(maker, context):
    variables = DENSE.init(KEY, X)
    with context(mesh()):
        model = MAKERS[maker](variables)
    assert model.kernel[...].sharding.is_fully_replicated
    assert model.kernel.get_metadata()["out_sharding"] in (("data", "model"), ("embed", "mlp"))


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
def test_lazy_init_that_does_not_fit_names_every_leaf_and_leaves_the_wrapper_as_it_was(kind):
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


def test_where_native_construction_needs_a_mesh_a_wrapped_module_needs_none():
    with pytest.raises(ValueError, match="mesh"):
        Native(nnx.Rngs(0))
    module = bridge.ToLinen(Native)
    variables = module.init(KEY, X)
    kernel, bias = (variables["params"]["dense"][name] for name in ("kernel", "bias"))
    expected = X @ kernel.value + bias[None]
    # `apply` rebuilds the definition when it is not given.
    for given in (variables, {"params": variables["params"]}):
        np.testing.assert_allclose(module.apply(given, X), expected, rtol=1e-6)


def test_asking_a_wrapped_nnx_module_for_shards_without_a_mesh_raises_as_natively():
    with pytest.raises(ValueError, match="mesh"):
        bridge.ToLinen(Native, eager_sharding=True).init(KEY, X)


def test_flaxs_own_setting_is_left_alone():
    assert nnx.using_eager_sharding()
    with jax.set_mesh(mesh()):
        lazily(None, eager_sharding=True)
        bridge.ToLinen(Native, eager_sharding=False).init(KEY, X)
        assert nnx.using_eager_sharding()


def test_a_variable_that_is_not_to_be_sharded_keeps_saying_so_where_there_is_no_mesh():
    metadata = {"out_sharding": ("data", "model"), "eager_sharding": False}
    model = bridge.to_linen(nnx.Linear, 8, 16, kernel_metadata=metadata)
    with jax.set_mesh(mesh()):
        native = nnx.Linear(8, 16, kernel_metadata=metadata, rngs=nnx.Rngs(0))
    variables = model.init(KEY, X)
    assert variables["params"]["kernel"].metadata == native.kernel.get_metadata()
    del variables["nnx"]
    _, updates = model.apply(variables, X, mutable=True)
    assert updates["params"]["kernel"].metadata == native.kernel.get_metadata()
