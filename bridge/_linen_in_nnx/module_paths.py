"""Finds the wrapped Linen modules in an NNX model."""

from __future__ import annotations

from typing import TypeVar

from flax import nnx

from bridge._conversion.linen_attributes import LinenHolder

M = TypeVar("M", bound=nnx.Module)


def set_module_paths(model: M) -> M:
    """Tells every `ToNNX` in a model its path, so that the Linen modules inside know theirs too.

    NNX modules do not know their paths. Without this call the path of a wrapped Linen module
    begins at its `ToNNX`, and so rules such as `encoder/.*` of a library that matches paths miss
    what is inside. The path is a static attribute: copies of the model keep it. After moving a
    module to another model, call this again.

    Args:
      model: the outermost NNX module; it is changed in place. A module that it holds twice has the
        first of its paths.

    Returns:
      The model.

    Example::

      >>> import jax.numpy as jnp
      >>> from flax import linen as nn, nnx
      >>> import bridge
      >>> class Path(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         return self.path
      >>> class Model(nnx.Module):
      ...     def __init__(self):
      ...         self.layers = nnx.List([bridge.ToNNX(Path())])
      ...     def __call__(self, x):
      ...         return self.layers[0](x)
      >>> model = Model()
      >>> model(1.0), bridge.set_module_paths(model)(1.0)
      ((), ('layers', '0'))
    """
    for path, module in nnx.iter_modules(model, graph=True):
        if isinstance(module, LinenHolder):
            module.to_nnx__path = tuple(map(str, path))
    return model
