"""What a GraphDef says beyond its leaves: objects, Variables, static attributes, by path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax import nnx

from bridge._conversion.neutral import Path
from bridge._flax import graphdefs
from bridge._flax.objects import NOTES
from bridge._flax.variables import REQUIRED_METADATA
from bridge._train_eval import MODE_FIELDS

# What `bridge.parity` notes on modules while it observes a call: it is not the model's.
OBSERVED_PLACE = "_parity_place"
# What NNX notes about an object's attributes follows from the attributes.
_NOTES = NOTES | {OBSERVED_PLACE}


def structure(graphdef: nnx.GraphDef[Any]) -> dict[Path, Any]:
    """What is at each path of a GraphDef.

    Left out are plain dicts with something in them, which are there for it, sown values, which
    are output rather than state, and metadata that every Variable has.

    Args:
      graphdef: a GraphDef in graph mode.
    """
    nodes = iter(graphdef.nodes)
    found: dict[Path, Any] = {}
    first = next(nodes, None)
    if first is not None:
        _note(first, (), nodes, iter(graphdef.attributes), {}, found)
    return found


def differences(a: dict[Path, Any], b: dict[Path, Any]) -> list[Path]:
    """The paths at which two structures differ."""
    return [
        path for path in {**a, **b} if not (path in a and path in b and is_equal(a[path], b[path]))
    ]


def differences_but_modes(a: dict[Path, Any], b: dict[Path, Any]) -> list[Path]:
    """The same without the modes, which a call sets for itself: `self.eval()`, for instance."""
    return [p for p in differences(a, b) if not (_is_mode(p, a) and _is_mode(p, b))]


def is_equal(a: Any, b: Any) -> bool:
    """Whether two values are the same or equal; what cannot be compared is not."""
    if a is b:
        return True
    try:
        return bool(a == b)
    except Exception:
        # Arrays, for instance, of which a shape or a value has become another.
        return False


def _is_mode(path: Path, found: dict[Path, Any]) -> bool:
    """Whether nothing but a mode is at a path; one that is not there says nothing else."""
    is_static = isinstance(found.get(path), graphdefs.Static | None)
    return is_static and bool(path) and path[-1] in MODE_FIELDS


def _note(
    node: Any,
    path: Path,
    nodes: Iterator[Any],
    attributes: Iterator[Any],
    first: dict[int, Path],
    found: dict[Path, Any],
) -> None:
    if isinstance(node, graphdefs.VariableDef):
        _note_variable(node, path, first, found)
    elif isinstance(node, graphdefs.NodeDef):
        if node.index is not None:
            first[node.index] = path
        if isinstance(node.type, type) and issubclass(node.type, nnx.Pytree):
            found[path] = node.type
        elif node.type is not dict or not node.num_attributes:
            found[path] = node.type, node.metadata
        for _ in range(node.num_attributes):
            key, kind = next(attributes)
            below = (*path, key)
            if isinstance(kind, graphdefs.NodeAttr):
                skipped = {} if key in _NOTES else found
                _note(next(nodes), below, nodes, attributes, first, skipped)
            elif key not in _NOTES:
                found[below] = kind
    else:
        # A reference, or a node that was met before.
        found[path] = "again", first.setdefault(node.index, path)


def _note_variable(node: Any, path: Path, first: dict[int, Path], found: dict[Path, Any]) -> None:
    first[node.index] = path
    if issubclass(node.type, nnx.Intermediate):
        return
    metadata = {k: v for k, v in node.metadata.items() if k not in REQUIRED_METADATA}
    reference = node.array_refdef
    shared = None if reference is None else first.setdefault(reference.index, path)
    found[path] = node.type, metadata, shared
