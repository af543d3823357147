"""Attributes that `setup` computes from parameters, as properties.

Linen runs `setup` in each call; a constructor would compute with the initial values.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from bridge.rewrite.plan._constructors import made_text
from bridge.rewrite.plan._method import Method
from bridge.rewrite.plan._plans import Slot
from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.plan._slots import is_stored
from bridge.rewrite.syntax._source import Edit, bound_in, is_self, names_in

from ._dead import blocks_of
from ._lines import Lines, as_text

_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.FunctionDef, ast.Import, ast.ImportFrom)


class Computed:
    """The statements of one `setup` that compute with parameters.

    Args:
        method: `setup`.

    Attributes:
        attributes: the attributes that they set.
    """

    def __init__(self, method: Method) -> None:
        self.method, self.source = method, method.source
        slots = [slot for slot in method.slots if slot.kind == "param" and not slot.is_list]
        self._stored = {
            str(statement.targets[0].attr)  # pyright: ignore
            for slot in slots
            if is_stored(method.plan, slot)
            and isinstance(statement := self.source.statement_of(slot.node), ast.Assign)
        }
        self._slots = {slot.node: slot for slot in slots if not is_stored(method.plan, slot)}
        self.attributes: dict[str, None] = {}
        self._names: set[str] = set()
        self._statements: list[ast.stmt] = []
        self._find()

    def makes(self, slot: Slot) -> bool:
        """Whether a parameter is one that such a statement makes."""
        return any(slot.node in ast.walk(each) for each in self._statements)

    @property
    def _local(self) -> set[str]:
        return set().union(*map(bound_in, self.method.node.body))

    def _find(self) -> None:
        modules = {slot.node for slot in self.method.slots if slot.kind == "module"}
        waiting = [
            each
            for each in ast.walk(self.method.node)
            if isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None
        ]
        while True:
            more = [each for each in waiting if self._reads(each.value)]
            if not more:
                break
            for each in more:
                waiting.remove(each)
                if not modules.isdisjoint(ast.walk(each)):
                    raise NotRewritableError("computed-for-layer", each)
                self._statements.append(each)
                self._names |= bound_in(each)
                self.attributes |= dict.fromkeys(_attributes(each))
        self._statements.sort(key=lambda each: each.lineno)
        ordered = [name for each in self._statements for name in _attributes(each)]
        self.attributes = dict.fromkeys(ordered)
        for each in self._statements:
            around = self.source.parents[each]
            while isinstance(around, ast.If):
                around = self.source.parents[around]
            if around is not self.method.node:
                raise NotRewritableError("computed-in-block", each)

    def _reads(self, value: ast.AST | None) -> bool:
        """Whether an expression reads a parameter, or what is computed from one."""
        if value is None or (is_self(value) and value.attr in self._stored):  # pyright: ignore
            # A second name of a parameter.
            return False
        for each in ast.walk(value):
            if each in self._slots:
                return True
            if isinstance(each, ast.Name) and each.id in self._names:
                return True
            if is_self(each) and each.attr in {*self._stored, *self.attributes}:  # pyright: ignore
                return True
        return False

    def edits(self) -> Iterator[Edit]:
        """The edits of the constructor, which makes the parameters alone."""
        gone: set[ast.stmt] = set()
        for each in self._statements:
            made = [
                f"self.{slot.attribute} = {made_text(self.method, slot)}"
                for slot in self._slots.values()
                if slot.node in ast.walk(each)
            ]
            if made:
                yield self.source.edit(each, f"\n{' ' * each.col_offset}".join(made))
            else:
                gone.add(each)
        gone |= self._unread(gone)
        blocks = [each for each in ast.walk(self.method.node) if isinstance(each, ast.If)]
        for each in reversed(blocks):
            if gone.issuperset([*each.body, *each.orelse]):
                gone.add(each)
        for each in gone:
            parent = self.source.parents[each]
            block = next(block for block in blocks_of(parent) if each in block)
            if isinstance(parent, ast.If) and parent not in gone and gone.issuperset(block):
                yield self.source.edit(each, "pass")
            else:
                above = len(self.source.comments_above(each))
                begin = self.source.offset(each.lineno - above, 0)
                yield Edit(begin, self.source.lines_of(each).end, "")

    def _unread(self, gone: set[ast.stmt]) -> set[ast.stmt]:
        """The statements whose names only these read."""
        found: set[ast.stmt] = set()
        while True:
            away = {*gone, *found, *self._statements}
            loads: set[str] = set()
            stack: list[ast.AST] = list(self.method.node.body)
            while stack:
                node = stack.pop()
                if node in away:
                    continue
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                    loads.add(node.id)
                stack.extend(ast.iter_child_nodes(node))
            kept = [each for each in self._slots if self._statements]
            loads |= set().union(set(), *map(names_in, kept))
            read = set().union(set(), *map(names_in, self._statements))
            more = {
                each
                for each in self.method.node.body
                if isinstance(each, _SIMPLE)
                and each not in away
                and bound_in(each) & read
                and not bound_in(each) & loads
                and not [*_attributes(each)]
            }
            if not more:
                return found
            found |= more

    def properties(self, indent: int) -> list[str]:
        """The text of a property for each attribute.

        Args:
            indent: the indentation of a method.
        """
        blank = " " * indent
        return [
            f"{blank}@property\n{blank}def {name}(self):\n"
            f"{as_text(self._body(name), 2 * indent, indent)}"
            for name in self.attributes
        ]

    def _body(self, name: str) -> Lines:
        kept = self._needed(name)
        setting = [each for each in kept if name in _attributes(each)]
        last = self._last(name, setting)
        lines = self._lines(self.method.node.body, kept, name, last, 0)
        if last is None:
            if name in self._local:
                raise NotRewritableError("computed-name", setting[0])
            lines.append((0, f"return {name}"))
        return lines

    def _last(self, name: str, setting: Sequence[ast.stmt]) -> ast.Assign | None:
        """The statement whose value can be returned."""
        (first,) = setting if len(setting) == 1 else (None,)
        is_plain = isinstance(first, ast.Assign) and len(first.targets) == 1
        if not is_plain or not isinstance(first, ast.Assign) or not is_self(first.targets[0], name):
            return None
        return first if first in self.method.node.body else None

    def _needed(self, name: str) -> set[ast.stmt]:
        """The statements that an attribute is computed by."""
        local = self._local
        kept: set[ast.stmt] = set()
        read: set[str] = set()
        while True:
            more = {
                each
                for each in ast.walk(self.method.node)
                if isinstance(each, _SIMPLE)
                and each is not self.method.node
                and each not in kept
                and (name in _attributes(each) or bound_in(each) & read)
            }
            if not more:
                return kept
            kept |= more
            for each in more:
                read |= self._names_in(each) & local
                around = (a for a in self.source.ancestors(each) if isinstance(a, ast.If))
                read |= set().union(set(), *(names_in(a.test) & local for a in around))

    def _names_in(self, node: ast.AST) -> set[str]:
        """The names that are read, those for which a parameter is made apart."""
        if node in self._slots:
            return set()
        own = {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else set()
        return own.union(*map(self._names_in, ast.iter_child_nodes(node)))

    def _lines(
        self,
        block: Sequence[ast.stmt],
        kept: set[ast.stmt],
        name: str,
        last: ast.Assign | None,
        depth: int,
    ) -> Lines:
        found: Lines = []
        for each in block:
            if each in kept:
                found += [(depth, line) for line in self.source.comments_above(each)]
                text = self.source.render(each, [*self._edits(each, last)])
                found.append((depth, f"\0{each.col_offset}\0{text}"))
            elif isinstance(each, ast.If):
                body = self._lines(each.body, kept, name, last, depth + 1)
                other = self._lines(each.orelse, kept, name, last, depth + 1)
                if body or other:
                    test = self.source.render(each.test, [*self._edits(each.test, last)])
                    found += [(depth, f"if {test}:"), *(body or [(depth + 1, "pass")])]
                    found += [(depth, "else:"), *other] if other else []
        return found

    def _edits(self, node: ast.AST, last: ast.Assign | None) -> Iterator[Edit]:
        yield from self.method.references.edits(node)
        for each in ast.walk(node):
            slot = self._slots.get(each) if isinstance(each, ast.Call) else None
            if slot is not None:
                yield self.source.edit(each, f"self.{slot.attribute}[...]")
            elif not isinstance(each, ast.Attribute) or not is_self(each):
                continue
            elif isinstance(each.ctx, ast.Store):
                yield self.source.edit(each, each.attr)
            elif each.attr in self._stored:
                yield Edit(self.source.end(each), self.source.end(each), "[...]")
        if node is last and last is not None:
            begin, target = self.source.start(last), self.source.end(last.targets[0])
            yield Edit(begin, self.source.data.index(b"=", target) + 1, "return")


def _attributes(statement: ast.stmt) -> Iterator[str]:
    """The attributes that a statement sets."""
    targets = [getattr(statement, "target", None), *getattr(statement, "targets", ())]
    for node in (node for each in targets if each is not None for node in ast.walk(each)):
        if is_self(node):
            yield node.attr  # pyright: ignore
