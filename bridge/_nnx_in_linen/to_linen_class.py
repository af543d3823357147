"""`to_linen_class`: an NNX module class as a Linen module class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from bridge._conversion import convert

from .arguments import check_arguments, check_class, hashable_arguments
from .nnx_attributes import linen_method
from .to_linen import ToLinen


def to_linen_class(
    base_nnx_class: Callable[..., Any],
    base_metadata_fn: Callable[[Any], Any] | None = convert.to_linen_var,
    base_skip_rng: bool = False,
    **partial_kwargs: object,
) -> type[ToLinen]:
    """A Linen module class that takes the arguments of an NNX module's constructor.

    Args:
      base_nnx_class: the NNX module's class.
      base_metadata_fn: as `ToLinen.metadata_fn`.
      base_skip_rng: as `ToLinen.skip_rng`.
      **partial_kwargs: default values for the constructor's arguments.

    Returns:
      A subclass of `ToLinen` called `<Class>ToLinen`. It takes the NNX constructor's keyword
      arguments and the fields of `ToLinen` (`args`, `kwargs`, `strict`, `name` …). A field wins
      over an argument of the same name; pass such an argument in `kwargs`.

    Raises:
      InvalidModuleError: `base_nnx_class` is an instance, a function or a Linen class.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> import bridge
      >>> Linear = bridge.to_linen_class(nnx.Linear, use_bias=False)
      >>> model = Linear(in_features=2, out_features=3)
      >>> list(model.init(jax.random.key(0), jnp.ones((1, 2)))['params'])
      ['kernel']

    Source: flax/nnx/bridge/wrappers.py:to_linen_class @ 0.12.8
    """
    check_class(base_nnx_class)
    name = getattr(base_nnx_class, "__name__", type(base_nnx_class).__name__)
    defaults: dict[str, Any] = {
        "nnx_class": base_nnx_class,
        "metadata_fn": base_metadata_fn,
        "skip_rng": base_skip_rng,
        "kwargs": hashable_arguments((), partial_kwargs)[1],
    }

    def install_constructor(cls: Any) -> None:
        # The dataclass machinery of Linen gives every subclass a constructor of its own.
        generated = cls.__init__

        def construct(
            self: Any,
            /,
            args: object = None,
            kwargs: Mapping[str, Any] | None = None,
            **given: object,
        ) -> None:
            check_arguments(base_nnx_class, args or (), kwargs or {})
            fields = {n: v for n, v in given.items() if n in cls.__dataclass_fields__}
            # None stands for the default in programs written for flax.nnx.bridge.
            fields = {n: v for n, v in fields.items() if v is not None or n not in defaults}
            constructor = {n: v for n, v in given.items() if n not in cls.__dataclass_fields__}
            merged = {**partial_kwargs, **(kwargs or {}), **constructor}
            generated(self, args=args or (), kwargs=merged, **fields)

        cls.__init__ = construct

    class Made(ToLinen):
        def __init_subclass__(cls, **options: Any) -> None:
            super().__init_subclass__(**options)
            install_constructor(cls)

    attributes: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": f"The NNX module {name} as a Linen module.",
        "__annotations__": {field: ToLinen.__annotations__[field] for field in defaults},
        # Lifted transforms look methods up on the class.
        **{n: linen_method(n) for n in _public_methods(base_nnx_class) if not hasattr(ToLinen, n)},
        **defaults,
    }
    return type(f"{name}ToLinen", (Made,), attributes)


def _public_methods(nnx_class: object) -> list[str]:
    own = set(dir(nnx_class)) - set(dir(nnx.Module))
    return [n for n in own if n[0] != "_" and inspect.isfunction(getattr(nnx_class, n))]
