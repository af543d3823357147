"""The layers of `nn.Sequential`, which NNX takes one by one."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ._plans import Slot

if TYPE_CHECKING:
    from ._method import Method


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
