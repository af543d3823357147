"""Loops are one program in whatever order they have their values, and only if all turns agree."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from bridge.rewrite.prove._same_program import is_same_function

TURNS = 5
# Two values before the first turn, one that stays, and one value for each turn.
ARRAYS = [*map(jnp.float32, (3, 5, 7)), jnp.arange(11, 11 + TURNS, dtype="float32")]
COEFFICIENTS = st.sampled_from([0, 0, 1, 2])


class Loop(NamedTuple):
    """Sums that are carried, each of the sums of the turn before.

    Attributes:
        starts: for each sum, which array it starts from.
        rows: for each sum, the factors of all sums, of what stays, and of the value of the turn.
        returned: which sums are returned, at the end and by each turn as they are before it.
        reverse: whether the last value comes first.
    """

    starts: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    returned: tuple[int, ...]
    reverse: bool


def total(row, values):
    """A sum; each order of its terms would be another program."""
    found = None
    for factor, value in zip(row, values, strict=True):
        if factor:
            term = value if factor == 1 else value * factor
            found = term if found is None else found + term
    return values[-1] if found is None else found


def program(loop, order):
    """A loop that carries its sums in an order."""

    def run(arrays):
        *single, slices = arrays

        def turn(carried, value):
            sums = [carried[order.index(index)] for index in range(len(order))]
            after = [total(row, [*sums, single[2], value]) for row in loop.rows]
            return [after[index] for index in order], [sums[index] for index in loop.returned]

        starts = [single[loop.starts[index]] for index in order]
        last, stacked = jax.lax.scan(turn, starts, slices, reverse=loop.reverse)
        return [last[order.index(index)] for index in loop.returned], stacked

    return run


def computed(loop):
    """What a loop returns, in Python."""
    *single, slices = [np.asarray(each, int).tolist() for each in ARRAYS]
    sums, stacked = [single[start] for start in loop.starts], []
    for value in slices[::-1] if loop.reverse else slices:
        stacked.append([sums[index] for index in loop.returned])
        sums = [total(row, [*sums, single[2], value]) for row in loop.rows]
    stacked = stacked[::-1] if loop.reverse else stacked
    return [sums[index] for index in loop.returned], stacked


@st.composite
def loops(draw):
    count = draw(st.integers(1, 4))
    rows = [tuple(draw(COEFFICIENTS) for _ in range(count + 2)) for _ in range(count)]
    starts = tuple(draw(st.integers(0, 1)) for _ in range(count))
    returned = tuple(draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=2)))
    return Loop(starts, tuple(rows), returned, draw(st.booleans()))


@st.composite
def changed(draw, loop):
    """A loop with one thing changed."""
    match draw(st.sampled_from(["start", "factor", "reverse"])):
        case "start":
            at = draw(st.integers(0, len(loop.starts) - 1))
            starts = (*loop.starts[:at], 1 - loop.starts[at], *loop.starts[at + 1 :])
            return loop._replace(starts=starts)
        case "factor":
            at = draw(st.integers(0, len(loop.rows) - 1))
            row = [*loop.rows[at]]
            place = draw(st.integers(0, len(row) - 1))
            row[place] = draw(COEFFICIENTS.filter(lambda factor: factor != row[place]))
            return loop._replace(rows=(*loop.rows[:at], tuple(row), *loop.rows[at + 1 :]))
    return loop._replace(reverse=not loop.reverse)


@given(st.data())
def test_the_order_of_carried_values_makes_no_difference(data):
    loop = data.draw(loops())
    order = data.draw(st.permutations(range(len(loop.rows))))
    assert is_same_function(program(loop, sorted(order)), program(loop, order), ARRAYS)


@given(st.data())
def test_loops_that_are_taken_for_one_compute_the_same(data):
    loop = data.draw(loops())
    other = data.draw(changed(loop))
    order = data.draw(st.permutations(range(len(loop.rows))))
    is_same = is_same_function(program(loop, sorted(order)), program(other, order), ARRAYS)
    event(f"taken for one: {is_same}")
    assert not is_same or computed(loop) == computed(other)


def counted(step):
    """A loop in a loop, of which the inner one counts."""

    def run(arrays):
        def turn(x, y):
            return jax.lax.scan(lambda n, z: (n + step, n * z), x, jnp.stack([y, x]))

        return jax.lax.scan(turn, *arrays)

    return run


def swapped(arrays):
    """Both carried values start alike, and one of them is the other one of the turn before."""
    x, slices = arrays
    return jax.lax.scan(lambda c, y: ((c[1], c[1] * y), c[0]), (x, x), slices)


def unswapped(arrays):
    x, slices = arrays
    return jax.lax.scan(lambda c, y: ((c[0], c[1] * y), c[0]), (x, x), slices)


def outside(arrays):
    """The inner loop sets what it carries to a value of the outer one, that of the same place."""
    x, slices = arrays

    def turn(carried, y):
        a, b = carried
        b, _ = jax.lax.scan(lambda m, z: (a, z), b, slices)
        return (a * y, b), b

    return jax.lax.scan(turn, (x, x), slices)


def inside(arrays):
    x, slices = arrays

    def turn(carried, y):
        a, b = carried
        b, _ = jax.lax.scan(lambda m, z: (m, z), b, slices)
        return (a * y, b), b

    return jax.lax.scan(turn, (x, x), slices)


def late(step):
    """What a value is set to at the end reaches the one that is returned three turns later."""

    def run(arrays):
        x, slices = arrays

        def turn(carried, y):
            return (*carried[1:], carried[-1] + step), None

        return jax.lax.scan(turn, (x,) * 4, slices)[0][0]

    return run


@pytest.mark.parametrize(
    ("one", "other"),
    [(counted(1), counted(2)), (swapped, unswapped), (outside, inside), (late(1), late(2))],
    ids=["nested", "swapped", "outside", "late"],
)
def test_loops_that_differ_after_the_first_turn_are_two(one, other):
    arrays = [jnp.float32(3), jnp.arange(11, 16, dtype="float32")]
    results = [jax.tree.leaves(each(arrays)) for each in (one, other)]
    assert not all(bool((a == b).all()) for a, b in zip(*results, strict=True))
    assert is_same_function(one, one, arrays)
    assert not is_same_function(one, other, arrays)


def test_a_condition_has_its_operands_in_any_order():
    def one(arrays):
        x, y = arrays
        return jax.lax.cond(x > 0, lambda a, b: a - b, lambda a, b: a * b, x, y)

    def other(arrays):
        x, y = arrays
        return jax.lax.cond(x > 0, lambda b, a: a - b, lambda b, a: b * a, y, x)

    def opposite(arrays):
        x, y = arrays
        return jax.lax.cond(x > 0, lambda b, a: b - a, lambda b, a: b * a, y, x)

    arrays = [jnp.float32(3), jnp.float32(5)]
    assert is_same_function(one, other, arrays)
    assert not is_same_function(one, opposite, arrays)
