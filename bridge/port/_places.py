"""Where something is open, and what may decide it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ._context import Context, Settled
from ._correspondence import Evidence
from ._trees import LinenNode, NNXNode

Proposals = list[tuple[NNXNode, LinenNode, Evidence]]


class Proposer(Protocol):
    """What puts together, by evidence, what names and structure leave open."""

    def numbered(self, pairs: Sequence[tuple[NNXNode, LinenNode]]) -> str | None:
        """How pairs that have numbered names are known, None if something speaks against them."""
        ...

    def axis(self, node: NNXNode, scope: LinenNode) -> tuple[int | None, Evidence]:
        """The axis on which leaves are stacked, None if nothing tells it, and what does."""
        ...

    def stacks(self, place: Place, candidates: dict[NNXNode, list[LinenNode]]) -> Proposals:
        """As `modules`, of lists and of stacked modules, each of which takes a whole scope."""
        ...

    def modules(self, place: Place, candidates: dict[NNXNode, list[LinenNode]]) -> Proposals:
        """Proposes pairs of modules below two nodes that belong together.

        Args:
          place: the two nodes, and what is open below them.
          candidates: the scopes that each open NNX module could be.
        """
        ...

    def stacked_leaves(self, place: Place, candidates: dict[NNXNode, list[LinenNode]]) -> Proposals:
        """As `stacks`, of single leaves."""
        ...

    def leaves(self, place: Place) -> Proposals:
        """Proposes pairs of leaves that lie directly below two nodes."""
        ...


class Place(NamedTuple):
    """Two nodes that belong together, below which something is open.

    Attributes:
      nnx: the NNX node.
      linen: the Linen node.
      context: which of several stacked layers they are.
      settled: the nodes that are spoken for.
      classes: the names of the classes in the NNX model that are not Flax's own.
    """

    nnx: NNXNode
    linen: LinenNode
    context: Context
    settled: Settled
    classes: frozenset[str]
