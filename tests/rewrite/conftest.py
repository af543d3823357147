import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _models_may_broadcast():
    """The models are programs as users write them, which add `(4,)` to `(2, 4)`."""
    with jax.numpy_rank_promotion("allow"):
        yield
