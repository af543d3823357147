"""One method of a Linen class: what goes into the constructor, and what its calls become."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from bridge._train_eval import MODE_FIELDS
from bridge.rewrite.observe._records import Making
from bridge.rewrite.syntax._evaluate import UnknownValueError, evaluate, is_size, same_dtype
from bridge.rewrite.syntax._source import (
    COMPREHENSIONS,
    Edit,
    binding,
    is_fixed,
    is_self,
    loops_around,
    names_in,
    only_value,
    operand,
)
from bridge.rewrite.syntax._taint import Taint, own_names

from ._candidates import Candidates
from ._computed import Computed
from ._function_plans import taint_of
from ._kept_sizes import KeptSizes
from ._makers import modes_in_call, without_mode
from ._plans import CACHE, ClassPlan, Program, Slot
from ._references import References
from ._refusals import NotRewritableError
from ._sizes import Sizes


class Method:
    """A method under rewriting.

    Attributes:
        taint: which names depend on the call's arguments.
        slots: what it leaves to the constructor to make.
        own_slots: what each of its calls makes.
        sizes: how their sizes are told.
        used: local names that the constructor needs.
    """

    def __init__(
        self,
        program: Program,
        plan: ClassPlan,
        node: ast.FunctionDef,
        references: References,
        made: Callable[[Method, Slot], str],
    ) -> None:
        self.program, self.plan, self.node, self.references = program, plan, node, references
        self.source, self.made_by = plan.source, made
        self.namespace: Mapping[str, Any] = references.namespace
        slots = [slot for slot in plan.slots.values() if slot.method is node]
        self.slots = [slot for slot in slots if not slot.in_call]
        self.own_slots = [slot for slot in slots if slot.in_call]
        self.is_setup = node.name == "setup"
        self.taint = taint_of(plan, node)
        self.sizes = Sizes(Candidates(program, plan, node, self.taint), plan)
        self.used: set[str] = set()
        self.passed: dict[str, str] = {}

    def init_text(self, node: ast.AST, makings: Sequence[Making]) -> str:
        """An expression as the constructor can compute it.

        `makings` has every time that it was computed. Raises NotRewritableError if it depends on
        what only the call knows.
        """
        text = self.source.render(
            node, [*self.references.edits(node), *self.init_edits(node, makings)]
        )
        self.used |= self.names_of(text)
        return text

    def solve(
        self,
        makings: Sequence[Making],
        values: Sequence[Any],
        hint: str,
        loops: Sequence[ast.AST],
        at: ast.AST,
    ) -> str:
        """An expression for a size at a place."""
        allowed = self.visible(at)
        text = self.sizes.solve(makings, values, hint, loops, at, allowed)
        self.used |= self.names_of(text)
        return text

    def values(self, node: ast.AST, makings: Sequence[Making]) -> list[Any] | None:
        """What an expression was each time, None where that is not known."""
        try:
            return [evaluate(node, {**self.namespace, **m.env}, m.fields) for m in makings]
        except UnknownValueError:
            return None

    @property
    def lines(self) -> Collection[int]:
        """The lines of the file that ran."""
        return self.program.records.lines.get(self.source.file, frozenset())

    @functools.cached_property
    def _parameters(self) -> Collection[str]:
        """The attributes that `setup` makes parameters, where another one is initialised."""
        return Computed(self.plan, self.node).stored if self.is_setup else ()

    @functools.cached_property
    def kept(self) -> KeptSizes:
        """The sizes of arrays that the constructor keeps."""
        return KeptSizes(self)

    def named(self, makings: Sequence[Making], values: Sequence[Any], at: ast.AST) -> str | None:
        """A name or a field that has these values, None if there is none."""
        text = self.sizes.named(makings, values, self.visible(at))
        self.used |= self.names_of(text or "0")
        return text

    def visible(self, at: ast.AST) -> set[str]:
        """The names of the method that a constructor knows and that are bound before a place."""
        found: set[str] = set()
        inside = set(self.source.ancestors(at))
        for name in self.taint.pure:
            for each in ast.walk(self.node):
                if (
                    isinstance(each, ast.Name)
                    and each.id == name
                    and isinstance(each.ctx, ast.Store)
                ):
                    comprehension = next(
                        (a for a in self.source.ancestors(each) if isinstance(a, COMPREHENSIONS)),
                        None,
                    )
                    if comprehension is not None and comprehension not in inside:
                        continue
                    if comprehension is not None or each.lineno <= at.lineno:  # pyright: ignore
                        found.add(name)
        return found

    def names_of(self, text: str) -> set[str]:
        """The names of the method that a text reads and a constructor knows."""
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except SyntaxError:
            tree = ast.parse(f"({text})", mode="eval")
        return names_in(tree) & self.taint.pure

    def init_edits(self, node: ast.AST, makings: Sequence[Making]) -> Iterator[Edit]:
        """What changes in an expression that moves to the constructor."""
        slot = self.plan.slots.get(node) if isinstance(node, ast.Call) else None
        if slot is not None and slot.kind == "module" and slot.outer is not None:
            yield self.source.edit(node, self.made_by(self, slot))
            return
        maker = self.plan.makers.get(node) if isinstance(node, ast.Call) else None
        if maker is not None:
            texts = without_mode(maker, node)  # pyright: ignore
            for child in ast.iter_child_nodes(node):
                if child in texts:
                    yield self.source.edit(child, texts[child])
                else:
                    yield from self.init_edits(child, makings)
            return
        if isinstance(node, ast.Call) and self.moved(node):
            yield from self._without(node, self.moved(node))
            kept = [k.value for k in node.keywords if k not in self.moved(node)]
            for child in (node.func, *node.args, *kept):
                yield from self.init_edits(child, makings)
            return
        if is_self(node) and node.attr in self._parameters:  # pyright: ignore
            yield Edit(self.source.end(node), self.source.end(node), "[...]")
            return
        if self._hides(node):
            return
        if isinstance(node, ast.expr) and self.taint.touches(node):
            if self.taint.dimensions.computes(node, self.taint.touches):
                children = ast.iter_child_nodes(node)
                edits = [edit for each in children for edit in self.init_edits(each, makings)]
                text = self.source.render(node, edits)
                if not self.names_of(text):
                    # The layer behind has this size, too.
                    self.sizes.candidates.computed[node] = text
                yield from edits
                return
            text = self._written_out(node, makings)
            if text is None:
                text = self.as_size(node, makings)
            if text is None:
                text = self._as_dtype(node, makings)
            if text is not None:
                yield self.source.edit(node, text)
                return
            if isinstance(node, ast.Name):
                raise NotRewritableError("needs-call", node, name=node.id)
            if is_self(node):
                raise NotRewritableError("needs-told-field", node, name=ast.unparse(node))
            if isinstance(node, ast.Call) and (node.func in self.taint.slots or is_self(node.func)):
                raise NotRewritableError("needs-output", node)
        for child in ast.iter_child_nodes(node):
            yield from self.init_edits(child, makings)

    def _hides(self, node: ast.AST) -> bool:
        """Whether an expression is free of the call, but has a name of the call for its own."""
        if not isinstance(node, (ast.Lambda, *COMPREHENSIONS)) or self.taint.touches(node):
            return False
        is_free = self.plan.slots.keys().isdisjoint(ast.walk(node))
        return is_free and not self.taint.names.isdisjoint(own_names(node))

    def _written_out(self, node: ast.expr, makings: Sequence[Making]) -> str | None:
        """`(1, self.length, in_features)` for the name of such a tuple, None for anything else."""
        value = written_tuple(self.node, node, self.namespace, makings, self.taint)
        if value is None:
            return None
        edits: list[Edit] = []
        for number, part in enumerate(value.elts):
            sizes = [_item(making.env.get(node.id), number) for making in makings]  # pyright: ignore
            if isinstance(part, ast.Call) and self._is_of_call(part) and all(map(is_size, sizes)):
                # What a function makes of sizes.
                given = names_in(part) & {*self.taint.arguments}
                hint = f"{given.pop()}_size" if len(given) == 1 else "size"
                text = self.solve(makings, sizes, hint, self._loops(node), part)
                edits.append(self.source.edit(part, text))
                continue
            try:
                edits += list(self.init_edits(part, makings))
            except NotRewritableError:
                # A part of it is known to the call alone.
                return None
        text = self.source.render(value, edits)
        return text if text.startswith("(") else f"({text})"

    def _is_of_call(self, node: ast.expr) -> bool:
        """Whether a constructor that takes dimensions cannot compute an expression."""
        touches = self.taint.touches
        return touches(node) and not self.taint.dimensions.computes(node, touches)

    def as_size(self, node: ast.expr, makings: Sequence[Making]) -> str | None:
        """An expression for what is a size at each of these times, None for another value."""
        if isinstance(node, ast.Tuple | ast.List):
            return None
        if text := self.kept.number(node):
            return operand(text, type(self.source.parents[node]))
        dimension = self.taint.dimensions.of(node)
        if dimension is not None:
            text = self._given_size(dimension, node, makings)
            if text is not None:
                return text
        found = self.values(node, makings)
        if found is None or not all(is_size(value) or _is_empty(value) for value in found):
            return None
        values = [tuple(value) if isinstance(value, list) else value for value in found]
        if not any(map(is_size, values)):
            return None
        hint = node.id if isinstance(node, ast.Name) else "size"
        if isinstance(values[0], tuple) and makings[0].is_cache:
            hint = CACHE
        loops = self._loops(node)
        text = self.solve(makings, values, hint, loops, node)
        return operand(text, type(self.source.parents[node]))

    def _as_dtype(self, node: ast.AST, makings: Sequence[Making]) -> str | None:
        found = same_dtype(node, [({**self.namespace, **m.env}, m.fields) for m in makings])
        if found is not None:
            self.plan.seen.append(ast.unparse(node))
        return found

    def _given_size(
        self, dimension: tuple[str, int], node: ast.expr, makings: Sequence[Making]
    ) -> str | None:
        """The constructor argument for a dimension of what the call is given."""
        name, index = dimension
        values: list[int] = []
        for making in makings:
            shape = self.sizes.candidates.given_shapes(making).get(name)
            if shape is None or not -len(shape) <= index < len(shape):
                return None
            index = index if index < 0 else index - len(shape)
            values.append(shape[index])
        text = self.sizes.argument((name, index), makings, values, self.visible(node))
        if text is not None:
            self.used |= self.names_of(text)
        return text

    def moved(self, node: ast.Call) -> list[ast.keyword]:
        """The modes in a partial of a layer: only the call knows them, or they are written out."""
        if not (node.args and self.references.value_of(node.func) is not None):
            return []
        if not self.references.is_partial(node):
            return []
        return [
            k
            for k in node.keywords
            if k in self.plan.moved
            or (k.arg in MODE_FIELDS and (self.taint.touches(k.value) or is_fixed(k.value)))
        ]

    def _without(self, node: ast.Call, keywords: list[ast.keyword]) -> Iterator[Edit]:
        parts = sorted([*node.args, *node.keywords], key=self.source.start)
        for keyword in keywords:
            index = parts.index(keyword)
            if index:
                yield Edit(self.source.end(parts[index - 1]), self.source.end(keyword), "")

    def modes_of(self, node: ast.AST, inside: Collection[ast.AST] = ()) -> dict[str, str]:
        """The modes that a partial would have brought to what it makes, as the call has them.

        `inside` has the assignments that the partial is the value of: `block = nn.remat(block)`
        names itself.
        """
        if is_self(node) and node.attr in self.plan.carried:  # pyright: ignore
            return {mode: mode for mode in self.plan.carried[node.attr]}  # pyright: ignore
        if isinstance(node, ast.Name):
            for each in ast.walk(self.node):
                if (
                    isinstance(each, ast.Assign)
                    and each not in inside
                    and any(isinstance(t, ast.Name) and t.id == node.id for t in each.targets)
                ):
                    found = self.modes_of(each.value, {*inside, each})
                    if found:
                        return found
        if isinstance(node, ast.Call):
            if (maker := self.plan.makers.get(node)) is not None:
                return modes_in_call(maker, node, self.call_text)
            own = {str(k.arg): self.call_text(k.value) for k in self.moved(node)}
            inner = self.modes_of(node.args[0], inside) if node.args else {}
            return {**inner, **own}
        if isinstance(node, ast.IfExp):
            return {**self.modes_of(node.body, inside), **self.modes_of(node.orelse, inside)}
        return {}

    def call_text(self, node: ast.AST) -> str:
        """An expression as the call has it."""
        return self.source.render(node, [*self.references.edits(node), *self.field_edits(node)])

    def field_edits(self, node: ast.AST) -> Iterator[Edit]:
        """Fields that became arguments of the call."""
        for each in ast.walk(node):
            if is_self(each) and each.attr in self.plan.mode_fields:  # pyright: ignore
                yield self.source.edit(each, each.attr)  # pyright: ignore

    def linen_text(self, node: ast.Call, without: Collection[str] = ()) -> str:
        """A constructor that stays Linen's.

        `without` has names of arguments that are left out, besides the name of what it makes.
        """
        slot = self.plan.slots[node]
        node = slot.constructor
        linen = []
        for each in ast.walk(node):
            if isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, ast.Load):
                value = self.references.value_of(each)
                if isinstance(value, type) and self.program.plan_of(value) is not None:
                    linen.append(self.source.edit(each, f"_linen.{self.source.render(each)}"))
        inner = [s for s in self.plan.slots.values() if s.outer is not None]

        def text(part: ast.expr) -> str:
            inside = [s for s in inner if s.node in ast.walk(part)]
            own = [s for s in inside if s.outer is slot]
            edits = [self.source.edit(s.node, self.linen_text(s.node)) for s in own]
            if not inside:
                edits = [*self.init_edits(part, slot.makings)]
            return self.source.render(part, [*linen, *edits])

        given = [text(each) for each in node.args]
        for keyword in node.keywords:
            if keyword.arg not in ("name", *without):
                begin = f"{keyword.arg}=" if keyword.arg else "**"
                given.append(begin + text(keyword.value))
        made = f"{self.source.render(node.func, linen)}({', '.join(given)})"
        self.used |= self.names_of(made)
        return made

    def _loops(self, node: ast.AST) -> list[ast.AST]:
        return loops_around(self.source, node, self.node)


def _is_empty(value: Any) -> bool:
    """Whether a value is the shape of no dimensions, as where a field says so."""
    return isinstance(value, tuple) and not value


def _item(value: Any, number: int) -> Any:
    """An item of a tuple; None of anything else, as of one with others."""
    return value[number] if isinstance(value, tuple) and number < len(value) else None


def written_tuple(
    function: ast.FunctionDef,
    node: ast.AST,
    namespace: Mapping[str, Any],
    makings: Sequence[Making],
    taint: Taint,
) -> ast.Tuple | None:
    """The tuple that a name stands for each time that it is read.

    The name `node` is read in `function`. `makings` has every time that it was read. Returns None
    if it is no such name, or if what the tuple is made of got another value since.
    """
    value = only_value(function, node.id) if isinstance(node, ast.Name) else None
    if not isinstance(value, ast.Tuple) or not makings or makings[0].is_cache:
        return None
    for making in makings:
        try:
            now = evaluate(value, {**namespace, **making.env}, making.fields)
        except UnknownValueError:
            # The parts that need the call are told by their values.
            read = [names_in(part) for part in value.elts if not taint.touches(part)]
            known = set().union(*read) & taint.pure
            return value if all(len(binding(function, name)) == 1 for name in known) else None
        if now != making.env.get(node.id):  # pyright: ignore
            return None
    return value
