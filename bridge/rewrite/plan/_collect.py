"""The classes of the user's package that a trace reached, and what is known of them."""

from __future__ import annotations

import ast
import functools
import inspect
import pathlib
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
from flax import linen as nn

from bridge._train_eval import MODE_FIELDS
from bridge.rewrite._failures import said
from bridge.rewrite.observe._records import Records
from bridge.rewrite.syntax._source import Source, is_free, is_self, origins, source_of

from ._class_fields import fields_of, module_default
from ._function_plans import FunctionPlan, find_known, function_plan, taint_of
from ._layers import layer_base
from ._makers import find_makers, follow_methods, is_mixed
from ._plans import ClassPlan, Program, Slot
from ._references import references_of
from ._refusals import NotRewritableError, refused
from ._slots import find_slots

# Those that have a namesake in NNX.
_BASES = (nn.Module, nn.RNNCellBase)


def class_of_program(module: nn.Module) -> type | None:
    """The first class of a module, or of one in it, that is not Flax's; None without one.

    A model may be `nn.vmap(Mlp)(...)` or an `nn.Sequential`.
    """
    for cls in type(module).__mro__:
        is_module = issubclass(cls, nn.Module) and cls is not nn.Module
        if is_module and not cls.__module__.startswith("flax."):
            return cls
    values = [value for name, value in vars(module).items() if name != "parent"]
    inner = [each for each in jax.tree.leaves(values) if isinstance(each, nn.Module)]
    return next((found for each in inner if (found := class_of_program(each))), None)


def inside_of(roots: Iterable[type]) -> Callable[[str], bool]:
    """Whether a file belongs to the package of one of the classes, or to the folder of a script."""
    places: set[pathlib.Path] = set()
    for root in roots:
        module = sys.modules.get(root.__module__)
        file = getattr(module, "__file__", None)
        if file is not None:
            # A package need not have an `__init__.py`.
            top = sys.modules.get(root.__module__.partition(".")[0])
            folders = list(getattr(top, "__path__", ())) or [pathlib.Path(file).parent]
            places |= {pathlib.Path(folder).resolve() for folder in folders}

    def inside(file: str) -> bool:
        if file.startswith("<") or not file.endswith(".py"):
            return False
        path = pathlib.Path(file).resolve()
        return any(path.is_relative_to(place) for place in places)

    return inside


def collect(records: Records, inside: Callable[[str], bool]) -> Program:
    """Plans for all classes that were reached, the classes that others make first."""
    program = Program(records, {}, {})
    made = [m.cls for m in records.makings if m.kind == "module" and m.cls is not None]
    # Functions of one name in two classes stay in the order in which they ran.
    reached = dict.fromkeys([*(i.cls for i in records.instances.values()), *made])
    ordered = sorted(reached, key=lambda c: (c.__module__, c.__qualname__))
    for cls in dict.fromkeys(base for each in ordered for base in each.__mro__):
        if cls in program.plans or not issubclass(cls, nn.Module) or cls in _BASES:
            continue
        site = next((s for s, made in records.function_classes.items() if made is cls), None)
        if site is not None:
            source = parsed(program, site.file)
            plan = function_plan(program, cls, source, site.span.line)
        else:
            plan = plan_of(cls, inside, program)
        if plan is not None:
            program.plans[cls] = plan
    for plan in program.plans.values():
        plan.bases = [program.plans[b] for b in plan.cls.__mro__[1:] if b in program.plans]
        foreign = [
            b
            for b in plan.cls.__mro__[1:]
            if issubclass(b, nn.Module) and b not in (*_BASES, *program.plans)
        ]
        if foreign:
            plan.layer = layer_base(plan.cls, program.plans)
        if foreign and plan.layer is None:
            plan.refuse(refused("base-elsewhere", base=foreign[0].__name__))
        if not isinstance(plan, FunctionPlan):
            plan.fields = list(fields_of(plan))
        try:
            follow_methods(program, plan, references_of(program, plan))
            find_slots(program, plan)
            _check_lifted(program, plan)
        except NotRewritableError as error:
            plan.refuse(error.refusal)
        except Exception as error:
            plan.refuse(refused("rewriter-failed", error=said(error)))
    find_makers(program, inside)
    find_known(program)
    _modes(program)
    program.plans = _ordered(program)
    return program


