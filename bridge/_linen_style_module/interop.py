"""Makes modules of the other kinds submodules of a `bridge.Module` that is being called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from flax import linen as nn
from flax import nnx

from bridge._errors import DeclarationError
from bridge._flax.objects import is_initializing
from bridge._linen_in_nnx.to_nnx import ToNNX
from bridge._module_calls import ModuleInCall, innermost, joined

from .submodules import auto_name, place_submodule

M = TypeVar("M", bound=nnx.Module)


def nnx_in_bridge_mdl(factory: Callable[[nnx.Rngs], M], name: str | None = None) -> M:
    """Makes an NNX module a submodule of the `bridge.Module` that is being called.

    When variables are created, the module is constructed. When they are given, only its shapes and
    keys are made. A module that already holds its variables is returned as it is.

    Args:
      factory: a function that makes the module from the streams of the call.
      name: the submodule's name in a compact method, by default its class and a number. In `setup`
        the attribute is its name.

    Returns:
      The submodule.

    Raises:
      DeclarationError: no `bridge.Module` is being called.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> import bridge
      >>> class Model(bridge.Module):
      ...     @bridge.compact
      ...     def __call__(self, x):
      ...         return bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Linear(2, 3, rngs=rngs))(x)
      >>> jax.tree.map(jnp.shape, Model().init(0, jnp.ones((1, 2))))
      {'params': {'Linear_0': {'bias': (3,), 'kernel': (2, 3)}}}

    Source: flax/nnx/bridge/interop.py:nnx_in_bridge_mdl @ 0.12.8
    """
    record = _calling("nnx_in_bridge_mdl")
    if not record.in_compact:
        return _made(factory, record)
    if name is None:
        # Only the constructor tells the class.
        with innermost(None):
            kind = type(nnx.eval_shape(factory, nnx.Rngs(0), graph=True))
        name = auto_name(record, kind)
    before = vars(record.module).get(name)
    module = before if isinstance(before, nnx.Module) else _made(factory, record)
    return place_submodule(record, name, module)


def linen_in_bridge_mdl(linen_module: nn.Module, name: str | None = None) -> Any:
    """Makes a Linen module a submodule of the `bridge.Module` that is being called, as a `ToNNX`.

    Args:
      linen_module: a Linen module.
      name: as for `nnx_in_bridge_mdl`.

    Returns:
      The submodule.

    Raises:
      DeclarationError: no `bridge.Module` is being called.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> import bridge
      >>> class Model(bridge.Module):
      ...     @bridge.compact
      ...     def __call__(self, x):
      ...         return bridge.linen_in_bridge_mdl(nn.Dense(3))(x)
      >>> jax.tree.map(jnp.shape, Model().init(0, jnp.ones((1, 2))))
      {'params': {'Dense_0': {'bias': (3,), 'kernel': (2, 3)}}}

    Source: flax/nnx/bridge/interop.py:linen_in_bridge_mdl @ 0.12.8
    """
    record = _calling("linen_in_bridge_mdl")
    name = linen_module.name if name is None else name
    if name is None and record.in_compact:
        name = auto_name(record, type(linen_module))
    module = ToNNX(linen_module)
    return place_submodule(record, name, module) if record.in_compact and name else module


def _calling(who: str) -> ModuleInCall:
    record = joined()
    if record is None:
        raise DeclarationError.of_use(f"{who} makes a submodule", "a bridge.Module")
    return record


def _made(factory: Callable[[nnx.Rngs], M], record: ModuleInCall) -> M:
    """The module, abstract but for its keys if it is to get its variables."""
    rngs = record.rngs
    with innermost(None):
        if is_initializing(record.module) and not record.is_repeating:
            return factory(rngs)
        has_keys = bool(len(rngs)) and not record.is_repeating
        module = nnx.eval_shape(factory, rngs if has_keys else nnx.Rngs(0), graph=True)
        if has_keys:
            keys = nnx.jit(lambda rngs: nnx.state(factory(rngs), nnx.RngState, graph=True))
            nnx.update(module, keys(rngs))
        return module
