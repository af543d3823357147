"""The slots of a class, and the attributes that they become."""

from __future__ import annotations

import ast
import keyword
import re
from typing import Any

from flax import nnx

from bridge.rewrite.observe._records import Making
from bridge.rewrite.syntax._source import (
    COMPREHENSIONS,
    FUNCTIONS,
    Source,
    binding,
    bound_in,
    grown_name,
    is_free,
    is_growth,
    is_self,
    loops_around,
)
from bridge.rewrite.syntax._taint import SAME_ITEMS

from ._function_plans import called_function
from ._layers import layer_of
from ._lifted_functions import find_functions, first_argument, functions_of
from ._plans import ClassPlan, Program, Slot
from ._refusals import NotRewritableError

_STORING = ("module", "param", "variable")
# Expressions whose value is a list with what is inside, or is what is inside.
_PASSING = (ast.List, ast.Tuple, ast.Starred, ast.BinOp, ast.IfExp, *COMPREHENSIONS)
_RESERVED = {
    "train",
    "eval",
    "sow",
    "perturb",
    "set_attributes",
    "iter_modules",
    "iter_children",
    "rngs",
    "set_mode",
    "setup",
}
_MAKES = re.compile(r"^(make|build|get|create)_")
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[^_])(?=[A-Z][a-z])")


def snake(name: str) -> str:
    """`MlpBlock` is `mlp_block`, and `Conv2DBlock` is `conv2d_block`."""
    return _WORDS.sub("_", name).lower()


def find_slots(program: Program, plan: ClassPlan) -> None:
    """Finds what a class's methods make.

    Raises NotRewritableError if something is made where it cannot be followed.
    """
    methods = set(plan.methods.values())
    plan.functions = find_functions(program, plan)
    lifted = {each.function for each in plan.functions}
    # An inner function is a class of its own.
    apart = program.records.functions_that_make.keys() - {plan.cls}
    for making in program.records.makings:
        if making.site.file != plan.source.file or making.kind not in _STORING:
            continue
        node = plan.source.call_at(making.site.span)
        if node is None or is_free(node) or making.owner_cls in apart:
            continue
        around = [a for a in plan.source.ancestors(node) if isinstance(a, FUNCTIONS)]
        method = next((a for a in around if a in methods), None)
        if method is None or not isinstance(method, ast.FunctionDef):
            continue
        if plan.layer is not None and method.name == "param":
            # What the layer makes, seen on its way.
            continue
        is_nested = isinstance(around[0], ast.Lambda) and around[0] not in lifted
        if is_nested and making.kind == "module":
            raise NotRewritableError("inner-function", node)
        if node not in plan.slots:
            plan.slots[node] = Slot(node, making.kind, [], method)
            plan.slots[node].resolved = plan.constructors.get(node)
            if plan.layer is not None and making.name is not None:
                # NNX's layer has the parameter.
                plan.slots[node].attribute = making.name
            if around[0] in lifted:
                plan.slots[node].holder = first_argument(around[0])
        plan.slots[node].makings.append(making)
    for slot in plan.slots.values():
        # What a function returns that calls its layers is no layer.
        makes = program.records.functions_that_make.get(slot.makings[0].cls or Slot, True)
        if slot.variable is None and makes:
            slot.variable = _variable(plan, slot)
    for slot in plan.slots.values():
        slot.makings = _once(slot.makings)
        slot.loops = loops_around(plan.source, slot.node, slot.method)
        slot.is_list = bool(slot.loops)
        slot.stored, slot.is_alone = stored_in(plan, slot)
        slot.outer = (
            _outer(program, plan, slot)
            or _handed_on(program, plan, slot)
            or _collected(program, plan, slot)
        )
        if any(isinstance(loop, ast.While) for loop in slot.loops):
            raise NotRewritableError("while-loop", slot.node)
        if not slot.is_list and _is_repeated(slot):
            raise NotRewritableError("method-called-twice", slot.node)
        slot.functions = functions_of(plan, slot)


def slots_of_run(program: Program, run: int) -> dict[int, tuple[ClassPlan, Slot]]:
    """The class and the slot of what a run made, by the id of the making.

    The run may be later than the slots are.
    """
    makings = [m for m in program.records.makings if m.run == run and m.kind in _STORING]
    found: dict[int, tuple[ClassPlan, Slot]] = {}
    for plan in program.plans.values():
        apart = program.records.functions_that_make.keys() - {plan.cls}
        own: dict[ast.Call, list[Making]] = {}
        for making in makings if plan.refusal is None else ():
            if making.site.file == plan.source.file and making.owner_cls not in apart:
                node = plan.source.call_at(making.site.span)
                if making.through is not None and making.through.file == plan.source.file:
                    # The call of a function that only returns a layer stands for the layer.
                    called = plan.source.call_at(making.through.span)
                    node = called if called in plan.constructors else node
                if node is not None and node in plan.slots:
                    own.setdefault(node, []).append(making)
        for node, each in own.items():
            found |= {id(making): (plan, plan.slots[node]) for making in _once(each)}
    return found


