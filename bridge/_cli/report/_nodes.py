"""The report's model: a tree of modules with their sizes, and how much of it is native NNX."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator


class Kind(enum.StrEnum):
    """What a module is."""

    LINEN = "linen"
    NNX = "nnx"
    WRAPPED_LINEN = "wrapped-linen"
    """A Linen module in a `ToNNX`; the two are one node."""
    WRAPPED_NNX = "wrapped-nnx"
    """An NNX module in a `ToLinen`; the two are one node."""

    @property
    def is_native(self) -> bool:
        """Whether the module is written in NNX."""
        return self in (Kind.NNX, Kind.WRAPPED_NNX)


@dataclasses.dataclass(frozen=True)
class Size:
    """How many parameters, and how many bytes they take."""

    parameters: int = 0
    bytes: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.parameters + other.parameters, self.bytes + other.bytes)


@dataclasses.dataclass(frozen=True)
class Node:
    """One module of a model.

    Attributes:
        path: where it is, as in `nnx.state` and in Linen variables: wrappers add no key.
        cls: its class, the one inside if it is wrapped; None if nothing was seen that tells it.
        kind: what it is.
        own: its parameters without those of its submodules. A shared parameter counts once.
        children: its submodules.
        is_empty: whether it is a `ToNNX` that has no variables and was not seen running.
    """

    path: tuple[str, ...]
    cls: type | None
    kind: Kind
    own: Size
    children: tuple[Node, ...] = ()
    is_empty: bool = False

    @property
    def total(self) -> Size:
        """Its parameters, those of its submodules included."""
        return sum((child.total for child in self.children), self.own)

    @property
    def native(self) -> Size:
        """The part of `total` that NNX modules own."""
        own = self.own if self.kind.is_native else Size()
        return sum((child.native for child in self.children), own)

    @property
    def share(self) -> float:
        """How much of `total` is `native`; 1 without any parameters, as none is left to migrate."""
        total = self.total.parameters
        return self.native.parameters / total if total else 1.0

    def walk(self) -> Iterator[Node]:
        """This module and all below it, each before its submodules."""
        yield self
        for child in self.children:
            yield from child.walk()
