"""Calls of a function compiled by `jit_partial` from several threads: at once, or in turns."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import bridge

X = jnp.ones((2, 3))
WAIT = 10


class Meeting:
    """An argument that a thread can pass on only if another one does at the same time."""

    def __init__(self):
        self.barrier = None
        self.met = set()


def flatten(meeting):
    thread = threading.get_ident()
    # A call that JAX traces flattens its arguments again.
    if meeting.barrier is not None and thread not in meeting.met:
        meeting.met.add(thread)
        meeting.barrier.wait()
    return (), meeting


jax.tree_util.register_pytree_node(Meeting, flatten, lambda meeting, _: meeting)


class Model(nnx.Module):
    def __init__(self, **options):
        self.count = nnx.Variable(jnp.zeros((), jnp.int32), **options)
        self.others = nnx.List([nnx.Variable(jnp.zeros((), jnp.int32)) for _ in range(20)])


def reads(model, meeting):
    return model.count[...] + 1


def writes(model, meeting):
    model.count[...] += 1
    return model.count[...]


def in_threads(call, count=2):
    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(call) for _ in range(count)]]


def test_calls_that_change_nothing_run_at_once():
    meeting = Meeting()
    compiled = bridge.jit_partial(reads, Model())
    for _ in range(2):
        compiled(meeting)
    meeting.barrier = threading.Barrier(2, timeout=WAIT)
    assert list(map(int, in_threads(lambda: compiled(meeting)))) == [1, 1]


# What a program writes into a reference or a hijax Variable is none of its results.
@pytest.mark.parametrize(
    ("function", "options", "donate"),
    [
        (writes, {}, False),
        (reads, {"ref": True}, False),
        (reads, {"hijax": True}, False),
        (reads, {}, True),
    ],
    ids=["changes", "reference", "hijax", "donated"],
)
def test_other_calls_wait_for_each_other(function, options, donate):
    meeting = Meeting()
    compiled = bridge.jit_partial(function, Model(**options), donate=donate)
    for _ in range(2):
        compiled(meeting)
    meeting.barrier = threading.Barrier(2, timeout=0.2)
    with pytest.raises(threading.BrokenBarrierError):
        in_threads(lambda: compiled(meeting))


def step(model, *, amount):
    """Adds to every Variable, unless the amount is 0."""
    if amount:
        for variable in (model.count, *model.others):
            variable[...] += amount
    return model.count[...], [variable[...] for variable in model.others]


def test_a_call_that_changes_something_after_others_did_not_loses_nothing():
    model = Model()
    compiled = bridge.jit_partial(step, model, static_argnames="amount")
    for amount in (0, 0, 1, 0, 2, 1, 0):
        compiled(amount=amount)
    assert int(model.count[...]) == 4


def test_no_update_is_lost_or_half_seen_beside_calls_that_change_nothing():
    model = Model()
    compiled = bridge.jit_partial(step, model, static_argnames="amount")
    compiled(amount=0), compiled(amount=1)
    barrier = threading.Barrier(4)

    def run(amount):
        barrier.wait(WAIT)
        return [compiled(amount=amount) for _ in range(40)]

    with ThreadPoolExecutor(4) as pool:
        seen = [out for outs in pool.map(run, (0, 1, 1, 0)) for out in outs]
    assert int(model.count[...]) == 81
    for first, others in seen:
        np.testing.assert_array_equal(np.stack(others), first)


def test_a_call_that_adds_an_attribute_takes_its_turn_beside_others():
    model = Model()

    def noting(model, x, *, is_noted):
        if is_noted:
            model.seen = getattr(model, "seen", 0) + 1
        return x * model.count[...]

    compiled = bridge.jit_partial(noting, model, static_argnames="is_noted")
    compiled(X, is_noted=False)

    def run(is_noted):
        return [compiled(X, is_noted=is_noted) for _ in range(4)]

    with ThreadPoolExecutor(2) as pool:
        for outs in pool.map(run, (True, False)):
            for out in outs:
                np.testing.assert_array_equal(out, 0 * X)
    assert model.seen == 4
