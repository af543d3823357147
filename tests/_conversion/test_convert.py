"""Linen variables <-> NNX State: exact in both directions, nothing of the caller's is altered."""

import dataclasses
from collections.abc import Mapping

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict, freeze, meta
from flax.nnx.bridge import variables as flax_variables
from hypothesis import example, given

import bridge
import registry
from bridge._conversion.neutral import walk
from tests.strategies import (
    Documented,
    Registered,
    Sealed,
    Unregistered,
    UnregisteredParam,
    exact,
    linen_variables,
    on_axis,
    on_read,
    states,
    thawed,
)

A, B, C = jnp.ones((2, 3)), jnp.zeros(3), jnp.arange(4)


def round_trip(variables):
    return bridge.nnx_to_linen(bridge.linen_to_nnx(variables))


def mirrored_round_trip(state):
    return bridge.linen_to_nnx(bridge.nnx_to_linen(state))


def paths(state):
    """(collection, path) of every Variable."""
    flat = nnx.to_flat_state(state)
    return {(registry.variable_name_from_type(v.var_type, create=True), path) for path, v in flat}


VARIABLES = {
    "nothing": {},
    "an empty collection": {"params": {}},
    "empty subtrees": {"params": {"a": {}, "b": {"c": {}, "w": A}}, "cache": {}},
    "integer keys": {"params": {"layers": {0: {"w": A}, 10: {"w": B}, 9: C}}},
    "keys that look alike": {"params": {1: A, "1": B, "": C}},
    "what sow makes": {"intermediates": {"Dense_0": {"__call__": (A, B)}, "none": ()}},
    "nested pytrees": {"cache": {"index": ([A, (B, None)], {"a": (C,)}), "empty": []}},
    "no value": {"cache": {"index": None}},
    "scalars": {
        "counter": {"int": 3, "float": 0.5, "bool": True, "text": "x", "np": np.float32(2)}
    },
    "typed keys": {"rng": {"key": jax.random.key(0), "rbg": jax.random.key(1, impl="rbg")}},
    "abstract leaves": jax.eval_shape(
        lambda: {"params": {"w": A, "box": nn.Partitioned(B, ("a",))}, "rng": jax.random.key(0)}
    )
    | {"rng": {"key": jax.eval_shape(lambda: jax.random.key(0))}},
    "one name in two collections": {"params": {"w": A}, "batch_stats": {"w": B}},
    "one name in three collections": {
        "params": {"a": {"w": A}},
        "batch_stats": {"a": {"w": B}},
        "cache": {"a": {"w": C}},
    },
    "a leaf above a subtree": {"params": {"w": A}, "batch_stats": {"w": {"mean": B, "var": C}}},
    "a subtree below a leaf": {"params": {"w": {"a": A, "b": B}}, "batch_stats": {"w": C}},
    "a leaf above an empty subtree": {"params": {"w": A}, "batch_stats": {"w": {}}},
    "a collection named as a submodule": {
        "params": {"batch_stats": {"w": A}},
        "batch_stats": {"w": B, "batch_stats": {"w": C}},
    },
    "a collection named as a parameter": {"params": {"cache": A}, "cache": {"cache": B}},
    "an empty collection named as a parameter": {"params": {"cache": A}, "cache": {}},
    "a collection named as a parameter above its own subtree": {
        "params": {"cache": A},
        "cache": {"cache": {"index": B}, "w": C},
    },
    "arrays without a Variable": {"nnx_arrays": {"w": A, "t": (A, B)}, "params": {"w": B}},
    "names that nobody registered": {"parms": {"w": A}, "a.b/c d": {"w": B}, "": {"w": C}},
    "names of Flax's types": {"RngKey": {"w": A}, "LoRAParam": {"w": B}, "Variable": {"w": C}},
    "names of types that have another collection": {
        "Param": {"w": A},
        "BatchStat": {"w": A},
        "Cache": {"w": A},
        "Intermediate": {"w": A},
        "Perturbation": {"w": A},
    },
    "both names of a type": {"params": {"w": A}, "Param": {"w": B}},
    "Partitioned": {"params": {"w": nn.Partitioned(A, ("a", None))}},
    "LogicallyPartitioned": {
        "params": {"w": nn.LogicallyPartitioned(A, ("a", None), rules=(("a", "b"),))}
    },
    "a dataclass box": {"params": {"w": Documented(A, author="me", axes=("a",))}},
    "a box with a codec": {"params": {"w": Sealed(A, seal=3)}},
    "a mapping in a box": {"params": {"w": nn.Partitioned({"a": A, "b": {}}, ("a",))}},
    "a box in a box": {"params": {"w": nn.Partitioned(Sealed(A, 1), ("a",))}},
    "colliding boxes": {
        "params": {"w": nn.Partitioned(A, ("a", None))},
        "batch_stats": {"w": nn.LogicallyPartitioned(B, ("a",), rules=None)},
    },
}


