"""NNX Variables in the neutral form, and back."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings

import bridge
import registry
from bridge._conversion.neutral import Displaced, Leaf
from bridge._conversion.nnx_leaves import (
    BOX_KEY,
    DISPLACED_KEY,
    FIELDS_KEY,
    address_of,
    from_leaf,
    from_leaves,
    metadata_with,
    says_nothing,
    to_leaf,
    to_leaves,
)
from tests.strategies import exact, states

# The collection of arrays that are in no Variable.
ARRAYS = "nnx_arrays"
ARRAY, OTHER = jnp.ones((2, 3)), jnp.zeros((2, 3))


def add_one(variable, value):
    return value + 1


class Hooked(nnx.Param):
    def on_get_value(self, value):
        return value + 1


class ArrayOwner(nnx.Variable):
    """A Variable type whose collection is the one of arrays without a Variable."""


def param(value=ARRAY, var_type=nnx.Param, **metadata):
    full = {"hijax": False, "ref": False, "eager_sharding": False, **metadata}
    if var_type is Hooked:
        full = {"on_get_value": Hooked.on_get_value, **full}
    # The constructor warns of hooks, which are deprecated.
    return var_type.from_metadata(value, full)


def leaf_of(item, **options):
    return to_leaf(item, registry.current(), **options)


@given(states())
@settings(max_examples=10)
def test_the_leaves_of_a_state_come_back(state):
    flat = nnx.traversals.flatten_mapping(state)
    before = exact(flat)
    assert exact(to_leaves(from_leaves(flat.items()))) == before
    assert exact(flat) == before


def test_a_bare_array_is_in_the_collection_of_arrays():
    assert from_leaves([(("a", 0), ARRAY)]) == {(ARRAYS, ("a", 0)): Leaf(ARRAY)}
    assert leaf_of(ARRAY) == Leaf(ARRAY)


def test_a_bare_array_stays_bare_unless_every_leaf_is_to_be_a_variable():
    neutral = {(ARRAYS, ("a",)): Leaf(ARRAY), (ARRAYS, ("b",)): Leaf({})}
    leaves = to_leaves(neutral)
    assert leaves["a",] is ARRAY
    assert isinstance(leaves["b",], nnx.Variable)
    assert isinstance(to_leaves(neutral, all_variables=True)["a",], nnx.Variable)


def test_a_bare_array_that_collides_gets_a_variable_to_note_its_place():
    leaves = to_leaves({(ARRAYS, ("a",)): Leaf(ARRAY)}, occupied=[("a",)])
    (((path, variable)),) = leaves.items()
    assert path == (ARRAYS, "a")
    assert from_leaves(leaves.items())[ARRAYS, ("a",)].value is ARRAY
    assert variable.get_metadata(DISPLACED_KEY) == Displaced(1)


@pytest.mark.parametrize("value", [ARRAY, {}])
def test_a_users_variable_in_the_collection_of_arrays_comes_back_as_one(value):
    with registry.use(registry.current().extend({ARRAYS: ArrayOwner})):
        variable = ArrayOwner(value, eager_sharding=False)
        neutral = from_leaves([(("a",), variable)])
        assert neutral[ARRAYS, ("a",)].box is (bridge.NNXMeta if value is ARRAY else None)
        back = to_leaves(neutral)["a",]
        assert exact(back) == exact(variable)


def test_a_plain_variable_is_its_value_at_the_address_of_its_type():
    assert leaf_of(param()) == Leaf(ARRAY)
    assert address_of(("a", 0), nnx.BatchStat(ARRAY), registry.current()) == (
        "batch_stats",
        ("a", 0),
    )


def test_a_displaced_variable_goes_back_to_its_own_path():
    variable = from_leaf(nnx.Cache, Leaf(ARRAY), Displaced(1))
    assert address_of(("a", "cache", "w"), variable, registry.current()) == ("cache", ("a", "w"))
    assert leaf_of(variable) == Leaf(ARRAY)
    assert variable.get_metadata(DISPLACED_KEY) == Displaced(1)


def test_two_variables_at_one_address_are_an_error_that_names_it():
    displaced = from_leaf(nnx.Param, Leaf(OTHER), Displaced(1))
    items = [(("a", "w"), param()), (("a", "params", "w"), displaced)]
    with pytest.raises(bridge.ConversionError, match="two Variables would be params/a/w in Linen"):
        from_leaves(items)


@pytest.mark.parametrize("module", [nnx.Linear(1, 1, rngs=nnx.Rngs(0)), nnx.Rngs(0), nn.Dense(1)])
def test_a_module_among_the_leaves_is_an_error_that_names_its_place(module):
    said = rf"a/0 is a {type(module).__name__} module and not a Variable"
    with pytest.raises(bridge.ConversionError, match=said):
        from_leaves([(("a", 0), module)])


@pytest.mark.parametrize(
    ("metadata", "nothing"),
    [
        ({}, True),
        ({"out_sharding": None, "names": ()}, True),
        ({"ref": True, "hijax": True, "eager_sharding": True}, True),
        ({"note": False}, False),
        ({"note": 0}, False),
        ({"note": []}, False),
        # Regression: TypeError in init, as an array cannot be compared with a tuple.
        ({"note": jnp.ones(2)}, False),
        ({"out_sharding": None, "note": "x"}, False),
    ],
)
def test_metadata_says_nothing_if_every_variable_has_it_or_it_is_empty(metadata, nothing):
    assert says_nothing(metadata) is nothing


@pytest.mark.parametrize(
    "variable",
    [
        param(note="kept"),
        param(out_sharding=("a", None)),
        param(on_get_value=add_one),
        nnx.Cache({"a": ARRAY}),
        param(var_type=Hooked, on_get_value=add_one),
    ],
)
def test_a_variable_that_is_more_than_its_value_gets_a_box_and_comes_back(variable):
    leaf = leaf_of(variable)
    assert leaf.box is bridge.NNXMeta
    assert leaf.fields == variable.get_metadata()
    assert exact(from_leaf(type(variable), leaf)) == exact(variable)


@pytest.mark.parametrize(
    "variable", [param(out_sharding=None), param(var_type=Hooked), nnx.Cache({}), nnx.Cache((1, 2))]
)
def test_a_variable_that_is_its_value_gets_no_box(variable):
    assert leaf_of(variable).box is None


def test_the_value_is_read_without_hooks_and_out_of_its_reference():
    assert leaf_of(param(var_type=Hooked)).value is ARRAY
    held = leaf_of(nnx.Param(ARRAY, ref=True)).value
    assert isinstance(held, jax.Array)
    assert held.tolist() == ARRAY.tolist()


def partitioned(**more):
    return from_leaf(nnx.Param, Leaf(ARRAY, nn.Partitioned, {"out_sharding": ("a", None), **more}))


def test_a_variable_out_of_a_linen_box_goes_back_into_one():
    variable = partitioned()
    # The name that Flax has for it.
    assert variable.get_metadata("linen_meta_type") is nn.Partitioned
    leaf = leaf_of(variable)
    assert leaf == Leaf(ARRAY, nn.Partitioned, {"out_sharding": ("a", None)})


def test_metadata_that_no_linen_box_holds_makes_an_nnx_meta():
    variable = partitioned(note="kept")
    assert leaf_of(variable).box is bridge.NNXMeta
    assert leaf_of(variable).fields["note"] == "kept"
    assert leaf_of(variable, boxed_as_is=True).box is nn.Partitioned
    # What says nothing is no loss.
    assert leaf_of(partitioned(note=None)).box is nn.Partitioned


def test_a_box_whose_codec_keeps_any_field_gets_all_of_them():
    def to_fields(box):
        return box.value, {"out_sharding": box.names}

    def from_fields(value, fields):
        return nn.Partitioned(value, fields["out_sharding"])

    codec = registry.BoxCodec(to_fields, from_fields)
    with registry.use(registry.current().extend(boxes={nn.Partitioned: codec})):
        leaf = leaf_of(partitioned(note="kept"))
    assert leaf.box is nn.Partitioned
    assert leaf.fields["note"] == "kept"


@pytest.mark.parametrize("fields", [{}, {"note": "x"}, {"note": None}, {"ref": False}])
def test_a_box_made_by_hand_comes_back_with_the_fields_that_it_had(fields):
    variable = from_leaf(nnx.Param, Leaf(ARRAY, bridge.NNXMeta, fields))
    assert variable.get_metadata(FIELDS_KEY) == tuple(fields)
    assert leaf_of(variable) == Leaf(ARRAY, bridge.NNXMeta, fields)


def test_what_was_added_to_a_box_made_by_hand_is_kept():
    variable = from_leaf(Hooked, Leaf(ARRAY, bridge.NNXMeta, {"note": "x"}))
    variable.set_metadata(added="y")
    assert leaf_of(variable).fields == {"note": "x", "added": "y"}


def test_a_box_of_a_variable_notes_no_fields():
    metadata = param(note="kept").get_metadata()
    variable = from_leaf(nnx.Param, Leaf(ARRAY, bridge.NNXMeta, metadata))
    assert variable.get_metadata() == metadata
    # One that says nothing would be a bare value without the note.
    silent = from_leaf(nnx.Param, Leaf(ARRAY, bridge.NNXMeta, param().get_metadata()))
    assert leaf_of(silent).box is bridge.NNXMeta


@pytest.mark.parametrize("eager", [True, False])
def test_a_bare_leaf_becomes_the_variable_that_nnx_makes(eager):
    with nnx.use_eager_sharding(eager):
        made = from_leaf(nnx.BatchStat, Leaf(ARRAY))
        native = nnx.BatchStat(ARRAY)
    assert type(made) is nnx.BatchStat
    assert made.get_metadata() == native.get_metadata()
    assert made.get_raw_value() is ARRAY


def test_a_variable_with_another_leaf_keeps_its_form_and_place():
    variable = nnx.Param(ARRAY, note="old", eager_sharding=True)
    variable.set_metadata(**{DISPLACED_KEY: Displaced(1)})
    new = metadata_with(variable, Leaf(OTHER, nn.Partitioned, {"out_sharding": (None,)}))
    assert new["out_sharding"] == (None,)
    assert new[BOX_KEY] is nn.Partitioned
    assert new[DISPLACED_KEY] == Displaced(1)
    assert "note" not in new
    assert new["eager_sharding"] is True
    plain = metadata_with(nnx.Param(ARRAY, eager_sharding=False), Leaf(OTHER))
    assert plain == nnx.Param(OTHER, eager_sharding=False).get_metadata()


def test_leaves_are_placed_beside_those_that_are_there():
    neutral = {("params", ("w",)): Leaf(ARRAY), ("cache", ("w",)): Leaf(OTHER)}
    leaves = to_leaves(neutral)
    assert set(leaves) == {("w",), ("cache", "w")}
    assert type(leaves["cache", "w"]) is nnx.Cache
    assert set(to_leaves(neutral, [("w",)])) == {("params", "w"), ("cache", "w")}
    assert (
        jax.tree.leaves(from_leaves(leaves.items())) == [ARRAY, OTHER]
        or from_leaves(leaves.items()) == neutral
    )
