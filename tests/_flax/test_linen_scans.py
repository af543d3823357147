"""The trace in which `nn.scan` looks for what is constant is told from the scan itself."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from bridge._flax.linen_scans import is_looking_for_constants

X = jnp.ones((2, 3))


# Linen keeps a list in a field as a tuple.
NOTES = []


class Noting(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        is_looking = is_looking_for_constants()
        if not is_looking:
            jax.debug.callback(lambda value: None, x)
        NOTES.append(is_looking)
        return nn.Dense(3)(x), None


@pytest.mark.parametrize("disabled", [False, True])
def test_a_scanned_body_is_traced_once_for_its_constants_and_then_run(disabled):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return nn.scan(Noting, length=2, **options)()(x, None)

    variables = Model().init(jax.random.key(0), X)
    NOTES.clear()
    with jax.disable_jit(disabled):
        Model().apply(variables, X)
    jax.effects_barrier()
    assert NOTES[0]
    assert NOTES[1:]
    assert not any(NOTES[1:])


def test_outside_of_a_scan_nobody_looks():
    assert not is_looking_for_constants()
