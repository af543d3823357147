"""The counters count."""

import gc
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import programs

X = jnp.ones((4, 8))


def test_equations_inside_of_other_equations_count():
    assert programs.equations(lambda x: x + 1, X) == 1
    # The call of the inner function is an equation too.
    assert programs.equations(jax.jit(lambda x: x * 2 + 1), X) == 3
    assert programs.primitives(jax.jit(jnp.sin), X) == {"jit": 1, "sin": 1}


def test_a_branch_counts_as_every_branch_in_it():
    found = programs.primitives(lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), X)
    assert found["sin"] == found["cos"] == found["cond"] == 1


def test_instructions_are_those_of_the_compiled_program():
    found = programs.instructions(lambda x: x @ x.T, X)
    assert sum(n for instruction, n in found.items() if instruction.startswith("dot f32[4,4]")) == 1
    assert found == programs.instructions(jax.jit(lambda x: x @ x.T), X)
    assert found != programs.instructions(lambda x: x @ x.T + 1, X)


def test_calls_of_python_are_those_of_the_function_and_all_below_it():
    def one():
        return len("no function of Python")

    def three():
        return one() + one()

    assert [programs.python_calls(f) for f in (one, three)] == [1, 3]


def test_counting_leaves_the_profiler_and_the_collector_as_they_were():
    def fails():
        raise ZeroDivisionError

    before = sys.getprofile()
    for count in (programs.python_calls, programs.peak_live_bytes):
        with pytest.raises(ZeroDivisionError):
            count(fails)
        assert sys.getprofile() is before
        assert gc.isenabled()


def test_bytes_that_are_freed_again_count_while_they_are_there():
    ones = jnp.ones((1000,), jnp.float32)

    def make():
        return ones + ones

    def both():
        first = make()
        kept = first + make()
        del first
        return kept

    # A first call goes through thousands of JAX's functions, and every return is looked at.
    both()
    assert programs.peak_live_bytes(make) == 4000
    assert programs.peak_live_bytes(both) == 12000


def test_a_compiled_program_holds_its_inputs_and_outputs():
    assert programs.compiled_bytes(lambda x: x + 1, X) >= 2 * X.nbytes
