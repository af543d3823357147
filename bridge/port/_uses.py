"""Reads from a trace what a model does with its leaves: the order of their uses, and their axes.

A trace tells it without running anything: the first equation of the jaxpr that computes with a
leaf. A cast or a transposition alone is no use, as some models cast all of their parameters first.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from flax import nnx
from jax.extend import core as jex_core

from bridge._conversion import linen_leaves
from bridge._conversion.collections import STATIC
from bridge._errors import PortError

from ._trees import value_of

_KEEPING_AXES = frozenset({"convert_element_type", "copy", "copy_p", "sharding_constraint"})
# Primitives that pass a leaf on without computing.
_PASSING = _KEEPING_AXES | {
    "broadcast_in_dim",
    "reshape",
    "squeeze",
    "stop_gradient",
    "transpose",
}
_KEEPING_PRODUCTS = _KEEPING_AXES | {"add", "mul"}

# Marks values that depend on the inputs.
_INPUT = 1


def bit_of(rank: int) -> int:
    """The bit of a rank in `Order.after`."""
    return 2 << rank


class Order(NamedTuple):
    """The order in which a model uses its leaves, and what it does along their axes.

    All are empty if no trace tells it.

    Attributes:
      ranks: a rank for each leaf that is used.
      after: for each leaf that meets the inputs, which leaves have results that the first such
      equation needs: their ranks, as the bits `bit_of`.
      layers: for each leaf that a scan takes apart, the axis on which its layers are stacked.
      backwards: the leaves that a scan takes from the last layer on.
      summed: for each leaf in a product of matrices, the axes over which the first one sums.
      products: for each such leaf, the sizes of the axes into which the last one of the product is
        taken apart, if it is.
      cuts: for each such leaf, the indices of the last axis at which it is first cut into parts.
    """

    ranks: dict[Any, int]
    after: dict[Any, int]
    layers: dict[Any, int]
    backwards: set[Any]
    summed: dict[Any, frozenset[int]]
    products: dict[Any, tuple[int, ...]]
    cuts: dict[Any, frozenset[int]]


def unknown() -> Order:
    """What is known without a trace: nothing."""
    return Order({}, {}, {}, set(), {}, {}, {})


def of_nnx(model: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Order:
    """The order in which a call of an NNX model uses its Variables.

    The model may be abstract and is not changed. Inputs are arrays or shapes. Raises PortError if
    the call fails.
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

    `module` may be a function of the variables and the inputs that applies it. Variables may be
    abstract; inputs are arrays or shapes. Raises PortError if the call fails.
    """
    neutral = linen_leaves.from_variables(variables)
    static = {STATIC: variables[STATIC]} if STATIC in variables else {}
    # An input without arrays is not an argument of a trace.
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
    return _order_of(jaxpr, leaves)


def _order_of(jaxpr: Any, leaves: Sequence[Any]) -> Order:
    """What a jaxpr shows of leaves.

    `leaves` has the keys of the leaves that are the first inputs of the jaxpr. Its other inputs are
    the model's.
    """
    reader = _Reader()
    values = {v: _Value(needs=_INPUT) for v in jaxpr.invars[len(leaves) :]}
    for v, key in zip(jaxpr.invars, leaves, strict=False):
        values[v] = _Value(key, tuple(range(v.aval.ndim)))
    reader.read(jaxpr, values)
    return reader.order


class _Value(NamedTuple):
    """What is known of a value in a jaxpr.

    Attributes:
      leaf: the key of the leaf that the value is, in any layout.
      axes: which of the leaf's axes each axis of the value is; None if that is not known.
      product: the key of the leaf that it is a product of, also behind a bias and a cast.
      needs: the ranks, as bits, of the leaves that it was computed with.
    """

    leaf: Any = None
    axes: tuple[int, ...] | None = None
    product: Any = None
    needs: int = 0


class _Reader:
    """Follows leaves through the equations of a jaxpr, in their order."""

    def __init__(self) -> None:
        self.order = unknown()
        self._keys: list[Any] = []
        self._met = 0

    def read(self, jaxpr: Any, values: dict[Any, _Value]) -> None:
        """Reads a jaxpr.

        `values` has what is known of its inputs; what it computes is added.
        """
        for equation in jaxpr.eqns:
            operands = [_of(operand, values) for operand in equation.invars]
            inner = list(_inner_jaxprs(equation))
            if inner:
                results = self._read_inner(equation, inner, operands)
            else:
                result = _passed_on(equation, operands) or self._compute(equation, operands)
                results = [result] * len(equation.outvars)
            values.update(zip(equation.outvars, results, strict=True))

    def _compute(self, equation: Any, operands: Sequence[_Value]) -> _Value:
        """Notes what an equation computes with leaves; returns what is known of its result."""
        name = equation.primitive.name
        product = next((each.product for each in operands if each.product is not None), None)
        if name == "dot_general":
            product = self._multiply(equation, operands)
        elif product is not None and name not in _KEEPING_PRODUCTS:
            self._take_apart(equation, product)
            product = None
        return _Value(product=product, needs=self._use(operands))

    def _multiply(self, equation: Any, operands: Sequence[_Value]) -> Any:
        """Notes over which axes a product sums; returns the leaf that its last axes come from."""
        summed, _ = equation.params["dimension_numbers"]
        for each, own in zip(operands, summed, strict=True):
            if each.axes is not None:
                axes = frozenset(each.axes[axis] for axis in own)
                self.order.summed.setdefault(each.leaf, axes)
        second = operands[1]
        return second.leaf if second.axes is not None else None

    def _take_apart(self, equation: Any, key: Any) -> None:
        """Notes into what an equation takes the last axis of a leaf's product apart."""
        name, before = equation.primitive.name, equation.invars[0].aval.shape
        rest = len(before) - 1
        if name == "reshape":
            after = equation.outvars[0].aval.shape
            sizes = after[rest:] if before[:rest] == after[:rest] else ()
            if len(sizes) > 1:
                self.order.products.setdefault(key, sizes)
                block, total = math.prod(sizes[1:]), math.prod(sizes)
                self.order.cuts.setdefault(key, frozenset(range(block, total, block or 1)))
        elif name == "split" and equation.params["axis"] == rest:
            ends = itertools.accumulate(equation.params["sizes"])
            self.order.cuts.setdefault(key, frozenset(ends) - {before[-1]})

    def _use(self, operands: Sequence[_Value]) -> int:
        """Notes that an equation computes with leaves; returns what its result needs."""
        before = [each.needs for each in operands]
        prepared = _union([bits for bits in before if not bits & _INPUT])
        moving = _union([bits for bits in before if bits & _INPUT])
        ranks = self.order.ranks
        for key in [each.leaf for each in operands if each.leaf is not None]:
            if key not in ranks:
                ranks[key] = len(self._keys)
                self._keys.append(key)
            prepared |= bit_of(ranks[key])
        # A computation on parameters alone, such as concatenated gates, is not a call yet.
        new = prepared & ~self._met if moving else 0
        self._met |= new
        while new:
            rank = new.bit_length() - 2
            self.order.after[self._keys[rank]] = moving
            new -= bit_of(rank)
        return prepared | moving

    def _read_inner(
        self, equation: Any, inner: Sequence[tuple[Any, int]], operands: Sequence[_Value]
    ) -> list[_Value]:
        """Reads what an equation runs; returns what is known of each of its results."""
        if equation.primitive.name == "scan":
            operands = self._layers(equation, inner[0][0], operands)
        results: list[_Value] = []
        for sub, offset in inner:
            # An equation's last operands are the inputs of what it runs.
            inputs = sub.invars[len(sub.invars) - len(operands[offset:]) :]
            values = dict(zip(inputs, operands[offset:], strict=False))
            self.read(sub, values)
            if len(sub.outvars) != len(equation.outvars):
                continue
            # The operands that choose a branch affect every result.
            chosen = _union([each.needs for each in operands[:offset]])
            own = [_of(v, values) for v in sub.outvars]
            own = [each._replace(needs=each.needs | chosen) for each in own]
            # Of several branches, the first one tells which leaf a result is.
            needs = [each.needs | one.needs for each, one in zip(own, results or own, strict=True)]
            results = [one._replace(needs=n) for one, n in zip(results or own, needs, strict=True)]
        if not results:
            needs = _union([each.needs for each in operands])
            return [_Value(needs=needs)] * len(equation.outvars)
        # A scan stacks what its body returns, on an axis that no leaf has.
        return [
            each if len(each.axes or ()) == v.aval.ndim else each._replace(axes=None)
            for v, each in zip(equation.outvars, results, strict=True)
        ]

    def _layers(self, scan: Any, body: Any, operands: Sequence[_Value]) -> list[_Value]:
        """Notes the axes that a scan goes over; returns what its body gets.

        A lifted scan transposes the axis to the front, as `lax.scan` goes over the first one.
        """
        found: list[_Value] = []
        for each, given, got in zip(operands, scan.invars, body.invars, strict=True):
            # What is passed whole may be taken apart further inside. The equation's parameters
            # tell it too, but under names that change with JAX's versions.
            if each.axes is None or given.aval.ndim == got.aval.ndim:
                found.append(each)
                continue
            if each.leaf not in self.order.layers and scan.params["reverse"]:
                self.order.backwards.add(each.leaf)
            self.order.layers.setdefault(each.leaf, each.axes[0])
            found.append(each._replace(axes=each.axes[1:]))
        return found


def _passed_on(equation: Any, operands: Sequence[_Value]) -> _Value | None:
    """The leaf that an equation passes on without computing, if it is one."""
    name, held = equation.primitive.name, [each for each in operands if each.leaf is not None]
    if name not in _PASSING or len({each.leaf for each in held}) != 1:
        return None
    axes = held[0].axes
    if name == "transpose" and axes is not None:
        axes = tuple(axes[axis] for axis in equation.params["permutation"])
    elif name not in _KEEPING_AXES:
        axes = None
    return held[0]._replace(axes=axes)


def _inner_jaxprs(equation: Any) -> Iterator[tuple[Any, int]]:
    """(jaxpr, operands that are not its inputs) of what an equation runs."""
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            sub = getattr(each, "jaxpr", each)
            if isinstance(sub, jex_core.Jaxpr):
                yield sub, max(len(equation.invars) - len(sub.invars), 0)


def _union(many: Sequence[int]) -> int:
    return functools.reduce(operator.or_, many, 0)


def _of(operand: Any, values: Mapping[Any, _Value]) -> _Value:
    return _NOTHING if isinstance(operand, jex_core.Literal) else values.get(operand, _NOTHING)


_NOTHING = _Value()
