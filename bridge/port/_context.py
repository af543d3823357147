"""Which of several stacked layers is being compared, and which nodes are spoken for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ._pieces import Cut, Region
from ._trees import LinenNode, NNXNode


class Layer(NamedTuple):
    """One of several layers that are stacked.

    Attributes:
      axis: where they are stacked.
      number: which of them this is.
      total: how many there have to be, None if that is not known.
      at: the position in the NNX path of the key that says which, or of the module whose leaves
        are stacked.
    """

    axis: int
    number: int
    total: int | None
    at: int = 0


class Context(NamedTuple):
    """Whether the modules being compared are one of several that are stacked.

    Attributes:
      linen: which part of the Linen leaves is meant, None if they are not stacked.
      nnx: which part of the NNX leaves is meant.
    """

    linen: Layer | None = None
    nnx: Layer | None = None


PLAIN = Context()


def without_axis(shape: Sequence[int] | None, layer: Layer | None) -> Any:
    """The shape of one layer of a stacked leaf; one that nothing has if there is no such layer."""
    if shape is None or layer is None:
        return shape
    if not -len(shape) <= layer.axis < len(shape):
        return (-1,)
    axis = layer.axis % len(shape)
    if layer.number >= shape[axis] or layer.total not in (None, shape[axis]):
        return (-1,)
    return (*shape[:axis], *shape[axis + 1 :])


def layer_cut(shape: tuple[int, ...] | None, layer: Layer | None) -> Region:
    """The part of a stacked leaf that is one layer."""
    if layer is None or not shape:
        return ()
    return (Cut(layer.axis % len(shape), layer.number, 1, is_index=True),)


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
