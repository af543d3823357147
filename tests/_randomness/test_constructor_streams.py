"""Constructors draw the keys of native streams, in a time that is linear in a trace too."""

import jax
import jax.numpy as jnp
import pytest
from flax import errors, nnx
from hypothesis import given
from hypothesis import strategies as st

import bridge
from benchmarks import first_calls, programs
from benchmarks.models import stack
from bridge._randomness.constructor_streams import ConstructorStream, for_constructor
from tests.drawing import drawing

KEYS = {"params": 1, "default": 2}
# What a constructor may do with the streams that it is given; each yields keys.
DRAWS = {
    "named": lambda rngs: rngs.params(),
    "default": lambda rngs: rngs(),
    "served by default": lambda rngs: rngs.noise(),
    "fork of a stream": lambda rngs: rngs.params.fork()(),
    "fork of all": lambda rngs: rngs.fork().params(),
    "split": lambda rngs: rngs.params.split(3).key[...],
    "split of all": lambda rngs: rngs.split(2).default.key[...],
    "broadcast": lambda rngs: rngs.params.broadcast(2).key[...],
    "method": lambda rngs: rngs.normal((2,)),
    "initializer": lambda rngs: rngs.lecun_normal()((2, 3)),
    "vmap": lambda rngs: nnx.vmap(lambda rngs: rngs.params(), in_axes=0)(rngs.split(2)),
    "fold": lambda rngs: nnx.Rngs(params=rngs.params).params(),
}


def raw(value):
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else value


def drawn(names, make):
    rngs = make()
    found = [raw(DRAWS[name](rngs)) for name in names]
    return [*found, *(raw(leaf) for leaf in jax.tree.leaves(nnx.state(rngs)))]


def native():
    return nnx.Rngs(**KEYS)


def ours():
    return for_constructor(native())


@given(names=st.lists(st.sampled_from(sorted(DRAWS)), max_size=5))
@drawing(20)
def test_any_draws_give_the_keys_and_counts_of_native_streams_by_the_same_program(names):
    expected, found = drawn(names, native), drawn(names, ours)
    assert jax.tree.map(lambda a, b: bool((a == b).all()), expected, found) == [True] * len(found)
    programs_of = [str(jax.make_jaxpr(lambda m=m: drawn(names, m))()) for m in (native, ours)]
    assert programs_of[0] == programs_of[1]


def test_a_stream_of_another_trace_raises_as_a_native_one_does():
    for make in (native, ours):
        rngs = make()
        with pytest.raises(errors.TraceContextError):
            jax.eval_shape(lambda rngs=rngs: rngs.params())
        assert rngs.params.count[...] == 0


class Keeps(nnx.Module):
    """Keeps what it is given, forks of it, and layers that were made in parallel."""

    def __init__(self, *, rngs):
        self.rngs = rngs
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.streams = nnx.List([rngs.params.fork(), rngs.params])
        make = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs), in_axes=0, out_axes=0)
        self.layers = make(rngs.split(2))

    def __call__(self, x):
        return self.dropout(x)


def test_a_module_that_keeps_its_streams_has_native_ones():
    model = bridge.ToLinen(Keeps)
    variables = model.init({"default": jax.random.key(0)}, jnp.ones(2))
    reference = Keeps(rngs=nnx.Rngs(default=0))
    graphdef = variables["nnx"]["graphdef"]
    kinds = {getattr(node, "type", None) for node in graphdef.nodes}
    assert nnx.RngStream in kinds
    assert ConstructorStream not in kinds
    assert graphdef == nnx.graphdef(reference)
    mesh = jax.make_mesh((1,), ("data",))
    made = bridge.init_sharded(Keeps, mesh, rngs={"default": jax.random.key(0)})
    assert nnx.graphdef(made) == nnx.graphdef(reference)
    pairs = zip(jax.tree.leaves(made), jax.tree.leaves(reference), strict=True)
    assert all(bool((raw(a) == raw(b)).all()) for a, b in pairs)


def growth(make):
    """By how much more the second four blocks add than the first four."""
    calls = []
    for blocks in (2, 6, 10):
        case = stack(blocks)
        make(case)
        calls.append(programs.python_calls(lambda case=case: make(case)))
    return (calls[2] - calls[1]) / (calls[1] - calls[0])


def test_the_time_of_a_constructor_in_a_trace_is_linear_with_keys_that_the_bridge_is_given():
    assert growth(first_calls.init_abstractly) <= 1.02
    assert growth(first_calls.abstract_with_key) <= 1.02
    # What it would be otherwise; on a JAX that does not look through the trace, this may go.
    assert growth(first_calls.construct_abstractly) > 1.1
