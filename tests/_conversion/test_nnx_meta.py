"""`NNXMeta`: the box that carries a Variable's metadata through Linen."""

import dataclasses
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import meta
from flax.nnx.bridge import NNXMeta as FlaxNNXMeta
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

import bridge
from bridge import NNXMeta
from tests.strategies import exact, on_axis, on_read

KERNEL = jnp.arange(6.0).reshape(2, 3)
LAYERS = {nn.PARTITION_NAME: "layers"}
NAMES = st.lists(st.sampled_from(("embed", "mlp", None, ("data", "model"))), max_size=3).map(tuple)


def box(out_sharding=("embed", "mlp"), value=KERNEL, **metadata):
    return NNXMeta(nnx.Param, value, {"out_sharding": out_sharding, **metadata})


def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("embed", "mlp"))


def index_into(length):
    """Where an axis may be put in among so many axes, counted from either end."""
    return st.integers(-length - 1, length)


def test_the_constructor_takes_what_flaxs_takes():
    assert list(inspect.signature(NNXMeta).parameters) == list(
        inspect.signature(FlaxNNXMeta).parameters
    )


def test_it_has_the_fields_that_flaxs_has():
    def fields(cls):
        return [(f.name, f.metadata.get("pytree_node", True)) for f in dataclasses.fields(cls)]

    assert fields(NNXMeta) == fields(FlaxNNXMeta)


def test_it_is_a_metadata_box_for_linen():
    assert isinstance(box(), meta.AxisMetadata)
    assert meta.is_axis_metadata(box())
    assert exact(meta.unbox({"params": {"w": box()}})) == exact({"params": {"w": KERNEL}})


def test_unbox_gives_the_value():
    assert box().unbox() is KERNEL


def test_replace_boxed_changes_the_value_alone():
    before = box(tag="first")
    after = before.replace_boxed(jnp.zeros(3))
    assert exact(after) == exact(NNXMeta(nnx.Param, jnp.zeros(3), before.metadata))
    assert exact(before) == exact(box(tag="first"))


@pytest.mark.parametrize("cls", [NNXMeta, FlaxNNXMeta])
def test_only_the_value_is_in_the_tree(cls):
    made = cls(nnx.Param, (KERNEL, KERNEL), {"tag": "first"})
    leaves, treedef = jax.tree.flatten(made)
    assert all(leaf is KERNEL for leaf in leaves)
    assert len(leaves) == 2
    again = jax.tree.unflatten(treedef, leaves)
    assert exact(again) == exact(made)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(made)]
    assert paths == [".value[0]", ".value[1]"]


def test_boxes_of_different_metadata_are_different_trees():
    assert jax.tree.structure(box(("a",))) == jax.tree.structure(box(("a",)))
    assert jax.tree.structure(box(("a",))) != jax.tree.structure(box(("b",)))


def test_it_crosses_jit_and_eval_shape():
    doubled = jax.jit(lambda b: jax.tree.map(lambda x: 2 * x, b))(box())
    assert exact(doubled) == exact(box(value=2 * KERNEL))
    assert exact(jax.eval_shape(box)) == exact(box(value=jax.ShapeDtypeStruct((2, 3), jnp.float32)))


def test_it_can_be_compared():
    assert box(value=1) == box(value=1)
    assert box(value=1) != box(value=2)
    assert box(value=1) != box(("a",), value=1)


@pytest.mark.parametrize(
    "metadata",
    [{"tag": "first"}, {"on_add_axis": on_axis, "on_remove_axis": on_axis}],
    ids=["tag", "hooks"],
)
@given(names=NAMES, data=st.data())
def test_remove_axis_undoes_add_axis(metadata, names, data):
    before = box(names, **metadata)
    index = data.draw(index_into(len(names)))
    added = before.add_axis(index, LAYERS)
    assert exact(added.remove_axis(index, LAYERS)) == exact(before)
    assert exact(before) == exact(box(names, **metadata))


@given(NAMES.filter(bool), st.data())
def test_add_axis_undoes_remove_axis(names, data):
    index = data.draw(st.integers(-len(names), len(names) - 1))
    before = box((*names[:index], "layers", *names[index:][1:]))
    assert exact(before.remove_axis(index, LAYERS).add_axis(index, LAYERS)) == exact(before)


