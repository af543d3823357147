"""The same constructor with the same arguments, and the module that it makes natively."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import errors as flax_errors
from flax import nnx
from flax.core import FrozenDict

import bridge
from bridge._graphdefs import static_graphdef
from bridge._nnx_in_linen.constructor import Constructor, takes_rngs
from bridge._nnx_in_linen.scope import WrapperScope
from tests.models import assert_identical

KEY = jax.random.key(0)


class Model(nnx.Module):
    def __init__(self, width, activation=None, *, rngs):
        self.linear = nnx.Linear(2, width, rngs=rngs)
        self.activation = activation


class Table(nnx.Module):
    def __init__(self, table):
        self.table = nnx.data(table)


def recipe(*args, cls=Model, skip_rng=False, **kwargs):
    return Constructor(cls, args, FrozenDict(kwargs), skip_rng)


def graphdef_of(own):
    constructed = own.construct({"default": KEY}, "here")
    return static_graphdef.split(constructed.module, own.origin, constructed.arrays)[0]


def test_it_constructs_what_the_class_constructs():
    made = recipe(3, activation=nnx.relu).construct({"default": KEY}, "here")
    native = Model(3, activation=nnx.relu, rngs=nnx.Rngs(KEY))
    assert nnx.graphdef(made.module) == nnx.graphdef(native)
    assert_identical(nnx.state(made.module), nnx.state(native))
    assert set(map(id, made.nodes.objects)) == {id(made.module), id(made.module.linear)}


def test_rngs_are_passed_only_to_what_takes_them():
    table = recipe(jnp.arange(3), cls=Table).construct({"default": KEY}, "here").module
    assert_identical(table.table, jnp.arange(3))
    with pytest.raises(TypeError, match="rngs"):
        recipe(3, skip_rng=True).construct({"default": KEY}, "here")


def test_a_stream_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(bridge.MissingRngError, match="'noise'") as caught:
        recipe(3).construct({"noise": KEY}, "here")
    assert caught.value.streams == ("params",)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (recipe(3, activation=nnx.relu), True),
        (recipe(3, activation=nnx.gelu), False),
        (recipe(4, activation=nnx.relu), False),
        (recipe(3), False),
    ],
)
def test_a_definition_belongs_to_equal_arguments_alone(other, same):
    graphdef = graphdef_of(recipe(3, activation=nnx.relu))
    assert other.made(graphdef) is same


def test_the_arguments_of_a_call_are_copies():
    first, second = (recipe([1, [2]]).arguments()[0] for _ in range(2))
    assert first == ([1, [2]],)
    first[0][1].append(3)
    assert second == ([1, [2]],)


def test_arrays_that_the_module_keeps_are_found_among_the_arguments():
    own = recipe(jnp.arange(3), cls=Table)
    assert_identical(own.kept(graphdef_of(own)), {("nnx_arrays", ("table",)): jnp.arange(3)})
    other = recipe(jnp.arange(3) + 1, cls=Table)
    assert_identical(other.kept(graphdef_of(own)), {("nnx_arrays", ("table",)): jnp.arange(3) + 1})
    assert recipe(3).kept(graphdef_of(recipe(3))) == {}


def test_messages_name_the_class_behind_a_partial():
    model = bridge.to_linen(functools.partial(Model, 3))
    assert WrapperScope(model).where == "ToLinen(Model)"


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [("self", False), ("self, rngs", True), ("self, *, rngs=None", True), ("self, **kwargs", True)],
)
def test_whether_a_constructor_takes_rngs_is_read_off_its_signature(parameters, expected):
    namespace = {}
    exec(f"def __init__({parameters}): pass", namespace)
    cls = type("Made", (nnx.Module,), {"__init__": namespace["__init__"]})
    assert takes_rngs(cls) is expected
    assert takes_rngs(functools.partial(cls)) is expected


def test_a_class_without_a_constructor_takes_no_rngs():
    class Bare(nnx.Module):
        def __call__(self, x):
            return x

    assert takes_rngs(Bare) is False
    assert bridge.ToLinen(Bare).init_with_output(KEY, 3)[0] == 3


def test_an_inherited_constructor_is_found():
    class Derived(nnx.Linear):
        pass

    assert takes_rngs(Derived) is True


def drawing_from(streams):
    class Drawing(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(2, 3, rngs=streams)

        def __call__(self, x):
            return self.linear(x)

    return Drawing


@pytest.mark.parametrize("transform", [jax.jit, lambda f: functools.partial(jax.eval_shape, f)])
def test_a_constructor_in_a_transform_names_its_draws_from_outer_streams(transform):
    """Regression: Flax's error named neither the module nor what to do."""
    streams, reference, x = nnx.Rngs(0), nnx.Rngs(0), jnp.ones((1, 2))
    drawing = drawing_from(streams)
    model = bridge.to_linen(drawing)
    with pytest.raises(flax_errors.TraceContextError) as native:
        transform(lambda: nnx.state(drawing()))()
    with pytest.raises(bridge.OuterStateError, match="constructor of ToLinen") as caught:
        transform(model.init)(KEY, x)
    assert isinstance(caught.value, flax_errors.TraceContextError)
    assert str(native.value).partition(" (")[0] in str(caught.value)
    # As natively, nothing was drawn, and outside of the transform all is as in the class.
    expected = drawing_from(reference)()
    variables = model.init(KEY, x)
    assert_identical(variables["params"]["linear"]["kernel"], expected.linear.kernel[...])
    assert_identical(jax.jit(model.apply)(variables, x), jax.jit(expected.__call__)(x))


def test_a_definition_drawn_from_outer_streams_cannot_be_made_again():
    model, x = bridge.to_linen(drawing_from(nnx.Rngs(0))), jnp.ones((1, 2))
    params = model.init(KEY, x)["params"]
    for apply in (model.apply, jax.jit(model.apply)):
        with pytest.raises(bridge.OuterStateError, match="keep the collection `nnx`"):
            apply({"params": params}, x)
