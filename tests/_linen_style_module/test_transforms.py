"""NNX transforms of a `bridge.Module` that keeps its variables, against those of pure Linen."""

import jax.numpy as jnp
import pytest
from flax import linen as nn

import bridge
from tests.models import assert_identical, snapshot
from tests.transforms import test_nnx_calls, test_nnx_closures, test_nnx_copies, test_nnx_mapped
from tests.transforms.nnx_states import (
    CALLS,
    CLOSURES,
    COPIES,
    MAPPED,
    SETTINGS,
    WITHOUT_GRAPH_UPDATES,
    Parent,
    X,
    pure_state,
)

# Linen's own way to read and write a variable, which Flax deprecates for NNX's.
pytestmark = pytest.mark.filterwarnings("ignore:'.value':DeprecationWarning")


def make(b):
    """Classes on a base class; the last is a model with parameters, statistics and a counter."""

    class Center(b.Module):
        updates: bool

        @b.compact
        def __call__(self, x):
            mean = self.variable("batch_stats", "mean", jnp.zeros, (1, x.shape[-1]))
            if self.updates and not self.is_initializing():
                mean.value = 0.5 * mean.value + 0.5 * x.mean(0, keepdims=True)
            return x - mean.value

    class Layer(b.Module):
        features: int

        @b.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.normal(), (x.shape[-1], self.features))
            return jnp.dot(x, jnp.asarray(kernel))

    class Model(b.Module):
        updates: bool = True

        def setup(self):
            self.layers = [Layer(3), Layer(4)]
            self.center = Center(self.updates)
            self.calls = self.variable("cache", "calls", jnp.zeros, (1,))

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            if self.updates and not self.is_initializing():
                self.calls.value = self.calls.value + 1.0
            return self.center(x)

    return Center, Layer, Model


Center, Layer, Model = make(bridge)
for made in (Center, Layer, Model):
    # Pickle finds a class by its name.
    made.__qualname__ = made.__name__
LinenModel = make(nn)[-1]


class Kind:
    """As the kinds of state that a ToNNX holds: how a model is made and called, and pure Linen."""

    x = X

    def __init__(self, updates):
        self.updates = updates

    def wrap(self, seed=0):
        return bridge.lazy_init(Model(self.updates, rngs=seed), X)

    def call(self, model, x):
        return model(x), {}

    def step(self, pure, x):
        mutable = ["batch_stats", "cache"] if self.updates else []
        y, updates = LinenModel(self.updates).apply(pure["variables"], x, mutable=mutable)
        return (y * pure.get("scale", 1.0), {}), {
            **pure,
            "variables": {**pure["variables"], **updates},
        }


STATEFUL, FIXED = Kind(True), Kind(False)


@pytest.mark.parametrize("transform", CALLS)
def test_a_transform_of_calls_is_that_of_pure_linen(transform):
    is_without = transform in WITHOUT_GRAPH_UPDATES
    setting = SETTINGS["no_graph_updates" if is_without else "in_a_parent"]
    ours, reference = test_nnx_calls.TRANSFORMS[transform]
    with setting.active():
        model = setting.model(STATEFUL)
        expected, pure = reference(STATEFUL.step, pure_state(model), X)
        assert_identical(ours(STATEFUL.call, model, X), expected)
    assert_identical(pure_state(model), pure)


@pytest.mark.parametrize("transform", MAPPED)
def test_a_transform_of_slices_is_that_of_pure_linen(transform):
    # All inputs, or all devices, would write to the same Variables.
    kind = FIXED if transform in ("vmap_of_inputs", "shard_map") else STATEFUL
    setting = SETTINGS["in_a_parent"]
    with setting.active():
        model, output, (expected, pure) = test_nnx_mapped.TRANSFORMS[transform](setting, kind)
    assert_identical(output, expected)
    assert_identical(pure_state(model), pure)


@pytest.mark.parametrize("transform", COPIES)
def test_a_copy_goes_on_as_the_pure_computation(transform):
    setting = SETTINGS["in_a_parent"]
    with setting.active():
        model, other = setting.model(STATEFUL), setting.model(STATEFUL, seed=5)
        STATEFUL.call(model, X)
        before = pure_state(model)
        copy = test_nnx_copies.TRANSFORMS[transform](model, other)
        assert_identical(pure_state(copy), before)
        expected, after = STATEFUL.step(before, X)
        assert_identical(STATEFUL.call(copy, X), expected)
    assert_identical(pure_state(copy), after)
    assert_identical(pure_state(model), before)


@pytest.mark.parametrize("transform", CLOSURES)
def test_a_closure_over_an_unchanged_module_is_one_over_pure_linen(transform):
    model = Parent(FIXED.wrap())
    before, pure = snapshot(model), pure_state(model)
    change, xs = test_nnx_closures.TRANSFORMS[transform], test_nnx_closures.XS
    on_slices = transform in test_nnx_closures.ON_SLICES
    x = 2.0 if transform == "jax_jacfwd" else xs if on_slices else xs[0]
    expected = change(lambda x: FIXED.step(pure, x)[0][0])(x)
    assert_identical(change(model.__call__)(x), expected)
    assert snapshot(model) == before
