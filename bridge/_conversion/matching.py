"""Checks that variables fit a module, and reports every mismatch at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from bridge._errors import MismatchError, path_text
from bridge._types import flatten_tree

from .neutral import Address


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What a module needs, compared with what the variables hold.

    Attributes:
      missing: addresses that the module needs and the variables lack.
      mis_shaped: addresses of leaves with another shape.
      unknown: addresses that the module does not need.
    """

    missing: tuple[Address, ...]
    mis_shaped: tuple[Address, ...]
    unknown: tuple[Address, ...]
    expected: Mapping[Address, Any]
    found: Mapping[Address, Any]

    @property
    def fits(self) -> bool:
        return not self.missing and not self.mis_shaped

    def moved(self, address_of: Callable[[Address], Address]) -> Comparison:
        """The same with other addresses; `address_of` gives the new address of an old one."""

        def moved(addresses: Iterable[Address]) -> tuple[Address, ...]:
            return tuple(map(address_of, addresses))

        return Comparison(
            moved(self.missing),
            moved(self.mis_shaped),
            moved(self.unknown),
            {address_of(a): leaf for a, leaf in self.expected.items()},
            {address_of(a): leaf for a, leaf in self.found.items()},
        )

    def error(self, where: str) -> MismatchError:
        """The error that lists every problem, the unknown paths too."""
        return MismatchError(
            where,
            [(path_text(*a), shape_text(self.expected[a])) for a in self.missing],
            [
                (path_text(*a), shape_text(self.expected[a]), shape_text(self.found[a]))
                for a in self.mis_shaped
            ],
            self.unknown_paths(),
        )

    def unknown_paths(self) -> list[str]:
        return [path_text(*address) for address in self.unknown]


def compare(expected: Mapping[Address, Any], found: Mapping[Address, Any]) -> Comparison:
    """Compares what a module needs with what there is.

    Both map an address to an array, abstract array or pytree. Only the structure and the shapes are
    compared: as in Linen, a dtype may differ. The differences are in the order of `expected`, then
    of `found`.
    """
    return Comparison(
        missing=tuple(a for a in expected if a not in found),
        mis_shaped=tuple(
            a for a in expected if a in found and not same_shape(expected[a], found[a])
        ),
        unknown=tuple(a for a in found if a not in expected),
        expected=expected,
        found=found,
    )


def same_shape(a: object, b: object) -> bool:
    """Whether two leaves have the same tree structure and the same shapes."""
    shapes = getattr(a, "shape", None), getattr(b, "shape", None)
    if None not in shapes:
        return shapes[0] == shapes[1]
    leaves_a, tree_a = flatten_tree(a)
    leaves_b, tree_b = flatten_tree(b)
    return tree_a == tree_b and all(
        jax.numpy.shape(x) == jax.numpy.shape(y) for x, y in zip(leaves_a, leaves_b, strict=True)
    )


def shape_text(value: object) -> str:
    """Shape and dtype of a leaf, for a message."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{dtype}{list(shape)}"
    leaves = jax.tree.leaves(value)
    return f"{type(value).__name__} of {inputs_text(leaves)}"


def inputs_text(inputs: Iterable[Any]) -> str:
    """Shapes and dtypes of call arguments, for a message."""
    shown = [
        shape_text(x) if hasattr(x, "shape") else type(x).__name__
        for x in jax.tree.leaves(list(inputs))
    ]
    return f"({', '.join(shown)})"
