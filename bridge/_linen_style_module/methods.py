"""Makes the methods of a `bridge.Module` enter the module, and declares some as compact."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from bridge._errors import InvalidModuleError

from .calling import run
from .submodules import is_lazy

F = TypeVar("F", bound=Callable[..., Any])

# Marks a function that enters the module by itself.
_ENTERS = "bridge__enters"


def compact(method: F) -> F:
    """Lets a method declare submodules and variables where it uses them, as `nn.compact` does.

    Args:
      method: a method of a `bridge.Module`; `nn.compact` on it has the same meaning.

    Returns:
      The method.

    Raises:
      InvalidModuleError: later, if the method is called on another kind of module.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> import bridge
      >>> class Scale(bridge.Module):
      ...     @bridge.compact
      ...     def __call__(self, x):
      ...         return x * self.param('scale', jax.nn.initializers.ones, x.shape[-1:])
      >>> Scale().init(0, jnp.ones((1, 2)))['params']['scale'].shape
      (2,)

    Source: flax/nnx/bridge/module.py:compact @ 0.12.8
    """
    return _entering(method, is_compact=True)


def with_entries(cls: type) -> None:
    """Makes the methods that a class defines enter the module, but for those with `nn.nowrap`."""
    for name, value in list(vars(cls).items()):
        is_special = name.startswith("__") and name != "__call__"
        # A function may be the default of a field.
        is_field = name in inspect.get_annotations(cls)
        if is_special or is_field or name == "setup" or not inspect.isfunction(value):
            continue
        if not is_entering(value) and not getattr(value, "nowrap", False):
            entering = _entering(value, is_compact=hasattr(value, "compact"))
            type.__setattr__(cls, name, entering)


def is_entering(value: object) -> bool:
    """Whether a member of a class is a method of the model."""
    return hasattr(value, _ENTERS)


def _entering(method: Callable[..., Any], *, is_compact: bool) -> Any:
    @functools.wraps(method)
    def enter(self: object, *args: object, **kwargs: object) -> Any:
        if not is_lazy(self):
            raise InvalidModuleError(
                f"the method {method.__name__}",
                self,
                "a bridge.Module",
                "use flax.linen.compact in a Linen class",
            )
        return run(self, method, args, kwargs, is_compact=is_compact)

    setattr(enter, _ENTERS, True)
    enter.compact = is_compact  # pyright: ignore[reportAttributeAccessIssue]
    return enter
