"""Rewrites the body of a method whose layers the constructor makes."""

from __future__ import annotations

import ast
import keyword
from collections.abc import Iterator, Sequence
from typing import Any

from flax import linen as nn

from bridge.rewrite.plan._axes import STACKS
from bridge.rewrite.plan._function_plans import FunctionPlan, bound, called_function
from bridge.rewrite.plan._layers import CALL_RENAMES, field_order
from bridge.rewrite.plan._lifted_functions import calls_inside
from bridge.rewrite.plan._method import Method
from bridge.rewrite.plan._method_plans import MethodPlan
from bridge.rewrite.plan._plans import ClassPlan, Slot
from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.syntax._source import (
    COMPREHENSIONS,
    Edit,
    Source,
    arguments_of,
    bound_in,
    is_self,
    is_shadowed,
    items_of,
    names_in,
    walk_without,
)

from ._dead import RAISES, dead_blocks, in_place_of
from ._function_edits import function_edits
from ._lifted_calls import LiftedCalls
from ._removals import Removals, inlined
from ._states import States, carry_edits, merged_field
from ._tied import Applied, variable_edits

_WIDTH = 100
_RAISE = 'raise NotImplementedError("this branch did not run when {} was rewritten")'


class Calls:
    """The edits of one method's body.

    `notes` has what a person has to look at: line and text. `through` has the slots whose calls go
    through NNX's transforms.
    """

    def __init__(self, given: MethodPlan) -> None:
        method = self.method = given.method
        self.kept, self.source, self.plan = given.kept, method.source, method.plan
        self.notes: list[tuple[int, str]] = []
        self.through: set[ast.Call] = set()
        self._items: dict[ast.Call, str] = {}
        self.dead: list[list[ast.stmt]] = []
        self._headers: list[Edit] = []
        self._insertions: list[tuple[ast.stmt, str]] = []

    def edits(self) -> list[Edit]:
        """The edits.

        Raises NotRewritableError if a call cannot be followed.
        """
        node = self.method.node
        found = [e for each in node.body for e in self.method.references.edits(each)]
        found += [e for each in node.body for e in self.method.field_edits(each)]
        self.dead = dead_blocks(self.method)
        for block in self.dead:
            text = _RAISE.format(self.plan.name)
            found.append(in_place_of(self.source, block, text))
            self.notes.append((block[0].lineno, RAISES))
        for slot in self.method.slots:
            if slot.outer is None:
                found += self._slot(slot)
        for slot in self.method.own_slots:
            found += self._made_here(slot)
        found += self._headers
        found += function_edits(self.method)
        found += self._signature()
        found += carry_edits(self.method)
        states = States(self.method, self.dead)
        found += states.edits()
        self.notes += states.notes
        found += variable_edits(self.method)
        found += Applied(self.method).edits(self.method)
        read = [*self._items.values()]
        found += Removals(self.method, self.kept, self.dead, self._insertions, read).edits()
        return found

    def _slot(self, slot: Slot) -> Iterator[Edit]:
        target = f"{slot.holder}.{slot.attribute}"
        if slot.is_list:
            target = self._items[slot.node] = self._item(slot)
        function = called_function(self.method.program, slot)
        if function is not None and not function.returns_layers:
            yield self.source.edit(slot.node.func, target)
            yield from call_edits(self.source, slot.node, function)
            return
        if slot.kind == "param":
            target += "[...]"
        yield self.source.edit(slot.node, target)
        calls = list(calls_of(self.plan, slot))
        if slot.modes and not calls:
            raise NotRewritableError("mode-call", slot.node)
        for call in calls:
            yield from self.adapted(slot, call)
            if slot.lift is not None:
                yield from self.transformed(slot, call, self._callee(slot, call))
            if call.func is slot.node and slot.lift is None:
                yield from self._on_one_line(call, target)
        if slot.kind == "variable" and slot.variable:
            yield from self._values(slot.variable)
        around = self.source.parents[slot.node]
        if slot.kind == "variable" and isinstance(around, ast.Attribute) and around.attr == "value":
            yield Edit(self.source.end(slot.node), self.source.end(around), "[...]")

    def _made_here(self, slot: Slot) -> Iterator[Edit]:
        """A layer that the call makes, which draws from `self.rngs`."""
        (cls,) = {making.cls for making in slot.makings if making.cls is not None}
        for name, each in list(zip(field_order(cls), slot.node.args, strict=False))[1:]:
            yield Edit(self.source.start(each), self.source.start(each), f"{name}=")
        slot.modes["rngs"] = "self.rngs"
        for call in calls_of(self.plan, slot):
            yield from self.adapted(slot, call)

    def _on_one_line(self, call: ast.Call, target: str) -> Iterator[Edit]:
        """A call whose constructor is gone, on one line if it fits."""
        parts = [*call.args, *call.keywords]
        if not parts:
            return
        source, data = self.source, self.source.data
        begin, end = min(map(source.start, parts)), max(map(source.end, parts))
        opening, closing = data.index(b"(", source.end(call.func)) + 1, source.end(call) - 1
        around = data[opening:begin] + data[end:closing]
        if b"\n" not in around or around.strip(b" \t\r\n,") or b"\n" in data[begin:end]:
            return
        left = source.start(call) - data.rfind(b"\n", 0, source.start(call)) - 1
        right = data.find(b"\n", closing) - closing
        if left + len(target) + end - begin + right < _WIDTH:
            yield Edit(opening, begin, "")
            yield Edit(end, closing, "")

    def _callee(self, slot: Slot, call: ast.Call) -> str:
        """The layer that a call calls, as the call has it."""
        if call.func is slot.node:
            return self._items[slot.node] if slot.is_list else f"{slot.holder}.{slot.attribute}"
        if isinstance(call.func, ast.Name) and call.func.id in inlined(self.method):
            return f"self.{slot.attribute}"
        return self.source.render(call.func)

    def transformed(self, slot: Slot, call: ast.Call, layer: str) -> Iterator[Edit]:
        """A call through NNX's transforms.

        `slot` is where the layer is made, and `layer` is the layer's name there.
        """
        self.through.add(slot.node)
        is_stacked = any(each.kind in STACKS for each in slot.lift.chain)
        function, given = LiftedCalls(slot.lift).callee(call, layer, is_stacked=is_stacked)
        begin = self.source.start(call.func)
        opening = self.source.data.index(b"(", self.source.end(call.func)) + 1
        if is_stacked:
            yield Edit(begin, self.source.end(call), f"{function}({', '.join(given)})")
        elif len(given) > 1:
            yield Edit(begin, opening, f"{function}({layer}, ")
        else:
            yield Edit(begin, opening, f"{function}({layer}")

    def _item(self, slot: Slot) -> str:
        """How the call names what a turn of a loop made."""
        direct = self._direct(slot)
        if direct is not None:
            return direct
        loop = slot.loops[0]
        if len(slot.loops) == 1 and not self._is_conditional(slot):
            name = _counter(loop)
            if name is not None and name.strip("_"):
                return f"{slot.holder}.{slot.attribute}[{name}]"
        name = slot.attribute
        taken = self.method.taint.names | self.method.taint.pure
        while name in taken:
            name = f"{name}_iter"
        statement = self.source.statement_of(loop)
        entry = (statement, f"{name} = iter({slot.holder}.{slot.attribute})")
        if entry not in self._insertions:
            self._insertions.append(entry)
        return f"next({name})"

    def _direct(self, slot: Slot) -> str | None:
        """A loop that only counts becomes one over what it made: `for block in self.blocks`."""
        loop: Any = slot.loops[0]
        if len(slot.loops) > 1 or self._is_conditional(slot) or not isinstance(loop, ast.For):
            return None
        others = [s for s in self.method.slots if s.loops[:1] == [loop] and s.outer is None]
        targets = bound_in(loop.target)
        if len(others) > 1 or loop.orelse or self._reads(targets, slot):
            return None
        own = slot.attribute[:-1] if slot.attribute.endswith("s") else f"{slot.attribute}_item"
        taken = self.method.taint.names | self.method.taint.pure
        names = [own, f"{own}_item"] if slot.lift is not None else [own]
        name = next((n for n in names if n not in taken and not keyword.iskeyword(n)), None)
        if name is None:
            return None
        self._headers += [
            self.source.edit(loop.target, name),
            self.source.edit(loop.iter, f"{slot.holder}.{slot.attribute}"),
        ]
        return name

    def _reads(self, names: set[str], slot: Slot) -> bool:
        """Whether the method reads names anywhere but in a slot."""
        left = walk_without(self.method.node.body, lambda node: node is slot.node)
        return any(isinstance(node, ast.Name) and names_in(node) & names for node in left)

    def _is_conditional(self, slot: Slot) -> bool:
        for each in self.source.ancestors(slot.node):
            if each is slot.loops[0]:
                return False
            if isinstance(each, ast.If | ast.IfExp):
                return True
        return False

    def adapted(self, slot: Slot, call: ast.Call) -> Iterator[Edit]:
        """A call with what NNX takes by keyword, and with the modes of the constructor."""
        base = self.method.program.records.base_of
        layer = self.method.program.layer_of(base(slot.makings[0].cls))
        is_starred = any(isinstance(a, ast.Starred) for a in call.args)
        if layer is not None and slot.linen is None and not is_starred:
            for index, argument in enumerate(call.args[layer.keep :], layer.keep):
                if index >= len(layer.call):
                    raise NotRewritableError("layer-call", call, layer=layer.name)
                begin = self.source.start(argument)
                name = layer.call[index]
                yield Edit(begin, begin, f"{CALL_RENAMES.get(name, name)}=")
            for keyword in call.keywords:
                if keyword.arg in layer.call_renames:
                    begin = self.source.offset(keyword.lineno, keyword.col_offset)
                    end = begin + len(keyword.arg)
                    yield Edit(begin, end, layer.call_renames[keyword.arg])
        names = {CALL_RENAMES.get(str(k.arg), k.arg) for k in call.keywords}
        if layer is not None:
            by_position = set(layer.call[: len(call.args)])
            names |= by_position
        added = [f"{name}={text}" for name, text in slot.modes.items() if name not in names]
        if added and slot.takers:
            callee = self._callee(slot, call)
            if callee.startswith("next("):
                raise NotRewritableError("mode-call", call)
            own = ", ".join(f'"{k}": {text}' for k, text in slot.modes.items() if k not in names)
            added = [f"**({{{own}}} if isinstance({callee}, {slot.takers}) else {{}})"]
        if added:
            last = max(
                [*call.args, *(k.value for k in call.keywords)], key=self.source.end, default=None
            )
            if last is None:
                end = self.source.end(call) - 1
                yield Edit(end, end, ", ".join(added))
            else:
                end = self.source.end_of_argument(last)
                yield Edit(end, end, ", " + ", ".join(added))

    def _values(self, variable: str) -> Iterator[Edit]:
        for each in ast.walk(self.method.node):
            if (
                isinstance(each, ast.Attribute)
                and each.attr == "value"
                and isinstance(each.value, ast.Name)
                and each.value.id == variable
            ):
                yield Edit(self.source.end(each.value), self.source.end(each), "[...]")

    def _signature(self) -> Iterator[Edit]:
        modes = [m for slot in self.method.slots for m, text in slot.modes.items() if m == text]
        arguments = dict.fromkeys(
            m for m in modes if any(m in carried for carried in self.plan.carried.values())
        )
        texts = [
            f"{name}: bool | None = None"
            for name in arguments
            if name not in self.method.taint.names
        ]
        if self.method.node.name == "__call__":
            for field in self.plan.fields:
                is_mode = field.name in self.plan.mode_fields and self.plan.reads(field.name)
                if is_mode and not self._is_merged(field.name):
                    default = "" if field.default is None else f" = {field.default}"
                    texts.append(f"{field.name}: {field.annotation}{default}")
        if not texts:
            return
        if self.method.node.name != "__call__":
            raise NotRewritableError("mode-method", self.method.node)
        given = self.method.node.args
        parts = [part for each in arguments_of(self.method.node).items() for part in each]
        ends = [self.source.end(each) for each in parts if each is not None]
        if given.vararg:
            ends.append(self.source.end(given.vararg))
        if given.kwarg:
            raise NotRewritableError("mode-rest", given.kwarg)
        star = "" if given.kwonlyargs or given.vararg else "*, "
        end = max(ends)
        yield Edit(end, end, f", {star}{', '.join(texts)}")

    def _is_merged(self, name: str) -> bool:
        """Whether the call has an argument of a field's name, and takes whichever of them is given.

        Raises NotRewritableError if it has such an argument and also reads the field by itself.
        """
        method = self.method
        if name not in method.taint.arguments:
            return False
        for each in ast.walk(method.node):
            if is_self(each, name):
                call = self.source.parents[each]
                call = self.source.parents[call] if isinstance(call, ast.keyword) else call
                merges = isinstance(call, ast.Call) and (
                    method.references.value_of(call.func) is nn.merge_param
                )
                if not merges and merged_field(self.source.parents[call]) != name:
                    raise NotRewritableError("mode-twice", each, name=name)
        return True


