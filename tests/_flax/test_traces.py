"""The inputs that a program's result depends on are found."""

import jax
import jax.numpy as jnp
import pytest

from bridge._flax.traces import live_inputs

INPUTS = {"used": jnp.ones(3), "other": jnp.ones(3)}


def _scanned(a, b):
    return jax.lax.scan(lambda h, row: (h + row, None), jnp.zeros(()), a)[0]


PROGRAMS = {
    "plain": lambda a, b: a + 1,
    "dead": lambda a, b: (b * 2, a)[1],
    "jit": jax.jit(lambda a, b: a + 1),
    "jit in jit": jax.jit(lambda a, b: jax.jit(lambda c, d: d * 2)(b, a)),
    "remat": jax.checkpoint(lambda a, b: jnp.sin(a)),
    "remat in grad": jax.grad(lambda a, b: jax.checkpoint(jnp.sin)(a).sum()),
    "scan": _scanned,
    "custom rule": lambda a, b: jax.nn.relu(a),
    "vmap": jax.vmap(lambda a, b: a + 1),
    "cond": lambda a, b: jax.lax.cond(True, lambda c, d: c, lambda c, d: 2 * c, a, b),
    "branch": lambda a, b: jax.lax.cond(a[0] > 0, lambda d: 1.0, lambda d: 2.0, b),
    "tree": lambda a, b: {"x": [a], "y": "text", "z": None, "n": 3},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_input_that_nobody_uses_is_not_live(name):
    found = live_inputs(lambda given: PROGRAMS[name](given["used"], given["other"]), INPUTS)
    assert found == {"used"}


BOTH = {
    "one branch": lambda a, b: jax.lax.cond(a[0] > 0, lambda c: c, lambda c: 2 * c, b),
    "while": lambda a, b: jax.lax.while_loop(lambda c: c[0] < b[0], lambda c: c + 1, a),
    "opaque": lambda a, b: object(),
    "effect": lambda a, b: (jax.debug.print("{}", b, ordered=False), a)[1],
}


@pytest.mark.parametrize("name", BOTH)
def test_an_input_that_may_matter_is_live(name):
    found = live_inputs(lambda given: BOTH[name](given["used"], given["other"]), INPUTS)
    assert found == {"used", "other"}


def test_nothing_is_live_where_nothing_is_given():
    assert live_inputs(lambda given: jnp.ones(3), {}) == set()
