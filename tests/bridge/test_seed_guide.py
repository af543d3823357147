"""The bridge guide: what its code blocks print and assert, with `import bridge`."""

import contextlib
import io
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge as peer
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import bridge
import registry
from bridge import NNXMeta, ToLinen, ToNNX, lazy_init, to_linen

IN, OUT = 32, 64
X = jax.random.normal(jax.random.key(42), (4, IN))
KEY = jax.random.key(0)


class LinenDot(nn.Module):
    out_dim: int
    w_init: Callable[..., Any] = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", self.w_init, (x.shape[-1], self.out_dim))


class NNXOuter(nnx.Module):
    def __init__(self, out_dim, rngs):
        self.dot = ToNNX(LinenDot(out_dim), rngs=rngs)
        self.b = nnx.Param(jax.random.uniform(rngs.params(), (1, out_dim)))

    def __call__(self, x):
        return self.dot(x) + self.b


class NNXDot(nnx.Module):
    def __init__(self, in_dim, out_dim, rngs):
        self.w = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (in_dim, out_dim)))

    def __call__(self, x):
        return x @ self.w


class NNXAddConstant(nnx.Module):
    def __init__(self):
        self.constant = nnx.Variable(jnp.ones((1, 1)))

    def __call__(self, x):
        return x + self.constant


class LinenOuter(nn.Module):
    out_dim: int

    @nn.compact
    def __call__(self, x):
        dot = to_linen(NNXDot, x.shape[-1], self.out_dim)
        return dot(x) + self.param("b", nn.initializers.lecun_normal(), (1, self.out_dim))


class LinenMultiCollections(nn.Module):
    in_dim: int
    out_dim: int

    def setup(self):
        self.w = self.param("w", nn.initializers.lecun_normal(), (self.in_dim, self.out_dim))
        self.b = self.param("b", nn.initializers.zeros, (1, self.out_dim))
        self.count = self.variable("counter", "count", lambda: jnp.zeros((), jnp.int32))

    def __call__(self, x):
        if not self.is_initializing():
            self.count.value += 1
        y = x @ self.w + self.b
        self.sow("intermediates", "dot_sum", jnp.sum(y))
        return y


@bridge.register_variable_name("guide_counts")
class Count(nnx.Variable):
    pass


class NNXMultiCollections(nnx.Module):
    def __init__(self, din, dout, rngs):
        self.w = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (din, dout)))
        self.lora = nnx.LoRA(din, 3, dout, rngs=rngs)
        self.count = Count(jnp.array(0))

    def __call__(self, x):
        self.count[...] += 1
        return x @ self.w + self.lora(x)


class LinenPartitioned(nn.Module):
    out_dim: int

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
        return x @ self.param("w", init, (x.shape[-1], self.out_dim))


class NNXPartitioned(nnx.Module):
    def __init__(self, in_dim, out_dim, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("in", "out"))
        self.w = nnx.Param(init(rngs.params(), (in_dim, out_dim)))

    def __call__(self, x):
        return x @ self.w


class NNXVmapped(nnx.Module):
    def __init__(self, out_dim, size, rngs):
        self.linen_dot = ToNNX(nn.Dense(out_dim, use_bias=False), rngs=rngs)
        self.size = size

    def __call__(self, x):
        @nnx.split_rngs(splits=self.size)
        @nnx.vmap(in_axes=(0, 0), axis_size=self.size)
        def mapped(submodule, x):
            return submodule(x)

        return mapped(self.linen_dot, x)


class LinenVmapped(nn.Module):
    out_dim: int

    @nn.compact
    def __call__(self, x):
        mapped = nn.vmap(
            ToLinen, variable_axes={"params": 0, "nnx": None}, split_rngs={"params": True}
        )
        return mapped(nnx.Linear, args=(x.shape[-1], self.out_dim))(x)


def displayed(model):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        nnx.display(model)
    return text.getvalue()


def test_a_linen_module_becomes_an_nnx_module_by_lazy_init():
    model = ToNNX(LinenDot(OUT), rngs=nnx.Rngs(0))
    lazy_init(model, X)
    y = model(X)
    assert "Param" in displayed(model)
    model.w[...] = jax.random.normal(jax.random.key(1), (IN, OUT))
    assert not jnp.allclose(y, model(X))
    np.testing.assert_array_equal(model(X), X @ model.w[...])


