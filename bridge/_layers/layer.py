"""A row of the table: a layer in both systems."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax.core import meta

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Seen:
    """What was seen of one instance of a Linen layer.

    `input` is the shape of the first array that it was called with, None if there was none.
    `variables` are its variables or their shapes, by collection.
    """

    fields: Mapping[str, Any]
    input: Shape | None
    variables: Mapping[str, Any]

    def shape(self, path: str) -> Shape | None:
        """The shape of the leaf at a path such as `query/kernel`, None if there is none."""
        for variables in self.variables.values():
            found = variables
            for name in path.split("/"):
                found = found.get(name) if isinstance(found, Mapping) else None
            if found is not None and not isinstance(found, Mapping):
                return tuple(meta.unbox(found).shape)
        return None


SizeOf = Callable[[Seen], Any]


class KeptByPath(NamedTuple):
    """A dict in which an NNX layer keeps leaves by their path in the layer that it normalises.

    Linen keeps them in variables with a slash in their name, such as `Dense_0/kernel/u`. `leaf` is
    what Linen calls the leaf, None if that is the last part of the path.
    """

    attribute: str
    leaf: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class LayerRow:
    """What is known of a layer. All but the classes is left out where both sides are alike.

    Paths are those below the layer, with `/`.

    Attributes:
      nnx: the NNX class, None if NNX has no such layer.
      linen: its counterparts in Linen.
      also: names of other Linen classes with leaves of the same names and shapes.
      leaves: NNX's paths of leaves and parts by Linen's. Several Linen paths together mean leaves
        that lie side by side in the NNX leaf, on its last axis.
      zero: paths of Linen leaves that NNX has no place for, and which must be zero.
      computed: NNX Variables that the constructor computes from its arguments, so not weights.
      kept_by_path: where NNX keeps the leaves of a layer that normalises another one, which is in
        the attribute `layer_instance`.
      inner: the NNX attribute with the layer that Linen may hold in place of this one.
      has_parts: whether the layer is given other layers, which may have names of their own.
      parts: names of the submodules that tell a layer without an NNX class, whatever it is called.
      collection: the collection that tells one.
      fields: NNX's names of fields by Linen's.
      other_fields: Linen fields that NNX takes under the same name, but in another way.
      sizes: what the NNX constructor needs besides the fields, each from what was seen.
      sized: Linen fields that the sizes tell.
      carried: Linen fields that the variables know better: a cell takes the size of the carry
        that it is given.
      defaults: arguments that have another default in NNX, with Linen's default as text.
    """

    nnx: type[Any] | None
    linen: tuple[type[Any], ...] = ()
    also: tuple[str, ...] = ()
    leaves: Mapping[str | tuple[str, ...], str] = dataclasses.field(default_factory=dict)
    zero: tuple[str, ...] = ()
    computed: frozenset[str] = frozenset()
    kept_by_path: KeptByPath | None = None
    inner: str | None = None
    has_parts: bool = False
    parts: frozenset[str] = frozenset()
    collection: str | None = None
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    other_fields: tuple[str, ...] = ()
    sizes: Mapping[str, SizeOf] = dataclasses.field(default_factory=dict)
    sized: tuple[str, ...] = ()
    carried: Mapping[str, SizeOf] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def name(self) -> str:
        """The layer's name in reports: Linen's, if Linen has it."""
        return (*self.linen, self.nnx)[0].__name__  # pyright: ignore[reportOptionalMemberAccess]

    @functools.cached_property
    def linen_names(self) -> frozenset[str]:
        """The names of the Linen classes with leaves that fit the NNX class."""
        return frozenset({*(cls.__name__ for cls in self.linen), *self.also})

    @functools.cached_property
    def linen_of_name(self) -> Mapping[str, str]:
        """Linen's name by NNX's of the leaves and parts that are only called something else."""
        return {
            nnx: linen
            for linen, nnx in self.leaves.items()
            if isinstance(linen, str) and _is_name(linen, nnx)
        }

    @functools.cached_property
    def linen_of_path(self) -> Mapping[tuple[str, ...], tuple[tuple[str, ...], ...]]:
        """Linen's paths by NNX's of the leaves that lie elsewhere, or that NNX has as one."""
        return {
            tuple(nnx.split("/")): tuple(
                tuple(path.split("/")) for path in ((linen,) if isinstance(linen, str) else linen)
            )
            for linen, nnx in self.leaves.items()
            if not _is_name(linen, nnx)
        }

    @functools.cached_property
    def linen_of_field(self) -> Mapping[str, str]:
        """Linen's name by NNX's of the fields that are called something else."""
        return {nnx: linen for linen, nnx in self.fields.items()}


def _is_name(linen: str | tuple[str, ...], nnx: str) -> bool:
    return isinstance(linen, str) and "/" not in linen + nnx
