"""Leaves of Linen variables in the neutral form, and back."""

import jax.numpy as jnp
import pytest
from flax import config, nnx
from flax import linen as nn
from flax.core import FrozenDict, freeze
from hypothesis import given, settings

import bridge
import registry
from bridge._conversion.linen_leaves import (
    EXPECTED,
    check_variables,
    from_leaf,
    from_variables,
    to_leaf,
    to_variables,
)
from bridge._conversion.neutral import Leaf
from tests.strategies import exact, linen_variables, thawed

ARRAY = jnp.ones((2, 3))


def here(value, collection="params"):
    return to_leaf(collection, ("w",), value, registry.current())


@given(linen_variables())
@settings(max_examples=10)
def test_variables_come_back_from_the_neutral_form(variables):
    before = exact(variables)
    assert exact(to_variables(from_variables(variables))) == exact(thawed(variables))
    assert exact(variables) == before


def test_every_leaf_and_every_empty_mapping_has_an_address():
    variables = {"params": {"a": {"w": ARRAY}, "b": {}}, "cache": FrozenDict(), "0": {0: (1, 2)}}
    assert from_variables(variables) == {
        ("params", ("a", "w")): Leaf(ARRAY),
        ("params", ("b",)): Leaf({}),
        ("cache", ()): Leaf({}),
        ("0", (0,)): Leaf((1, 2)),
    }


def test_graphdefs_are_no_leaves():
    graphdef = nnx.graphdef(nnx.Param(ARRAY))
    variables = {"nnx": {"graphdef": graphdef, "own": ARRAY}, "params": {"graphdef": graphdef}}
    assert list(from_variables(variables)) == [("nnx", ("own",)), ("params", ("graphdef",))]


def test_a_bare_value_is_the_leaf_itself():
    assert here(ARRAY) == Leaf(ARRAY)
    assert from_leaf("params", Leaf(ARRAY), registry.current()) is ARRAY


def test_an_empty_mapping_is_made_anew_because_linen_may_write_into_it():
    empty = {}
    back = from_leaf("params", here(empty), registry.current())
    assert back == {}
    assert back is not empty


def test_a_box_of_linen_is_taken_apart_under_the_names_of_nnx():
    leaf = here(nn.Partitioned(ARRAY, ("a", None)))
    assert leaf.value is ARRAY
    assert leaf.box is nn.Partitioned
    assert leaf.fields["out_sharding"] == ("a", None)
    back = from_leaf("params", leaf, registry.current())
    assert exact(back) == exact(nn.Partitioned(ARRAY, ("a", None)))


def test_an_nnx_meta_keeps_its_metadata_and_has_its_collections_type():
    metadata = {"note": "kept"}
    leaf = here(bridge.NNXMeta(nnx.Param, ARRAY, metadata))
    assert (leaf.value, leaf.box, leaf.fields) == (ARRAY, bridge.NNXMeta, metadata)
    back = from_leaf("batch_stats", leaf, registry.current())
    assert back.var_type is nnx.BatchStat
    assert back.metadata == metadata
    assert back.metadata is not metadata


def test_an_nnx_meta_of_another_collection_is_an_error_that_names_its_own():
    box = bridge.NNXMeta(nnx.BatchStat, ARRAY, {})
    with pytest.raises(bridge.ConversionError) as caught:
        here(box)
    for said in ("params/w", "BatchStat", "'params' is Param", "collection 'batch_stats'"):
        assert said in str(caught.value)
    assert here(box, "batch_stats").value is ARRAY


def test_a_class_defined_again_goes_to_the_collection_of_the_first_one():
    def definition():
        class Again(nnx.Variable):
            pass

        return Again

    first, second = definition(), definition()
    with registry.use(registry.current().extend({"tests_again": first})):
        with pytest.raises(bridge.ConversionError):
            here(bridge.NNXMeta(nnx.Param, ARRAY, {}), "tests_again")
        assert here(bridge.NNXMeta(first, ARRAY, {}), "tests_again").value is ARRAY
    registry.register_variable_name("tests_defined_again", first)
    registry.register_variable_name("tests_defined_again", second)
    assert here(bridge.NNXMeta(first, ARRAY, {}), "tests_defined_again").value is ARRAY


@pytest.mark.parametrize("frozen", [True, False])
def test_flax_says_whether_variables_are_frozen(frozen):
    with config.temp_flip_flag("return_frozendict", frozen):
        made = to_variables({("params", ("w",)): Leaf(ARRAY)})
    assert type(made) is (FrozenDict if frozen else dict)
    assert exact(made) == exact(freeze(made) if frozen else {"params": {"w": ARRAY}})


PARAMS_ALONE = "give parameters alone as"
IS_NNX = "bridge.nnx_to_linen turns it into variables"
INIT = "give what the module's init returns"


@pytest.mark.parametrize(
    ("found", "hint", "strange"),
    [
        (nnx.Linear(2, 3, rngs=nnx.Rngs(0)), IS_NNX, PARAMS_ALONE),
        (nn.Dense(3), INIT, IS_NNX),
        ({"kernel": ARRAY}, PARAMS_ALONE, IS_NNX),
        ({"params": {"w": ARRAY}, "kernel": ARRAY}, "", PARAMS_ALONE),
        ({"kernel": nnx.Param(ARRAY)}, IS_NNX, PARAMS_ALONE),
        ({"layer": nnx.Linear(2, 3, rngs=nnx.Rngs(0))}, IS_NNX, PARAMS_ALONE),
        ({0: {"w": ARRAY}}, PARAMS_ALONE, IS_NNX),
        ([ARRAY], "", PARAMS_ALONE),
    ],
    ids=["module", "Linen", "params", "mixed", "Variable", "nested", "integer", "list"],
)
def test_what_is_no_mapping_of_mappings_is_an_error_with_the_right_hint(found, hint, strange):
    for check in (check_variables, from_variables):
        with pytest.raises(bridge.ConversionError) as caught:
            check(found)
        assert EXPECTED in str(caught.value)
        assert hint in str(caught.value)
        assert strange not in str(caught.value)
        # Without a hint the message ends with what was found.
        assert hint or str(caught.value).endswith(f"of type {type(found).__name__}")


@pytest.mark.parametrize(
    ("found", "hint"),
    [
        ({"Dense_0": {"kernel": ARRAY}}, PARAMS_ALONE),
        ({"layer": {"kernel": ARRAY}, "MyBlock2_12": {}}, PARAMS_ALONE),
        ({"params": {"a": {"w": nnx.Param(ARRAY)}}}, IS_NNX),
    ],
)
def test_what_a_user_gives_is_looked_at_more_closely(found, hint):
    with pytest.raises(bridge.ConversionError, match=hint):
        check_variables(found)
    from_variables(found)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"params": {"Dense_0": {"kernel": ARRAY}}},
        {"params": {}, "Dense_0": {}},
        {"batch_stats": {"w": ARRAY}},
        {"dense_0": {}, "Dense": {}, "XDense_0x": {}},
    ],
)
def test_variables_are_no_error(variables):
    assert check_variables(variables) is None
