"""A JAX tracer knows where it comes from."""

import jax
import numpy as np

from bridge._flax import tracers


def test_a_tracer_knows_its_trace():
    found = []

    def outer(x):
        jax.make_jaxpr(lambda y, z: found.extend(map(tracers.trace_of, (y, z, x))))(1, 2)

    jax.make_jaxpr(outer)(1)
    inner, same, other = found
    assert inner is same
    assert inner is not other
    assert tracers.trace_of(np.ones(1)) is None


def test_a_tracer_knows_the_equation_that_it_comes_from():
    found = []

    def program(x):
        made = jax.lax.neg(x)
        equation, place = tracers.made_by(made)
        found.append((equation.primitive.name, place, tracers.are_one(equation.invars[0], x)))
        found.append(tracers.made_by(x))
        return made

    jax.make_jaxpr(program)(1.0)
    assert found == [("neg", 0, True), None]


def test_a_tracer_knows_what_is_differentiated_and_what_is_mapped_over():
    found = []

    def note(x):
        found.append((tracers.primal_of(x), tracers.batch_of(x)))
        return x

    x = np.float32(3)
    jax.jvp(note, (x,), (x,))
    batch = np.arange(2.0)
    jax.vmap(note)(batch)
    (primal, no_batch), (no_primal, (whole, axis)) = found
    assert primal == x
    assert no_batch is no_primal is None
    np.testing.assert_array_equal(whole, batch)
    assert axis == 0
