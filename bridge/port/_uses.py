"""Finds the equation of a jaxpr that uses each of its inputs first, and what that one needs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core as jex_core

from ._jaxprs import inner_jaxprs

# Primitives that pass a leaf on without computing.
_PASSING = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "copy_p",
        "reshape",
        "sharding_constraint",
        "squeeze",
        "stop_gradient",
        "transpose",
    }
)


# Marks values that depend on the inputs.
INPUT = 1


def bit_of(rank: int) -> int:
    """The bit of a rank in `Order.after`."""
    return 2 << rank


class Uses:
    """Reads the uses of leaves from a jaxpr, in the order of its equations.

    Attributes:
      ranks: see `Order`.
      after: see `Order`.
    """

    def __init__(self) -> None:
        self.ranks: dict[Any, int] = {}
        self.after: dict[Any, int] = {}
        self._keys: list[Any] = []
        self._met = 0

    def read(self, jaxpr: Any, held: dict[Any, Any], needs: dict[Any, int]) -> None:
        """Reads a jaxpr.

        Args:
          jaxpr: the jaxpr.
          held: the keys of the leaves that its inputs are; what passes one on is added.
          needs: the ranks, as bits, of the leaves that its inputs were computed with; its results
            are added.
        """
        for equation in jaxpr.eqns:
            names = [held[v] if _is_in(v, held) else None for v in equation.invars]
            before = [needs[v] if _is_in(v, needs) else 0 for v in equation.invars]
            inner = list(inner_jaxprs(equation))
            if inner:
                results = self._read_inner(equation, inner, names, before, held)
            else:
                present = [name for name in names if name is not None]
                if equation.primitive.name in _PASSING and len(set(present)) == 1:
                    held |= dict.fromkeys(equation.outvars, present[0])
                    continue
                results = [self._use(present, before)] * len(equation.outvars)
            needs |= {v: bits for v, bits in zip(equation.outvars, results, strict=True) if bits}

    def _use(self, keys: Sequence[Any], before: Sequence[int]) -> int:
        """Notes that an equation computes with leaves; returns what its result needs."""
        prepared = _union([bits for bits in before if not bits & INPUT])
        moving = _union([bits for bits in before if bits & INPUT])
        for key in keys:
            if key not in self.ranks:
                self.ranks[key] = len(self._keys)
                self._keys.append(key)
            prepared |= bit_of(self.ranks[key])
        # A computation on parameters alone, such as concatenated gates, is not a call yet.
        new = prepared & ~self._met if moving else 0
        self._met |= new
        while new:
            rank = new.bit_length() - 2
            self.after[self._keys[rank]] = moving
            new -= bit_of(rank)
        return prepared | moving

    def _read_inner(
        self,
        equation: Any,
        inner: Sequence[tuple[Any, int]],
        names: Sequence[Any],
        before: Sequence[int],
        held: dict[Any, Any],
    ) -> list[int]:
        """Reads what an equation runs; returns what each of its results needs."""
        results, is_known = [0] * len(equation.outvars), False
        for sub, offset in inner:
            # An equation's last operands are the inputs of what it runs.
            inputs = sub.invars[len(sub.invars) - len(names[offset:]) :]
            known = zip(inputs, names[offset:], strict=False)
            below = {v: name for v, name in known if name is not None}
            known_needs = dict(zip(inputs, before[offset:], strict=False))
            self.read(sub, below, known_needs)
            # A cast may be an equation of its own jaxpr.
            passed = zip(equation.outvars, sub.outvars, strict=False)
            held |= {out: below[v] for out, v in passed if _is_in(v, below)}
            if len(sub.outvars) == len(results):
                is_known = True
                # The operands that choose a branch affect every result.
                chosen = _union(before[:offset])
                for n, v in enumerate(sub.outvars):
                    results[n] |= chosen | (known_needs[v] if _is_in(v, known_needs) else 0)
        if is_known:
            return results
        return [_union(before)] * len(results)


def _union(many: Sequence[int]) -> int:
    return functools.reduce(operator.or_, many, 0)


def _is_in(operand: Any, held: Mapping[Any, Any]) -> bool:
    return not isinstance(operand, jex_core.Literal) and operand in held
