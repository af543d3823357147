"""Reads from a trace the axes of leaves: of layers, of sums, and of what products are cut into."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.extend import core as jex_core

from ._jaxprs import inner_jaxprs

# A leaf's key, and which of the leaf's axes each axis of the operand is.
_Held = Mapping[Any, tuple[Any, tuple[int, ...]]]
_KEEPING_AXES = frozenset({"convert_element_type", "copy", "copy_p", "sharding_constraint"})
_KEEPING_PRODUCTS = _KEEPING_AXES | {"add", "mul"}


class Axes(NamedTuple):
    """What a trace shows of the axes of leaves.

    Attributes:
      layers: for each leaf that a scan takes apart, the axis on which its layers are stacked.
      backwards: the leaves whose last layer the scan takes first.
      summed: for each leaf in a product of matrices, the axes over which the first one sums.
      products: for each such leaf, the sizes of the axes into which the last one of the product is
        taken apart, if it is.
      cuts: for each such leaf, the indices of the last axis at which it is first cut into parts.
    """

    layers: dict[Any, int]
    backwards: set[Any]
    summed: dict[Any, frozenset[int]]
    products: dict[Any, tuple[int, ...]]
    cuts: dict[Any, frozenset[int]]


def axes_of(jaxpr: Any, leaves: Mapping[Any, Any]) -> Axes:
    """What a jaxpr shows of the axes of leaves.

    A lifted scan transposes the axis to the front, as `lax.scan` goes over the first one.

    Args:
      jaxpr: a jaxpr.
      leaves: keys of leaves by the variables of the jaxpr that they are.
    """
    found = Axes({}, set(), {}, {}, {})
    _read(jaxpr, {v: (key, tuple(range(v.aval.ndim))) for v, key in leaves.items()}, {}, found)
    return found


def _read(jaxpr: Any, held: dict[Any, Any], products: dict[Any, Any], found: Axes) -> None:
    """Reads a jaxpr.

    Args:
      jaxpr: the jaxpr.
      held: the leaves that its inputs are; what passes one on is added.
      products: the keys of the leaves whose products its inputs are, also behind a bias and a cast;
        other such values are added.
      found: where the result goes.
    """
    for equation in jaxpr.eqns:
        known = [_of(operand, held) for operand in equation.invars]
        name = equation.primitive.name
        multiplied = [_of(operand, products) for operand in equation.invars]
        key = next(filter(None, multiplied), None)
        if key is not None and name in _KEEPING_PRODUCTS:
            products[equation.outvars[0]] = key
        elif key is not None and name == "reshape":
            sizes = _last_axis_apart(equation)
            if len(sizes) > 1:
                found.products.setdefault(key, sizes)
                block, total = math.prod(sizes[1:]), math.prod(sizes)
                found.cuts.setdefault(key, frozenset(range(block, total, block or 1)))
        elif key is not None and name == "split":
            *_, last = equation.invars[0].aval.shape
            if equation.params["axis"] == equation.invars[0].aval.ndim - 1:
                ends = itertools.accumulate(equation.params["sizes"])
                found.cuts.setdefault(key, frozenset(ends) - {last})
        if name in _KEEPING_AXES and known[0]:
            held[equation.outvars[0]] = known[0]
        elif name == "transpose" and known[0]:
            key, axes = known[0]
            order = equation.params["permutation"]
            held[equation.outvars[0]] = key, tuple(axes[axis] for axis in order)
        elif name == "dot_general":
            summed, _ = equation.params["dimension_numbers"]
            for each, own in zip(known, summed, strict=True):
                if each:
                    found.summed.setdefault(each[0], frozenset(each[1][axis] for axis in own))
            # Of the second operand are the last axes of the product.
            if known[1]:
                products[equation.outvars[0]] = known[1][0]
        elif name == "scan":
            apart = _taken_apart(equation)
            for key, axes in filter(None, (known[n] for n in apart)):
                if key not in found.layers and equation.params["reverse"]:
                    found.backwards.add(key)
                found.layers.setdefault(key, axes[0])
            # What is passed whole may be taken apart further inside.
            layer = [
                (each[0], each[1][1:]) if each and n in apart else each
                for n, each in enumerate(known)
            ]
            products |= _read_inner(equation, layer, multiplied, found)
        else:
            products |= _read_inner(equation, known, multiplied, found)


def _last_axis_apart(reshape: Any) -> tuple[int, ...]:
    """The axes that a reshape makes of the last one; none if it changes the others."""
    before, after = reshape.invars[0].aval.shape, reshape.outvars[0].aval.shape
    rest = len(before) - 1
    return after[rest:] if before[:rest] == after[:rest] else ()


def _taken_apart(scan: Any) -> set[int]:
    """The positions of the operands that a scan goes over: its body gets them without an axis.

    The equation's parameters count them too, but under names that change with JAX's versions.
    """
    ((body, _),) = inner_jaxprs(scan)
    pairs = zip(scan.invars, body.invars, strict=True)
    return {n for n, (given, got) in enumerate(pairs) if given.aval.ndim > got.aval.ndim}


def _read_inner(
    equation: Any, known: list[Any], multiplied: list[Any], found: Axes
) -> dict[Any, Any]:
    """Reads what an equation runs; returns which of its results are products of leaves."""
    products: dict[Any, Any] = {}
    for sub, offset in inner_jaxprs(equation):
        # An equation's last operands are the inputs of what it runs.
        inputs = sub.invars[len(sub.invars) - len(known[offset:]) :]
        held, inside = (
            {v: each for v, each in zip(inputs, own[offset:], strict=False) if each}
            for own in (known, multiplied)
        )
        _read(sub, held, inside, found)
        if len(sub.outvars) == len(equation.outvars):
            results = zip(equation.outvars, sub.outvars, strict=True)
            products |= {out: key for out, v in results if (key := _of(v, inside))}
    return products


def _of(operand: Any, held: _Held) -> Any:
    return None if isinstance(operand, jex_core.Literal) else held.get(operand)
