"""The leaves of a checkpoint of any layout, in the neutral form."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import Any

import jax
from flax import nnx

import registry
from bridge import checkpoint, linen_to_nnx
from bridge._conversion import linen_leaves
from bridge._conversion.neutral import Neutral, Path, nest, place
from bridge._errors import path_text
from bridge.checkpoint import Layout, LeafLayout

# The collection that stands for none, as Linen's own names are identifiers.
NO_COLLECTION = ""
_NUMBER = re.compile(r"([0-9]+)")


@dataclasses.dataclass(frozen=True)
class CheckpointContents:
    """A checkpoint that was read; leaves of an NNX state are in `NO_COLLECTION`."""

    layout: Layout
    leaves: Neutral

    @property
    def has_collections(self) -> bool:
        """Whether it tells collections; an NNX state that orbax wrote does not."""
        return self.layout.layout != "nnx"

    @property
    def left_out(self) -> tuple[str, ...]:
        """What is not a weight: RNG state, and trees beside the model, such as `opt_state`."""
        rngs = self.leaves.keys() - self.without_rngs().leaves.keys()
        return *beside(self.layout), *sorted(path_text(*a).lstrip("/") for a in rngs)

    @property
    def is_linen(self) -> bool:
        """Whether its paths are those of a Linen model."""
        return self.layout.layout == "linen" or self.layout.written_by == "linen"

    def without_rngs(self) -> CheckpointContents:
        """The same without the state of RNG streams."""
        active = registry.current()

        def is_rng(collection: str, path: Path) -> bool:
            if collection != NO_COLLECTION:
                return issubclass(active.type_from_name(collection), nnx.RngState)
            # A stream is a key beside a count.
            stream = ((NO_COLLECTION, (*path[:-1], name)) for name in ("key", "count"))
            return path[-1:] in (("key",), ("count",)) and all(a in self.leaves for a in stream)

        kept = {address: leaf for address, leaf in self.leaves.items() if not is_rng(*address)}
        return dataclasses.replace(self, leaves=kept)

    def tree(self) -> Any:
        """Linen variables, or an NNX State, without the state of RNG streams."""
        leaves = self.without_rngs().leaves
        if self.is_linen:
            return linen_leaves.to_variables(leaves)
        if self.has_collections:
            return linen_to_nnx(linen_leaves.to_variables(leaves))
        by_path = {nnx_keys(path): leaf.value for (_, path), leaf in leaves.items()}
        return nnx.State(nest(by_path))

    def values(self, *, by_collection: bool) -> dict[Path, Any]:
        """The values by path as text, which begins with the collection if `by_collection`.

        Without, they are where NNX has them. Those of a tuple are each under its number.
        """
        leaves = {
            (collection, tuple(map(str, path))): leaf.value
            for (collection, path), leaf in self.leaves.items()
            if not leaf.is_empty
        }
        if by_collection:
            paths = {address: (address[0], *address[1]) for address in leaves}
        elif self.has_collections:
            paths = {address: path for address, (path, _) in place(leaves).items()}
        else:
            paths = {address: address[1] for address in leaves}
        return {
            path if part is leaves[address] else (*path, str(number)): part
            for address, path in paths.items()
            for number, part in enumerate(jax.tree.leaves(leaves[address]))
        }


def read(path: str, within: tuple[str, ...] = (), given: str | None = None) -> CheckpointContents:
    """Reads a checkpoint.

    `within` has the keys of the model in a checkpoint that holds more. `given` is the library that
    its paths come from, `linen` or `nnx`; None to find out.
    """
    layout = checkpoint.layout(path, within=within, layout=given)
    if layout.layout != "nnx":
        variables = checkpoint.restore(path, within=within, layout=given)
        return CheckpointContents(layout, linen_leaves.from_variables(variables))
    # Restoring takes a target where there are no collections; leaves are matched only by path.
    like = {
        leaf.path: jax.ShapeDtypeStruct(leaf.shape or (), leaf.dtype or "float32")
        for leaf in layout.leaves
    }
    target = {"params": nest(like)}
    restored = linen_leaves.from_variables(
        checkpoint.restore(path, target, within=within, layout=given)
    )
    leaves = {p: leaf for (_, p), leaf in restored.items() if not leaf.is_empty}
    new = _without_value(leaves)
    return CheckpointContents(layout, {(NO_COLLECTION, new[p]): v for p, v in leaves.items()})


def listed(layout: Layout) -> list[LeafLayout]:
    """The leaves of a checkpoint in the order of their paths, alike for every format."""
    leaves = layout.leaves
    if layout.layout == "nnx":
        new = _without_value([leaf.path for leaf in leaves])
        leaves = [dataclasses.replace(leaf, path=new[leaf.path]) for leaf in leaves]
    return sorted(leaves, key=lambda leaf: in_order((leaf.collection or "", *leaf.path)))


def beside(layout: Layout) -> tuple[str, ...]:
    """The trees beside the model; a state by path does not show which entries those are."""
    return () if layout.layout == "nnx" else layout.extra


def nnx_keys(path: Path) -> Path:
    """Keys as NNX has them: those of an `nnx.List` are integers."""
    return tuple(int(key) if str(key).isdecimal() else key for key in path)


def text_of(path: Path) -> str:
    """A path as one text."""
    return "/".join(map(str, path))


def in_order(path: Path) -> list[list[str | int]]:
    """A key that sorts `h/10` behind `h/9`, and `layer_10` behind `layer_9`."""
    # Texts and numbers alternate, so that a text never meets a number.
    split = (_NUMBER.split(str(key)) for key in path)
    return [[int(p) if n % 2 else p for n, p in enumerate(pieces)] for pieces in split]


def _without_value(paths: Collection[Path]) -> dict[Path, Path]:
    """The paths of an NNX state; orbax writes each Variable of a State as a mapping."""
    are_mappings = all(len(path) > 1 and path[-1] == "value" for path in paths)
    return {path: path[:-1] if are_mappings else path for path in paths}
