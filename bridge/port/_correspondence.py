"""The pairs of leaves of a Linen and an NNX side, and what could not be paired."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from bridge._conversion.arrays import shape_of
from bridge._conversion.matching import same_shape
from bridge._conversion.neutral import Address, Path
from bridge._layers.layer import LayerRow
from bridge._rules.pieces import (
    WHOLE,
    Piece,
    Region,
    covers,
    layer_cut,
    pieces_of,
)
from bridge._rules.rules import UNCHANGED, Form, Layer, Rule

from ._reasons import SETTLED, STACKED, Evidence
from ._trees import AnyNode, LinenNode, NNXNode


class Context(NamedTuple):
    """Which parts of the Linen and of the NNX leaves are meant; None if they are not stacked."""

    linen: Layer | None = None
    nnx: Layer | None = None

    def of(self, node: AnyNode) -> Layer | None:
        """Which part of a node's leaves is meant."""
        return self.nnx if isinstance(node, NNXNode) else self.linen


PLAIN = Context()


@dataclasses.dataclass(frozen=True)
class Settled:
    """The nodes that are spoken for: a node of stacked layers once for each layer."""

    _layers: dict[int, set[int | None]] = dataclasses.field(default_factory=dict)

    def add(self, node: NNXNode, scope: LinenNode, context: Context) -> None:
        """Speaks for both nodes of a pair."""
        for each, layer in ((node, context.nnx), (scope, context.linen)):
            self._layers.setdefault(id(each), set()).add(layer.number if layer else None)

    def is_untouched(self, node: AnyNode, context: Context) -> bool:
        """Whether a node and all below it can still be paired."""
        return all(self.is_free(each, context) for each in node.walk())

    def is_free(self, node: AnyNode, context: Context) -> bool:
        """Whether a node can still be paired."""
        layer = context.nnx if isinstance(node, NNXNode) else context.linen
        taken = self._layers.get(id(node))
        return not taken or (layer is not None and not taken & {layer.number, None})


class Problem(NamedTuple):
    """A rule that cannot be followed."""

    rule: str
    target: str
    note: str


class MisShaped(NamedTuple):
    """Two leaves that belong together but have different shapes."""

    linen: Address
    nnx: Path
    rule: str
    note: str
    context: Context


class Pairing(NamedTuple):
    """Two modules or leaves that were put together without a rule.

    `proposal` has the evidence where `how` it is known settles nothing by itself.
    """

    linen: LinenNode
    nnx: NNXNode
    context: Context
    how: str
    proposal: Evidence | None = None

    @property
    def evidence(self) -> Evidence:
        """What speaks for the pair."""
        return self.proposal or SETTLED.get(self.how, STACKED)

    @property
    def linen_side(self) -> tuple[Path, Layer | None]:
        """The Linen path, and which of its stacked layers."""
        return self.linen.path, self.context.linen

    @property
    def nnx_side(self) -> tuple[Path, Layer | None]:
        """The NNX path, and which of its stacked layers."""
        return self.nnx.path, self.context.nnx


class Stack(NamedTuple):
    """Layers that one side has stacked, and the other one by one.

    A layer is what a chain of modules with one child each holds.

    Attributes:
      nnx: the NNX list, or the module or leaf that is stacked.
      linen: the Linen scope or leaf that is stacked, or the first one of several.
      items: the layers of the side that has them one by one, in the order of the other.
      at: the position in the NNX path of the key that says which, or of what is stacked.
      axis: where the layers are stacked.
      context: which of the layers around them they are.
      fitting: the axes that are possible.
      how: how it is known that they belong together.
      proposal: the evidence, where it settles nothing by itself.
    """

    nnx: NNXNode
    linen: LinenNode
    items: tuple[NNXNode, ...] | tuple[LinenNode, ...]
    at: int
    axis: int = 0
    context: Context = PLAIN
    fitting: Sequence[int] = ()
    how: str = ""
    proposal: Evidence | None = None

    @property
    def is_list(self) -> bool:
        """Whether NNX has the layers one by one."""
        return isinstance(self.items[0], NNXNode)

    @property
    def scopes(self) -> list[LinenNode]:
        """The Linen scopes that it takes."""
        return [each for each in self.items if isinstance(each, LinenNode)] or [self.linen]

    @property
    def layers(self) -> list[Pairing]:
        """The pairs of layers."""
        return [self.layer(number) for number in range(len(self.items))]

    def axes(self, fits: Callable[[Pairing], bool]) -> list[int]:
        """The axes on which the first layer fits, counted from the front; from behind if none."""
        first = self.layer(0)
        rows = [*first.nnx.rows, *first.linen.rows]
        rank = max((len(row.shape or ()) for row in rows), default=0)
        for axes in (range(rank), range(-1, -rank - 1, -1)):
            if found := [axis for axis in axes if fits(self._replace(axis=axis).layer(0))]:
                return found
        return []

    def numbered(self, numbers: Sequence[int]) -> Stack:
        """The layers by their numbers."""
        by_number = dict(zip(numbers, self.items, strict=True))
        items: Any = tuple(by_number[number] for number in sorted(by_number))
        return self._replace(items=items)

    def layer(self, number: int) -> Pairing:
        """The pair of one layer."""
        layer = Layer(self.axis, number, len(self.items), self.at)
        item, node, scope, context = self.items[number], self.nnx, self.linen, self.context
        if isinstance(item, NNXNode):
            node, context = item, context._replace(linen=layer)
        else:
            scope, context = item, context._replace(nnx=layer)
        return Pairing(scope.core, node.core, context, self.how, self.proposal)


