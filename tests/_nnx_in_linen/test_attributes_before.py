"""A module that a call leaves as it is needs no flattening; whatever else a call does is found."""

from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given

import bridge
from bridge import _train_eval
from bridge._flax.objects import set_initializing
from bridge._nnx_in_linen import bound_module
from bridge._nnx_in_linen import changes as changes_module
from bridge._nnx_in_linen.changes import AttributesBefore
from tests._nnx_in_linen import changing_models
from tests._nnx_in_linen.changing_models import Changing
from tests.drawing import drawing

pytestmark = pytest.mark.filterwarnings("ignore:Using .Module.sow:DeprecationWarning")

KEY = jax.random.key(0)


class Other(nnx.Module):
    def __call__(self, x):
        return 100 * self.stat[...] + x


class Scaled(nnx.Module):
    """A module of every kind of attribute that is no container."""

    def __init__(self):
        self.stat = nnx.BatchStat(jnp.ones(()), scale=2)
        self.inner = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        self.array = jnp.ones(())
        self.static = (1, "a")
        self.deterministic = False

    def __call__(self, x):
        scale = self.stat.get_metadata("scale")
        return self.stat[...] * scale + self.static[0] * x + self.array


def assign(node):
    node.static = (5, "b")


def assign_an_equal_value(node):
    node.static = (1, *"a")


def add(node):
    node.new = 1


def remove(node):
    del node.deterministic


def reorder(node):
    static = node.static
    del node.static
    node.static = static


def replace_a_variable(node):
    node.stat = nnx.BatchStat(node.stat[...] + 1, scale=3)


def replace_an_array(node):
    node.array = node.array + 1


def become_another_class(node):
    object.__setattr__(node, "__class__", Other)


def set_a_flag(node):
    set_initializing([node], True)


def set_the_value(node):
    node.stat[...] += 1


def set_metadata(node):
    node.stat.set_metadata(scale=node.stat.get_metadata("scale") + 1)


OF_OBJECTS = [
    assign,
    assign_an_equal_value,
    add,
    remove,
    reorder,
    replace_a_variable,
    replace_an_array,
    become_another_class,
    set_a_flag,
]
OF_VARIABLES = [set_the_value, set_metadata]


@pytest.mark.parametrize("change", [*OF_OBJECTS, *OF_VARIABLES])
def test_attributes_are_kept_unless_an_object_has_others(change):
    node = Scaled()
    before = AttributesBefore([node, node.inner])
    assert before.are_kept()
    change(node)
    assert before.are_kept() is (change in OF_VARIABLES)


def test_a_mode_in_force_is_lifted_unless_the_call_has_set_it_again():
    node, other = Scaled(), Scaled()
    node.other = other
    before = AttributesBefore([node, other])
    with _train_eval.applied({"deterministic": True}), before.in_modes(node):
        assert (node.deterministic, other.deterministic) == (True, True)
        own = node.static = (8, "own")
        node.array = node.array + 3
        other.deterministic = None
        del node.inner
    assert node.deterministic is False
    assert other.deterministic is None
    assert node.static is own
    assert not hasattr(node, "inner")
    assert float(node.array) == 4


class Calling(Scaled):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def __call__(self, x):
        y = super().__call__(x)
        self.change(self)
        return y


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", [f for f in (*OF_OBJECTS, *OF_VARIABLES) if f is not set_a_flag])
def test_every_change_reaches_the_next_calls_as_natively(change, compiled):
    if change is remove:
        # A second call has nothing to remove.
        change = remove_once
    native = Calling(change)
    model = bridge.ToLinen(Calling, (change,), strict=True)
    apply = jax.jit(model.apply, static_argnames="mutable") if compiled else model.apply
    variables = model.init(KEY, jnp.float32(1))
    for x in (1.0, 2.0, 3.0):
        y, updates = apply(variables, jnp.float32(x), mutable=True)
        assert float(y) == float(native(jnp.float32(x)))
        variables = {**variables, **updates}


def remove_once(node):
    if hasattr(node, "deterministic"):
        remove(node)


def definition(graphdef):
    return nnx.GraphDef(graphdef.nodes, graphdef.attributes, graphdef.num_leaves)


@given(children=changing_models.modules, changes=changing_models.changes())
@drawing(60)
def test_only_a_module_whose_definition_is_the_same_counts_as_kept(children, changes):
    told = []

    def note(before, attributes, module):
        with mock.patch.object(changes_module, "flatten", wraps=changes_module.flatten) as flatten:
            found = changes_module.Changes(before, attributes, module)
        told.append((definition(nnx.split(module)[0]), not flatten.called))
        return found

    model = bridge.ToLinen(Changing, (children, changes))
    variables = model.init(KEY, jnp.float32(1))
    before = definition(variables["nnx"]["graphdef"])
    with mock.patch.object(bound_module, "Changes", note):
        model.apply(variables, jnp.float32(1), mutable=True)
    [(after, is_kept)] = told
    # An equal value that was assigned counts as changed, and is then looked at.
    assert not is_kept or after == before


def test_a_call_that_changes_values_alone_does_not_flatten_the_module():
    model = bridge.ToLinen(Calling, (set_the_value,))
    variables = model.init(KEY, jnp.float32(1))
    with mock.patch("bridge._nnx_in_linen.changes.flatten") as flatten:
        _, updates = model.apply(variables, jnp.float32(1), mutable="batch_stats")
    assert not flatten.called
    assert float(updates["batch_stats"]["stat"].value) == 2