@given(NAMES, st.data())
def test_the_axis_gets_the_place_that_jax_gives_the_axis_of_the_value(names, data):
    index = data.draw(index_into(len(names)))
    sizes = (2, 3, 5)[: len(names)]
    stacked = jnp.stack([jnp.zeros(sizes)] * 7, axis=index)
    name_of_size = {**dict(zip(sizes, names, strict=True)), 7: "layers"}
    expected = tuple(name_of_size[size] for size in stacked.shape)
    assert box(names).add_axis(index, LAYERS).metadata["out_sharding"] == expected


@given(NAMES, st.integers(0, 5))
def test_names_are_what_pure_linen_gives_and_takes_away(names, index):
    ours, linen = box(names), nn.Partitioned(KERNEL, names)
    ours, linen = ours.add_axis(index, LAYERS), linen.add_axis(index, LAYERS)
    assert ours.metadata["out_sharding"] == linen.names
    assert ours.get_partition_spec() == linen.get_partition_spec()
    ours, linen = ours.remove_axis(index, LAYERS), linen.remove_axis(index, LAYERS)
    assert ours.metadata["out_sharding"] == linen.names


@given(NAMES.filter(bool), st.data())
def test_names_are_what_nnx_gives_and_takes_away(names, data):
    index = data.draw(st.integers(0, len(names)))
    variable = nnx.Param(KERNEL)
    variable.set_metadata(out_sharding=names)
    ours = box(names).add_axis(index, LAYERS)
    nnx.spmd.add_axis(variable, index, LAYERS)
    assert ours.metadata["out_sharding"] == variable.get_metadata("out_sharding")
    nnx.spmd.remove_axis(variable, index, LAYERS)
    assert ours.remove_axis(index, LAYERS).metadata["out_sharding"] == names
    assert variable.get_metadata("out_sharding") == names


@pytest.mark.parametrize("index", [0, 1, -1])
@pytest.mark.parametrize(
    "metadata", [{}, {"tag": "first"}, {"out_sharding": None}], ids=["none", "a tag", "no axes"]
)
def test_metadata_without_axis_names_gets_none(metadata, index):
    before = NNXMeta(nnx.Param, KERNEL, metadata)
    assert exact(before.add_axis(index, LAYERS)) == exact(before)
    assert exact(before.remove_axis(index, LAYERS)) == exact(before)


@pytest.mark.parametrize("index", [0, 1, 2, -1])
def test_an_axis_without_a_name_is_not_sharded(index):
    added = box().add_axis(index, {})
    expected = ["embed", "mlp"]
    expected.insert(index if index >= 0 else 2, None)
    assert added.metadata["out_sharding"] == tuple(expected)
    assert exact(added.remove_axis(index, {})) == exact(box())


@pytest.mark.parametrize("index", [0, 1, -1])
def test_a_partition_spec_stays_one(index):
    added = box(PartitionSpec("embed", "mlp")).add_axis(index, LAYERS)
    assert isinstance(added.metadata["out_sharding"], PartitionSpec)
    assert added.metadata["out_sharding"] == box().add_axis(index, LAYERS).get_partition_spec()
    assert exact(added.remove_axis(index, LAYERS)) == exact(box(PartitionSpec("embed", "mlp")))


@pytest.mark.parametrize("index", [0, 1, -1])
def test_hooks_run_after_the_names_have_changed(index):
    calls = []

    def note(variable, *axis):
        calls.append((type(variable), variable.get_metadata("out_sharding"), *axis))

    before = box(on_add_axis=note, on_remove_axis=note)
    added = before.add_axis(index, LAYERS)
    names = added.metadata["out_sharding"]
    assert "layers" in names
    assert calls == [(nnx.Param, names, index, "layers")]
    added.remove_axis(index, LAYERS)
    assert calls[1:] == [(nnx.Param, ("embed", "mlp"), index, "layers")]


def test_what_a_hook_does_to_the_metadata_counts():
    def count(variable, index, name):
        variable.set_metadata(axes=variable.get_metadata("axes") + 1)

    before = box(on_add_axis=count, axes=2)
    assert before.add_axis(0, LAYERS).metadata["axes"] == 3
    assert before.metadata["axes"] == 2


