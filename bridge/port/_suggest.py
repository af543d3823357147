"""`suggest`: the rules that a plan needs, with what speaks for each of them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from flax import linen as nn
from flax import nnx

from bridge._types import ModelTree

from . import _reasons, _traces
from ._correspondence import PLAIN, Correspondence, Pairing
from ._evidence import ByEvidence
from ._match import correspondence
from ._plan import Plan, sides_of
from ._reasons import Evidence
from ._refits import refits
from ._rule_text import paths_of, python_text, rules_of, toml_text
from ._structure import shapes, signature
from ._traces import Traces
from ._trees import LinenNode, NNXNode, outermost

# A pair of paths as rules write them, and what speaks for it.
_Found: TypeAlias = tuple[tuple[str, str], Evidence]


class Proposal(NamedTuple):
    """Rules with one kind of evidence.

    Attributes:
      rules: NNX paths by expressions for Linen paths, as `plan` takes them.
      evidence: the reason for them.
      is_weak: whether the only evidence is a shape, or an order that a program need not keep: that
        of automatic numbers, or of calls that could be in any order.
      is_disputed: whether the names contradict the order of calls.
    """

    rules: dict[str, str]
    evidence: str
    is_weak: bool = False
    is_disputed: bool = False


class Suggestions:
    """Proposed rules for `plan`; read them before you accept them.

    Made by `suggest`. Pass `rules` to `plan` to apply them.

    Attributes:
      proposals: the rules by their evidence, those that names contradict first.
      plan: the plan that the rules make; `plan.ok` says whether they are all that it needs.
    """

    def __init__(self, proposals: tuple[Proposal, ...], made: Plan[Any], own: Mapping[str, str]):
        self.proposals = proposals
        self.plan = made
        self._own = dict(own)

    @property
    def rules(self) -> dict[str, str]:
        """All rules, including those that were passed to `suggest`."""
        found = dict(self._own)
        for proposal in self.proposals:
            found |= proposal.rules
        return found

    def __str__(self) -> str:
        if not self.rules:
            state = "No rules are needed" if self.plan.ok else "No rules can be proposed"
            return f"# {state}: {self.plan.summary}"
        lines = ["rules = {"]
        for heading, rules in self._sections():
            lines += textwrap.wrap(heading, 96, initial_indent="    # ", subsequent_indent="    # ")
            lines += [f"    {python_text(a)}: {python_text(b)}," for a, b in rules.items()]
        lines.append("}")
        state = "clean" if self.plan.ok else "not clean"
        lines.append(f"# with these rules the plan is {state}: {self.plan.summary}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Suggestions {len(self.rules)} rules, {self.plan.summary}>"

    def to_toml(self) -> str:
        """The rules as TOML, as `python -m bridge convert --rules` reads them."""
        return toml_text(self.rules)

    def to_json(self) -> str:
        """The rules and their evidence as JSON.

        Returns:
          An object with `rules`, `ok` (whether the plan with them is clean), and `proposals` with
          the fields of `Proposal`.
        """
        return json.dumps(
            {
                "ok": self.plan.ok,
                "rules": self.rules,
                "proposals": [each._asdict() for each in self.proposals],
            },
            indent=2,
        )

    def _sections(self) -> Iterator[tuple[str, dict[str, str]]]:
        if self._own:
            yield "given", self._own
        for each in self.proposals:
            kind = "weak" if each.is_weak else "proposed"
            if each.is_disputed and each.is_weak:
                kind = "in doubt"
            yield f"{kind}: {each.evidence}", each.rules


def suggest(
    source: ModelTree,
    target: ModelTree,
    *inputs: object,
    linen: nn.Module | Callable[..., Any] | None = None,
    rules: Mapping[str, str] | None = None,
    **kwargs: object,
) -> Suggestions:
    r"""Proposes the rules that `plan` needs, with the evidence for each.

    There are two kinds of evidence: names, with their numbers and words, and the order of calls.
    The order comes from traces of both models, if you pass `inputs` and `linen`. Shapes and layer
    classes limit the candidates. Neither model is run.

    The traces may contradict equal names and numbers, as in a decoder that calls `up_2` first. If
    they leave no choice, the calls decide. Otherwise the names are kept and marked as in doubt.
    These proposals come first. What `plan` matches by itself gets no rule.

    If arrays have the same size but another shape, or several of them make up one, rules that
    reshape, transpose, split or join are proposed, as long as sizes and the order of calls leave
    only one possibility. The transpose of a square matrix is proposed if the traces show it.

    Args:
      source: as for `plan`: Linen variables, or an NNX module.
      target: the other one, abstract or not.
      *inputs: arguments of the NNX model's call, arrays or `jax.ShapeDtypeStruct`s.
      linen: the Linen module, which is traced with the same inputs; or a function of the variables
        and the inputs, for another call: `lambda v, x: net.apply(v, x, train=False)`.
      rules: rules that you know already.
      **kwargs: keyword arguments of the NNX model's call.

    Returns:
      The suggestions: `print` shows them as Python source, `to_toml` as a file for
      `python -m bridge convert --rules`, and `plan(source, target, suggestions.rules)` accepts
      them. If the evidence fits two modules equally, neither gets a rule.

    Raises:
      PortError: a model cannot be traced with these inputs.
      ConversionError: source and target are not one of each kind.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn, nnx
      >>> from bridge import port
      >>> linen = nn.Sequential([nn.Dense(3), nn.Dense(3), nn.Dense(3)])
      >>> variables = linen.init(jax.random.key(0), jnp.ones((1, 3)))
      >>> class Native(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.fc = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
      ...         self.head = nnx.Linear(3, 3, rngs=rngs)
      ...
      ...     def __call__(self, x):
      ...         return self.head(self.fc[1](self.fc[0](x)))
      >>> found = port.suggest(variables, Native(nnx.Rngs(0)), jnp.ones((1, 3)), linen=linen)
      >>> found.rules
      {'layers_0': 'fc.0', 'layers_1': 'fc.1', 'layers_2': 'head'}
      >>> found.proposals[0].evidence
      'the order of calls in both models'
      >>> port.plan(variables, Native(nnx.Rngs(0)), found.rules).ok
      True
    """
    sides = sides_of(source, target)
    scopes, nodes = sides.linen, sides.nnx
    own = dict(rules or {})
    model_is_called = bool(inputs or kwargs) and isinstance(sides.model, nnx.Module)
    traces = Traces(
        _traces.of_nnx(sides.model, inputs, kwargs) if model_is_called else {},
        _traces.of_linen(linen, sides.variables, inputs) if linen and inputs else {},
    )
    evidence = ByEvidence(traces)
    found = correspondence(scopes, nodes, own, evidence)
    told = [(pair, each.evidence) for each in refits(found, traces) if (pair := each.texts)]
    if told:
        given = _with(own, _proposals(told, scopes))
        found = correspondence(scopes, nodes, given, evidence)
    doubted = list(_doubts(found, traces))
    told += [(paths_of(each), each.evidence) for each in doubted]
    sure = {each.nnx_side for each in doubted}
    renamed = [pairing for pairing in found.pairings if pairing.how != "by name"]
    known = [paths_of(pairing) for pairing in renamed]
    proposals = _proposals(told, scopes, known)
    made = correspondence(scopes, nodes, _with(own, proposals))
    # With a rule for a module, a plan finds by itself more of what is inside.
    while needed := _lacking([each for each in renamed if each.nnx_side not in sure], made):
        sure |= {each.nnx_side for each in needed}
        told += [(paths_of(each), each.evidence) for each in needed]
        proposals = _proposals(told, scopes, known)
        made = correspondence(scopes, nodes, _with(own, proposals))
    return Suggestions(tuple(sorted(proposals, key=_rank)), Plan(made, sides), own)


def _with(own: Mapping[str, str], proposals: Sequence[Proposal]) -> dict[str, str]:
    """All rules together."""
    return {**own, **{key: value for each in proposals for key, value in each.rules.items()}}


def _proposals(
    found: Sequence[_Found], scopes: LinenNode, known: Sequence[tuple[str, str]] = ()
) -> list[Proposal]:
    """Pairs of paths as rules, by what speaks for them."""
    every = [scope.text for scope in scopes.walk()]
    groups: dict[Evidence, list[tuple[str, str]]] = {}
    for pair, evidence in found:
        groups.setdefault(evidence, []).append(pair)
    known = [*known, *(pair for pair, _ in found)]
    return [
        Proposal(rules_of(pairs, known, every), *evidence) for evidence, pairs in groups.items()
    ]


def _rank(proposal: Proposal) -> tuple[bool, ...]:
    return not proposal.is_disputed, proposal.is_weak


def _doubts(found: Correspondence, traces: Traces) -> Iterator[Pairing]:
    """The pairs that the two models call in another order or use otherwise, with the evidence."""
    if not traces.are_known:
        return
    alike: dict[Hashable, list[Pairing]] = {}
    for pairing in found.pairings:
        if pairing.evidence.is_disputed:
            yield pairing
        key = pairing.linen.parent, pairing.context, _structure(pairing)
        alike.setdefault(key, []).append(pairing)
    for group in alike.values():
        if traces.contradicts([(each.nnx, each.linen) for each in group]):
            for each in group:
                yield each._replace(proposal=each.evidence & _reasons.DIFFERS)
    for node, scope, _ in found.same_leaves():
        if use := _other_use(node, scope, traces):
            evidence = (_reasons.SAME_SHAPE & use)._replace(is_disputed=True)
            yield Pairing(scope, node, PLAIN, "by name", evidence)


def _structure(pairing: Pairing) -> Hashable:
    if pairing.nnx.is_leaf:
        return frozenset(shapes(pairing.nnx, pairing.context))
    return signature(pairing.nnx, pairing.context)


def _other_use(node: NNXNode, scope: LinenNode, traces: Traces) -> Evidence | None:
    """What two models do otherwise with two leaves of one shape, if traces show it."""
    if traces.is_transposed(node, scope):
        return _reasons.TRANSPOSED
    if {traces.runs_backwards(node), traces.runs_backwards(scope)} == {False, True}:
        return _reasons.BACKWARDS
    if traces.is_cut_otherwise(node, scope):
        return _reasons.CUT_OTHERWISE
    return None


def _lacking(pairings: Sequence[Pairing], made: Correspondence) -> list[Pairing]:
    """The outermost pairs that a plan does not make; they are disputed if it makes others."""
    by_nnx = {each.nnx_side: each.linen_side for each in made.pairings}
    by_linen = {linen: nnx for nnx, linen in by_nnx.items()}
    found: list[Pairing] = []
    for each in pairings:
        if by_nnx.get(each.nnx_side) == each.linen_side:
            continue
        is_other = each.nnx_side in by_nnx or each.linen_side in by_linen
        found.append(each._replace(proposal=each.evidence.against_names) if is_other else each)
    outer = outermost(each.nnx for each in found)
    return [each for each in found if each.nnx in outer]
