"""What lets a subclass of `ToLinen` have a constructor and methods written for flax.nnx.bridge."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from flax import linen as nn
from flax.core import FrozenDict

from .arguments import thaw


class WithOptions(type(nn.Module)):
    """The type of Linen module classes some of whose fields their constructors need not take.

    Linen passes every field to the constructor when it clones a module or transforms its class. A
    constructor that forwards what it does not know, as that of a class in the wild does, would pass
    them on to the NNX module's. Fields in `_options` reach only a constructor that names them.
    """

    _options: frozenset[str] = frozenset()

    def __call__(cls, *args: Any, **given: Any) -> Any:
        kept = cls._options - _parameters(cls.__init__)
        options = {name: given.pop(name) for name in kept & given.keys()}
        made = super().__call__(*args, **given)
        for name, value in options.items():
            # Linen's modules are frozen by now.
            object.__setattr__(made, name, value)
        return made


@functools.lru_cache(maxsize=1024)
def _parameters(constructor: Any) -> frozenset[str]:
    parameters = inspect.signature(constructor).parameters.values()
    return frozenset(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))


class GivenArgs(tuple[Any, ...]):
    """Frozen positional arguments that read as they were given."""

    __slots__ = ()

    @property
    def frozen(self) -> tuple[Any, ...]:
        """The arguments as they are hashed and compared."""
        return tuple(super().__iter__())

    def __iter__(self) -> Iterator[Any]:
        return map(thaw, super().__iter__())

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return tuple(map(thaw, found)) if isinstance(index, slice) else thaw(found)


class GivenKwargs(FrozenDict[str, Any]):
    """Frozen keyword arguments that read as they were given."""

    @property
    def frozen(self) -> FrozenDict[str, Any]:
        """The arguments as they are hashed and compared."""
        return FrozenDict({name: super(GivenKwargs, self).__getitem__(name) for name in self})

    def __getitem__(self, key: str) -> Any:
        return thaw(super().__getitem__(key))

    def __hash__(self) -> int:
        return hash(self.frozen)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self.frozen == frozen(other)


def frozen(arguments: Any) -> Any:
    """Arguments as they are hashed and compared, of either form."""
    return arguments.frozen if isinstance(arguments, GivenArgs | GivenKwargs) else arguments
