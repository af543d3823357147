"""Lists what a constructor can know about a size: names, fields, arguments, earlier layers."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from flax import linen as nn

from bridge.rewrite.observe._records import Instance, Making, Shape
from bridge.rewrite.syntax._evaluate import is_size
from bridge.rewrite.syntax._source import binding, names_in, only_value
from bridge.rewrite.syntax._taint import Taint

from ._function_plans import FunctionPlan
from ._layers import layer_of
from ._plans import ClassPlan, Program, Slot

_OUT_FIELDS = ("features", "out_features", "hidden_features")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An expression and what it is worth.

    Attributes:
        text: the expression.
        value: at one moment.
        rank: the smaller, the better.
        argument: (argument, dimension) if it is the size of an argument of the call.
        certain: whether the size comes from there, and is not only equal.
        loop: the innermost loop around the layer whose output size it is.
    """

    text: str
    value: Any
    rank: int
    argument: tuple[str, int] | None = None
    certain: bool = False
    loop: ast.AST | None = None


class Candidates:
    """The candidates at each execution of an expression of a method.

    `taint` tells which names of the method a constructor knows. `computed` has the texts of sizes
    that a constructor computes from dimensions.
    """

    def __init__(
        self, program: Program, plan: ClassPlan, method: ast.FunctionDef, taint: Taint
    ) -> None:
        self.program, self.plan, self.method, self.taint = program, plan, method, taint
        self.computed: dict[ast.AST, str] = {}
        self._by_owner: dict[tuple[int, Any], list[Making]] = {}
        for making in program.records.makings:
            if making.owner is not None and making.kind == "module":
                self._by_owner.setdefault((making.run, making.owner), []).append(making)

    def at(self, making: Making, allowed: set[str]) -> Iterator[Candidate]:
        """The candidates at one execution.

        `allowed` has the local names that may be used.
        """
        yield from self._local(making, allowed)
        yield from self.outs(making, self._earlier(making), allowed)
        yield from self._own_sizes(making)
        yield from self._arguments(making)
        yield from self._fields(making)

    def outs(self, making: Making, others: list[Making], allowed: set[str]) -> Iterator[Candidate]:
        """The output sizes of other layers, as the program wrote them; the last one first."""
        for distance, other in enumerate(reversed(others)):
            slot = self._slot(other)
            if slot is None or slot.method is not self.method:
                continue
            loop = slot.loops[-1] if slot.loops else None
            for node, value in self._out_arguments(slot, other):
                text = self.computed.get(node)
                if self._is_known(node, allowed) and self._is_unchanged(node, other, making):
                    text = self.plan.source.render(node)
                if text is not None:
                    rank = 20 + min(distance, 9)
                    yield Candidate(text, value, rank, certain=True, loop=loop)

    def _is_unchanged(self, node: ast.AST, before: Making, now: Making) -> bool:
        """Whether the names in an expression still have the values that they had."""
        return all(
            before.env.get(name) is now.env.get(name) or before.env.get(name) == now.env.get(name)
            for name in names_in(node) & self.taint.pure
        )

    def between(self, one: Making, other: Making) -> list[Making]:
        """What the same owner made from one making on, before another."""
        return [m for m in self._makings(one) if one.order <= m.order < other.order]

    def _makings(self, making: Making) -> list[Making]:
        return self._by_owner.get((making.run, making.owner), [])

    def _earlier(self, making: Making) -> list[Making]:
        """What had been called when this one was: `norm()(dense()(x))` makes `norm` first."""
        now = self.first_call(making)
        found = [(self.first_call(m, ended=True), m) for m in self._makings(making)]
        return [m for when, m in sorted(found, key=lambda pair: pair[0]) if when < now]

    def _instance(self, making: Making, *, last: bool) -> Instance | None:
        """What was made; for a function that returns layers, the first or the last of them."""
        path = making.path or ("",)
        made = self._by_owner.get((making.run, path), [])
        if made and self.program.records.functions_that_make.get(making.cls or Making):
            path = made[-1 if last else 0].path or ("",)
        return self.program.records.instances.get((making.run, path))

    def first_call(self, making: Making, *, ended: bool = False) -> int:
        """When a module was called first, or that call ended; when it was made if it never was."""
        instance = self._instance(making, last=ended)
        uses = instance.uses if instance is not None else []
        if not uses:
            return making.order
        return uses[0].ended if ended else uses[0].began

    def _slot(self, making: Making) -> Slot | None:
        node = self.plan.source.call_at(making.site.span)
        if node is None or making.site.file != self.plan.source.file:
            return None
        return self.plan.slots.get(node)

    def _out_arguments(self, slot: Slot, making: Making) -> Iterator[tuple[ast.expr, Any]]:
        instance = self._instance(making, last=True)
        output = instance.calls[-1].output if instance and instance.calls else None
        shape = output.shape if isinstance(output, Shape) else ()
        last = shape[-1] if shape else None
        node = slot.constructor
        bound = self.partial_behind(node.func, making)
        keywords = [*node.keywords, *(bound.keywords if bound else ())]
        given = [*(bound.args[1:] if bound else ()), *node.args]
        nodes: list[tuple[str | None, ast.expr]] = [(k.arg, k.value) for k in keywords]
        if isinstance(function := self.program.plan_of(making.cls), FunctionPlan):
            nodes += list(zip(function.arguments, given, strict=False))
        elif making.cls is not None:
            names = [f.name for f in dataclasses.fields(making.cls) if f.init]  # pyright: ignore
            nodes += list(zip(names, given, strict=False))
        # Of Flax's layers it is known which field says the size.
        is_known = layer_of(making.cls) is not None
        for name, node in nodes:
            value: Any = making.made.get(name) if name else None
            is_output = name in _OUT_FIELDS and isinstance(value, int)
            if is_size(value) and (is_output or (value == last and not is_known)):
                yield node, last if value == last else value
            elif (
                is_size(value)
                and not isinstance(value, int)
                and (shape[-len(value) :] == tuple(value))
            ):
                yield node, tuple(value)

    def partial_behind(self, function: ast.expr, making: Making) -> ast.Call | None:
        """The expression of the method that made the partial which a name stands for."""
        if not isinstance(function, ast.Name):
            return None
        value = making.env.get(function.id)
        if not isinstance(value, functools.partial):
            return None
        call = only_value(self.method, function.id)
        if isinstance(call, ast.Call) and all(
            len(binding(self.method, name)) <= 1 for name in names_in(call)
        ):
            names = {each.arg for each in call.keywords}
            is_whole = len(call.args) == len(value.args) + 1 and names == set(value.keywords)
            return call if is_whole else None
        return None

    def output_argument(self, slot: Slot) -> ast.expr | None:
        """The argument of a constructor that is the last dimension of what it computes."""
        common: list[ast.expr] | None = None
        for making in slot.makings:
            instance = self._instance(making, last=True)
            output = instance.calls[-1].output if instance and instance.calls else None
            if not isinstance(output, Shape) or not output.shape:
                return None
            own = [n for n, v in self._out_arguments(slot, making) if v == output.shape[-1]]
            common = [node for node in (own if common is None else common) if node in own]
        return common[0] if common else None

    def keeps_size(self, slot: Slot) -> bool:
        """Whether what a slot computes has the last dimension of what it is called with."""
        found: list[bool] = []
        for making in slot.makings:
            instance = self._instance(making, last=False)
            call = next(iter(instance.uses if instance else ()), None)
            given = next((x for x in call.args if isinstance(x, Shape)), None) if call else None
            if call is None or given is None or not isinstance(call.output, Shape):
                return False
            found.append(given.shape[-1:] == call.output.shape[-1:])
        return bool(found) and all(found)

    def _is_known(self, node: ast.AST, allowed: set[str]) -> bool:
        if self.taint.touches(node):
            return False
        local = self.taint.pure | self.taint.names
        return all(name in allowed for name in names_in(node) if name in local)

    def _local(self, making: Making, allowed: set[str]) -> Iterator[Candidate]:
        for name in sorted(allowed & self.taint.pure):
            value = making.env.get(name)
            if is_size(value):
                # What is computed from an argument's size may only be equal to it.
                yield Candidate(name, value, 58 if name in self.taint.computed else 10)
                yield from _items(name, value, 31)

    def _own_sizes(self, making: Making) -> Iterator[Candidate]:
        for size in self.plan.sizes.values():
            value = size.values.get((making.run, making.owner or ()))
            if value is not None:
                yield Candidate(size.name, value, 45)

    def given_shapes(self, making: Making) -> dict[str, tuple[int, ...]]:
        """The shapes of what the owner's first call was given, by name."""
        instance = self.program.records.instances.get((making.run, making.owner or ()))
        return {} if instance is None else dict(call_shapes(instance, self.method, self.plan))

    def _arguments(self, making: Making) -> Iterator[Candidate]:
        for position, (name, shape) in enumerate(self.given_shapes(making).items()):
            for index in reversed(range(len(shape))):
                rank = 50 + min(position, 4) + 10 * (index != len(shape) - 1)
                yield Candidate("", shape[index], rank, (name, index - len(shape)), certain=True)

    def _fields(self, making: Making) -> Iterator[Candidate]:
        known = {field.name for field in self.plan.fields} - self.plan.mode_fields
        for name in known:
            value = making.fields.get(name)
            if is_size(value):
                yield Candidate(f"self.{name}", value, 30 if isinstance(value, int) else 35)
                yield from _items(f"self.{name}", value, 65)
            else:
                yield from _config(f"self.{name}", value)


