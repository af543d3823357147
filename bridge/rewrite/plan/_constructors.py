"""The constructor of a slot as NNX has it, and what its calls are given besides."""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from flax import linen as nn

from bridge._layers.table import layer_of_linen
from bridge.rewrite.observe._records import Instance, Making, below_made
from bridge.rewrite.syntax._evaluate import partial_of
from bridge.rewrite.syntax._source import (
    Edit,
    arguments_of,
    binding,
    is_fixed,
    is_self,
    names_in,
    only_value,
)

from ._axes import of_functions
from ._caches import cache_of
from ._flow import last_of
from ._function_plans import FunctionPlan, bound, called_function
from ._layers import Layer, field_order, has_next, ordered, seen
from ._lift import Lift, may_lift
from ._makers import is_mixed
from ._method import Method
from ._plans import CACHE, ClassPlan, Slot
from ._refusals import LayerNotRewritableError, NotRewritableError, Refusal, refused
from ._variables import variable_text

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
        row = layer_of_linen(cls)
        if row is not None and row.kept_by_path is not None:
            # Only the module around the layer and the layer in it know the variables' names.
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
        if name == "split_rngs" and _splits_all(self.slot.makings):
            return
        if name in (*layer.unsupported, *layer.dropped):
            raise LayerNotRewritableError("no-argument", self.node, layer=layer.name, name=name)
        given[layer.renames.get(name, name)] = self.method.init_text(node, self.slot.makings)

    def _check_fields(self, layers: Sequence[Layer]) -> None:
        layer, bound = layers[0], self._bound()
        if layer.name == "GroupNorm" and any(m.made.get("axis_name") for m in self.slot.makings):
            raise NotRewritableError("named-axis-norm", self.node)
        for name in layer.unsupported if bound is not None else ():
            if bound is not None and bound.keywords.get(name) is not None:
                raise LayerNotRewritableError("no-argument", self.node, layer=layer.name, name=name)
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


def why_linen(plan: ClassPlan | None, cls: type) -> Refusal:
    """Why a class stays Linen at a place."""
    if plan is None and not cls.__module__.startswith("flax."):
        return refused("class-elsewhere", name=cls.__name__, module=cls.__module__)
    if plan is None:
        return refused("no-counterpart", name=cls.__name__)
    if plan.refusal is None:
        return refused("lifted-class", name=cls.__name__)
    return refused("class-left", name=cls.__name__)


def kept(method: Method, slot: Slot, refusal: Refusal, without: Collection[str] = ()) -> str:
    """The Linen layer in a wrapper.

    `without` has names of arguments that moved to the calls.
    """
    slot.linen, slot.cache = refusal, None
    return f"bridge.ToNNX({method.linen_text(slot.node, without)}, rngs=rngs)"


def has_variables(plan: ClassPlan, slot: Slot) -> bool:
    """Whether an argument of a layer is a local variable that holds a module."""
    return any(each.outer is slot and each.variable for each in plan.slots.values())


def kept_layer(method: Method, slot: Slot, refusal: Refusal, layer: Layer | None) -> str:
    """One of Flax's layers in a wrapper; modes that only the call knows move to its calls."""
    modes = {
        each.arg: each.value
        for each in slot.constructor.keywords
        if layer is not None and each.arg in layer.modes and method.taint.touches(each)
    }
    slot.modes = {str(name): method.call_text(node) for name, node in modes.items()}
    return kept(method, slot, refusal, slot.modes)


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


def rest_of(
    method: Method, slot: Slot, cls: type, layer: Layer, keyword: ast.keyword
) -> tuple[str, set[str]]:
    """What follows `**`, and the names that it gives: they go to the layer as they are.

    `keyword` has the `**` arguments. Raises NotRewritableError if NNX's layer takes them in another
    way, or only the call knows them.
    """
    value, plan = keyword.value, method.plan
    is_own = (
        isinstance(plan, FunctionPlan) and isinstance(value, ast.Name) and value.id == plan.rest
    )
    if not is_own and not _is_read_alone(method, slot, value):
        raise LayerNotRewritableError("layer-rest", slot.node)
    given: set[str] = set()
    refused = {*layer.renames, *layer.modes, *layer.unsupported, *layer.dropped, *layer.sizes}
    if not is_own:
        # The call of a function gives up the name; a dict is given on as it is.
        refused.add("name")
    found = method.values(value, slot.makings)
    if found is None or not all(isinstance(each, Mapping) for each in found):
        raise LayerNotRewritableError("layer-rest", slot.node)
    for arguments in found:
        given |= set(arguments)
        nones = [name for name in arguments if arguments[name] is None]
        refused |= {name for name in nones if layer.refuses_none(cls, name)}
    if given & refused:
        if is_own:
            raise NotRewritableError("layer-rest-differs", slot.node)
        raise LayerNotRewritableError("layer-rest-differs", slot.node)
    if is_own:
        return ast.unparse(value), given
    return method.init_text(value, slot.makings), given


