"""Modules that an NNX model holds at several paths: the weights are at the first of them."""

from __future__ import annotations

from typing import Any

from flax import nnx


def first_paths(model: Any) -> dict[int, str]:
    """The paths of the modules that are held several times, by their ids."""
    first: dict[int, str] = {}
    shared: dict[int, str] = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if id(node) in first:
            shared[id(node)] = first[id(node)]
            return
        first[id(node)] = ".".join(path)
        # NNX takes attributes in this order.
        for name, child in sorted(_children(node), key=lambda each: each[0]):
            walk(child, (*path, str(name)))

    walk(model, ())
    return shared


def _children(node: Any) -> list[tuple[Any, Any]]:
    return [(name, child) for name, child in nnx.iter_children(node) if _is_inner(child)]


def _is_inner(node: Any) -> bool:
    return isinstance(node, nnx.Module | nnx.List | nnx.Dict)


def node_at(model: Any, path: str) -> Any:
    """What is at a dotted path, None if nothing is."""
    node = model
    for name in path.split(".") if path else ():
        try:
            if isinstance(node, nnx.List):
                node = node[int(name)]
            else:
                node = node[name] if isinstance(node, nnx.Dict) else getattr(node, name)
        except (AttributeError, IndexError, KeyError, ValueError):
            return None
    return node
