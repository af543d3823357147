"""A call of a submodule of a ToNNX, as a method of the whole Linen module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import linen as nn

from bridge._errors import InvalidMethodError
from bridge._flax.linen_modules import call_method, children

from .parts import below, bound_at


def run_at(path: tuple[Any, ...], method: str, owner: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of a submodule through its ToNNX, so that updates are kept."""
    target = None
    if owner.to_nnx__modes:
        target = bound_at(owner, path) if path else owner.to_nnx__module
    # A call of the wrapper has a `method` itself.
    own = {"method": kwargs.pop("method")} if "method" in kwargs else {}
    return owner(*args, method=At(path, method, target, own), **kwargs)


class At:
    """A method of a submodule, as a function of the whole Linen module.

    Args:
      path: the names of the submodule and those above it.
      name: the method.
      target: the submodule as it was found before the call, None if that is not known.
      kwargs: keyword arguments of the method that its call through the wrapper cannot have.

    Attributes:
      target: the same.
      kwargs: the same.
    """

    def __init__(
        self, path: tuple[Any, ...], name: str, target: nn.Module | None, kwargs: Mapping[str, Any]
    ):
        self.target = target
        self.kwargs = kwargs
        self._path = path
        self._name = name
        if target is not None:
            # `inspect.signature` reads this.
            self.__wrapped__ = getattr(type(target), name)

    def __call__(self, module: Any, /, *args: Any, **kwargs: Any) -> Any:
        found = below(module, self._path)
        if found is None:
            known = [n for n, child in children(module).items() if isinstance(child, nn.Module)]
            raise InvalidMethodError.of_part(type(module), ".".join(self._path), known)
        return call_method(getattr(type(found), self._name), found, args, kwargs)
