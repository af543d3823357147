"""One call of the NNX module in a ToLinen: what it is run with, and what is kept of it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

from bridge._conversion.collections import ARRAYS, STATIC
from bridge._conversion.neutral import Address
from bridge._errors import lifted_removal_text, path_text, untold_change_text
from bridge._flax.linen_modules import is_lifted
from bridge._flax.scopes import undo_draws
from bridge._graphdefs import static_graphdef
from bridge._graphdefs.leaves import GraphDefLeaf
from bridge._graphdefs.static_graphdef import StaticGraphDef
from bridge._initialization.lazy_init import run_initializing
from bridge._randomness.streams import fold_path, stream_for

from . import scope_variables
from .bound_module import BoundModule
from .matched_variables import MatchedVariables
from .module_views import are_shown, showing
from .wrapper_scope import WrapperScope


class NNXCall:
    """A call that is prepared, run, and committed; no variable changes before it is committed.

    Args:
      scope: the wrapper in its scope.
      found: the variables and the module's definition.
    """

    def __init__(self, scope: WrapperScope, found: MatchedVariables):
        self._scope = scope
        self._found = found
        # What was drawn from the scope, and the scope's stream behind each leaf.
        self._keys: dict[str, Any] = {}
        self._streams: dict[Address, str] = {}
        self._bound = BoundModule(
            found,
            self._seed,
            scope.linen.is_mutable_collection,
            [name for name in scope.rngs if name != "params"],
        )
        scope.report_unknown(self._bound.refused() if scope.linen.strict else ())

    def run(self, method: Any, args: Any, kwargs: Any) -> Any:
        """Calls a method of the module, and returns its output."""
        scope = self._scope
        # The state at init is the state as constructed, and what the call creates.
        run = run_initializing if scope.linen.is_initializing() else None
        show = functools.partial(showing, linen=scope.linen) if are_shown() else nullcontext
        output = self._bound.call(method, args, kwargs, scope.where, run, show)
        self._give_back_keys()
        scope.report_unknown(self._bound.unused())
        return output

    def commit(self) -> None:
        """Writes what the call has changed, all of it or none.

        Raises:
          LostUpdateError: something cannot be written, and `strict` is True.
        """
        scope, found = self._scope, self._found
        is_mutable = functools.cache(scope.linen.is_mutable_collection)
        given = {(ARRAYS, path) for path, _ in found.graphdef.given}
        updates: dict[Address, Any] = {}
        for address, item in self._bound.updates().items():
            # An argument stays one, and a value that is still the same is not lost.
            may_stay = address in given or not is_mutable(address[0])
            if not (may_stay and self._bound.is_handed_on(address)):
                updates[address] = item
        kept = {a: scope.leaf(item) for a, item in updates.items() if scope.may_update(a, item)}
        graphdef = self._new_definition(updates, kept)
        if graphdef is not None:
            # Before the updates: a leaf may be gone to make room for a subtree.
            gone = self._bound.removed() - graphdef.slots.addresses
            scope_variables.remove(scope.linen, map(found.placed, gone))
            scope.store_graphdef(graphdef)
        if kept:
            places = {address: found.placed(address) for address in kept}
            scope.write(kept, found.leaves, places)

    def _new_definition(
        self, updates: Mapping[Address, Any], kept: Mapping[Address, Any]
    ) -> StaticGraphDef | None:
        """The GraphDef to be stored: None if it is the old one, or if it cannot be.

        It cannot where its collection is not mutable, or another one whose leaves come or go with
        it: a definition and the leaves that it needs have to stay together. Nor can it without
        leaves that are gone in a lifted transform, which merges what comes out of it with what went
        in.
        """
        graphdef = self._bound.definition()
        if graphdef is None:
            return None
        scope, found = self._scope, self._found
        addresses = graphdef.slots.addresses
        if is_lifted(scope.linen) and (stay := _staying(self._bound.removed_state(), addresses)):
            places = [path_text(*address) for address in stay]
            scope.report_lost(tuple(places), lifted_removal_text(scope.where, places))
            return None
        given = ((ARRAYS, path) for path, _ in found.graphdef.given)
        still = {a for a in given if a in addresses and a not in updates}
        graphdef = static_graphdef.with_given(
            graphdef, tuple(item for item in found.graphdef.given if (ARRAYS, item[0]) in still)
        )
        is_mutable = functools.cache(scope.linen.is_mutable_collection)
        needed = {s.address for s in graphdef.slots if scope.linen.rng_state or not s.is_rng}
        touched = {STATIC, *(collection for collection, _ in self._bound.removed())}
        is_stored = scope.linen.store_graphdef and all(map(is_mutable, touched))
        if is_stored and needed <= found.leaves.keys() | kept.keys():
            return graphdef
        if untold := self._bound.untold(scope.leaf):
            places = ["/".join(map(str, path)) for path in untold]
            text = untold_change_text(scope.where, places, is_stored=scope.linen.store_graphdef)
            scope.report_lost(tuple(places), text)
        return None

    def _seed(self, leaf: GraphDefLeaf) -> Any:
        """The key that this call's `rngs` give to a stream: another for each stream and call."""
        linen, rngs = self._scope.linen, self._scope.rngs
        is_stored = leaf.address in self._found.leaves
        name = stream_for(leaf.metadata.get("tag"), rngs, is_stored=is_stored)
        if name is None or linen.is_initializing():
            return None
        self._streams[leaf.address] = name
        if name not in self._keys:
            self._keys[name] = linen.make_rng(name)
        return fold_path(self._keys[name], leaf.path[:-1])

    def _give_back_keys(self) -> None:
        """Undoes the draws from streams of the scope whose keys the call has not used.

        The module has to have its keys before it is called. A `ToNNX` around it moves the streams
        on that were drawn from, and one that is deterministic is to leave them alone.
        """
        used = {self._streams[address] for address in self._bound.drawn()}
        undo_draws(self._scope.linen.scope, self._keys.keys() - used)


def _staying(gone: Iterable[Address], addresses: Collection[Address]) -> list[Address]:
    """The leaves that a merge does not replace: nothing new is in their place, above or below."""
    prefixes = {(c, path[:length]) for c, path in addresses for length in range(len(path) + 1)}
    return [
        (collection, path)
        for collection, path in gone
        if (collection, path) not in prefixes
        and not any((collection, path[:length]) in addresses for length in range(len(path)))
    ]
