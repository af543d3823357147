"""The slice of a compact method that makes layers, as lines of the constructor."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bridge.rewrite.syntax._source import (
    COMPREHENSIONS,
    Edit,
    bound_in,
    is_growth,
    is_self,
    loops_around,
    names_in,
    negated,
    set_in,
)
from bridge.rewrite.syntax._taint import SAME_ITEMS

from ._caches import cache_lines
from ._conditions import condition
from ._constructors import made_text
from ._kept_sizes import Loop
from ._method import Method
from ._plans import Lines, Slot
from ._refusals import NotRewritableError

_WORD = re.compile(r"\w+")


class Slice:
    """The constructor's part of a compact method."""

    def __init__(self, method: Method) -> None:
        self.method, self.source, self.plan = method, method.source, method.plan
        self.kept: set[ast.stmt] = set()
        self.texts: dict[ast.Call, str] = {}

    def lines(self) -> Lines:
        """The lines, with their depth of indentation."""
        called = self.method.sizes.candidates.first_call
        # As the data goes: `norm()(dense(4)(x))` makes `norm` first, which has the size of `dense`.
        for slot in sorted(self.method.slots, key=lambda s: called(s.makings[0])):
            if slot.outer is None:
                self.texts[slot.node] = made_text(self.method, slot)
        while True:
            self.kept.clear()
            before = self._known()
            found = self._block(self.method.node.body, 0)
            if before == self._known():
                return found

    def _known(self) -> tuple[set[str], int, int, int]:
        """What lines further up depend on."""
        sizes, kept = self.method.sizes, self.method.kept.names
        return set(self.method.used), len(sizes.running), len(sizes.iterators), len(kept)

    def _block(self, statements: Sequence[ast.stmt], depth: int) -> Lines:
        found: Lines = []
        for number, statement in enumerate(statements):
            for function in self._called.get(statement, ()):
                found += self._block(function.body, depth)
            found += self._before(statement, depth)
            found += [(depth, text) for text in self.method.kept.updates(statement, before=True)]
            own = self._statement(statement, depth)
            found += own
            found += self._running(depth, behind=statement)
            for text in self.method.kept.updates(statement, before=False):
                if not _says(found[-1:], depth, text):
                    found.append((depth, text))
            if isinstance(statement, ast.If) and self._returns(statement):
                rest = self._block(statements[number + 1 :], depth + 1)
                if not rest:
                    return found
                is_last = bool(own) and own[-1] is found[-1]
                header = [(depth, "else:")] if is_last else self._unless(statement, depth)
                return [*found, *header, *rest]
        return found

    def _returns(self, node: ast.If) -> bool:
        """Whether the method returns here for some fields, and so makes no layer below."""
        around = self.source.ancestors(node)
        return (
            not node.orelse
            and isinstance(node.body[-1], ast.Return)
            and not self.method.taint.touches(node.test)
            and not any(isinstance(each, ast.For | ast.While) for each in around)
        )

    def _unless(self, node: ast.If, depth: int) -> Lines:
        """The condition of what is below such a return."""
        text = negated(self.method.init_text(node.test, ()))
        return [(depth, _header_line("if", text, node.col_offset))]

    @functools.cached_property
    def _called(self) -> dict[ast.stmt, list[ast.FunctionDef]]:
        """The functions inside of the method that make layers, by the statement that calls each.

        Raises NotRewritableError if a function is used otherwise, or if its names are the method's
        too.
        """
        found: dict[ast.stmt, list[ast.FunctionDef]] = {}
        every = [*ast.walk(self.method.node)]
        lifted = {each.function for slot in self.method.slots for each in slot.functions}
        for function in every[1:]:
            if not isinstance(function, ast.FunctionDef) or function in lifted:
                continue
            if not self._makes(function):
                continue
            inside = set().union(*(bound_in(each) for each in function.body))
            others = {
                each.id
                for each in every
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
                if function not in self.source.ancestors(each)
            }
            names = [n for n in every if isinstance(n, ast.Name) and n.id == function.name]
            calls = [self.source.parents[each] for each in names]
            match calls:
                case [ast.Call(func=ast.Name()) as call] if call.func is names[0]:
                    around = itertools.takewhile(_is_part, self.source.ancestors(call))
                    is_once = not loops_around(self.source, call, self.method.node) and not any(
                        isinstance(each, ast.IfExp | ast.BoolOp | ast.Lambda) for each in around
                    )
                case _:
                    is_once = False
            if not is_once or inside & others & self.method.taint.pure:
                raise NotRewritableError("inner-function", function)
            found.setdefault(self.source.statement_of(calls[0]), []).append(function)
        return found

    def _before(self, statement: ast.stmt, depth: int) -> Lines:
        """What is set before a loop."""
        found: Lines = []
        seen: set[str] = set()
        for slot in self.method.slots:
            if (
                slot.is_list
                and slot.outer is None
                and slot.attribute not in seen
                and (self.source.statement_of(slot.loops[0]) is statement)
                and not self._is_simple_list(slot)
            ):
                seen.add(slot.attribute)
                found.append((depth, f"self.{slot.attribute} = nnx.List()"))
        for name, loops in self.method.sizes.iterators.items():
            if any(self.source.statement_of(loop) is statement for loop in loops):
                found.append((depth, f"{name} = iter({name})"))
        for running in self.method.sizes.running:
            if self.source.statement_of(running.outermost) is statement:
                self.method.used |= self.method.names_of(running.first)
                found.append((depth, f"{running.name} = {running.first}"))
        return found

    def _running(
        self, depth: int, behind: ast.stmt | None = None, loop: ast.AST | None = None
    ) -> Lines:
        found: Lines = []
        for each in self.method.sizes.running:
            if (loop is not None and each.loop is loop and each.behind is None) or (
                behind is not None and each.behind is behind
            ):
                self.method.used |= self.method.names_of(each.following)
                found.append((depth, f"{each.name} = {each.following}"))
        return found

    def _statement(self, node: ast.stmt, depth: int) -> Lines:
        match node:
            case ast.If():
                return self._slots_of(node, depth) + self._if(node, depth)
            case ast.For():
                found = self._slots_of(node, depth)
                body = self._block(node.body, depth + 1)
                body += self._running(depth + 1, loop=node)
                return [
                    *found,
                    *(self._headed(self._for(node, body), node, body, depth) if body else []),
                ]
            case ast.With():
                return self._block(node.body, depth)
            case ast.FunctionDef():
                if any(each.function is node for s in self.method.slots for each in s.functions):
                    return self._block(node.body, depth)
                return [] if self._makes(node) else self._copied(node, depth)
            case ast.Match():
                return self._slots_of(node, depth) + self._match(node, depth)
            case ast.Try():
                return self._try(node, depth)
            case ast.While():
                return []
        made = self._slots_of(node, depth)
        return [*made, *self._held(node, depth)] if made else self._copied(node, depth)

    def _slots_of(self, node: ast.stmt, depth: int) -> Lines:
        """What a statement itself makes, or the header of a block."""
        slots = [
            s
            for s in self.method.slots
            if s.outer is None and (s.place or self.source.statement_of(s.node)) is node
        ]
        return [line for slot in self._in_order(slots) for line in self._slot(slot, depth)]

    def _in_order(self, slots: list[Slot]) -> list[Slot]:
        """The slots of one statement as the data goes; numbered ones as they are numbered."""
        records = self.method.program.records
        classes = {records.base_of(slot.makings[0].cls) for slot in slots}

        def called(slot: Slot) -> int:
            making = slot.makings[0]
            instance = records.made_by(making)
            calls = instance.calls if instance is not None else ()
            return calls[0].began if calls and len(classes) == len(slots) else making.order

        return sorted(slots, key=called)

    def _headed(self, header: str, node: ast.stmt, body: Lines, depth: int) -> Lines:
        comments = [(depth, text) for text in self.source.comments_above(node)]
        return [*comments, (depth, header), *body]

    def _for(self, node: ast.For, body: Lines) -> str:
        loop = self._loop(node.target, node.iter, body)
        return _header_line(f"for {loop.target} in", loop.values, node.col_offset)

    def _loop(
        self, target: ast.expr, values: ast.expr, body: Sequence[tuple[int, str]] = ()
    ) -> Loop:
        read = set(_WORD.findall("\n".join(text for _, text in body)))

        found = self._known_loop(target, values, read)
        if found is None:
            raise NotRewritableError("loop-of-call", values)
        return found

    def _known_loop(self, target: ast.expr, values: ast.expr, read: set[str]) -> Loop | None:
        """The part of a loop that a constructor knows, None if there is none.

        `for skip, width in zip(skips, widths)` has `for width in widths`: where there are fewer
        skips than widths this makes too many layers, which the comparison of weights finds. The
        loop binds `target` and goes over `values`. `read` has the words of its body.
        """
        method, render = self.method, self.source.render
        if not method.taint.touches(values):
            return Loop(render(target), method.init_text(values, ()))
        if not isinstance(values, ast.Call) or not isinstance(values.func, ast.Name):
            sized = method.kept.loop_over(target, values)
            return sized if sized is not None and sized.target in read else None
        name, given = values.func.id, values.args
        if any(k.arg != "strict" for k in values.keywords):
            return None
        if name in SAME_ITEMS and len(given) == 1:
            found = self._known_loop(target, given[0], read)
            return found and Loop(found.target, f"{name}({found.values})")
        if not isinstance(target, ast.Tuple):
            return None
        if name == "enumerate" and len(given) == 1 and len(target.elts) == 2:
            found = self._known_loop(target.elts[1], given[0], read)
            if found is None:
                return None
            return Loop(f"{render(target.elts[0])}, {found.item}", f"enumerate({found.values})")
        if name == "zip" and len(given) == len(target.elts):
            pairs = zip(target.elts, given, strict=True)
            parts = [each for own in pairs if (each := self._known_loop(*own, read)) is not None]
            if len(parts) < 2:
                return parts[0] if parts else None
            options = [render(each) for each in values.keywords]
            inside = ", ".join([*(each.values for each in parts), *options])
            return Loop(", ".join(each.item for each in parts), f"zip({inside})")
        return None

    def _if(self, node: ast.If, depth: int) -> Lines:
        inner = depth + 1
        body, other = self._block(node.body, inner), self._block(node.orelse, inner)
        if not body and not other:
            # Nothing needs the condition, which may need sizes that the constructor lacks.
            return []
        test = condition(self.method, node)
        if test is None:
            return [(each - 1, text) for each, text in [*body, *other]]
        if not body:
            return [(depth, f"if {negated(test)}:"), *other]
        lines = self._headed(_header_line("if", test, node.col_offset), node, body, depth)
        if other:
            is_elif = len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)
            first, text = other[0]
            if is_elif and first == inner and text.rpartition("\0")[2].startswith("if "):
                return [
                    *lines,
                    (depth, text.replace("if ", "elif ", 1)),
                    *((d - 1, text) for d, text in other[1:]),
                ]
            lines += [(depth, "else:"), *other]
        return lines

    def _makes(self, node: ast.stmt) -> bool:
        """Whether layers are made in a block, or by what is above it."""
        return any(
            self.source.statement_of(slot.node) is node or node in self.source.ancestors(slot.node)
            for slot in self.method.slots
        )

    def _match(self, node: ast.Match, depth: int) -> Lines:
        found: Lines = []
        for case in node.cases:
            text = self.source.stretch(
                self.source.start(case.pattern), self.source.end(case.guard or case.pattern)
            )
            body = self._block(case.body, depth + 2)
            found += [(depth + 1, f"case {text}:"), *(body or [(depth + 2, "pass")])]
        while found and found[-1] == (depth + 2, "pass"):
            # Nothing is behind the last cases.
            del found[-2:]
        if not found:
            return []
        if self.method.taint.touches(node.subject):
            raise NotRewritableError("match-on-call", node)
        return self._headed(f"match {self.method.init_text(node.subject, ())}:", node, found, depth)

    def _try(self, node: ast.Try, depth: int) -> Lines:
        lines = self.method.lines
        caught = any(each.lineno in lines for handler in node.handlers for each in handler.body)
        if caught and any(map(self._makes, node.body)):
            raise NotRewritableError("try-block", node)
        body = self._block(node.body, depth + 1)
        handlers: Lines = []
        for each in node.handlers:
            inner = self._block(each.body, depth + 1)
            text = self.source.stretch(self.source.start(each), self.source.start(each.body[0]))
            header = text.partition("\n")[0].partition("#")[0].rstrip()
            handlers += [(depth, header), *(inner or [(depth + 1, "pass")])]
        rest = self._block(node.orelse, depth) + self._block(node.finalbody, depth)
        if all(text == "pass" for d, text in handlers if d > depth):
            return [*((d - 1, text) for d, text in body), *rest]
        return [(depth, "try:"), *(body or [(depth + 1, "pass")]), *handlers, *rest]

    def _copied(self, node: ast.stmt, depth: int) -> Lines:
        if not isinstance(
            node,
            ast.Assign
            | ast.AnnAssign
            | ast.AugAssign
            | ast.FunctionDef
            | ast.Import
            | ast.ImportFrom,
        ) and not (isinstance(node, ast.Expr) and is_growth(node.value)):
            return []
        bound = set_in(node)
        if not bound & self.method.used:
            return []
        if self._is_argument(node):
            return []
        if bound & self.method.taint.names:
            return self._known_parts(node, depth)
        text = self._config_text(node)
        self.kept.add(node)
        column = node.col_offset
        comments = [(depth, line) for line in self.source.comments_above(node)]
        return [*comments, (depth, f"\0{column}\0{text}")]

    def _known_parts(self, node: ast.stmt, depth: int) -> Lines:
        """What a constructor reads of `size, width = x.shape[-1], self.width`, if it knows it."""
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        value = node.value if isinstance(node, ast.Assign) else None
        if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
            return []
        found: Lines = []
        makings = self._env_makings()
        for each, own in zip(target.elts, value.elts, strict=False):
            if isinstance(each, ast.Name) and each.id in self.method.used & self.method.taint.pure:
                found.append((depth, f"{each.id} = {self.method.init_text(own, makings)}"))
        if found:
            self.kept.add(node)
        return found

    def _held(self, node: ast.stmt, depth: int) -> Lines:
        """A statement that makes layers, for what the constructor reads of the names that it sets.

        `norm = nn.LayerNorm() if self.norm else None` is there as
        `norm = self.layer_norm if self.norm else None`.
        """
        slots = [s for s in self.method.slots if s.outer is None and self._is_in(s, node)]
        bound = set_in(node)
        is_other = not isinstance(node, ast.Assign | ast.Expr) or any(s.variable for s in slots)
        if is_other or not bound & self.method.used or bound & self.method.taint.names:
            return []
        names: dict[ast.AST, str] = {}
        for slot in slots:
            is_simple = slot.is_list and self._is_simple_list(slot)
            if not is_simple and any(isinstance(e, COMPREHENSIONS) for e in self._contexts(slot)):
                return []
            is_item = slot.is_list and not is_simple
            name = f"self.{slot.attribute}{'[-1]' if is_item else ''}"
            names[slot.loops[0] if is_simple else slot.node] = name
        edits = list(self._held_edits(node, names))
        self.kept.add(node)
        return [(depth, f"\0{node.col_offset}\0{self.source.render(node, edits)}")]

    def _is_in(self, slot: Slot, node: ast.stmt) -> bool:
        return self.source.statement_of(slot.node) is node

    def _held_edits(self, node: ast.AST, names: Mapping[ast.AST, str]) -> Iterator[Edit]:
        if node in names:
            yield self.source.edit(node, names[node])
        elif names.keys().isdisjoint(ast.walk(node)):
            yield from self.method.references.edits(node)
            yield from self.method.init_edits(node, self._env_makings())
            self.method.used |= names_in(node) & self.method.taint.pure
        else:
            for each in ast.iter_child_nodes(node):
                yield from self._held_edits(each, names)

    def _is_argument(self, node: ast.stmt) -> bool:
        """Whether a statement is `size = self.size`, which the constructor has as an argument."""
        if not isinstance(node, ast.Assign) or not is_self(node.value):
            return False
        name: str = node.value.attr  # pyright: ignore
        fields = [f for f in self.plan.fields if f.name == name and f.factory is None]
        alike = [isinstance(t, ast.Name) and t.id == name for t in node.targets]
        if not fields or not all(alike):
            return False
        self.kept.add(node)
        return True

    def _config_text(self, node: ast.stmt) -> str:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            text = self.method.init_text(node.value, self._env_makings())
            # The value's own parentheses are outside of it.
            before = self.source.stretch(self.source.start(node), self.source.start(node.value))
            behind = self.source.stretch(self.source.end(node.value), self.source.end(node))
            return before + text + behind
        if isinstance(node, ast.Expr):
            return self.method.init_text(node.value, self._env_makings())
        self.method.used |= {n for n in names_in(node) if n in self.method.taint.pure}
        return self.source.render(node, list(self.method.references.edits(node)))

    def _env_makings(self) -> list[Any]:
        seen: dict[Any, Any] = {}
        for slot in self.method.slots:
            for making in slot.makings:
                seen[(making.run, making.owner)] = making
        return list(seen.values())

    def _is_simple_list(self, slot: Slot) -> bool:
        return (
            len(slot.loops) == 1
            and slot.cache is None
            and isinstance(slot.loops[0], ast.ListComp)
            and not any(isinstance(each, ast.IfExp) for each in self._contexts(slot))
        )

    def _contexts(self, slot: Slot) -> list[ast.AST]:
        found: list[ast.AST] = []
        for each in self.source.ancestors(slot.node):
            if isinstance(each, ast.stmt):
                break
            if isinstance(each, (ast.IfExp, *COMPREHENSIONS)):
                found.insert(0, each)
        return found

    def _slot(self, slot: Slot, depth: int) -> Lines:
        statement = self.source.statement_of(slot.node)
        made = self.texts[slot.node]
        found: Lines = [(depth, f"# Stays Linen: {slot.linen.reason}.")] if slot.linen else []
        contexts = self._contexts(slot)
        if self._is_simple_list(slot):
            generators = "".join(self._generator(g) for g in slot.loops[0].generators)  # pyright: ignore
            return [*found, (depth, f"self.{slot.attribute} = nnx.List([{made}{generators}])")]
        for each in contexts:
            if isinstance(each, ast.IfExp):
                test = condition(self.method, each)
                is_body = slot.node in set(ast.walk(each.body))
                if test is not None:
                    found.append((depth, f"if {test if is_body else negated(test)}:"))
                    depth += 1
            else:
                for generator in each.generators:  # pyright: ignore
                    found.append((depth, self._generator(generator).strip() + ":"))
                    depth += 1
        column = statement.col_offset
        if slot.is_list:
            found.append((depth, f"\0{column}\0self.{slot.attribute}.append({made})"))
        else:
            found.append((depth, f"\0{column}\0self.{slot.attribute} = {made}"))
        if slot.cache is not None:
            made = f"self.{slot.attribute}{'[-1]' if slot.is_list else ''}"
            found += cache_lines(slot.cache, made, depth)
        if slot.variable in self.method.used:
            # Another constructor is given it, by its variable.
            found.append((depth, f"{slot.variable} = self.{slot.attribute}"))
        return found

    def _generator(self, node: ast.comprehension) -> str:
        loop = self._loop(node.target, node.iter)
        text = f" for {loop.target} in {loop.values}"
        return text + "".join(f" if {self.method.init_text(each, ())}" for each in node.ifs)


def _is_part(node: ast.AST) -> bool:
    return not isinstance(node, ast.stmt)


def _header_line(words: str, expression: str, column: int) -> str:
    """The line that begins a block; what goes on over several lines needs parentheses for it.

    `words` stands before the expression, such as `if`. `expression` is the condition, or what a
    loop takes. `column` is where the block was, if it is from the program.
    """
    line = f"{words} {expression}:"
    if "\n" not in expression:
        return line
    try:
        ast.parse(f"{line} pass")
    except SyntaxError:
        line = f"{words} ({expression}):"
    return f"\0{column}\0{line}"


def _says(last: Lines, depth: int, text: str) -> bool:
    """Whether the last line has set this, before a branch that makes no layer."""
    name, _, value = text.partition(" = ")
    return last == [(depth, text)] and bool(value) and name not in names_in(ast.parse(value))
