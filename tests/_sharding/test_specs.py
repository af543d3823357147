"""Metadata alone says over which mesh axes leaves are sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import bridge
import registry
from bridge._sharding.specs import axes_of, fitting, has_axes, mesh_spec, shardings

# No device has to be there: a spec comes from metadata.
MESH = AbstractMesh((2, 4), ("data", "model"))
RULES = (("embed", "data"), ("mlp", "model"), ("heads", None))
NAMES = st.sampled_from(("embed", "mlp", "heads", "data", "other", None))


def abstract(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def logical(*names, rules=None, value=None):
    return nn.LogicallyPartitioned(value or abstract(*[8] * len(names)), names, rules=rules)


def partitioned(*names, value=None):
    return nn.Partitioned(value or abstract(*[8] * len(names)), names)


def nnx_box(*names, value=None, **metadata):
    value = value or abstract(*[8] * len(names))
    return bridge.NNXMeta(nnx.Param, value, {"out_sharding": names, **metadata})


def specs(tree, rules=(), **options):
    return [found.spec for found in shardings(tree, MESH, rules, "here", **options)]


def problems(tree, rules=(), **options):
    with pytest.raises(bridge.ShardingError) as caught:
        shardings(tree, MESH, rules, "here", **options)
    return caught.value.problems


@pytest.mark.parametrize(
    ("entry", "axes"),
    [("data", ("data",)), (None, ()), ((), ()), (("data", "model"), ("data", "model"))],
)
def test_an_entry_of_a_spec_names_one_axis_or_several_or_none(entry, axes):
    assert axes_of(entry) == axes


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (P(), True),
        (P("data", None), True),
        (P(("data", "model")), True),
        (P(P.UNCONSTRAINED, "model"), True),
        (P("embed"), False),
        (P("data", ("model", "embed")), False),
    ],
)
def test_a_spec_has_axes_of_the_mesh_if_all_its_names_are(spec, expected):
    assert has_axes(spec, MESH) is expected


@given(st.lists(NAMES, max_size=3, unique=True))
def test_logical_names_become_what_flax_makes_of_them(names):
    box = logical(*names)
    expected = nn.logical_to_mesh({"w": P(*names)}, RULES)["w"]
    assert mesh_spec(box, RULES) == expected


@given(st.lists(NAMES, max_size=3))
def test_other_names_are_the_meshes_own_unless_a_rule_renames_them(names):
    renamed = P(*(dict(RULES).get(name, name) for name in names))
    assert mesh_spec(partitioned(*names), RULES) == renamed
    assert mesh_spec(nnx_box(*names), RULES) == renamed


@pytest.mark.parametrize("box", [logical, partitioned, nnx_box])
@pytest.mark.parametrize("rules", [None, ()])
def test_without_rules_all_names_are_the_meshes_own(box, rules):
    assert mesh_spec(box("embed", None), rules) == P("embed", None)


def test_names_of_several_axes_are_left_alone_by_rules():
    assert mesh_spec(partitioned(("data", "model"), "embed"), RULES) == P(("data", "model"), "data")


def test_a_mesh_axis_is_given_out_once_to_the_first_rule_that_asks():
    rules = (("a", "data"), ("b", "data"), ("b", "model"))
    assert mesh_spec(logical("b", "a"), rules) == P("model", "data")


def test_the_rules_of_a_box_come_after_those_of_the_call():
    own = (("embed", "model"), ("kv", "model"))
    assert mesh_spec(logical("embed", "kv", rules=own), RULES) == P("data", "model")
    assert mesh_spec(logical("kv", rules=own), None) == P("model")
    assert mesh_spec(nnx_box("kv", sharding_rules=own), RULES) == P("model")
    # Of two rules for one name the last one holds, as in `nnx.get_partition_spec`.
    assert mesh_spec(nnx_box("embed", sharding_rules=own), RULES) == P("model")


def test_a_box_that_knows_nothing_of_partitioning_is_not_sharded():
    class Tagged(nn.meta.AxisMetadata):
        """Has what every box must have, and no `get_partition_spec`."""

        unbox = replace_boxed = add_axis = remove_axis = None

    assert mesh_spec(Tagged(), RULES) == P()


def test_every_array_gets_the_sharding_of_its_box_in_order_of_leaves():
    tree = {
        "params": {
            "bare": abstract(3),
            "box": partitioned("data", "model"),
            "none": None,
            "pair": nn.Partitioned((abstract(2, 2), abstract(4, 4)), ("data",)),
        }
    }
    found = shardings(tree, MESH, (), "here")
    assert len(found) == len(jax.tree.leaves(tree))
    wanted = [P(), P("data", "model"), P("data"), P("data")]
    assert found == [NamedSharding(MESH, spec) for spec in wanted]


def test_the_rules_in_force_count_where_none_are_given():
    with nn.logical_axis_rules(RULES):
        assert specs({"w": logical("embed")}, rules=None) == [P("data")]
        assert specs({"w": partitioned("data")}, rules=()) == [P("data")]
        assert fitting({"w": logical("embed")}, MESH) == [P("data")]


def test_a_state_is_read_as_the_variables_that_it_came_from():
    kernel = nnx.Param(abstract(8, 8), out_sharding=("embed", None), eager_sharding=False)
    boxed = bridge.linen_to_nnx({"params": {"w": logical("embed", "mlp")}})
    state = nnx.State({"a": kernel, "b": nnx.BatchStat(abstract(3)), "c": boxed["w"]})
    assert specs(state, RULES) == [P("data", None), P(), P("data", "model")]


def test_a_variable_out_of_a_box_is_read_by_the_rules_of_that_box():
    state = bridge.linen_to_nnx({"params": {"w": logical("embed", "kv")}})
    state["w"].set_metadata(note="x")
    # In another box, `kv` would be a name of the mesh.
    assert specs(state, RULES) == [P("data", None)]


def test_a_dimension_without_a_name_may_have_any_size():
    tree = {"w": partitioned(None, "data", value=abstract(3, 8)), "b": abstract(5)}
    assert specs(tree) == fitting(tree, MESH) == [P(), P(None, "data")]


def test_a_variable_of_a_scoped_registry_is_read():
    class Weight(nnx.Variable):
        pass

    with registry.use(registry.current().extend({"weights": Weight})):
        weight = Weight(abstract(8), out_sharding=("data",), eager_sharding=False)
        assert specs(nnx.State({"w": weight})) == [P("data")]


@pytest.mark.parametrize(
    ("box", "shown", "said"),
    [
        (
            partitioned("data", None, value=abstract(8)),
            "(8,) as P('data', None)",
            ["the spec has 2 entries and the array 1 dimensions"],
        ),
        (partitioned("nope"), "(8,) as P('nope',)", ["the mesh has no axis 'nope'"]),
        (
            partitioned("data", ("model", "data")),
            "(8, 8) as P('data', ('model', 'data'))",
            ["axis 'data' is there more than once"],
        ),
        (
            partitioned("data", "model", value=abstract(3, 6)),
            "(3, 6) as P('data', 'model')",
            [
                "dimension 0 of size 3 cannot be divided into 2 parts",
                "dimension 1 of size 6 cannot be divided into 4 parts",
            ],
        ),
        (
            partitioned(("data", "model"), value=abstract(4)),
            "(4,) as P(('data', 'model'),)",
            ["dimension 0 of size 4 cannot be divided into 8 parts"],
        ),
    ],
)
def test_what_does_not_fit_is_an_error_that_lists_every_problem(box, shown, said):
    good = {"a": partitioned("data"), "w": box}
    assert problems({"params": good}) == tuple(("params/w", shown, text) for text in said)
    assert fitting({"params": good}, MESH) == [P("data"), P()]


def test_the_error_names_place_and_mesh():
    with pytest.raises(bridge.ShardingError, match=r"^the model cannot be sharded") as caught:
        shardings({"w": partitioned("nope")}, MESH, (), "the model")
    assert caught.value.mesh == {"data": 2, "model": 4}


def test_foreign_names_are_replicated_where_that_is_asked_for():
    tree = {"a": partitioned("nope", "data"), "b": partitioned("data", None)}
    assert specs(tree, foreign=True) == [P(), P("data", None)]
    # What has axes of the mesh has to fit.
    assert len(problems({"a": partitioned("data", value=abstract(3))}, foreign=True)) == 1


def test_uneven_dimensions_are_taken_where_that_is_asked_for():
    assert specs({"a": partitioned("data", value=abstract(3))}, uneven=True) == [P("data")]
    assert len(problems({"a": partitioned("nope", value=abstract(3))}, uneven=True)) == 1


def test_an_unconstrained_dimension_needs_no_axis():
    box = bridge.NNXMeta(nnx.Param, abstract(3, 8), {"out_sharding": P(P.UNCONSTRAINED, "model")})
    auto = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    found = shardings({"w": box}, auto, (), "here")
    assert [sharding.spec for sharding in found] == [P(P.UNCONSTRAINED, "model")]


def test_what_jax_refuses_is_a_problem_like_any_other():
    explicit = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    spec = P(P.UNCONSTRAINED, "model")
    box = bridge.NNXMeta(nnx.Param, abstract(3, 8), {"out_sharding": spec})
    tree = {"a": box, "b": partitioned("nope", "data"), "c": box}
    with pytest.raises(bridge.ShardingError) as caught:
        shardings(tree, explicit, (), "here")
    try:
        NamedSharding(explicit, spec)
        expected = []
    except ValueError as error:
        expected = [str(error)]
    found = {path: text for path, _, text in caught.value.problems}
    assert found.pop("b") == "the mesh has no axis 'nope'"
    assert found == {path: text for path in "ac" for text in expected}


def test_numbers_of_python_and_numpy_are_arrays_without_names():
    assert specs({"a": 1.0, "b": np.ones(3)}) == [P(), P()]
