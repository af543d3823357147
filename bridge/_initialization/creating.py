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

    The Linen modules see `is_initializing()`, and what they put into their variables stays, beside
    the variables that exist: adapters of LoRA, statistics and quantized weights of a library that
    changes a model while it runs it once. `lazy_init` is for a model that has no variables yet; it
    undoes what the call does to native NNX state, and this does not.

    A program that `nnx.jit` has compiled before is run as it is: make this call outside of one.

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