def _counter(loop: Any) -> str | None:
    """The name that counts a loop's turns from 0."""
    if isinstance(loop, ast.For):
        target, values = loop.target, loop.iter
    elif isinstance(loop, COMPREHENSIONS):
        generator = loop.generators[0]
        if len(loop.generators) > 1 or generator.ifs:
            return None
        target, values = generator.target, generator.iter
    else:
        return None
    if isinstance(values, ast.Call) and isinstance(values.func, ast.Name):
        if values.func.id == "range" and len(values.args) == 1 and isinstance(target, ast.Name):
            return target.id
        if (
            values.func.id == "enumerate"
            and len(values.args) == 1
            and isinstance(target, ast.Tuple)
            and isinstance(target.elts[0], ast.Name)
        ):
            return target.elts[0].id
    return None


def calls_of(plan: ClassPlan, slot: Slot) -> Iterator[ast.Call]:
    """The calls, by the expression itself or its variable."""
    parent = plan.source.parents[slot.node]
    if isinstance(parent, ast.Call) and parent.func is slot.node:
        yield parent
    if slot.variable:
        for each in ast.walk(slot.method):
            if (
                isinstance(each, ast.Call)
                and isinstance(each.func, ast.Name)
                and each.func.id == slot.variable
                and not is_shadowed(plan.source, each, slot.variable, slot.method)
            ):
                yield each
    yield from calls_inside(slot)


