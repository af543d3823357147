"""The import paths of `flax.nnx.bridge.variables` and `.wrappers`: they do what Flax's do."""

import flax.linen as nn
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.core import freeze, meta
from flax.nnx.bridge import variables as flax_variables
from flax.nnx.bridge import wrappers as flax_wrappers
from hypothesis import given

import bridge
from bridge import variables, wrappers
from tests.strategies import exact, linen_variables, states, thawed

KERNEL = jnp.arange(6.0).reshape(2, 3)
# Without what the peer gets wrong: collisions, empty collections, FrozenDicts, boxes.
PLAIN = {
    "params": {"Dense_0": {"kernel": KERNEL, "bias": jnp.zeros(3)}, "scale": jnp.ones(3)},
    "batch_stats": {"BatchNorm_0": {"mean": jnp.zeros(3)}},
    "intermediates": {"Dense_0": {"__call__": (KERNEL,)}},
}


def plain_values(tree):
    """Nested dicts of (Variable type, value), which say nothing of metadata."""
    if isinstance(tree, nnx.Variable):
        return tree.var_type, exact(tree.get_value())
    return {key: plain_values(value) for key, value in tree.items()}


IMPORTED = [
    (variables, flax_variables, "NNXMeta"),
    (variables, flax_variables, "linen_vars_to_nnx_attrs"),
    (variables, flax_variables, "nnx_attrs_to_linen_vars"),
    (variables, flax_variables, "to_linen_var"),
    (variables, flax_variables, "to_nnx_var"),
    (variables, flax_variables, "with_partitioning"),
    (wrappers, flax_wrappers, "Functional"),
    (wrappers, flax_wrappers, "ToLinen"),
    (wrappers, flax_wrappers, "ToNNX"),
    (wrappers, flax_wrappers, "functional"),
    (wrappers, flax_wrappers, "lazy_init"),
    (wrappers, flax_wrappers, "to_linen"),
    (wrappers, flax_wrappers, "to_linen_class"),
]


@pytest.mark.parametrize(("module", "peer", "name"), IMPORTED)
def test_a_name_that_programs_import_from_flax_is_there(module, peer, name):
    assert name in module.__all__
    assert hasattr(peer, name)
    assert getattr(bridge, name, getattr(module, name)) is getattr(module, name)


def test_variables_has_no_other_name():
    assert set(variables.__all__) == {name for module, _, name in IMPORTED if module is variables}


def test_linen_vars_to_nnx_attrs_makes_what_flax_makes():
    ours = variables.linen_vars_to_nnx_attrs(PLAIN)
    assert plain_values(ours) == plain_values(flax_variables.linen_vars_to_nnx_attrs(PLAIN))


def test_linen_vars_to_nnx_attrs_makes_plain_dicts():
    attrs = variables.linen_vars_to_nnx_attrs(freeze(PLAIN))
    assert type(attrs) is dict
    assert type(attrs["Dense_0"]) is dict


def test_nnx_attrs_to_linen_vars_makes_what_flax_makes():
    attrs = variables.linen_vars_to_nnx_attrs(PLAIN)
    ours = variables.nnx_attrs_to_linen_vars(attrs)
    assert exact(ours) == exact(flax_variables.nnx_attrs_to_linen_vars(attrs))


@given(linen_variables())
def test_variables_make_the_round_trip_through_attributes(linen):
    attrs = variables.linen_vars_to_nnx_attrs(linen)
    assert exact(variables.nnx_attrs_to_linen_vars(attrs)) == exact(thawed(linen))


@given(states())
def test_attributes_make_the_round_trip_through_variables(state):
    linen = variables.nnx_attrs_to_linen_vars(thawed(state))
    assert exact(nnx.State(variables.linen_vars_to_nnx_attrs(linen))) == exact(state)


LINEN_LEAVES = (
    KERNEL,
    (KERNEL, KERNEL),
    nn.Partitioned(KERNEL, ("a", None)),
    bridge.NNXMeta(
        nnx.Param,
        KERNEL,
        {"hijax": False, "ref": False, "eager_sharding": False, "tag": "first"},
    ),
)


@pytest.mark.parametrize("leaf", LINEN_LEAVES, ids=lambda leaf: type(leaf).__name__)
def test_to_nnx_var_makes_the_variable_that_flax_makes(leaf):
    ours = variables.to_nnx_var("params", leaf)
    as_flax_has_it = leaf
    if isinstance(leaf, bridge.NNXMeta):
        as_flax_has_it = flax_variables.NNXMeta(leaf.var_type, leaf.value, leaf.metadata)
    with nnx.use_eager_sharding(False):
        theirs = flax_variables.to_nnx_var("params", as_flax_has_it)
    assert exact(ours) == exact(theirs)


@pytest.mark.parametrize("leaf", LINEN_LEAVES, ids=lambda leaf: type(leaf).__name__)
def test_to_linen_var_is_the_inverse_of_to_nnx_var(leaf):
    assert exact(variables.to_linen_var(variables.to_nnx_var("params", leaf))) == exact(leaf)


@pytest.mark.parametrize(
    "variable",
    [
        nnx.Param(KERNEL),
        nnx.BatchStat(KERNEL),
        nnx.Param(KERNEL, linen_meta_type=nn.Partitioned, out_sharding=None, mesh=None),
    ],
)
def test_to_linen_var_makes_what_flax_makes(variable):
    assert exact(variables.to_linen_var(variable)) == exact(flax_variables.to_linen_var(variable))


def told(metadata):
    """Metadata without what every Variable has, which some versions of Flax leave in the box."""
    return {k: v for k, v in metadata.items() if k not in nnx.Variable.required_metadata}


@pytest.mark.parametrize("required", [{}, {"eager_sharding": False}, {"ref": True}], ids=str)
def test_to_linen_var_puts_metadata_in_the_box_that_flax_puts_it_in(required):
    variable = nnx.Param(KERNEL, tag="first", **required)
    ours, theirs = variables.to_linen_var(variable), flax_variables.to_linen_var(variable)
    assert (ours.var_type, told(ours.metadata)) == (theirs.var_type, told(theirs.metadata))
    assert exact(ours.value) == exact(KERNEL)
    # What every Variable has stays too: without it the Variable would come back as another one.
    assert variables.to_nnx_var("params", ours).get_metadata() == variable.get_metadata()


class Hidden(meta.AxisMetadata):
    """A box that only says itself what it is made of, and takes nothing else."""

    def __init__(self, value, scale):
        self.value, self._scale = value, scale

    def to_nnx_metadata(self):
        return {"value": self.value, "factor": self._scale}

    @classmethod
    def from_nnx_metadata(cls, metadata):
        return cls(scale=metadata.pop("factor"), **metadata)

    def unbox(self):
        return self.value

    replace_boxed = add_axis = remove_axis = None


def test_to_linen_var_makes_a_box_of_nothing_but_its_own_fields():
    again = variables.to_linen_var(variables.to_nnx_var("params", Hidden(KERNEL, 2.0)))
    assert type(again) is Hidden
    assert exact(again.to_nnx_metadata()) == exact({"value": KERNEL, "factor": 2.0})


@pytest.mark.parametrize("found", [None, 3, [KERNEL], nnx.Param(KERNEL)], ids=repr)
@pytest.mark.parametrize(
    "convert", [variables.linen_vars_to_nnx_attrs, variables.nnx_attrs_to_linen_vars]
)
def test_something_else_than_a_mapping_is_an_error(convert, found):
    with pytest.raises(bridge.ConversionError, match="expected"):
        convert(found)