def _is_repeated(slot: Slot) -> bool:
    """Whether a place outside of loops makes several layers of one module."""
    places = [(m.run, m.owner) for m in slot.makings if m.kind == "module" and m.path]
    return len(places) > len(set(places))


def _once(makings: list[Making]) -> list[Making]:
    """A shared module's second call makes nothing new."""
    seen: set[Any] = set()
    found = []
    for making in makings:
        key = (making.run, making.path, making.name, making.owner)
        if making.path is None and making.name is None:
            key = (making.run, making.order, None, None)
        if key not in seen:
            seen.add(key)
            found.append(making)
    return found


def _is_function(program: Program, slot: Slot) -> bool:
    """Whether a slot calls a function: what it is given are arguments of a call."""
    return slot.makings[0].cls in program.records.functions_that_make


def _outer(program: Program, plan: ClassPlan, slot: Slot) -> Slot | None:
    """The slot that takes a slot as a constructor argument, not one that calls it."""
    before: ast.AST = slot.node
    for each in plan.source.ancestors(slot.node):
        if isinstance(each, ast.stmt):
            return None
        if isinstance(each, ast.Call):
            if each.func is before:
                return None
            if each in plan.slots and not _is_function(program, plan.slots[each]):
                return plan.slots[each]
        before = each
    return None


def _handed_on(program: Program, plan: ClassPlan, slot: Slot) -> Slot | None:
    """The slot that alone is given what a slot makes, by its variable."""
    if slot.variable is None or slot.kind != "module":
        return None
    return _holder(program, plan, slot, slot.variable)


def _collected(program: Program, plan: ClassPlan, slot: Slot) -> Slot | None:
    """The slot that alone is given the local list that a slot's module goes into."""
    if slot.kind != "module" or slot.variable is not None:
        return None
    statement, inside = plan.source.statement_of(slot.node), slot.node
    is_in_list = False
    for each in plan.source.ancestors(slot.node):
        if each is statement:
            break
        is_added = isinstance(each, ast.Call) and inside is not each.func and is_growth(each)
        if not (is_added or isinstance(each, _PASSING)):
            return None
        is_in_list |= is_added or not isinstance(each, ast.IfExp)
        inside = each
    name = grown_name(statement)
    return None if name is None or not is_in_list else _holder(program, plan, slot, name)


def _holder(program: Program, plan: ClassPlan, slot: Slot, name: str) -> Slot | None:
    """The slot that alone is given a local variable."""
    holders: set[ast.AST | None] = set()
    for node in ast.walk(slot.method):
        if not (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)):
            continue
        call: ast.AST = plan.source.parents[node]
        if isinstance(call, ast.Attribute) and is_growth(plan.source.parents[call]):
            continue
        while isinstance(call, ast.keyword | ast.Starred | ast.List | ast.Tuple):
            call = plan.source.parents[call]
        is_given = isinstance(call, ast.Call) and call in plan.slots and call.func is not node
        holders.add(
            call if is_given and not _is_function(program, plan.slots[call]) else None  # pyright: ignore
        )
    holder = next(iter(holders), None) if len(holders) == 1 else None
    return plan.slots[holder] if isinstance(holder, ast.Call) else None


def _variable(plan: ClassPlan, slot: Slot) -> str | None:
    statement = plan.source.statement_of(slot.node)
    if (
        isinstance(statement, ast.Assign)
        and statement.value is slot.node
        and len(statement.targets) == 1
        and isinstance(statement.targets[0], ast.Name)
    ):
        return statement.targets[0].id
    return None


