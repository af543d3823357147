"""Translates Linen's names in a text: `nn.relu`, `nn.LayerNorm` as a value, `nn.Module`."""

from __future__ import annotations

import ast
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from flax import linen as nn
from flax import nnx
from flax.linen import partitioning

from bridge.rewrite.syntax._source import FUNCTIONS, Edit, Source, is_free, origins

from ._layers import field_order, layer_of
from ._plans import ClassPlan, Program
from ._refusals import NotRewritableError

_LIFTED = (
    nn.remat,
    partitioning.remat,
    nn.checkpoint,
    nn.scan,
    nn.vmap,
    nn.jit,
    nn.map_variables,
    nn.remat_scan,
)
_RENAMED = {
    "Module": "Module",
    "with_partitioning": "with_partitioning",
    "with_logical_partitioning": "with_partitioning",
    "make_attention_mask": "make_attention_mask",
    "make_causal_mask": "make_causal_mask",
    "combine_masks": "combine_masks",
}


class References:
    """The names of one file.

    `namespace` has the names of the module.
    """

    def __init__(self, program: Program, source: Source, namespace: Mapping[str, Any]) -> None:
        self.program, self.source, self.namespace = program, source, namespace

    def value_of(self, node: ast.AST) -> Any:
        """What a dotted name of the module is, None if it is nothing."""
        match node:
            case ast.Name():
                return self.namespace.get(node.id)
            case ast.Attribute():
                base = self.value_of(node.value)
                return None if base is None else getattr(base, node.attr, None)
        return None

    def edits(self, node: ast.AST) -> Iterator[Edit]:
        """The replacements in a tree.

        Raises NotRewritableError if a layer without a counterpart is named.
        """
        match node:
            case ast.Call() if is_free(node):
                return
            case ast.Call() if self.is_partial(node) and node.args:
                yield from self._partial(node)
                return
            case ast.Call() if self.is_lifted(node):
                if self._is_function(node.args[0]):
                    yield from self.edits(node.args[0])
                    return
                # What a lifted transform is given stays Linen.
                for each in ast.walk(node.args[0]):
                    value = self.value_of(each) if isinstance(each, ast.Name) else None
                    if isinstance(value, type) and self.program.plan_of(value) is not None:
                        yield self.source.edit(each, f"_linen.{each.id}")  # pyright: ignore
                return
            case ast.Attribute() | ast.Name():
                text = self.text(node)
                if text is not None:
                    yield self.source.edit(node, text)
                    return
        for child in ast.iter_child_nodes(node):
            yield from self.edits(child)

    def text(self, node: ast.AST) -> str | None:
        """The new text of a dotted name, None if it stays."""
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            return None
        value = self.value_of(node)
        if isinstance(value, type):
            return self._class(node, value)
        if isinstance(node, ast.Attribute) and self.value_of(node.value) is nn:
            return self._function(node.attr, value)
        return None

    def _class(self, node: ast.AST, cls: type) -> str | None:
        plan = self.program.plan_of(cls)
        if plan is not None:
            if plan.refusal is not None and plan.source is self.source:
                return f"_linen.{cls.__name__}"
            return None
        if cls in (nn.Module, nn.RNNCellBase):
            return f"nnx.{cls.__name__}"
        layer = layer_of(cls)
        if layer is not None:
            return f"nnx.{layer.name}"
        if (
            issubclass(cls, nn.Module)
            and cls.__module__ == self.namespace.get("__name__")
            and isinstance(node, ast.Name)
        ):
            return f"_linen.{node.id}"
        return None

    def _function(self, name: str, value: Any) -> str | None:
        if name == "initializers" and isinstance(value, types.ModuleType):
            return "nnx.initializers"
        if name in _RENAMED:
            return f"nnx.{_RENAMED[name]}"
        if value is not None and getattr(nnx, name, None) is value:
            return f"nnx.{name}"
        if value is not None and getattr(nnx.initializers, name, None) is value:
            return f"nnx.initializers.{name}"
        return None

    def is_lifted(self, node: ast.Call) -> bool:
        """Whether a call is one of a lifted transform."""
        value = self.value_of(node.func)
        return bool(node.args) and any(value is each for each in _LIFTED)

    def _is_function(self, node: ast.expr) -> bool:
        """Whether a transform is given a function, and not a class."""
        if isinstance(node, ast.Call) and node.args:
            known = self.is_lifted(node) or self.is_partial(node)
            return known and self._is_function(node.args[0])
        if isinstance(node, ast.Name | ast.Attribute):
            value = self.value_of(node)
            return callable(value) and not isinstance(value, type)
        return isinstance(node, ast.Lambda)

    def makes_layer(self, function: ast.expr) -> bool:
        """Whether what is called is a class of layers, or a name of one or of a partial of one."""
        own = next((a for a in self.source.ancestors(function) if isinstance(a, FUNCTIONS)), None)
        named = [function, *(origins(own, function) if own is not None else ())]
        for each in named:
            # What is behind a choice and a partial is looked at in its turn.
            if isinstance(each, ast.IfExp):
                named += [each.body, each.orelse]
            elif isinstance(each, ast.Call) and self.is_partial(each):
                named += each.args[:1]
        classes = [self.value_of(each) for each in named]
        return any(isinstance(each, type) and issubclass(each, nn.Module) for each in classes)

    def is_partial(self, node: ast.Call) -> bool:
        """Whether a call makes a `functools.partial`."""
        return self.value_of(node.func) is functools.partial

    def _partial(self, node: ast.Call) -> Iterator[Edit]:
        """`partial(nn.Conv, 3)` is `partial(nnx.Conv, out_features=3)`."""
        cls = self.value_of(node.args[0])
        layer = self.program.layer_of(cls) if isinstance(cls, type) else None
        if layer is None or cls is None:
            for child in ast.iter_child_nodes(node):
                yield from self.edits(child)
            return
        yield from self.edits(node.args[0])
        for name, value in zip(field_order(cls), node.args[1:], strict=False):
            renamed = layer.renames.get(name, name)
            begin = self.source.start(value)
            yield Edit(begin, begin, f"{renamed}=")
            yield from self.edits(value)
        for keyword in node.keywords:
            if keyword.arg in layer.unsupported:
                raise NotRewritableError("no-argument", node, layer=layer.name, name=keyword.arg)
            new = layer.renames.get(keyword.arg or "", keyword.arg)
            if new != keyword.arg:
                begin = self.source.offset(keyword.lineno, keyword.col_offset)
                yield Edit(begin, begin + len(str(keyword.arg)), str(new))
            yield from self.edits(keyword.value)


def references_of(program: Program, plan: ClassPlan) -> References:
    """The names of the file that a class is in."""
    return References(program, plan.source, vars(sys.modules[plan.cls.__module__]))
