"""Filters and pure dicts select the same leaves of a wrapped model as with flax.nnx.bridge."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, traverse_util

import bridge
from tests.bridge.peer import described, on_both
from tests.models import assert_identical

X = jnp.arange(12.0).reshape(4, 3)


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True)(nn.Dense(4)(x))
        return nn.Dense(3, name="projection")(x)


class Model(nnx.Module):
    def __init__(self, bridge, rngs):
        self.encoder = bridge.ToNNX(Encoder(), rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        x = self.encoder(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made(bridge):
    return bridge.lazy_init(Model(bridge, nnx.Rngs(0)), X)


def matches(pattern):
    """A filter by a regular expression over the joined path, as openpi writes it."""
    return lambda path, _: re.fullmatch(pattern, "/".join(map(str, path))) is not None


FILTERS = {
    "a type": nnx.Param,
    "a path": nnx.PathContains("encoder"),
    "a name in the wrapped module": nnx.PathContains("Dense_0"),
    "an integer in a path": nnx.PathContains(1),
    "a regular expression": matches(r"encoder/.*/(kernel|scale)"),
    "all of": nnx.All(nnx.Param, nnx.PathContains("encoder")),
    "none of": nnx.All(nnx.Param, nnx.Not(matches(".*(encoder|head).*"))),
    "any of": nnx.Any(nnx.BatchStat, matches(".*bias")),
}


@pytest.mark.parametrize("selection", FILTERS.values(), ids=FILTERS)
def test_a_filter_selects_the_same_leaves(selection):
    theirs, ours = on_both(lambda bridge: described(nnx.state(made(bridge), selection)))
    assert theirs
    assert_identical(ours, theirs)


def flat_paths(bridge):
    return ["/".join(map(str, path)) for path in nnx.to_pure_dict(nnx.state(made(bridge)))]


def joined_pure_dict(bridge):
    pure = nnx.to_pure_dict(nnx.state(made(bridge), nnx.Param))
    return traverse_util.flatten_dict(jax.tree.map(np.asarray, pure))


def restored_from_a_pure_dict(bridge):
    model = made(bridge)
    graphdef, state = nnx.split(model)
    pure = nnx.to_pure_dict(nnx.filter_state(state, nnx.Param))
    nnx.replace_by_pure_dict(state, jax.tree.map(lambda leaf: leaf + 1, pure))
    return nnx.merge(graphdef, state)(X)


def replaced_in_an_abstract_model(bridge):
    pure = nnx.to_pure_dict(nnx.state(made(bridge)))
    graphdef, state = nnx.split(nnx.eval_shape(lambda: made(bridge)))
    nnx.replace_by_pure_dict(state, pure)
    return nnx.merge(graphdef, state)(X)


def frozen_by_multi_transform(bridge):
    model = made(bridge)
    params = nnx.state(model, nnx.Param)
    labels = nnx.map_state(lambda path, _: "frozen" if "encoder" in path else "trained", params)
    optimizer = nnx.Optimizer(
        model,
        optax.multi_transform({"frozen": optax.set_to_zero(), "trained": optax.sgd(0.1)}, labels),
        wrt=nnx.Param,
    )
    grads = nnx.grad(lambda model: (model(X) ** 2).mean())(model)
    optimizer.update(model, grads)
    return described(model)


def frozen_by_a_filter(bridge):
    model = made(bridge)
    trainable = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("encoder")))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=trainable)
    loss = functools.partial(nnx.grad, argnums=nnx.DiffState(0, trainable))
    optimizer.update(model, loss(lambda model: (model(X) ** 2).mean())(model))
    return described(model), described(nnx.state(optimizer, nnx.OptState))


PROGRAMS = {
    "paths of the pure dict": flat_paths,
    "a pure dict": joined_pure_dict,
    "a pure dict put back": restored_from_a_pure_dict,
    "a pure dict put into an abstract model": replaced_in_an_abstract_model,
    "frozen by optax.multi_transform": frozen_by_multi_transform,
    "frozen by a filter": frozen_by_a_filter,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_the_program_does_what_it_does_with_flax_nnx_bridge(program):
    theirs, ours = on_both(program)
    assert_identical(ours, theirs)


def test_a_frozen_part_stays_as_it_is():
    before = joined_pure_dict(bridge)
    after = {path: value for path, _, _, value in frozen_by_multi_transform(bridge)}
    for path, value in before.items():
        assert np.array_equal(after[path], value) == ("encoder" in path)
