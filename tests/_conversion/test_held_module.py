"""bridge._conversion.linen_attributes: modules whose fields hold arrays, in one compiled step."""

import copy
import functools
import operator
import pickle
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import bridge
from bridge._conversion.linen_attributes import HeldModule
from tests.drawing import drawing
from tests.models import assert_identical

KEY = jax.random.key(0)
X = jnp.ones((2, 3))


@flax.struct.dataclass
class Config:
    table: Any
    name: str = "config"


class LinenField(nn.Module):
    """Adds up the arrays in its field."""

    field: Any

    @nn.compact
    def __call__(self, x):
        arrays = [a for a in jax.tree.leaves(self.field) if isinstance(a, jax.Array | np.ndarray)]
        return nn.Dense(3)(x) + sum(jnp.sum(a.astype(jnp.float32)) for a in arrays)


ARRAYS = st.builds(
    lambda kind, dtype, shape, value: kind(np.full(shape, value).astype(dtype)),
    st.sampled_from([np.asarray, jnp.asarray]),
    st.sampled_from(["float32", "int32", "bool", "bfloat16"]),
    st.sampled_from([(), (1,), (2,), (1, 2), (0,)]),
    st.sampled_from([0, 1, 2]),
)
FIELDS = st.recursive(
    st.one_of(ARRAYS, st.sampled_from([1, 1.0, True, None, "a", float("inf")])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
        st.builds(Config, inner),
        st.builds(lambda value: functools.partial(operator.add, value), inner),
        st.builds(LinenField, inner),
    ),
    max_leaves=4,
)


def described(value):
    """A value as plain text; two values of one text are the same to a program."""
    if isinstance(value, jax.Array | np.ndarray):
        bits = np.asarray(value)
        return f"{type(value).__name__}{bits.dtype}{bits.shape}{bits.tolist()}"
    if isinstance(value, dict | flax.core.FrozenDict):
        return f"dict{sorted((k, described(v)) for k, v in value.items())}"
    if isinstance(value, list | tuple):
        return f"sequence{[described(item) for item in value]}"
    if isinstance(value, functools.partial):
        return f"partial{[described(item) for item in value.args]}"
    if isinstance(value, Config | LinenField):
        own = value.table if isinstance(value, Config) else value.field
        return f"{type(value).__name__}{described(own)}"
    return f"{type(value).__name__}{value}"


@drawing(100)
@given(FIELDS, FIELDS)
def test_two_modules_are_the_same_where_their_fields_are(a, b):
    one, other = HeldModule(LinenField(a)), HeldModule(LinenField(b))
    assert (one == other) == (described(a) == described(b))
    again = HeldModule(LinenField(copy.deepcopy(a)))
    assert one == again
    assert hash(one) == hash(again)


@drawing(10)
@given(FIELDS, st.booleans())
def test_one_program_serves_all_copies_of_a_module(field, in_tree_mode):
    traces = []

    @nnx.jit
    def step(model, x):
        traces.append(None)
        return model(x)

    nnx.set_graph_mode(not in_tree_mode)
    try:
        model = bridge.ToNNX(LinenField(field), KEY).lazy_init(X)
        again = bridge.ToNNX(LinenField(copy.deepcopy(field)), KEY).lazy_init(X)
        expected = step(model, X)
        for other in (again, copy.deepcopy(model), nnx.clone(model)):
            assert_identical(step(other, X), expected)
    finally:
        nnx.set_graph_mode(True)
    assert len(traces) == 1


@pytest.mark.parametrize("other", [jnp.ones(1), jnp.ones((), jnp.int32), 1.0, np.float32(1)])
def test_values_that_are_equal_and_not_the_same_have_their_own_programs(other):
    step = nnx.jit(lambda model, x: (model(x), jnp.asarray(model.field) / 2))
    for field in (jnp.ones(()), other):
        module = LinenField(field)
        model = bridge.ToNNX(module, KEY).lazy_init(X)
        y, half = step(model, X)
        assert_identical(half, jnp.asarray(field) / 2)
        assert_identical(y, jax.jit(module.apply)(model.linen_variables(), X))


class Incomparable:
    def __eq__(self, other):
        raise RuntimeError("not now")

    __hash__ = object.__hash__


@pytest.mark.parametrize(
    "field",
    [Incomparable, lambda: {"a": [1, Incomparable()]}, lambda: LinenField(Config(Incomparable()))],
)
def test_fields_are_compared_by_what_they_hold(field):
    traces = []

    @nnx.jit
    def step(model, x):
        traces.append(None)
        return model(x)

    for _ in range(2):
        module = LinenField(field())
        model = bridge.ToNNX(module, KEY).lazy_init(X)
        assert_identical(step(model, X), jax.jit(module.apply)(model.linen_variables(), X))
    assert len(traces) == 1


def test_a_deleted_array_is_the_same_as_no_other():
    kept, deleted = jnp.ones(3), jnp.ones(3)
    deleted.delete()
    held = HeldModule(LinenField(deleted))
    assert held != HeldModule(LinenField(kept))
    assert held == HeldModule(LinenField(deleted))


def test_an_array_of_a_weak_type_has_a_program_of_its_own():
    step = nnx.jit(lambda model, x: x.astype(jnp.bfloat16) * model.field)
    for field in (jnp.asarray(2.0), jnp.float32(2)):
        model = bridge.ToNNX(LinenField(field), KEY).lazy_init(X)
        expected = X.astype(jnp.bfloat16) * field
        assert_identical(step(model, X), expected)


def test_a_wrapper_with_an_array_field_can_be_pickled():
    model = bridge.ToNNX(LinenField(jnp.arange(3)), KEY).lazy_init(X)
    copied = pickle.loads(pickle.dumps(nnx.split(model)))
    assert_identical(nnx.merge(*copied)(X), model(X))
    assert copied[0] == nnx.graphdef(model)


def test_keys_are_compared_by_their_bits():
    same = [HeldModule(LinenField(jax.random.key(seed))) for seed in (0, 0, 1)]
    assert same[0] == same[1]
    assert same[0] != same[2]
    other = HeldModule(LinenField(jax.random.key(0, impl="rbg")))
    assert same[0] != other