def name_slots(program: Program, plan: ClassPlan) -> None:
    """Gives every slot of compact methods an attribute."""
    taken = set(plan.taken_names) | _RESERVED
    # NNX keeps what is sown in an attribute of that name.
    taken |= {
        making.name
        for making in program.records.makings
        if making.kind in ("sow", "perturb") and making.owner_cls is plan.cls and making.name
    }
    slots = [
        slot
        for slot in plan.slots.values()
        if slot.method.name != "setup" and slot.outer is None and not slot.in_call
    ]
    for slot in plan.slots.values():
        if slot.method.name == "setup":
            slot.attribute = _target(plan, slot)
    slots.sort(key=lambda slot: slot.makings[0].order)
    slots.sort(key=lambda slot: name_node(slot) is None)
    wishes: dict[int, str] = {}
    for slot in slots:
        wishes[id(slot)] = _wish(program, slot)
    counts: dict[str, int] = {}
    for slot in slots:
        wish = wishes[id(slot)]
        counts[wish] = counts.get(wish, 0) + (name_node(slot) is None)
    numbers: dict[str, int] = {}
    by_explicit: dict[str, str] = {}
    for slot in slots:
        wish = wishes[id(slot)]
        explicit = _explicit(slot)
        if explicit is not None and not slot.is_list and explicit in by_explicit:
            # Two branches make the layer of one name.
            slot.attribute = by_explicit[explicit]
            continue
        name = wish
        if (
            name_node(slot) is None
            and counts[wish] > 1
            and not (program.keep_names and not slot.is_list)
        ):
            name = f"{wish}_{numbers.get(wish, 0)}"
            numbers[wish] = numbers.get(wish, 0) + 1
        while name in taken or keyword.iskeyword(name):
            name = f"{name}_layer" if slot.kind == "module" else f"{name}_"
        slot.attribute = name
        taken.add(name)
        if explicit is not None and not slot.is_list:
            by_explicit[explicit] = name


def _target(plan: ClassPlan, slot: Slot) -> str:
    """The attribute that a slot of `setup` is assigned to, or what it is called otherwise."""
    if slot.kind == "param" and not is_stored(plan, slot):
        taken = plan.taken_names | {n.attr for n in ast.walk(slot.method) if _is_set(n)}  # pyright: ignore
        name = str(slot.makings[0].name)
        while name in taken:
            name = f"{name}_"
        return name
    if slot.stored is not None:
        return slot.stored
    cls = slot.makings[0].cls
    return snake(cls.__name__) if cls is not None else str(slot.makings[0].name)


def is_stored(plan: ClassPlan, slot: Slot) -> bool:
    """Whether `setup` keeps what a slot makes in an attribute, by itself or in a container."""
    statement = _storing(plan, slot)
    return statement is not None and not any(
        each is not statement and _computes_again(plan, each, ast.unparse(statement.targets[0]))
        for each in ast.walk(slot.method)
        if isinstance(each, ast.Assign)
    )


def _storing(plan: ClassPlan, slot: Slot) -> ast.Assign | None:
    """The statement that puts what a slot makes into an attribute as it is."""
    around = plan.source.parents[slot.node]
    while isinstance(around, (ast.IfExp, ast.List, ast.Tuple, ast.Dict, *COMPREHENSIONS)):
        around = plan.source.parents[around]
    return around if isinstance(around, ast.Assign) and is_self(around.targets[0]) else None


def _computes_again(plan: ClassPlan, statement: ast.Assign, target: str) -> bool:
    """Whether a statement sets an attribute to what it computes, as in `self.a = 2 * self.a`."""
    if ast.unparse(statement.targets[0]) != target:
        return False
    own = [slot for node, slot in plan.slots.items() if node in ast.walk(statement.value)]
    return any(_storing(plan, slot) is None for slot in own if slot.kind == "param") or any(
        is_self(each) and ast.unparse(each) == target for each in ast.walk(statement.value)
    )


def _is_set(node: ast.AST) -> bool:
    """Whether an expression is `self.name` that is assigned to."""
    return is_self(node) and isinstance(node.ctx, ast.Store)  # pyright: ignore


def _explicit(slot: Slot) -> str | None:
    """The constant name that the program gave."""
    node = name_node(slot)
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) else None


def name_node(slot: Slot) -> ast.expr | None:
    """The expression of the name that the program gave."""
    if slot.kind == "module":
        return next((k.value for k in slot.constructor.keywords if k.arg == "name"), None)
    position = 0 if slot.kind == "param" else 1
    if len(slot.node.args) > position:
        return slot.node.args[position]
    return next((k.value for k in slot.node.keywords if k.arg == "name"), None)


def _wish(program: Program, slot: Slot) -> str:
    node = name_node(slot)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _identifier(node.value)
    if isinstance(node, ast.JoinedStr):
        fixed = "".join(str(v.value) for v in node.values if isinstance(v, ast.Constant))
        return _identifier(fixed.strip("_-. ") or "layers")
    if slot.kind != "module":
        names = {str(making.name) for making in slot.makings}
        return _identifier(names.pop()) if len(names) == 1 else slot.variable or slot.kind
    cls = program.records.base_of(slot.makings[0].cls)
    name = cls.__name__ if cls is not None else "layer"
    if program.records.functions_that_make.get(cls or Slot):
        name = _MAKES.sub("", name) or name
    layer = layer_of(cls)
    if layer is not None and layer.native is nnx.MultiHeadAttention and not program.keep_names:
        name = "Attention"
    if (
        program.keep_names
        and not slot.is_list
        and len(slot.makings) == len({(m.run, m.owner) for m in slot.makings})
    ):
        paths = {m.path[-1] for m in slot.makings if m.path}
        if len(paths) == 1:
            return next(iter(paths))
    if slot.is_list:
        return f"{snake(name)}s" if not name.endswith("s") else snake(name)
    return slot.variable if slot.variable and len(slot.variable) > 1 else snake(name)


