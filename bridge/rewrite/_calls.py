"""What the body of a method becomes where layers are no longer made in it."""

from __future__ import annotations

import ast
import keyword
from collections.abc import Iterator
from typing import Any

from flax import linen as nn

from ._body import Slice
from ._layers import layer_of
from ._method import FUNCTIONS, Method
from ._plans import LeftLinenError, Slot
from ._slots import _LOOP_KINDS
from ._source import Edit, bound_in, is_self, names_in

_RAISE = 'raise NotImplementedError("this branch did not run when {} was rewritten")'


class Calls:
    """The edits of one method's body.

    Args:
        method: the method.
        slice_: the constructor's part, None if the method makes nothing.
    """

    def __init__(self, method: Method, slice_: Slice | None) -> None:
        self.method, self.source, self.plan = method, method.source, method.plan
        self.slice = slice_
        self.removed: set[ast.stmt] = set()
        self.dead: list[list[ast.stmt]] = []
        self._headers: list[Edit] = []
        self._insertions: list[tuple[ast.stmt, str]] = []

    def edits(self) -> list[Edit]:
        """The edits.

        Raises:
            LeftLinenError: a call cannot be followed.
        """
        node = self.method.node
        found = [e for each in node.body for e in self.method.references.edits(each)]
        found += [e for each in node.body for e in self.method.field_edits(each)]
        self._find_dead()
        for block in self.dead:
            text = _RAISE.format(self.plan.name)
            found.append(Edit(self.source.start(block[0]), self.source.end(block[-1]), text))
            self.plan.note(block[0], "a branch that did not run raises NotImplementedError")
        for slot in self.method.slots:
            if slot.outer is None:
                found += self._slot(slot)
        found += self._headers
        found += self._signature()
        found += self._states()
        found += self._removals()
        return found

    def _slot(self, slot: Slot) -> Iterator[Edit]:
        slot.item = self._item(slot)
        target = f"self.{slot.attribute}"
        if slot.is_list:
            target = slot.item
        if slot.kind == "param":
            target += "[...]"
        yield self.source.edit(slot.node, target)
        calls = list(self._calls_of(slot))
        if slot.modes and not calls:
            raise LeftLinenError("a mode moves to a call that is not found", slot.node)
        for call in calls:
            yield from self.adapted(slot, call)
        if slot.kind == "variable" and slot.variable:
            yield from self._values(slot.variable)

    def _item(self, slot: Slot) -> str:
        """How the call names what a turn of a loop made."""
        if not slot.is_list:
            return ""
        loop = slot.loops[0]
        if len(slot.loops) == 1 and not self._is_conditional(slot):
            name = _counter(loop)
            if name is not None and name.strip("_"):
                return f"self.{slot.attribute}[{name}]"
        direct = self._direct(slot)
        if direct is not None:
            return direct
        name = slot.attribute
        taken = self.method.taint.names | self.method.taint.pure
        while name in taken:
            name = f"{name}_iter"
        statement = self.source.statement_of(loop)
        entry = (statement, f"{name} = iter(self.{slot.attribute})")
        if entry not in self._insertions:
            self._insertions.append(entry)
        return f"next({name})"

    def _direct(self, slot: Slot) -> str | None:
        """A loop that only counts becomes one over what it made: `for block in self.blocks`."""
        loop: Any = slot.loops[0]
        if len(slot.loops) > 1 or self._is_conditional(slot) or not isinstance(loop, ast.For):
            return None
        others = [s for s in self.method.slots if s.loops[:1] == [loop] and s.outer is None]
        targets = bound_in(loop.target)
        if len(others) > 1 or loop.orelse or self._reads(targets, slot):
            return None
        name = slot.attribute[:-1] if slot.attribute.endswith("s") else f"{slot.attribute}_item"
        if name in self.method.taint.names | self.method.taint.pure or keyword.iskeyword(name):
            return None
        self._headers += [self.source.edit(loop.target, name),
                          self.source.edit(loop.iter, f"self.{slot.attribute}")]
        return name

    def _reads(self, names: set[str], slot: Slot) -> bool:
        """Whether the method reads names anywhere but in a slot."""
        stack: list[ast.AST] = list(self.method.node.body)
        while stack:
            node = stack.pop()
            if node is slot.node:
                continue
            if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load):
                return True
            stack.extend(ast.iter_child_nodes(node))
        return False

    def _is_conditional(self, slot: Slot) -> bool:
        for each in self.source.ancestors(slot.node):
            if each is slot.loops[0]:
                return False
            if isinstance(each, ast.If | ast.IfExp):
                return True
        return False

    def _calls_of(self, slot: Slot) -> Iterator[ast.Call]:
        parent = self.source.parents[slot.node]
        if isinstance(parent, ast.Call) and parent.func is slot.node:
            yield parent
        if slot.variable:
            for each in ast.walk(self.method.node):
                if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and (
                    each.func.id == slot.variable
                ):
                    yield each

    def adapted(self, slot: Slot, call: ast.Call) -> Iterator[Edit]:
        """A call with what NNX takes by keyword, and with the modes of the constructor."""
        layer = layer_of(next(iter({m.cls for m in slot.makings}), None))
        if layer is not None and not any(isinstance(a, ast.Starred) for a in call.args):
            for index, argument in enumerate(call.args[layer.keep :], layer.keep):
                if index >= len(layer.call) or layer.call[index] == "rng":
                    raise LeftLinenError(f"nnx.{layer.name} is called in another way", call)
                begin = self.source.start(argument)
                yield Edit(begin, begin, f"{layer.call[index]}=")
        names = {k.arg for k in call.keywords}
        if layer is not None:
            by_position = set(layer.call[: len(call.args)])
            names |= by_position
        added = [f"{name}={text}" for name, text in slot.modes.items() if name not in names]
        if added:
            last = max([*call.args, *(k.value for k in call.keywords)], key=self.source.end,
                       default=None)
            if last is None:
                end = self.source.end(call) - 1
                yield Edit(end, end, ", ".join(added))
            else:
                end = self._behind(last)
                yield Edit(end, end, ", " + ", ".join(added))

    def _behind(self, node: ast.AST) -> int:
        """The end of an argument, with parentheses of its own."""
        end = self.source.end(node)
        parent = self.source.parents[node]
        parent = self.source.parents[parent] if isinstance(parent, ast.keyword) else parent
        stop = self.source.end(parent) - 1
        rest = self.source.data[end:stop].decode()
        text = rest.split("#")[0].split("\n")[0].rstrip()
        closing = 0
        for character in text:
            if character == ")":
                closing += 1
            elif character not in " ":
                break
        return end + (text.rfind(")", 0, len(text)) + 1 if closing else 0)

    def _values(self, variable: str) -> Iterator[Edit]:
        for each in ast.walk(self.method.node):
            if isinstance(each, ast.Attribute) and each.attr == "value" and isinstance(
                each.value, ast.Name
            ) and each.value.id == variable:
                yield Edit(self.source.end(each.value), self.source.end(each), "[...]")

    def _signature(self) -> Iterator[Edit]:
        modes = [m for slot in self.method.slots for m, text in slot.modes.items() if m == text]
        arguments = dict.fromkeys(m for m in modes if any(
            m in carried for carried in self.plan.carried.values()))
        texts = [f"{name}: bool | None = None" for name in arguments
                 if name not in self.method.taint.names]
        if self.method.node.name == "__call__":
            for field in self.plan.fields:
                if field.name in self.plan.mode_fields:
                    default = "" if field.default is None else f" = {field.default}"
                    texts.append(f"{field.name}: {field.annotation}{default}")
        if not texts:
            return
        if self.method.node.name != "__call__":
            raise LeftLinenError("a mode is handed on to another method", self.method.node)
        given = self.method.node.args
        last = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        ends = [self.source.end(each) for each in last]
        ends += [self.source.end(d) for d in (*given.defaults, *given.kw_defaults) if d]
        if given.vararg:
            ends.append(self.source.end(given.vararg))
        if given.kwarg:
            raise LeftLinenError("a mode is handed on to a method with ** arguments", given.kwarg)
        star = "" if given.kwonlyargs or given.vararg else "*, "
        end = max(ends)
        yield Edit(end, end, f", {star}{', '.join(texts)}")

    def _states(self) -> Iterator[Edit]:
        """Methods of Linen's modules that NNX has not, or has in another way."""
        for node in ast.walk(self.method.node):
            if not (isinstance(node, ast.Call) and is_self(node.func)):
                continue
            if node in self.plan.slots:
                continue
            name = node.func.attr  # pyright: ignore
            if name in ("is_initializing", "is_mutable_collection"):
                yield self._never(node)
            elif name == "has_variable":
                yield self.source.edit(node, "True")
            elif name in ("sow", "perturb") and name == "sow":
                yield from self._sow(node)
            elif name == "make_rng":
                stream = node.args[0] if node.args else None
                if not (isinstance(stream, ast.Constant) and isinstance(stream.value, str)):
                    raise LeftLinenError("a stream whose name is not written out", node)
                self.plan.note(node, "keys are drawn from an NNX stream")
                yield self.source.edit(node, f"self.rngs.{stream.value}()")
            elif name in ("perturb", "param", "variable", "get_variable", "put_variable", "has_rng",
                          "clone", "copy", "init", "apply", "bind", "unbind", "scope", "variables"):
                raise LeftLinenError(f"self.{name} has no counterpart here", node)

    def _never(self, node: ast.Call) -> Edit:
        """`x and not self.is_initializing()` is `x`."""
        negation = self.source.parents[node]
        if isinstance(negation, ast.UnaryOp) and isinstance(negation.op, ast.Not):
            both = self.source.parents[negation]
            if isinstance(both, ast.BoolOp) and isinstance(both.op, ast.And) and len(
                both.values
            ) == 2:
                other = both.values[0] if both.values[1] is negation else both.values[1]
                return self.source.edit(both, self.method.call_text(other))
            return self.source.edit(negation, "True")
        return self.source.edit(node, "False")

    def _sow(self, node: ast.Call) -> Iterator[Edit]:
        first = node.args[0] if node.args else None
        if not (isinstance(first, ast.Constant) and first.value == "intermediates") or len(
            node.args
        ) != 3 or node.keywords:
            raise LeftLinenError("sow into another collection, or with its own reduction", node)
        yield self.source.edit(first, "nnx.Intermediate")

    def _removals(self) -> Iterator[Edit]:
        candidates = set(self.slice.kept) if self.slice is not None else set()
        inline = self._inlined()
        for node in ast.walk(self.method.node):
            if isinstance(node, ast.Assign) and bound_in(node) and isinstance(node.value, ast.Call):
                if self.method._moved(node.value):  # noqa: SLF001
                    candidates.add(node)
        while True:
            loads = self._loads()
            gone = {each for each in candidates - self.removed if not bound_in(each) & loads}
            if not gone:
                break
            self.removed |= gone
        for variable, slot in inline.items():
            for each in ast.walk(self.method.node):
                if isinstance(each, ast.Name) and each.id == variable and isinstance(
                    each.ctx, ast.Load
                ):
                    yield self.source.edit(each, f"self.{slot.attribute}")
            self.removed.add(self.source.statement_of(slot.node))
        yield from self._deletions()
        for statement, text in self._insertions:
            begin = self.source.start(statement)
            yield Edit(begin, begin, f"{text}\n{' ' * statement.col_offset}")

    def _inlined(self) -> dict[str, Slot]:
        """Variables that stand for one layer, at the method's own level."""
        found = {}
        for slot in self.method.slots:
            name = slot.variable
            if slot.kind != "module" or slot.is_list or slot.outer is not None or name is None:
                continue
            stores = [n for n in ast.walk(self.method.node) if isinstance(n, ast.Name)
                      and n.id == name and isinstance(n.ctx, ast.Store)]
            if len(stores) == 1 and self.source.statement_of(slot.node) in self.method.node.body:
                found[name] = slot
        return found

    def _loads(self) -> set[str]:
        """The names that what is left of the body reads."""
        slots = {s.node for s in self.method.slots}
        skipped = self.removed | {s for block in self.dead for s in block}
        found: set[str] = set()
        for slot in self.method.slots:
            for text in slot.modes.values():
                found |= names_in(ast.parse(text, mode="eval"))
            if slot.item:
                found |= names_in(ast.parse(slot.item, mode="eval"))
        stack: list[Any] = list(self.method.node.body)
        while stack:
            node = stack.pop()
            if node in skipped or node in slots:
                continue
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                found.add(node.id)
            stack.extend(ast.iter_child_nodes(node))
        return found

    def _deletions(self) -> Iterator[Edit]:
        """The lines of what is removed; a block that is left empty goes too."""
        whole = set(self.removed)
        while True:
            more = {
                node for node in ast.walk(self.method.node)
                if isinstance(node, ast.If | ast.For | ast.With) and node not in whole
                and all(each in whole for each in node.body)
                and all(each in whole for each in node.orelse if not isinstance(node, ast.With))
            } if True else set()
            if not more:
                break
            whole |= more
        for node in whole:
            parent = self.source.parents[node]
            if parent in whole:
                continue
            block = next(b for b in _blocks(parent) if node in b)
            if all(each in whole for each in block) and parent is not self.method.node:
                if node is block[0]:
                    yield Edit(self.source.start(block[0]), self.source.end(block[-1]), "pass")
                continue
            yield self.source_lines(node)

    def source_lines(self, node: ast.stmt) -> Edit:
        """The whole lines of a statement, with its comments."""
        above = len(self.source.comments_above(node))
        begin = self.source.offset(node.lineno - above, 0)
        end = self.source.offset((node.end_lineno or node.lineno) + 1, 0)
        return Edit(begin, end, "")

    def _find_dead(self) -> None:
        lines = self.method.program.records.lines.get(self.source.file, set())
        made = {s.node for s in self.method.slots}
        for node in ast.walk(self.method.node):
            if not isinstance(node, ast.Call) or node in made or not self._makes(node):
                continue
            statement = self.source.statement_of(node)
            inner = [a for a in self.source.ancestors(node) if isinstance(a, _LOOP_KINDS + FUNCTIONS)]
            if statement.lineno in lines and not any(
                isinstance(i, ast.Lambda | ast.FunctionDef) and i is not self.method.node
                for i in inner
            ):
                outer = next((a for a in self.source.ancestors(node) if a in made), None)
                if outer is not None or isinstance(node.func, ast.Call):
                    continue
                raise LeftLinenError("a layer in an expression that did not run", node)
            block = self._block_of(statement, lines)
            if block is not None and block not in self.dead:
                self.dead.append(block)

    def _makes(self, node: ast.Call) -> bool:
        value = self.method.references.value_of(node.func)
        if isinstance(value, type) and issubclass(value, nn.Module):
            parent = self.source.parents[node]
            return not (isinstance(parent, ast.keyword) and parent.arg == "cell")
        lines = self.method.program.records.lines.get(self.source.file, set())
        return (
            isinstance(node.func, ast.Call) and node.lineno not in lines
        ) or (is_self(node.func) and node.func.attr in ("param", "variable"))  # pyright: ignore

    def _block_of(self, statement: ast.AST, lines: set[int]) -> list[ast.stmt] | None:
        """The outermost block around a statement that did not run."""
        best: list[ast.stmt] | None = None
        while statement is not self.method.node:
            parent = self.source.parents[statement]
            for block in _blocks(parent):
                if statement in block and not any(
                    n in lines for s in block for n in range(s.lineno, (s.end_lineno or 0) + 1)
                ):
                    best = [s for s in block if not _is_docstring(s)]
            statement = parent
        if best is None:
            raise LeftLinenError("a layer in a statement that did not run", statement)
        return best


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list) and block:
            yield block


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _counter(loop: Any) -> str | None:
    """The name that counts a loop's turns from 0."""
    if isinstance(loop, ast.For):
        target, values = loop.target, loop.iter
    elif isinstance(loop, _LOOP_KINDS) and len(loop.generators) == 1 and not loop.generators[0].ifs:  # pyright: ignore
        target, values = loop.generators[0].target, loop.generators[0].iter  # pyright: ignore
    else:
        return None
    if isinstance(values, ast.Call) and isinstance(values.func, ast.Name):
        if values.func.id == "range" and len(values.args) == 1 and isinstance(target, ast.Name):
            return target.id
        if (
            values.func.id == "enumerate" and len(values.args) == 1
            and isinstance(target, ast.Tuple) and isinstance(target.elts[0], ast.Name)
        ):
            return target.elts[0].id
    return None
