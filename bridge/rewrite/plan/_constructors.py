"""The constructor of a slot as NNX has it, and what its calls are given besides."""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bridge.rewrite.observe._records import Instance, Making, below_made
from bridge.rewrite.syntax._evaluate import partial_of
from bridge.rewrite.syntax._source import arguments_of, is_fixed, names_in

from ._caches import cache_of
from ._cells import splits_all
from ._class_checks import check_layer
from ._fixed_modes import fixed_mode
from ._flow import last_of
from ._function_plans import FunctionPlan, bound, called_function
from ._layers import Layer, field_order, has_next, ordered, seen
from ._lift import Lift, may_lift
from ._makers import is_mixed
from ._method import Method
from ._plans import CACHE, ClassPlan, Slot
from ._refusals import LayerNotRewritableError, NotRewritableError, Refusal
from ._rest_arguments import rest_of
from ._sequential import check_keywords, unpacked
from ._stacking import of_functions
from ._variables import variable_text
from ._wrapping import has_variables, is_named_by_others, kept, kept_layer, why_linen

_IGNORED = ("name", "parent")  # A parent is None where a program writes it.


def made_text(method: Method, slot: Slot) -> str:
    """The expression that makes what a slot holds, as the constructor has it.

    Raises NotRewritableError if there is none.
    """
    return (
        Constructor(method, slot).text() if slot.kind == "module" else variable_text(method, slot)
    )