@pytest.mark.parametrize("variables", VARIABLES.values(), ids=VARIABLES)
def test_variables_make_the_round_trip(variables):
    before = exact(variables)
    assert exact(round_trip(variables)) == before
    assert exact(variables) == before


@pytest.mark.parametrize("variables", VARIABLES.values(), ids=VARIABLES)
def test_frozen_variables_make_the_round_trip(variables):
    frozen = freeze(variables)
    before = exact(frozen)
    assert exact(round_trip(frozen)) == exact(variables)
    assert exact(frozen) == before


@given(linen_variables())
@example({"params": {"b": A}, "b": {"b": B}})
def test_any_variables_make_the_round_trip(variables):
    before = exact(variables)
    assert exact(round_trip(variables)) == exact(thawed(variables))
    assert exact(variables) == before


@given(linen_variables())
def test_the_way_through_a_state_ends_after_one_round(variables):
    state = bridge.linen_to_nnx(variables)
    assert exact(mirrored_round_trip(state)) == exact(state)


@given(states())
def test_any_state_makes_the_round_trip(state):
    before = exact(state)
    assert exact(mirrored_round_trip(state)) == before
    assert exact(state) == before


@given(linen_variables())
def test_every_leaf_is_the_same_object_on_the_other_side(variables):
    state = bridge.linen_to_nnx(variables)
    given_leaves = {id(leaf) for leaf in jax.tree.leaves(list(values_of(variables)))}
    carried = [v.get_raw_value() if isinstance(v, nnx.Variable) else v for v in leaves_of(state)]
    assert {id(leaf) for leaf in jax.tree.leaves(carried)} <= given_leaves


def values_of(tree):
    """What lies in the leaves of variables, out of their boxes."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from values_of(value)
    elif isinstance(tree, nn.Partitioned):
        # Its unbox may put a sharding constraint on the value.
        yield tree.value
    else:
        yield tree.unbox() if isinstance(tree, meta.AxisMetadata) else tree


def leaves_of(state):
    return [leaf for _, leaf in walk(state)]


LINEN_MODULES = {
    "Dense": (nn.Dense(3), (2,)),
    "BatchNorm": (nn.BatchNorm(use_running_average=False), (2, 3)),
    "annotated Dense": (
        nn.Dense(3, kernel_init=nn.with_partitioning(nn.initializers.ones_init(), ("a", "b"))),
        (2,),
    ),
    "MultiHeadDotProductAttention": (
        nn.MultiHeadDotProductAttention(num_heads=2, decode=True),
        (1, 4, 8),
    ),
    "WeightNorm": (nn.WeightNorm(nn.Dense(3)), (2,)),
    "Sequential": (nn.Sequential([nn.Dense(3), nn.LayerNorm(), nn.Dense(2)]), (2,)),
}


@pytest.mark.parametrize("name", LINEN_MODULES)
def test_the_variables_of_a_linen_module_make_the_round_trip(name):
    module, shape = LINEN_MODULES[name]
    variables = module.init(jax.random.key(0), jnp.ones(shape))
    assert exact(round_trip(variables)) == exact(variables)


@pytest.mark.parametrize("name", ["Dense", "BatchNorm", "Sequential"])
def test_a_state_has_the_paths_and_types_that_flaxs_bridge_gives_it(name):
    module, shape = LINEN_MODULES[name]
    variables = module.init(jax.random.key(0), jnp.ones(shape))
    theirs = nnx.State(flax_variables.linen_vars_to_nnx_attrs(variables))
    assert exact(bridge.linen_to_nnx(variables)) == exact(theirs)


class WithEverything(nnx.Module):
    """Lists, unregistered types, metadata, state of every kind, and an array in no Variable."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(11)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.lora = nnx.LoRALinear(2, 2, lora_rank=1, rngs=rngs)
        self.counter = Unregistered(jnp.zeros(()))
        self.own = UnregisteredParam(jnp.ones(2), tag="first")
        self.registered = Registered(jnp.ones(2), note={"a": [1]})
        self.table = nnx.Cache({"a": A, "b": {"c": B}})
        self.nothing = nnx.Cache({})
        self.constants = jnp.arange(3)


