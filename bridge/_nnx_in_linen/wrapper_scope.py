"""What a bound ToLinen has in its scope: variables, streams, and what is said about them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flax import nnx

from bridge._bounded_cache import BoundedCache
from bridge._conversion.matching import Comparison
from bridge._conversion.neutral import Address, by_address
from bridge._errors import (
    LostUpdateError,
    MismatchError,
    lost_update_text,
    path_text,
    unknown_paths_text,
    warn,
)
from bridge._fingerprint import fingerprint
from bridge._flax.linen_modules import registered_names, shares_scope
from bridge._graphdefs.static_graphdef import StaticGraphDef
from bridge._randomness.streams import stream_of

from . import scope_variables
from .matched_variables import MatchedVariables
from .module_views import are_shown
from .recipe import Recipe
from .subclassing import frozen

_warned: BoundedCache[bool] = BoundedCache(maxsize=4096)


class WrapperScope:
    """A ToLinen during one call, which need not be bound for what reads no variables.

    Args:
      linen: the ToLinen.
      is_extended: whether a subclass has a `__call__` of its own.

    Attributes:
      linen: that ToLinen.
    """

    def __init__(self, linen: Any, *, is_extended: bool = False):
        self.linen = linen
        self._is_extended = is_extended

    @functools.cached_property
    def recipe(self) -> Recipe:
        """The constructor and its arguments."""
        linen = self.linen
        return Recipe(
            linen.nnx_class,
            frozen(linen.args),
            frozen(linen.kwargs),
            linen.skip_rng,
            linen.eager_sharding,
        )

    @property
    def where(self) -> str:
        """What messages call the wrapper."""
        place = "/".join(self.linen.path) if self.linen.scope is not None else ""
        return f"ToLinen({self.recipe.name})" + (f" at {place}" if place else "")

    @property
    def is_outermost(self) -> bool:
        """Whether Linen calls the wrapper itself, and no module around it."""
        return self.linen.scope is not None and self.linen.scope.parent is None

    @property
    def rngs(self) -> Mapping[str, Any]:
        """The keys of the call, by Linen's stream names."""
        return self.linen.scope.rngs if self.linen.scope is not None else {}

    def matched(self, graphdef: StaticGraphDef, variables: Mapping[str, Any]) -> MatchedVariables:
        """Variables against a definition."""
        return MatchedVariables(graphdef, variables, self.recipe.kept(graphdef))

    def check(self, compared: Comparison) -> None:
        """Raises MismatchError for parameters that are missing, or of another shape."""
        if compared.missing or (compared.mis_shaped and self.linen.strict is not False):
            raise compared.error(self.where)

    def stream_names(self, variables: Mapping[str, Any]) -> tuple[str, ...]:
        """The RNG streams that a constructor gets which is only traced."""
        stored = (stream_of(address, leaf) for address, leaf in by_address(variables).items())
        return tuple(sorted({*self.rngs, "default", *filter(None, stored)} - {"params"}))

    def constructor_keys(self) -> dict[str, Any]:
        """The keys by the stream names of `nnx.Rngs`; `params` serves what is missing."""
        keys = {name: rng.as_jax_rng() for name, rng in self.rngs.items()}
        if "params" in keys and "default" not in keys:
            keys["default"] = keys.pop("params")
        return keys

    def leaf(self, item: Any) -> Any:
        """The leaf of Linen variables for a Variable or a bare array."""
        to_leaf: Callable[[Any], Any] | None = self.linen.metadata_fn
        if not isinstance(item, nnx.Variable):
            return item
        return item.get_value() if to_leaf is None else to_leaf(item)

    def as_linen(self, graphdef: StaticGraphDef, leaves: Iterable[Any]) -> dict[Address, Any]:
        """Leaves of Linen variables for the leaves of a module."""
        return {
            slot.address: self.leaf(leaf)
            for slot, leaf in zip(graphdef.slots, leaves, strict=True)
            if self.linen.rng_state or not slot.is_rng
        }

    def store_graphdef(self, graphdef: StaticGraphDef | None) -> None:
        """`scope_variables.store_graphdef`, unless the wrapper's option says otherwise."""
        if self.linen.store_graphdef:
            scope_variables.store_graphdef(self.linen, graphdef)

    def write(
        self,
        leaves: Mapping[Address, Any],
        found: Mapping[Address, Any],
        keys: Mapping[Address, Address],
    ) -> None:
        """`scope_variables.write`, with keys spelled as the wrapper's option says."""
        scope_variables.write(self.linen, leaves, found, keys, string_keys=self.linen.string_keys)

    def may_update(self, address: Address, item: Any) -> bool:
        """Whether an update can be kept; if it cannot, that is said once.

        Raises:
          LostUpdateError: it cannot, and `strict` is True.
        """
        collection = address[0]
        if self.linen.is_mutable_collection(collection):
            return True
        var_type = item.var_type if isinstance(item, nnx.Variable) else object
        is_rng = issubclass(var_type, nnx.RngState)
        if not issubclass(var_type, nnx.Intermediate) and (self.linen.rng_state or not is_rng):
            self.report_lost(collection, lost_update_text(self.where, collection, is_rng))
        return False

    def report_lost(self, what: Any, text: str) -> None:
        """Says once that an update is lost, or raises LostUpdateError if `strict` is True."""
        if self.linen.strict:
            raise LostUpdateError(text)
        self._warn_once(what, text)

    def report_unknown(self, unknown: Iterable[Address]) -> None:
        """Says once which variables the module does not have, as `strict` asks for it."""
        linen = self.linen
        if self._is_extended or shares_scope(linen) or are_shown():
            # A subclass may have variables of its own, also some that it makes after this, and so
            # may a module that shares the scope, and interceptors that see the NNX modules.
            return
        own = registered_names(linen)
        paths = tuple(path_text(*a) for a in unknown if not a[1] or a[1][0] not in own)
        if paths and linen.strict:
            raise MismatchError(self.where, unknown=list(paths))
        if paths and linen.strict is None:
            self._warn_once(paths, unknown_paths_text(self.where, paths))

    def _warn_once(self, what: Any, text: str) -> None:
        if _warned.is_new((fingerprint(self.linen.nnx_class), self.linen.path, what)):
            warn(text)
