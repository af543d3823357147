"""NNX and JAX keep the promises that have no public name: one test for each part."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.nnx import bridge as flax_bridge

from bridge._flax import graphdefs, objects, tabulate, variables


class Pair(NamedTuple):
    """A pytree that NNX was not told of."""

    left: int
    right: int


class Model(nnx.Module):
    """An object with one attribute of each kind."""

    def __init__(self):
        self.weight = nnx.Param(jnp.ones(2))
        self.array = jnp.zeros(3)
        self.tree = nnx.data({"a": nnx.Param(jnp.ones(1))})
        self.name = "static"


def definition_of(module):
    return nnx.flatten(module, graph=True)[0]


def test_an_object_keeps_two_flags_in_its_state():
    state = vars(Model())["_pytree__state"]
    assert type(state) is objects.ObjectState
    assert (state.initializing, state.is_setup) == (False, False)
    state._initializing = True
    assert state.initializing is True
    made = objects.ObjectState(True, False)
    assert (made.initializing, made.is_setup) == (True, False)


def test_flaxs_bridge_reads_the_flag_that_the_bridge_sets():
    seen = []

    class Wrapped(nnx.Module):
        def __call__(self):
            seen.append(objects.is_initializing(self))

    flax_bridge.lazy_init(Wrapped())
    assert seen == [True]


def test_the_flag_is_part_of_the_definition():
    model = Model()
    before = definition_of(model)
    objects.set_initializing([model], True)
    assert definition_of(model) != before
    objects.set_initializing([model], False)
    assert definition_of(model) == before


def test_an_object_notes_which_attributes_are_data():
    note = vars(Model())["_pytree__nodes"]
    assert type(note) is objects.DATA_ATTRIBUTES
    own = {name: is_data for name, is_data in note.items() if not objects.is_note(name)}
    assert own == {"weight": True, "array": True, "tree": True, "name": False}
    assert all(type(is_data) is bool for is_data in note.values())


def test_a_traced_array_is_noted_as_an_array_is():
    noted = []

    class Keeping(nnx.Module):
        def __init__(self, x):
            self.array = x

    def make(x):
        model = Keeping(x)
        objects.mark_arrays_as_data([model])
        noted.append(objects.is_data_attribute(model, "array"))

    make(jnp.ones(1))
    jax.eval_shape(make, jnp.ones(1))
    assert noted == [True, True]


def test_every_variable_has_these_three_fields_of_metadata():
    # `variable_from_metadata` and the fields that no box may have know them by name.
    assert nnx.Variable.required_metadata == {"hijax", "ref", "eager_sharding"}


def test_from_metadata_takes_value_and_metadata_as_they_are():
    metadata = {**nnx.Param(0).get_metadata(), "on_set_value": None, "mine": 1}
    value = jnp.ones(1)
    made = nnx.Param.from_metadata(value, metadata)
    assert made.get_raw_value() is value
    assert made.get_metadata() == metadata
    made.set_metadata("mine", 2)
    assert metadata["mine"] == 1


@pytest.mark.parametrize("hijax", [False, True])
def test_a_falsy_choice_of_eager_sharding_is_kept_and_can_be_changed(hijax):
    with nnx.use_eager_sharding(variables.LATER):
        late = nnx.Param(jnp.ones(2), hijax=hijax)
        chosen = nnx.Param(jnp.ones(2), hijax=hijax, eager_sharding=False)
    assert late.eager_sharding is variables.LATER
    assert chosen.eager_sharding is False
    variables.mark_eager_sharding([late])
    assert (late.eager_sharding, chosen.eager_sharding) == (True, False)


def test_a_definition_has_nodes_and_attributes_in_the_order_of_its_leaves():
    definition, state = nnx.flatten(Model(), graph=True)
    kinds = {key: type(kind) for key, kind in definition.attributes}
    assert kinds["weight"] is kinds["tree"] is graphdefs.NodeAttr
    assert kinds["array"] is graphdefs.LeafAttr
    assert kinds["name"] is graphdefs.Static
    assert dict(definition.attributes)["name"].value == "static"
    root, *others = definition.nodes
    assert (type(root), root.type) == (graphdefs.NodeDef, Model)
    assert root.num_attributes == sum(not objects.is_note(k) for k in kinds if k != "a") + 2
    found = [node.type for node in others if type(node) is graphdefs.VariableDef]
    assert found == [nnx.Param, nnx.Param]
    assert [leaf.shape for leaf in state.leaves] == [(3,), (1,), (2,)]
    assert [path for path, _ in state] == [("array",), ("tree", "a"), ("weight",)]


def test_a_node_that_was_met_before_is_a_reference_to_its_index():
    shared = nnx.Param(jnp.ones(1))
    definition = definition_of([shared, shared])
    first, again = definition.nodes[1:]
    assert type(again) is graphdefs.NodeRef
    assert again.index == first.index


def test_a_definition_keeps_type_metadata_and_reference_of_a_variable():
    variable = nnx.Param(jnp.ones(1), ref=True, mine=1)
    _, node = definition_of([variable]).nodes
    assert node.type is nnx.Param
    assert type(node.metadata) is objects.DATA_ATTRIBUTES
    assert dict(node.metadata) == variable.get_metadata()
    assert type(node.array_refdef) is graphdefs.ArrayRefDef
    _, plain = definition_of([nnx.Param(jnp.ones(1))]).nodes
    assert plain.array_refdef is None


def test_tabulate_puts_an_id_on_every_object():
    noted = []

    class Noting(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

        def __setattr__(self, name, value):
            noted.append(name)
            super().__setattr__(name, value)

        def __call__(self, x):
            return self.layer(x)

    nnx.tabulate(Noting(), jnp.ones((1, 1)))
    assert tabulate._TABULATE_ID in noted


@pytest.mark.parametrize("compiled", [jax.jit, nnx.jit])
def test_a_compiled_function_keeps_its_function_where_it_is_looked_for(compiled):
    def function(x):
        return x

    made = compiled(function)
    assert made.__wrapped__ is function


class Sowing(nnx.Module):
    def __call__(self, x):
        self.sow(nnx.Intermediate, "seen", x)
        return vars(self).get(objects.CAPTURES)


def test_capture_puts_a_variable_on_each_module_for_the_time_of_a_call():
    model = Sowing()
    captures, _ = nnx.capture(model, nnx.Intermediate)(jnp.ones(1))
    assert [variable.var_type for variable in captures] == [nnx.Intermediate]
    assert captures[0].get_value().keys() == {"seen"}
    assert objects.CAPTURES not in vars(model)


# What sows outside of `nnx.capture` is what this is compared with.
@pytest.mark.filterwarnings("ignore:Using .Module.sow:DeprecationWarning")
def test_a_module_with_no_place_for_captures_sows_nowhere():
    model = Sowing()
    setattr(model, objects.CAPTURES, nnx.data(()))
    model(jnp.ones(1))
    assert not hasattr(model, "seen")
    native = Sowing()
    native(jnp.ones(1))
    assert hasattr(native, "seen")
