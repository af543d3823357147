"""Which of several stacked layers is being compared, and which nodes are spoken for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from bridge._rules.rules import Layer

from ._trees import LinenNode, NNXNode


class Context(NamedTuple):
    """Whether the modules being compared are one of several that are stacked.

    Attributes:
      linen: which part of the Linen leaves is meant, None if they are not stacked.
      nnx: which part of the NNX leaves is meant.
    """

    linen: Layer | None = None
    nnx: Layer | None = None


PLAIN = Context()


class Settled:
    """The nodes that are spoken for: a node of stacked layers once for each layer."""

    def __init__(self, layers: Mapping[int, set[int | None]] | None = None):
        self._layers = {node: set(numbers) for node, numbers in (layers or {}).items()}

    def copy(self) -> Settled:
        """These nodes, to which others can be added on the side."""
        return Settled(self._layers)

    def add(self, node: NNXNode, scope: LinenNode, context: Context) -> None:
        """Speaks for both nodes of a pair."""
        for each, layer in ((node, context.nnx), (scope, context.linen)):
            self._layers.setdefault(id(each), set()).add(layer.number if layer else None)

    def is_free(self, node: NNXNode | LinenNode, context: Context) -> bool:
        """Whether a node can still be paired."""
        layer = context.nnx if isinstance(node, NNXNode) else context.linen
        taken = self._layers.get(id(node))
        return not taken or (layer is not None and not taken & {layer.number, None})
