"""The report's model: a tree of modules with their sizes, and how much of it is migrated."""

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

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Node]]:
        """(depth, module) of this module and all below it, each before its submodules."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


@dataclasses.dataclass(frozen=True)
class Migrated:
    """How much of a model is native NNX.

    Attributes:
        native: parameters that NNX modules own, and their bytes.
        total: all parameters.
        native_modules: how many modules are NNX.
        modules: how many modules there are; containers (`nnx.List`, `nnx.Dict`) are none, and a
            wrapper and what it wraps are one.
    """

    native: Size
    total: Size
    native_modules: int
    modules: int

    @classmethod
    def of(cls, root: Node) -> Migrated:
        """The counts of a tree."""
        nodes = [node for _, node in root.walk()]
        native = [node for node in nodes if node.kind.is_native]
        return cls(sum((node.own for node in native), Size()), root.total, len(native), len(nodes))

    @property
    def parameter_share(self) -> float:
        """From 0 to 1; 1 without any parameters, as none is left to migrate."""
        total = self.total.parameters
        return self.native.parameters / total if total else 1.0

    @property
    def module_share(self) -> float:
        """From 0 to 1."""
        return self.native_modules / self.modules
