"""Writes what a call has changed in an NNX module into the Linen variables."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from bridge._conversion.collections import ARRAYS, STATIC
from bridge._conversion.neutral import Address
from bridge._errors import lifted_removal_text, path_text, untold_change_text
from bridge._flax.linen_modules import is_lifted
from bridge._graphdefs.static_graphdef import StaticGraphDef

from .changes import Changes
from .matched_variables import MatchedVariables
from .scope import WrapperScope


def commit(scope: WrapperScope, found: MatchedVariables, changes: Changes) -> None:
    """Writes what the call has changed, all of it or none.

    Raises LostUpdateError if something cannot be written and `strict` is True.
    """
    is_mutable = functools.cache(scope.linen.is_mutable_collection)
    given = {(ARRAYS, path) for path, _ in found.graphdef.given}
    updates: dict[Address, Any] = {}
    for address, item in changes.updates.items():
        # An argument stays one, and a value that is still the same is not lost.
        may_stay = address in given or not is_mutable(address[0])
        if not (may_stay and changes.is_handed_on(address)):
            updates[address] = item
    kept = scope.as_linen((a, x) for a, x in updates.items() if scope.may_update(a, x))
    graphdef = _new_definition(scope, found, changes, updates, kept)
    if graphdef is not None:
        # Before the updates: a leaf may be gone to make room for a subtree.
        gone = changes.removed - graphdef.slots.addresses
        scope.remove(map(found.placed, gone))
        scope.store_graphdef(graphdef)
    if kept:
        places = {address: found.placed(address) for address in kept}
        there = {places[a]: found.leaves[a] for a in kept if a in found.leaves}
        scope.write({places[a]: leaf for a, leaf in kept.items()}, there)


def _new_definition(
    scope: WrapperScope,
    found: MatchedVariables,
    changes: Changes,
    updates: Mapping[Address, Any],
    kept: Mapping[Address, Any],
) -> StaticGraphDef | None:
    """The GraphDef to be stored: None if it is the old one, or if it cannot be.

    It cannot be stored if its collection is not mutable, or if one of a leaf that comes and goes
    with it is not: a definition and its leaves have to stay together. In a lifted transform it
    cannot be stored if leaves are gone, because Linen merges the transform's output with its input.
    """
    graphdef = changes.definition()
    if graphdef is None:
        return None
    linen, addresses = scope.linen, graphdef.slots.addresses
    if is_lifted(linen) and (stay := _staying(changes.removed_state(), addresses)):
        places = [path_text(*address) for address in stay]
        scope.report_lost(tuple(places), lifted_removal_text(scope.where, places))
        return None
    given = ((ARRAYS, path) for path, _ in found.graphdef.given)
    still = {a for a in given if a in addresses and a not in updates}
    kept_given = tuple(item for item in found.graphdef.given if (ARRAYS, item[0]) in still)
    may_be_stored = scope.keeps_graphdef and not graphdef.is_bound
    graphdef = StaticGraphDef(graphdef, graphdef.avals, graphdef.origin, kept_given)
    needed = {s.address for s in graphdef.slots if linen.rng_state or not s.is_rng}
    touched = {STATIC, *(collection for collection, _ in changes.removed)}
    is_stored = may_be_stored and all(map(linen.is_mutable_collection, touched))
    if is_stored and needed <= found.leaves.keys() | kept.keys():
        return graphdef
    if untold := changes.untold(scope.as_linen):
        places = ["/".join(map(str, path)) for path in untold]
        scope.report_lost(tuple(places), untold_change_text(scope.where, places))
    return None


def _staying(gone: Iterable[Address], addresses: Collection[Address]) -> list[Address]:
    """The leaves that a merge does not replace: nothing new is in their place, above or below."""
    prefixes = {(c, path[:length]) for c, path in addresses for length in range(len(path) + 1)}
    return [
        (collection, path)
        for collection, path in gone
        if (collection, path) not in prefixes
        and not any((collection, path[:length]) in addresses for length in range(len(path)))
    ]