def test_a_weight_can_be_swapped_through_the_value_of_the_guides_days():
    model = lazy_init(ToNNX(LinenDot(OUT), rngs=nnx.Rngs(0)), X)
    with pytest.warns(DeprecationWarning, match="'.value'"):
        model.w.value = jnp.zeros((IN, OUT))
    np.testing.assert_array_equal(model(X), np.zeros((4, OUT)))


def test_lazy_init_works_on_an_nnx_module_that_holds_a_linen_one():
    model = lazy_init(NNXOuter(OUT, rngs=nnx.Rngs(0)), X)
    assert isinstance(model, NNXOuter)
    assert isinstance(model.dot.w, nnx.Param)
    assert isinstance(model.dot.w[...], jax.Array)
    assert model.dot.w.shape == (IN, OUT)


def test_without_lazy_init_only_the_native_part_has_variables():
    model = NNXOuter(OUT, rngs=nnx.Rngs(0))
    assert list(nnx.state(model, nnx.Param)) == ["b"]
    b = np.asarray(model.b[...])
    full = lazy_init(model, X)
    assert full is model
    assert list(nnx.state(full, nnx.Param)) == ["b", "dot"]
    np.testing.assert_array_equal(full.b[...], b)
    assert displayed(full) != ""


def test_an_nnx_module_becomes_a_linen_module_from_its_class_and_arguments():
    model = to_linen(NNXDot, IN, out_dim=OUT)
    variables = model.init(KEY, X)
    assert set(variables) == {"nnx", "params"}
    assert variables["params"]["w"].shape == (IN, OUT)
    assert model.apply(variables, X).shape == (4, OUT)


def test_collection_nnx_holds_the_static_definition():
    variables = to_linen(NNXDot, IN, out_dim=OUT).init(KEY, X)
    graphdef = variables["nnx"]["graphdef"]
    assert isinstance(graphdef, nnx.GraphDef)
    assert not jax.tree.leaves(graphdef)
    merged = nnx.merge(graphdef, nnx.State({"w": nnx.Param(variables["params"]["w"])}))
    assert isinstance(merged, NNXDot)


@pytest.mark.parametrize("options", [{"skip_rng": True}, {}], ids=["skip_rng", "detected"])
def test_a_constructor_may_take_no_rngs(options):
    y, _ = ToLinen(NNXAddConstant, **options).init_with_output(KEY, X)
    np.testing.assert_array_equal(y, X + 1)


def test_a_to_linen_can_be_a_submodule():
    y, variables = LinenOuter(out_dim=OUT).init_with_output(KEY, X)
    w, b = variables["params"]["ToLinen_0"]["w"], variables["params"]["b"]
    assert (w.shape, b.shape, y.shape) == ((IN, OUT), (1, OUT), (4, OUT))
    np.testing.assert_array_equal(y, X @ w + b)


def test_a_wrapped_dropout_draws_from_its_own_stream_until_it_is_reseeded():
    model = ToNNX(nn.Dropout(rate=0.5, deterministic=False), rngs=nnx.Rngs(dropout=0))
    lazy_init(model, X)
    first, second = model(X), model(X)
    assert not jnp.allclose(first, second)
    nnx.reseed(model, dropout=0)
    np.testing.assert_array_equal(first, model(X))


def test_rng_state_is_among_the_variables_and_counts_as_in_nnx():
    model = to_linen(nnx.Dropout, rate=0.5)
    variables = model.init({"dropout": KEY}, X)
    assert jax.dtypes.issubdtype(
        variables["RngKey"]["rngs"]["key"].value.dtype, jax.dtypes.prng_key
    )
    assert variables["RngCount"]["rngs"]["count"].value == 0
    first, updates = model.apply(variables, X, mutable=["RngCount"])
    variables |= updates
    second, updates = model.apply(variables, X, mutable=["RngCount"])
    variables |= updates
    assert variables["RngCount"]["rngs"]["count"].value == 2
    assert not jnp.allclose(first, second)


def test_keys_given_to_apply_decide_in_linen_style():
    model = to_linen(nnx.Dropout, rate=0.5)
    variables = model.init({"dropout": KEY}, X)

    def masked(seed):
        return model.apply(variables, X, rngs={"dropout": jax.random.key(seed)})

    first, second, again = masked(1), masked(2), masked(1)
    assert not jnp.allclose(first, second)
    np.testing.assert_array_equal(first, again)


