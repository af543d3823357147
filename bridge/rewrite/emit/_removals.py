"""Removes from the body of a method what the constructor does."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Sequence

from bridge.rewrite.plan._function_plans import bound, called_function, functions_in
from bridge.rewrite.plan._method import Method
from bridge.rewrite.plan._plans import Slot
from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.syntax._source import (
    Edit,
    Source,
    bound_in,
    is_docstring,
    is_shadowed,
    names_in,
    set_in,
    walk_without,
)

from ._dead import block_of, blocks_of


class Removals:
    """The removals in one method.

    The constructor has the statements `kept`; the blocks `dead` did not run. `insertions` go before
    statements. `items` has what the calls name layers of lists by.
    """

    def __init__(
        self,
        method: Method,
        kept: Collection[ast.stmt],
        dead: Sequence[list[ast.stmt]],
        insertions: Sequence[tuple[ast.stmt, str]],
        items: Sequence[str],
    ) -> None:
        self.method, self.source = method, method.source
        self.kept, self.dead, self.insertions, self.items = kept, dead, insertions, items
        self.removed: set[ast.stmt] = set()
        plans = [(slot.node, called_function(method.program, slot)) for slot in method.slots]
        # Functions that call the layers that they make: some of their arguments stay in the call.
        self._functions = {node: p for node, p in plans if p is not None and p.call is not None}

    def edits(self) -> Iterator[Edit]:
        """The edits."""
        candidates = set(self.kept)
        inline = inlined(self.method)
        for node in ast.walk(self.method.node):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            is_maker = node.value in self.method.plan.makers
            if bound_in(node) and (is_maker or self.method.moved(node.value)):
                candidates.add(node)
        candidates |= transforms(self.method)
        candidates |= self._of_constructors()
        apart = functions_in(self.method.program, self.source, self.method.node)
        makers = self.method.plan.maker_methods.keys() & {*ast.walk(self.method.node)}
        candidates |= apart | {*map(self.source.statement_of, makers)}
        while True:
            loads = self._loads()
            gone = {
                each
                for each in candidates - self.removed
                if not (set_in(each) & loads and self._is_read(each, candidates))
            }
            if not gone:
                break
            self.removed |= gone
        for each in sorted(apart - self.removed, key=lambda node: node.lineno):
            # Of one inside another, the outer one's class has removed it.
            if apart.isdisjoint(self.source.ancestors(each)):
                raise NotRewritableError("inner-function-used", each)
        for variable, slot in inline.items():
            for each in ast.walk(self.method.node):
                if (
                    isinstance(each, ast.Name)
                    and each.id == variable
                    and isinstance(each.ctx, ast.Load)
                    and not is_shadowed(self.source, each, variable, self.method.node)
                ):
                    yield self.source.edit(each, f"{slot.holder}.{slot.attribute}")
            self.removed.add(self.source.statement_of(slot.node))
        yield from removed(self.source, self.removed, self.method.node)
        for statement, text in self.insertions:
            begin = self.source.start(statement)
            yield Edit(begin, begin, f"{text}\n{' ' * statement.col_offset}")

    def _of_constructors(self) -> set[ast.stmt]:
        """The assignments of names that constructors were given, and which change nothing else."""
        own = {each.arg for each in ast.walk(self.method.node.args) if isinstance(each, ast.arg)}
        made = [slot.node for slot in self.method.slots if slot.node not in self._functions]
        given = [*made, *self._arguments(are_known=True)]
        names = set().union(set(), *map(names_in, given)) - own
        return _assignments(
            self.method,
            names,
            lambda node: names_in(node.value) - own,
            lambda node, names: bound_in(node) <= names and _is_plain(node),
        )

    def _arguments(self, *, are_known: bool) -> Iterator[ast.expr]:
        """The arguments of such functions that their constructors take, or those that stay."""
        for node, plan in self._functions.items():
            yield from (v for n, v in bound(plan, node) if (n in plan.known) is are_known)

    def _is_read(self, node: ast.stmt, candidates: Collection[ast.stmt]) -> bool:
        """Whether more reads a name than what sets it: `width = 2 * width` reads it for itself."""
        names = set_in(node)
        alike = {each for each in candidates if set_in(each) <= names}
        return bool(names & self._loads(alike))

    def _loads(self, without: Collection[ast.stmt] = ()) -> set[str]:
        """The names that what is left of the body reads, besides some statements."""
        slots = {s.node for s in self.method.slots}
        skipped = {*self.removed, *without, *(s for block in self.dead for s in block)}
        found: set[str] = set()
        for each in self._arguments(are_known=False):
            found |= names_in(each)
        # Their layers take their place, also where one is an argument of another.
        found -= set().union(set(), *(names_in(node.func) for node in self._functions))
        for slot in self.method.slots:
            for text in slot.modes.values():
                found |= names_in(ast.parse(text, mode="eval"))
            if slot.lift is not None:
                found |= slot.lift.reads()
        for text in self.items:
            found |= names_in(ast.parse(text, mode="eval"))
        apart = {*skipped, *slots, *transforms(self.method)}
        for node in walk_without(self.method.node.body, apart.__contains__):
            if (
                isinstance(node, ast.Name)
                and isinstance(node.ctx, ast.Load)
                and not is_shadowed(self.source, node, node.id, self.method.node)
            ):
                found.add(node.id)
        return found


def removed(
    source: Source, gone: Collection[ast.stmt], function: ast.FunctionDef
) -> Iterator[Edit]:
    """Takes statements of a function away, with their comments; a block left empty goes too."""
    whole = {*gone}
    while more := {
        node
        for node in ast.walk(function)
        if isinstance(node, ast.If | ast.For | ast.With)
        and node not in whole
        and all(each in whole for block in blocks_of(node) for each in block)
    }:
        whole |= more
    for node in (each for each in whole if source.parents[each] not in whole):
        block = block_of(source, node)
        if whole.issuperset(block) and source.parents[node] is not function:
            if node is block[0]:
                yield Edit(source.start(block[0]), source.end(block[-1]), "pass")
            continue
        begin, end, _ = source.lines_of(node, comments=True)
        before = [each for each in block[: block.index(node)] if each not in whole]
        behind = (node.end_lineno or node.lineno) + 1
        if isinstance(node, ast.FunctionDef) or not before or is_docstring(before[-1]):
            # A blank line is part of a function, and none begins a block.
            last = function.end_lineno or 0
            while behind <= last and not source.lines[behind - 1].strip():
                behind += 1
            end = source.offset(behind, 0)
        yield Edit(begin, end, "")


def _is_plain(node: ast.Assign) -> bool:
    """Whether a statement assigns to names alone, and calls no method of the module."""
    targets = [each for target in node.targets for each in ast.walk(target)]
    if any(isinstance(each, ast.Attribute | ast.Subscript) for each in targets):
        return False
    calls = [each.func for each in ast.walk(node.value) if isinstance(each, ast.Call)]
    return not any("self" in names_in(func) for func in calls)


def inlined(method: Method) -> dict[str, Slot]:
    """Variables that stand for one layer, at the method's own level."""
    found = {}
    for slot in method.slots:
        name = slot.variable
        if slot.kind != "module" or slot.is_list or slot.outer is not None or name is None:
            continue
        stores = [
            n
            for n in ast.walk(method.node)
            if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store)
        ]
        if len(stores) == 1 and method.source.statement_of(slot.node) in method.node.body:
            found[name] = slot
    return found


def transforms(method: Method) -> set[ast.stmt]:
    """The assignments of classes that lifted transforms made, and that only slots need."""
    names: set[str] = set()
    for slot in method.slots:
        if slot.lift is not None:
            names |= names_in(slot.node.func) & method.taint.pure
    return _assignments(
        method,
        names,
        lambda node: names_in(node.value) & method.taint.pure,
        lambda node, names: bool(bound_in(node) & names),
    )


def _assignments(
    method: Method,
    names: set[str],
    read: Callable[[ast.Assign], set[str]],
    is_wanted: Callable[[ast.Assign, set[str]], bool],
) -> set[ast.stmt]:
    """The assignments that give names their values, directly or through other names.

    What the assignments read is added to `names`. `read` returns the names that count of those that
    an assignment reads. `is_wanted` says whether an assignment counts, given the names that are
    known by then.
    """
    found: set[ast.stmt] = set()
    before = -1
    while len(found) != before:
        before = len(found)
        for node in ast.walk(method.node):
            if isinstance(node, ast.Assign) and is_wanted(node, names):
                found.add(node)
                names |= read(node)
    return found