def _identifier(text: str) -> str:
    text = re.sub(r"\W", "_", text)
    return f"_{text}" if text[:1].isdigit() else text or "layer"


CONTAINERS = {
    ast.List: "List",
    ast.Tuple: "List",
    ast.ListComp: "List",
    ast.Dict: "Dict",
    ast.DictComp: "Dict",
}


def stored_in(plan: ClassPlan, slot: Slot) -> tuple[str | None, bool]:
    """The attribute that `setup` puts what a slot makes into, and whether it is that alone.

    None if it puts it into no attribute; a container may be filled by its local name.
    """
    source, setup = plan.source, slot.method
    if setup.name != "setup":
        return None, False
    statement = source.statement_of(slot.node)
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if target is not None and is_self(target):
        parent = source.parents[slot.node]
        parent = source.parents[parent] if isinstance(parent, ast.IfExp) else parent
        return target.attr, parent is statement  # pyright: ignore
    name = target.id if isinstance(target, ast.Name) else grown_name(statement)
    found = [
        (each.targets[0].attr, value)  # pyright: ignore
        for each in ast.walk(setup)
        if isinstance(each, ast.Assign) and is_self(each.targets[0])
        if isinstance(value := same_items(each.value), ast.Name) and value.id == name
    ]
    if slot.variable is None:
        return (found[0][0] if found else None), False
    own = [each for each in plan.slots.values() if each.method is setup]
    made = {source.statement_of(e.node) for e in own if e.variable == slot.variable}
    is_one = len(found) == 1 and made.issuperset(binding(setup, slot.variable))
    return (found[0][0], True) if is_one else (None, False)


def same_items(value: ast.expr) -> ast.expr:
    """What `tuple(items)` has the items of."""
    while (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and (value.func.id in SAME_ITEMS and value.args)
    ):
        value = value.args[0]
    return value


def is_apart(source: Source, slot: Slot) -> bool:
    """Whether what a slot makes is handed on by a variable, in another statement."""
    statement = source.statement_of
    return slot.outer is not None and statement(slot.node) is not statement(slot.outer.node)


def held_attributes(program: Program, plan: ClassPlan, setup: ast.FunctionDef) -> dict[str, str]:
    """The attributes that hold several modules, with `List` or `Dict`."""
    slots = [slot for slot in plan.slots.values() if slot.method is setup]
    made = {slot.node for slot in slots}
    inside = _held_variables(setup, made)
    found: dict[str, str] = {}
    for node in ast.walk(setup):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if not is_self(target):
                continue
            value = same_items(node.value)
            kind = _several(program, slots, value)
            if not kind and isinstance(value, ast.GeneratorExp):
                kind = "List"
            elif not kind and isinstance(value, ast.Name):
                kind = inside.get(value.id, "")
            elif not kind and type(value) in CONTAINERS and made & {*ast.walk(value)}:
                kind = CONTAINERS[type(value)]
            if kind:
                found[target.attr] = kind  # pyright: ignore
    return found


def _several(program: Program, slots: list[Slot], value: ast.expr) -> str:
    """`List` or `Dict` for the call of a function that returns several layers."""
    slot = next((s for s in slots if s.node is value), None)
    function = called_function(program, slot) if slot is not None else None
    return function.returns_several if function is not None else ""


def _held_variables(setup: ast.FunctionDef, made: set[ast.Call]) -> dict[str, str]:
    """Local names of containers that modules are put in."""
    kinds: dict[str, str] = {}
    filled: set[str] = set()
    for node in ast.walk(setup):
        if isinstance(node, ast.Assign) and type(node.value) in CONTAINERS:
            for name in bound_in(node):
                kinds[name] = CONTAINERS[type(node.value)]
            if any(each in made for each in ast.walk(node.value)):
                filled |= bound_in(node)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                    filled.add(target.value.id)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and (node.func.attr in ("append", "extend", "insert"))
            and isinstance(node.func.value, ast.Name)
        ):
            filled.add(node.func.value.id)
    return {name: kind for name, kind in kinds.items() if name in filled}
