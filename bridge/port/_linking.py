"""Links leaves that one side splits, joins or lays out in another way."""

from __future__ import annotations

from collections.abc import Sequence

from bridge._conversion.arrays import shape_of
from bridge._layers.layer import LayerRow
from bridge._rules.pieces import Piece, layer_cut, pieces_of
from bridge._rules.rules import Form, Rule

from ._correspondence import Context, Correspondence, MisShaped, collection_of, label_of
from ._trees import LinenNode, NNXNode


def link_elsewhere(
    found: Correspondence,
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
        if leaf is None or not found.settled.is_free(leaf, context):
            continue
        pairs = [(leaf, there) for part in parts if (there := scope.at(part)) and there.leaves]
        if len(parts) == 1:
            for _, there in pairs:
                found.link(leaf, there, collection_of(leaf, there), context, label)
        elif len(pairs) == len(parts):
            _link_laid_out(found, pairs, context, Form(fused="nnx"), label)
    for path in layer.zero:
        there = scope.at(tuple(path.split("/")))
        if there and "params" in there.leaves:
            # Of stacked layers each entry is cut out once, whichever leaf it belongs to.
            region = layer_cut(shape_of(there.leaves["params"].value), context.linen)
            found.pieces.append(Piece(("params", there.path), None, region, rule=label))


def link_by_rule(
    found: Correspondence,
    parts: Sequence[tuple[NNXNode, LinenNode]],
    context: Context,
    rule: Rule,
    label: str,
) -> None:
    """Links leaves of the same names if their arrays differ as a rule says.

    If one side has fused modules or leaves, `parts` names the same one in every pair. `label` says
    in the report what put them together.
    """
    names = [leaf.path[len(parts[0][0].path) :] for leaf in parts[0][0].walk() if leaf.is_leaf]
    for name in names:
        both = [(node.at(name), scope.at(name)) for node, scope in parts]
        pairs = [(ours, theirs) for ours, theirs in both if ours and theirs and theirs.leaves]
        # The plan reports what is left over.
        if len(pairs) == len(parts):
            own = _link_laid_out(found, pairs, context, rule.form, label)
            found.laid_out.setdefault(rule, []).extend(own)


def _link_laid_out(
    found: Correspondence,
    pairs: Sequence[tuple[NNXNode, LinenNode]],
    context: Context,
    form: Form,
    label: str,
) -> list[Piece]:
    """Links leaves with different arrays; returns the pieces."""
    addresses = [(collection_of(leaf, there) or "", there.path) for leaf, there in pairs]
    values = [there.leaves.get(a[0]) for a, (_, there) in zip(addresses, pairs, strict=True)]
    if None in values:
        return []
    theirs = [shape_of(leaf.value) for leaf in values if leaf]
    ours = [shape_of(leaf.value) for leaf, _ in pairs]
    pieces = pieces_of(theirs, ours, context, form)
    for address, (leaf, there) in zip(addresses, pairs, strict=True):
        found.settled.add(leaf, there, context)
        if isinstance(pieces, str):
            found.mis_shaped.append(MisShaped(address, leaf.path, label, pieces, context))
    if isinstance(pieces, str):
        return []
    made = [
        piece._replace(linen=address, nnx=leaf.path, rule=label)
        for piece, address, (leaf, _) in zip(pieces, addresses, pairs, strict=True)
    ]
    found.pieces += made
    return made
