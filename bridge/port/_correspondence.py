"""Which leaf of the Linen side is which leaf of the NNX side, and what could not be told."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from bridge._conversion.arrays import shape_of
from bridge._conversion.neutral import Address, Path
from bridge._rules.pieces import Piece, Region, covers
from bridge._rules.rules import Rule

from ._context import Context
from ._rules import Problem
from ._trees import LinenNode, NNXNode


class MisShaped(NamedTuple):
    """Two leaves that belong together and whose shapes do not."""

    linen: Address
    nnx: Path
    rule: str
    note: str


class Pairing(NamedTuple):
    """Two modules or leaves of other names that were put together without a rule.

    Attributes:
      linen: the Linen scope or leaf.
      nnx: the NNX module or leaf.
      context: which of several stacked layers they are.
      how: how it is known.
      proposal: the evidence, where it settles nothing by itself.
      parent: the NNX module in which the two were found.
      within: the Linen scope in which they were.
    """

    linen: LinenNode
    nnx: NNXNode
    context: Context
    how: str
    proposal: Evidence | None = None
    parent: NNXNode | None = None
    within: LinenNode | None = None


class PairedStack(NamedTuple):
    """A list and a scope of stacked leaves that were put together, or the reverse.

    Attributes:
      linen: the Linen scope, the first one of several.
      nnx: the NNX list, or the module of stacked leaves.
      layers: the pairs of layers.
    """

    linen: LinenNode
    nnx: NNXNode
    layers: tuple[Pairing, ...]


class Evidence(NamedTuple):
    """Why two things are proposed to be the same.

    Attributes:
      text: what speaks for it.
      is_weak: whether only a shape, or an order that a program need not keep, speaks for it.
      is_disputed: whether names say otherwise than the order of calls does.
    """

    text: str
    is_weak: bool = False
    is_disputed: bool = False


class Ambiguous(NamedTuple):
    """An NNX module, and the Linen scopes that it could be."""

    nnx: NNXNode
    candidates: tuple[LinenNode, ...]
    note: str


@dataclasses.dataclass
class Correspondence:
    """What was found about two trees; it does not depend on the direction of a move.

    Attributes:
      linen: the Linen side.
      nnx: the NNX side.
      pieces: which parts are the same.
      mis_shaped: leaves that do not fit together.
      ambiguous: modules with several candidates.
      problems: what is wrong with the rules.
      pairings: what was put together under different names.
      named: what was put together because its names are equal.
      stacks: the stacks whose layers are among the pairings.
      laid_out: the rules that put arrays together that are laid out otherwise, with the pieces.
    """

    linen: LinenNode
    nnx: NNXNode
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    mis_shaped: list[MisShaped] = dataclasses.field(default_factory=list)
    ambiguous: list[Ambiguous] = dataclasses.field(default_factory=list)
    problems: list[Problem] = dataclasses.field(default_factory=list)
    pairings: list[Pairing] = dataclasses.field(default_factory=list)
    named: list[Pairing] = dataclasses.field(default_factory=list)
    stacks: list[PairedStack] = dataclasses.field(default_factory=list)
    laid_out: dict[Rule, list[Piece]] = dataclasses.field(default_factory=dict)

    def incomplete(self) -> tuple[list[Address], list[Path]]:
        """The leaves of each side that the pieces cover in part, or twice."""
        by_linen: dict[Address, list[Region]] = {}
        by_nnx: dict[Path, list[Region]] = {}
        for piece in self.pieces:
            by_linen.setdefault(piece.linen, []).append(piece.linen_region)
            if piece.nnx is not None:
                by_nnx.setdefault(piece.nnx, []).append(piece.nnx_region)
        linen = [a for a, r in by_linen.items() if not _covered(self.linen_value(a), r)]
        nnx_side = {n.path: n for n in self.nnx_leaves()}
        return linen, [p for p, r in by_nnx.items() if not _covered(nnx_side[p].value, r)]

    def linen_value(self, address: Address) -> Any:
        """The value of a Linen leaf."""
        collection, path = address
        node = self.linen.at(path)
        return node.leaves[collection].value if node else None

    def linen_leaves(self) -> Iterator[Address]:
        """The addresses of all Linen leaves."""
        return ((c, s.path) for s in self.linen.walk() for c in s.leaves)

    def nnx_leaves(self) -> Iterator[NNXNode]:
        """All NNX leaves."""
        return (node for node in self.nnx.walk() if node.is_leaf)


def _covered(value: Any, regions: list[Region]) -> bool:
    shape = shape_of(value)
    return covers(shape, regions) if shape is not None else len(regions) == 1
