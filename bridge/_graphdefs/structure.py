"""Lists what a GraphDef holds beyond its leaves: objects, Variables, static attributes, by path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

from bridge._conversion.neutral import Path
from bridge._errors import InvalidModuleError, listed
from bridge._fingerprint import Look
from bridge._flax.graphdefs import ArrayRefDef, NodeDef, NodeRef, Static, VariableDef, decoded
from bridge._flax.nodes import nodes_among, nodes_below
from bridge._flax.objects import PYTREE_NOTES
from bridge._flax.tracers import trace_of
from bridge._flax.variables import REQUIRED_METADATA
from bridge._train_eval import MODE_FIELDS

# Attributes that `bridge.parity` sets while it observes a call; they do not belong to the model.
OBSERVED_PLACE = "_parity_place"
# What NNX notes about an object's attributes follows from the attributes.
_NOTES = PYTREE_NOTES | {OBSERVED_PLACE}


def structure(graphdef: nnx.GraphDef[Any]) -> dict[Path, Any]:
    """What is at each path of a GraphDef in graph mode.

    It leaves out plain dicts that are not empty, because their items are listed; sown values, which
    are output rather than state; and metadata that every Variable has.
    """
    found: dict[Path, Any] = {}
    first: dict[int, Path] = {}
    for path, item in decoded(graphdef):
        told = _told(item, path, first)
        # What is met in a note for the first time may be met again elsewhere.
        if told is not None and _NOTES.isdisjoint(path):
            found[path] = told
    return found


def tracers(graphdef: nnx.GraphDef[Any]) -> dict[Path, list[Any]]:
    """The values of ongoing traces that a GraphDef holds, by the path of what holds them."""
    return _held(graphdef, lambda values: [x for x in values if trace_of(x) is not None])


def check_references(graphdef: nnx.GraphDef[Any], module: object) -> None:
    """Refuses static attributes, and metadata, that refer to a node of their own module.

    A GraphDef keeps them as they are, so a merged module would call the one that it was split from:
    with its parameters, and without gradients. The InvalidModuleError names all such attributes.
    """
    below = nodes_below(module)
    own = {id(node) for node in (*below.objects, *below.variables)}
    if found := _held(graphdef, lambda values: [x for x in nodes_among(values) if id(x) in own]):
        places = ["/".join(map(str, path)) for path in found]
        raise InvalidModuleError(
            f"{listed(places)} of an NNX module that is made again",
            next(iter(found.values()))[0],
            "what does not refer to the module itself",
            "it would stay with the module that it was made in, as natively in nnx.jit: call the"
            " method where it is needed (by its name, if it is chosen by a flag), or make it a"
            " submodule",
        )


def _held(
    graphdef: nnx.GraphDef[Any], wanted: Callable[[list[Any]], list[Any]]
) -> dict[Path, list[Any]]:
    """The objects of a kind that a GraphDef refers to, by the path of what holds them."""
    held = {p: wanted(Look(at, made=True).objects) for p, at in structure(graphdef).items()}
    return {path: values for path, values in held.items() if values}


def differences(a: dict[Path, Any], b: dict[Path, Any]) -> list[Path]:
    """The paths at which two structures differ."""
    return [
        path
        for path in {**a, **b}
        if not (path in a and path in b and is_same_or_equal(a[path], b[path]))
    ]


def differences_but_modes(a: dict[Path, Any], b: dict[Path, Any]) -> list[Path]:
    """The same without the modes, which a call sets for itself: `self.eval()`, for instance."""
    return [p for p in differences(a, b) if not (_is_mode(p, a) and _is_mode(p, b))]


def is_same_or_equal(a: object, b: object) -> bool:
    """Whether two values are the same or equal; what cannot be compared is not."""
    if a is b:
        return True
    try:
        return bool(a == b)
    except Exception:
        # For instance arrays with another shape or value.
        return False


def _is_mode(path: Path, found: dict[Path, Any]) -> bool:
    """Whether nothing but a mode is at a path; one that is not there says nothing else."""
    is_static = path not in found or isinstance(found[path], Static)
    return is_static and bool(path) and path[-1] in MODE_FIELDS


def _told(item: Any, path: Path, first: dict[int, Path]) -> Any:
    """What the structure says of an item of `decoded`, or None; notes where a node is met first."""
    if isinstance(item, VariableDef):
        return _told_of_variable(item, path, first)
    if isinstance(item, ArrayRefDef | NodeRef):
        return "again", first.setdefault(item.index, path)
    if not isinstance(item, NodeDef):
        return item
    first[item.index] = path
    if isinstance(item.type, type) and issubclass(item.type, nnx.Pytree):
        return item.type
    return None if item.type is dict and item.num_attributes else (item.type, item.metadata)


def _told_of_variable(item: Any, path: Path, first: dict[int, Path]) -> Any:
    first[item.index] = path
    if issubclass(item.type, nnx.Intermediate):
        return None
    metadata = {k: v for k, v in item.metadata.items() if k not in REQUIRED_METADATA}
    reference = item.array_refdef
    shared = None if reference is None else first.setdefault(reference.index, path)
    return item.type, metadata, shared