def test_collections_become_variable_types():
    x = X[:2, :4]
    model = lazy_init(ToNNX(LinenMultiCollections(4, 3), rngs=nnx.Rngs(0)), x)
    assert type(model.w) is nnx.Param
    assert type(model.b) is nnx.Param
    assert type(model.count) is registry.auto.counter
    assert (model.w.shape, model.b.shape, model.count.shape) == ((4, 3), (1, 3), ())
    assert model.count.dtype == jnp.int32
    y = model(x, mutable=True)
    assert type(model.dot_sum) is nnx.Intermediate
    (dot_sum,) = model.dot_sum.get_value()
    np.testing.assert_array_equal(dot_sum, jnp.sum(y))
    assert model.count[...] == 1


def test_split_tells_the_types_apart_and_merge_puts_them_together():
    x = X[:2, :4]
    model = lazy_init(ToNNX(LinenMultiCollections(4, 3), rngs=nnx.Rngs(0)), x)
    model(x, mutable=True)
    static, params, counter, rest = nnx.split(model, nnx.Param, type(model.count), ...)
    assert list(params.keys()) == ["b", "w"]
    assert list(counter.keys()) == ["count"]
    assert list(rest.keys()) == ["dot_sum", "to_nnx__rngs"]
    merged = nnx.merge(static, params, counter, rest)
    y = merged(x, mutable=True)
    np.testing.assert_array_equal(y, x @ model.w[...] + model.b[...])
    assert merged.count[...] == 2


def test_registered_variable_types_become_collections():
    x_key, params_key, dropout_key = jax.random.split(KEY, 3)
    x = jax.random.normal(x_key, (2, 4))
    model = to_linen(NNXMultiCollections, 4, 3)
    variables = model.init({"params": params_key, "dropout": dropout_key}, x)
    assert set(variables) == {"nnx", "LoRAParam", "guide_counts", "params"}
    assert list(variables["params"]) == ["w"]
    assert variables["params"]["w"].shape == (4, 3)
    _, updates = model.apply(variables, x, mutable=["guide_counts"])
    assert updates["guide_counts"]["count"] == 1


def test_a_name_can_be_registered_as_the_guide_does():
    class Seen(nnx.Variable):
        pass

    bridge.register_variable_name_type_pair("guide_seen", Seen, overwrite=True)
    assert nnx.variable_name_from_type(Seen) == "guide_seen"


@pytest.fixture(scope="module")
def mesh():
    return Mesh(mesh_utils.create_device_mesh((2, 4)), axis_names=("in", "out"))


