"""Decides what the calls of a Linen module become: `init`, `apply` and `apply_fn`."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from bridge._conversion.collections import OUTPUTS
from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.syntax._source import bound_in, is_fixed, names_in

from ._changes import Arguments, Part, separated
from ._expressions import Expressions
from ._kinds import OTHER, Kind, Value


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


# A call whose fields are not known.
_ANY = ast.Call(ast.Name("_"), [], [ast.keyword(None, ast.Name("_"))])


class ModelCalls(Expressions):
    """The calls of the model."""

    def _initialised(self, node: ast.Call, model: Value) -> Value:
        if not node.args or isinstance(node.args[0], ast.Starred):
            raise NotRewritableError("init-keys", node)
        keys = node.args[0]
        if isinstance(keys, ast.Dict):
            pairs = [*zip(keys.keys, keys.values, strict=True)]
            if not all(isinstance(k, ast.Constant) for k, _ in pairs):
                raise NotRewritableError("init-keys", keys)
            # Other streams draw from that of the parameters, as they do in Linen.
            pairs.sort(key=lambda pair: pair[0].value != "params")  # pyright: ignore
            names = [k.value for k, _ in pairs]  # pyright: ignore
            streams: list[Sequence[Part]] = [
                [*([] if name == "params" else [f"{name}="]), key]
                for name, (_, key) in zip(names, pairs, strict=True)
            ]
            again = "0"
        else:
            streams = [[keys]]
            is_name = isinstance(keys, ast.Name | ast.Attribute)
            again: Part = keys if is_name else "0"
        named = {str(each[0]) for each in streams}
        streams += [[f"{s}=", again] for s in self.program.streams if f"{s}=" not in named]
        self._plain(keys) if not isinstance(keys, ast.Dict) else self._rest(keys.values, ())
        holder = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        self._change(node, *self._made(node, model.made, model.text or holder, streams))
        return Value(Kind.VARIABLES)

    def _made(
        self,
        node: ast.Call,
        call: ast.Call | None,
        function: Part,
        streams: Iterable[Sequence[Part]],
    ) -> tuple[Part, ...]:
        """The call of a constructor."""
        made, parts = self.program.only, list[Sequence[Part]]()
        if call is not None:
            made, function = self.file.made(call.func) or made, call.func
            parts += [[each] for each in call.args]
            parts += [[f"{k.arg}=" if k.arg else "**", k.value] for k in call.keywords]
        for name, text in made.sizes(call or _ANY).items():
            if text == "...":
                raise NotRewritableError("size-unknown", node, name=name)
            parts.append([f"{name}={text}"])
        parts.append(["rngs=nnx.Rngs(", *separated(streams), ")"])
        return function, Arguments(tuple(map(tuple, parts)))

    def _applied(self, node: ast.Call, model: Value) -> Value:
        """A call of the model, with what `mutable=` and `rngs=` ask for."""
        if not node.args or isinstance(node.args[0], ast.Starred):
            raise NotRewritableError("variables-use", node, text=ast.unparse(node.func))
        variables = self._value(node.args[0])
        if variables.kind is not Kind.VARIABLES or not variables.text:
            raise NotRewritableError("variables-use", node, text=ast.unparse(node.args[0]))
        holder = self._configured(node, model.made, variables.text)
        name, returned = holder, OTHER
        kept: list[Sequence[Part]] = [[each] for each in node.args[1:]]
        self._rest(node.args[1:], ())
        for each in node.keywords:
            if each.arg == "mutable":
                returned = self._mutable(each.value)
            elif each.arg == "rngs" and not is_none(each.value):
                self._reseeded(node, each.value, holder)
            elif each.arg == "method":
                name = f"{holder}.{self._named_method(each.value)}"
            else:
                kept.append([f"{each.arg}=" if each.arg else "**", each.value])
                self._plain(each.value)
        arguments = Arguments(tuple(map(tuple, kept)))
        if self.program.sows:
            # As in Linen, where nobody asks for them, sown values go nowhere.
            self._change(node, f"nnx.capture({name}, nnx.Intermediate)", arguments, "[0]")
        else:
            self._change(node, name, arguments)
        return returned

    def _configured(self, node: ast.Call, made: ast.Call | None, model: str) -> str:
        """The name of the model, or of one with other fields that has the model's variables."""
        lines = {(self.source.file, n) for n in range(node.lineno, (node.end_lineno or 0) + 1)}
        if made is None or not lines & {*self.program.others}:
            return model
        if any(k.arg == "mutable" and not is_fixed(k.value) for k in node.keywords):
            raise NotRewritableError("model-fields", node, name=ast.unparse(made))
        taken = {self.model, *vars(self.file.module), *names_in(self.node), *bound_in(self.node)}
        other = next(n for n in ("configured", "configured_model", "other") if n not in taken)
        streams = [["0"], *([f"{stream}=0"] for stream in self.program.streams)]
        constructed = self._made(node, made, made.func, streams)
        self._before(node, f"{other} = nnx.eval_shape(lambda: ", *constructed, ")")
        self._before(node, f"nnx.update({other}, nnx.state({model}))")
        return other

    def _mutable(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Constant) and node.value is False:
            return OTHER
        names = [node] if isinstance(node, ast.Constant) else getattr(node, "elts", [node])
        known = self.program.recognizer.collections - {*OUTPUTS}
        if not all(isinstance(each, ast.Constant) and each.value in known for each in names):
            raise NotRewritableError("mutable-names", node, text=ast.unparse(node))
        return Value(Kind.TUPLE, parts=(OTHER, Value(Kind.UPDATES)))

    def _named_method(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.Attribute):
            return node.attr
        raise NotRewritableError("apply-method", node, text=ast.unparse(node))

    def _reseeded(self, node: ast.Call, keys: ast.expr, model: str) -> None:
        if isinstance(keys, ast.Dict) and all(isinstance(k, ast.Constant) for k in keys.keys):
            named = zip(keys.keys, keys.values, strict=True)
            given: list[Sequence[Part]] = [[f"{k.value}=", v] for k, v in named]  # pyright: ignore
            self._rest(keys.values, ())
        else:
            value = self._value(keys)
            may_lack = value.kind is Kind.OPTIONAL
            given = [["**(", keys, " or {})"] if may_lack else ["**", keys]]
            self._plain(keys, value)
        if self.program.is_stacked:
            given.append(['policy="match_shape"'])
        self._before(node, f"nnx.reseed({model}, ", *separated(given), ")")
