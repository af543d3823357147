"""Reads and writes the variables of a Linen module that stands for an NNX module."""

import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge._graphdefs.static_graphdef import split
from bridge._nnx_in_linen import scope_variables

ONE, TWO = jnp.ones(1), jnp.full(1, 2.0)
GRAPHDEF = split(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))[0]


class Empty(nn.Module):
    """Stands for an NNX module."""


def bound(variables, mutable=True):
    return Empty().bind(variables, mutable=mutable)


def written(leaves, variables=(), mutable=True, keys=None, *, string_keys=False):
    module = bound(dict(variables), mutable)
    found = {("params", ("w",)): dict(variables).get("params", {}).get("w")}
    scope_variables.write(module, leaves, found, keys or {}, string_keys=string_keys)
    return module.variables


def test_a_graphdef_is_stored_and_found_again():
    module = bound({})
    assert scope_variables.stored_graphdef(module) is None
    scope_variables.store_graphdef(module, GRAPHDEF)
    assert scope_variables.stored_graphdef(module) == GRAPHDEF


@pytest.mark.parametrize("stand_in", [{}, None])
def test_what_a_checkpoint_has_in_its_place_is_none(stand_in):
    assert scope_variables.stored_graphdef(bound({"nnx": {"graphdef": stand_in}})) is None


def test_it_is_not_stored_where_the_collection_was_left_behind():
    module = bound({}, mutable=["params"])
    scope_variables.store_graphdef(module, GRAPHDEF)
    assert "nnx" not in module.variables


def test_variables_are_read_without_graphdefs_and_what_is_empty():
    variables = {"params": {"w": ONE}, "cache": {}, "nnx": {"graphdef": GRAPHDEF}}
    assert scope_variables.read(bound(variables)) == {"params": {"w": ONE}}
    own = {"nnx": {"graphdef": GRAPHDEF, "mine": ONE}}
    assert scope_variables.read(bound(own)) == {"nnx": {"mine": ONE}}


def test_leaves_are_written_into_mutable_collections_alone():
    leaves = {("params", ("w",)): ONE, ("cache", ("a", 0)): TWO}
    assert written(leaves) == {"params": {"w": ONE}, "cache": {"a": {0: TWO}}}
    assert written(leaves, mutable=["cache"]) == {"cache": {"a": {0: TWO}}}


def test_a_box_that_is_there_stays_and_gets_the_new_value():
    variables = {"params": {"w": nn.Partitioned(ONE, ("a",))}}
    for leaf in (TWO, nn.Partitioned(TWO, ("b",))):
        found = written({("params", ("w",)): leaf}, variables)["params"]["w"]
        assert found.names == ("a",)
        assert found.value is TWO


def test_a_leaf_goes_where_it_really_is():
    address, real = ("params", ("layers", 0, "w")), ("params", ("layers", "0", "w"))
    assert written({address: ONE}, keys={address: real}) == {
        "params": {"layers": {"0": {"w": ONE}}}
    }


@pytest.mark.parametrize(
    ("string_keys", "expected"), [(False, ("0", 1, "w")), (True, ("0", "1", "w"))]
)
def test_integers_below_the_top_are_strings_where_that_is_asked_for(string_keys, expected):
    assert scope_variables.spelled((0, 1, "w"), string_keys) == expected
    found = written({("params", (0, 1, "w")): ONE}, string_keys=string_keys)
    (top, (second, _)) = (expected[0], expected[1:])
    assert found == {"params": {top: {second: {"w": ONE}}}}


def test_the_place_of_the_graphdef_is_reserved():
    with pytest.raises(bridge.ReservedNameError, match="nnx/graphdef"):
        written({("nnx", ("graphdef",)): ONE})


def test_a_removed_leaf_takes_along_what_held_nothing_else():
    variables = {"cache": {"a": {"b": {"w": ONE}}, "c": TWO}, "params": {"w": ONE}}
    module = bound(variables)
    scope_variables.remove(module, [("cache", ("a", "b", "w"))])
    assert module.variables == {"cache": {"c": TWO}, "params": {"w": ONE}}