def assert_on_the_mesh(array, mesh):
    assert array.sharding.is_equivalent_to(
        NamedSharding(mesh, PartitionSpec("in", "out")), array.ndim
    )
    assert {shard.data.shape for shard in array.addressable_shards} == {(IN // 2, OUT // 4)}


def test_a_linen_annotation_shards_an_nnx_variable(mesh):
    @nnx.jit
    def create(x):
        model = lazy_init(ToNNX(LinenPartitioned(OUT), rngs=nnx.Rngs(0)), x)
        state = nnx.state(model)
        nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return model

    with jax.set_mesh(mesh):
        model = create(X)
    assert type(model.w) is nnx.Param
    assert model.w.out_sharding == ("in", "out")
    assert_on_the_mesh(model.w[...], mesh)


def test_an_nnx_annotation_shards_a_linen_variable(mesh):
    @jax.jit
    def create(key, x):
        variables = to_linen(NNXPartitioned, IN, OUT).init(key, x)
        assert type(variables["params"]["w"]) is NNXMeta
        assert variables["params"]["w"].metadata["out_sharding"] == ("in", "out")
        unboxed, specs = nn.unbox(variables), nn.get_partition_spec(variables)
        assert isinstance(unboxed["params"]["w"], jax.Array)
        assert specs["params"]["w"] == PartitionSpec("in", "out")
        return jax.tree.map(jax.lax.with_sharding_constraint, unboxed, specs)

    with jax.set_mesh(mesh):
        variables = create(KEY, X)
    assert_on_the_mesh(variables["params"]["w"], mesh)


def test_without_annotations_there_is_no_box():
    assert isinstance(to_linen(NNXDot, IN, OUT).init(KEY, X)["params"]["w"], jax.Array)


def test_nnx_vmap_maps_a_linen_module():
    x = jax.random.normal(KEY, (4, IN))
    model = lazy_init(NNXVmapped(OUT, 4, rngs=nnx.Rngs(0)), x)
    assert model.linen_dot.kernel.shape == (4, IN, OUT)
    assert not jnp.allclose(model.linen_dot.kernel[0], model.linen_dot.kernel[1])
    y = model(x)
    assert y.shape == (4, OUT)
    np.testing.assert_allclose(
        y, jnp.einsum("bi,bio->bo", x, model.linen_dot.kernel[...]), rtol=1e-4, atol=1e-5
    )


def test_linen_vmap_maps_an_nnx_module():
    model = LinenVmapped(OUT)
    variables = model.init(KEY, X)
    kernel = variables["params"]["VmapToLinen_0"]["kernel"]
    assert kernel.shape == (4, IN, OUT)
    y = model.apply(variables, X)
    assert y.shape == (4, OUT)
    np.testing.assert_allclose(y, jnp.einsum("bi,bio->bo", X, kernel), rtol=1e-4, atol=1e-5)


def warns_of_value():
    with warnings.catch_warnings(record=True, action="always") as caught:
        nnx.Param(jnp.ones(2)).value  # noqa: B018 reading is what warns
    return [w.category for w in caught] == [DeprecationWarning]


def refuses_in_place_operators():
    count = nnx.Variable(jnp.zeros(()))
    try:
        count += 1
    except NotImplementedError:
        return True
    return False


def sows_one_variable():
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    _, sown = nnx.capture(lambda model: model.sow(nnx.Intermediate, "y", 1.0), nnx.Intermediate)(
        model
    )
    return isinstance(sown["y"], nnx.Intermediate) and sown["y"].get_value() == (1.0,)


def annotates_out_sharding():
    init = nnx.with_partitioning(nnx.initializers.ones, ("in",))
    return init(KEY, (2,)).metadata["out_sharding"] == ("in",)


class Change(NamedTuple):
    """A place where a program of the guide is written otherwise today.

    Attributes:
      block: the section of the guide.
      then: what the guide wrote or printed.
      now: what takes its place.
      holds: whether Flax alone, without this package, shows the change.
    """

    block: str
    then: str
    now: str
    holds: Callable[[], bool]


CHANGES = (
    Change(
        "all", "variable.value", "variable[...], or get_value() and set_value()", warns_of_value
    ),
    Change(
        "NNX to Linen",
        "variables['nnx']['graphdef'] is a nnx.graph.NodeDef",
        "an nnx.GraphDef, which holds a NodeDef for each node",
        lambda: not isinstance(nnx.graphdef(nnx.Dict()), nnx.graphlib.NodeDef),
    ),
    Change(
        "RNG keys, NNX to Linen",
        "variables['RngKey']['rngs']['dropout']['key']",
        "variables['RngKey']['rngs']['key']: nnx.Dropout keeps a fork of its one stream",
        lambda: "key" in nnx.state(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))["rngs"],
    ),
    Change(
        "collections, Linen to NNX",
        "a sown value is a tuple of Intermediates",
        "one Intermediate, whose value is the tuple",
        sows_one_variable,
    ),
    Change(
        "collections, Linen to NNX",
        "the type of a collection that nobody registered is flax.nnx.bridge.variables.counter",
        "registry.auto.counter",
        lambda: not hasattr(peer.variables, "counter"),
    ),
    Change(
        "collections, Linen to NNX",
        "the RNG state of a ToNNX is at rngs",
        "at to_nnx__rngs, so that a Linen submodule may be called rngs",
        lambda: "to_nnx__rngs" in nnx.state(peer.ToNNX(nn.Dense(1), rngs=nnx.Rngs(0))),
    ),
    Change(
        "collections, NNX to Linen",
        "nnx.register_variable_name_type_pair",
        "nnx.register_variable_name, or either name in bridge",
        lambda: not hasattr(nnx, "register_variable_name_type_pair"),
    ),
    Change(
        "collections, NNX to Linen",
        "self.count += 1",
        "self.count[...] += 1",
        refuses_in_place_operators,
    ),
    Change(
        "partition metadata",
        "variable.sharding, metadata['sharding']",
        "variable.out_sharding, metadata['out_sharding']",
        annotates_out_sharding,
    ),
    Change(
        "partition metadata",
        "nnx.with_sharding_constraint(state, specs)",
        "jax.lax.with_sharding_constraint(state, specs)",
        lambda: not hasattr(nnx, "with_sharding_constraint"),
    ),
    Change(
        "partition metadata",
        "with mesh:",
        "with jax.set_mesh(mesh):",
        lambda: callable(jax.set_mesh),
    ),
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.then)
def test_what_differs_from_the_guide_is_a_change_in_flax(change):
    assert change.holds()
