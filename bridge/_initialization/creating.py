"""Calls of wrapped Linen modules that create variables beside those that exist."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

# Whether the calls of this thread are to create variables.
CREATING: ContextVar[bool] = ContextVar("creating", default=False)


@contextlib.contextmanager
def creating_variables() -> Iterator[None]:
    """Lets the calls of every `ToNNX` in this block create and replace variables, as `init` does.

    Use it for libraries that change a model by running it once, such as those that add LoRA
    adapters, statistics or quantized weights. In the Linen modules `is_initializing()` is true, and
    new variables stay beside those that exist. `lazy_init` is for a model that has no variables
    yet. It undoes the effects of the call on native NNX state; this block does not.

    A program that `nnx.jit` has compiled before does not notice the block, so make the call outside
    of `nnx.jit`.

    Example::

      >>> import jax.numpy as jnp
      >>> from flax import linen as nn, nnx
      >>> import bridge
      >>> def with_scale(next_function, args, kwargs, context):
      ...     y = next_function(*args, **kwargs)
      ...     return y * context.module.scope.param('scale', nn.initializers.ones, ())
      >>> x = jnp.ones((1, 3))
      >>> model = bridge.ToNNX(nn.Dense(2), rngs=nnx.Rngs(0)).lazy_init(x)
      >>> with nn.intercept_methods(with_scale), bridge.creating_variables():
      ...     y = model(x)
      >>> model.scale.shape, model.kernel.shape
      ((), (3, 2))
    """
    token = CREATING.set(True)
    try:
        yield
    finally:
        CREATING.reset(token)
