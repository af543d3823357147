"""What a Linen module that is bound to a scope brings along when a ToNNX wraps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flax import linen as nn

from bridge._flax.linen_modules import is_made_in_call


class BoundState(NamedTuple):
    """A Linen module without its scope, and what the scope held for it.

    Attributes:
      module: the module, bound to nothing.
      variables: its variables, empty if there are none.
      keys: a key by stream, None if there are none.
    """

    module: nn.Module
    variables: Mapping[str, Any]
    keys: dict[str, Any] | None


def bound_state(module: nn.Module) -> BoundState:
    """Takes a Linen module out of its scope.

    A module that is made while another one is being called is adopted by that one, and has a scope
    without variables, whose keys are those of the call. One that `bind` returned, and a submodule
    of it, has keys of its own, though it may have no variables, as a Dropout.
    """
    scope = module.scope
    if scope is None and not isinstance(module.parent, nn.Module):
        return BoundState(module, {}, None)
    free = module.clone(parent=None, name=None)
    if scope is None or scope.invalid:
        return BoundState(free, {}, None)
    variables = {collection: tree for collection, tree in module.variables.items() if tree}
    if not variables and is_made_in_call(module):
        return BoundState(free, {}, None)
    rngs: Any = scope.rngs
    keys = {name: rng.as_jax_rng() for name, rng in rngs.items()}
    return BoundState(free, variables, keys or None)