NNX_MODULES = {
    "Linear": lambda rngs: nnx.Linear(2, 3, rngs=rngs),
    "BatchNorm": lambda rngs: nnx.BatchNorm(3, rngs=rngs),
    "Dropout": lambda rngs: nnx.Dropout(0.5, rngs=rngs),
    "LSTMCell": lambda rngs: nnx.LSTMCell(2, 3, rngs=rngs),
    "Rngs": lambda rngs: nnx.Rngs(params=0, dropout=jax.random.key(1, impl="rbg")),
    "Sequential": lambda rngs: nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), jax.nn.relu),
    "with everything": WithEverything,
}


@pytest.mark.parametrize("graph", [True, False], ids=["graph mode", "tree mode"])
@pytest.mark.parametrize("make", NNX_MODULES.values(), ids=NNX_MODULES)
def test_the_state_of_an_nnx_module_makes_the_round_trip(make, graph):
    with nnx.set_graph_mode(graph):
        module = make(nnx.Rngs(0))
        state = nnx.state(module)
        before = exact(state)
        assert exact(mirrored_round_trip(state)) == before
        assert exact(bridge.linen_to_nnx(bridge.nnx_to_linen(module))) == before
        assert exact(nnx.state(module)) == before


@pytest.mark.parametrize("make", NNX_MODULES.values(), ids=NNX_MODULES)
def test_the_abstract_state_of_an_nnx_module_makes_the_round_trip(make):
    state = nnx.state(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    assert exact(mirrored_round_trip(state)) == exact(state)


@pytest.mark.parametrize("representation", ["ref", "hijax"])
def test_variables_of_another_representation_make_the_round_trip(representation):
    with nnx.var_defaults(**{representation: True}):
        state = nnx.state(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
        variables = bridge.nnx_to_linen(state)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(variables))
        assert exact(mirrored_round_trip(state)) == exact(state)


def test_a_module_of_the_converted_state_computes_what_the_module_did():
    module = WithEverything(nnx.Rngs(0))
    graphdef, state = nnx.split(module)
    again = nnx.merge(graphdef, mirrored_round_trip(state))
    x = jnp.arange(4.0).reshape(2, 2)

    def run(m):
        for layer in m.layers:
            x_ = layer(x)
        return m.dropout(m.lora(m.norm(x_)))

    np.testing.assert_array_equal(run(again), run(module))


def test_a_state_of_states_with_colliding_names_makes_the_round_trip():
    colliding = {"params": {"w": A}, "batch_stats": {"w": B}}
    state = nnx.State({"first": bridge.linen_to_nnx(colliding), 0: bridge.linen_to_nnx(colliding)})
    assert exact(bridge.nnx_to_linen(state)) == exact(
        {
            "params": {"first": {"w": A}, 0: {"w": A}},
            "batch_stats": {"first": {"w": B}, 0: {"w": B}},
        }
    )
    assert exact(mirrored_round_trip(state)) == exact(state)


def test_two_variables_that_would_meet_in_linen_are_an_error():
    state = bridge.linen_to_nnx({"params": {"w": A}, "batch_stats": {"w": B}})
    state["w"] = nnx.BatchStat(C)
    with pytest.raises(bridge.ConversionError, match="batch_stats/w"):
        bridge.nnx_to_linen(state)


@pytest.mark.parametrize(
    ("collection", "var_type"),
    [
        ("params", nnx.Param),
        ("batch_stats", nnx.BatchStat),
        ("RngKey", nnx.RngKey),
        ("tests_strategies_registered", Registered),
        ("tests_counter", registry.auto.tests_counter),
    ],
)
def test_a_leaf_becomes_a_variable_of_its_collections_type_at_its_path(collection, var_type):
    state = bridge.linen_to_nnx({collection: {"Dense_0": {"kernel": A}}})
    assert type(state) is nnx.State
    assert type(state["Dense_0"]["kernel"]) is var_type
    assert state["Dense_0"]["kernel"].get_value() is A


@pytest.mark.parametrize("frozen", [False, True])
def test_a_colliding_leaf_is_reached_through_its_collection(frozen):
    variables = {"batch_stats": {"w": {"mean": B}, "v": C}, "params": {"w": A}}
    state = bridge.linen_to_nnx(freeze(variables) if frozen else variables)
    assert paths(state) == {
        ("params", ("w",)),
        ("batch_stats", ("batch_stats", "w", "mean")),
        ("batch_stats", ("v",)),
    }


def test_the_order_of_collections_and_keys_does_not_matter():
    ordered = {"params": {"w": A, "v": B}, "b": {"w": A, "b": {"w": B}}, "c": {"w": C}}
    turned = {"c": {"w": C}, "b": {"b": {"w": B}, "w": A}, "params": {"v": B, "w": A}}
    assert exact(bridge.linen_to_nnx(ordered)) == exact(bridge.linen_to_nnx(turned))


def test_the_nnx_collection_is_left_out():
    graphdef = nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    variables = {"params": {"w": A}, "nnx": {"graphdef": graphdef}}
    assert exact(bridge.linen_to_nnx(variables)) == exact(bridge.linen_to_nnx({"params": {"w": A}}))
    assert exact(round_trip(variables)) == exact({"params": {"w": A}})
    assert exact(bridge.linen_to_nnx({"nnx": {}})) == exact(nnx.State({}))


@pytest.mark.parametrize(
    "metadata",
    [{}, {"out_sharding": None}, {"on_get_value": ()}, {"tag": None, "mesh": None}],
    ids=repr,
)
def test_metadata_that_says_nothing_makes_no_box(metadata):
    state = nnx.State({"w": nnx.Param(A, **metadata)})
    assert bridge.nnx_to_linen(state)["params"]["w"] is A


@pytest.mark.parametrize(
    "metadata",
    [
        {"out_sharding": ("a", None)},
        {"tag": "first"},
        {"tag": ""},
        {"trainable": False},
        {"on_get_value": on_read},
        {"on_add_axis": (on_axis,)},
    ],
    ids=", ".join,
)
def test_metadata_that_says_something_makes_a_box(metadata):
    variable = nnx.BatchStat(A)
    variable.set_metadata(**metadata)
    box = bridge.nnx_to_linen(nnx.State({"w": variable}))["batch_stats"]["w"]
    assert type(box) is bridge.NNXMeta
    assert box.var_type is nnx.BatchStat
    assert box.value is A
    assert {name: box.metadata[name] for name in metadata} == metadata


@pytest.mark.parametrize(
    "metadata",
    [{}, {"out_sharding": None}, {"out_sharding": ("a", None)}, {"tag": "first"}],
    ids=repr,
)
def test_a_box_that_somebody_made_comes_back_as_it_was(metadata):
    variables = {"params": {"w": bridge.NNXMeta(nnx.Param, A, metadata)}}
    assert exact(round_trip(variables)) == exact(variables)
    # Variables and optimizer state are mapped over together, so they have to be the same tree.
    assert jax.tree.structure(round_trip(variables)) == jax.tree.structure(variables)


def test_a_box_that_flaxs_bridge_made_comes_back_as_it_was():
    variables = {"params": {"w": flax.nnx.bridge.NNXMeta(nnx.Param, A, {"tag": "first"})}}
    assert exact(round_trip(variables)) == exact(variables)


def test_a_subclass_of_nnx_meta_comes_back_as_what_it_was():
    class Subclass(bridge.NNXMeta):
        author: str = flax.struct.field(pytree_node=False, default="")

    metadata = {"hijax": False, "ref": False, "eager_sharding": False, "tag": "first"}
    variables = {"params": {"w": Subclass(nnx.Param, A, metadata, author="me")}}
    assert exact(round_trip(variables)) == exact(variables)


class WithHook(nnx.Variable):
    """Every Variable of this type has the hook in its metadata, so it says nothing about one."""

    def on_get_value(self, value):
        return 2 * value


def test_a_hook_of_the_variable_type_makes_no_box():
    with registry.use(registry.current().extend({"hooked": WithHook})):
        variables = {"hooked": {"w": A}}
        state = bridge.linen_to_nnx(variables)
        np.testing.assert_array_equal(state["w"].get_value(), 2 * A)
        assert exact(bridge.nnx_to_linen(state)) == exact(variables)


def test_a_box_with_another_variable_type_than_its_collections_is_an_error():
    variables = {"params": {"a": {"w": bridge.NNXMeta(nnx.BatchStat, A, {"tag": "first"})}}}
    with pytest.raises(bridge.ConversionError, match=r"params/a/w.*BatchStat.*'batch_stats'"):
        bridge.linen_to_nnx(variables)


@pytest.mark.parametrize(
    "box",
    [
        lambda: nn.Partitioned(A, ("a", None)),
        lambda: nn.LogicallyPartitioned(A, ("a", None), rules=(("a", "b"),)),
    ],
)
def test_a_box_of_linen_is_the_same_box_again_inside_linen(box):
    variable = bridge.linen_to_nnx({"params": {"w": box()}})["w"]
    assert variable.get_metadata("out_sharding") == ("a", None)
    again = bridge.nnx_to_linen(nnx.State({"w": variable}))["params"]["w"]
    assert exact(again) == exact(box())


def test_a_logically_partitioned_box_is_left_whole_which_flax_does_not_do():
    def variables():
        return {"params": {"w": nn.LogicallyPartitioned(A, ("a", None), rules=(("a", "b"),))}}

    ours, flaxs = variables(), variables()
    bridge.linen_to_nnx(ours)
    assert exact(ours) == exact(variables())
    with nnx.use_eager_sharding(False):
        flax_variables.linen_vars_to_nnx_attrs(flaxs)
    assert not hasattr(flaxs["params"]["w"], "names")


@pytest.mark.parametrize("change", ["the state", "the variables"])
def test_what_is_done_to_the_result_does_not_reach_the_argument(change):
    box = nn.Partitioned({"a": A}, ("a",))
    nnx_box = bridge.NNXMeta(nnx.Param, A, {"tag": "first"})
    variables = {"params": {"w": box, "v": nnx_box, "empty": {}}, "cache": {"index": B}}
    before = exact(variables)
    state = bridge.linen_to_nnx(variables)
    if change == "the state":
        state["v"].set_metadata(tag="second")
        state["w"].set_value({"a": B})
        state["index"] = nnx.Cache(C)
    else:
        state_before = exact(state)
        again = bridge.nnx_to_linen(state)
        again["params"]["empty"]["new"] = A
        again["params"]["v"].metadata["tag"] = "second"
        del again["cache"]
        assert exact(state) == state_before
    assert exact(variables) == before


def test_metadata_beyond_what_the_linen_box_can_hold_is_not_lost():
    state = bridge.linen_to_nnx({"params": {"w": nn.Partitioned(A, ("a", None))}})
    state["w"].set_metadata(tag="first")
    variables = bridge.nnx_to_linen(state)
    assert type(variables["params"]["w"]) is bridge.NNXMeta
    assert exact(bridge.linen_to_nnx(variables)) == exact(state)


def test_importing_an_annotated_leaf_needs_no_mesh_and_shards_nothing():
    variables = {"params": {"w": nn.Partitioned(A, ("a", "no such axis"))}}
    with nnx.use_eager_sharding(True):
        state = bridge.linen_to_nnx(variables)
    assert state["w"].get_raw_value() is A
    assert nnx.using_eager_sharding() is flax.config.flax_always_shard_variable


def test_a_plain_leaf_becomes_the_variable_that_nnx_makes():
    for eager in (True, False):
        with nnx.use_eager_sharding(eager):
            ours = bridge.linen_to_nnx({"params": {"w": A}})["w"]
            assert ours.get_metadata() == nnx.Param(A).get_metadata()


@given(linen_variables())
def test_with_flax_return_frozendict_the_variables_are_frozen(variables):
    with flax.config.temp_flip_flag("return_frozendict", True):
        frozen = round_trip(variables)
        assert exact(round_trip(frozen)) == exact(frozen)
    assert type(frozen) is FrozenDict
    assert exact(frozen) == exact(freeze(thawed(variables)))


def test_conversions_follow_the_registry_in_force():
    class Weight(nnx.Variable):
        pass

    class Buffer(nnx.Variable):
        pass

    scoped = registry.Registry({"weights": Weight, "params": Buffer})
    variables = {"weights": {"w": A}, "params": {"v": B}}
    with registry.use(scoped):
        state = bridge.linen_to_nnx(variables)
        assert exact(bridge.nnx_to_linen(state)) == exact(variables)
    assert (type(state["w"]), type(state["v"])) == (Weight, Buffer)
    # Their own names would be other collections than the model's.
    with pytest.raises(registry.UnknownNameError, match=r"registry\.use"):
        bridge.nnx_to_linen(state)


def test_two_unregistered_types_of_one_name_are_an_error():
    first = type("Twin", (nnx.Variable,), {"__module__": "library_a"})
    second = type("Twin", (nnx.Variable,), {"__module__": "library_b"})
    with pytest.raises(registry.RegistrationConflictError, match=r"library_b.*library_a"):
        bridge.nnx_to_linen(nnx.State({"a": first(A), "b": second(B)}))


TRACED = {
    "params": {"w": A, "box": nn.Partitioned(A, ("a", None)), "empty": {}},
    "batch_stats": {"w": B},
    "intermediates": {"__call__": (A, B)},
}


def test_both_directions_cross_jit():
    variables = jax.tree.map(jnp.copy, TRACED)
    state = jax.jit(bridge.linen_to_nnx)(variables)
    assert exact(state) == exact(bridge.linen_to_nnx(TRACED))
    assert exact(jax.jit(bridge.nnx_to_linen)(state)) == exact(TRACED)


def test_converting_puts_nothing_into_a_program():
    assert not jax.make_jaxpr(round_trip)(TRACED).jaxpr.eqns


def test_both_directions_work_on_shapes():
    abstract = jax.eval_shape(lambda: TRACED)
    assert exact(jax.eval_shape(round_trip, TRACED)) == exact(abstract)
    assert exact(round_trip(abstract)) == exact(abstract)


def test_a_converted_state_can_be_mapped_over():
    state = bridge.linen_to_nnx(TRACED)
    assert exact(jax.tree.map(lambda x: x, state)) == exact(state)


class NoBox(meta.AxisMetadata):
    """Neither a dataclass nor with a codec."""

    value = A
    unbox = replace_boxed = add_axis = remove_axis = None


def test_a_box_that_cannot_be_carried_raises_on_import():
    with pytest.raises(registry.UnsupportedBoxError, match=r"NoBox.*register_box\(NoBox"):
        bridge.linen_to_nnx({"params": {"w": NoBox()}})


@dataclasses.dataclass
class NotAMapping:
    params: object = None


@pytest.mark.parametrize(
    "found",
    [
        None,
        3,
        A,
        [{"params": {"w": A}}],
        NotAMapping(),
        {"params": A},
        {"params": None},
        {"params": (A,)},
        {"params": nn.Partitioned(A, ("a",))},
        {3: {"w": A}},
        {("params", "w"): A},
        nn.Dense(3),
        nn.Dense,
        nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
        nnx.Param(A),
    ],
    ids=lambda found: type(found).__name__,
)
def test_what_is_no_linen_variables_is_an_error_that_says_what_is_expected(found):
    with pytest.raises(bridge.ConversionError, match=r"expected Linen variables.*found"):
        bridge.linen_to_nnx(found)


@pytest.mark.parametrize(
    "found",
    [
        None,
        3,
        A,
        [nnx.Param(A)],
        nnx.Param(A),
        nnx.Linear,
        nn.Dense(3),
        nn.Dense,
        nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(0))),
    ],
    ids=lambda found: type(found).__name__,
)
def test_what_is_no_state_is_an_error_that_says_what_is_expected(found):
    with pytest.raises(
        bridge.ConversionError, match=r"expected an nnx\.State or an NNX module.*fou"
    ):
        bridge.nnx_to_linen(found)


