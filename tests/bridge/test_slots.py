"""Slots read variables that hold their values and no more, and leave all others to be compared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict

import bridge
import registry
from bridge import _graphdef
from tests.models import assert_identical

KEY = jax.random.key(0)


class Model(nnx.Module):
    """A list, so that a key is an integer, statistics and a stream of keys."""

    def __init__(self, *, rngs):
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.dropout(self.norm(x))


def native():
    return Model(rngs=nnx.Rngs(0))


@pytest.fixture
def slots():
    return _graphdef.split(native())[0].slots


@pytest.fixture
def variables():
    """The variables as the registry and the paths in the module say, each an array of its own."""
    nested = {}
    for path, variable in nnx.to_flat_state(nnx.state(native())):
        tree = nested.setdefault(registry.current().name_from_type(type(variable)), {})
        for key in path[:-1]:
            tree = tree.setdefault(key, {})
        tree[path[-1]] = variable.get_value()
    return nested


def values_of(variables, slots):
    found = []
    for slot in slots:
        leaf = variables[slot.address[0]]
        for key in slot.address[1]:
            leaf = leaf[key]
        found.append(leaf)
    return found


@pytest.mark.parametrize("freeze", [dict, FrozenDict])
def test_the_values_are_in_the_order_of_the_slots(slots, variables, freeze):
    frozen = {name: freeze(tree) for name, tree in variables.items()}
    found = slots.bare_values(frozen)
    assert len(found) == 10
    for value, expected in zip(found, values_of(variables, slots), strict=True):
        assert value is expected


def test_tracers_are_values_too(slots, variables):
    seen = []
    jax.eval_shape(lambda v: seen.append(slots.bare_values(v) is not None), variables)
    jax.grad(
        lambda p: seen.append(slots.bare_values({**variables, "params": p}) is not None) or 0.0
    )(variables["params"])
    assert seen == [True, True]


def without(tree, *path):
    rest = dict(tree)
    if len(path) == 1:
        del rest[path[0]]
    else:
        rest[path[0]] = without(tree[path[0]], *path[1:])
    return rest


def with_leaf(tree, leaf, *path):
    below = with_leaf(tree.get(path[0], {}), leaf, *path[1:]) if len(path) > 1 else leaf
    return {**tree, path[0]: below}


SCALE = ("params", "norm", "scale")
OTHERS = {
    "nothing": lambda v: {},
    "a leaf less": lambda v: without(v, *SCALE),
    "a leaf more": lambda v: with_leaf(v, jnp.ones(2), "params", "norm", "other"),
    "a collection less": lambda v: without(v, "batch_stats"),
    "a collection more": lambda v: with_leaf(v, jnp.ones(2), "cache", "index"),
    "another collection": lambda v: {**without(v, "batch_stats"), "stats": v["batch_stats"]},
    "an empty subtree": lambda v: with_leaf(v, {}, "params", "none"),
    "another name": lambda v: with_leaf(without(v, *SCALE), jnp.ones(2), "params", "norm", "Scale"),
    "another shape": lambda v: with_leaf(v, jnp.ones(3), *SCALE),
    "a NumPy array": lambda v: with_leaf(v, np.ones(2, np.float32), *SCALE),
    "a scalar": lambda v: with_leaf(v, 1.0, *SCALE),
    "an abstract array": lambda v: with_leaf(v, jax.ShapeDtypeStruct((2,), float), *SCALE),
    "None": lambda v: with_leaf(v, None, *SCALE),
    "a box": lambda v: with_leaf(v, nn.Partitioned(jnp.ones(2), ("model",)), *SCALE),
    "a tuple": lambda v: with_leaf(v, (jnp.ones(2),), *SCALE),
    "strings for integers": lambda v: {
        **v,
        "params": {
            **v["params"],
            "layers": {str(key): tree for key, tree in v["params"]["layers"].items()},
        },
    },
    "keys that cannot be sorted": lambda v: with_leaf(v, jnp.ones(2), "params", 3),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_all_other_variables_are_not_read(slots, variables, change):
    assert slots.bare_values(variables) is not None
    assert slots.bare_values(change(variables)) is None


def test_without_known_shapes_nothing_is_read(variables):
    known = _graphdef.split(native())[0]
    unknown = _graphdef.intern(nnx.GraphDef(known.nodes, known.attributes, known.num_leaves))
    assert unknown.avals is None
    assert unknown.slots.bare_values(variables) is None


def test_a_scoped_registry_names_the_collections(variables):
    graphdef = _graphdef.split(native())[0]
    assert graphdef.slots.bare_values(variables) is not None
    renamed = {**without(variables, "params"), "weights": variables["params"]}
    with registry.use(registry.current().extend({"weights": nnx.Param}, overwrite=True)):
        assert graphdef.slots.bare_values(variables) is None
        found = graphdef.slots.bare_values(renamed)
    assert_identical(found, graphdef.slots.bare_values(variables))


def test_both_ways_to_read_make_the_same_call():
    module = bridge.to_linen(Model)
    x = jnp.ones((4, 2))
    variables = nn.unbox(module.init(KEY, x))
    options = {"rngs": {"dropout": KEY}, "mutable": ["batch_stats"]}
    expected = module.apply(variables, x, **options)
    boxed = nn.Partitioned(variables["params"]["norm"]["scale"], (None,))
    others = [
        with_leaf(variables, boxed, *SCALE),
        with_leaf(variables, np.asarray(variables["params"]["norm"]["scale"]), *SCALE),
        OTHERS["strings for integers"](variables),
        FrozenDict(variables),
    ]
    for other in others:
        assert_identical(module.apply(other, x, **options), expected)
