"""Defines the errors of conversion and sharding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from registry import BridgeError as BridgeError

from .texts import bullets, shown


class ConversionError(BridgeError, ValueError, TypeError):
    """A conversion got neither Linen variables nor an NNX State or module."""


class InvalidMeshError(BridgeError, TypeError):
    """A mesh was expected, and something else was given.

    Attributes:
      found: the refused object.
    """

    def __init__(self, where: str, found: object, expected: str):
        self.found = found
        super().__init__(
            f"{where} expected {expected}, found {shown(found)}; make one with jax.make_mesh"
        )


class ShardingError(BridgeError, ValueError):
    """Partition specs do not fit the mesh; one error holds every leaf.

    Attributes:
      problems: (path, shape and spec, what is wrong) of each leaf.
      mesh: sizes of the mesh's axes by name.
      is_own: whether the Variables bring this mesh with them, as `mesh=`.
    """

    def __init__(
        self,
        where: str,
        problems: Iterable[tuple[str, str, str]],
        mesh: Mapping[str, int],
        *,
        is_own: bool = False,
    ):
        self.problems: tuple[tuple[str, str, str], ...] = tuple(problems)
        self.mesh: dict[str, int] = dict(mesh)
        self.is_own = is_own
        whose = " that these Variables bring as their own, by mesh=" if is_own else ""
        remedy = (
            "Leave mesh= out for the mesh in force, or name axes of this one"
            if is_own
            else "Map logical names to mesh axes with rules="
        )
        super().__init__(
            f"{where} cannot be sharded over the mesh {self.mesh}{whose}:"
            + bullets(f"{path} {what}: {wrong}" for path, what, wrong in self.problems)
            + f"\n{remedy}, and name no axis for a dimension that cannot be divided."
        )


def mapping_error(found: object, expected: str, remedy: str = "") -> ConversionError:
    """The error for an argument that is not a mapping where one is needed, or another mapping."""
    return ConversionError(f"expected {expected}, found {shown(found)}{remedy and f'; {remedy}'}")