def plan_of(cls: type, inside: Callable[[str], bool], program: Program) -> ClassPlan | None:
    """The plan of a class, None if its source is not there or not of the package."""
    if cls.__module__.startswith("flax."):
        return None
    module = sys.modules.get(cls.__module__)
    try:
        file = inspect.getsourcefile(cls)
    except (TypeError, OSError):
        file = getattr(module, "__file__", None)
    if file is None or file.startswith("<"):
        program.unreadable[cls] = (file or cls.__module__, refused("no-file"))
        return None
    if not inside(file):
        return None
    try:
        source = parsed(program, file)
    except (SyntaxError, UnicodeDecodeError, OSError) as error:
        program.unreadable[cls] = (file, refused("not-utf8", error=type(error).__name__))
        return None
    node = class_node(source, cls)
    if node is None:
        if not any(
            issubclass(base, nn.Module) and base.__name__ in cls.__name__ and base is not cls
            for base in cls.__mro__[1:2]
        ):
            program.unreadable[cls] = (file, refused("not-at-top"))
        return None
    return ClassPlan(cls, node, source)


def parsed(program: Program, file: str) -> Source:
    """The source of a file.

    Raises SyntaxError if it is not Python, and UnicodeDecodeError if it is not UTF-8.
    """
    source = source_of(file, pathlib.Path(file).stat().st_mtime)
    program.sources[file] = source
    return source


def class_node(source: Source, cls: type) -> ast.ClassDef | None:
    """Where a class is defined at the top of a file."""
    found: list[ast.ClassDef] = [
        n for n in source.tree.body if isinstance(n, ast.ClassDef) and n.name == cls.__name__
    ]
    if cls.__qualname__ != cls.__name__ or not found:
        return None
    methods = {n.name for n in found[-1].body if isinstance(n, ast.FunctionDef)}
    # A field may have a function for its default.
    targets = (n.target for n in found[-1].body if isinstance(n, ast.AnnAssign))
    methods |= {target.id for target in targets if isinstance(target, ast.Name)}
    own = {
        n
        for n, v in vars(cls).items()
        if inspect.isfunction(v)
        and not n.startswith("__")
        and inspect.unwrap(v).__module__ == cls.__module__
    }
    return found[-1] if own <= methods | {"__call__"} else None


def _check_lifted(program: Program, plan: ClassPlan) -> None:
    if plan.node.decorator_list and not _is_bound(plan):
        texts = [ast.unparse(d) for d in plan.node.decorator_list]
        plan.refuse(refused("class-decorator", plan.node.lineno, decorator=texts[0]))
    if plan.cls in program.records.foreign and plan.layer is None:
        name = program.records.foreign[plan.cls]
        plan.refuse(refused("foreign-parameter", plan.node.lineno, name=name))
    for making in program.records.makings:
        if making.kind == "module" and making.owner is None and making.path:
            holder = program.records.instances.get((making.run, making.path[:-1]))
            if holder is not None and holder.cls is plan.cls:
                plan.refuse(refused("outside-layer", making.site.span.line))
        if (
            making.owner_cls is plan.cls
            and making.kind == "module"
            and (
                making.site.file != plan.source.file
                or plan.source.call_at(making.site.span) not in plan.slots
            )
            and not _in_base(making, plan)
            and not _is_free(making, plan)
        ):
            plan.refuse(refused("outside-layer", making.site.span.line))


def _is_bound(plan: ClassPlan) -> bool:
    """Whether a class is what its name stands for: its decorators returned it, as it was."""
    module = sys.modules.get(plan.cls.__module__)
    written = range(plan.node.lineno, (plan.node.end_lineno or plan.node.lineno) + 1)
    functions = [
        inspect.unwrap(each)
        for name, each in vars(plan.cls).items()
        if inspect.isfunction(each) and not name.startswith("__")
    ]
    return getattr(module, plan.cls.__name__, None) is plan.cls and all(
        each.__module__ != plan.cls.__module__ or each.__code__.co_firstlineno in written
        for each in functions
    )


def _is_free(making: Any, plan: ClassPlan) -> bool:
    node = plan.source.call_at(making.site.span)
    return making.site.file == plan.source.file and node is not None and is_free(node)


def _in_base(making: Any, plan: ClassPlan) -> bool:
    return any(
        making.site.file == base.source.file
        and base.node.lineno <= making.site.span.line <= (base.node.end_lineno or 0)
        for base in plan.bases
    )


