"""Trees in their annotated sharding over the mesh in force, and values made under Explicit axes."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import bridge
from bridge._sharding import explicit_axes
from tests._sharding.sharded_models import AXIS_TYPES, mesh, with_mesh
from tests.models import assert_identical

ARRAY = jnp.arange(32.0).reshape(4, 8)
TREE = {"w": nn.Partitioned(ARRAY, ("data", "model")), "b": jnp.ones(3)}
KINDS = pytest.mark.parametrize("kind", AXIS_TYPES)


def foreign(names=("rows", None)):
    return {"w": nn.Partitioned(ARRAY, names)}


@KINDS
def test_the_same_mesh_has_auto_axes_alone(kind):
    made = explicit_axes.all_auto(mesh(kind))
    assert made.axis_types == (AxisType.Auto,) * 2
    assert (made.devices == mesh(kind).devices).all()
    assert made.axis_names == mesh(kind).axis_names
    abstract = explicit_axes.all_auto(mesh(kind).abstract_mesh)
    assert isinstance(abstract, AbstractMesh)
    assert abstract.axis_types == made.axis_types
    assert abstract.shape == made.shape
    # Regression: the kind of the devices was lost.
    assert abstract.abstract_device == mesh(kind).abstract_mesh.abstract_device is not None


@KINDS
def test_the_mesh_in_force_is_asked_for_explicit_axes(kind):
    assert not explicit_axes.any_explicit()
    with jax.set_mesh(mesh(kind)):
        assert explicit_axes.any_explicit() is (AxisType.Explicit in AXIS_TYPES[kind])


@KINDS
def test_the_mesh_in_force_is_found_however_it_was_set(kind):
    assert explicit_axes.mesh_in_force().empty
    with jax.set_mesh(mesh(kind)):
        assert explicit_axes.mesh_in_force() == mesh(kind).abstract_mesh
    with with_mesh(mesh("auto")):
        assert isinstance(explicit_axes.mesh_in_force(), Mesh)
        assert explicit_axes.mesh_in_force() == mesh("auto")


@KINDS
@pytest.mark.parametrize("strict", [True, False])
def test_an_array_is_put_where_its_box_says(kind, strict):
    with jax.set_mesh(mesh(kind)):
        placed = explicit_axes.sharded(TREE, "here", strict=strict)
        assert placed["w"].value.sharding.spec == P("data", "model")
    assert placed["w"].names == ("data", "model")
    assert_identical(placed, TREE)
    assert placed["b"] is TREE["b"]


@KINDS
def test_a_traced_array_is_put_where_its_box_says(kind):
    on = mesh(kind)
    run = jax.jit(lambda tree: explicit_axes.sharded(tree, "here", strict=False))
    with jax.set_mesh(on):
        placed = run(TREE)
    assert placed["w"].value.sharding.is_equivalent_to(jax.NamedSharding(on, P("data", "model")), 2)
    assert_identical(placed, TREE)


def test_an_abstract_array_stays_as_it_is():
    tree = jax.eval_shape(lambda: TREE)
    with jax.set_mesh(mesh()):
        assert explicit_axes.sharded(tree, "here", strict=True) == tree


def test_without_a_mesh_nothing_is_sharded_unless_it_has_to_be():
    assert explicit_axes.sharded(TREE, "here", strict=False) is TREE
    assert explicit_axes.misfit(TREE, "here", strict=False) is None
    with pytest.raises(bridge.ShardingError, match=r"^here"):
        explicit_axes.sharded(TREE, "here", strict=True)


@KINDS
def test_foreign_names_are_left_alone_unless_they_have_to_fit(kind):
    with jax.set_mesh(mesh(kind)):
        placed = explicit_axes.sharded(foreign(), "here", strict=False)
        assert placed["w"].value is ARRAY
        assert explicit_axes.misfit(foreign(), "here", strict=False) is None
        error = explicit_axes.misfit(foreign(), "here", strict=True)
        assert error.problems == (
            ("w", "(4, 8) as P('rows', None)", "the mesh has no axis 'rows'"),
        )
        with pytest.raises(bridge.ShardingError) as caught:
            explicit_axes.sharded(foreign(), "here", strict=True)
        assert caught.value.problems == error.problems


def test_a_dimension_that_cannot_be_divided_is_a_misfit():
    odd = {"w": nn.Partitioned(jnp.ones((3, 8)), ("data", None))}
    with jax.set_mesh(mesh()):
        assert explicit_axes.misfit(odd, "here", strict=False).problems[0][0] == "w"
        with pytest.raises(bridge.ShardingError):
            explicit_axes.sharded(odd, "here", strict=False)
        # In a program JAX divides over Auto axes whatever it can.
        run = jax.jit(lambda tree: explicit_axes.sharded(tree, "here", strict=False))
        assert_identical(run(odd), odd)


@pytest.mark.parametrize("kind", ["explicit", "mixed"])
@pytest.mark.parametrize("eager", [True, False])
def test_variables_are_created_in_their_shards_where_axes_are_explicit(kind, eager):
    dense = nn.Dense(
        8, kernel_init=nn.with_partitioning(nn.initializers.ones, ("data", "model")), use_bias=False
    )
    x = jnp.ones((2, 4))
    key = jax.random.key(0)
    with jax.set_mesh(mesh(kind)):
        made = explicit_axes.init_in_auto_axes(dense.init, key, x, eager=eager)
        kernel = made["params"]["kernel"]
    assert kernel.names == ("data", "model")
    # Replicated is `P()` or `P(None, None)`, depending on the release of JAX.
    wanted = jax.NamedSharding(kernel.value.sharding.mesh, P("data", "model") if eager else P())
    assert kernel.value.sharding.is_equivalent_to(wanted, ndim=2)
    assert_identical(nn.unbox(made), nn.unbox(dense.init(key, x)))
