"""Decides what each method of a class leaves to the constructor, before any text is written."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import linen as nn

from bridge._train_eval import MODE_FIELDS

from ._body import Slice
from ._class_fields import check_class
from ._computed import Computed
from ._constructors import made_text
from ._function_plans import FunctionPlan, taint_of
from ._kept_sizes import Chain
from ._method import Method
from ._plans import ClassPlan, Lines, Program, Slot
from ._references import References
from ._slots import is_apart, name_slots


@dataclasses.dataclass(frozen=True)
class MethodPlan:
    """What is decided of one method.

    `made` says what makes the layers, by the expressions that made them. `lines` are the
    constructor's part of a compact method, and `kept` are the statements that these lines have.
    """

    method: Method
    made: Mapping[ast.Call, str]
    lines: Lines = dataclasses.field(default_factory=list)
    kept: frozenset[ast.stmt] = frozenset()


@dataclasses.dataclass(frozen=True)
class SetupPlan(MethodPlan):
    """What is decided of `setup`, or of a function that returns layers: all of it is constructor.

    `computed` is what of it computes with parameters, and `chains` are its lists of layers that
    pass a size on.
    """

    computed: Computed = dataclasses.field(kw_only=True)
    chains: tuple[Chain, ...] = ()


def method_plans(program: Program, plan: ClassPlan, references: References) -> list[MethodPlan]:
    """The methods of a class, or the function that a plan is of; `setup` comes first.

    Raises NotRewritableError if something cannot be rewritten.
    """
    for slot in plan.slots.values():
        slot.in_call = _is_of_call(plan, slot, references)
    name_slots(program, plan)
    if isinstance(plan, FunctionPlan):
        method = Method(program, plan, plan.function, references, made_text)
        return [_whole(method) if plan.returns_layers else _compact(method)]
    check_class(plan, references)
    nodes = [each for each in plan.methods.values() if each not in plan.maker_methods]
    methods = [Method(program, plan, node, references, made_text) for node in nodes]
    # What `setup` makes is there before anything that a compact method makes.
    methods.sort(key=lambda method: not method.is_setup)
    found = [_whole(each) if each.is_setup else _compact(each) for each in methods]
    plan.wraps = _wraps(program, plan)
    return found


def _is_of_call(plan: ClassPlan, slot: Slot, references: References) -> bool:
    """Whether a layer is `nn.Dropout(rate)(x)`, with a rate that the call decides."""
    around = plan.source.parents[slot.node]
    is_called = isinstance(around, ast.Call) and around.func is slot.node
    if references.value_of(slot.node.func) is not nn.Dropout or not is_called or slot.functions:
        return False
    taint = taint_of(plan, slot.method)
    given = [each.value for each in slot.node.keywords if each.arg not in MODE_FIELDS]
    return any(map(taint.touches, [*slot.node.args, *given]))


def _whole(method: Method) -> SetupPlan:
    """A method that becomes the constructor's as it is."""
    computed = Computed(method.plan, method.node)
    own = (slot for slot in method.slots if slot.outer is None or is_apart(method.source, slot))
    made = {slot.node: made_text(method, slot) for slot in own}
    return SetupPlan(method, made, computed=computed, chains=tuple(method.kept.chains()))


def _compact(method: Method) -> MethodPlan:
    slice_ = Slice(method)
    lines = slice_.lines() if method.slots else []
    return MethodPlan(method, slice_.texts, lines, frozenset(slice_.kept))


def _wraps(program: Program, plan: ClassPlan) -> bool:
    """Whether something in a class stays Linen, itself or further down."""
    makings = [m for slot in plan.slots.values() for m in slot.makings]
    children: list[Any] = [program.plan_of(program.records.base_of(m.cls)) for m in makings]
    return any(slot.linen for slot in plan.slots.values()) or any(
        child is not None and (child.wraps or child.refusal is not None) for child in children
    )
