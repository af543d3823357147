"""Reads from traces of both models in which order they use their leaves, and along which axes.

A trace runs nothing. A leaf is used in the first equation of the jaxpr that computes with it. A
cast or a transposition alone is no use, as some models cast all of their parameters first.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from flax import linen as nn
from flax import nnx
from jax.extend import core as jex_core

from bridge._conversion import linen_leaves
from bridge._conversion.arrays import shape_of
from bridge._conversion.collections import STATIC
from bridge._conversion.neutral import Address, Path
from bridge._errors import PortError

from ._correspondence import Stack
from ._trees import AnyNode, LinenNode, N, NNXNode, value_of

Pairs: TypeAlias = list[tuple[NNXNode, LinenNode]]

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


@dataclasses.dataclass(eq=False)
class Use:
    """What a trace shows of a leaf.

    Attributes:
      bit: one bit, above those of the leaves that are used earlier; 0 if it is not used.
      needs: the bits of the leaves with results that the first equation needs in which the leaf
        meets the inputs.
      layers: the axis that a scan goes over, None if no scan takes the leaf apart.
      is_backwards: whether that scan begins with the last layer.
      summed: the axes over which its first product of matrices sums, None if there is none.
      product: the sizes of the axes into which the last one of its product is taken apart.
      cuts: the indices of that last axis at which it is first cut into parts.
    """

    bit: int = 0
    needs: int = 0
    layers: int | None = None
    is_backwards: bool = False
    summed: frozenset[int] | None = None
    product: tuple[int, ...] = ()
    cuts: frozenset[int] = frozenset()


class Traces(NamedTuple):
    """How the two models use their leaves, by path and by address; empty without a trace."""

    nnx: Mapping[Any, Use]
    linen: Mapping[Any, Use]

    @property
    def are_known(self) -> bool:
        """Whether both models were traced."""
        return bool(self.nnx and self.linen)

    def told(self, pairs: Pairs) -> list[bool]:
        """Of each pair, whether the results that calls use of each other's leave no other one.

        Calls that use no results of each other could be in any order, so theirs tells nothing.
        """
        ours, theirs = self._both_before(pairs)
        places = _places(ours)
        return [ours == theirs and places.count(place) == 1 for place in places]

    def chain(self, nodes: Sequence[NNXNode], scopes: Sequence[LinenNode]) -> Pairs | None:
        """The only pairs for which both traces show the same calls; None if there are several."""
        ours = dict(zip(_places(self._before(nodes)), nodes, strict=True))
        theirs = dict(zip(_places(self._before(scopes)), scopes, strict=True))
        if not len(nodes) == len(ours) == len(scopes) or ours.keys() != theirs.keys():
            return None
        pairs = [(ours[place], theirs[place]) for place in sorted(ours, reverse=True)]
        return pairs if all(self.told(pairs)) else None

    def contradicts(self, pairs: Pairs) -> bool:
        """Whether one model needs a result of one pair for another, and the other the reverse."""
        ours, theirs = self._both_before(pairs)
        every = range(len(pairs))
        return any(ours[a][b] and theirs[b][a] for a in every for b in every)

    def in_order(self, items: Sequence[N]) -> list[N] | None:
        """Items in the order of their first uses; None if one of them is not used."""
        first = {item: min((u.bit for u in self._uses(item) if u.bit), default=0) for item in items}
        return sorted(items, key=lambda item: first[item]) if all(first.values()) else None

    def axis(self, stack: Stack) -> tuple[int, str] | None:
        """(the axis on which a scan takes a stack apart, the library that shows it)."""
        for item, library in ((stack.linen, "Linen"), (stack.nnx, "NNX")):
            found = {use.layers for use in self._uses(item)}
            if len(found) > 1 and None not in found:
                ranks = [len(shape_of(value) or ()) for value in item.below.values()]
                uses = zip(self._uses(item), ranks, strict=True)
                found = {(use.layers or 0) - rank for use, rank in uses}
            if len(found) == 1 and (axis := found.pop()) is not None:
                return axis, library
        return None

    def runs_backwards(self, item: AnyNode) -> bool | None:
        """Whether a scan takes the last layer of stacked leaves first; None if none is seen."""
        found = {use.is_backwards for use in self._uses(item) if use.layers is not None}
        return found.pop() if len(found) == 1 else None

    def layer_numbers(self, stack: Stack) -> list[int] | None:
        """Which layer of a stack each of its items is, in the order of the calls.

        None unless the items are called in a chain and a scan goes over the stack.
        """
        is_backwards = self.runs_backwards(stack.linen if stack.is_list else stack.nnx)
        places = [sum(column) for column in zip(*self._before(stack.items), strict=True)]
        if is_backwards is None or sorted(places) != [*range(len(places))]:
            return None
        return [len(places) - 1 - place if is_backwards else place for place in places]

    def is_transposed(self, node: NNXNode, scope: LinenNode) -> bool | None:
        """Whether the models sum over different axes of a leaf; None if no trace tells it."""
        ours, theirs = self.along_axes(node), self.along_axes(scope)
        if ours is None or theirs is None:
            return None
        return [use == "sum" for use in ours] != [use == "sum" for use in theirs]

    def is_cut_otherwise(self, node: NNXNode, scope: LinenNode) -> bool:
        """Whether the models take a product of a leaf apart at indices that exclude each other."""
        ours, *_ = (use.cuts for use in self._uses(node))
        return any(not (ours <= use.cuts or use.cuts <= ours) for use in self._uses(scope))

    def along_axes(self, leaf: AnyNode) -> tuple[str, ...] | None:
        """What a model does along each axis of a leaf; None if no trace shows a product of it."""
        for use, value in zip(self._uses(leaf), leaf.below.values(), strict=True):
            if use.summed is not None:
                axes = range(len(shape_of(value) or ()))
                summed = ("sum" if axis in use.summed else "" for axis in axes)
                return tuple(
                    "layers" if axis == use.layers else found for axis, found in enumerate(summed)
                )
        return None

    def product(self, leaf: AnyNode) -> tuple[int, ...]:
        """The axes into which a model takes a product of a leaf apart; none without a trace."""
        return next((use.product for use in self._uses(leaf) if use.product), ())

    def _uses(self, item: AnyNode) -> list[Use]:
        """The uses of the leaves at and below a node."""
        uses = self.nnx if isinstance(item, NNXNode) else self.linen
        return [uses.get(key, _UNUSED) for key in item.below]

    def _before(self, items: Sequence[AnyNode]) -> list[list[bool]]:
        """Of each item and each other one, whether only the other uses a result of this one."""
        uses = [self._uses(item) for item in items]
        bits = [(_union([u.bit for u in own]), _union([u.needs for u in own])) for own in uses]
        return [
            [bool(there & own) and not needed & other for other, there in bits]
            for own, needed in bits
        ]

    def _both_before(self, pairs: Pairs) -> tuple[list[list[bool]], list[list[bool]]]:
        nodes, scopes = [node for node, _ in pairs], [scope for _, scope in pairs]
        return self._before(nodes), self._before(scopes)


_UNUSED = Use()


def _places(before: Sequence[Sequence[bool]]) -> list[tuple[int, int]]:
    """The place of each module in the partial order of the calls, from how many are around it."""
    return [(sum(row), sum(other[n] for other in before)) for n, row in enumerate(before)]


def of_nnx(model: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Path, Use]:
    """How a call of an NNX model uses its Variables, by path.

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
    return _traced("NNX", call, [path for path, _ in flat], values, inputs)


