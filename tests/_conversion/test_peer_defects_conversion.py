"""Defects of flax.nnx.bridge in conversion, registration and bad input, by their design numbers."""

import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx, struct
from flax.core import FrozenDict, meta

from tests.bridge.peer import Defect, free_of, rejects
from tests.models import assert_identical

KEY = jax.random.key(0)
X = jnp.arange(12.0).reshape(4, 3)


class Tagged(struct.PyTreeNode, meta.AxisMetadata[Any]):
    """A box whose field is not called value, and which says nothing about NNX."""

    array: Any
    tag: str = struct.field(pytree_node=False)

    def unbox(self):
        return self.array

    def replace_boxed(self, val):
        return self.replace(array=val)

    def add_axis(self, index, params):
        return self

    def remove_axis(self, index, params):
        return self


class Tracked(struct.PyTreeNode, meta.AxisMetadata[Any]):
    """A box with a value, and another field than its constructor takes by name from NNX."""

    value: Any
    history: Any = struct.field(pytree_node=False, default=())

    def unbox(self):
        return self.value

    def replace_boxed(self, val):
        return self.replace(value=val, history=self.history)

    def add_axis(self, index, params):
        return self

    def remove_axis(self, index, params):
        return self


class Boxed(nn.Module):
    box: Any

    @nn.compact
    def __call__(self, x):
        def boxed_ones(key, shape):
            return self.box(jnp.ones(shape))

        return x @ self.param("w", boxed_ones, (3, 2))


def there_and_back(bridge, variables):
    attributes = bridge.variables.linen_vars_to_nnx_attrs(variables)
    return bridge.variables.nnx_attrs_to_linen_vars(attributes)


def check_10_leaf_above_a_subtree(bridge):
    variables = {"params": {"w": jnp.ones(2)}, "batch_stats": {"w": {"mean": jnp.zeros(3)}}}
    assert_identical(there_and_back(bridge, variables), variables)


def check_10_same_name(bridge):
    variables = {"params": {"w": jnp.ones(2)}, "batch_stats": {"w": jnp.zeros(3)}}
    assert_identical(there_and_back(bridge, variables), variables)


def check_10_same_name_in_a_module(bridge):
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            total = self.variable("batch_stats", "w", jnp.zeros, (3,))
            if not self.is_initializing():
                total.value += x.sum(0)
            return x @ self.param("w", nn.initializers.ones, (3, 2))

    model = bridge.lazy_init(bridge.ToNNX(Named(), rngs=nnx.Rngs(0)), X)
    model(X, mutable=["batch_stats"])
    (total,) = jax.tree.leaves(nnx.state(model, nnx.BatchStat))
    np.testing.assert_array_equal(total, X.sum(0))
    np.testing.assert_array_equal(model.w[...], np.ones((3, 2)))


def check_10_frozen_dict(bridge):
    variables = {"params": {"Dense_0": {"w": jnp.ones(2)}}, "batch_stats": {"m": jnp.zeros(3)}}
    assert_identical(there_and_back(bridge, FrozenDict(variables)), variables)


def check_10_empty_collection(bridge):
    variables = {"params": {"w": jnp.ones(2)}, "batch_stats": {}}
    assert_identical(there_and_back(bridge, variables), variables)


def _registering(bridge):
    """The function that programs register with, which flax.nnx.bridge leaves to nnx."""
    return getattr(bridge, "register_variable_name", nnx.register_variable_name)


def _library(module, name="PeerDefectStatistic"):
    return type(name, (nnx.Variable,), {"__module__": module})


def check_19_a_cell_runs_twice(bridge):
    name = f"rerun_cell_of_{bridge.__name__}"
    _registering(bridge)(name, _library("notebook", "RerunCell"))
    again = _registering(bridge)(name, _library("notebook", "RerunCell"))
    (leaf,) = jax.tree.leaves(
        bridge.variables.nnx_attrs_to_linen_vars({"w": again(jnp.ones(2))})[name]
    )
    np.testing.assert_array_equal(leaf, np.ones(2))


def check_19_two_libraries(bridge):
    first, second = _library("one.library"), _library("another.library")

    class Model(nnx.Module):
        def __init__(self, *, rngs):
            self.a, self.b = first(jnp.ones(2)), second(jnp.zeros(2))

        def __call__(self, x):
            return x

    rejects(
        lambda: bridge.ToLinen(Model).init(KEY, X),
        "one.library.PeerDefectStatistic",
        "another.library.PeerDefectStatistic",
    )


def check_19_automatic_types_pickle(bridge):
    # A name of its own for each package: Flax knows the types that this one makes.
    collection = f"peer_defect_counts_of_{bridge.__name__.replace('.', '_')}"
    attributes = bridge.variables.linen_vars_to_nnx_attrs({collection: {"n": jnp.ones(2)}})
    restored = pickle.loads(pickle.dumps(attributes["n"]))
    assert type(restored) is type(attributes["n"])


