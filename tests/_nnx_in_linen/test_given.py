"""A wrong argument of ToLinen is refused, with the remedy."""

import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge._nnx_in_linen.constructor import check_arguments, check_instance

MODEL = nnx.Linear(2, 3, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("module", [MODEL, nnx.Rngs(0), nnx.List([MODEL])])
def test_an_nnx_object_is_an_instance(module):
    assert check_instance(module) is None


@pytest.mark.parametrize(
    ("module", "hint"),
    [
        (nnx.Linear, "ToLinen(Linear, args=("),
        (nnx.state(MODEL), "nnx.merge(graphdef, state)"),
        (nnx.State, "nnx.merge(graphdef, state)"),
        (nn.Dense(3), "it is Linen already"),
        (nn.Dense, "it is Linen already"),
        (3, "pass an instance of a subclass of flax.nnx.Module"),
        (len, "pass an instance of a subclass of flax.nnx.Module"),
    ],
    ids=["class", "State", "State class", "Linen", "Linen class", "number", "function"],
)
def test_what_is_no_instance_is_an_error_with_the_remedy(module, hint):
    with pytest.raises(bridge.InvalidModuleError) as caught:
        check_instance(module)
    assert hint in str(caught.value)


@pytest.mark.parametrize("args", [(), (1, 2), [1], range(2)])
@pytest.mark.parametrize("kwargs", [{}, {"a": 1}, nn.FrozenDict(a=1)])
def test_a_sequence_and_names_are_arguments(args, kwargs):
    assert check_arguments(nnx.Linear, args, kwargs) is None


@pytest.mark.parametrize(
    ("args", "kwargs", "said", "unsaid"),
    [
        (3, {}, "args as a tuple", "kwargs as a dict"),
        ("ab", {}, "args as a tuple", "kwargs as a dict"),
        ({"a": 1}, {}, "args as a tuple", "kwargs as a dict"),
        ((), {1: 2}, "kwargs as a dict", "args as a tuple"),
        ((), [1], "kwargs as a dict", "args as a tuple"),
        (3, [1], "args as a tuple of positional arguments and kwargs as a dict", "nothing"),
    ],
)
def test_what_are_no_arguments_is_an_error_that_says_which(args, kwargs, said, unsaid):
    with pytest.raises(bridge.InvalidModuleError) as caught:
        check_arguments(nnx.Linear, args, kwargs)
    assert "ToLinen of Linear" in str(caught.value)
    assert said in str(caught.value)
    assert unsaid not in str(caught.value)
    assert "to_linen(Linear, …)" in str(caught.value)


def test_any_callable_is_named_as_well_as_it_can_be():
    class Maker:
        """Constructs a module when it is called, and has no name."""

    with pytest.raises(bridge.InvalidModuleError, match="ToLinen of Maker"):
        check_arguments(Maker(), 3, {})