def of_linen(
    module: nn.Module | Callable[..., Any], variables: Mapping[str, Any], inputs: Sequence[Any]
) -> dict[Address, Use]:
    """How `apply` of a Linen model uses its variables, by address.

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
    return _traced("Linen", call, list(moving), values, inputs)


def _abstract(value: Any) -> Any:
    return jax.ShapeDtypeStruct(value.shape, value.dtype) if hasattr(value, "shape") else value


def _traced(
    which: str,
    call: Callable[..., Any],
    keys: Sequence[Any],
    values: Sequence[Any],
    inputs: Sequence[Any],
) -> dict[Any, Use]:
    try:
        jaxpr: Any = jax.make_jaxpr(call)(values, *inputs).jaxpr
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        raise PortError(
            f"the {which} model cannot be traced with these inputs",
            [f"{type(error).__name__}: {text}"],
            "Give the inputs of its __call__, or none; a Linen call with other arguments is"
            " linen=lambda variables, x: module.apply(variables, x, train=False).",
        ) from error
    uses = {key: Use() for key in keys}
    leaves = [
        uses[key] for key, value in zip(keys, values, strict=True) for _ in jax.tree.leaves(value)
    ]
    known = {v: _Value(needs=_INPUT) for v in jaxpr.invars[len(leaves) :]}
    for v, use in zip(jaxpr.invars, leaves, strict=False):
        known[v] = _Value(use, tuple(range(v.aval.ndim)))
    _Reader().read(jaxpr, known)
    return uses


class _Value(NamedTuple):
    """What is known of a value in a jaxpr.

    Attributes:
      leaf: the leaf that the value is, in any layout.
      axes: which of the leaf's axes each axis of the value is; None if that is not known.
      product: the leaf that it is a product of, also behind a bias and a cast.
      needs: the bits of the leaves that it was computed with.
    """

    leaf: Use | None = None
    axes: tuple[int, ...] | None = None
    product: Use | None = None
    needs: int = 0


class _Reader:
    """Follows leaves through the equations of a jaxpr, in their order."""

    def __init__(self) -> None:
        self._used: list[Use] = []
        # The bits of the leaves that have met the inputs.
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

    def _multiply(self, equation: Any, operands: Sequence[_Value]) -> Use | None:
        """Notes over which axes a product sums; returns the leaf that its last axes come from."""
        summed, _ = equation.params["dimension_numbers"]
        for each, own in zip(operands, summed, strict=True):
            if each.leaf and each.axes is not None and each.leaf.summed is None:
                each.leaf.summed = frozenset(each.axes[axis] for axis in own)
        second = operands[1]
        return second.leaf if second.axes is not None else None

    def _take_apart(self, equation: Any, leaf: Use) -> None:
        """Notes into what an equation takes the last axis of a leaf's product apart."""
        name, before = equation.primitive.name, equation.invars[0].aval.shape
        rest = len(before) - 1
        if name == "reshape":
            after = equation.outvars[0].aval.shape
            sizes = after[rest:] if before[:rest] == after[:rest] else ()
            if len(sizes) > 1:
                leaf.product = leaf.product or sizes
                block, total = math.prod(sizes[1:]), math.prod(sizes)
                leaf.cuts = leaf.cuts or frozenset(range(block, total, block or 1))
        elif name == "split" and equation.params["axis"] == rest:
            ends = itertools.accumulate(equation.params["sizes"])
            leaf.cuts = leaf.cuts or frozenset(ends) - {before[-1]}

    def _use(self, operands: Sequence[_Value]) -> int:
        """Notes that an equation computes with leaves; returns what its result needs."""
        before = [each.needs for each in operands]
        prepared = _union([bits for bits in before if not bits & _INPUT])
        moving = _union([bits for bits in before if bits & _INPUT])
        for leaf in [each.leaf for each in operands if each.leaf]:
            if not leaf.bit:
                self._used.append(leaf)
                leaf.bit = _INPUT << len(self._used)
            prepared |= leaf.bit
        # A computation on parameters alone, such as concatenated gates, is not a call yet.
        new = prepared & ~self._met if moving else 0
        self._met |= new
        while new:
            leaf = self._used[new.bit_length() - 2]
            leaf.needs = moving
            new -= leaf.bit
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
            if not each.leaf or each.axes is None or given.aval.ndim == got.aval.ndim:
                found.append(each)
                continue
            if each.leaf.layers is None:
                each.leaf.layers, each.leaf.is_backwards = each.axes[0], scan.params["reverse"]
            found.append(each._replace(axes=each.axes[1:]))
        return found


def _passed_on(equation: Any, operands: Sequence[_Value]) -> _Value | None:
    """The leaf that an equation passes on without computing, if it is one."""
    name, held = equation.primitive.name, [each for each in operands if each.leaf]
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
