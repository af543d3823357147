"""Programs that share an MLIR context are those that JAX lowers in a context for each."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from jax._src.interpreters import mlir

SHARED = getattr(mlir, "make_ir_context", None)


def lowered(scale):
    return jax.jit(lambda x: jnp.tanh(scale * x) @ x.T).lower(jnp.ones((2, 3)))


@pytest.mark.skipif(not hasattr(SHARED, "__wrapped__"), reason="this JAX was not tried")
def test_a_program_is_the_same_in_a_context_of_its_own(monkeypatch):
    assert lowered(1.0).compiler_ir().context is lowered(2.0).compiler_ir().context
    text = lowered(3.0).as_text()
    monkeypatch.setattr(mlir, "make_ir_context", inspect.unwrap(SHARED))
    own = lowered(3.0)
    assert own.compiler_ir().context is not lowered(2.0).compiler_ir().context
    assert own.as_text() == text