def test_hooks_run_on_abstract_values_and_on_metadata_without_axis_names():
    calls = []
    value = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    before = NNXMeta(nnx.BatchStat, value, {"on_add_axis": lambda *call: calls.append(call[1:])})
    assert before.add_axis(1, LAYERS).value is value
    assert calls == [(1, "layers")]


def test_hooks_on_the_variable_type_run():
    calls = []

    class Hooked(nnx.Variable):
        def on_add_axis(self, index, name):
            calls.append(("add", index, name))

        def on_remove_axis(self, index, name):
            calls.append(("remove", index, name))

    made = NNXMeta(Hooked, KERNEL, {"out_sharding": ("embed", "mlp")})
    made.add_axis(0, LAYERS).remove_axis(0, LAYERS)
    assert calls == [("add", 0, "layers"), ("remove", 0, "layers")]


def test_a_variable_type_that_overrides_the_axis_methods_is_asked():
    calls = []

    class Overriding(nnx.Variable):
        def add_axis(self, axis_index, axis_name):
            calls.append(("add", axis_index, axis_name))

        def remove_axis(self, axis_index, axis_name):
            calls.append(("remove", axis_index, axis_name))

    made = NNXMeta(Overriding, KERNEL, {"out_sharding": ("embed", "mlp")})
    made.add_axis(0, LAYERS).remove_axis(0, LAYERS)
    assert calls == [("add", 0, "layers"), ("remove", 0, "layers")]


def test_get_hooks_do_not_run_on_the_value():
    calls = []
    made = box(on_get_value=lambda *call: calls.append(call), on_add_axis=lambda *call: None)
    made.add_axis(0, LAYERS)
    made.get_partition_spec()
    made.unbox()
    assert calls == []


@pytest.mark.parametrize(
    ("out_sharding", "expected"),
    [
        (("embed", None), PartitionSpec("embed", None)),
        ((("data", "model"), None), PartitionSpec(("data", "model"), None)),
        (PartitionSpec("embed"), PartitionSpec("embed")),
        (["embed", "mlp"], PartitionSpec("embed", "mlp")),
        ((), PartitionSpec()),
        (None, PartitionSpec()),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    "value",
    [KERNEL, jax.ShapeDtypeStruct((2, 3), jnp.float32), (KERNEL, KERNEL), None],
    ids=["array", "abstract", "pytree", "nothing"],
)
def test_the_spec_is_read_from_the_metadata_alone(value, out_sharding, expected):
    assert box(out_sharding, value).get_partition_spec() == expected


def test_the_spec_of_metadata_without_a_sharding_is_empty():
    assert NNXMeta(nnx.Param, KERNEL, {}).get_partition_spec() == PartitionSpec()


def test_the_spec_of_a_sharding_is_its_spec():
    sharding = NamedSharding(mesh(), PartitionSpec("embed", None))
    assert box(sharding).get_partition_spec() == PartitionSpec("embed", None)
    layout = Format(Layout(major_to_minor=(0, 1)), sharding)
    assert box(layout).get_partition_spec() == PartitionSpec("embed", None)


def test_reading_the_spec_makes_no_variable():
    class Refusing(nnx.Variable):
        def __init__(self, *args, **kwargs):
            raise AssertionError("a Variable was made")

    made = NNXMeta(Refusing, KERNEL, {"out_sharding": ("embed", "mlp")})
    assert made.get_partition_spec() == PartitionSpec("embed", "mlp")


def test_logical_names_stay_logical_and_are_mapped_once():
    # Each rule's right side is the left side of another: a second application would show.
    rules = (("embed", "mlp"), ("mlp", "embed"))
    tree = {"params": {"w": box(("embed", None), sharding_rules=rules)}}
    with nn.logical_axis_rules(rules):
        logical = nn.get_partition_spec(tree)
        assert logical == {"params": {"w": PartitionSpec("embed", None)}}
        assert nn.logical_to_mesh(logical) == {"params": {"w": PartitionSpec("mlp", None)}}


def test_the_spec_of_an_abstract_tree_is_that_of_the_tree():
    tree = {"params": {"w": box(), "b": jnp.zeros(3)}}
    expected = {"params": {"w": PartitionSpec("embed", "mlp"), "b": PartitionSpec()}}
    assert nn.get_partition_spec(tree) == expected
    assert nn.get_partition_spec(jax.eval_shape(lambda: tree)) == expected


@pytest.mark.parametrize("index", [0, 1])
def test_the_spec_of_a_scanned_value_that_no_mesh_divides_is_read(index):
    scanned = box(value=jnp.zeros((3, 5, 7))).add_axis(index, LAYERS)
    with jax.set_mesh(mesh()):
        spec = scanned.get_partition_spec()
    assert (
        spec
        == nn.Partitioned(KERNEL, ("embed", "mlp")).add_axis(index, LAYERS).get_partition_spec()
    )


@pytest.mark.parametrize("lift", ["vmap", "scan"])
@pytest.mark.parametrize("axis", [0, 1])
def test_under_a_lifted_transform_the_spec_is_what_pure_linen_gives(lift, axis):
    def spec_with(make_box):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, carry, _=None):
                init = nn.initializers.ones_init()
                self.param("w", lambda key: make_box(init(key, (3, 5))))
                return carry, None

        class Layers(nn.Module):
            @nn.compact
            def __call__(self, x):
                options = {"variable_axes": {"params": axis}, "split_rngs": {"params": True}}
                options["metadata_params"] = LAYERS
                if lift == "vmap":
                    return nn.vmap(Layer, in_axes=0, axis_size=7, **options)()(jnp.zeros(7))[0]
                return nn.scan(Layer, length=7, **options)()(x, None)[0]

        variables = Layers().init(jax.random.key(0), jnp.zeros(()))
        (made,) = jax.tree.leaves(variables, is_leaf=meta.is_axis_metadata)
        return made.unbox().shape, nn.get_partition_spec(variables)

    ours = spec_with(lambda value: box(value=value))
    assert ours == spec_with(lambda value: nn.Partitioned(value, ("embed", "mlp")))


