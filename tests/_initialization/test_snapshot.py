"""An initialisation leaves what is there as it was, however the call changes it."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given

import bridge
from tests._nnx_in_linen import changing_models
from tests._nnx_in_linen.changing_models import Changing
from tests.drawing import drawing
from tests.strategies import exact

pytestmark = pytest.mark.filterwarnings("ignore:Using .Module.sow:DeprecationWarning")

X = jnp.ones((2, 3))


class Beside(nnx.Module):
    """A wrapped Linen module beside a native one."""

    def __init__(self, sibling):
        self.sibling = sibling
        self.wrapped = bridge.ToNNX(nn.Dense(2), rngs=nnx.Rngs(0))

    def __call__(self, x):
        self.sibling(jnp.float32(1))
        return self.wrapped(x)


def described(module):
    """Everything that NNX knows of a module."""
    graphdef, state = nnx.split(module)
    return graphdef, exact(nnx.to_pure_dict(state))


@given(
    children=changing_models.modules,
    changes=changing_models.changes(changing_models.UNMAKING),
)
@drawing(100)
def test_generated_changes_of_a_native_sibling_are_undone(children, changes):
    model = Beside(Changing(children, changes))
    before = described(model.sibling)
    bridge.lazy_init(model, X)
    assert described(model.sibling) == before
    assert model.wrapped.kernel.shape == (3, 2)


@given(children=changing_models.modules, changes=changing_models.changes())
@drawing(100)
def test_an_initialisation_that_fails_leaves_no_trace(children, changes):
    class Failing(Beside):
        def __call__(self, x):
            super().__call__(x)
            raise RuntimeError("the call failed")

    model = Failing(Changing(children, changes))
    before = described(model)
    with pytest.raises(RuntimeError, match="the call failed"):
        bridge.lazy_init(model, X)
    assert described(model) == before


class Counter(nnx.Module):
    def __init__(self):
        self.c = nnx.Cache(jnp.zeros(()))
        self.calls = 0

    def __call__(self, x):
        self.c = nnx.Cache(self.c[...] + 1)
        self.calls += 1


def test_a_sibling_that_replaces_its_variable_and_counts_is_left_as_it_was():
    model = Beside(Counter())
    variable = model.sibling.c
    bridge.lazy_init(model, X)
    assert model.sibling.c is variable
    assert float(model.sibling.c[...]) == 0
    assert model.sibling.calls == 0


def test_state_that_the_call_creates_is_kept_with_what_notes_it():
    class Building(nnx.Module):
        """Builds itself from its first input, in three ways."""

        def __init__(self):
            self.built = False
            self.calls = 0
            self.bias = nnx.data(None)
            self.layers = nnx.List([])

        def __call__(self, x):
            self.calls += 1
            if not self.built:
                self.width = x.shape[-1]
                self.scale = nnx.Param(jnp.ones((1, self.width)))
                self.bias = nnx.Param(jnp.zeros((1, self.width)))
                self.layers.append(nnx.Linear(self.width, 2, use_bias=False, rngs=nnx.Rngs(0)))
                self.built = True
            return self.layers[0](x * self.scale + self.bias)

    native = Building()
    native(X)
    model = bridge.to_linen(Building)
    variables = model.init(jax.random.key(0), X)
    expected = nnx.to_pure_dict(nnx.state(native, nnx.Param))
    assert exact(variables["params"]) == exact(expected)
    bound = model.bind(variables)
    assert (bound.built, bound.width, bound.calls) == (True, 3, 0)
    assert exact(model.apply(variables, X, mutable=["nnx"])[0]) == exact(native(X))


def test_metadata_and_lists_in_variables_are_put_back():
    class Marking(nnx.Module):
        def __init__(self):
            self.items = nnx.Cache([1])

        def __call__(self, x):
            self.items.get_value().append(2)
            self.items.set_metadata(mark="set")

    model = Beside(Marking())
    bridge.lazy_init(model, X)
    assert model.sibling.items.get_value() == [1]
    assert "mark" not in model.sibling.items.get_metadata()


class Moving(nnx.Module):
    """Holds the same objects after a call, by other names and in another order."""

    def __init__(self):
        self.first, self.second = "one", "two"
        self.names = nnx.data({"a": nnx.Variable(jnp.ones(())), "b": nnx.Variable(jnp.ones(()))})
        self.layers = nnx.data([nnx.Variable(jnp.zeros(())), nnx.Variable(jnp.ones(()))])

    def __call__(self, x):
        self.third = vars(self).pop("second")
        self.names["c"] = self.names.pop("b")
        self.layers.reverse()
        return x


def test_objects_that_only_change_places_are_put_back():
    model = Beside(Moving())
    moving = model.sibling
    names, layers = list(moving.names.items()), list(moving.layers)
    bridge.lazy_init(model, X)
    assert (moving.first, moving.second, hasattr(moving, "third")) == ("one", "two", False)
    assert list(moving.names.items()) == names
    assert [a is b for a, b in zip(moving.layers, layers, strict=True)] == [True, True]