def check_25_box(box, bridge):
    model = bridge.lazy_init(bridge.ToNNX(Boxed(box), rngs=nnx.Rngs(0)), X)
    np.testing.assert_array_equal(model(X), X @ jnp.ones((3, 2)))
    variables = Boxed(box).init(KEY, X)
    again = there_and_back(bridge, variables)["params"]["w"]
    assert type(again) is type(variables["params"]["w"])
    assert_identical(again, variables["params"]["w"])


def check_26_call_before_lazy_init(bridge):
    model = bridge.ToNNX(nn.Dense(2), rngs=nnx.Rngs(0))
    rejects(lambda: model(X), "ToNNX(Dense)", "lazy_init")


def check_26_instance_to_to_linen(bridge):
    linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    rejects(lambda: bridge.ToLinen(linear).init(KEY, X), "class", "instance", "from_module")


def check_26_linen_class_to_to_linen(bridge):
    rejects(lambda: bridge.ToLinen(nn.Dense, args=(2,)).init(KEY, X), "Dense", "Linen already")


def check_26_nnx_module_to_to_nnx(bridge):
    linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    rejects(lambda: bridge.ToNNX(linear).lazy_init(X), "Linen module instance", "Linear")


def check_26_class_to_to_nnx(bridge):
    rejects(lambda: bridge.ToNNX(nn.Dense).lazy_init(X), "Linen module instance", "ToNNX(Dense(")


def check_26_wrong_rngs(bridge):
    rejects(
        lambda: bridge.ToNNX(nn.Dense(2), rngs="dropout").lazy_init(X),
        "rngs",
        "nnx.Rngs",
        "'dropout'",
    )


def check_26_wrong_rngs_at_the_call(bridge):
    model = bridge.lazy_init(bridge.ToNNX(nn.Dense(2), rngs=nnx.Rngs(0)), X)
    rejects(lambda: model(X, rngs=0.5), "rngs", "nnx.Rngs", "0.5")


def check_26_wrong_registered_type(bridge):
    rejects(lambda: _registering(bridge)("peer_defect_ints", int), "Variable", "int")


def check_26_wrong_registered_name(bridge):
    rejects(lambda: _registering(bridge)(3, _library("some.library")), "name", "3")


DEFECTS = {
    "10 a leaf may be above another collection's subtree": Defect(
        check_10_leaf_above_a_subtree, AssertionError
    ),
    "10 two collections may have the same name": Defect(
        check_10_same_name, ValueError, "Found duplicate variable path"
    ),
    "10 a module may use a name in two collections": Defect(
        check_10_same_name_in_a_module, ValueError, "Found duplicate variable path"
    ),
    "10 a FrozenDict can be converted": Defect(
        check_10_frozen_dict, IndexError, "tuple index out of range"
    ),
    "10 an empty collection comes back": Defect(check_10_empty_collection, AssertionError),
    "19 a cell that registers may run twice": Defect(
        check_19_a_cell_runs_twice, ValueError, "already mapped to type"
    ),
    "19 a conflict of two libraries is named": Defect(
        check_19_two_libraries, AssertionError, "not in the error"
    ),
    "19 automatic types can be pickled": Defect(
        check_19_automatic_types_pickle, pickle.PicklingError, "Can't pickle"
    ),
    "25 a box without a field called value makes the round trip": Defect(
        functools.partial(check_25_box, functools.partial(Tagged, tag="embedding")), AssertionError
    ),
    "25 a box without from_nnx_metadata makes the round trip": Defect(
        functools.partial(check_25_box, functools.partial(Tracked, history=("made", "kept"))),
        TypeError,
        "'linen_meta_type'",
    ),
    "26 a call before lazy_init is named": Defect(
        check_26_call_before_lazy_init, AssertionError, "not in the error"
    ),
    "26 an instance given to ToLinen is named": Defect(
        check_26_instance_to_to_linen, AssertionError, "not in the error"
    ),
    "26 a Linen class given to ToLinen is named": Defect(
        check_26_linen_class_to_to_linen, AssertionError, "not in the error"
    ),
    "26 an NNX module given to ToNNX is named": Defect(
        check_26_nnx_module_to_to_nnx, AssertionError, "not in the error"
    ),
    "26 a class given to ToNNX is named": Defect(
        check_26_class_to_to_nnx, AssertionError, "not in the error"
    ),
    "26 rngs of a wrong type are named": Defect(
        check_26_wrong_rngs, AssertionError, "not in the error"
    ),
    "26 rngs of a wrong type in a call are named": Defect(
        check_26_wrong_rngs_at_the_call, AssertionError, "nothing was raised"
    ),
    "26 a wrong type given to the registry is named": Defect(
        check_26_wrong_registered_type, AssertionError, "nothing was raised"
    ),
    "26 a wrong name given to the registry is named": Defect(
        check_26_wrong_registered_name, AssertionError, "nothing was raised"
    ),
}

test_the_bridge_is_free_of_the_defect = free_of(DEFECTS)
