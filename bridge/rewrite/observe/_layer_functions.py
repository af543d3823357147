"""Functions of the program that make layers, seen as modules of their own.

A call of such a function counts as a module: what it makes belongs to it, although Linen names it
in the module whose method calls the function.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flax import linen as nn

from ._records import Called, Instance, Making, Path, Records, Site
from ._snapshots import (
    INSIDE,
    fields_of,
    owner_of,
    path_of,
    reads_nothing_around,
    shapes_of,
    snapshot,
)


@dataclasses.dataclass(eq=False)
class Function:
    """One call of a function while it runs.

    Attributes:
        frame: its frame.
        site: the call.
        began: when, counted in makings and calls of a run.
        arguments: their values.
        caller: the module whose method is around the call.
        above: the call of a function that this one is in.
        env: local variables around the call.
        returned: what it returned.
        ended: when it returned.
        path: the path that it has as a module.
    """

    frame: Any
    site: Site
    began: int
    arguments: dict[str, Any]
    caller: nn.Module | None = None
    above: Function | None = None
    env: dict[str, Any] = dataclasses.field(default_factory=dict)
    returned: Any = None
    ended: int = 0
    path: Path | None = None


class FunctionCalls:
    """The calls of functions in one run."""

    def __init__(self, is_users: Callable[[str], bool]) -> None:
        self._is_users = is_users
        self._running: dict[int, Function] = {}
        self._made: list[tuple[Making, nn.Module | None, Function]] = []

    def began(
        self, frame: Any, site_of: Callable[[Any], Site | None], order: int
    ) -> Function | None:
        """The call, None if the frame is of a method, or of a function that reads one's names."""
        code = frame.f_code
        is_inner = bool(code.co_flags & inspect.CO_NESTED)
        is_method = not is_inner and code.co_qualname != code.co_name
        if is_method or not reads_nothing_around(code) or code.co_name.startswith("<"):
            return None
        site = site_of(frame.f_back)
        if site is None:
            return None
        call = Function(frame, site, order, snapshot(frame))
        self._running[id(frame)] = call
        return call

    def around(self, frame: Any) -> Function | None:
        """The innermost of these calls that a frame is in, if a module's method is around it."""
        call = self._at(frame)
        found = call
        while call is not None and call.caller is None:
            above = call.frame.f_back
            call.caller, call.env = owner_of(above, self._is_users)
            call.above = self._at(above) if call.caller is None else None
            if call.caller is None and call.above is None:
                return None
            call = call.above
        return found

    def _at(self, frame: Any) -> Function | None:
        while frame is not None and frame.f_code.co_name in INSIDE:
            frame = frame.f_back
        return self._running.get(id(frame))

    def made(self, making: Making, module: nn.Module | None, call: Function) -> None:
        """A making in a call; a function that only draws keys stays one."""
        given = [getattr(each, "__name__", None) for each in call.arguments.values()]
        if making.kind != "make_rng" or "make_rng" not in given:
            self._made.append((making, module, call))

    def clear(self) -> None:
        """Forgets what was seen."""
        self._running.clear()
        self._made.clear()

    def finish(self, records: Records, run: int) -> list[Making]:
        """Makes modules of the calls that made something, and gives their makings."""
        found: list[Making] = []
        counts: dict[Path, int] = {}
        # A lifted transform traces a method again, which makes the same modules.
        known: dict[Any, Path | None] = {}
        for making, module, call in self._made:
            caller = call.caller if call.frame.f_code.co_flags & inspect.CO_NESTED else None
            if caller is not None and module is not None and call.returned is module:
                # What a function inside of a method only returns is made where it is called.
                making.owner_cls, making.fields = type(caller), fields_of(caller)
                making.owner, making.through = path_of(caller), call.site
                making.env = {**call.env, **making.env}
                continue
            key = call.caller and path_of(call.caller), call.site, making.path
            if call.path is None and making.path is not None:
                call.path = known.get(key)
            self._place(records, run, call, counts, found)
            known[key] = call.path
            making.owner, making.fields = call.path, {}
            making.owner_cls = records.function_class(call.frame)
            making.place = place_in(call.returned, module) if module is not None else None
        return found

    def _place(
        self,
        records: Records,
        run: int,
        call: Function,
        counts: dict[Path, int],
        found: list[Making],
    ) -> None:
        if call.path is not None:
            return
        fields: Mapping[str, Any] = {}
        if call.above is not None:
            self._place(records, run, call.above, counts, found)
            owner, owner_cls = call.above.path, records.function_class(call.above.frame)
        else:
            owner = path_of(call.caller) if call.caller is not None else None
            owner_cls = type(call.caller)
            fields = fields_of(call.caller) if call.caller is not None else {}
        if owner is None:
            return
        name = call.frame.f_code.co_name
        counts[owner] = counts.get(owner, -1) + 1
        call.path = (*owner, f"<{name} {counts[owner]}>")
        cls = records.function_class(call.frame)
        makes = next(_modules(call.returned), None) is not None
        records.functions_that_make[cls] = makes
        found.append(
            Making(
                "module",
                run,
                call.began,
                call.site,
                owner,
                fields,
                call.env,
                dict(call.arguments),
                call.path,
                cls,
                owner_cls=owner_cls,
            )
        )
        output = None if makes else shapes_of(call.returned)
        called = Called(name, (), shapes_of(call.arguments), output, call.began, call.ended)
        records.instances[(run, call.path)] = Instance(
            run, call.path, cls, dict(call.arguments), [called]
        )


def place_in(value: Any, module: nn.Module) -> tuple[str, ...] | None:
    """Where in a function's result a module is, None if it is not there."""
    return next((place for place, each in _modules(value) if each is module), None)


def _modules(value: Any) -> Iterator[tuple[tuple[str, ...], nn.Module]]:
    if isinstance(value, nn.Module):
        yield (), value
        if isinstance(value, nn.Sequential):
            for place, each in _modules(list(value.layers)):
                yield ("layers", *place), each
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            for place, module in _modules(each):
                yield (str(index), *place), module
    elif isinstance(value, dict):
        for name, each in value.items():
            for place, module in _modules(each):
                yield (str(name), *place), module