def _is_read_alone(method: Method, slot: Slot, value: ast.expr) -> bool:
    """Whether a dict has one value that a constructor knows: nothing changes it on the way."""
    if method.taint.touches(value):
        return False
    if not isinstance(value, ast.Name):
        return True
    source = method.source
    bound = binding(method.node, value.id)
    if not bound:
        return True
    read = [
        each
        for each in ast.walk(method.node)
        if isinstance(each, ast.Name) and each.id == value.id and isinstance(each.ctx, ast.Load)
    ]
    parents = [source.parents[each] for each in read]
    if any(isinstance(each, ast.Attribute) or _is_written(each) for each in parents):
        raise NotRewritableError("layer-rest-changes", slot.node)
    around = [*source.ancestors(slot.node)]
    # The conditions around both hold for both.
    sets = [each for each in bound if not (isinstance(each, ast.If) and each in around)]
    is_bound_once = len(sets) == 1 and isinstance(sets[0], ast.Assign)
    return is_bound_once and all(isinstance(each, ast.keyword) for each in parents)


def _is_written(node: ast.AST) -> bool:
    """Whether an item is set or deleted."""
    return isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)


def fixed_mode(method: Method, slot: Slot, node: ast.expr) -> str | None:
    """The mode in the calls of a layer.

    `node` is the mode. Returns None if not every call of the layer is seen: then it stays in the
    constructor.
    """
    if slot.outer is not None or slot.lift is not None or slot.is_list:
        return None
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if method.is_setup:
        return _of_setup(method, slot, node)
    return method.call_text(node) if _is_called(method, slot) else None


def _is_called(method: Method, slot: Slot) -> bool:
    """Whether a layer is called where it is made, and used in no other way."""
    parent = method.source.parents[slot.node]
    if isinstance(parent, ast.Call) and parent.func is slot.node:
        return True
    named = [n for n in ast.walk(method.node) if isinstance(n, ast.Name) and n.id == slot.variable]
    loads = [n for n in named if isinstance(n.ctx, ast.Load)]
    return (
        len(named) - len(loads) == 1 and bool(loads) and all(_is_callee(method, n) for n in loads)
    )


def _of_setup(method: Method, slot: Slot, node: ast.expr) -> str | None:
    statement = method.source.statement_of(slot.node)
    if not isinstance(statement, ast.Assign) or statement.value is not slot.node:
        return None
    (target,) = statement.targets if len(statement.targets) == 1 else (None,)
    children = [p for p in method.program.plans.values() if method.plan in p.bases]
    if target is None or not is_self(target) or children:
        return None
    uses = [
        each
        for own in method.plan.methods.values()
        for each in ast.walk(own)
        if is_self(each, target.attr) and each is not target  # pyright: ignore
    ]
    if not uses or not all(_is_callee(method, each) for each in uses):
        return None
    edits = _without_locals(method, node)
    if edits is None:
        return None
    return method.source.render(node, [*method.references.edits(node), *edits])


def _is_callee(method: Method, node: ast.AST) -> bool:
    parent = method.source.parents[node]
    return isinstance(parent, ast.Call) and parent.func is node


def _without_locals(method: Method, node: ast.expr) -> list[Edit] | None:
    """Edits that put `self.config` in the place of a local `config`; None if that is not all."""
    edits = []
    for each in ast.walk(node):
        if not isinstance(each, ast.Name) or each.id not in method.taint.pure:
            continue
        value = only_value(method.node, each.id)
        if value is None or names_in(value) != {"self"} or not _is_plain(value):
            return None
        edits.append(method.source.edit(each, method.source.render(value)))
    return edits


def _is_plain(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _splits_all(makings: Sequence[Making]) -> bool:
    """Whether each step of an RNN draws other keys, as in NNX."""
    given = [dict(making.made["split_rngs"]) for making in makings]
    return all(split for each in given for name, split in each.items() if name != "params")
