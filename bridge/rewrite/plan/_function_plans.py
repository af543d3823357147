"""Plans for functions that make layers: which of their arguments a constructor knows."""

from __future__ import annotations

import ast
import dataclasses
import itertools

from bridge._train_eval import MODE_FIELDS
from bridge.rewrite.syntax._source import Source, arguments_of, bound_in, names_in
from bridge.rewrite.syntax._taint import Taint

from ._plans import ClassPlan, Program, Slot
from ._refusals import NotRewritableError, refused


@dataclasses.dataclass
class FunctionPlan(ClassPlan):
    """A function at the top of a file, or one in a method that reads none of the method's names.

    One that calls its layers becomes a class; one that returns them stays a function.

    Attributes:
        function: its source.
        returns_layers: whether it returns the layers.
        returns_several: `List` or `Dict` if it returns a list or a dict of layers, else `""`.
        name_in_file: what it is called in the new file.
        known: the arguments that a constructor knows.
        modes: of one that returns layers, the arguments that nothing but modes of layers read.
        modules: the arguments that are the module whose method calls it.
        around: the class that it is in, None for one at the top of the file.
    """

    function: ast.FunctionDef = dataclasses.field(default_factory=lambda: _NONE)
    returns_layers: bool = False
    returns_several: str = ""
    name_in_file: str = ""
    known: set[str] = dataclasses.field(default_factory=set)
    modes: set[str] = dataclasses.field(default_factory=set)
    modules: set[str] = dataclasses.field(default_factory=set)
    around: ast.ClassDef | None = None

    @property
    def methods(self) -> dict[str, ast.FunctionDef]:
        """The function itself."""
        return {self.function.name: self.function}

    @property
    def call(self) -> ast.FunctionDef | None:
        """The function itself, unless it returns its layers."""
        return None if self.returns_layers else self.function

    @property
    def taken_names(self) -> set[str]:
        """The names that an attribute must not have."""
        return {*self.arguments, *self.sizes}

    @property
    def arguments(self) -> list[str]:
        """The names of the arguments."""
        return [each.arg for each in arguments_of(self.function)]

    @property
    def rest(self) -> str | None:
        """The name of the dict of further arguments, None if there is none."""
        kwarg = self.function.args.kwarg
        return None if kwarg is None else kwarg.arg

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.name

    @property
    def returns_one(self) -> bool:
        """Whether it makes one layer: its only one, or one of those that it may return."""
        return len(self.slots) == 1 or all(map(self._is_returned, self.slots))

    def _is_returned(self, node: ast.AST) -> bool:
        around = self.source.parents[node]
        while isinstance(around, ast.IfExp):
            around = self.source.parents[around]
        return isinstance(around, ast.Return)

    def left_around(self, program: Program) -> str | None:
        """The name of the class that it is in, if that one stays Linen."""
        if self.around is None:
            return None
        owner = next((p for p in program.plans.values() if p.node is self.around), None)
        return None if owner is not None and owner.refusal is None else self.around.name


_NONE = ast.FunctionDef("", ast.arguments([], [], None, [], [], None, []), [], [])  # pyright: ignore


def function_plan(program: Program, cls: type, source: Source, line: int) -> FunctionPlan | None:
    """The plan of the function that a class stands for, None if its source is not found."""
    node = next(
        (
            each
            for each in ast.walk(source.tree)
            if isinstance(each, ast.FunctionDef)
            and line in (each.lineno, *(d.lineno for d in each.decorator_list))
        ),
        None,
    )
    if node is None:
        return None
    records, plan = program.records, FunctionPlan(cls, node, source)  # pyright: ignore
    plan.function, plan.returns_layers = node, records.functions_that_make[cls]
    classes = [each for each in source.ancestors(node) if isinstance(each, ast.ClassDef)]
    plan.around = classes[0] if classes else None
    camel = "".join(part[:1].upper() + part[1:] for part in node.name.split("_"))
    camel = camel if plan.around is None else f"{plan.around.name}{camel}"
    taken = {name for each in source.tree.body for name in [getattr(each, "name", None)] if name}
    plan.name_in_file = node.name
    if not plan.returns_layers:
        # Two methods may each have a `block`.
        own = [p for p in program.plans.values() if p.source is source]
        taken |= {p.name_in_file for p in own if isinstance(p, FunctionPlan)}
        numbered = (f"{camel}{number}" for number in itertools.count(2))
        names = itertools.chain((camel, f"{camel}Layers"), numbered)
        plan.name_in_file = next(name for name in names if name not in taken)
    places = [m.place for m in records.makings if m.owner_cls is cls and m.kind == "module"]
    if any(p and p[0] != "layers" for p in places):
        plan.returns_several = (
            "List" if all(p is None or p[0].isdigit() for p in places if p) else "Dict"
        )
    if node not in source.tree.body and plan.around not in source.tree.body:
        plan.refuse(refused("function-in-function", node.lineno))
    elif plan.around is not None:
        if plan.returns_layers:
            plan.refuse(refused("function-returns-inside", node.lineno))
        if _local_names(source, node) & {n for d in _defaults(node) for n in names_in(d)}:
            plan.refuse(refused("function-defaults", node.lineno))
    if node.decorator_list:
        plan.refuse(refused("function-decorator", node.lineno))
    if node.args.vararg or (node.args.kwarg and not plan.returns_layers):
        plan.refuse(refused("function-stars", node.lineno))
    return plan


