"""Runs a Linen model without computing anything, and records what it does.

`sys.settrace` shows when a module is made and which lines run. It is Python's public way to see the
frame that calls a constructor; since Python 3.11 a frame knows its exact position in the source.
Flax has no hook for constructors: `nn.intercept_methods` does not see `__post_init__`.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from flax.linen import partitioning

from ._function_calls import Transforms
from ._layer_functions import Function, FunctionCalls
from ._records import Called, Instance, Making, Records, Site, Span
from ._snapshots import fields_of, owner_of, path_of, shapes_of, snapshot

_METHODS = (
    "param",
    "variable",
    "make_rng",
    "sow",
    "perturb",
    "has_variable",
    "get_variable",
    "put_variable",
    "is_mutable_collection",
    "is_initializing",
)
_KINDS = {
    nn.Module.__post_init__.__code__: "module",
    **{inspect.unwrap(getattr(nn.Module, name)).__code__: name for name in _METHODS},
}


class WatchedLines(NamedTuple):
    """Lines of a file before which something is recorded.

    Before those in `conditions` all local variables are kept, and before those in `arrays` the
    number of dimensions of local arrays.
    """

    conditions: frozenset[int] = frozenset()
    arrays: frozenset[int] = frozenset()


class Watch:
    """Records what models do while they run.

    `watched` has the lines, by file, before which something is recorded.
    """

    def __init__(
        self, is_inside: Callable[[str], bool], watched: Callable[[str], WatchedLines]
    ) -> None:
        self.records = Records()
        self._run = -1
        self._order = 0
        self._is_inside, self._watched = is_inside, watched
        self._inside: dict[str, bool] = {}
        self._kept: list[Any] = []
        self._calls = FunctionCalls(self._is_users)
        # The code of nearly all frames, in which there is nothing to see, by its id. Python hashes
        # the whole of a code object each time, and a trace of a small model has 50,000 calls.
        self._passed: dict[int, Any] = {}
        self._transforms = Transforms(self.records, self._site, self._count, self._passed)

    def _count(self) -> int:
        self._order += 1
        return self._order

    @contextlib.contextmanager
    def running(self, *, keeps: bool = True) -> Iterator[None]:
        """One run; what it saw is forgotten if it fails.

        Without `keeps`, it is forgotten in any case.
        """
        self._run += 1
        before = len(self.records.makings)
        lines = {file: set(ran) for file, ran in self.records.lines.items()}
        previous = sys.gettrace()
        sys.settrace(self._tracer())
        try:
            with nn.intercept_methods(self._method):
                yield
            sys.settrace(previous)
            if keeps:
                self._finish(before)
            else:
                self._forget(before)
        except BaseException:
            sys.settrace(previous)
            self._forget(before)
            # In place: whoever looks on while a model runs adds to these sets.
            for file, ran in self.records.lines.items():
                ran.intersection_update(lines.get(file, ()))
            raise
        finally:
            self._kept.clear()
            self._calls.clear()
            self._transforms.forget()

    def _forget(self, before: int) -> None:
        del self.records.makings[before:]
        self.records.functions[:] = [f for f in self.records.functions if f.run != self._run]
        tables: list[Any] = [self.records.instances, self.records.conditions]
        for table in tables:
            for key in [key for key in table if key[0] == self._run]:
                del table[key]
        self._run -= 1

    def _tracer(self) -> Any:
        passed, look = self._passed, self._event

        # Python calls this for every call, so it is a function and no method.
        def tracer(frame: Any, event: str, arg: Any) -> Any:
            return None if id(frame.f_code) in passed else look(frame)

        return tracer

    def _event(self, frame: Any) -> Any:
        code = frame.f_code
        kind = _KINDS.get(code)
        if kind is not None:
            self._making(kind, frame)
            return None
        is_users = self._is_users(code.co_filename)
        if self._transforms.looks_into(code):
            transform = self._transforms.tracer(frame, self._run)
            if transform is not None:
                return transform
        elif not is_users:
            self._passed[id(code)] = code
            return None
        if is_users:
            call = self._calls.began(frame, self._site, self._order)
            self._order += call is not None
            return self._line(code.co_filename, call)
        return None

    def _site(self, frame: Any) -> Site | None:
        """The expression that a frame of the program is at."""
        if frame is None or not self._is_users(frame.f_code.co_filename):
            return None
        position = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        if None in position:
            return None
        line, end_line, column, end_column = position
        return Site(frame.f_code.co_filename, Span(line, end_line, column, end_column))  # pyright: ignore

    def _is_users(self, file: str) -> bool:
        known = self._inside.get(file)
        if known is None:
            known = self._inside[file] = self._is_inside(file)
        return known

    def _line(self, file: str, call: Function | None) -> Any:
        lines = self.records.lines.setdefault(file, set())
        watched = self._watched(file)

        def local(frame: Any, event: str, arg: Any) -> Any:
            if event == "return" and call is not None:
                call.returned, call.ended = arg, self._order
                self._order += 1
            if event == "return" and frame.f_code.co_name == "setup":
                self._set_up(frame)
            if event == "line":
                lines.add(frame.f_lineno)
                if frame.f_lineno in watched.arrays:
                    self._note_ranks(frame)
                if frame.f_lineno in watched.conditions:
                    owner = owner_of(frame, self._is_users)[0]
                    if owner is not None and owner.scope is not None:
                        key = (self._run, path_of(owner) or (), file, frame.f_lineno)
                        self.records.conditions.setdefault(key, []).append(snapshot(frame))
            return local

        return local

    def _note_ranks(self, frame: Any) -> None:
        """How many dimensions the arrays of a method have where a line begins."""
        place = frame.f_code.co_filename, frame.f_lineno
        for name, value in frame.f_locals.items():
            if isinstance(value, jax.Array):
                self.records.ranks.setdefault((*place, name), set()).add(value.ndim)

    def _set_up(self, frame: Any) -> None:
        """What a `setup` gave arrays."""
        made = frame.f_locals.get("self")
        key = frame.f_code.co_filename, frame.f_code.co_firstlineno
        for name, value in vars(made).items() if isinstance(made, nn.Module) else ():
            if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
                self.records.arrays.setdefault(key, set()).add(name)

    def _making(self, kind: str, frame: Any) -> None:
        made = frame.f_locals["self"]
        caller = frame.f_back
        if kind == "module":
            # The dataclass's `__init__`, and those of the program's own around it.
            while caller is not None and (
                caller.f_code.co_name in ("__init__", "init_wrapper", "__post_init__")
                and caller.f_locals.get("self") is made
            ):
                caller = caller.f_back
        if caller is not None and caller.f_code is partitioning.param_with_axes.__code__:
            # It calls `param` of the module that is being called.
            caller = caller.f_back
        site = self._site(caller)
        if site is None:
            # Flax's own layers call their `self`; others may find the module by themselves.
            is_variable = kind in ("param", "variable")
            if caller is not None and is_variable and caller.f_locals.get("self") is not made:
                self.records.foreign[type(made)] = caller.f_code.co_name
            return
        owner, env = owner_of(caller, self._is_users)
        call = self._calls.around(caller) if owner is None else None
        outer = self._caller(caller, owner) if kind == "module" else None
        name = frame.f_locals.get("name") if kind != "module" else None
        making = Making(
            kind,
            self._run,
            self._order,
            site,
            None,
            {} if owner is None else fields_of(owner),
            env if outer is None else {**snapshot(outer), **env},
            made if kind == "module" else _arguments(frame),
            name=name,
            through=self._site(outer),
        )
        self._order += 1
        self._kept.append((making, owner, made))
        if call is not None:
            self._calls.made(making, made if kind == "module" else None, call)
        self.records.makings.append(making)

    def _caller(self, frame: Any, owner: nn.Module | None) -> Any:
        """The method that has called another one of its module, or a function inside of it.

        `frame` is that of what it called.
        """
        is_inner = bool(frame.f_code.co_flags & inspect.CO_NESTED)
        if owner is None or not (is_inner or _is_method_of(owner, frame)):
            return None
        frame = frame.f_back
        while frame is not None and not self._is_users(frame.f_code.co_filename):
            frame = frame.f_back
        return frame if frame is not None and frame.f_locals.get("self") is owner else None

    def _method(self, following: Any, args: Any, kwargs: Any, context: Any) -> Any:
        began = self._count()
        instance = self._instance(context.module)
        output = following(*args, **kwargs)
        ended = self._count()
        if instance is not None:
            instance.calls.append(
                Called(
                    _attribute_of(instance.cls, context.method_name),
                    shapes_of(args),
                    shapes_of(dict(kwargs)),
                    shapes_of(output),
                    began,
                    ended,
                )
            )
        return output

    def _instance(self, module: nn.Module) -> Instance | None:
        path = path_of(module)
        if path is None:
            return None
        cls = type(module)
        key = (self._run, path)
        instance = self.records.instances.get(key)
        if instance is None:
            instance = Instance(self._run, path, cls, fields_of(module))
            self.records.instances[key] = instance
        elif instance.cls is not cls:
            if not issubclass(instance.cls, cls):
                # What a lifted transform calls may be told as another root.
                return None
            # The class that a lifted transform made is a subclass, and calls the other.
            instance.lifted, instance.cls = instance.cls, cls
        return instance

    def _finish(self, before: int) -> None:
        for making, owner, made in self._kept:
            if owner is not None and owner.scope is not None:
                making.owner = path_of(owner)
                making.owner_cls = type(owner)
            if making.kind == "module":
                making.cls = type(made)
                making.path = path_of(made)
                making.made = fields_of(made)
            else:
                making.scope = path_of(made)
        own = self.records.makings
        own[before:] = sorted(
            [*own[before:], *self._calls.finish(self.records, self._run)], key=lambda m: m.order
        )


def _arguments(frame: Any) -> dict[str, Any]:
    return {name: shapes_of(value) for name, value in frame.f_locals.items() if name != "self"}


def _is_method_of(owner: nn.Module, frame: Any) -> bool:
    return frame.f_code.co_name != "__call__" and frame.f_locals.get("self") is owner


def _attribute_of(cls: type, name: str) -> str:
    """The attribute of a method; a decorator without `functools.wraps` gives it its own name."""
    if hasattr(cls, name):
        return name
    found = [each for each in dir(cls) if getattr(getattr(cls, each, None), "__name__", "") == name]
    return found[0] if len(found) == 1 else name
