"""Leaves are sharded at once when a wrapper creates or takes them in."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import bridge
from bridge._conversion.linen_leaves import from_variables
from bridge._sharding.eager import constructed, in_shards, is_eager
from tests._sharding.sharded_models import AXIS_TYPES, mesh

ARRAY = jnp.arange(32.0).reshape(4, 8)
ADDRESS = ("params", ("w",))
NAMES = ("data", "model")


def leaves(box=nn.Partitioned, names=NAMES):
    return from_variables({"params": {"w": box(ARRAY, names), "b": ARRAY}})


def spec(value):
    return getattr(value.sharding, "spec", P())


@pytest.mark.parametrize(("option", "flag", "expected"), [(None, True, True), (None, False, False)])
@pytest.mark.parametrize("said", [True, False])
def test_the_option_counts_before_flaxs_flag(option, flag, expected, said):
    with nnx.use_eager_sharding(flag):
        assert is_eager(option) is expected
        assert is_eager(said) is said


@pytest.mark.parametrize("kind", AXIS_TYPES)
def test_annotated_leaves_are_put_in_their_shards_and_no_others(kind):
    given = leaves()
    with jax.set_mesh(mesh(kind)):
        placed = in_shards(given, True, "here")
    assert placed.keys() == given.keys()
    assert spec(placed[ADDRESS].value) == P(*NAMES)
    assert placed[ADDRESS]._replace(value=None) == given[ADDRESS]._replace(value=None)
    assert placed["params", ("b",)].value is ARRAY
    assert given[ADDRESS].value is ARRAY


def test_without_the_option_nothing_moves():
    given = leaves()
    with jax.set_mesh(mesh()):
        assert in_shards(given, False, "here") is given
        with nnx.use_eager_sharding(False):
            assert in_shards(given, None, "here") is given
    # And without a mesh there is nothing to shard over.
    assert in_shards(given, None, "here")[ADDRESS].value is ARRAY


def test_a_variable_that_was_made_without_eager_sharding_stays_where_it_is():
    def box(value, names):
        return bridge.NNXMeta(nnx.Param, value, {"out_sharding": names, "eager_sharding": False})

    with jax.set_mesh(mesh()):
        assert in_shards(leaves(box), None, "here")[ADDRESS].value is ARRAY
        # Unless the wrapper says so.
        assert spec(in_shards(leaves(box), True, "here")[ADDRESS].value) == P(*NAMES)


def test_names_that_are_no_axes_are_an_error_where_sharding_was_asked_for():
    with jax.set_mesh(mesh()):
        assert in_shards(leaves(names=("x", None)), None, "here")[ADDRESS].value is ARRAY
        with pytest.raises(bridge.ShardingError, match=r"^here"):
            in_shards(leaves(names=("x", None)), True, "here")


class Model(nnx.Module):
    def __init__(self, names):
        # Made here, under the mesh: Flax moves no array that was made outside of it.
        self.w = nnx.Param(jnp.ones((4, 8)), out_sharding=names)
        self.b = nnx.Param(jnp.ones(3))


def built(names, option, **options):
    options = {"is_abstract": False, **options}
    return constructed(lambda: Model(names), option, "here", **options)[0]


def test_a_module_is_constructed_in_its_shards_as_natively():
    with jax.set_mesh(mesh()):
        native = Model(NAMES)
        model = built(NAMES, None)
        assert spec(model.w[...]) == spec(native.w[...]) == P(*NAMES)
        assert model.w.get_metadata() == native.w.get_metadata()


def test_a_module_that_flax_refuses_is_constructed_and_left_as_it_is():
    with jax.set_mesh(mesh()):
        with pytest.raises(ValueError, match="x"):
            Model(("x", None))
        model = built(("x", None), None)
    assert spec(model.w[...]) == P()
    assert model.w.eager_sharding
    assert spec(built(NAMES, None).w[...]) == P()


def test_a_module_that_flax_refuses_is_refused_if_sharding_was_asked_for():
    with jax.set_mesh(mesh()), pytest.raises(ValueError, match="x"):
        built(("x", None), True)


def test_an_abstract_module_is_not_sharded_and_says_the_same_of_itself():
    with jax.set_mesh(mesh()):
        native = Model(NAMES)
        shapes = jax.eval_shape(lambda: nnx.state(built(NAMES, None, is_abstract=True)))
    assert shapes["w"].get_metadata() == native.w.get_metadata()


def test_what_a_module_consists_of_comes_along():
    module, nodes = constructed(lambda: Model(None), False, "here", is_abstract=False)
    assert {id(v) for v in nodes.variables} == {id(module.w), id(module.b)}


class TwoMeshes(nnx.Module):
    """One Variable brings a mesh, one is annotated without, one is not annotated."""

    def __init__(self, own):
        self.own = nnx.Param(ARRAY + 1, out_sharding=("a", None), mesh=own)
        self.other = nnx.Param(ARRAY, out_sharding=NAMES)
        self.plain = nnx.Param(ARRAY)

    def __call__(self, x):
        return x


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_a_variable_that_brings_its_mesh_is_sharded_without_one_in_force(kind):
    own = jax.make_mesh((2,), ("a",), (kind,), devices=jax.devices()[:2])
    native = nnx.Param(ARRAY, out_sharding=("a", None), mesh=own).get_raw_value().sharding
    model = bridge.to_linen(TwoMeshes, own)
    # With Explicit axes JAX compiles for a mesh that is in force alone.
    is_auto = kind == jax.sharding.AxisType.Auto
    for init in (model.init, *([jax.jit(model.init)] if is_auto else [])):
        params = nn.unbox(init(jax.random.key(0), ARRAY)["params"])
        assert params["own"].sharding.is_equivalent_to(native, 2)
        assert not any(spec(params["plain"]))
        assert not any(spec(params["other"]))
    shapes = jax.eval_shape(model.init, jax.random.key(0), ARRAY)
    assert jax.tree.structure(shapes) == jax.tree.structure(model.init(jax.random.key(0), ARRAY))


@pytest.mark.parametrize("around", [contextlib.nullcontext, lambda: jax.set_mesh(mesh("auto"))])
def test_the_error_for_a_mesh_that_a_variable_brings_says_whose_it_is(around):
    """Regression: it spoke of the mesh, and of rules, as if there were no other one."""
    own = jax.make_mesh((2,), ("a",), devices=jax.devices()[:2])

    class Uneven(nnx.Module):
        def __init__(self):
            self.own = nnx.Param(jnp.ones((3, 2)), out_sharding=("a", None), mesh=own)

        def __call__(self, x):
            return x

    with pytest.raises(ValueError, match="divi"):
        Uneven()
    with around(), pytest.raises(bridge.ShardingError, match="mesh=") as caught:
        bridge.to_linen(Uneven).init(jax.random.key(0), ARRAY)
    assert caught.value.is_own
    assert caught.value.mesh == {"a": 2}
    assert "rules=" not in str(caught.value)
    with jax.set_mesh(mesh("auto")), pytest.raises(bridge.ShardingError) as caught:
        in_shards(leaves(names=("data", "data")), True, "here")
    assert not caught.value.is_own
    assert "rules=" in str(caught.value)


@pytest.mark.parametrize("entry", [bridge.init_sharded, bridge.abstract])
def test_the_error_for_another_mesh_than_that_of_a_variable_names_both(entry):
    """Regression: it said that the mesh lacks an axis, and not that the Variable has a mesh."""
    own = jax.make_mesh((2,), ("a",), devices=jax.devices()[:2])
    for build in (lambda rngs: TwoMeshes(own), bridge.to_linen(TwoMeshes, own)):
        with pytest.raises(bridge.ShardingError) as caught:
            entry(build, mesh("auto"), ARRAY, rngs=jax.random.key(0))
        ((path, _, missing), (_, _, brought)) = caught.value.problems
        assert path.endswith("own")
        assert "no axis 'a'" in missing
        assert "{'a': 2}" in brought
        assert caught.value.mesh == {"data": 2, "model": 4}


def test_every_leaf_that_names_an_axis_twice_is_listed():
    class Twice(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Param(ARRAY, out_sharding=(name, name)) for name in NAMES])
            self.fits = nnx.Param(ARRAY, out_sharding=NAMES)

        def __call__(self, x):
            return x

    key, found = jax.random.key(0), mesh("auto")
    model = bridge.to_linen(Twice)
    runs = [
        lambda: model.init(key, ARRAY),
        lambda: jax.jit(model.init)(key, ARRAY),
        lambda: bridge.ToLinen(Twice, eager_sharding=True).init(key, ARRAY),
        lambda: bridge.init_sharded(model, found, ARRAY, rngs=key),
        lambda: bridge.abstract(model, found, ARRAY, rngs=key),
    ]
    for run in runs:
        with jax.set_mesh(found), pytest.raises(bridge.ShardingError) as raised:
            run()
        assert [what for _, _, what in raised.value.problems] == [
            f"axis {name!r} is there more than once" for name in NAMES
        ]
