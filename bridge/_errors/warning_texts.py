"""Warns once, at the caller's line, about what is not an error."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable

from registry import BridgeError as BridgeError

from .texts import bullets


class BridgeWarning(UserWarning):
    """The program probably does something that its author did not intend."""


def warn(text: str) -> None:
    """Warns at the line of the caller's own program, however deep in Flax and JAX this is."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, BridgeWarning, stacklevel=level)


_INSIDE = ("bridge.", "flax.", "jax.", "contextlib", "functools")


def unknown_paths_text(where: str, paths: Iterable[str], definition: str = "") -> str:
    """The warning about variables that a module does not have.

    `definition` is `kept_definition_text`, if a call may have made them.
    """
    return (
        f"these variables are not in {where} and are ignored:{bullets(paths)}\n{definition}Remove"
        " them, or pass strict=True to make this an error."
    )


def kept_definition_text(collection: str) -> str:
    """What keeps variables that a call makes in a collection, for a warning or an error."""
    return (
        "If a call has made them, the new definition of the module was not kept: add 'nnx' to"
        f" mutable beside {collection!r}, and the next call has them. "
    )


def lost_update_text(where: str, collection: str, is_rng: bool) -> str:
    """The warning, or the error, about an update in a collection that is not mutable."""
    effect = (
        "the next call draws the same key" if is_rng else "the next call starts from the old values"
    )
    return (
        f"{where} updated collection {collection!r}, which is not mutable, so the update is not"
        f" kept and {effect}; pass mutable=[{collection!r}] to the outermost call, to apply or to"
        " the call of a ToNNX"
    )


def untold_change_text(where: str, places: Iterable[str]) -> str:
    """The warning about a change of a module that its variables do not show."""
    return (
        f"a call of {where} changed the module itself at {', '.join(places)} (an attribute, a"
        " submodule, a container, or a parameter's shape or place), and the new definition is not"
        " stored, so the next call starts from the old one; keep it with store_graphdef=True and"
        " apply(…, mutable=['nnx', …]), where … stands for the collections that the call updates"
    )


def lifted_removal_text(where: str, places: Iterable[str]) -> str:
    """The warning about variables that a call removes inside a lifted transform."""
    return (
        f"{where} removed {', '.join(places)} in a lifted transform (nn.jit, nn.remat, nn.scan …),"
        " which merges the variables that come out of it with those that went in, so they stay;"
        " call the method that removes them outside of the transform, or keep the Variable and"
        " reset its value"
    )


def unread_hooks_text(where: str, hooks: Iterable[str]) -> str:
    """The warning about a Variable with hooks that is put into a `ToNNX`."""
    return (
        f"a Variable with {', '.join(hooks)} was put into {where}; Linen reads and writes the value"
        " without the hooks, while variable[...] runs them; put the computed value into a Variable"
        " without hooks, or compute it in the Linen module (nn.map_variables)"
    )


def write_to_copy_text(where: str, what: str) -> str:
    """The error about a write into what was read from a bound `ToLinen`."""
    return (
        f"{where}: {what} was read from a bound ToLinen and belongs to a copy of the module, so a"
        " write into it would reach no variables; write in a call instead,"
        " apply(variables, nnx_method=lambda module: …, mutable=[…]), or change the variables"
        " before they are bound"
    )
