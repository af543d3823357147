"""The calls of layers under lifted transforms, as calls through NNX's transforms."""

from __future__ import annotations

import ast
import inspect

from flax import linen as nn

from bridge.rewrite.observe._records import Lifted
from bridge.rewrite.plan._axes import PASSED, STACKS, metadata
from bridge.rewrite.plan._lift import Lift
from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.syntax._source import names_in

from ._lines import chosen, part_text

_WIDTH = 100


class LiftedCalls:
    """The calls of one slot."""

    def __init__(self, lift: Lift) -> None:
        self.lift, self.method, self.slot = lift, lift.method, lift.slot
        self.chain, self.cls, self.test = lift.chain, lift.cls, lift.test

    def callee(self, call: ast.Call, layer: str, *, is_stacked: bool) -> tuple[str, list[str]]:
        """What is called, and its arguments, the layer first.

        `layer` is the layer's name there. With `is_stacked`, there are several such layers. Raises
        NotRewritableError if the arguments cannot be told apart.
        """
        if not is_stacked:
            given = ["..."] * (len(call.args) + len(call.keywords))
            return self._one(call, layer), [layer, *given]
        function = f"{self.cls}.__call__"
        inner = [each for each in self.chain if each.kind not in STACKS]
        if len(self.chain) - len(inner) > 1 or self.chain[0] in inner:
            raise NotRewritableError("stacked-twice", self.slot.node)
        is_closed = self.chain[0].kind == "vmap" and self.chain[0].options["in_axes"] is None
        is_plain = not any(isinstance(a, ast.Starred) for a in call.args)
        if is_closed and not is_plain and not inner and not call.keywords:
            return self._closed(self.chain[0], call, layer), [layer]
        if not is_plain or call.keywords:
            kind = self.chain[0].kind
            raise NotRewritableError("transform-call", call, kind=kind)
        for each in reversed(inner):
            plain, test = function, self.lift.inner_tests.get(each.kind)
            function = self._plain(each, function)
            if test is not None:
                column = self._column(call) + 4
                given = len(self.method.source.render(call)) - len(ast.unparse(call.func))
                around = column + len(f"lambda {layer}: {layer}") + 2 * given
                function = chosen(function, test, plain, column, around)
        return self._stacked(self.chain[0], function if inner else None, call, layer)

    def _one(self, call: ast.Call, layer: str) -> str:
        """The function that is called in the place of a layer."""
        plain = function = self._function(call, layer)
        for each in reversed(self.chain):
            function = self._plain(each, function)
        if self.test is None:
            return function
        plain = f"({plain})" if plain.startswith("lambda") else plain
        rest = len(self.method.source.render(call)) - len(ast.unparse(call.func))
        around = call.col_offset + rest + len(layer)
        return chosen(function, self.test, plain, self._column(call), around)

    def _column(self, call: ast.Call) -> int:
        return self.method.source.statement_of(call).col_offset

    def _function(self, call: ast.Call, layer: str) -> str:
        """The method; a lambda where arguments have defaults, which NNX's transforms would fill."""
        function = inspect.unwrap(self.chain[-1].target.__call__)
        parameters = list(inspect.signature(function).parameters.values())[1:]
        given = len(call.args) + len(call.keywords)
        if given >= len(parameters) or any(isinstance(a, ast.Starred) for a in call.args):
            return f"{self.cls}.__call__"
        names = [
            a.id if isinstance(a, ast.Name) else parameters[i].name for i, a in enumerate(call.args)
        ]
        named = [str(k.arg) for k in call.keywords]
        own = _fresh(layer, {*names, *named})
        inside = ", ".join([*names, *(f"{n}={n}" for n in named)])
        return f"lambda {', '.join([own, *names, *named])}: {own}({inside})"

    def _text(self, node: ast.AST) -> str:
        """An argument as the call has it."""
        if any(slot.node in ast.walk(node) for slot in self.method.slots):
            raise NotRewritableError("stacked-given-output", node)
        return self.method.call_text(node)

    def _plain(self, lifted: Lifted, function: str) -> str:
        options = self._options(lifted)
        static = lifted.options.get("static_argnums")
        if static not in ((), None):
            options.insert(0, f"static_argnums={static!r}")
        return f"nnx.{lifted.kind}({', '.join([function, *options])})"

    def _options(self, lifted: Lifted) -> list[str]:
        found = []
        for name, default in PASSED[lifted.kind].items():
            value = lifted.options.get(name, default)
            is_default = value is default or (isinstance(value, int | str) and value == default)
            node = self.lift.keyword(lifted, name)
            is_here = node is not None and self.method.node in self.method.source.ancestors(node)
            # An expression may give another value for other fields.
            if is_default and (not is_here or isinstance(node, ast.Constant)):
                continue
            if node is not None and is_here:
                found.append(f"{name}={self.lift.in_call(node)}")
            elif isinstance(value, int | str | bool):
                found.append(f"{name}={value!r}")
            else:
                raise NotRewritableError(
                    "transform-option", self.slot.node, kind=lifted.kind, option=name
                )
        return found

    def _stacked(
        self, lifted: Lifted, inner: str | None, call: ast.Call, layer: str
    ) -> tuple[str, list[str]]:
        """A call of stacked layers: what all of them are given is closed over."""
        is_scan = lifted.kind == "scan"
        names: list[str] = []
        axes: list[str] = []
        inside: list[str] = []
        outside: list[str] = []
        given = [(each, _axis(lifted, i, len(call.args))) for i, each in enumerate(call.args)]
        given = [
            (each, None if isinstance(each, ast.Constant) and axis != "nnx.Carry" else axis)
            for each, axis in given
        ]
        closed = {name for each, axis in given if axis is None for name in names_in(each)}
        for argument, axis in given:
            text = self._text(argument)
            if axis is None:
                inside.append(text)
                continue
            name = argument.id if isinstance(argument, ast.Name) else f"x{len(names) or ''}"
            while name in closed or name in names:
                # What all layers are given reads the value before the transform.
                is_free = is_scan and not names and "carry" not in closed
                name = "carry" if is_free else f"{name}_item"
            names.append(name)
            axes.append(axis)
            inside.append(name)
            outside.append(text)
        own = _fresh(layer, {*names, *(n for t in inside for n in _reads(t))})
        body = (
            f"{own}({', '.join(inside)})"
            if inner is None
            else (f"{inner}({', '.join([own, *inside])})")
        )
        options = [*self._options(lifted)]
        if names or is_scan:
            first = self.lift.axes(lifted).called
            options.insert(0, f"in_axes=({', '.join([first, *axes])})" if axes else "in_axes=(0,)")
        out = lifted.options["out_axes"]
        if is_scan:
            options.insert(1, f"out_axes=(nnx.Carry, {out!r})")
        elif out != 0:
            options.append(f"out_axes={out!r}")
        if lifted.options.get("metadata_params"):
            options.append(metadata(lifted))
        head = f"lambda {', '.join([own, *names])}: {body}"
        function = self._fitting(f"nnx.{lifted.kind}", [head, *options], call)
        return self._sometimes(function, head), [layer, *outside]

    def _sometimes(self, function: str, plain: str) -> str:
        """What is called where the layers are not always stacked."""
        return function if self.test is None else f"({function} if {self.test} else {plain})"

    def _closed(self, lifted: Lifted, call: ast.Call, layer: str) -> str:
        """A call that gives all layers the same, whatever it is."""
        given = [self._text(argument) for argument in call.args]
        own = _fresh(layer, set().union(set(), *map(names_in, call.args)))
        options = self._options(lifted)
        if lifted.options["out_axes"] != 0:
            options.append(f"out_axes={lifted.options['out_axes']!r}")
        if lifted.options.get("metadata_params"):
            options.append(metadata(lifted))
        head = f"lambda {own}: {own}({', '.join(given)})"
        return self._sometimes(self._fitting("nnx.vmap", [head, *options], call), head)

    def _fitting(self, function: str, arguments: list[str], call: ast.Call) -> str:
        """A call on several lines, if it is too long for one."""
        text = f"{function}({', '.join(arguments)})"
        column = self._column(call)
        if call.col_offset + len(text) < _WIDTH:
            return text
        inner = "\n" + " " * (column + 4)
        if column + 4 + len(", ".join(arguments)) <= _WIDTH:
            lines = inner + ", ".join(arguments)
        else:
            lines = "".join(f"\n{part_text(each, column + 4)}," for each in arguments)
        return f"{function}({lines}\n{' ' * column})"


def _axis(lifted: Lifted, index: int, count: int) -> str | None:
    """The axis of an argument, None for one that all layers are given alike."""
    axes = lifted.options["in_axes"]
    if lifted.kind == "scan":
        if index == 0:
            return "nnx.Carry"
        index -= 1
        count -= 1
    if axes is nn.broadcast or axes is None:
        return None
    if isinstance(axes, int):
        return repr(axes)
    axes = tuple(axes)
    if len(axes) != count or not all(
        a is None or a is nn.broadcast or isinstance(a, int) for a in axes
    ):
        raise NotRewritableError("transform-in-axes", kind=lifted.kind, axes=axes)
    own = axes[index]
    return repr(own) if isinstance(own, int) else None


def _fresh(layer: str, taken: set[str]) -> str:
    """A name for one of the layers."""
    name = layer.rpartition(".")[2]
    name = name[:-1] if name.endswith("s") and len(name) > 2 else "layer"
    while name in taken or not name.isidentifier():
        name = "layer" if name != "layer" else "one_layer"
    return name


def _reads(text: str) -> set[str]:
    return names_in(ast.parse(text, mode="eval"))
