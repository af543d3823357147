"""In which order two models use their leaves.

A trace tells it without running anything: the first equation of the jaxpr that computes with a
leaf. A cast or a transposition alone is no use, as some models cast all of their parameters first.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from flax import nnx
from jax.extend import core as jex_core

from bridge._conversion import linen_leaves
from bridge._conversion.neutral import Path
from bridge._errors import PortError

from ._trees import value_of


class Order(NamedTuple):
    """In which order a model uses its leaves.

    Attributes:
      ranks: a rank for each leaf that is used.
      after: for each leaf that meets the inputs, the ranks of the leaves, as the bits `bit_of`,
        whose results the first such equation needs.
    """

    ranks: dict[Any, int]
    after: dict[Any, int]


# What passes a leaf on and computes nothing with it.
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


# Tells what depends on the inputs.
_INPUT = 1


def bit_of(rank: int) -> int:
    """The bit of a rank in `Order.after`."""
    return 2 << rank


def of_nnx(model: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Order:
    """The order in which a call of an NNX model uses its Variables.

    Args:
      model: an NNX module, abstract or not; it is not changed.
      inputs: arguments of the call, arrays or shapes.
      kwargs: keyword arguments of the call.

    Raises:
      PortError: the call fails.
    """
    graphdef, state = nnx.split(model, graph=True)
    flat = list(nnx.to_flat_state(state))

    def call(values: Sequence[Any], *arguments: Any) -> Any:
        pairs = zip(flat, values, strict=True)
        new = [(path, leaf.replace(value)) for (path, leaf), value in pairs]
        made = nnx.merge(graphdef, nnx.from_flat_state(new))(*arguments, **kwargs)
        return [leaf for leaf in jax.tree.leaves(made) if isinstance(leaf, jax.Array)]

    values = [_abstract(value_of(leaf)) for _, leaf in flat]
    return _first_uses("NNX", call, [path for path, _ in flat], values, inputs)


def of_linen(
    module: nn.Module | Callable[..., Any], variables: Mapping[str, Any], inputs: Sequence[Any]
) -> Order:
    """The order in which `apply` of a Linen model uses its variables.

    Args:
      module: the module, or a function of the variables and the inputs that applies it.
      variables: its variables, abstract or not.
      inputs: arguments of the call, arrays or shapes.

    Raises:
      PortError: the call fails.
    """
    neutral = linen_leaves.from_variables(variables)
    static = {"nnx": variables["nnx"]} if "nnx" in variables else {}
    # What has no arrays is no argument of a trace.
    moving = {address: leaf for address, leaf in neutral.items() if hasattr(leaf.value, "shape")}

    def call(values: Sequence[Any], *arguments: Any) -> Any:
        filled = dict(neutral)
        for (address, leaf), value in zip(moving.items(), values, strict=True):
            filled[address] = leaf._replace(value=value)
        built = {**linen_leaves.to_variables(filled), **static}
        if not isinstance(module, nn.Module):
            return module(built, *arguments)
        # Every stream that is not given is drawn from `params`.
        rngs = {"params": jax.random.key(0)}
        return module.apply(built, *arguments, rngs=rngs, mutable=True)[0]

    values = [_abstract(leaf.value) for leaf in moving.values()]
    return _first_uses("Linen", call, list(moving), values, inputs)


def as_given(variables: Mapping[str, Any]) -> Order:
    """The order in which `init` made variables, empty if they are sorted.

    An `init` without `jax.jit` leaves each scope's variables in the order in which they were made.
    After a `jax.jit`, or in a restored checkpoint, names are sorted and tell nothing.
    """
    addresses = list(linen_leaves.from_variables(variables))
    if addresses == sorted(addresses, key=lambda a: (a[0], tuple(map(str, a[1])))):
        return Order({}, {})
    return Order({address: rank for rank, address in enumerate(addresses)}, {})


def as_declared(model: Any) -> Order:
    """The order in which constructors set the attributes that lead to each Variable."""
    ranked: list[tuple[tuple[int, ...], Path]] = []
    items = dict(nnx.iter_graph(model, graph=True)) if isinstance(model, nnx.Pytree) else {}
    positions: dict[Path, dict[str, int]] = {
        path: {str(name): rank for rank, name in enumerate(vars(item))}
        for path, item in items.items()
        if isinstance(item, nnx.Pytree)
    }
    for path, item in items.items():
        if isinstance(item, nnx.Variable):
            steps = (
                key if isinstance(key, int) else positions.get(path[:n], {}).get(str(key), 0)
                for n, key in enumerate(path)
            )
            ranked.append((tuple(steps), path))
    in_order = sorted(ranked, key=lambda each: each[0])
    return Order({path: rank for rank, (_, path) in enumerate(in_order)}, {})


def _abstract(value: Any) -> Any:
    return jax.ShapeDtypeStruct(value.shape, value.dtype) if hasattr(value, "shape") else value


def _first_uses(
    which: str,
    call: Callable[..., Any],
    keys: Sequence[Any],
    values: Sequence[Any],
    inputs: Sequence[Any],
) -> Order:
    try:
        jaxpr = jax.make_jaxpr(call)(values, *inputs).jaxpr
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        raise PortError(
            f"the {which} model cannot be traced with these inputs",
            [f"{type(error).__name__}: {text}"],
            "Give the inputs of its __call__, or none; a Linen call with other arguments is"
            " linen=lambda variables, x: module.apply(variables, x, train=False).",
        ) from error
    leaves = [key for key, value in zip(keys, values, strict=True) for _ in jax.tree.leaves(value)]
    uses = _Uses()
    given = dict.fromkeys(jaxpr.invars[len(leaves) :], _INPUT)
    uses.read(jaxpr, dict(zip(jaxpr.invars, leaves, strict=False)), given)
    return Order(uses.ranks, uses.after)


class _Uses:
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
            inner = list(_inner(equation))
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
        prepared = _union([bits for bits in before if not bits & _INPUT])
        moving = _union([bits for bits in before if bits & _INPUT])
        for key in keys:
            if key not in self.ranks:
                self.ranks[key] = len(self._keys)
                self._keys.append(key)
            prepared |= bit_of(self.ranks[key])
        # What is computed of parameters alone, such as gates put together, is no call yet.
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
                # What chooses among branches has a part in every result.
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


def _inner(equation: Any) -> Iterator[tuple[Any, int]]:
    """(jaxpr, operands that are not its inputs) of what an equation runs."""
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            sub = getattr(each, "jaxpr", each)
            if isinstance(sub, jex_core.Jaxpr):
                yield sub, max(len(equation.invars) - len(sub.invars), 0)
