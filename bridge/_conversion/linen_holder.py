"""The base of `ToNNX`, by which the rooms below know a module that holds Linen variables."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import linen as nn
from flax import nnx

from .neutral import Path

# No Linen variable can have a name that starts with it.
OWN_PREFIX = "to_nnx__"


class LinenHolder(nnx.Module):
    """An NNX module whose attributes are the variables of a Linen module.

    What stays as it is by default is on the class: NNX walks through every attribute of an
    instance, at each `nnx.jit` for instance.

    Attributes:
      to_nnx__module: the Linen module. The instance keeps it in a `HeldModule`.
      to_nnx__rngs: the streams that its keys are drawn from.
      to_nnx__plain_keys: the names of streams that were given as plain keys.
      to_nnx__mutable: the collections that every call may update.
      to_nnx__modes: what `train()` and `eval()` have set, by name.
      to_nnx__eager_sharding: whether annotated variables are sharded at once.
      to_nnx__graphdefs: collection `nnx` of the modules inside. It is static, so it is in no
        Variable, but an initialisation that creates it must keep it.
      to_nnx__collections: the state collections that an initialisation has made or sown into. They
        may be empty now: `nnx.pop` takes out what a call has sown.
      to_nnx__path: where it is in the outermost module, if it was told.
      to_nnx__setattr: the `__setattr__` of `ToNNX`; a subclass may have another one.
    """

    to_nnx__module: nn.Module
    to_nnx__rngs: nnx.Rngs | None = None
    to_nnx__plain_keys: frozenset[str] = frozenset()
    to_nnx__mutable: Any = False
    to_nnx__modes: tuple[tuple[str, Any], ...] = ()
    to_nnx__eager_sharding: bool | None = None
    to_nnx__graphdefs: tuple[tuple[Path, nnx.GraphDef[Any]], ...] = ()
    to_nnx__collections: tuple[str, ...] = ()
    to_nnx__path: tuple[str, ...] = ()

    to_nnx__setattr: ClassVar[Any] = nnx.Module.__setattr__

    def stream_counts(self) -> list[nnx.Variable[Any]]:
        """The counts of the streams that keys are drawn from."""
        streams = self.to_nnx__rngs
        return [] if streams is None else [streams[name].count for name in streams]


def creates_in_call(kind: type) -> bool:
    """Whether modules of a class create variables when they are called: a ToNNX, a `bridge.Module`.

    The latter is a class of a room above, which says of itself that it is one.
    """
    return issubclass(kind, LinenHolder) or is_linen_style(kind)


def is_linen_style(kind: object) -> bool:
    """Whether a class is one of `bridge.Module`."""
    return getattr(kind, "bridge__is_lazy", False)


# Says of a `bridge.Module` that its `setup` has run, so what that made has to stay.
IS_SETUP = "bridge__is_setup"
# The attributes that an initialisation creates beside the variables.
CREATED_ATTRIBUTES = frozenset(
    {
        "to_nnx__graphdefs",
        "to_nnx__collections",
        IS_SETUP,
        "bridge__names",
        "bridge__priorities",
    }
)


def name_of(holder: LinenHolder) -> str:
    """What messages call a wrapper."""
    return f"ToNNX({type(holder.to_nnx__module).__name__})"
