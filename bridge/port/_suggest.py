"""`suggest`: the rules that a plan needs, with what speaks for each of them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from flax import linen as nn
from flax import nnx

from bridge._conversion import linen_leaves
from bridge._types import ModelTree

from . import _order
from ._correspondence import Context, Correspondence, Pairing
from ._disputes import disputes
from ._evidence import ByEvidence
from ._match import correspondence
from ._orders import Orders
from ._plan import Plan, plan, sides_of
from ._reasons import Evidence
from ._refits import refits
from ._rule_text import paths_of, python_text, rules_of, toml_text
from ._trees import LinenNode, NNXNode, linen_nodes, nnx_nodes
from ._uses import unknown

_SHOWN = 120
# A pair of paths, what speaks for it, and whether `plan` makes it by itself.
_Found: TypeAlias = tuple[tuple[str, str], Evidence, bool]


class Proposal(NamedTuple):
    """Rules with one kind of evidence.

    Attributes:
      rules: NNX paths by expressions for Linen paths, as `plan` takes them.
      evidence: the reason for them.
      is_settled: whether `plan` does the same without the rules.
      is_weak: whether the only evidence is a shape, or an order that a program need not keep: that
        of automatic numbers, or of calls that could be in any order.
      is_disputed: whether the names contradict the order of calls.
    """

    rules: dict[str, str]
    evidence: str
    is_settled: bool = False
    is_weak: bool = False
    is_disputed: bool = False


class Suggestions:
    """Proposed rules for `plan`; read them before you accept them.

    Made by `suggest`. Pass `rules` to `plan` to apply them.

    Attributes:
      proposals: the rules by their evidence: first those that names contradict, then the settled
        ones.
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
            pairs = [f"    {python_text(a)}: {python_text(b)}," for a, b in rules.items()]
            lines += pairs[:_SHOWN]
            if len(pairs) > _SHOWN:
                lines.append(f"    # ... {len(pairs) - _SHOWN} more; to_toml() has all of them")
        lines.append("}")
        state = "clean" if self.plan.ok else "not clean"
        lines.append(f"# with these rules the plan is {state}: {self.plan.summary}")
        return "\n".join(_capped(lines))

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
            kind = "settled" if each.is_settled else "weak" if each.is_weak else "proposed"
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
    These proposals come first.

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
    variables, model, _ = sides_of(source, target)
    own = dict(rules or {})
    scopes, _ = linen_nodes(linen_leaves.from_variables(variables))
    nodes, _ = nnx_nodes(model)
    orders = _orders(variables, model, inputs, kwargs, linen)
    found, undecided = _matched(scopes, nodes, own, orders)
    told = [(pair, each.evidence, False) for each in refits(found, orders) if (pair := each.texts)]
    laid_out = _proposals(told, [pair for pair, *_ in told], scopes)
    if laid_out:
        given = {**own, **{k: v for each in laid_out for k, v in each.rules.items()}}
        found, undecided = _matched(scopes, nodes, given, orders)
    renamed = [pairing for pairing in found.pairings if pairing.how != "by name"]
    known = [paths_of(pairing) for pairing in (*renamed, *undecided)]
    proposals = (*laid_out, *_proposals([*_of_pairings(renamed, undecided)], known, scopes))
    table = {**own, **{k: v for each in proposals for k, v in each.rules.items()}}
    made = plan(source, target, table)
    return Suggestions(tuple(sorted(proposals, key=_rank)), made, own)


def _matched(
    scopes: LinenNode, nodes: NNXNode, rules: Mapping[str, str], orders: Orders
) -> tuple[Correspondence, list[Pairing]]:
    """What belongs together by rules and evidence, and the pairs that stay in doubt."""
    evidence = ByEvidence(orders)
    found, decided = correspondence(scopes, nodes, rules, evidence), list[Pairing]()
    known: set[tuple[NNXNode, Context]] = set()
    while True:
        against = disputes(found, orders)
        new = [each for each in against.decided if (each.nnx, each.context) not in known]
        if not new:
            return found, against.undecided
        decided += new
        known |= {(each.nnx, each.context) for each in new}
        found = correspondence(scopes, nodes, rules, evidence, decided)


def _orders(
    variables: Mapping[str, Any],
    model: Any,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    linen: nn.Module | Callable[..., Any] | None,
) -> Orders:
    traces_nnx = bool(inputs or kwargs) and isinstance(model, nnx.Module)
    return Orders(
        _order.of_nnx(model, inputs, kwargs) if traces_nnx else unknown(),
        _order.of_linen(linen, variables, inputs) if linen and inputs else unknown(),
    )


def _proposals(
    found: Sequence[_Found], known: Sequence[tuple[str, str]], scopes: LinenNode
) -> tuple[Proposal, ...]:
    """Pairs of paths as rules, by what speaks for them."""
    every = [scope.text for scope in scopes.walk()]
    groups: dict[tuple[Evidence, bool], list[tuple[str, str]]] = {}
    for pair, evidence, is_settled in found:
        groups.setdefault((evidence, is_settled), []).append(pair)
    return tuple(
        Proposal(rules_of(pairs, known, every), evidence.text, is_settled, *evidence[1:])
        for (evidence, is_settled), pairs in groups.items()
    )


def _of_pairings(renamed: list[Pairing], undecided: list[Pairing]) -> Iterator[_Found]:
    """The pairings, those that are disputed or that `plan` makes by itself first."""
    doubted = {id(pairing.nnx) for pairing in undecided}
    needed = [each for each in _needed(renamed) if id(each.nnx) not in doubted]
    for pairing in (*undecided, *needed):
        yield paths_of(pairing), pairing.evidence, pairing.how != "as proposed"


def _rank(proposal: Proposal) -> tuple[bool, ...]:
    return not proposal.is_disputed, not proposal.is_settled, proposal.is_weak


def _needed(pairings: list[Pairing]) -> list[Pairing]:
    """Without the only ones of their structure, but for those around something with a rule.

    A module is no longer compared as a whole once a rule names something inside it.
    """
    kept = [pairing for pairing in pairings if pairing.how != "by structure"]
    around = {
        (pairing.linen.path[:n], pairing.nnx.path[:m])
        for pairing in kept
        for n in range(len(pairing.linen.path))
        for m in range(len(pairing.nnx.path))
    }
    return [
        pairing
        for pairing in pairings
        if pairing.how != "by structure" or (pairing.linen.path, pairing.nnx.path) in around
    ]


def _capped(lines: list[str], most: int = 180) -> list[str]:
    if len(lines) <= most:
        return lines
    left_out = len(lines) - most
    return [*lines[: most - 2], f"    # ... {left_out} more lines; to_toml() has all", *lines[-2:]]
