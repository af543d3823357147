"""The Variables that a conversion makes are those that Flax makes of their type."""

import gc
import tracemalloc

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import bridge
import registry
from bridge._errors import ConversionError
from tests.strategies import exact

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


def test_every_variable_has_metadata_and_a_value_of_its_own():
    tree = bridge.linen_to_nnx({"params": {"a": A, "b": A}})
    tree["a"].set_metadata(tag=1)
    tree["a"].set_raw_value(B)
    assert tree["b"].get_raw_value() is A
    assert tree["b"].get_metadata() == nnx.Param(A).get_metadata()


@pytest.mark.parametrize("kind", [Hooked, Counted])
def test_a_type_with_a_constructor_or_a_hook_keeps_them(kind):
    with registry.use(registry.current().extend({"odd": kind})):
        variable = bridge.linen_to_nnx({"odd": {"a": A}})["a"]
        assert type(variable) is kind
        assert variable.get_raw_value() is A
        assert bridge.nnx_to_linen({"a": variable})["odd"]["a"] is A


@pytest.mark.parametrize("own", ["from_metadata", "_new"])
def test_a_type_that_makes_its_variables_in_its_own_way_is_asked(own):
    made = []

    def wrapped(cls, value, metadata):
        made.append(value)
        return getattr(super(kind, cls), own)(value, metadata)

    kind = type("Own", (nnx.Variable,), {own: classmethod(wrapped)})
    with registry.use(registry.current().extend({"own": kind})):
        assert type(bridge.linen_to_nnx({"own": {"a": A, "b": B}})["a"]) is kind
    assert any(value is A for value in made)
    assert any(value is B for value in made)


@pytest.mark.parametrize("defaults", [{"ref": True}, {"hijax": True}])
def test_variables_are_made_as_the_defaults_in_force_say(defaults):
    with nnx.var_defaults(**defaults):
        made, native = bridge.linen_to_nnx({"params": {"a": A}})["a"], nnx.Param(A)
    assert type(made) is type(native)
    assert made.get_metadata() == native.get_metadata()
    assert bridge.nnx_to_linen({"a": made})["params"]["a"].tolist() == A.tolist()


def test_variables_belong_to_the_trace_that_makes_them():
    outer = []

    def function(x):
        made = bridge.linen_to_nnx({"params": {"a": x}})["a"]
        made[...] = 2 * x
        outer.append(made)
        return made[...]

    assert jax.jit(function)(A).tolist() == [2, 2]
    with pytest.raises(flax.errors.TraceContextError):
        outer[0].set_raw_value(A)


def test_only_the_variables_in_the_dicts_of_a_wrapper_are_linens():
    model = bridge.ToNNX(nn.Dense(2))
    model.a = nnx.data({"w": nnx.Param(A), "note": 3})
    model.array, model.list = nnx.data(B), nnx.List([nnx.Param(B)])
    assert exact(model.linen_variables()) == exact({"params": {"a": {"w": A}}})


def test_a_variable_among_linen_variables_is_an_error():
    with pytest.raises(ConversionError, match="nnx_to_linen"):
        bridge.linen_to_nnx({"params": {"a": nnx.Param(A)}})


def test_a_conversion_holds_no_more_memory_than_its_variables():
    variables = {"params": {f"layer_{i}": {"kernel": A, "bias": A} for i in range(100)}}

    def native():
        metadata = nnx.Param(A).get_metadata()
        return nnx.State(
            {
                name: {key: nnx.Param.from_metadata(x, metadata) for key, x in layer.items()}
                for name, layer in variables["params"].items()
            }
        )

    def memory(function):
        function()
        gc.collect()
        tracemalloc.start()
        result = function()
        # What Python keeps of freed tuples and dicts goes, too.
        gc.collect()
        found, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        del result
        return found

    assert memory(lambda: bridge.linen_to_nnx(variables)) <= 1.05 * memory(native)
