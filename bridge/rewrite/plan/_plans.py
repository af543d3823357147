"""Holds what is known of each class: fields, slots, sizes, and why it stays Linen."""

from __future__ import annotations

import ast
import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from bridge.rewrite.observe._records import FunctionCall, Instance, Lifted, Making, Path, Records
from bridge.rewrite.syntax._source import Source, is_self

from ._layers import Layer, layer_of
from ._refusals import Refusal

Key = tuple[int, Path]
# The name of the constructor argument for the shape of a decode cache begins so.
CACHE = "cache_shape"
Lines = list[tuple[int, str]]
"""Lines of a constructor, with the depth of their indentation."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A dataclass field.

    Attributes:
        name: its name.
        annotation: the text of its type.
        default: the text of its default, None if there is none.
        factory: the text of its default factory.
        comment: the comment behind it.
        node: where it is.
        plan: the class that it is in.
        is_named: whether it is given by name alone.
        above: what is said of it in comments above it, and in a text behind it, as comments.
    """

    name: str
    annotation: str
    default: str | None
    factory: str | None
    comment: str
    node: ast.AnnAssign
    plan: ClassPlan
    is_named: bool = False
    above: tuple[str, ...] = ()


@dataclasses.dataclass
class Slot:
    """An expression in a class that makes a module, a parameter or a variable.

    Attributes:
        node: the expression.
        kind: as in `Making`.
        makings: every time it ran.
        method: the function around it.
        attribute: the name of what it makes, on the NNX module.
        loops: the loops and comprehensions around it, the outermost first.
        is_list: whether it makes one for each turn.
        lift: what its calls go through, None if it is called as it is.
        outer: the slot that takes it as an argument.
        modes: what each call is given besides, by name.
        linen: why it is wrapped instead of rewritten.
        variable: the local variable that it alone is assigned to.
        cache: how the constructor makes the decode cache, None if there is none.
        functions: the functions under lifted transforms that are given it, or that it is made in,
            the outermost first.
        holder: the name of the module there.
        takers: the classes that take the modes, where it may be of another one; `""` if all do.
        resolved: what makes it, where `node` is the call of a method that returns it.
        in_call: whether each call makes it, as it has no state, and the call decides its arguments.
        place: the statement that the constructor makes it at, if that is not its own.
        stored: the attribute that `setup` puts it into, None if there is none.
        is_alone: whether it is that attribute, and not in a container.
    """

    node: ast.Call
    kind: str
    makings: list[Making]
    method: ast.FunctionDef
    attribute: str = ""
    loops: list[ast.AST] = dataclasses.field(default_factory=list)
    is_list: bool = False
    outer: Slot | None = None
    modes: dict[str, str] = dataclasses.field(default_factory=dict)
    linen: Refusal | None = None
    lift: Any = None
    variable: str | None = None
    cache: Any = None
    functions: list[FunctionLift] = dataclasses.field(default_factory=list)
    holder: str = "self"
    takers: str = ""
    resolved: ast.Call | None = None
    in_call: bool = False
    place: ast.stmt | None = None
    stored: str | None = None
    is_alone: bool = False

    def is_attribute(self, name: str) -> bool:
        """Whether `setup` makes it for this attribute alone."""
        return self.is_alone and self.stored == name

    @property
    def constructor(self) -> ast.Call:
        """The expression with the arguments of the constructor."""
        return self.resolved or self.node

    @property
    def is_wrapped(self) -> bool:
        """Whether it stays Linen, by itself or inside another layer."""
        return self.linen is not None or (self.outer is not None and self.outer.is_wrapped)


@dataclasses.dataclass(frozen=True)
class FunctionLift:
    """A lifted transform of a function.

    `node` is the expression that makes the transform, or the decorator. `function` is what is
    transformed, if it is in the class. `calls` has every call that was seen.
    """

    lifted: Lifted
    node: ast.expr
    function: ast.FunctionDef | ast.Lambda | None
    calls: list[FunctionCall]


@dataclasses.dataclass(frozen=True, eq=False)
class Maker:
    """A function of the program that returns layers' classes, or initialisers with axis names.

    Attributes:
        function: its source.
        source: the file.
        module: the name of the module.
        given: its arguments that nothing but a mode depends on.
        modes: the modes in its partials, by name.
        is_mixed: whether it may return something else that takes no mode.
    """

    function: ast.FunctionDef
    source: Source
    module: str
    given: frozenset[str]
    modes: Mapping[str, ast.expr]
    is_mixed: bool


@dataclasses.dataclass
class SizeArgument:
    """A size that the constructor of a class is given.

    `values` has the size by instance.
    """

    name: str
    values: dict[Key, Any]