def item_calls(slots: Sequence[Slot], method: Method) -> Iterator[tuple[Slot, ast.Call]]:
    """The calls of layers under lifted transforms that are in a list."""
    lists = {n: s for s in slots if s.lift for n in [_list_of(method, s)] if n}
    for node in ast.walk(method.node):
        if not isinstance(node, ast.Call):
            continue
        own: Any = node.func
        if isinstance(own, ast.Name):
            values = _values_of(method.source, own)
        else:
            values = own.value if isinstance(own, ast.Subscript) else None
        if values is not None and is_self(values) and values.attr in lists:  # pyright: ignore
            yield lists[values.attr], node  # pyright: ignore


def _values_of(source: Source, name: ast.Name) -> ast.expr | None:
    """The list that the innermost loop around a name takes it from."""
    for around in source.ancestors(name):
        loops = [around] if isinstance(around, ast.For) else getattr(around, "generators", ())
        for loop in loops:
            for each, values in items_of(loop.target, loop.iter):
                if isinstance(each, ast.Name) and each.id == name.id:
                    return values
    return None


def _list_of(method: Method, slot: Slot) -> str | None:
    """The attribute of the list that a slot alone fills."""
    statement = method.source.statement_of(slot.node)
    if (
        isinstance(statement, ast.Assign)
        and is_self(statement.targets[0])
        and statement.value is not slot.node
    ):
        return statement.targets[0].attr  # pyright: ignore
    return None


def call_edits(source: Source, node: ast.Call, plan: FunctionPlan) -> Iterator[Edit]:
    """A call without the arguments that the constructor got."""
    keywords: dict[ast.expr, ast.keyword] = {k.value: k for k in node.keywords}
    parts: list[tuple[Any, bool]] = [
        (keywords.get(value, value), name in plan.known) for name, value in bound(plan, node)
    ]
    parts.sort(key=lambda part: source.start(part[0]))
    for index, (part, is_dropped) in enumerate(parts):
        if not is_dropped:
            continue
        if any(not gone for _, gone in parts[:index]):
            yield Edit(source.end(parts[index - 1][0]), source.end(part), "")
        elif index + 1 < len(parts):
            yield Edit(source.start(part), source.start(parts[index + 1][0]), "")
        else:
            yield Edit(source.start(part), source.end(part), "")
