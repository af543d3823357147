"""What a piece of Python code uses from outside: the names that it reads."""

from __future__ import annotations

import dis
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

# Python, JAX, Flax, NumPy, this package and whatever else is installed are taken as they are. What
# their code does depends on its arguments and on JAX's and Flax's settings, which `_construction`
# adds to its keys. Through an installed package everything that is imported may be reached, much
# of it nothing that can be told, and then no two looks at a constructor would be equal.
_FOUNDATION = frozenset(
    {"jax", "jaxlib", "flax", "flaxlib", "numpy", "ml_dtypes", "bridge", "registry"}
) | (sys.stdlib_module_names - {"__main__"})

# Methods that only write and return None: a list that is only appended to does not affect the code.
_WRITES = frozenset({"append", "extend", "insert", "add", "update"})
_WRITTEN = (list, set)


class Code(NamedTuple):
    """What a code object, and the code nested in it, uses.

    Attributes:
      code: a weak reference to the code object.
      names: the names of globals and attributes.
      global_names: those of globals.
      imports: the modules that it imports when it runs, without the dots before their names.
      read: names of globals and of closure cells that are used for more than a method that only
        writes, such as `append`.
    """

    code: weakref.ref[types.CodeType]
    names: tuple[str, ...]
    global_names: tuple[str, ...]
    imports: tuple[str, ...]
    read: frozenset[str]

    def reads(self, name: str, value: Any) -> bool:
        """Whether the contents of a global or of a cell may decide what the code does."""
        return name in self.read or type(value) not in _WRITTEN


# By id: hashing a code object reads all of it, at every look-up.
_known: dict[int, Code] = {}


def uses(code: types.CodeType) -> Code:
    """What a code object uses."""
    found = _known.get(id(code))
    if found is not None and found.code() is code:
        return found
    every = list(_nested(code))
    names = dict.fromkeys(name for c in every for name in c.co_names)
    global_names = dict.fromkeys(name for c in every for name in _loaded(c))
    imports = dict.fromkeys(name for c in every for name in _imported(c))
    read = frozenset(name for c in every for name in _read(c))
    key = id(code)
    ref = weakref.ref(code, lambda ref: _forget(key, ref))
    made = Code(ref, tuple(names), tuple(global_names), tuple(imports), read)
    _known[key] = made
    return made


class _Foundation(dict[Any, bool]):
    """A dict, because its look-up makes no Python call."""

    def __missing__(self, module: Any) -> bool:
        package = module.partition(".")[0] if type(module) is str else ""
        found = package in _FOUNDATION or _is_installed(package)
        self[module] = found
        return found


_INSTALLED = tuple({os.path.join(sysconfig.get_path(k), "") for k in ("purelib", "platlib")})


def _is_installed(package: str) -> bool:
    loaded = sys.modules.get(package)
    places = [getattr(loaded, "__file__", None), *getattr(loaded, "__path__", ())]
    return any(place.startswith(_INSTALLED) for place in places if place)


# Whether a module's name is that of Python, JAX, Flax, NumPy, this or another installed package.
IS_FOUNDATION = _Foundation()


def _forget(key: int, ref: Any) -> None:
    found = _known.get(key)
    if found is not None and found.code is ref:
        del _known[key]


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


# An attribute may have the name of a global that the code does not use.
_LOADS_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


def _loaded(code: types.CodeType) -> Iterator[str]:
    return (i.argval for i in dis.get_instructions(code) if i.opname in _LOADS_GLOBAL)


def _imported(code: types.CodeType) -> Iterator[str]:
    return (i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME")


def _read(code: types.CodeType) -> Iterator[str]:
    """Names of globals and cells that are loaded for anything but a call of a writing method."""
    instructions = list(dis.get_instructions(code))
    cells = {*code.co_cellvars, *code.co_freevars}
    for now, after in zip(instructions, [*instructions[1:], None], strict=True):
        loads_cell = now.argval in cells and now.opname.startswith("LOAD")
        # A nested function receives the cell itself; its own code says how it uses the cell.
        passes_cell = now.opname in ("LOAD_CLOSURE", "LOAD_FAST")
        loads_name = now.opname in _LOADS_GLOBAL
        if loads_name or (loads_cell and not passes_cell):
            is_method = after is not None and after.opname in ("LOAD_METHOD", "LOAD_ATTR")
            if not (is_method and after is not None and after.argval in _WRITES):
                yield now.argval
