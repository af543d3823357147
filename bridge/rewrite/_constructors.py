"""The constructor of a slot as NNX has it, and what its calls are given besides."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from flax import linen as nn

from ._caches import CACHE, cache_of
from ._evaluate import UnknownValueError, evaluate
from ._layers import Layer, field_order, layer_of
from ._lift import Lift
from ._plans import ClassPlan, LeftLinenError, Slot
from ._records import Instance, Making

if TYPE_CHECKING:
    from ._method import Method

_IGNORED = ("name", "parent")


class NestedLinenError(LeftLinenError):
    """An argument of another module stays Linen."""


class Constructor:
    """What a slot becomes.

    Args:
        method: the method that it is in.
        slot: the slot.
    """

    def __init__(self, method: Method, slot: Slot) -> None:
        self.method, self.slot = method, slot
        self.node = slot.node
        self.program, self.plan = method.program, method.plan
        classes = {making.cls for making in slot.makings}
        records = method.program.records
        self.lifted = [cls for cls in classes if cls in records.lifted]
        bases = {records.base_of(cls) for cls in classes}
        self.classes = {cls for cls in bases if cls is not None}

    def text(self) -> str:
        """The expression that makes it.

        Raises:
            LeftLinenError: there is none.
        """
        layers = [layer_of(cls) for cls in self.classes]
        plans = [self.program.plan_of(cls) for cls in self.classes]
        try:
            if self.lifted and not self._can_lift([*plans, *layers]):
                return self._wrapped()
            made = None
            if all(plan is not None and plan.reason is None for plan in plans):
                made = self._own([plan for plan in plans if plan is not None])
            elif all(layers):
                made = self._layer([layer for layer in layers if layer is not None])
            if made is not None:
                return self.slot.lift.constructor(made) if self.slot.lift else made
        except NestedLinenError as error:
            if self.slot.outer is not None or self._inner_variables():
                raise
            self.slot.linen = error.reason
            self.method.uses_bridge = True
            return f"bridge.ToNNX({self.method.linen_text(self.node)}, rngs=rngs)"
        if len({cls.__qualname__ for cls in self.classes}) > 1:
            raise LeftLinenError(
                "one expression makes classes that are rewritten and classes that are not",
                self.node,
            )
        return self._wrapped()

    def _can_lift(self, known: list[Any]) -> bool:
        """Whether NNX's transforms do what Linen's do here."""
        if not any(known) or self.slot.outer is not None:
            return False
        try:
            self.slot.lift = Lift(self.method, self.slot)
        except LeftLinenError:
            return False
        return True

    def _inner_variables(self) -> bool:
        """Whether an argument is a local variable that holds a module."""
        return any(s.outer is self.slot and s.variable for s in self.plan.slots.values())

    def _wrapped(self) -> str:
        cls = next(iter(self.classes))
        plan = self.program.plan_of(cls)
        self.slot.lift = None
        reason = f"{cls.__name__} has no counterpart in NNX"
        if plan is not None and plan.reason is None:
            reason = f"{cls.__name__} is made by a lifted transform"
        elif plan is not None:
            reason = f"{cls.__name__} stays Linen"
        if self.slot.outer is not None:
            raise NestedLinenError(reason, self.node)
        self.slot.linen = reason
        inside = self.method.linen_text(self.node)
        self.method.uses_bridge = True
        return f"bridge.ToNNX({inside}, rngs=rngs)"

    def _own(self, plans: list[ClassPlan]) -> str:
        names: list[str] = []
        for plan in plans:
            names += [name for name in plan.sizes if name not in names]
        parts = []
        modes = set().union(*(plan.mode_fields for plan in plans))
        order = [field.name for field in plans[0].fields]
        given = self._positional(next(iter(self.classes)), order)
        for name, node in given:
            if name in modes:
                self._move(name, node)
            else:
                parts.append(("", self.method.init_text(node, self.slot.makings)))
                self._carry(plans, name, node)
        for keyword in self.node.keywords:
            if keyword.arg in _IGNORED:
                continue
            if keyword.arg in modes:
                self._move(keyword.arg or "", keyword.value)
                continue
            text = self.method.init_text(keyword.value, self.slot.makings)
            parts.append((f"{keyword.arg}=" if keyword.arg else "**", text))
            self._carry(plans, keyword.arg or "", keyword.value)
        if modes and any(name in modes for name, _ in given[:-1]):
            raise LeftLinenError("a mode is given by position before other arguments", self.node)
        sizes = [(n, self._size(n, lambda m, n=n: self._own_size(m, n))) for n in names]
        parts += [(f"{name}=", text) for name, text in sizes if text]
        parts.append(("rngs=", "rngs"))
        return f"{self._callee()}({', '.join(a + b for a, b in parts)})"

    def _own_size(self, making: Making, name: str) -> Any:
        plan = self.program.plan_of(self.program.records.base_of(making.cls))
        key = (making.run, making.path or ())
        if plan is None or name not in plan.sizes:
            return None
        return plan.sizes[name].values.get(key)

    def _carry(self, plans: list[ClassPlan], field: str, node: ast.expr) -> None:
        """A partial with a mode is handed on: the mode becomes an argument of the call."""
        modes = self.method.modes_of(node)
        for plan in plans:
            for mode in plan.carried.get(field, ()):
                if mode in modes:
                    self.slot.modes[mode] = modes[mode]

    def _layer(self, layers: list[Layer]) -> str:
        layer, cls = layers[0], next(iter(self.classes))
        if any(each.sizes.keys() != layer.sizes.keys() for each in layers):
            raise LeftLinenError("one expression makes layers of several kinds", self.node)
        given: dict[str, str] = {}
        positional: set[str] = set()
        for name, node in self._positional(cls, field_order(cls)):
            self._argument(layer, name, node, given)
            positional.add(layer.renames.get(name, name))
        for keyword in self.node.keywords:
            if keyword.arg is None:
                raise LeftLinenError("a layer is given ** arguments", self.node)
            self._argument(layer, keyword.arg, keyword.value, given)
        self._check_fields(layer)
        if layer.name == "MultiHeadAttention":
            self.slot.cache = cache_of(self.method, self.slot)
        if layer.name == "Sequential":
            return self._sequential()
        is_partial = self._bound() is not None
        for name in layer.sizes:
            text = self._size(name, lambda m, n=name: self._layer_size(m, n))
            if text:
                given[name] = text
                if not is_partial or self._has_next(layer, name, positional):
                    positional.add(name)
        bound = self._bound()
        for name, text in layer.extra.items():
            if name not in given and name not in (bound.keywords if bound else {}):
                given[name] = text
        if layer.rngs:
            given["rngs"] = "rngs"
        return f"{self._callee()}({_ordered(layer, given, positional)})"

    def _has_next(self, layer: Layer, name: str, positional: set[str]) -> bool:
        following = (
            layer.positional[layer.positional.index(name) + 1 :]
            if (name in layer.positional)
            else ()
        )
        return bool(following) and following[0] in positional

    def _layer_size(self, making: Making, name: str) -> Any:
        layer = layer_of(self.program.records.base_of(making.cls))
        if layer is None or making.path is None:
            return None
        instance = self.program.records.instances.get((making.run, making.path))
        if instance is None:
            instance = Instance(making.run, making.path, type(None), dict(making.made))
        return layer.sizes[name](instance, self.method.variables_at(making))

    def _size(self, name: str, size: Any) -> str:
        records = [(m, size(m)) for m in self.slot.makings]
        if all(value is None for _, value in records):
            if name == "in_kv_features" or name.startswith(CACHE):
                return ""
            raise LeftLinenError(f"nothing tells {name} of {ast.unparse(self.node)}", self.node)
        records = [(m, value) for m, value in records if value is not None]
        if not name.startswith(CACHE) and self.slot.outer is None:
            hint = f"{self.slot.attribute}_{name}".lower()
        else:
            hint = name
        makings, values = zip(*records, strict=True)
        return self.method.solve(makings, values, hint, self.slot.loops, self.node)

    def _argument(self, layer: Layer, name: str, node: ast.expr, given: dict[str, str]) -> None:
        if name in _IGNORED:
            return
        if name in layer.modes and self.method.taint.touches(node):
            self._move(name, node)
            return
        if name in layer.unsupported:
            if isinstance(node, ast.Constant) and node.value is None:
                return
            raise LeftLinenError(f"nnx.{layer.name} has no {name}", self.node)
        given[layer.renames.get(name, name)] = self.method.init_text(node, self.slot.makings)

    def _move(self, name: str, node: ast.expr) -> None:
        """A mode moves from the constructor to the calls."""
        self.slot.modes[name] = self.method.call_text(node)

    def _check_fields(self, layer: Layer) -> None:
        for making in self.slot.makings:
            fields = making.made
            if layer.name == "GroupNorm" and fields.get("axis_name"):
                raise LeftLinenError("a norm over a named axis", self.node)
        bound = self._bound()
        for name in layer.unsupported if bound else ():
            if bound is not None and bound.keywords.get(name) is not None:
                raise LeftLinenError(f"nnx.{layer.name} has no {name}", self.node)
        modes = self.method.modes_of(self.node.func)
        field = self.node.func.attr if isinstance(self.node.func, ast.Attribute) else ""
        for mode in layer.modes:
            if mode in modes:
                self.slot.modes.setdefault(mode, modes[mode])
            elif field in self.plan.carried and mode in self.plan.carried[field]:
                self.slot.modes.setdefault(mode, mode)

    def _sequential(self) -> str:
        argument = self.node.args[0] if self.node.args else self.node.keywords[0].value
        if isinstance(argument, ast.List | ast.Tuple):
            texts = [self.method.init_text(each, self.slot.makings) for each in argument.elts]
            return f"{self._callee()}({', '.join(texts)})"
        return f"{self._callee()}(*{self.method.init_text(argument, self.slot.makings)})"

    def _callee(self) -> str:
        if self.slot.lift is not None:
            return self.slot.lift.cls
        return self.method.init_text(self.node.func, self.slot.makings)

    def _bound(self) -> functools.partial[Any] | None:
        """The partial that is called, None if it is a class."""
        making = self.slot.makings[0]
        space = {**self.method.namespace, **making.env}
        try:
            found = evaluate(self.node.func, space, making.fields)
        except UnknownValueError:
            return None
        return found if isinstance(found, functools.partial) else None

    def _positional(self, cls: type, order: list[str]) -> list[tuple[str, ast.expr]]:
        if any(isinstance(each, ast.Starred) for each in self.node.args):
            raise LeftLinenError("a constructor is given * arguments", self.node)
        if not issubclass(cls, nn.Module):
            raise LeftLinenError("not a module", self.node)
        bound = self._bound()
        skipped = len(bound.args) if bound is not None else 0
        return list(zip(order[skipped:], self.node.args, strict=False))


def _ordered(layer: Layer, given: Mapping[str, str], positional: Iterable[str]) -> str:
    """The arguments, by position as far as they were and NNX takes them so."""
    by_position, rest = set(positional), dict(given)
    parts = []
    for name in layer.positional:
        if name not in rest or name not in by_position:
            break
        parts.append(rest.pop(name))
    first = [name for name in layer.positional if name in rest]
    others = [name for name in rest if name not in first and name != "rngs"]
    tail = ["rngs"] if "rngs" in rest else []
    return ", ".join([*parts, *(f"{name}={rest[name]}" for name in (*first, *others, *tail))])
