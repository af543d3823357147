"""Lifted transforms of functions and methods, as transforms of NNX of the same functions."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from flax import linen as nn

from bridge.rewrite.plan._axes import PASSED, STACKS, Axes, axis_texts, check_options, metadata
from bridge.rewrite.plan._method import Method
from bridge.rewrite.plan._plans import FunctionLift
from bridge.rewrite.plan._references import References
from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.syntax._source import Edit

_WIDTH = 100


def function_edits(method: Method) -> Iterator[Edit]:
    """The edits of the transforms in one method.

    Raises NotRewritableError if NNX's transforms do not do the same.
    """
    for each in method.plan.functions:
        if method.node in method.source.ancestors(each.node):
            try:
                yield from _Transform(method, each).edits()
            except NotRewritableError as error:
                # What looks at options alone knows no place.
                error.refusal = dataclasses.replace(error.refusal, line=each.node.lineno)
                raise


class _Transform:
    """One transform of a function."""

    def __init__(self, method: Method, given: FunctionLift) -> None:
        self.method, self.given, self.source = method, given, method.source
        self.lifted, self.node = given.lifted, given.node
        self.kind = given.lifted.kind

    def edits(self) -> Iterator[Edit]:
        check_options(self.lifted)
        if self.kind in ("cond", "switch"):
            yield from self._branches()
            return
        if self.kind == "while_loop":
            yield from self._while()
            return
        self._check()
        options = self._axes() if self.kind in STACKS else []
        options += self._passed()
        if not isinstance(self.node, ast.Call):
            yield self.source.edit(self.node, f"nnx.{self.kind}")
        elif self.method.references.is_partial(self.node):
            yield self.source.edit(self.node, f"nnx.{self.kind}({', '.join(options)})")
        else:
            yield self.source.edit(self.node.func, f"nnx.{self.kind}")
            yield from self._arguments(self.node, options)

    def _check(self) -> None:
        """Whether the function is one that NNX's transform takes as Linen's does."""
        extra = len(self.node.args) - 1 if isinstance(self.node, ast.Call) else 0
        if extra:
            raise NotRewritableError("transform-positions", kind=self.kind)
        for call in self.given.calls:
            if call.named and self.kind in STACKS:
                raise NotRewritableError("transform-call-keywords", kind=self.kind)
        try:
            parameters = list(inspect.signature(self.lifted.target).parameters.values())[1:]
        except (TypeError, ValueError):
            return
        for call in self.given.calls:
            for each in parameters[len(call.arrays) :]:
                if each.default not in (inspect.Parameter.empty, None) and (
                    each.name not in call.named
                ):
                    raise NotRewritableError("transform-defaults", kind=self.kind)

    def _axes(self) -> list[str]:
        """The axes of the module and of what is given besides."""
        places = [(call.run, call.path) for call in self.given.calls]
        texts = axis_texts(self.node, self.method.call_text)
        own = Axes(self.method.program.records, self.lifted, places, texts)
        self._check_stacked()
        counts = {len(call.arrays) for call in self.given.calls}
        if len(counts) > 1:
            raise NotRewritableError("transform-counts", kind=self.kind)
        is_scan = self.kind == "scan"
        given = self._given_axes(self.given.calls[0].arrays[is_scan:])
        out = self.lifted.options["out_axes"]
        if not isinstance(out, int):
            raise NotRewritableError("transform-out-axes", kind=self.kind, axes=out)
        found = []
        if is_scan:
            found.append(f"in_axes=({', '.join([own.called, 'nnx.Carry', *given])})")
            found.append(f"out_axes=(nnx.Carry, {out!r})")
        else:
            if {own.called, *given} != {"0"}:
                comma = "" if given else ","
                found.append(f"in_axes=({', '.join([own.called, *given])}{comma})")
            found += [f"out_axes={out!r}"] if out else []
        name = STACKS[self.kind]
        length, value = self._keyword(name), self.lifted.options[name]
        if value is not None and not self.lifted.is_stacking and set(given) <= {"None"}:
            text = repr(value) if length is None else self.method.call_text(length)
            found.append(f"{name}={text}")
        if self.lifted.options.get("metadata_params"):
            found.append(metadata(self.lifted))
        return found

    def _given_axes(self, arrays: Sequence[bool]) -> list[str]:
        axes, count = self.lifted.options["in_axes"], len(arrays)
        each: Sequence[Any] = axes if isinstance(axes, tuple | list) else (axes,) * count
        known = (None, nn.broadcast)
        if len(each) != count or not all(isinstance(a, int) or a in known for a in each):
            raise NotRewritableError("transform-in-axes", kind=self.kind, axes=axes)
        return [
            repr(axis) if isinstance(axis, int) and is_array else "None"
            for axis, is_array in zip(each, arrays, strict=True)
        ]

    def _check_stacked(self) -> None:
        """What is stacked must be made in this class, to be made stacked."""
        if not self.lifted.is_stacking:
            return
        plan, records = self.method.program, self.method.program.records
        made = {
            (m.run, m.path)
            for slot in self.method.plan.slots.values()
            if self.given in slot.functions
            for m in slot.makings
        }
        for call in self.given.calls:
            instance = records.instances.get((call.run, call.path))
            own = instance is not None and plan.plan_of(instance.cls) is self.method.plan
            if not own and (call.run, call.path) not in made:
                raise NotRewritableError("transform-other-class", kind=self.kind)

    def _keyword(self, name: str) -> ast.expr | None:
        keywords = self.node.keywords if isinstance(self.node, ast.Call) else []
        return next((k.value for k in keywords if k.arg == name), None)

    def _passed(self) -> list[str]:
        """The options that are called alike."""
        found = []
        static: Any = {"static_argnums": (), "static_argnames": ()}
        known = {**PASSED[self.kind], **(static if self.kind in ("remat", "jit") else {})}
        for name, default in known.items():
            node, value = self._keyword(name), self.lifted.options.get(name, default)
            if node is not None:
                found.append(f"{name}={self.method.call_text(node)}")
            elif isinstance(value, int | str | tuple) and value != default:
                found.append(f"{name}={value!r}")
            elif value not in (None, default):
                raise NotRewritableError("transform-option", kind=self.kind, option=name)
        return found

    def _arguments(self, node: ast.Call, options: list[str]) -> Iterator[Edit]:
        """The options behind the function, on lines of their own if the program has them so."""
        target, end = node.args[0], self.source.end(node)
        behind, column = self.source.end(target), self.source.statement_of(node).col_offset
        own_lines = target.lineno > node.func.lineno or (node.func.end_lineno or 0) < target.lineno
        line = ", ".join(["", *options])
        before = self.source.data.index(b"(", self.source.end(node.func)) + 1
        if not options:
            yield Edit(before, self.source.start(target), "")
            yield Edit(behind, end, ")")
            return
        if not own_lines:
            begins = self.source.lines[(target.end_lineno or 1) - 1][: target.end_col_offset]
            if len(begins.decode()) + len(line) < _WIDTH:
                yield Edit(behind, end, f"{line})")
                return
            column += 4
            yield Edit(before, self.source.start(target), f"\n{' ' * column}")
        else:
            column = target.col_offset
        rows = "".join(f",\n{' ' * column}{each}" for each in options)
        yield Edit(behind, end, f"{rows},\n{' ' * (column - 4)})")

    def _branches(self) -> Iterator[Edit]:
        """`nnx.cond` and `nnx.switch` take the module as the first operand."""
        if isinstance(self.node, ast.Call):
            if self.node.keywords:
                raise NotRewritableError("transform-keywords", kind=self.kind)
            yield self.source.edit(self.node.func, f"nnx.{self.kind}")

    def _while(self) -> Iterator[Edit]:
        """In `nnx.while_loop` the module is a part of what goes from turn to turn."""
        node = self.node
        if not isinstance(node, ast.Call) or len(node.args) != 4:
            raise NotRewritableError("while-names")
        places = [(call.run, call.path) for call in self.given.calls]
        if Axes(self.method.program.records, self.lifted, places, {}).draws:
            raise NotRewritableError("while-keys")
        test, body, module, first = node.args
        yield self.source.edit(node.func, "nnx.while_loop")
        for each, head in ((test, ""), (body, "state[0], ")):
            begin, end = self.source.start(each), self.source.end(each)
            opening, closing = ("(", ")") if isinstance(each, ast.Lambda) else ("", "")
            begins = f"({head}" if head else ""
            yield Edit(begin, begin, f"lambda state: {begins}{opening}")
            yield Edit(end, end, f"{closing}(*state){')' if head else ''}")
        begin = self.source.start(module)
        yield Edit(begin, begin, "(")
        yield Edit(self.source.end(module), self.source.start(first), ", ")
        behind, end = self.source.end(first), self.source.end(node)
        rest = self.source.data[behind:end].decode() if not node.keywords else ")"
        yield Edit(behind, end, f"){rest.replace(',', '')}[1]")


_ABSENT = object()


def decorated(references: References, node: ast.expr, method: ast.FunctionDef) -> str | None:
    """The decorator of NNX in the place of one of Linen.

    None if there is none that does the same.
    """
    value = references.value_of(node)
    given = method.args
    if value in (nn.remat, nn.jit) and not given.defaults and not given.kwonlyargs:
        return "nnx.remat" if value is nn.remat else "nnx.jit"
    if not isinstance(node, ast.Call) or not node.args:
        return None
    if references.value_of(node.func) is not functools.partial:
        return None
    if references.value_of(node.args[0]) is not nn.scan or len(node.args) > 1:
        return None
    return _scan(references, {str(k.arg): k.value for k in node.keywords}, method)


def _scan(references: References, options: Any, method: ast.FunctionDef) -> str | None:
    """A loop over time that shares the parameters in all steps."""
    values = {name: _value(references, node) for name, node in options.items()}
    known = {"variable_broadcast", "split_rngs", "in_axes", "out_axes", "variable_axes"}
    names = [each.arg for each in method.args.args][2:]
    splits = values.get("split_rngs", {})
    if (
        _ABSENT in values.values()
        or not values.keys() <= known
        or values.get("variable_broadcast") != "params"
        or values.get("variable_axes")
        or not isinstance(splits, dict)
        or any(splits.values())
        or method.args.defaults
        or method.args.kwonlyargs
    ):
        return None
    axes = values.get("in_axes", 0)
    axes = axes if isinstance(axes, tuple) else (axes,) * len(names)
    out = values.get("out_axes", 0)
    if len(axes) != len(names) or not all(isinstance(a, int | None) for a in (*axes, out)):
        return None
    texts = ", ".join(["None", "nnx.Carry", *map(repr, axes)])
    return f"nnx.scan(in_axes=({texts}), out_axes=(nnx.Carry, {out!r}))"


def _value(references: References, node: ast.expr) -> Any:
    if references.value_of(node) is nn.broadcast:
        return None
    if isinstance(node, ast.Tuple):
        return tuple(_value(references, each) for each in node.elts)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _ABSENT
