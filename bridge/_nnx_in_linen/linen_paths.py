"""Translates between the paths of an NNX module and those of the Linen module that it replaces."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, Self

from bridge._conversion.collections import STATIC
from bridge._conversion.neutral import Address, Path
from bridge._rules.rules import Renaming, RulesError, read_backward, rules_of


class LinenPaths:
    """Linen paths by NNX paths and the other way round.

    `table` has NNX paths by Linen paths, as rules that only rename. Raises RulesError if a rule
    cannot be read, or changes arrays.
    """

    def __init__(self, table: Mapping[str, str]):
        routes = [route for rule in rules_of(table) for route in rule.routes]
        changing = [r.rule.linen for r in routes if r.is_stacked or r.rule.form.text]
        if changing:
            raise RulesError(
                f"{changing}, which change arrays",
                "rules that only rename",
                "give both modules leaves of the same shapes",
            )
        self._forward = [route.renaming() for route in routes]
        self._backward = read_backward(table)

    @classmethod
    def of(cls, table: Mapping[str, str]) -> Self:
        """The paths by a table, read once."""
        return _read(cls, tuple(table.items()))

    def by_nnx(self, leaves: dict[Address, Any]) -> dict[Address, Any]:
        """Linen leaves by their addresses in the NNX module."""
        return {_moved(self._forward, address): leaf for address, leaf in leaves.items()}

    def to_linen(self, address: Address) -> Address:
        """The address of an NNX leaf in the Linen variables."""
        return _moved(self._backward, address)


@functools.lru_cache(maxsize=256)
def _read(cls: Any, items: tuple[tuple[str, str], ...]) -> Any:
    return cls(dict(items))


def _moved(rules: Iterable[Renaming], address: Address) -> Address:
    collection, path = address
    if not rules or collection == STATIC:
        return address
    names = [str(key) for key in path]
    for end in range(len(names), 0, -1):
        for one in rules:
            hit = one.pattern.fullmatch("/".join(names[:end]))
            if hit is not None:
                start: Path = tuple(hit.expand(one.template).split("/"))
                return collection, (*start, *path[end:])
    return address