class NestedLinenError(NotRewritableError):
    """An argument of another module stays Linen."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        Exception.__init__(self, str(refusal))


class Constructor:
    """What a slot becomes."""

    def __init__(self, method: Method, slot: Slot) -> None:
        self.method, self.slot = method, slot
        self.node = slot.constructor
        self.program, self.plan = method.program, method.plan
        classes = {making.cls for making in slot.makings}
        records = method.program.records
        self.is_lifted = may_lift(method, slot)
        bases = {records.base_of(cls) for cls in classes}
        self.classes = {cls for cls in bases if cls is not None}
        self._why: Refusal | None = None

    def text(self) -> str:
        """The expression that makes it.

        Raises NotRewritableError if there is none.
        """
        layers = [self.program.layer_of(cls) for cls in self.classes]
        plans = [self.program.plan_of(cls) for cls in self.classes]
        if (function := called_function(self.program, self.slot)) is not None:
            return self._function(function)
        try:
            if self.is_lifted and not self._can_lift([*plans, *layers]):
                return self._wrapped()
            made = None
            if all(layers):
                made = self._layer([layer for layer in layers if layer is not None])
            elif all(plan is not None and plan.refusal is None for plan in plans):
                made = self._own([plan for plan in plans if plan is not None])
            if made is not None:
                made = self.slot.lift.constructor(made) if self.slot.lift else made
                wraps = any(plan is not None and plan.wraps for plan in plans)
                return of_functions(self.method, self.slot, made, wraps=wraps)
        except LayerNotRewritableError as error:
            is_named = isinstance(self.method.references.value_of(self.node.func), type)
            is_lifted = bool(self.is_lifted or self.slot.functions)
            if is_lifted or not is_named or has_variables(self.plan, self.slot):
                raise
            if self.slot.outer is not None:
                raise NestedLinenError(error.refusal) from error
            layer = self.program.layer_of(next(iter(self.classes)))
            return kept_layer(self.method, self.slot, error.refusal, layer)
        except NestedLinenError as error:
            if self.slot.outer is not None or has_variables(self.plan, self.slot):
                raise
            return kept(self.method, self.slot, error.refusal)
        if len({cls.__qualname__ for cls in self.classes}) > 1:
            raise NotRewritableError("partly-rewritten", self.node)
        return self._wrapped()

    def _can_lift(self, known: list[Any]) -> bool:
        """Whether NNX's transforms do what Linen's do here."""
        if not any(known) or self.slot.outer is not None:
            return False
        try:
            self.slot.lift = Lift(self.method, self.slot)
        except NotRewritableError as error:
            self._why = error.refusal
            return False
        return True

    def _wrapped(self) -> str:
        cls = next(iter(self.classes))
        self.slot.lift = None
        plan = self.program.plan_of(cls)
        refusal = self._why or why_linen(plan, cls)
        if self.slot.outer is not None:
            raise NestedLinenError(dataclasses.replace(refusal, line=self.node.lineno))
        if self.slot.functions:
            raise NotRewritableError("transform-of-linen", self.node)
        if is_named_by_others(cls):
            raise NotRewritableError("names-by-layer", self.node, name=cls.__name__)
        return kept(self.method, self.slot, refusal)

    def _own(self, plans: list[ClassPlan]) -> str:
        names = list(dict.fromkeys(name for plan in plans for name in plan.sizes))
        parts = []
        modes = set().union(*(plan.mode_fields for plan in plans))
        read = {name for name in modes if any(plan.reads(name) for plan in plans)}
        brought = self.method.modes_of(self.node.func)
        self.slot.modes |= {name: text for name, text in brought.items() if name in read}
        order = [field.name for field in plans[0].fields if not field.is_named]
        given = self._positional(next(iter(self.classes)), order)
        for name, node in given:
            if name in read:
                self.slot.modes[name] = self.method.call_text(node)
            elif name not in modes:
                parts.append(("", self.method.init_text(node, self.slot.makings)))
                self._carry(plans, name, node)
        for keyword in self.node.keywords:
            if keyword.arg in _IGNORED:
                continue
            if keyword.arg in modes:
                if keyword.arg in read:
                    self.slot.modes[str(keyword.arg)] = self.method.call_text(keyword.value)
                continue
            text = self.method.init_text(keyword.value, self.slot.makings)
            parts.append((f"{keyword.arg}=" if keyword.arg else "**", text))
            self._carry(plans, keyword.arg or "", keyword.value)
        if modes and any(name in modes for name, _ in given[:-1]):
            raise NotRewritableError("mode-position", self.node)
        parts += [(f"{name}=", text) for name, text in self._own_sizes(names)]
        parts.append(("rngs=", "rngs"))
        return f"{self._callee()}({', '.join(a + b for a, b in parts)})"

    def _function(self, plan: FunctionPlan) -> str:
        """What is made in the place of a call of a function that makes layers."""
        slot, method = self.slot, self.method
        if plan.refusal is not None or slot.outer is not None:
            raise NotRewritableError("outside-layer", slot.node)
        given = dict(bound(plan, slot.node))
        positional = set(plan.arguments[: len(slot.node.args)])
        parts = []
        for name in self.program.written[plan.cls].constructed:
            if name not in given:
                positional = set()
                continue
            text = method.init_text(given[name], slot.makings)
            parts.append(text if name in positional else f"{name}={text}")
        rest = [name for name in given if name not in (*plan.arguments, "name")]
        parts += [f"{name}={method.init_text(given[name], slot.makings)}" for name in rest]
        parts += [f"{name}={text}" for name, text in self._own_sizes(plan.sizes)]
        if plan.modes:
            self._function_modes(plan, given)
        name = plan.name_in_file
        if plan.returns_layers and plan.source is not method.source:
            # As it was imported.
            name = method.source.render(slot.node.func)
        elif isinstance(slot.node.func, ast.Attribute) and plan.source is not method.source:
            name = f"{method.source.render(slot.node.func.value)}.{name}"
        text = f"{name}({', '.join([*parts, 'rngs=rngs'])})"
        is_alone = slot.method.name != "setup" and plan.returns_several
        return f"nnx.{plan.returns_several}({text})" if is_alone else text

    def _function_modes(self, plan: FunctionPlan, given: dict[str, ast.expr]) -> None:
        """The modes of the layer that a function returns, as the calls of the layer have them."""
        layers = [(slot, self._layer_of(slot)) for slot in plan.slots.values()]
        texts = {item for slot, _ in layers for item in slot.modes.items()}
        is_plain = all(layer is not None for _, layer in layers)
        if plan.returns_several or len(texts) > len(dict(texts)) or not is_plain:
            raise NotRewritableError("function-given-modes", self.slot.node)
        defaults = {each.arg: default for each, default in arguments_of(plan.function).items()}
        values = {name: given.get(name, defaults.get(name)) for name in plan.modes}
        for mode, text in texts:
            tree = ast.parse(text, mode="eval").body
            if not names_in(tree) <= {name for name, value in values.items() if value is not None}:
                raise NotRewritableError("function-given-modes", self.slot.node)
            self.slot.modes[mode] = self._with_values(tree, values)
        takers = sorted({layer for slot, layer in layers if layer and slot.modes})
        if any(not slot.modes for slot, _ in layers):
            self.slot.takers = " | ".join(f"nnx.{name}" for name in takers)

    def _layer_of(self, slot: Slot) -> str | None:
        """The name of the NNX layer that a slot becomes, None if it is no layer of Flax."""
        layer = self.program.layer_of(self.program.records.base_of(slot.makings[0].cls))
        return None if layer is None or slot.is_wrapped else layer.name

    def _with_values(self, node: ast.expr, values: dict[str, ast.expr | None]) -> str:
        """An expression of a function with what its call gives it."""
        texts = {name: self.method.call_text(v) for name, v in values.items() if v is not None}

        class _Given(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.AST:
                return ast.parse(texts[node.id], mode="eval").body

        return ast.unparse(_Given().visit(copy.deepcopy(node)))

    def _own_sizes(self, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        """The sizes that a class or function of the program is given, those that it needs."""
        for name in names:
            own = functools.partial(self._own_size, name=name)
            if any(own(making) is not None for making in self.slot.makings):
                yield name, self.size(name, own)
            elif (place := self._place(name)) is not None and (
                # No run needed it, as a loop without turns does not.
                text := self.method.kept.given_to(self.slot, place, [])
            ):
                yield name, text

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
            raise NotRewritableError("several-kinds", self.node)
        if any(map(self._makes_in_call, self.slot.makings)):
            raise LayerNotRewritableError("outside-layer", self.node)
        if layer.name == "Sequential":
            check_keywords(self.method, self.slot)
        given: dict[str, str] = {}
        rest, known, positional = "", set[str](), set[str]()
        for name, node in self._positional(cls, field_order(cls)):
            self._argument(layer, name, node, given)
            positional.add(layer.renames.get(name, name))
        for keyword in self.node.keywords:
            if keyword.arg is None:
                text, names = rest_of(self.method, self.slot, cls, layer, keyword)
                rest, known = f"{rest}, **{text}", known | names
                continue
            self._argument(layer, keyword.arg, keyword.value, given)
        if any(layer.renames.get(name, name) not in {*given, *known} for name in layer.needed):
            raise LayerNotRewritableError(
                "lacks-argument", self.node, layer=layer.name, name=layer.needed[0]
            )
        self._check_fields(layers)
        if layer.name == "MultiHeadAttention":
            self.slot.cache = cache_of(self.method, self.slot)
        if layer.name == "Sequential":
            return f"{self._callee()}({unpacked(self.method, self.slot)})"
        is_partial = self._bound() is not None
        for name in layer.sizes:
            text = self.size(name, lambda m, n=name: self._layer_size(m, n))
            if text:
                given[name] = text
                if not is_partial or has_next(layer, name, positional):
                    positional.add(name)
        for name in layer.carried:
            if self._is_carried(name):
                text = self.size(name, lambda m, n=name: self._layer_size(m, n))
                given[layer.renames.get(name, name)] = text
        bound = self._bound()
        for name, text in layer.extra.items():
            if name not in {*given, *known, *(bound.keywords if bound else ())}:
                given[name] = text
        if layer.rngs:
            given["rngs"] = "rngs"
        return f"{self._callee()}({ordered(layer, given, positional)}{rest})"

    def _makes_in_call(self, making: Making) -> bool:
        """Whether a function that a layer calls makes a module in it, as an `attention_fn` may."""
        records = self.program.records
        instance = records.made_by(making)
        return instance is not None and any(
            each.owner is None
            and (each.run, (each.path or ())[:-1]) == (making.run, making.path)
            and any(call.began < each.order < call.ended for call in instance.calls)
            for each in records.makings
        )

    def _layer_size(self, making: Making, name: str) -> Any:
        layer = self.program.layer_of(self.program.records.base_of(making.cls))
        if layer is None or making.path is None:
            return None
        instance = self.program.records.made_by(making)
        if instance is None:
            instance = Instance(making.run, making.path, type(None), dict(making.made))
        size = layer.sizes.get(name) or layer.carried[name]
        return size(seen(instance, below_made(self.program.records, making)))

    def _is_carried(self, name: str) -> bool:
        """Whether a field is not what the variables were made with."""
        sizes = [(m.made.get(name), self._layer_size(m, name)) for m in self.slot.makings]
        return any(size not in (None, field) for field, size in sizes)

    def size(self, name: str, size: Any) -> str:
        """An expression for a size of what is made.

        `name` is the name of the size. `size` gives its value for a making.
        """
        records = [(m, size(m)) for m in self.slot.makings]
        if all(value is None for _, value in records):
            layer = self.program.layer_of(next(iter(self.classes)))
            if name.startswith(CACHE) or (layer is not None and name in layer.optional):
                return ""
            raise LayerNotRewritableError("unknown-size", self.node, name=name)
        records = [(m, value) for m, value in records if value is not None]
        is_only = isinstance(self.plan, FunctionPlan) and self.plan.returns_one
        if not (name.startswith(CACHE) or self.slot.outer or is_only):
            hint = f"{self.slot.attribute}_{name}".lower()
        else:
            hint = name
        makings, values = zip(*records, strict=True)
        argument = self._called_with(name, records)
        if argument is not None and (
            text := self.method.kept.given_to(self.slot, argument, records)
        ):
            return text
        return self.method.solve(makings, values, hint, self.slot.loops, self.slot.node)

    def _place(self, name: str) -> int | None:
        """The place of the argument that a size has its name of, None for another size."""
        plans = [self.program.plan_of(cls) for cls in self.classes]
        names = plans[0].call_arguments if plans and plans[0] is not None else []
        own = name.removesuffix("_features")
        if own in names:
            return names.index(own)
        return 0 if not names or name == "in_features" else None

    def _called_with(self, name: str, records: Sequence[tuple[Making, Any]]) -> int | str | None:
        """The argument of the call that has a size as its last dimension, or None."""
        place = self._place(name)
        if place is None:
            return None
        own = name.removesuffix("_features")
        for making, value in records:
            instance = self.program.records.made_by(making)
            call = next(iter(instance.uses if instance is not None else ()), None)
            if call is None:
                return None
            by_place = len(call.args) > place
            if last_of(call.args[place] if by_place else call.kwargs.get(own)) != value:
                return None
            if not by_place:
                return own
        return place

    def _argument(self, layer: Layer, name: str, node: ast.expr, given: dict[str, str]) -> None:
        if name in _IGNORED:
            return
        if name in layer.modes:
            if self.method.taint.touches(node):
                self.slot.modes[name] = self.method.call_text(node)
                return
            fixed = fixed_mode(self.method, self.slot, node)
            if fixed is not None:
                self.slot.modes[name] = fixed
                return
        if name in layer.dropped and is_fixed(node):
            return
        is_none = isinstance(node, ast.Constant) and node.value is None
        if is_none and (
            name in layer.unsupported or layer.refuses_none(next(iter(self.classes)), name)
        ):
            return
        if name == "split_rngs" and splits_all(self.slot.makings):
            return
        if name in (*layer.unsupported, *layer.dropped):
            raise LayerNotRewritableError("no-argument", self.node, layer=layer.name, name=name)
        given[layer.renames.get(name, name)] = self.method.init_text(node, self.slot.makings)

    def _check_fields(self, layers: Sequence[Layer]) -> None:
        check_layer(layers[0], self.slot, self._bound())
        modes = self.method.modes_of(self.node.func)
        field = self.node.func.attr if isinstance(self.node.func, ast.Attribute) else ""
        brought = set[str]()
        for mode in dict.fromkeys(mode for layer in layers for mode in layer.modes):
            if mode in modes:
                self.slot.modes.setdefault(mode, modes[mode])
                brought.add(mode)
            elif field in self.plan.carried and mode in self.plan.carried[field]:
                self.slot.modes.setdefault(mode, mode)
                brought.add(mode)
        takers = sorted({layer.name for layer in layers if brought.issubset(layer.modes)})
        is_one = all(brought.issubset(layer.modes) for layer in layers)
        if not is_one or is_mixed(self.plan, self.slot.method, self.node.func, brought):
            self.slot.takers = " | ".join(f"nnx.{name}" for name in takers)

    def _callee(self) -> str:
        if self.slot.lift is not None:
            return self.slot.lift.cls
        return self.method.init_text(self.node.func, self.slot.makings)

    def _bound(self) -> functools.partial[Any] | None:
        """The partial that is called, None if it is a class."""
        making = self.slot.makings[0]
        return partial_of(self.node.func, {**self.method.namespace, **making.env}, making.fields)

    def _positional(self, cls: type, order: list[str]) -> list[tuple[str, ast.expr]]:
        if any(isinstance(each, ast.Starred) for each in self.node.args):
            raise LayerNotRewritableError("layer-stars", self.node)
        bound = self._bound()
        skipped = len(bound.args) if bound is not None else 0
        return list(zip(order[skipped:], self.node.args, strict=False))
