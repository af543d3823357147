"""Saved values come back bit for bit, with their keys and boxes, with and without a target."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict, freeze, meta
from hypothesis import given
from hypothesis import strategies as st

import bridge
import registry
from bridge import checkpoint
from bridge._flax.variables import variable_from_metadata
from tests.drawing import drawing
from tests.strategies import (
    Documented,
    Sealed,
    arrays,
    exact,
    linen_boxes,
    linen_variables,
    states,
    stored_value,
)


def is_storable(value):
    """Orbax stores no weak types: what was weakly typed comes back strongly typed."""
    if isinstance(value, Mapping):
        # Not jax.tree: it cannot sort keys of two types.
        return all(map(is_storable, value.values()))
    leaves = jax.tree.leaves(value)
    is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    return not is_abstract and not any(getattr(leaf, "weak_type", False) for leaf in leaves)


def storable(strategy):
    return strategy.filter(is_storable)


def bare_leaves():
    single = arrays() | st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=2)
    sown = st.lists(single, max_size=3)
    return storable(single | sown | sown.map(tuple))


def as_restored(tree):
    """Variables as they come back without a target: plain dicts, and boxes without a mesh.

    A mesh belongs to the program; a box without one takes the mesh in force.
    """
    if isinstance(tree, Mapping):
        return {key: as_restored(value) for key, value in tree.items()}
    return tree.replace(mesh=None) if isinstance(tree, meta.Partitioned) else tree


def blank(tree):
    """The same tree with zeros for all values: a target from which no value can come."""
    if isinstance(tree, nnx.State):
        return nnx.State({key: blank(value) for key, value in tree.items()})
    if isinstance(tree, Mapping):
        made = {key: blank(value) for key, value in tree.items()}
        return freeze(made) if isinstance(tree, FrozenDict) else made
    if isinstance(tree, nnx.Variable):
        metadata = tree.get_metadata()
        return variable_from_metadata(tree.var_type, blank(stored_value(tree)), metadata)
    if isinstance(tree, meta.AxisMetadata):
        codec = registry.current().codec_for(type(tree))
        value, fields = codec.to_fields(tree)
        return codec.from_fields(blank(value), fields)
    return jax.tree.map(blank_leaf, tree)


def blank_leaf(leaf):
    if not isinstance(leaf, jax.Array):
        return np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else type(leaf)()
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jnp.zeros_like(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=str(jax.random.key_impl(leaf)))
    return jnp.zeros_like(leaf)


def saved(tree, **options):
    path = Path(tempfile.mkdtemp()) / "checkpoint"
    checkpoint.save(path, tree, **options)
    return path


@drawing(10)
@given(linen_variables(bare_leaves() | storable(linen_boxes())))
def test_linen_variables_come_back_with_and_without_a_target(variables):
    before = exact(variables)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "checkpoint"
        checkpoint.save(path, variables)
        alone = checkpoint.restore(path)
        with_target = checkpoint.restore(path, blank(variables))
    assert exact(alone) == exact(as_restored(variables))
    assert exact(with_target) == before == exact(variables)


@drawing(8)
@given(storable(states()))
def test_a_state_comes_back_into_a_state_of_the_same_form(state):
    try:
        bridge.nnx_to_linen(state)
    except bridge.BridgeError:
        # Two Variables for one place: there is no checkpoint of that either.
        with pytest.raises(bridge.BridgeError):
            saved(state)
        return
    path = saved(state)
    assert exact(checkpoint.restore(path, blank(state))) == exact(state)


def test_what_a_key_is_survives_a_string_that_looks_the_same():
    tree = {
        "params": {
            "a": {
                1: jnp.zeros(1),
                "1": jnp.ones(1),
                -1: jnp.asarray([2.0]),
                "-1": jnp.asarray([3.0]),
            },
            "b.c": jnp.asarray([4.0]),
            "b": {"c": jnp.asarray([5.0])},
            "b/c": jnp.asarray([6.0]),
            "b%2Ec": jnp.asarray([7.0]),
            "": {"": jnp.asarray([8.0])},
            ("x", 1): jnp.asarray([9.0]),
            "(x,1)": jnp.asarray([10.0]),
            ("x", ("1", 2)): {("y",): jnp.asarray([11.0])},
        }
    }
    path = saved(tree)
    assert exact(checkpoint.restore(path)) == exact(tree)
    assert exact(checkpoint.restore(path, blank(tree))) == exact(tree)


def test_a_list_of_more_than_ten_modules_keeps_its_order():
    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(12)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    x = jnp.ones((1, 2))
    model = Stack(nnx.Rngs(0))
    path = saved(model)
    variables = checkpoint.restore(path)
    assert set(variables["params"]["layers"]) == set(range(12))
    linen = bridge.to_linen(Stack)
    np.testing.assert_array_equal(linen.apply(variables, x), model(x))
    other = checkpoint.restore(path, Stack(nnx.Rngs(1)))
    np.testing.assert_array_equal(other(x), model(x))


def test_keys_with_slashes_apply_without_a_target():
    module = nn.SpectralNorm(nn.Dense(3))
    x = jnp.ones((2, 4))
    variables = module.init(jax.random.key(0), x, update_stats=False)
    names = list(variables["batch_stats"])
    assert any("/" in name for name in names)
    restored = checkpoint.restore(saved(variables))
    assert exact(restored) == exact(variables)
    expected = module.apply(variables, x, update_stats=False)
    np.testing.assert_array_equal(module.apply(restored, x, update_stats=False), expected)


def nnx_box(value):
    return bridge.NNXMeta(nnx.Param, value, {"out_sharding": ("a", None), "tag": "t"})


@pytest.mark.parametrize(
    "box",
    [
        lambda value: nn.Partitioned(value, ("a", ("b", "c"))),
        lambda value: nn.LogicallyPartitioned(value, ("a", None), rules=(("a", "x"),)),
        lambda value: Documented(value, author="somebody", axes=("a", None)),
        lambda value: Sealed(value, 7),
        nnx_box,
        lambda value: bridge.NNXMeta(
            nnx.Param, value, {"out_sharding": jax.sharding.PartitionSpec("a", None)}
        ),
    ],
)
@pytest.mark.parametrize("through_nnx", [False, True])
def test_a_box_comes_back_without_a_target(box, through_nnx):
    variables = {"params": {"w": box(jnp.arange(4.0).reshape(2, 2))}}
    path = saved(bridge.linen_to_nnx(variables) if through_nnx else variables)
    assert exact(checkpoint.restore(path)) == exact(variables)


def test_a_box_takes_its_fields_from_the_target():
    saved_box = nn.Partitioned(jnp.arange(2.0), ("old",))
    path = saved({"params": {"w": saved_box}})
    target = {"params": {"w": nn.LogicallyPartitioned(jnp.zeros(2), ("new",))}}
    restored = checkpoint.restore(path, target)["params"]["w"]
    assert exact(restored) == exact(nn.LogicallyPartitioned(jnp.arange(2.0), ("new",)))
    bare = checkpoint.restore(path, {"params": {"w": jnp.zeros(2)}})
    assert exact(bare) == exact({"params": {"w": jnp.arange(2.0)}})


def hook(variable, value):
    return value


def test_a_function_in_a_box_needs_a_target_and_is_never_stored():
    variable = nnx.Param(jnp.ones(2), tag="t")
    # The constructor would warn that hooks are deprecated.
    variable.set_metadata(on_get_value=hook)
    state = nnx.State({"w": variable})
    path = saved(state)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.restore(path)
    ((where, reason),) = caught.value.unsupported
    assert where == "params/w"
    assert "on_get_value" in reason
    assert exact(checkpoint.restore(path, blank(state))) == exact(state)
    assert "hook" not in notes_of(path)


class Renamed(nnx.Variable):
    """A type whose own hook needs no storing: the type says it."""

    def on_add_axis(self, axis_index, axis_name):
        self.set_metadata(added=axis_name)


def test_a_hook_of_the_variable_type_comes_back_by_itself():
    with registry.use(registry.current().extend({"renamed": Renamed})):
        # The constructor would warn that hooks are deprecated.
        variable = variable_from_metadata(Renamed, jnp.ones(2), {"tag": "t"})
        variables = bridge.nnx_to_linen(nnx.State({"w": variable}))
        assert variables["renamed"]["w"].metadata["on_add_axis"] is Renamed.on_add_axis
        restored = checkpoint.restore(saved(variables))
        assert exact(restored) == exact(variables)


def test_a_box_of_a_type_that_is_not_loaded_is_named(tmp_path):
    path = saved({"params": {"w": Sealed(jnp.ones(2), 7)}})
    rewrite_notes(path, "Sealed", "NotThere")
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.restore(path)
    assert "NotThere" in dict(caught.value.unsupported)["params/w"]
    target = {"params": {"w": Sealed(jnp.zeros(2), 7)}}
    assert exact(checkpoint.restore(path, target)["params"]["w"]) == exact(Sealed(jnp.ones(2), 7))


@pytest.mark.parametrize("name", ["os:system", "builtins:eval", "subprocess:Popen"])
def test_a_checkpoint_cannot_name_anything_but_boxes_and_variable_types(name):
    path = saved({"params": {"w": Sealed(jnp.ones(2), 7)}})
    rewrite_notes(path, f"{Sealed.__module__}:Sealed", name)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.restore(path)
    assert name in dict(caught.value.unsupported)["params/w"]


@pytest.mark.parametrize(
    "value",
    [
        jnp.arange(6.0, dtype=jnp.bfloat16).reshape(2, 3),
        jnp.asarray(3, jnp.int32),
        jnp.zeros((0, 4), jnp.bfloat16),
        np.zeros((2, 0)),
        np.float64(0.1),
        np.arange(3, dtype=np.float64),
        jnp.asarray([jnp.nan, -0.0, jnp.inf]),
        7,
        0.1,
        float("inf"),
        True,
        "text",
        None,
        (jnp.ones(2), None, [3]),
        (),
        jax.random.key(3),
        jax.random.split(jax.random.key(4, impl="rbg"), 3),
        jax.random.key(5, impl="unsafe_rbg"),
        jax.random.split(jax.random.key(6), 2)[:0],
        jax.random.PRNGKey(7),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_a_leaf_of_any_kind_comes_back(value):
    variables = {"params": {"w": jnp.ones(1)}, "cache": {"leaf": value, "none": {}}, "empty": {}}
    path = saved(variables)
    assert exact(checkpoint.restore(path)) == exact(variables)
    frozen = freeze(variables)
    assert exact(checkpoint.restore(path, blank(frozen))) == exact(frozen)


@flax.struct.dataclass
class Cache:
    keys: jax.Array
    index: int = flax.struct.field(pytree_node=False)


def test_a_container_that_only_a_program_can_make_needs_a_target():
    variables = {"cache": {"kv": Cache(jnp.arange(3.0), 4)}}
    path = saved(variables)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.restore(path)
    assert "Cache" in dict(caught.value.unsupported)["cache/kv"]
    restored = checkpoint.restore(path, {"cache": {"kv": Cache(jnp.zeros(3), 5)}})
    np.testing.assert_array_equal(restored["cache"]["kv"].keys, np.arange(3.0, dtype=np.float32))
    assert restored["cache"]["kv"].index == 5


def test_nothing_is_pickled_and_no_graphdef_is_stored():
    class Named(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(2, 2, rngs=rngs)
            self.label = "a static attribute"

        def __call__(self, x):
            return self.linear(x)

    variables = bridge.to_linen(Named).init(jax.random.key(0), jnp.ones((1, 2)))
    assert isinstance(variables["nnx"]["graphdef"], nnx.GraphDef)
    path = saved(variables)
    for file in path.rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        assert b"static attribute" not in content
        assert b"GraphDef" not in content
        # What pickle writes first in every protocol since 2.
        assert not content.startswith(b"\x80")
    assert {leaf.collection for leaf in checkpoint.layout(path).leaves} == {"params"}


def test_orbax_alone_reads_the_arrays():
    variables = {"params": {"Dense_0": {"kernel": jnp.ones((2, 3)), 10: jnp.zeros(1)}}}
    path = saved(variables)
    found = ocp.PyTreeCheckpointHandler().restore(
        path / "variables",
        args=ocp.args.PyTreeRestore(
            restore_args={
                "params": {
                    "Dense_0": {
                        "kernel": ocp.RestoreArgs(restore_type=np.ndarray),
                        "10": ocp.RestoreArgs(restore_type=np.ndarray),
                    }
                }
            }
        ),
    )
    np.testing.assert_array_equal(found["params"]["Dense_0"]["kernel"], np.ones((2, 3)))


def test_the_layout_is_told_without_reading_arrays():
    variables = {
        "params": {"w": nn.Partitioned(jnp.ones((2, 3), jnp.bfloat16), ("a", None))},
        "cache": {3: (jnp.ones(1), 2), "empty": {}},
    }
    path = saved(variables, extra={"step": 3})
    for file in (path / "variables").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    found = checkpoint.layout(path)
    assert (found.layout, found.format, found.extra) == ("bridge", "orbax", ("step",))
    leaves = {(leaf.collection, leaf.path): leaf for leaf in found.leaves}
    assert leaves.keys() == {("params", ("w",)), ("cache", (3,)), ("cache", ("empty",))}
    kernel = leaves["params", ("w",)]
    assert (kernel.shape, kernel.dtype) == ((2, 3), "bfloat16")
    assert kernel.box.endswith(".Partitioned")
    assert leaves["cache", (3,)].shape is None


def test_paths_may_be_relative_and_strings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint.save("here", {"params": {"w": jnp.ones(1)}})
    assert isinstance(checkpoint.restore("here"), Mapping)
    assert (tmp_path / "here").is_dir()


def notes_of(path):
    return (path / "bridge" / "metadata").read_text()


def rewrite_notes(path, old, new):
    text = notes_of(path)
    assert old in text
    json.loads(text.replace(old, new))
    (path / "bridge" / "metadata").write_text(text.replace(old, new))
