"""Whole trees become what their leaves become one by one."""

import gc
import tracemalloc

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given

import bridge
import registry
from bridge._conversion import linen_leaves, nnx_leaves
from bridge._conversion.neutral import nest, walk
from bridge._conversion.trees import linen_tree, nnx_tree
from bridge._errors import ConversionError
from tests.strategies import exact, linen_variables, states

A, B = jnp.ones(2), jnp.zeros(3)


class Hooked(nnx.Variable):
    """A type with a hook of its own, which its Variables have as metadata."""

    def on_get_value(self, value):
        """Reads double."""
        return 2 * value


class Counted(nnx.Variable):
    """A type whose constructor wants more than a value."""

    def __init__(self, value, count, **metadata):
        super().__init__(value, **metadata)
        self.set_metadata(count=count)


@given(linen_variables())
def test_a_tree_of_variables_is_what_its_leaves_are_one_by_one(variables):
    leaves = nnx_leaves.to_leaves(linen_leaves.from_variables(variables))
    assert exact(nnx.State(nnx_tree(variables))) == exact(nnx.State(nest(leaves)))


@given(states())
def test_the_variables_of_a_state_are_what_its_leaves_are_one_by_one(state):
    neutral = nnx_leaves.from_leaves(walk(state))
    assert exact(linen_tree(state)) == exact(linen_leaves.to_variables(neutral))


def test_every_variable_has_metadata_and_a_value_of_its_own():
    tree = nnx_tree({"params": {"a": A, "b": A}})
    tree["a"].set_metadata(tag=1)
    tree["a"].set_raw_value(B)
    assert tree["b"].get_raw_value() is A
    assert tree["b"].get_metadata() == nnx.Param(A).get_metadata()


@pytest.mark.parametrize("kind", [Hooked, Counted])
def test_a_type_with_a_constructor_or_a_hook_keeps_them(kind):
    with registry.use(registry.current().extend({"odd": kind})):
        variable = nnx_tree({"odd": {"a": A}})["a"]
        assert type(variable) is kind
        assert variable.get_raw_value() is A
        assert linen_tree({"a": variable})["odd"]["a"] is A


@pytest.mark.parametrize("own", ["from_metadata", "_new"])
def test_a_type_that_makes_its_variables_in_its_own_way_is_asked(own):
    made = []

    def wrapped(cls, value, metadata):
        made.append(value)
        return getattr(super(kind, cls), own)(value, metadata)

    kind = type("Own", (nnx.Variable,), {own: classmethod(wrapped)})
    with registry.use(registry.current().extend({"own": kind})):
        assert type(nnx_tree({"own": {"a": A, "b": B}})["a"]) is kind
    assert any(value is A for value in made)
    assert any(value is B for value in made)


@pytest.mark.parametrize("defaults", [{"ref": True}, {"hijax": True}])
def test_variables_are_made_as_the_defaults_in_force_say(defaults):
    with nnx.var_defaults(**defaults):
        made, native = nnx_tree({"params": {"a": A}})["a"], nnx.Param(A)
    assert type(made) is type(native)
    assert made.get_metadata() == native.get_metadata()
    assert bridge.nnx_to_linen({"a": made})["params"]["a"].tolist() == A.tolist()


def test_variables_belong_to_the_trace_that_makes_them():
    outer = []

    def function(x):
        made = nnx_tree({"params": {"a": x}})["a"]
        made[...] = 2 * x
        outer.append(made)
        return made[...]

    assert jax.jit(function)(A).tolist() == [2, 2]
    with pytest.raises(flax.errors.TraceContextError):
        outer[0].set_raw_value(A)


def test_a_value_that_is_no_jax_array_is_converted_if_that_is_asked_for():
    variables = {"params": {"a": np.ones(2), "b": A, "c": nn.Partitioned(np.ones(2), ("x",))}}
    tree = nnx_tree(variables, convert=jnp.asarray)
    assert all(isinstance(v.get_raw_value(), jax.Array) for v in tree.values())
    assert tree["b"].get_raw_value() is A
    assert nnx_tree(variables)["a"].get_raw_value() is variables["params"]["a"]


def test_only_the_variables_in_the_dicts_of_a_wrapper_are_linens():
    attributes = {"a": {"w": nnx.Param(A), "note": 3}, "array": B, "list": [nnx.Param(B)]}
    assert exact(linen_tree(attributes, nnx_leaves.linens_leaf)) == exact(
        {"params": {"a": {"w": A}}}
    )


def test_a_variable_among_linen_variables_is_an_error():
    with pytest.raises(ConversionError, match="nnx_to_linen"):
        nnx_tree({"params": {"a": nnx.Param(A)}})


def test_a_conversion_holds_no_more_memory_than_its_variables():
    variables = {"params": {f"layer_{i}": {"kernel": A, "bias": A} for i in range(100)}}

    def native():
        metadata = nnx.Param(A).get_metadata()
        return {
            name: {key: nnx.Param.from_metadata(value, metadata) for key, value in layer.items()}
            for name, layer in variables["params"].items()
        }

    def memory(function):
        function()
        gc.collect()
        tracemalloc.start()
        result = function()
        found = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        del result
        return found

    (ours, our_peak), (theirs, _) = memory(lambda: nnx_tree(variables)), memory(native)
    assert ours <= theirs
    assert our_peak <= 1.05 * theirs
