"""How functions, classes and modules are told."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from .classes import class_parts
from .code_names import IS_FOUNDATION, Code, uses
from .walk import EMPTY, UNREAD, ParentTellers, Tellers, Walk, identity


class UsedModule(NamedTuple):
    """A module of which code uses some names."""

    module: types.ModuleType
    names: tuple[str, ...]


def function(walk: Walk, value: types.FunctionType) -> None:
    cells = value.__closure__ or ()
    code = value.__code__
    holds: list[Any] = [value.__defaults__, value.__kwdefaults__]
    used = uses(code) if cells or not _is_of_foundation(value) else None
    for name, cell in zip(code.co_freevars, cells, strict=True):
        held = cell.cell_contents if _is_set(cell) else EMPTY
        holds.append(held if used is None or used.reads(name, held) else UNREAD)
    found: tuple[str, ...] = ()
    if used is not None and not walk.made and not _is_of_foundation(value):
        named = dict(_globals(value, used))
        found = tuple(named)
        holds += named.values()
    if cells and not _is_of_foundation(value):
        walk.mutable(value)
    extra = value.__dict__
    names = (value.__module__, value.__name__, value.__qualname__)
    walk.header(types.FunctionType, code, names, found, bool(extra), holds=holds)
    if extra:
        walk.pending.append(extra)


def partial(walk: Walk, value: Any) -> None:
    holds = [value.func, value.args, dict(value.keywords), value.__dict__]
    walk.header(functools.partial, holds=holds)


def method(walk: Walk, value: Any) -> None:
    walk.header(types.MethodType, holds=[value.__func__, value.__self__])


def builtin(walk: Walk, value: Any) -> None:
    owner = value.__self__
    is_plain = owner is None or isinstance(owner, types.ModuleType)
    walk.header(type(value), value.__qualname__, value.__module__, is_plain)
    if not is_plain:
        walk.pending.append(owner)


def jitted(walk: Walk, value: Any) -> None:
    walk.header(type(value), walk.number(value), holds=[getattr(value, "__wrapped__", None)])


def class_(walk: Walk, value: type) -> None:
    if IS_FOUNDATION[value.__module__]:
        walk.header(type, value)
        return
    if walk.made and "<locals>" not in value.__qualname__:
        walk.header(type, identity(value))
        return
    names, held = zip(*class_parts(value, calls=walk.calls), strict=True)
    walk.header(type, walk.number(value), names, holds=held)


def module(walk: Walk, value: types.ModuleType) -> None:
    if IS_FOUNDATION[value.__name__]:
        walk.header(types.ModuleType, value.__name__)
        return
    own = {k: v for k, v in vars(value).items() if not k.startswith("__")}
    walk.header(types.ModuleType, identity(value), holds=[own])


def used_module(walk: Walk, value: UsedModule) -> None:
    own = vars(value.module)
    held = {name: own[name] for name in value.names if name in own}
    held = {n: _used(v, value.names) for n, v in held.items() if v is not value.module}
    walk.header(UsedModule, identity(value.module), tuple(held), holds=held.values())


def property_(walk: Walk, value: property) -> None:
    walk.header(property, holds=[value.fget, value.fset, value.fdel])


def class_method(walk: Walk, value: Any) -> None:
    walk.header(type(value), holds=[value.__func__])


def descriptor(walk: Walk, value: Any) -> None:
    walk.header(type(value), value.__name__, holds=[value.__objclass__])


def cell(walk: Walk, value: types.CellType) -> None:
    walk.header(types.CellType, holds=[value.cell_contents if _is_set(value) else EMPTY])


def method_of_builtin(walk: Walk, value: Any) -> None:
    walk.header(type(value), value.__name__, holds=[value.__self__])


def _is_of_foundation(function: types.FunctionType) -> bool:
    return IS_FOUNDATION[function.__globals__.get("__name__")]


def _globals(function: types.FunctionType, used: Code) -> list[tuple[str, Any]]:
    """What the code names in its own module, and in modules that it imports when it runs."""
    own = function.__globals__
    found = [
        (name, _used(own[name], used.names))
        for name in used.global_names
        if name in own and used.reads(name, own[name])
    ]
    for name in used.imports:
        found += [(name, UsedModule(m, used.names)) for m in _imported(name, own)]
    return [(name, value) for name, value in found if type(value) is not types.ModuleType]


def _imported(name: str, own: Mapping[str, Any]) -> list[types.ModuleType]:
    """The modules that may be meant, as far as they are loaded."""
    package = own.get("__package__") or ""
    above = itertools.accumulate(package.split("."), lambda a, b: f"{a}.{b}")
    candidates = [sys.modules.get(f"{p}.{name}" if name else p) for p in above]
    found = [m for m in (sys.modules.get(name), *candidates) if m is not None]
    return [m for m in found if not IS_FOUNDATION[m.__name__]]


def _used(value: Any, names: tuple[str, ...]) -> Any:
    is_own = isinstance(value, types.ModuleType) and not IS_FOUNDATION[value.__name__]
    return UsedModule(value, names) if is_own else value


def _is_set(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - reading is how to ask
    except ValueError:
        return False
    return True


# Keyed by the exact type.
BY_TYPE: Tellers = {
    types.FunctionType: function,
    types.MethodType: method,
    types.BuiltinFunctionType: builtin,
    types.MethodWrapperType: method_of_builtin,
    types.WrapperDescriptorType: descriptor,
    types.MethodDescriptorType: descriptor,
    types.ClassMethodDescriptorType: descriptor,
    types.GetSetDescriptorType: descriptor,
    types.MemberDescriptorType: descriptor,
    types.CellType: cell,
    types.ModuleType: module,
    functools.partial: partial,
    UsedModule: used_module,
    property: property_,
    staticmethod: class_method,
    classmethod: class_method,
    type(jax.jit(lambda: None)): jitted,
    type(functools.lru_cache(lambda: None)): jitted,
}
# Keyed by a base type; the first match counts.
BY_PARENT: ParentTellers = [
    (type, class_),
    (types.ModuleType, module),
]