@pytest.mark.parametrize(
    "module", [nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nn.Dense(3)], ids=lambda m: type(m).__name__
)
def test_a_module_among_the_leaves_of_a_state_is_an_error_with_its_path(module):
    with pytest.raises(bridge.ConversionError, match="encoder/0"):
        bridge.nnx_to_linen({"encoder": {0: module}, "w": nnx.Param(A)})


def test_a_conversion_error_is_what_a_user_would_catch():
    with pytest.raises(ValueError, match="expected"):
        bridge.linen_to_nnx(None)
    with pytest.raises(TypeError, match="expected"):
        bridge.nnx_to_linen(None)


@pytest.mark.parametrize(
    ("found", "hint"),
    [
        ({"kernel": A}, r"\{'params': …\}"),
        ({"Dense_0": {"kernel": A}}, r"\{'params': …\}"),
        ({"Dense_0": {"kernel": A}, "encoder": {"bias": A}}, r"\{'params': …\}"),
        ({"params": A}, "found"),
        (nn.Dense(3), "init returns"),
        (nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))), "nnx_to_linen"),
        (nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "nnx_to_linen"),
        ({"layer": {"kernel": nnx.Param(A)}}, "nnx_to_linen"),
        ({"kernel": nnx.Param(A)}, "nnx_to_linen"),
        (3, "found 3"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_are_no_linen_variables_is_an_error_that_guesses(found, hint):
    for take in (bridge.linen_to_nnx, lambda v: bridge.ToNNX.from_variables(nn.Dense(3), v)):
        with pytest.raises(bridge.ConversionError, match=hint):
            take(found)


def test_linen_variables_are_no_state():
    variables = nn.Dense(3).init(jax.random.key(0), jnp.ones((1, 2)))
    for found in (variables, freeze(variables), {"w": A}):
        with pytest.raises(bridge.ConversionError, match="linen_to_nnx"):
            bridge.nnx_to_linen(found)
    assert bridge.nnx_to_linen({}) == {}
    assert set(bridge.nnx_to_linen(nnx.State({"w": A}))) == {"nnx_arrays"}
