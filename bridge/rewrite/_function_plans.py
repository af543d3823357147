"""Plans for functions that make layers: which of their arguments a constructor knows."""

from __future__ import annotations

import ast
import dataclasses

from ._plans import ClassPlan, LeftLinenError, Program, Slot
from ._records import Records
from ._source import Source
from ._taint import Taint


@dataclasses.dataclass
class FunctionPlan(ClassPlan):
    """A function at the top of a file.

    One that calls its layers becomes a class; one that returns them stays a function.

    Attributes:
        function: its source.
        returns_layers: whether it returns the layers.
        returns_several: `List` or `Dict` if it returns a list or a dict of layers, else `""`.
        name_in_file: what it is called in the new file.
        known: the arguments that a constructor knows.
        constructed: those of them that its own constructor takes.
        dropped: the arguments that its call no longer takes.
    """

    function: ast.FunctionDef = dataclasses.field(default_factory=lambda: _NONE)
    returns_layers: bool = False
    returns_several: str = ""
    name_in_file: str = ""
    known: set[str] = dataclasses.field(default_factory=set)
    constructed: list[str] = dataclasses.field(default_factory=list)
    dropped: set[str] = dataclasses.field(default_factory=set)

    @property
    def methods(self) -> dict[str, ast.FunctionDef]:
        """The function itself."""
        return {self.function.name: self.function}

    @property
    def taken_names(self) -> set[str]:
        """The names that an attribute must not have."""
        return {*self.arguments, *self.sizes}

    @property
    def arguments(self) -> list[str]:
        """The names of the arguments."""
        given = self.function.args
        return [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]

    @property
    def rest(self) -> str | None:
        """The name of the dict of further arguments, None if there is none."""
        kwarg = self.function.args.kwarg
        return None if kwarg is None else kwarg.arg

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.name


_NONE = ast.FunctionDef("", ast.arguments([], [], None, [], [], None, []), [], [])  # pyright: ignore


def function_plan(records: Records, cls: type, source: Source, line: int) -> FunctionPlan | None:
    """The plan of the function that a class stands for, None if it is not at the top of a file."""
    node = next(
        (
            each
            for each in source.tree.body
            if isinstance(each, ast.FunctionDef)
            and line in (each.lineno, *(d.lineno for d in each.decorator_list))
        ),
        None,
    )
    if node is None:
        return None
    plan = FunctionPlan(cls, node, source)  # pyright: ignore
    plan.function, plan.returns_layers = node, records.functions_that_make[cls]
    camel = "".join(part[:1].upper() + part[1:] for part in node.name.split("_"))
    taken = {name for each in source.tree.body for name in [getattr(each, "name", None)] if name}
    plan.name_in_file = node.name
    if not plan.returns_layers:
        plan.name_in_file = camel if camel not in taken else f"{camel}Layers"
    places = [m.place for m in records.makings if m.owner_cls is cls and m.kind == "module"]
    if any(p and p[0] != "layers" for p in places):
        plan.returns_several = (
            "List" if all(p is None or p[0].isdigit() for p in places if p) else "Dict"
        )
    if node.decorator_list:
        plan.leave("a function with a decorator makes a layer", node.lineno)
    if node.args.vararg or (node.args.kwarg and not plan.returns_layers):
        plan.leave("a function with * arguments makes a layer", node.lineno)
    return plan


def find_known(program: Program) -> None:
    """Tells for each function which arguments no call computes from what its module was given."""
    plans = [plan for plan in program.plans.values() if isinstance(plan, FunctionPlan)]
    for plan in plans:
        plan.known = set(plan.arguments)
    changed = bool(plans)
    while changed:
        changed = False
        for caller in program.plans.values():
            for slot in caller.slots.values():
                plan = called_function(program, slot)
                if plan is None:
                    continue
                taint = taint_of(caller, slot.method)
                try:
                    given = bound(plan, slot.node)
                except LeftLinenError as error:
                    caller.leave(error.reason, slot.node.lineno)
                    break
                for name, node in given:
                    if not taint.touches(node):
                        continue
                    if name not in plan.arguments:
                        plan.leave("a function passes on what only the call knows", node.lineno)
                    if name in plan.known:
                        plan.known.discard(name)
                        changed = True


def taint_of(plan: ClassPlan, method: ast.FunctionDef) -> Taint:
    """What depends on a call in one method."""
    known = {*plan.known, plan.rest or ""} if isinstance(plan, FunctionPlan) else ()
    nodes = (slot.node for slot in plan.slots.values() if slot.method is method)
    return Taint(method, nodes, plan.mode_fields, known)


def called_function(program: Program, slot: Slot) -> FunctionPlan | None:
    """The function that a slot calls, None if it makes a module."""
    found = program.plan_of(slot.makings[0].cls) if slot.makings else None
    return found if isinstance(found, FunctionPlan) else None


def bound(plan: FunctionPlan, node: ast.Call) -> list[tuple[str, ast.expr]]:
    """The arguments of a call by name.

    Raises:
        LeftLinenError: they cannot be told.
    """
    if any(isinstance(a, ast.Starred) for a in node.args) or any(
        k.arg is None for k in node.keywords
    ):
        raise LeftLinenError("a function that makes layers is given * or ** arguments", node)
    found = list(zip(plan.arguments, node.args, strict=False))
    return [*found, *((str(k.arg), k.value) for k in node.keywords)]
