import jax
import pytest


# Of the module's scope, because hypothesis runs many examples under one fixture of a function's
# scope. Strict dtype promotion cannot be had likewise: optax.adam fails under it, because it mixes
# Python floats with an int32 count.
@pytest.fixture(autouse=True, scope="module")
def _no_silent_broadcasting():
    """Makes comparing arrays of different rank an error: a test must not pass by broadcasting."""
    with jax.numpy_rank_promotion("raise"):
        yield