def call_shapes(
    instance: Instance, method: ast.FunctionDef, plan: ClassPlan
) -> list[tuple[str, tuple[int, ...]]]:
    """The shapes of the array arguments of an instance's first call, by name."""
    functions = plan.methods
    if isinstance(plan, FunctionPlan):
        given = instance.calls[0].kwargs
        return [(n, given[n].shape) for n in plan.arguments if isinstance(given.get(n), Shape)]
    calls = (
        [c for c in instance.uses if c.method == method.name]
        or [c for c in instance.uses if c.method in functions]
        or instance.uses
    )
    if not calls:
        return []
    call = calls[0]
    # The method may be that of a class that derives from this one.
    function = inspect.unwrap(getattr(instance.cls, call.method))
    names = list(inspect.signature(function).parameters)[1:]
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    return [(name, value.shape) for name, value in given.items() if isinstance(value, Shape)]


def _items(text: str, value: Any, rank: int) -> Iterator[Candidate]:
    if isinstance(value, tuple | list) and value:
        yield Candidate(f"{text}[0]", value[0], rank)
        yield Candidate(f"{text}[-1]", value[-1], rank)


def _config(text: str, value: Any) -> Iterator[Candidate]:
    found: Mapping[str, Any] = {}
    own: Any = value
    if dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module):
        found = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    elif type(value).__name__ in ("ConfigDict", "FrozenConfigDict", "SimpleNamespace"):
        try:
            found = dict(own.items()) if hasattr(own, "items") else vars(own)
        except (TypeError, ValueError):
            found = {}
    for name, inner in found.items():
        if is_size(inner):
            yield Candidate(f"{text}.{name}", inner, 40)
        elif dataclasses.is_dataclass(inner) and not isinstance(inner, type):
            yield from _config(f"{text}.{name}", inner)
