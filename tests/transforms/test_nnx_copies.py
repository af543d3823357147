"""Taking a wrapped model apart and putting it together: the copy goes on as the model would."""

import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.models import assert_identical
from tests.transforms.nnx_states import COPIES, KINDS, SETTING, SETTINGS, Average, pure_state

FILTERS = (nnx.Param, nnx.BatchStat, nnx.RngState, (nnx.Cache, Average), ...)


def split_and_merge(model, other):
    return nnx.merge(*nnx.split(model), copy=True)


def split_by_type_and_merge(model, other):
    return nnx.merge(*nnx.split(model, *FILTERS), copy=True)


def flatten_and_unflatten(model, other):
    graphdef, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    return nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))


def clone(model, other):
    return nnx.clone(model)


def state_and_update(model, other):
    nnx.update(other, nnx.state(model))
    return other


def states_by_type_and_update(model, other):
    nnx.update(other, *nnx.state(model, *FILTERS))
    return other


def flat_state(model, other):
    flat = nnx.to_flat_state(nnx.state(model))
    nnx.update(other, nnx.from_flat_state(list(flat)))
    return other


def pure_dict(model, other):
    state = nnx.state(other)
    nnx.replace_by_pure_dict(state, nnx.to_pure_dict(nnx.state(model)))
    nnx.update(other, state)
    return other


def update_by_pure_dict(model, other):
    nnx.update(other, nnx.to_pure_dict(nnx.state(model)))
    return other


def iter_graph(model, other):
    variables = {p: v for p, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model))]
    assert sorted(map(str, variables)) == sorted(map(str, paths))
    for path, variable in nnx.iter_graph(other):
        if isinstance(variable, nnx.Variable):
            variable.set_value(variables[path].get_value())
    return other


def pickled(model, other):
    return pickle.loads(pickle.dumps(model))


def cloudpickled(model, other):
    return cloudpickle.loads(cloudpickle.dumps(model))


def pytree(model, other):
    return jax.tree.map(jnp.copy, model)


TRANSFORMS = {
    "split_and_merge": split_and_merge,
    "split_by_type_and_merge": split_by_type_and_merge,
    "flatten_and_unflatten": flatten_and_unflatten,
    "clone": clone,
    "state_and_update": state_and_update,
    "states_by_type_and_update": states_by_type_and_update,
    "flat_state": flat_state,
    "pure_dict": pure_dict,
    "update_by_pure_dict": update_by_pure_dict,
    "iter_graph": iter_graph,
    "pickle": pickled,
    "cloudpickle": cloudpickled,
    "tree_map": pytree,
}


CELLS = [(t, s, setting) for (t, s), setting in SETTING.items() if t in COPIES]


@pytest.mark.parametrize(("transform", "state", "setting"), CELLS)
def test_a_copy_goes_on_as_the_pure_computation(transform, state, setting):
    kind, setting = KINDS[state], SETTINGS[setting]
    with setting.active():
        model, other = setting.model(kind), setting.model(kind, seed=5)
        kind.call(model, kind.x)
        before = pure_state(model)
        copy = TRANSFORMS[transform](model, other)
        assert_identical(pure_state(copy), before)
        expected, after = kind.step(before, kind.x)
        assert_identical(kind.call(copy, kind.x), expected)
    assert_identical(pure_state(copy), after)
    assert_identical(pure_state(model), before)


@pytest.mark.parametrize("state", KINDS)
def test_partial_states_update_the_rest_of_a_model_as_natively(state):
    """A state without RNG, as a checkpoint of flax.nnx.bridge without rngs has it."""
    kind, setting = KINDS[state], SETTINGS["in_a_parent"]
    model, other = setting.model(kind), setting.model(kind, seed=5)
    nnx.update(other, nnx.state(model, nnx.Not(nnx.RngState)))
    assert_identical(
        pure_state(other), {**pure_state(model), "streams": pure_state(other)["streams"]}
    )