@pytest.mark.parametrize(
    "metadata",
    [{}, {"tag": "first"}, {"sharding_rules": (("a", "b"),), "note": [1]}],
    ids=["none", "a tag", "several"],
)
@pytest.mark.parametrize("var_type", [nnx.Param, nnx.BatchStat, nnx.LoRAParam])
def test_to_nnx_variable_makes_the_variable_that_flax_makes(var_type, metadata):
    ours = NNXMeta(var_type, KERNEL, metadata).to_nnx_variable()
    assert exact(ours) == exact(FlaxNNXMeta(var_type, KERNEL, metadata).to_nnx_variable())


def test_to_nnx_variable_shards_nothing_and_runs_no_hook():
    calls = []
    made = box(on_create_value=lambda *call: calls.append(call), on_get_value=(on_read,))
    variable = made.to_nnx_variable()
    assert calls == []
    assert variable.get_raw_value() is KERNEL
    assert variable.get_metadata("out_sharding") == ("embed", "mlp")


def test_to_nnx_variable_does_not_share_its_metadata_with_the_box():
    made = box(tag="first")
    made.to_nnx_variable().set_metadata(tag="second")
    assert made.metadata["tag"] == "first"


def test_with_partitioning_makes_a_variable_that_becomes_a_linen_box():
    init = bridge.with_partitioning(nn.initializers.ones_init(), ("embed", "mlp"))
    with nnx.use_eager_sharding(False):
        variable = nnx.Param(init(jax.random.key(0), (2, 3)))
    assert variable.get_metadata("out_sharding") == ("embed", "mlp")
    linen = bridge.nnx_to_linen(nnx.State({"w": variable}))
    expected = nn.Partitioned(jnp.ones((2, 3)), ("embed", "mlp"))
    assert exact(linen) == exact({"params": {"w": expected}})


def test_with_partitioning_keeps_the_mesh():
    init = bridge.with_partitioning(nn.initializers.ones_init(), ("embed", "mlp"), mesh())
    with nnx.use_eager_sharding(False):
        variable = nnx.Param(init(jax.random.key(0), (8, 2)))
    assert bridge.nnx_to_linen(nnx.State({"w": variable}))["params"]["w"].mesh == mesh()