def _defaults(node: ast.FunctionDef) -> list[ast.expr]:
    return [each for each in (*node.args.defaults, *node.args.kw_defaults) if each is not None]


def _local_names(source: Source, node: ast.FunctionDef) -> set[str]:
    """What the functions around one bind."""
    found: set[str] = set()
    for each in source.ancestors(node):
        if isinstance(each, ast.FunctionDef):
            own = (each.args.vararg, each.args.kwarg)
            given = [*arguments_of(each), *own]
            found |= {argument.arg for argument in given if argument is not None}
            found |= set().union(*map(bound_in, each.body))
    return found


def functions_in(program: Program, source: Source, method: ast.AST) -> set[ast.FunctionDef]:
    """The functions inside a method, or of a function, that become classes of their own."""
    plans = [plan for plan in program.plans.values() if isinstance(plan, FunctionPlan)]
    return {
        plan.function
        for plan in plans
        if plan.source is source and method in source.ancestors(plan.function)
    }


def find_known(program: Program) -> None:
    """Tells for each function which arguments no call computes from what its module was given.

    A function that returns layers is told dimensions, and the calls of its layers have the modes.
    """
    plans = [plan for plan in program.plans.values() if isinstance(plan, FunctionPlan)]
    for plan in plans:
        plan.modes = _modes(plan) if plan.returns_layers else set()
        plan.known = set(plan.arguments) - plan.modes
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
                except NotRewritableError as error:
                    caller.refuse(dataclasses.replace(error.refusal, line=slot.node.lineno))
                    break
                for name, node in given:
                    if isinstance(node, ast.Name) and node.id == "self":
                        plan.modules.add(name)
                    if not taint.touches(node) or (plan.returns_layers and _is_size(node, taint)):
                        continue
                    if name not in plan.arguments:
                        plan.refuse(refused("function-passes-on", node.lineno))
                    if name in plan.known:
                        plan.known.discard(name)
                        changed = True


def _modes(plan: FunctionPlan) -> set[str]:
    slots = plan.slots.values()
    modes = [k for slot in slots for k in slot.constructor.keywords if k.arg in MODE_FIELDS]
    inside = {each for k in modes for each in ast.walk(k.value)}
    names = [each for each in ast.walk(plan.function) if isinstance(each, ast.Name)]
    of_modes = {each.id for each in names if each in inside}
    return of_modes & {*plan.arguments} - {each.id for each in names if each not in inside}


def _is_size(node: ast.expr, taint: Taint) -> bool:
    """Whether an expression is a dimension of an argument, or computed from such."""
    dimensions = taint.dimensions
    return dimensions.of(node) is not None or dimensions.computes(node, taint.touches)


def taint_of(plan: ClassPlan, method: ast.FunctionDef) -> Taint:
    """What depends on a call in one method."""
    known = {*plan.known, plan.rest or ""} if isinstance(plan, FunctionPlan) else ()
    nodes = (slot.node for slot in plan.slots.values() if slot.method is method)
    return Taint(method, nodes, plan.mode_fields, known, plan.moved)


def called_function(program: Program, slot: Slot) -> FunctionPlan | None:
    """The function that a slot calls, None if it makes a module."""
    found = program.plan_of(slot.makings[0].cls) if slot.makings else None
    return found if isinstance(found, FunctionPlan) else None


def bound(plan: FunctionPlan, node: ast.Call) -> list[tuple[str, ast.expr]]:
    """The arguments of a call by name.

    Raises NotRewritableError if they are not known.
    """
    if any(isinstance(a, ast.Starred) for a in node.args) or any(
        k.arg is None for k in node.keywords
    ):
        raise NotRewritableError("function-call-stars", node)
    found = list(zip(plan.arguments, node.args, strict=False))
    return [*found, *((str(k.arg), k.value) for k in node.keywords)]
