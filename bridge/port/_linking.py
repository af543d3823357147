"""Which part of a Linen leaf is which part of an NNX leaf, of two modules that are the same."""

from __future__ import annotations

from collections.abc import Sequence

from bridge._conversion.arrays import shape_of
from bridge._conversion.matching import same_shape
from bridge._layers.layer import LayerRow
from bridge._rules.pieces import Cut, Piece, Region, layer_cut, pieces_of, without_axis
from bridge._rules.rules import Rule

from ._context import Context, Settled
from ._correspondence import Correspondence, MisShaped
from ._trees import LinenNode, NNXNode


class Linker:
    """Links leaves, and notes those whose shapes do not fit.

    Args:
      found: where the result goes.
      settled: the nodes that are spoken for.
    """

    def __init__(self, found: Correspondence, settled: Settled):
        self._found = found
        self._settled = settled

    def elsewhere(
        self, node: NNXNode, scope: LinenNode, layer: LayerRow, context: Context, how: str
    ) -> None:
        """Links the leaves that lie elsewhere in Linen, such as gates that NNX has side by side."""
        label = label_of(layer, how)
        for path, parts in layer.linen_of_path.items():
            leaf = node.at(path)
            if leaf is None or not self._settled.is_free(leaf, context):
                continue
            shape = shape_of(leaf.value) or (0,)
            size = shape[-1] // len(parts)
            for index, part in enumerate(parts):
                if found := scope.at(part):
                    cut = Cut(len(shape) - 1, index * size, size)
                    self.leaf(leaf, found, context, label, (cut,) if len(parts) > 1 else ())
        for path in layer.zero:
            found = scope.at(tuple(path.split("/")))
            if found and "params" in found.leaves:
                address = "params", found.path
                # Of stacked layers each entry is cut out once, whichever leaf it belongs to.
                region = layer_cut(shape_of(found.leaves["params"].value), context.linen)
                self._found.pieces.append(Piece(address, None, region, rule=label))

    def leaf(
        self, leaf: NNXNode, found: LinenNode, context: Context, label: str, cuts: Region = ()
    ) -> None:
        """Links a leaf with that of its collection at a Linen path; as `link`."""
        self.link(leaf, found, _collection(leaf, found), context, label, cuts)

    def link(
        self,
        leaf: NNXNode,
        found: LinenNode,
        collection: str | None,
        context: Context,
        label: str,
        cuts: Region = (),
    ) -> None:
        """Links two leaves, or parts of them.

        Args:
          leaf: the NNX leaf.
          found: the Linen path.
          collection: which leaf of the path; without one there is nothing to link.
          context: which of several stacked layers they are.
          label: what put the two together, for the report.
          cuts: which part of the NNX leaf.
        """
        if collection is None or collection not in found.leaves:
            return
        self._settled.add(leaf, found, context)
        address = collection, found.path
        theirs, ours = found.leaves[collection].value, leaf.value
        expected = without_axis(shape_of(ours), context.nnx)
        if cuts and expected is not None:
            expected = (*expected[:-1], cuts[0].size)
        actual = without_axis(shape_of(theirs), context.linen)
        if expected is None or actual is None:
            fits = same_shape(theirs, ours)
        else:
            fits = expected == actual
        if not fits:
            note = ""
            if expected and actual and expected == actual[::-1]:
                note = "the transpose would fit"
            self._found.mis_shaped.append(MisShaped(address, leaf.path, label, note))
            return
        linen_region = layer_cut(shape_of(theirs), context.linen)
        nnx_region = layer_cut(shape_of(ours), context.nnx) + cuts
        self._found.pieces.append(Piece(address, leaf.path, linen_region, nnx_region, rule=label))

    def by_rule(
        self, parts: Sequence[tuple[NNXNode, LinenNode]], context: Context, rule: Rule, label: str
    ) -> None:
        """Links leaves of the same names whose arrays differ as a rule says.

        Args:
          parts: the modules or leaves; what one side has fused is the same in all of them.
          context: which of several stacked layers they are.
          rule: the rule.
          label: what put them together, for the report.
        """
        names = [leaf.path[len(parts[0][0].path) :] for leaf in parts[0][0].walk() if leaf.is_leaf]
        for name in names:
            found = [(node.at(name), scope.at(name)) for node, scope in parts]
            pairs = [(ours, theirs) for ours, theirs in found if ours and theirs and theirs.leaves]
            # The plan reports what is left over.
            if len(pairs) == len(parts):
                self._reshaped(pairs, context, rule, label)

    def _reshaped(
        self, pairs: Sequence[tuple[NNXNode, LinenNode]], context: Context, rule: Rule, label: str
    ) -> None:
        addresses = [(_collection(leaf, found) or "", found.path) for leaf, found in pairs]
        values = [found.leaves.get(a[0]) for a, (_, found) in zip(addresses, pairs, strict=True)]
        if None in values:
            return
        theirs = [shape_of(leaf.value) for leaf in values if leaf]
        ours = [shape_of(leaf.value) for leaf, _ in pairs]
        pieces = pieces_of(theirs, ours, context, rule.form)
        for n, (address, (leaf, found)) in enumerate(zip(addresses, pairs, strict=True)):
            self._settled.add(leaf, found, context)
            if isinstance(pieces, str):
                self._found.mis_shaped.append(MisShaped(address, leaf.path, label, pieces))
            else:
                piece = pieces[n]._replace(linen=address, nnx=leaf.path, rule=label)
                self._found.pieces.append(piece)
                self._found.laid_out.setdefault(rule, []).append(piece)


def _collection(leaf: NNXNode, found: LinenNode) -> str | None:
    """The collection of the leaf at a Linen path that an NNX leaf is, None if there is none."""
    if leaf.collection in found.leaves:
        return leaf.collection
    if not leaf.is_variable and len(found.leaves) == 1:
        return next(iter(found.leaves))
    # A subclass of Param, such as LoRAParam, has no collection of its own in Linen.
    return "params" if leaf.is_param else None


def label_of(layer: LayerRow | str | None, how: str) -> str:
    """A layer and how it came to be used, for the report."""
    name = layer.name if isinstance(layer, LayerRow) else layer or "name"
    return f"{name}, {how}" if how else name
