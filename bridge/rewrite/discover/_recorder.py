"""Records the outermost Linen calls of a program, in the process that runs it.

A `sitecustomize` of a folder on PYTHONPATH starts it, see `_child.py`. The file imports nothing of
the bridge, so the program's own environment is enough, and nothing of Flax before the program does:
the program may set variables such as XLA_FLAGS first.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.machinery
import io
import marshal
import os
import pathlib
import pickle
import re
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

_LINEN = "flax.linen"
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_TEST_FILES = re.compile(r"(test_.*|.*_test|conftest)\.py")
_TEST_FOLDERS = {"test", "tests"}
_INSTALLED = {"site-packages", "dist-packages"}


def start(root: str, folder: str) -> None:
    """Records from the import of Linen on.

    Each process writes its records to a file in `folder`. `root` is the folder of the project.
    """
    sys.meta_path.insert(0, _WhenImported(Recorder(root, folder)))


class _WhenImported(importlib.abc.MetaPathFinder):
    """Switches a recorder on as soon as Linen is imported."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != _LINEN:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                self.recorder.intercept(module)

            spec.loader.exec_module = exec_module
        return spec


class Recorder:
    """Notes calls, each kind of call once.

    Records are written to `folder`. `root` is the folder of the project.
    """

    def __init__(self, root: str, folder: str) -> None:
        self.root, self.folder = pathlib.Path(root), pathlib.Path(folder)
        self._seen: set[Any] = set()
        self._running = threading.local()

    def intercept(self, linen: Any) -> None:
        """Looks on at all calls of this thread from now on."""
        self._interception = linen.intercept_methods(self._called)
        self._interception.__enter__()

    def _called(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        is_outermost = getattr(self._running, "call", None) is None
        if not is_outermost or context.method_name == "setup":
            return next_fun(*args, **kwargs)
        try:
            is_entry = self._note(context.module, context.method_name, args, kwargs)
        except Exception as error:
            # The program under test has to go on.
            self._write({"problem": f"{type(context.module).__name__}: {_said(error)}"})
            is_entry = False
        if not is_entry:
            return next_fun(*args, **kwargs)
        self._running.call = context.module
        try:
            return next_fun(*args, **kwargs)
        finally:
            self._running.call = None

    def _note(self, module: Any, method: str, args: Any, kwargs: Any) -> bool:
        """Writes a call down; False where one inside it may be the entry point."""
        cls = type(module)
        if cls.__module__.startswith("flax."):
            return False
        named = {"module": cls.__module__, "name": cls.__qualname__}
        file = _file_of(cls)
        reason = self._reason_against(cls, file) or self._reason_of_place(module)
        if reason is not None:
            if (cls, reason) not in self._seen:
                self._seen.add((cls, reason))
                self._write({**named, "file": file, "reason": reason})
            return False
        fields = dict(_fields(module))
        key = cls, method, ADDRESS.sub("", repr((fields, _without_sizes((args, kwargs)))))
        if key in self._seen:
            return True
        self._seen.add(key)
        unbound, _ = module.unbind()
        values = {("field", name): value for name, value in _fields(unbound)}
        values |= {("argument", n + 1): value for n, value in enumerate(_shapes(args))}
        values |= {("argument", name): value for name, value in _shapes(kwargs).items()}
        problems: list[str] = []
        blobs: dict[tuple[str, Any], bytes] = {}
        for (kind, name), value in values.items():
            try:
                blobs[kind, name] = dumped(value)
            except Exception as error:
                problems.append(f"{kind} {name} cannot be written down ({_said(error)})")
        path = pathlib.Path(str(file))
        self._write(
            {
                **named,
                "file": str(path.resolve()),
                "digest": hashlib.sha256(path.read_bytes()).hexdigest(),
                "path": [each or os.getcwd() for each in sys.path],
                "method": method,
                "values": blobs,
                "problems": problems,
                "rngs": sorted(module.scope.rngs),
                "mutable": repr(module.scope.mutable),
            }
        )
        return True

    def _reason_against(self, cls: type, file: str | None) -> str | None:
        """Why the calls of a class are not entry points."""
        path = None if file is None else pathlib.Path(file).resolve()
        if path is None or not path.is_relative_to(self.root):
            return "outside"
        inside = path.relative_to(self.root)
        if _INSTALLED.intersection(inside.parts):
            return "outside"
        if _TEST_FILES.fullmatch(path.name) or _TEST_FOLDERS.intersection(inside.parts):
            return "test"
        if cls.__module__ == "__main__":
            return "it is a class of the script that was run; put it into a module of its own"
        if found(cls.__module__, cls.__qualname__) is not cls:
            return "it is made inside a function, or by a transform"
        return None

    def _reason_of_place(self, module: Any) -> str | None:
        """Why an outermost module is not an entry point."""
        outer = module.parent
        while isinstance(outer, sys.modules[_LINEN].Module):
            cls = type(outer)
            if self._reason_against(cls, _file_of(cls)) is None:
                return f"a function that is given as method= calls it in a {cls.__name__}"
            outer = outer.parent
        return None

    def _write(self, record: dict[str, Any]) -> None:
        with open(self.folder / f"{os.getpid()}.records", "ab") as file:
            pickle.dump(record, file)


def _file_of(cls: type) -> str | None:
    return getattr(sys.modules.get(cls.__module__), "__file__", None)


def _fields(module: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a module that have not their default."""
    for name, field in type(module).__dataclass_fields__.items():
        value = getattr(module, name)
        if field.init and name not in ("parent", "name") and value is not field.default:
            yield name, value


def _tree_map(function: Any, tree: Any) -> Any:
    return importlib.import_module("jax").tree.map(function, tree)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _shapes(tree: Any) -> Any:
    struct = importlib.import_module("jax").ShapeDtypeStruct
    return _tree_map(lambda x: struct(x.shape, x.dtype) if _is_array(x) else x, tree)


def _without_sizes(tree: Any) -> Any:
    return _tree_map(lambda x: (len(x.shape), str(x.dtype)) if _is_array(x) else x, tree)


def _said(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first}"[:200]


def found(module: str, name: str) -> Any:
    """What a module has of a name with dots, None if it has nothing."""
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def dumped(value: Any) -> bytes:
    """A value as bytes for `loaded`, with modules and inner functions in it."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def loaded(data: bytes) -> Any:
    """The value that `dumped` was given."""
    return _Unpickler(io.BytesIO(data)).load()


class _Pickler(pickle.Pickler):
    """Writes modules by their fields, and functions without a name of their own by their code."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            return NotImplemented
        if isinstance(obj, sys.modules[_LINEN].Module):
            return new_module, (type(obj), dict(_fields(obj)))
        module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
        if callable(obj) and isinstance(module, str) and isinstance(name, str):
            if found(module, name) is obj:
                return name
            if isinstance(obj, types.FunctionType):
                cells = tuple(cell.cell_contents for cell in obj.__closure__ or ())
                defaults = obj.__defaults__, obj.__kwdefaults__
                return new_function, (marshal.dumps(obj.__code__), module, name, defaults, cells)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # The recorder is a module by itself in the process that writes.
        return globals()[name] if module == "bridge_recorder" else super().find_class(module, name)


def new_module(cls: Any, fields: dict[str, Any]) -> Any:
    """A module by its fields."""
    return cls(**fields)


def new_function(code: bytes, module: str, name: str, defaults: Any, cells: Any) -> Any:
    """A function by its code, with the names of its module."""
    space = vars(importlib.import_module(module))
    closure = tuple(map(types.CellType, cells))
    positional, named = defaults
    function = types.FunctionType(marshal.loads(code), space, None, positional, closure)
    function.__qualname__, function.__kwdefaults__ = name, named
    return function
