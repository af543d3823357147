"""The layers of `nn.Sequential`, which NNX takes one by one."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Set
from typing import Any

from flax import linen as nn

from ._method import Method
from ._plans import Slot
from ._refusals import LayerNotRewritableError


def unpacked(method: Method, slot: Slot) -> str:
    """The arguments of `nnx.Sequential`: a list that is written out is taken apart."""
    argument = slot.node.args[0] if slot.node.args else slot.node.keywords[0].value
    if not isinstance(argument, ast.List | ast.Tuple):
        return f"*{method.init_text(argument, slot.makings)}"
    texts = []
    for each in argument.elts:
        star, inner = ("*", each.value) if isinstance(each, ast.Starred) else ("", each)
        texts.append(star + method.init_text(inner, slot.makings))
    return ", ".join(texts)


def check_keywords(method: Method, slot: Slot) -> None:
    """Checks that NNX gives the keyword arguments of all calls to the first layer, as Linen does.

    Since Flax 0.12.12 `nnx.Sequential` gives them to every layer that takes them. Raises
    LayerNotRewritableError if another layer takes one.
    """
    for making in slot.makings:
        instance = method.program.records.made_by(making)
        given = {name for call in (instance.calls if instance else ()) for name in call.kwargs}
        for layer in list(making.made["layers"])[1:] if given else ():
            for name in sorted(given & _taken(layer, given)):
                raise LayerNotRewritableError("sequential-keywords", slot.node, name=name)


def _taken(layer: Any, names: Set[str]) -> Set[str]:
    """The keyword arguments, of these names, that a layer takes besides the output before it."""
    try:
        called = layer.__call__ if isinstance(layer, nn.Module) else layer
        taken = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):
        return frozenset()
    first = {each.name for each in taken[:1] if each.kind is each.POSITIONAL_OR_KEYWORD}
    if any(each.kind is each.VAR_KEYWORD for each in taken):
        return names - first
    return {each.name for each in taken if each.kind is not each.POSITIONAL_ONLY} - first
