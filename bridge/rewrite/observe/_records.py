"""Records a run of a Linen model: which line made what, and the values at hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from flax.core import meta

from bridge._conversion.collections import OUTPUTS

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
        name: where `kind` is no module, the name that was given.
        place: where it is in the result of the function that made it.
        scope: where `kind` is no module, the path of the module whose method was called.
        through: the call of the method of the same module that the expression is in.
        made_at: the expression, where `site` is the call of the method that returns it.
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
    place: tuple[str, ...] | None = None
    scope: Path | None = None
    through: Site | None = None
    made_at: Site | None = None

    @property
    def is_cache(self) -> bool:
        """Whether it is a variable of the program's own in the collection of caches."""
        return self.kind == "variable" and self.made.get("col") == "cache"


@dataclasses.dataclass(frozen=True)
class Lifted:
    """How a lifted transform made a class or a function.

    Attributes:
        kind: the name of the transform.
        target: the class or the function that it was given.
        options: the arguments, defaults too.
        site: the call, None if it is not in the program's files.
    """

    kind: str
    target: Any
    options: Mapping[str, Any]
    site: Site | None

    @property
    def axes(self) -> dict[Any, int]:
        """The axis that it gives the variables of each collection, of those that get one."""
        axes = self.options.get("variable_axes") or {}
        return {
            name: axis
            for name, axis in dict(axes).items()
            if isinstance(axis, int) and name not in OUTPUTS
        }

    @property
    def is_stacking(self) -> bool:
        """Whether it makes several of the module, along a new axis of the variables."""
        return self.kind in ("scan", "vmap") and bool(self.axes)


@dataclasses.dataclass
class FunctionCall:
    """One call of a function under a lifted transform.

    Attributes:
        lifted: the transform.
        run: the number of the run.
        path: of the module that the function was given.
        arrays: of each argument besides, whether it has arrays.
        named: the names of those that it was given by name.
        began: when, in makings and calls of the run.
        ended: when it returned.
    """

    lifted: Lifted
    run: int
    path: Path
    arrays: tuple[bool, ...]
    named: tuple[str, ...]
    began: int
    ended: int

    def holds(self, making: Making) -> bool:
        """Whether a module was made in the function."""
        return (
            making.run == self.run
            and making.owner == self.path
            and self.began < making.order < self.ended
        )


@dataclasses.dataclass
class Called:
    """One call of a module's method.

    Arrays in `args`, `kwargs` and `output` are `Shape`. `began` and `ended` are counted in makings
    and calls of a run.
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

    A lifted transform's own class does not count as `cls`; it is `lifted`, if there is one.
    """

    run: int
    path: Path
    cls: type
    fields: dict[str, Any]
    calls: list[Called] = dataclasses.field(default_factory=list)
    lifted: type | None = None

    @property
    def uses(self) -> list[Called]:
        """The calls that the program made as they began; Flax calls `setup` before the first."""
        own = (each for each in self.calls if each.method != "setup")
        return sorted(own, key=lambda each: each.began)


