"""Values that programs hand on, told from those that they change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bridge._flax import tracers
from bridge._flax.passed_values import PassedValues
from tests.drawing import drawing

# With an axis for every program around a program.
PAIR = (jnp.arange(32.0) - 3).reshape((2,) * 5), (jnp.arange(32.0) * -2).reshape((2,) * 5)
MESH = jax.make_mesh((1,), ("a",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
SPEC = jax.sharding.PartitionSpec("a")


def are_same(after, before):
    return PassedValues().are_same(after, before)


# Functions of a pair of arrays.
def kept(a, b):
    return a, b


def swapped(a, b):
    return b, a


def first_changed(a, b):
    return a + 1, b


def second_from_first(a, b):
    return a, a


def shuffled(a, b):
    return a[::-1], b


def transposed(a, b):
    return a.mT, b.mT


BODIES = [kept, swapped, first_changed, second_from_first, shuffled, transposed]


def jitted(f):
    return jax.jit(f)


def rematerialised(f):
    return jax.checkpoint(f)


def with_jvp(f):
    run = jax.custom_jvp(f)
    run.defjvp(lambda primals, tangents: (f(*primals), tangents))
    return run


def with_vjp(f):
    run = jax.custom_vjp(f)
    run.defvjp(lambda a, b: (f(a, b), None), lambda _, g: g)
    return run


def carried(f):
    return lambda a, b: jax.lax.scan(lambda c, _: (f(*c), None), (a, b), length=3)[0]


def scanned(f):
    return lambda a, b: jax.lax.scan(lambda _, x: (None, f(*x)), None, (a, b))[1]


def half_scanned(f):
    def run(a, b):
        c, d = jax.lax.scan(f, a[0], b)
        return jnp.stack([c, c]), d

    return run


def scanned_backwards(f):
    return lambda a, b: jax.lax.scan(lambda _, x: (None, f(*x)), None, (a, b), reverse=True)[1]


def looped(f):
    def run(a, b):
        step = lambda c: (c[0] + 1, *f(*c[1:]))  # noqa: E731 - an expression is all that it is
        return jax.lax.while_loop(lambda c: c[0] < 3, step, (0, a, b))[1:]

    return run


def branched(f):
    return lambda a, b: jax.lax.cond(a.sum() > -100, f, kept, a, b)


def mapped(f):
    return jax.vmap(f)


def mapped_over_columns(f):
    return jax.vmap(f, in_axes=1, out_axes=1)


def sharded(f):
    return jax.shard_map(f, mesh=MESH, in_specs=SPEC, out_specs=SPEC)


def constrained(f):
    def run(a, b):
        constrain = functools.partial(
            jax.lax.with_sharding_constraint, shardings=jax.sharding.NamedSharding(MESH, SPEC)
        )
        return tuple(map(constrain, f(jax.lax.optimization_barrier(a), jnp.copy(b))))

    return run


WRAPPERS = [jitted, rematerialised, with_jvp, with_vjp, carried, scanned, scanned_backwards]
WRAPPERS += [looped, branched, mapped, mapped_over_columns, constrained]

# In what a call may run.
SURROUNDINGS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: lambda a, b: jax.grad(lambda a: sum(x.sum() for x in f(a, b)))(a),
    "jit of grad": lambda f: jax.jit(SURROUNDINGS["grad"](f)),
    "vmap": lambda f: lambda a, b: jax.vmap(f)(jnp.stack([a, a]), jnp.stack([b, b])),
    "remat": jax.checkpoint,
    "scan": lambda f: lambda a, b: jax.lax.scan(lambda c, _: (f(*c), None), (a, b), length=1),
    "jit of vmap of grad": lambda f: (
        lambda a, b: jax.jit(jax.vmap(SURROUNDINGS["grad"](f)))(
            jnp.stack([a, a]), jnp.stack([b, b])
        )
    ),
}


def verdicts(surroundings, wrappers, body):
    """For both arrays whether the program has handed them on, as it was told there."""
    program = functools.reduce(lambda f, wrap: wrap(f), wrappers, body)
    found = []

    def run(a, b):
        after = program(a, b)
        found[:] = map(are_same, after, (a, b))
        return after

    SURROUNDINGS[surroundings](run)(*PAIR)
    return found, program


wrappers_of = st.lists(st.sampled_from(WRAPPERS), min_size=1, max_size=3)


@drawing(80, deadline=None)
@given(st.sampled_from(list(SURROUNDINGS)), wrappers_of)
def test_what_is_handed_on_is_told_through_every_program(surroundings, wrappers):
    assume(not ("grad" in surroundings and looped in wrappers))
    assert verdicts(surroundings, wrappers, kept)[0] == [True, True]


@drawing(100, deadline=None)
@given(
    st.sampled_from(list(SURROUNDINGS)),
    st.lists(
        st.sampled_from([*WRAPPERS, half_scanned, sharded]),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(BODIES),
)
def test_a_value_that_a_program_has_changed_is_never_taken_for_kept(surroundings, wrappers, body):
    # A loop of unknown length has no gradient.
    assume(not ("grad" in surroundings and looped in wrappers))
    if half_scanned in wrappers and (wrappers[0] is not half_scanned or len(wrappers) > 1):
        wrappers = [half_scanned]
    if sharded in wrappers:
        wrappers = [sharded]
    found, program = verdicts(surroundings, wrappers, body)
    really = [np.array_equal(x, y) for x, y in zip(program(*PAIR), PAIR, strict=True)]
    assert all(is_kept or not told for is_kept, told in zip(really, found, strict=True))


@pytest.mark.parametrize("run", [lambda f: f, jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f))])
@pytest.mark.parametrize("nested", [False, True])
def test_what_a_batch_of_conditions_hands_on_is_the_same_for_the_batch(run, nested):
    """Regression: each branch hands it on, and JAX repeats it for the batch and selects from it."""
    found = []

    def step(a, flag):
        after = jax.lax.cond(flag, jitted(lambda a: (a, a + 1, a.mT)), lambda a: (a, a, a.mT), a)
        found[:] = [are_same(x, a) for x in after]
        return after[0].sum()

    def program(a):
        flags = jnp.arange(3)[:, None] > jnp.arange(2)[None]
        mapped = jax.vmap(lambda f: step(a, f))
        return (jax.vmap(mapped)(flags) if nested else mapped(flags[1])).sum()

    run(program)(PAIR[0])
    assert found == [True, False, False]


@pytest.mark.parametrize("program", [jitted, rematerialised, constrained, sharded])
def test_arrays_that_a_traced_program_closes_over_are_known_again(program):
    constant = PAIR[0]
    found = []
    jax.jit(lambda b: found.append(are_same(program(kept)(constant, b)[0], constant)))(PAIR[1])
    assert found == [True]


@pytest.mark.parametrize(
    ("one", "other"),
    [(0.0, -0.0), (1.0, 2.0), (jnp.float32(1), jnp.float16(1)), (jnp.ones(2), jnp.ones(3))],
)
@pytest.mark.parametrize("size", [1, 10_000])
def test_numbers_that_differ_are_not_the_same(one, other, size):
    one, other = (jnp.broadcast_to(jnp.asarray(x), (size, *jnp.shape(x))) for x in (one, other))
    assert not are_same(one, other)
    assert are_same(one, one + 0 if one[0].sum() else jnp.array(one))


@pytest.mark.parametrize("size", [2, 10_000])
def test_equal_bits_are_the_same_whatever_they_are(size):
    for value in (jnp.full(size, jnp.nan), jnp.zeros(size, bool), jnp.ones(size, jnp.complex64)):
        assert are_same(jnp.array(value), value)
    keys = jax.random.split(jax.random.key(0), size)
    assert are_same(jax.jit(lambda k: k)(keys), keys)
    assert not are_same(keys[::-1], keys)


def test_a_pytree_is_the_same_if_its_leaves_are():
    before = {"a": PAIR[0], "b": (PAIR[1],)}
    after = jax.jit(lambda tree: tree)(before)
    assert are_same(after, before)
    assert not are_same({**after, "c": PAIR[0]}, before)
    assert not are_same({**after, "a": PAIR[1]}, before)


def test_arrays_that_are_gone_and_references_are_not_the_same():
    gone = jnp.array(PAIR[0])
    gone.delete()
    assert not are_same(PAIR[0], gone)
    assert not are_same(jax.new_ref(PAIR[0]), jax.new_ref(PAIR[0]))


def test_arrays_of_different_shardings_are_compared():
    one = jax.device_put(jnp.arange(8.0), jax.devices()[0])
    mesh = jax.make_mesh((8,), ("a",), (jax.sharding.AxisType.Auto,))
    other = jax.device_put(one, jax.sharding.NamedSharding(mesh, SPEC))
    assert are_same(one, other)
    assert not are_same(one + 1, other)
    large = jnp.arange(80_000.0)
    assert are_same(large, jax.device_put(large, jax.sharding.NamedSharding(mesh, SPEC)))


def test_without_equations_tracers_are_compared_by_identity(monkeypatch):
    monkeypatch.setattr(tracers, "_TELL_ORIGINS", False)
    assert verdicts("jit", [jitted], kept)[0] == [False, False]
    assert verdicts("jit", [], kept)[0] == [True, True]
