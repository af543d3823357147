"""What is seen while a Linen model runs: which line made what, with which values at hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

Path = tuple[str, ...]


class Span(NamedTuple):
    """A stretch of a source file; columns count UTF-8 bytes, as in `ast` and in code objects."""

    line: int
    end_line: int
    column: int
    end_column: int


class Site(NamedTuple):
    """An expression in a file."""

    file: str
    span: Span


@dataclasses.dataclass(frozen=True)
class Shape:
    """Stands for an array in a snapshot of local variables."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)


@dataclasses.dataclass
class Making:
    """One execution of an expression that makes a module, a parameter or a variable.

    Attributes:
        kind: `module`, or the method of the Linen module that was called: `param`, `variable`.
        run: the number of the run.
        order: counts all makings of a run.
        site: the expression.
        owner: the path of the module whose method it is in, None for a function.
        fields: of the owner, by name.
        env: local variables of the function around the expression; an array is a `Shape`.
        made: the module that was made, or the arguments that the method got.
        path: the path of what was made; None if it became no part of the model.
        cls: the class of the module.
        names: where `kind` is no module, the name that was given.
    """

    kind: str
    run: int
    order: int
    site: Site
    owner: Path | None
    fields: Mapping[str, Any]
    env: dict[str, Any]
    made: Any
    path: Path | None = None
    cls: type | None = None
    name: str | None = None
    owner_cls: type | None = None


@dataclasses.dataclass(frozen=True)
class Lifted:
    """How a lifted transform made a class.

    Attributes:
        kind: `remat`, `scan`, `vmap` or `jit`.
        target: the class that it was given.
        options: the arguments, defaults too.
        site: the call, None if it is not in the program's files.
    """

    kind: str
    target: type
    options: Mapping[str, Any]
    site: Site | None

    @property
    def is_stacking(self) -> bool:
        """Whether it makes several of the module, along a new first axis of the variables."""
        return self.kind in ("scan", "vmap") and bool(self.options["variable_axes"])


@dataclasses.dataclass
class Called:
    """One call of a module's method.

    Attributes:
        method: its name.
        args: positional arguments, arrays as `Shape`.
        kwargs: the same by name.
        output: what it returned, arrays as `Shape`.
        began: when, counted in makings and calls of a run.
        ended: when it returned.
    """

    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    began: int
    ended: int


@dataclasses.dataclass
class Instance:
    """A module of the model in one run.

    Attributes:
        run: the number of the run.
        path: its path.
        cls: its class; a lifted transform's own class is not counted.
        fields: its dataclass fields by name.
        calls: in order.
        lifted: the class that a lifted transform made, if there is one.
    """

    run: int
    path: Path
    cls: type
    fields: dict[str, Any]
    calls: list[Called] = dataclasses.field(default_factory=list)
    lifted: type | None = None


@dataclasses.dataclass
class Records:
    """All runs together.

    Attributes:
        makings: in order.
        instances: by run and path.
        conditions: local variables when a watched line began, by run, owner's path, file and line.
        lines: the lines that ran, by file.
        variables: abstract variables of each run.
        lifted: the classes that lifted transforms made.
        functions: lifted transforms of functions, by their names, and where they are made.
        steps: of the runs of models that decode, which leaves of the arguments are sequences.
    """

    makings: list[Making] = dataclasses.field(default_factory=list)
    instances: dict[tuple[int, Path], Instance] = dataclasses.field(default_factory=dict)
    conditions: dict[tuple[int, Path, str, int], list[dict[str, Any]]] = dataclasses.field(
        default_factory=dict
    )
    lines: dict[str, set[int]] = dataclasses.field(default_factory=dict)
    variables: list[Any] = dataclasses.field(default_factory=list)
    lifted: dict[type, Lifted] = dataclasses.field(default_factory=dict)
    steps: dict[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    functions: list[tuple[str, Site]] = dataclasses.field(default_factory=list)
    _stacks: dict[int, dict[Path, int]] = dataclasses.field(default_factory=dict)

    def chain(self, cls: type | None) -> list[Lifted]:
        """The transforms around a class, the outermost first."""
        found: list[Lifted] = []
        while cls in self.lifted:
            found.append(self.lifted[cls])
            cls = found[-1].target
        return found

    def base_of(self, cls: type | None) -> type | None:
        """The class without the lifted transforms around it."""
        chain = self.chain(cls)
        return chain[-1].target if chain else cls

    def axes_above(self, run: int, path: Path) -> int:
        """How many axes lifted transforms put before those of the variables at a path."""
        counts = self._stacks.get(run)
        if counts is None:
            counts = self._stacks[run] = {}
            known = {m.path: m.cls for m in self.makings if m.run == run and m.path}
            known |= {
                i.path: i.lifted for i in self.instances.values() if i.run == run and i.lifted
            }
            for own, cls in known.items():
                counts[own] = sum(each.is_stacking for each in self.chain(cls))
        return sum(counts.get(path[:n], 0) for n in range(1, len(path) + 1))

    def of_class(self, cls: type) -> list[Instance]:
        """The instances of a class and of its subclasses."""
        return [each for each in self.instances.values() if issubclass(each.cls, cls)]