@dataclasses.dataclass
class Records:
    """All runs together.

    Attributes:
        makings: in order.
        instances: by run and path.
        conditions: local variables when a watched line began, by run, owner's path, file and line.
        lines: the lines that ran, by file.
        ranks: how many dimensions local arrays had when a line began, by file, line and name.
        variables: abstract variables of each run.
        lifted: the classes that lifted transforms made.
        functions: the calls of functions under lifted transforms.
        function_classes: classes that stand for functions that make layers, by where they are.
        functions_that_make: of these, whether a function returns the layers.
        steps: of the runs of models that decode, which leaves of the arguments are sequences.
        untrained: the entries that Linen refuses in training.
        arrays: the attributes that hold arrays behind a `setup`, by its file and line.
        foreign: by class, a function of another package that makes parameters of it.
    """

    makings: list[Making] = dataclasses.field(default_factory=list)
    instances: dict[tuple[int, Path], Instance] = dataclasses.field(default_factory=dict)
    conditions: dict[tuple[int, Path, str, int], list[dict[str, Any]]] = dataclasses.field(
        default_factory=dict
    )
    lines: dict[str, set[int]] = dataclasses.field(default_factory=dict)
    ranks: dict[tuple[str, int, str], set[int]] = dataclasses.field(default_factory=dict)
    variables: list[Any] = dataclasses.field(default_factory=list)
    lifted: dict[type, Lifted] = dataclasses.field(default_factory=dict)
    steps: dict[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    untrained: set[int] = dataclasses.field(default_factory=set)
    functions: list[FunctionCall] = dataclasses.field(default_factory=list)
    function_classes: dict[Site, type] = dataclasses.field(default_factory=dict)
    arrays: dict[tuple[str, int], set[str]] = dataclasses.field(default_factory=dict)
    foreign: dict[type, str] = dataclasses.field(default_factory=dict)
    functions_that_make: dict[type, bool] = dataclasses.field(default_factory=dict)
    _stacks: dict[int, dict[Path, list[Lifted]]] = dataclasses.field(default_factory=dict)

    @property
    def has_remat(self) -> bool:
        """Whether a run had `remat` around a module or a function."""
        lifted = [*self.lifted.values(), *(call.lifted for call in self.functions)]
        return any(each.kind == "remat" for each in lifted)

    @property
    def is_annotated(self) -> bool:
        """Whether the first run made variables with partition annotations."""

        def is_box(x: Any) -> bool:
            return isinstance(x, meta.AxisMetadata)

        return any(map(is_box, jax.tree.leaves(self.variables[0], is_leaf=is_box)))

    def function_class(self, frame: Any) -> type:
        """The class that stands for a function."""
        code = frame.f_code
        line = code.co_firstlineno
        site = Site(code.co_filename, Span(line, line, 0, 0))
        if site not in self.function_classes:
            space = {"__module__": frame.f_globals.get("__name__"), "__qualname__": code.co_name}
            self.function_classes[site] = type(code.co_name, (nn.Module,), space)
        return self.function_classes[site]

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

    def stacks_above(self, run: int, path: Path) -> list[Lifted]:
        """The transforms that give the variables at a path an axis each, the outermost first."""
        stacks = self._stacks.get(run)
        if stacks is None:
            stacks = self._stacks[run] = self._stacks_of(run)
        return [each for n in range(len(path) + 1) for each in stacks.get(path[:n], ())]

    def _stacks_of(self, run: int) -> dict[Path, list[Lifted]]:
        found: dict[Path, list[Lifted]] = {}
        until: dict[Path, int] = {}
        for call in self.functions:
            if call.run != run or not call.lifted.is_stacking:
                continue
            # A second call, which is not inside the first one, stacks nothing more.
            if call.began < until.setdefault(call.path, call.ended):
                found.setdefault(call.path, []).append(call.lifted)
        known = {m.path: m.cls for m in self.makings if m.run == run and m.path}
        known |= {i.path: i.lifted for i in self.instances.values() if i.run == run and i.lifted}
        for path, cls in known.items():
            own = [each for each in self.chain(cls) if each.is_stacking]
            found[path] = [*found.get(path, []), *own]
        return found

    def made_by(self, making: Making) -> Instance | None:
        """What a making made, None if the model has it not, as one that a call alone made."""
        return self.instances.get((making.run, making.path)) if making.path else None

    def of_class(self, cls: type) -> list[Instance]:
        """The instances of a class and of its subclasses."""
        return [each for each in self.instances.values() if issubclass(each.cls, cls)]


def below(
    variables: Mapping[str, Any], path: Path, stacks: Sequence[Lifted] = ()
) -> dict[str, Any]:
    """Each collection's part at a path, without the axes that transforms added.

    `variables` has shapes, by collection. `stacks` has the transforms around the module, the
    outermost first.
    """
    found: dict[str, Any] = {}
    for collection, tree in variables.items():
        inner = tree
        for name in path:
            inner = inner.get(name) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping):
            axes = [each.axes[collection] for each in stacks if collection in each.axes]
            found[collection] = _inner(inner, axes) if axes else inner
    return found


def below_made(records: Records, making: Making) -> dict[str, Any]:
    """The abstract variables below the module that was made, by collection."""
    path = making.path or ()
    return below(records.variables[making.run], path, records.stacks_above(making.run, path))


def _inner(tree: Any, axes: Sequence[int]) -> Any:
    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = list(leaf.shape)
        for axis in axes:
            del shape[axis]
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    return jax.tree.map(one, meta.unbox(tree))