@dataclasses.dataclass
class ClassPlan:
    """A Linen class of the user's package.

    Attributes:
        cls: the class.
        node: its source.
        source: the file.
        fields: in the order of the constructor, inherited ones too.
        slots: by expression.
        sizes: constructor arguments besides the fields.
        refusal: why it stays Linen, None if it is rewritten.
        review: what a person has to look at: line and text.
        seen: sizes that only were seen to be equal.
        carried: mode arguments by the field that brings them in.
        mode_fields: fields that become arguments of the call.
        mixed: of the fields that bring a mode, those that may bring a layer that takes none.
        moved: what its partials and the calls of makers are given that such modes are of.
        makers: the calls of makers in it.
        maker_methods: its methods, and the functions inside of them, that only return a layer,
            with their names; `constructors` has what their calls stand for.
        constructors: what the calls of such methods stand for.
        bases: the classes of the package that it derives from.
        layer: the layer of Flax that it derives from, None for another class.
        wraps: whether something in it stays Linen.
        functions: the lifted transforms of functions in it.
        returns: the sizes that its call returns, None before somebody asks.
    """

    cls: type
    node: ast.ClassDef
    source: Source
    fields: list[Field] = dataclasses.field(default_factory=list)
    slots: dict[ast.Call, Slot] = dataclasses.field(default_factory=dict)
    sizes: dict[str, SizeArgument] = dataclasses.field(default_factory=dict)
    refusal: Refusal | None = None
    review: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    seen: list[str] = dataclasses.field(default_factory=list)
    carried: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    mode_fields: set[str] = dataclasses.field(default_factory=set)
    mixed: set[str] = dataclasses.field(default_factory=set)
    moved: set[ast.AST] = dataclasses.field(default_factory=set)
    makers: dict[ast.Call, Maker] = dataclasses.field(default_factory=dict)
    maker_methods: dict[ast.FunctionDef | ast.Lambda, str] = dataclasses.field(default_factory=dict)
    constructors: dict[ast.Call, ast.Call] = dataclasses.field(default_factory=dict)
    bases: list[ClassPlan] = dataclasses.field(default_factory=list)
    layer: type | None = None
    wraps: bool = False
    functions: list[FunctionLift] = dataclasses.field(default_factory=list)
    returns: tuple[Any, ...] | None = None

    @property
    def name(self) -> str:
        """The class's name."""
        return self.cls.__name__

    @property
    def methods(self) -> dict[str, ast.FunctionDef]:
        """The functions of the class's body."""
        return {each.name: each for each in self.node.body if isinstance(each, ast.FunctionDef)}

    @property
    def call(self) -> ast.FunctionDef | None:
        """The function that calls of it run."""
        return self.methods.get("__call__")

    @property
    def call_arguments(self) -> list[str]:
        """The names of its arguments that may be given by position, without `self`."""
        given = self.call.args.args if self.call is not None else []
        return [each.arg for each in given if each.arg != "self"]

    def reads(self, field: str) -> bool:
        """Whether a method of it reads a field."""
        nodes = (each for plan in (self, *self.bases) for each in ast.walk(plan.node))
        return any(is_self(each, field) for each in nodes)

    def refuse(self, refusal: Refusal) -> None:
        """Keeps the class Linen; the first refusal stays."""
        if self.refusal is None:
            self.refusal = refusal

    def note(self, node: ast.AST, text: str) -> None:
        """Something to look at."""
        entry = (getattr(node, "lineno", self.node.lineno), text)
        if entry not in self.review:
            self.review.append(entry)

    @property
    def taken_names(self) -> set[str]:
        """The names that an attribute must not have."""
        own = {
            name
            for base in self.cls.__mro__
            for name in vars(base)
            if base.__module__.split(".")[0] not in ("flax", "builtins")
        }
        own -= {name for name in own if name.startswith("__")}
        return own | {field.name for field in self.fields} | set(self.sizes)


@dataclasses.dataclass(frozen=True)
class Written:
    """A class or a function as it is written.

    `notes` has what a person has to look at: line and text. `constructed` names the arguments of a
    function that its constructor takes.
    """

    text: str
    notes: tuple[tuple[int, str], ...] = ()
    constructed: tuple[str, ...] = ()


@dataclasses.dataclass
class Program:
    """Everything that is rewritten together.

    Attributes:
        records: what was seen.
        plans: by class, each after the classes that it makes.
        sources: by file.
        keep_names: whether automatic names stay Linen's.
        entries: how many runs were of entry points, and not with other sizes.
        written: what is written, by class.
        new_modules: the names of new modules by those of old ones.
        unreadable: classes of the package whose source cannot be used: file and refusal.
        makers: the functions that classes call, by their code; None for one that is no maker.
    """

    records: Records
    plans: dict[type, ClassPlan]
    sources: dict[str, Source]
    keep_names: bool = False
    entries: int = 1
    written: dict[type, Written] = dataclasses.field(default_factory=dict)
    new_modules: dict[str, str] = dataclasses.field(default_factory=dict)
    unreadable: dict[type, tuple[str, Refusal]] = dataclasses.field(default_factory=dict)
    makers: dict[types.CodeType, Maker | None] = dataclasses.field(default_factory=dict)

    @property
    def roots(self) -> list[Instance]:
        """The models that the entry points make."""
        return [self.records.instances[(run, ())] for run in range(self.entries)]

    def notes_of(self, plan: ClassPlan) -> list[tuple[int, str]]:
        """What a person has to look at in a class: line and text."""
        written = self.written.get(plan.cls)
        return list(dict.fromkeys([*plan.review, *(written.notes if written else ())]))

    def plan_of(self, cls: type | None) -> ClassPlan | None:
        """The plan of a class, None for one that a lifted transform made."""
        return None if cls is None else self.plans.get(cls)

    def layer_of(self, cls: type | None) -> Layer | None:
        """What becomes of a layer of Flax, or of a rewritten class that derives from one."""
        plan = self.plan_of(cls)
        if plan is None:
            return layer_of(cls)
        return layer_of(plan.layer) if plan.refusal is None else None