class Ambiguous(NamedTuple):
    """An NNX module, and the Linen scopes that it could be."""

    nnx: NNXNode
    candidates: tuple[LinenNode, ...]
    note: str


@dataclasses.dataclass
class Correspondence:
    """What was found about two trees; it does not depend on the direction of a move.

    Attributes:
      problems: what is wrong with the rules.
      stacks: the stacks with layers among the pairings.
      laid_out: the rules that put arrays together that are laid out otherwise, with the pieces.
    """

    linen: LinenNode
    nnx: NNXNode
    settled: Settled = dataclasses.field(default_factory=Settled)
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    mis_shaped: list[MisShaped] = dataclasses.field(default_factory=list)
    ambiguous: list[Ambiguous] = dataclasses.field(default_factory=list)
    problems: list[Problem] = dataclasses.field(default_factory=list)
    pairings: list[Pairing] = dataclasses.field(default_factory=list)
    stacks: list[Stack] = dataclasses.field(default_factory=list)
    laid_out: dict[Rule, list[Piece]] = dataclasses.field(default_factory=dict)

    def link(
        self,
        parts: Sequence[tuple[NNXNode, LinenNode]],
        context: Context,
        label: str,
        form: Form = UNCHANGED,
    ) -> list[Piece]:
        """Links leaves that a form makes of each other, or notes that their shapes do not fit.

        Args:
          parts: NNX leaf and Linen leaf. A fused leaf is in every part. There is nothing to link if
            Linen has a leaf in another collection only.
          context: which of stacked layers are meant.
          label: for the report, what put them together.
          form: how the arrays differ.

        Returns:
          A piece for each part.
        """
        found = [(collection_of(leaf, scope), scope) for leaf, scope in parts]
        addresses = [(collection, scope.path) for collection, scope in found if collection]
        if len(addresses) < len(parts):
            return []
        values = [self.linen_values[address] for address in addresses]
        theirs = [shape_of(value) for value in values]
        ours = [shape_of(leaf.value) for leaf, _ in parts]
        are_arrays = None not in (*theirs, *ours)
        # Nearly every leaf is another one as it is.
        if form == UNCHANGED and (context == PLAIN or not are_arrays):
            fits = theirs == ours if are_arrays else same_shape(values[0], parts[0][0].value)
            pieces = [Piece(None, None, layers=context)] if fits else ""
        else:
            pieces = pieces_of(theirs, ours, context, form)
        made: list[Piece] = []
        for number, (address, (leaf, scope)) in enumerate(zip(addresses, parts, strict=True)):
            self.settled.add(leaf, scope, context)
            if isinstance(pieces, str):
                note = "" if form == UNCHANGED else pieces
                self.mis_shaped.append(MisShaped(address, leaf.path, label, note, context))
            else:
                made.append(pieces[number]._replace(linen=address, nnx=leaf.path, rule=label))
        self.pieces += made
        return made

    def link_elsewhere(
        self,
        node: NNXNode,
        scope: LinenNode,
        layer: LayerRow,
        context: Context,
        how: str,
    ) -> None:
        """Links the leaves that lie elsewhere in Linen, such as gates that NNX has side by side."""
        label = label_of(layer, how)
        for path, parts in layer.linen_of_path.items():
            leaf = node.at(path)
            if leaf is None or not self.settled.is_free(leaf, context):
                continue
            there = [found for part in parts if (found := scope.at(part)) and found.leaves]
            if len(there) == len(parts):
                form = Form(fused="nnx") if len(parts) > 1 else UNCHANGED
                self.link([(leaf, each) for each in there], context, label, form)
        for path in layer.zero:
            there = scope.at(tuple(path.split("/")))
            if there and "params" in there.leaves:
                # Of stacked layers each entry is cut out once, whichever leaf it belongs to.
                region = layer_cut(shape_of(there.leaves["params"].value), context.linen)
                self.pieces.append(Piece(("params", there.path), None, region, rule=label))

    def link_by_rule(
        self,
        parts: Sequence[tuple[NNXNode, LinenNode]],
        context: Context,
        rule: Rule,
        label: str,
    ) -> None:
        """Links leaves of the same names if their arrays differ as a rule says.

        If one side has fused modules or leaves, `parts` names the same one in every pair. `label`
        says in the report what put them together.
        """
        names = [leaf.path[len(parts[0][0].path) :] for leaf in parts[0][0].walk() if leaf.is_leaf]
        for name in names:
            both = [(node.at(name), scope.at(name)) for node, scope in parts]
            found = [(leaf, there) for leaf, there in both if leaf and there and there.leaves]
            # The plan reports what is left over.
            if len(found) == len(parts):
                made = self.link(found, context, label, rule.form)
                self.laid_out.setdefault(rule, []).extend(made)

    def incomplete(self) -> tuple[list[Address], list[Path]]:
        """The leaves of each side that the pieces cover in part, or twice."""
        by_linen: dict[Address, list[Region]] = {}
        by_nnx: dict[Path, list[Region]] = {}
        for piece in self.pieces:
            by_linen.setdefault(piece.linen, []).append(piece.linen_region)
            if piece.nnx is not None:
                by_nnx.setdefault(piece.nnx, []).append(piece.nnx_region)
        linen, nnx = self.linen_values, self.nnx_leaves
        # Nearly every leaf is one piece.
        return (
            [a for a, own in by_linen.items() if own != [WHOLE] and not _covered(linen[a], own)],
            [p for p, own in by_nnx.items() if own != [WHOLE] and not _covered(nnx[p].value, own)],
        )

    def by_target(self, *, to_nnx: bool) -> dict[Any, list[Piece]]:
        """The pieces of each leaf of one side that have a leaf on the other."""
        found: dict[Any, list[Piece]] = {}
        for piece in self.pieces:
            if piece.nnx is not None:
                found.setdefault(piece.nnx if to_nnx else piece.linen, []).append(piece)
        return found

    def is_whole(self, piece: Piece) -> bool:
        """Whether a piece is the whole of both leaves as they are."""
        if piece.nnx is None or piece.axes or piece.linen_region or piece.nnx_region:
            return False
        ours, theirs = self.nnx_leaves[piece.nnx].value, self.linen_values[piece.linen]
        return shape_of(ours) == shape_of(theirs)

    def same_leaves(self) -> Iterator[tuple[NNXNode, LinenNode, str]]:
        """(NNX leaf, Linen leaf, label) of the leaves that are each other as they are."""
        for piece in filter(self.is_whole, self.pieces):
            if scope := self.linen.at(piece.linen[1]):
                yield self.nnx_leaves[piece.nnx], scope, piece.rule

    @property
    def linked(self) -> tuple[set[Address], set[Path | None]]:
        """The leaves of each side that belong to one of the other, also if that does not fit."""
        both = (*self.pieces, *self.mis_shaped)
        return {each.linen for each in both}, {each.nnx for each in both}

    @property
    def zero(self) -> list[Address]:
        """The Linen leaves that NNX has no place for."""
        return list(dict.fromkeys(piece.linen for piece in self.pieces if piece.nnx is None))

    @functools.cached_property
    def linen_values(self) -> dict[Address, Any]:
        """The values of all Linen leaves by address."""
        return {
            (collection, scope.path): leaf.value
            for scope in self.linen.walk()
            for collection, leaf in scope.leaves.items()
        }

    @functools.cached_property
    def nnx_leaves(self) -> dict[Path, NNXNode]:
        """All NNX leaves by path."""
        return {node.path: node for node in self.nnx.walk() if node.is_leaf}


def collection_of(leaf: NNXNode, found: LinenNode) -> str | None:
    """The collection of the Linen leaf at a path that an NNX leaf has, or None."""
    if leaf.collection in found.leaves:
        return leaf.collection
    # A norm, whose leaves have a slash in their names, may be told to use another collection.
    if len(found.leaves) == 1 and ("/" in found.name or not leaf.is_variable):
        return next(iter(found.leaves))
    # A subclass of Param, such as LoRAParam, has no collection of its own in Linen.
    return "params" if leaf.is_param and "params" in found.leaves else None


def label_of(layer: LayerRow | str | None, how: str) -> str:
    """A layer and how it came to be used, for the report."""
    name = layer.name if isinstance(layer, LayerRow) else layer or "name"
    return f"{name}, {how}" if how else name


def _covered(value: Any, regions: list[Region]) -> bool:
    shape = shape_of(value)
    return covers(shape, regions) if shape is not None else len(regions) == 1
