"""Each Linen variable is matched with its leaf of a definition; native NNX is the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization

from bridge._conversion.neutral import by_address
from bridge._graphdefs import static_graphdef
from bridge._nnx_in_linen.matched_variables import MatchedVariables, overlay, unboxed
from tests.models import assert_identical


class Model(nnx.Module):
    def __init__(self, *, rngs):
        self.layers = nnx.List([nnx.Linear(3, 2, rngs=rngs), nnx.Linear(2, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.cache = nnx.Cache(jnp.zeros(4))


def split():
    module = Model(rngs=nnx.Rngs(0))
    graphdef, leaves = static_graphdef.split(module)
    return module, graphdef, leaves


def matched(graphdef, variables, *arguments):
    return MatchedVariables(graphdef, by_address(variables), *arguments)


def variables_of(graphdef, leaves):
    variables = {}
    for slot, leaf in zip(graphdef.slots, leaves, strict=True):
        collection, path = slot.address
        tree = variables.setdefault(collection, {})
        for key in path[:-1]:
            tree = tree.setdefault(key, {})
        tree[path[-1]] = leaf.get_raw_value()
    return variables


def test_values_come_in_the_order_of_the_native_leaves():
    module, graphdef, leaves = split()
    found = matched(graphdef, variables_of(graphdef, leaves))
    native = [leaf.get_raw_value() for leaf in jax.tree.leaves(
        nnx.state(module), is_leaf=lambda x: isinstance(x, nnx.Variable)
    )]  # fmt: skip
    assert_identical(found.values, native)
    assert found.comparison(rng=True).fits
    assert found.unknown == {}


def test_keys_that_a_file_made_strings_are_found_and_stay_strings():
    _, graphdef, leaves = split()
    variables = {"params": variables_of(graphdef, leaves)["params"]}
    restored = serialization.msgpack_restore(serialization.to_bytes(variables))
    assert set(restored["params"]["layers"]) == {"0", "1"}
    found = matched(graphdef, restored)
    assert found.unknown == {}
    assert ("params", ("layers", 1, "bias")) in found.leaves
    assert found.placed(("params", ("layers", 1, "bias"))) == ("params", ("layers", "1", "bias"))
    # A new leaf goes beside those that are there.
    assert found.placed(("params", ("layers", 0, "new"))) == ("params", ("layers", "0", "new"))
    assert found.placed(("other", (0, "new"))) == ("other", (0, "new"))


def test_everything_that_does_not_fit_is_listed_at_once():
    _, graphdef, leaves = split()
    variables = variables_of(graphdef, leaves)
    del variables["params"]["layers"][0]["bias"]
    variables["params"]["norm"]["scale"] = jnp.ones(3)
    variables["batch_stats"]["norm"]["mean"] = jnp.ones(5)
    variables["params"]["extra"] = jnp.ones(1)
    found = matched(graphdef, variables).comparison()
    assert set(found.missing) == {("params", ("layers", 0, "bias"))}
    assert set(found.mis_shaped) == {
        ("params", ("norm", "scale")),
        ("batch_stats", ("norm", "mean")),
    }
    assert set(found.unknown) == {("params", ("extra",))}


def test_a_cache_may_grow_and_streams_may_be_absent():
    _, graphdef, leaves = split()
    variables = variables_of(graphdef, leaves)
    variables["cache"]["cache"] = jnp.zeros(16)
    without = {name: tree for name, tree in variables.items() if not name.startswith("Rng")}
    assert len(without) < len(variables)
    assert matched(graphdef, without).comparison().fits
    assert not matched(graphdef, without).comparison(rng=True).fits


def test_arguments_stand_in_for_variables_that_are_not_there():
    class Holds(nnx.Module):
        def __init__(self, table, *, rngs):
            self.table = nnx.data(table)
            self.scale = nnx.Param(jnp.ones(()))

    graphdef, _ = static_graphdef.split(Holds(jnp.arange(3), rngs=nnx.Rngs(0)))
    address = ("nnx_arrays", ("table",))
    given = {address: jnp.arange(3) + 7}
    params = {"params": {"scale": jnp.ones(())}}
    assert_identical(matched(graphdef, params, given).leaves[address], given[address])
    written = {**params, "nnx_arrays": {"table": jnp.arange(3) + 9}}
    found = matched(graphdef, written, given)
    assert_identical(found.leaves[address], written["nnx_arrays"]["table"])


def test_overlay_replaces_what_exists_and_leaves_the_rest_as_constructed():
    module, graphdef, leaves = split()
    kernel = jnp.full((3, 2), 5.0)
    expected = nnx.clone(module)
    expected.layers[0].kernel[...] = kernel
    found = MatchedVariables(graphdef, by_address({"params": {"layers": {0: {"kernel": kernel}}}}))
    overlay(leaves, found)
    assert_identical(nnx.state(module), nnx.state(expected))


@pytest.mark.parametrize("value", [np.arange(3, dtype=np.float32), np.float32(2.5)])
def test_what_numpy_restored_becomes_an_array_of_jax(value):
    found = unboxed(value)
    assert isinstance(found, jax.Array)
    assert_identical(found, jnp.asarray(value))


def test_a_value_that_jax_would_narrow_stays_and_cannot_be_written_into():
    value = np.arange(3, dtype=np.float64)
    found = unboxed(value, jax.ShapeDtypeStruct((3,), np.float64))
    assert found.dtype == np.float64
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1.0
    value[0] = 7.0
    assert found[0] == 0.0
