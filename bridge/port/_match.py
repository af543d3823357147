"""Finds out what belongs together: rules first, then names, then what can only be one thing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from bridge._conversion.neutral import Path
from bridge._rules.rules import UNCHANGED

from . import _reasons
from ._correspondence import (
    PLAIN,
    Ambiguous,
    Context,
    Correspondence,
    Pairing,
    Stack,
    label_of,
)
from ._evidence import ByEvidence, Proposals
from ._reasons import Evidence
from ._rules import Pair, pairs_of
from ._structure import (
    Place,
    Stacks,
    automatically_numbered,
    by_node,
    either,
    fitted,
    leaf_stacks,
    numbered_pairs,
    only_pairs,
    open_stacks,
    own_classes,
    stack_of_list,
    stack_of_scopes,
)
from ._trees import InCollection, LinenNode, NNXNode, outermost


def correspondence(
    linen: LinenNode,
    nnx: NNXNode,
    rules: Mapping[str, str],
    proposer: ByEvidence | None = None,
) -> Correspondence:
    """What belongs together in two trees.

    With a `proposer`, a chain of calls decides before names do, and evidence decides what names and
    structure do not. Without it, the latter is ambiguous.
    """
    pairs, problems = pairs_of(rules, linen, nnx) if rules else ([], [])
    found = Correspondence(linen, nnx, problems=problems)
    wrong = {problem.rule for problem in problems}
    # A rule settles both of its ends; match the rest without them.
    good = [pair for pair in pairs if pair.rule.linen not in wrong]
    for node, scope, context in [(*each, pair.context) for pair in good for each in pair.parts]:
        found.settled.add(node, scope, context)
    matcher = Matcher(found, proposer)
    # Before the rest: a norm that a rule names also takes the layer beside it.
    for pair in good:
        matcher.by_rule(pair)
    matcher.match(nnx, linen, PLAIN, "")
    return found


class Matcher:
    """Matches what is below two nodes, from the outside in."""

    def __init__(self, found: Correspondence, proposer: ByEvidence | None = None):
        self._found = found
        self._settled = found.settled
        self._proposer = proposer

    @functools.cached_property
    def _classes(self) -> frozenset[str]:
        """The names of the classes in the NNX model that are not Flax's own."""
        return own_classes(self._found.nnx)

    def _pair(self, node: NNXNode, scope: LinenNode, context: Context, how: str) -> None:
        self._settled.add(node, scope, context)
        self.match(node, scope, context, how)

    def _pair_by(self, pairing: Pairing) -> bool:
        """Pairs two nodes if both are free, and notes how it is known."""
        scope, node, context, how, *_ = pairing
        if not (self._settled.is_free(node, context) and self._settled.is_free(scope, context)):
            return False
        self._found.pairings.append(pairing)
        self._pair(node, scope, context, how)
        return True

    def by_rule(self, pair: Pair) -> None:
        """Matches what a rule puts together."""
        how = f"rule {pair.rule.linen!r}"
        if pair.rule.form == UNCHANGED:
            self.match(*pair.parts[0], pair.context, how)
        else:
            label = label_of(pair.rule.form.text, how)
            self._found.link_by_rule(pair.parts, pair.context, pair.rule, label)

    def match(self, node: NNXNode, scope: LinenNode, context: Context, how: str) -> None:
        """Matches what is below two nodes that are the same.

        `how` says in the report how it is known that they are the same.
        """
        layer, free = node.layer, self._settled.is_free
        if node.is_leaf:
            self._found.link([(node, scope)], context, label_of(None, how))
        elif layer is not None and layer.linen_of_path:
            self._found.link_elsewhere(node, scope, layer, context, how)
            # A ToLinen has the cell's variables in NNX's own layout.
            self._by_name(node, scope, context, how, "")
        else:
            if layer is not None and layer.kept_by_path is not None:
                self._norm(node, scope, context, how)
            name = layer.inner if layer is not None else None
            inner = node.children.get(name) if name else None
            if inner and name not in scope.children and free(inner, context):
                self._pair(inner, scope, context, how)
            if self._proposer is not None and node.is_open:
                place = Place(node, scope, context, self._settled, self._classes)
                self._by_calls(place, self._proposer)
            self._by_name(node, scope, context, how, "")
            self._by_structure(node, scope, context)

    def _by_calls(self, place: Place, proposer: ByEvidence) -> None:
        """Pairs what a chain of calls or the structure of all tells, whatever names say."""
        stacks = open_stacks(place, deep=False)
        for node, scope in proposer.certain(by_node(stacks)):
            self._stacked(stacks[node, scope]._replace(proposal=_reasons.CALLS))
        candidates = place.candidates(deep=False)
        of_calls = proposer.certain(candidates) + proposer.certain(proposer.leaf_candidates(place))
        pairs = [(node, scope, _reasons.CALLS) for node, scope in of_calls]
        nodes = {each.core: each for each in place.open_below(place.nnx, deep=False)}
        scopes = {each.core: each for each in place.open_below(place.linen, deep=False)}
        fitting = {scope for own in candidates.values() for scope in own}
        if all(candidates.values()) and fitting == scopes.keys():
            only = only_pairs(candidates)
            named = [(n, s) for n, s in only if nodes[n].name == scopes[s].name]
            pairs += [(*pair, _reasons.STRUCTURE) for pair in only if pair not in named]
        self._pair_all(pairs, place)
        # What has nothing but such a module in it goes with it.
        for node, scope, _ in pairs:
            self._settled.add(nodes.get(node, node), scopes.get(scope, scope), place.context)

    def _pair_all(self, pairs: Proposals, place: Place) -> bool:
        # The norms first: with a norm goes the layer beside it.
        pairs = sorted(pairs, key=lambda pair: not pair[0].is_norm)
        made = [
            self._pair_by(Pairing(scope, node, place.context, "as proposed", evidence))
            for node, scope, evidence in pairs
        ]
        return any(made)

    def _by_name(
        self, node: NNXNode, scope: LinenNode, context: Context, how: str, prefix: str
    ) -> None:
        renames = node.layer.linen_of_name if node.layer is not None else {}
        free, layer = self._settled.is_free, "ToNNX" if node.is_linen else node.layer
        for key, child in node.children.items():
            if not free(child, context):
                continue
            if isinstance(key, InCollection):
                self._found.link([(child, scope)], context, label_of(layer, how))
                continue
            name = prefix + str(key)
            found = scope.children.get(renames.get(str(key), name)) or scope.children.get(name)
            if child.is_leaf:
                if found is not None and found.leaves and free(found, context):
                    told = self._equal_names(node, child, found, context, how)
                    self._found.link([(child, found)], context, label_of(layer, told))
            elif child.is_container:
                self._container(child, scope, name, context, how)
            elif found is None:
                self._stacked_nnx(child, scope, name, context)
            elif (found.children or child.is_shared) and free(found, context):
                told = self._equal_names(node, child, found, context, how)
                self._pair(child, found, context, told)

    def _equal_names(
        self, parent: NNXNode, node: NNXNode, scope: LinenNode, context: Context, how: str
    ) -> str:
        """Notes a pair of equal names; returns how it is known, for the report."""
        around = scope.parent
        # Names inside Flax's own layers are certain.
        if around is None or not parent.is_open:
            return how
        self._found.pairings.append(Pairing(scope, node, context, "by name"))
        return "by number" if scope.name in around.numbered_names else how

    def _container(
        self, node: NNXNode, scope: LinenNode, name: str, context: Context, how: str
    ) -> None:
        """A list or dict: `layers_0` in Linen, or stacked at `layers`, or `layers/0`."""
        self._by_name(node, scope, context, how, f"{name}_")
        found = scope.children.get(name)
        free = [c for c in node.children.values() if self._settled.is_free(c, context)]
        if found is None or not free or not self._settled.is_free(found, context):
            return
        if any(str(key) in found.children for key in node.children):
            self._pair(node, found, context, how)
        elif context.linen is None and len(free) == len(node.list_items):
            self._stacked(fitted(stack_of_list(node, found, context), self._classes))

    def _stacked_nnx(self, node: NNXNode, scope: LinenNode, name: str, context: Context) -> None:
        """A stacked module; Linen has its layers one by one as `layers_0`, `layers_1` …."""
        found: list[LinenNode] = []
        while next_one := scope.children.get(f"{name}_{len(found)}"):
            if not self._settled.is_free(next_one, context):
                return
            found.append(next_one)
        if found and context.nnx is None:
            self._stacked(fitted(stack_of_scopes(node, found, context), self._classes))

    def _stacked(self, stack: Stack) -> None:
        """Pairs stacked layers if exactly one axis makes all shapes fit, or if evidence does."""
        fits = stack.fitting
        if not fits:
            return
        if self._proposer is not None:
            stack = self._proposer.stack(stack._replace(how="as proposed"))
        elif len(fits) == 1:
            stack = stack._replace(axis=fits[0], how=f"axis {fits[0]}")
        else:
            target = "a rule such as 'blocks.*' or 'blocks.*@1' says which"
            note = f"stacked on axis {either(fits)} fit; {target}"
            self._settled.add(stack.nnx, stack.linen, PLAIN)
            self._found.ambiguous.append(Ambiguous(stack.nnx, (stack.linen,), note))
            return
        self._found.stacks.append(stack)
        for layer in stack.layers:
            self._pair_by(layer)
        self._settled.add(stack.nnx, stack.linen, PLAIN)

    def _norm(self, node: NNXNode, scope: LinenNode, context: Context, how: str) -> None:
        """`SpectralNorm` and `WeightNorm`; Linen may keep their layer beside them."""
        slashed = [name for name in scope.children if "/" in name]
        layer = slashed[0].partition("/")[0] if slashed else "layer_instance"
        beside = scope.parent.children.get(layer) if scope.parent else None
        inner, found = node.children.get("layer_instance"), scope.children.get(layer) or beside
        # The layer's parameters may have other names in Linen, and those are in the norm's names.
        renamed: dict[Path, Path] = {}
        free = self._settled.is_free
        if inner and found and free(inner, context) and free(found, context):
            before = len(self._found.pieces)
            self._pair(inner, found, context, how)
            for piece in self._found.pieces[before:]:
                if piece.nnx is not None:
                    own = piece.nnx[len(inner.path) :]
                    renamed[own] = piece.linen[1][len(found.path) :]
        for path, last, leaf in node.leaves_by_path():
            name = "/".join(map(str, (layer, *renamed.get(path, path), last)))
            if (target := scope.children.get(name)) and target.leaves:
                self._found.link([(leaf, target)], context, label_of(node.layer, how))

    def _by_structure(self, node: NNXNode, scope: LinenNode, context: Context) -> None:
        free = self._settled.is_free
        for each in (node, scope):
            if not any(free(leaf, context) for leaf in each.walk() if leaf.is_leaf):
                return
        place = Place(node, scope, context, self._settled, self._classes)
        ways = [functools.partial(self._settle, place, deep=deep) for deep in (False, True)]
        if self._proposer is not None:
            ways += self._by_evidence(place, self._proposer)
        # What is known for certain leaves fewer candidates for the rest.
        while any(way() for way in ways):
            pass
        known = [each.nnx for each in self._found.ambiguous]
        candidates = place.candidates(deep=True)
        open_ones = [node for node, scopes in candidates.items() if scopes and node not in known]
        for module in outermost(open_ones):
            note = "same structure; a rule says which"
            self._found.ambiguous.append(Ambiguous(module, tuple(candidates[module]), note))

    def _settle(self, place: Place, *, deep: bool) -> bool:
        """Pairs what can only be one thing; returns whether there was any."""
        candidates = place.candidates(deep=deep)
        pairs, how = only_pairs(candidates), "by structure"
        if not pairs:
            pairs, how = numbered_pairs(candidates), "by number"
        # The norms first: with a norm goes the layer beside it.
        pairs.sort(key=lambda pair: not pair[0].is_norm)
        for module, other in pairs:
            self._pair_by(Pairing(other, module, place.context, how))
        stacks = {} if pairs else open_stacks(place)
        for pair in only_pairs(by_node(stacks)):
            if not automatically_numbered(stacks[pair].scopes):
                self._stacked(stacks[pair])
                pairs.append(pair)
        return bool(pairs)

    def _by_evidence(self, place: Place, proposer: ByEvidence) -> list[Callable[[], bool]]:
        """Ways to pair what is left, the surest first. Each returns whether it paired anything."""

        def stacks(only: Evidence, found: Callable[[], Stacks]) -> bool:
            before = len(self._found.pairings)
            for stack in proposer.stacks(place, found(), only):
                if all(self._settled.is_free(each, PLAIN) for each in (stack.nnx, stack.linen)):
                    self._stacked(stack)
            return len(self._found.pairings) > before

        return [
            lambda: stacks(_reasons.ONLY, lambda: open_stacks(place)),
            lambda: self._pair_all(proposer.modules(place, place.candidates(deep=True)), place),
            lambda: self._pair_all(proposer.leaves(place), place),
            lambda: stacks(_reasons.SIZED_STACK, lambda: open_stacks(place, by_size=True)),
            lambda: stacks(_reasons.STACKED_LEAVES, lambda: leaf_stacks(place)),
        ]
