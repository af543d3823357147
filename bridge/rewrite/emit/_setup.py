"""`setup` as part of the constructor: its statements stay, with NNX's constructors in them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from bridge.rewrite.plan._caches import cache_lines
from bridge.rewrite.plan._function_plans import FunctionPlan
from bridge.rewrite.plan._method import Method
from bridge.rewrite.plan._method_plans import SetupPlan
from bridge.rewrite.plan._plans import Slot
from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.plan._slots import CONTAINERS, held_attributes
from bridge.rewrite.syntax._source import Edit, bound_in, is_self, names_in, negated, walk_without

from ._calls import Calls, item_calls
from ._computed import Properties
from ._dead import RAISES, dead_blocks, dead_choices, in_place_of
from ._function_edits import function_edits
from ._lines import wrapped
from ._removals import removed, transforms
from ._tied import Applied


class Setup:
    """The `setup` of a class.

    `notes` has what a person has to look at: line and text.
    """

    def __init__(self, given: SetupPlan) -> None:
        method = self.method = given.method
        self.made, self.source, self.plan = given.made, method.source, method.plan
        self.slots = list(method.slots)
        self.computed, self.chains = given.computed, given.chains
        self.properties = Properties(self.computed, method.references)
        self.notes: list[tuple[int, str]] = []
        self._applied = Applied(method)
        self._choices = dead_choices(method)

    def text(self) -> str:
        """The statements.

        Raises NotRewritableError if something in it cannot be rewritten.
        """
        body = [
            s
            for s in self.method.node.body
            if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
        ]
        body = [s for s in body if not _is_super(s) and not isinstance(s, ast.Pass)]
        if not body:
            return ""
        edits: list[Edit] = []
        for slot in self.slots:
            if self.computed.makes(slot):
                continue
            if slot.node in self.made:
                edits.append(self.source.edit(slot.node, self.made[slot.node]))
                edits += self._where_it_has_weights(slot)
                edits += self._cache(slot)
                edits += self._comment(slot)
                if slot.modes and not isinstance(self.plan, FunctionPlan):
                    self._check_modes(slot)
        edits += self.properties.edits(self.made)
        edits += self._unmade()
        edits += removed(self.source, self._gone(), self.method.node)
        edits += self._without_makers()
        edits += function_edits(self.method)
        for statement in body:
            edits += self.method.references.edits(statement)
            edits += self._wrapped(statement)
            edits += self._sizes(statement)
        for whole in (*self._chained(), *self._unchosen()):
            edits = [e for e in edits if e.start < whole.start or e.end > whole.end]
            edits.append(whole)
        edits += [*self._before_chains(), *self._guards()]
        text = self._between(body[0], body[-1], edits)
        lines = text.split("\n")
        return "\n".join(wrapped(line, len(line) - len(line.lstrip())) for line in lines)

    def _between(self, first: ast.stmt, last: ast.stmt, edits: list[Edit]) -> str:
        """The lines of some statements; those on the line of `def` get one of their own."""
        node = self.method.node
        if first.lineno == node.body[0].lineno == node.lineno:
            text = self.source.stretch(self.source.start(first), self.source.end(last), edits)
            return f"{' ' * (node.col_offset + 4)}{text}"
        begin = self.source.offset(first.lineno - len(self.source.comments_above(first)), 0)
        end = self.source.offset((last.end_lineno or 0) + 1, 0)
        return self.source.stretch(begin, end, edits).rstrip("\n")

    def _chained(self) -> Iterator[Edit]:
        """Lists whose layers pass a size on, made in loops that keep it."""
        for chain in self.chains:
            for made, turn in chain.turns.items():
                comprehension: Any = self.source.parents[made]
                statement = self.source.statement_of(made)
                edits = [*self.method.references.edits(comprehension)]
                (generator,) = comprehension.generators
                target, values = (
                    self.source.render(each, edits) for each in (generator.target, generator.iter)
                )
                attribute = self.source.render(statement.targets[0])  # pyright: ignore
                # A tab counts as one column.
                node = self.method.node
                deeper = " " * (node.body[0].col_offset - node.col_offset)
                lines = [
                    *(chain.before if chain.statement is statement else ()),
                    f"{attribute} = nnx.List()",
                    f"for {target} in {values}:",
                    f"{deeper}{attribute}.append({self.made[made]})",
                    *([f"{deeper}{turn}"] if turn else []),
                ]
                yield self.source.edit(statement, f"\n{' ' * statement.col_offset}".join(lines))

    def _before_chains(self) -> Iterator[Edit]:
        """The sizes that lists in branches begin with."""
        for chain in self.chains:
            if any(chain.statement is self.source.statement_of(made) for made in chain.turns):
                continue
            begin, blank = self.source.start(chain.statement), " " * chain.statement.col_offset
            yield from (Edit(begin, begin, f"{line}\n{blank}") for line in chain.before)

    def _comment(self, slot: Slot) -> Iterator[Edit]:
        """Why a layer stays Linen, above the statement that makes it."""
        test = self._applied.test(slot) if slot.linen is not None else ""
        if slot.linen is not None and test != "":
            statement = self.source.statement_of(slot.node)
            # Below the condition of a layer that may be applied to weights of others.
            deeper = 4 if test else 0
            begin, blank = self.source.start(statement), " " * (statement.col_offset + deeper)
            yield Edit(begin, begin, f"# Stays Linen: {slot.linen.reason}.\n{blank}")

    def _where_it_has_weights(self, slot: Slot) -> Iterator[Edit]:
        """The condition around a layer that may be applied to weights of others."""
        if test := self._applied.test(slot):
            statement = self.source.statement_of(slot.node)
            begin, blank = self.source.start(statement), " " * (statement.col_offset + 4)
            yield Edit(begin, begin, f"if {test}:\n{blank}")

    def _cache(self, slot: Slot) -> Iterator[Edit]:
        """The decode cache, behind the statement that makes the layer."""
        if slot.cache is None:
            return
        statement = self.source.statement_of(slot.node)
        if not slot.is_alone or getattr(statement, "value", None) is not slot.node:
            raise NotRewritableError("cache-list", slot.node)
        column, end = statement.col_offset, self.source.end(statement)
        lines = cache_lines(slot.cache, f"self.{slot.stored}")
        yield Edit(end, end, "".join(f"\n{' ' * (column + 4 * d)}{line}" for d, line in lines))

    def _gone(self) -> set[ast.stmt]:
        """Layers without weights, and classes of transforms that nothing else needs."""
        gone = transforms(self.method)
        skipped = {*gone, *(slot.node.func for slot in self.slots if slot.lift)}
        left = walk_without(self.method.node.body, skipped.__contains__)
        loads = set().union(*(names_in(node) for node in left if isinstance(node, ast.Name)))
        made = (slot for slot in self.slots if slot.node in self.made)
        own = {self.source.statement_of(s.node) for s in made if self._applied.test(s) == ""}
        return own | {node for node in gone if not bound_in(node) & loads}

    def _without_makers(self) -> Iterator[Edit]:
        """Without the functions whose calls stand for the layers that they return."""
        made = {slot.node.func for slot in self.slots}
        for node, name in self.plan.maker_methods.items():
            if self.method.node in self.source.ancestors(node) and not any(
                isinstance(each, ast.Name)
                and each.id == name
                and isinstance(each.ctx, ast.Load)
                and each not in made
                for each in ast.walk(self.method.node)
            ):
                yield self.source.lines_of(self.source.statement_of(node))

    def _check_modes(self, slot: Slot) -> None:
        if not slot.is_alone:
            raise NotRewritableError("mode-call", slot.node)

    def _unmade(self) -> Iterator[Edit]:
        for block in dead_blocks(self.method):
            yield in_place_of(self.source, block, self._raise)
            self.notes.append((block[0].lineno, RAISES))

    def _unchosen(self) -> Iterator[Edit]:
        """Conditional expressions without the branch that did not run."""
        for choice in self._choices:
            kept = choice.node.orelse if choice.is_body else choice.node.body
            yield Edit(self.source.start(choice.node), self.source.start(kept), "")
            if self.source.end(kept) < self.source.end(choice.node):
                yield Edit(self.source.end(kept), self.source.end(choice.node), "")

    def _guards(self) -> Iterator[Edit]:
        """What raises where such a branch would run."""
        for choice in self._choices:
            statement = self.source.statement_of(choice.node)
            blank = " " * statement.col_offset
            test = choice.node.test
            test = self.source.render(test, list(self.method.references.edits(test)))
            test = test if choice.is_body else negated(test)
            begin = self.source.start(statement)
            yield Edit(begin, begin, f"if {test}:\n{blank}    {self._raise}\n{blank}")
            self.notes.append((statement.lineno, RAISES))

    @property
    def _raise(self) -> str:
        return f'raise NotImplementedError("this did not run when {self.plan.name} was rewritten")'

    def _wrapped(self, statement: ast.stmt) -> Iterator[Edit]:
        containers = held_attributes(self.method.program, self.plan, self.method.node)
        made = {slot.node for slot in self.slots if slot.outer is None}
        for node in ast.walk(statement):
            if self._is_nested(node, made):
                begin, end = self.source.start(node), self.source.end(node)
                yield Edit(begin, begin, f"nnx.{CONTAINERS[type(node)]}(")
                yield Edit(end, end, ")")
        for node in ast.walk(statement):
            if not isinstance(node, ast.Assign) or not is_self(node.targets[0]):
                continue
            name = node.targets[0].attr  # pyright: ignore
            if name in containers and node.value not in made:
                begin, end = self.source.start(node.value), self.source.end(node.value)
                yield Edit(begin, begin, f"nnx.{containers[name]}(")
                yield Edit(end, end, ")")
            elif name in self._arrays():
                # Flax takes a tracer for data only where it is told so.
                begin, end = self.source.start(node.value), self.source.end(node.value)
                yield Edit(begin, begin, "nnx.data(")
                yield Edit(end, end, ")")
            elif (
                isinstance(node.value, ast.Constant)
                and node.value.value is None
                and (self._is_module(name))
            ):
                yield self.source.edit(node.value, "nnx.data(None)")

    def _arrays(self) -> set[str]:
        """The attributes that hold arrays but not parameters."""
        records = self.method.program.records
        found = records.arrays.get((self.source.file, self.method.node.lineno), set())
        return found - self.computed.attributes.keys() - {slot.attribute for slot in self.slots}

    def _is_nested(self, node: ast.AST, made: set[ast.Call]) -> bool:
        """Whether a container of modules is put into another."""
        if type(node) not in CONTAINERS:
            return False
        inside: list[Any] = []
        if isinstance(node, ast.List | ast.Tuple):
            inside = list(node.elts)
        elif isinstance(node, ast.ListComp):
            inside = [node.elt]
        elif isinstance(node, ast.Dict):
            inside = list(node.values)
        elif isinstance(node, ast.DictComp):
            inside = [node.value]
        parent = self.source.parents[node]
        return any(each in made for each in inside) and not isinstance(parent, ast.Assign)

    def _is_module(self, name: str) -> bool:
        """Whether this `setup`, or that of a class below, puts a module into an attribute."""
        below = [
            plan
            for plan in self.method.program.plans.values()
            if isinstance(plan.cls, type) and issubclass(plan.cls, self.plan.cls)
        ]
        return any(slot.is_attribute(name) for plan in below for slot in plan.slots.values())

    def _sizes(self, statement: ast.stmt) -> Iterator[Edit]:
        begin = self.source.start(statement)
        blank = " " * statement.col_offset
        sizes = self.method.sizes
        inside = set(ast.walk(statement))
        for name, own in (
            (name, self.source.statement_of(loop))
            for name, loops in sizes.iterators.items()
            for loop in loops
        ):
            # In the branch of the loop: elsewhere there may be no sizes.
            if own in inside:
                place = self.source.start(own)
                yield Edit(place, place, f"{name} = iter({name})\n{' ' * own.col_offset}")
        for running in sizes.running:
            if self.source.statement_of(running.outermost) is statement:
                yield Edit(begin, begin, f"{running.name} = {running.first}\n{blank}")
            place = running.behind or running.loop.body[-1]
            if statement in (place, *self.source.ancestors(place)):
                end = self.source.end(place)
                inner = " " * place.col_offset
                yield Edit(end, end, f"\n{inner}{running.name} = {running.following}")

    def call_edits(self, method: Method, calls: Calls) -> list[Edit]:
        """The edits of another method that uses what `setup` made.

        `calls` says what its calls become.
        """
        found: list[Edit] = []
        own = [s for s in self.slots if s.outer is None and not self.computed.makes(s)]
        # Of two branches, the one with lifted transforms tells when they are there.
        own.sort(key=lambda slot: slot.lift is not None)
        by_name = {slot.stored: slot for slot in own if slot.is_alone}
        for slot, call in item_calls(self.slots, method):
            found += calls.transformed(slot, call, self.source.render(call.func))
        for node in ast.walk(method.node):
            if isinstance(node, ast.Call) and is_self(node.func):
                slot = by_name.get(node.func.attr)  # pyright: ignore
                if slot is not None and slot.kind == "module":
                    found += calls.adapted(slot, node)
                    if slot.lift is not None:
                        found += calls.transformed(slot, node, self.source.render(node.func))
            if is_self(node) and isinstance(node.ctx, ast.Load):  # pyright: ignore
                slot = by_name.get(node.attr)  # pyright: ignore
                parent = self.source.parents[node]
                if slot is not None and slot.kind == "param":
                    found.append(Edit(self.source.end(node), self.source.end(node), "[...]"))
                if (
                    slot is not None
                    and slot.kind == "variable"
                    and isinstance(parent, ast.Attribute)
                    and parent.attr == "value"
                ):
                    found.append(Edit(self.source.end(node), self.source.end(parent), "[...]"))
        return found


def _is_super(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node) == "super().setup()"
