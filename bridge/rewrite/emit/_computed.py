"""Attributes that `setup` computes from parameters, as properties.

Linen runs `setup` in each call; a constructor would compute with the initial values.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from bridge.rewrite.plan._computed import Computed, set_attributes
from bridge.rewrite.plan._plans import Lines
from bridge.rewrite.plan._references import References
from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.syntax._source import Edit, bound_in, is_self, names_in, walk_without

from ._lines import as_text
from ._removals import removed

_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.FunctionDef, ast.Import, ast.ImportFrom)


class Properties:
    """The text of the properties of one `setup`, and of what is left of it."""

    def __init__(self, computed: Computed, references: References) -> None:
        self.computed, self.references = computed, references
        self.setup, self.source = computed.setup, computed.source

    @property
    def _local(self) -> set[str]:
        return set().union(*map(bound_in, self.setup.body))

    def edits(self, made: Mapping[ast.Call, str]) -> Iterator[Edit]:
        """The edits of the constructor, which makes the parameters alone.

        `made` says what makes them, by the expressions that made them.
        """
        gone: set[ast.stmt] = set()
        for each in self.computed.statements:
            own = [
                f"self.{slot.attribute} = {made[slot.node]}"
                for slot in self.computed.slots.values()
                if slot.node in ast.walk(each)
            ]
            if own:
                yield self.source.edit(each, f"\n{' ' * each.col_offset}".join(own))
            else:
                gone.add(each)
        gone |= self._unread(gone)
        yield from removed(self.source, gone, self.setup)

    def _unread(self, gone: set[ast.stmt]) -> set[ast.stmt]:
        """The statements that only these read."""
        found: set[ast.stmt] = set()
        while True:
            away = {*gone, *found, *self.computed.statements}
            left = walk_without(self.setup.body, away.__contains__)
            loads = set().union(*(names_in(node) for node in left if isinstance(node, ast.Name)))
            kept = [each for each in self.computed.slots if self.computed.statements]
            loads |= set().union(set(), *map(names_in, kept))
            read = set().union(set(), *map(names_in, self.computed.statements))
            more = {
                each
                for each in self.setup.body
                if isinstance(each, _SIMPLE)
                and each not in away
                and bound_in(each) & read
                and not bound_in(each) & loads
                and not [*set_attributes(each)]
            }
            if not more:
                return found
            found |= more

    def texts(self, indent: int) -> list[str]:
        """The text of a property for each attribute."""
        blank = " " * indent
        return [
            f"{blank}@property\n{blank}def {name}(self):\n"
            f"{as_text(self._body(name), 2 * indent, indent)}"
            for name in self.computed.attributes
        ]

    def _body(self, name: str) -> Lines:
        kept = self._needed(name)
        setting = [each for each in kept if name in set_attributes(each)]
        last = self._last(name, setting)
        lines = self._lines(self.setup.body, kept, last, 0, name)
        if last is None:
            if name in self._local:
                raise NotRewritableError("computed-name", setting[0])
            lines.append((0, f"return {name}"))
        return lines

    def _last(self, name: str, setting: Sequence[ast.stmt]) -> ast.Assign | None:
        """The statement with a value that can be returned."""
        (first,) = setting if len(setting) == 1 else (None,)
        is_plain = isinstance(first, ast.Assign) and len(first.targets) == 1
        if not is_plain or not isinstance(first, ast.Assign) or not is_self(first.targets[0], name):
            return None
        return first if first in self.setup.body else None

    def _needed(self, name: str) -> set[ast.stmt]:
        """The statements that an attribute is computed by."""
        local = self._local
        kept: set[ast.stmt] = set()
        read: set[str] = set()
        while True:
            more = {
                each
                for each in ast.walk(self.setup)
                if isinstance(each, _SIMPLE)
                and each is not self.setup
                and each not in kept
                and (name in set_attributes(each) or bound_in(each) & read)
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
        if node in self.computed.slots:
            return set()
        own = {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else set()
        return own.union(*map(self._names_in, ast.iter_child_nodes(node)))

    def _lines(
        self,
        block: Sequence[ast.stmt],
        kept: set[ast.stmt],
        last: ast.Assign | None,
        depth: int,
        name: str,
    ) -> Lines:
        found: Lines = []
        for each in block:
            if each in kept:
                found += [(depth, line) for line in self.source.comments_above(each)]
                text = self.source.render(each, [*self._edits(each, last, name)])
                found.append((depth, f"\0{each.col_offset}\0{text}"))
            elif isinstance(each, ast.If):
                body = self._lines(each.body, kept, last, depth + 1, name)
                other = self._lines(each.orelse, kept, last, depth + 1, name)
                if body or other:
                    test = self.source.render(each.test, [*self._edits(each.test, last, name)])
                    found += [(depth, f"if {test}:"), *(body or [(depth + 1, "pass")])]
                    found += [(depth, "else:"), *other] if other else []
        return found

    def _edits(self, node: ast.AST, last: ast.Assign | None, name: str) -> Iterator[Edit]:
        yield from self.references.edits(node)
        for each in ast.walk(node):
            slot = self.computed.slots.get(each) if isinstance(each, ast.Call) else None
            if slot is not None:
                yield self.source.edit(each, f"self.{slot.attribute}[...]")
            elif not isinstance(each, ast.Attribute) or not is_self(each):
                continue
            elif isinstance(each.ctx, ast.Store) or each.attr == name:
                yield self.source.edit(each, each.attr)
            elif each.attr in self.computed.stored:
                yield Edit(self.source.end(each), self.source.end(each), "[...]")
        if node is last and last is not None:
            begin, target = self.source.start(last), self.source.end(last.targets[0])
            yield Edit(begin, self.source.data.index(b"=", target) + 1, "return")
