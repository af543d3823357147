"""Lifted transforms in a trace: those of classes as they are made, of functions as called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from flax.linen import partitioning

from ._records import FunctionCall, Lifted, Records, Site
from ._snapshots import path_of

_MAKERS = {
    inspect.unwrap(getattr(nn, name)).__code__: name for name in ("remat", "scan", "vmap", "jit")
}
_PARTITIONING = inspect.unwrap(partitioning.remat).__code__
_MAKERS[_PARTITIONING] = "remat"
# These are called with the module at once, and make no function before.
_DIRECT = {
    inspect.unwrap(getattr(nn, name)).__code__: name for name in ("cond", "switch", "while_loop")
}


class Transforms:
    """Looks for lifted transforms.

    `site` gives the expression of the program that a frame is at, and `count` the next number in
    the order of a run. `passed` has, by id, the code that nobody looks into; that of a function
    which a transform makes is taken out.
    """

    def __init__(
        self,
        records: Records,
        site: Callable[[Any], Site | None],
        count: Callable[[], int],
        passed: dict[int, Any],
    ) -> None:
        self.records, self._site, self._count, self._passed = records, site, count, passed
        self._functions: dict[Any, list[tuple[dict[str, Any], Lifted]]] = {}

    def forget(self) -> None:
        """Lets go of the functions of a run."""
        self._functions.clear()

    def looks_into(self, code: Any) -> bool:
        """Whether a frame of this code may be a transform's."""
        return code in _MAKERS or code in _DIRECT or code in self._functions

    def tracer(self, frame: Any, run: int) -> Any:
        """The observer of a frame, None if the frame is not a transform's."""
        code = frame.f_code
        kind = _MAKERS.get(code)
        if kind is not None:
            return self._made(kind, frame)
        kind = _DIRECT.get(code)
        if kind is not None:
            return self._direct(kind, frame, run)
        if code in self._functions:
            return self._called(frame, run)
        return None

    def _made(self, kind: str, frame: Any) -> Any:
        """Waits for the class or the function that a lifted transform makes."""
        options = dict(frame.f_locals)
        site = self._site(frame.f_back)

        def local(frame: Any, event: str, arg: Any) -> Any:
            if event != "return" or arg is None:
                return local
            target: Any = options.pop("target", None)
            if frame.f_code is _PARTITIONING:
                # It does not count the module itself.
                options["static_argnums"] = tuple(n + 1 for n in options["static_argnums"])
            lifted = Lifted(kind, target, options, site)
            # A partial of a class becomes one of the class that the transform makes.
            made = arg.func if isinstance(arg, functools.partial) else arg
            if isinstance(made, type):
                target = target.func if made is not arg else target
                self.records.lifted[made] = Lifted(kind, target, options, site)
            elif inspect.isfunction(arg) and site is not None:
                # What Python made the function of tells it from others of the same code.
                cells = zip(arg.__code__.co_freevars, arg.__closure__ or (), strict=True)
                own = {name: cell.cell_contents for name, cell in cells}
                known = {name: value for name, value in own.items() if value is not None}
                self._functions.setdefault(arg.__code__, []).append((known, lifted))
                self._passed.pop(id(arg.__code__), None)
            return local

        return local

    def _called(self, frame: Any, run: int) -> Any:
        """A call of a function that a lifted transform made."""
        values = frame.f_locals
        for known, lifted in self._functions[frame.f_code]:
            if all(values.get(name) is value for name, value in known.items()):
                module = values.get(frame.f_code.co_varnames[0])
                given = values.get("args", ())
                return self._waiting(frame, run, lifted, module, given, values.get("kwargs", {}))
        return None

    def _direct(self, kind: str, frame: Any, run: int) -> Any:
        options = dict(frame.f_locals)
        site = self._site(frame.f_back)
        if site is None:
            return None
        module = options.pop("mdl", None)
        return self._waiting(frame, run, Lifted(kind, None, options, site), module, (), {})

    def _waiting(
        self, frame: Any, run: int, lifted: Lifted, module: Any, given: Any, named: Any
    ) -> Any:
        path = path_of(module) if isinstance(module, nn.Module) else None
        if path is None:
            return None
        began = self._count()
        arrays = tuple(bool(jax.tree.leaves(each)) for each in given)
        call = FunctionCall(lifted, run, path, arrays, tuple(named), began, began)
        self.records.functions.append(call)

        def local(frame: Any, event: str, arg: Any) -> Any:
            if event == "return":
                call.ended = self._count()
            return local

        return local