def _modes(program: Program) -> None:
    """Which fields bring a mode: a bool or a rate that a call decides, or a partial with one."""
    for plan in program.plans.values():
        own = [i for i in program.records.instances.values() if i.cls is plan.cls]
        for field in plan.fields:
            for instance in own:
                value = instance.fields.get(field.name)
                if isinstance(value, functools.partial):
                    modes = {m for m in MODE_FIELDS if isinstance(value.keywords.get(m), bool)}
                    if modes:
                        plan.carried.setdefault(field.name, set()).update(modes)
    changed = True
    while changed:
        changed = False
        for plan in program.plans.values():
            methods = {slot.method for slot in plan.slots.values()}
            taints = {method: taint_of(plan, method) for method in methods}
            for slot in plan.slots.values():
                taint = taints[slot.method]
                for making in slot.makings:
                    child = program.plan_of(program.records.base_of(making.cls))
                    if child is None or child.layer is not None:
                        continue
                    order = [field.name for field in child.fields if not field.is_named]
                    made = slot.constructor
                    given = list(zip(order, made.args, strict=False))
                    given += [(str(k.arg), k.value) for k in made.keywords if k.arg in order]
                    brought = [k for k in _of_partials(program, plan, slot) if k.arg in order]
                    given += [(str(k.arg), k.value) for k in brought]
                    for name, node in given:
                        modes = child.carried.get(name, set())
                        if name not in child.mixed and is_mixed(plan, slot.method, node, modes):
                            child.mixed.add(name)
                            changed = True
                        if not isinstance(making.made.get(name), bool | float):
                            continue
                        is_told = taint.touches(node) and not _is_of_shapes(plan, node, taint.names)
                        if is_told and name not in child.mode_fields:
                            child.mode_fields.add(name)
                            changed = True
                    plan.moved.update(k for k in brought if k.arg in child.mode_fields)
    for plan in program.plans.values():
        _check_modes(plan)


def _is_of_shapes(plan: ClassPlan, node: ast.AST, told: Collection[str]) -> bool:
    """Whether an expression reads the shapes alone of what a call gives, and so is no mode."""
    read = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in told]
    around: list[Any] = [plan.source.parents[each] for each in read]
    around = [plan.source.parents[a] if isinstance(a, ast.Subscript) else a for a in around]
    return bool(read) and all(isinstance(a, ast.Attribute) and a.attr == "shape" for a in around)


def _of_partials(program: Program, plan: ClassPlan, slot: Slot) -> list[ast.keyword]:
    """What the partial that a slot calls is given by name, where the method makes it."""
    references = references_of(program, plan)
    found = origins(slot.method, slot.node.func)
    calls = [each for each in found if isinstance(each, ast.Call) and each.args]
    return [k for call in calls if references.is_partial(call) for k in call.keywords]


def _check_modes(plan: ClassPlan) -> None:
    for name, method in plan.methods.items():
        if name == "__call__":
            continue
        for node in ast.walk(method):
            if is_self(node) and node.attr in plan.mode_fields:  # pyright: ignore
                field: str = node.attr  # pyright: ignore
                plan.refuse(refused("mode-read", method.lineno, name=field, method=name))


def _ordered(program: Program) -> dict[type, ClassPlan]:
    """Classes behind those that they make and derive from."""
    needs: dict[type, set[type]] = {
        cls: {b.cls for b in plan.bases} for cls, plan in program.plans.items()
    }
    for plan in program.plans.values():
        defaults = {module_default(field) for field in plan.fields}
        needs[plan.cls] |= {cls for cls in defaults if cls is not None and cls in program.plans}
        for slot in plan.slots.values():
            made = {program.records.base_of(m.cls) for m in slot.makings}
            needs[plan.cls] |= {cls for cls in made if cls is not None and cls in program.plans}
    found: dict[type, ClassPlan] = {}
    waiting = dict(program.plans)
    while waiting:
        ready = [cls for cls in waiting if not needs[cls] - found.keys()]
        if not ready:
            for cls in waiting:
                if needs[cls] & waiting.keys():
                    waiting[cls].refuse(refused("recursive"))
            ready = list(waiting)
        for cls in ready:
            found[cls] = waiting.pop(cls)
    return found
