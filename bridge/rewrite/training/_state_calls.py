"""Decides what the calls of a state become: `create`, `apply_gradients` and `replace`."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from flax.training.train_state import TrainState

from bridge.rewrite.plan._refusals import NotRewritableError

from ._changes import Arguments, Part
from ._kinds import GONE, OF_MODEL, Kind, Value
from ._model_calls import ModelCalls


class StateCalls(ModelCalls):
    """The calls that make a state, and change it in place."""

    def _updated(self, node: ast.Call, state: Value, method: str) -> Value:
        """`apply_gradients` and `replace`, which NNX does in place."""
        name = state.text
        if not name or node.args:
            raise NotRewritableError("state-use", node, text=ast.unparse(node.func))
        is_name = isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
        if is_name and method == "replace" and [k.arg for k in node.keywords] == ["params"]:
            model = self._value(node.keywords[0].value)
            if model.kind in OF_MODEL and model.text:
                return self._with_model(node, name, model.text)
        others = [k for k in node.keywords if k.arg != "grads"]
        self.replaced |= {str(k.arg) for k in others}
        for each in [k for k in node.keywords if k.arg == "grads"]:
            self._plain(each.value)
            self._before(node, f"{name}.optimizer.update({name}.model, ", each.value, ")")
        for each in others:
            value = self._value(each.value)
            if value.is_gone:
                continue
            self._plain(each.value, value)
            if each.arg in (None, "params", "opt_state", "tx", "apply_fn"):
                raise NotRewritableError("state-replace", node, name=each.arg or "**")
            if each.arg == "step":
                self._before(node, f"{name}.optimizer.step.set_value(", each.value, ")")
            elif self._fields().get(each.arg) is Kind.STATISTICS:
                self._before(node, f"nnx.update({name}.model, ", each.value, ")")
            else:
                self._before(node, f"{name}.{each.arg} = ", each.value)
        self._change(node, name)
        return Value(Kind.STATE, name)

    def _with_model(self, node: ast.Call, state: str, model: str) -> Value:
        """A state with another model, such as that which a gradient is taken of."""
        (cls,) = self.program.fields if len(self.program.fields) == 1 else (None,)
        fields = self.program.fields[cls] if cls is not None else {}
        if cls == "TrainState" and set(fields) == {"params"}:
            cls = self.file.state = self.file.state or "TrainState"
        elif cls is None or cls not in vars(self.file.module):
            raise NotRewritableError("state-replace", node, name="params")
        kept = [n for n, kind in fields.items() if n != "params" and kind not in GONE]
        parts = [model, f"{state}.optimizer", *(f"{name}={state}.{name}" for name in kept)]
        self._change(node, cls, Arguments(tuple((each,) for each in parts)))
        return Value(Kind.STATE)

    def _created(self, node: ast.Call, function: ast.Attribute, cls: type) -> Value:
        """`TrainState.create`."""
        named = {k.arg: k.value for k in node.keywords}
        if node.args or not {"params", "tx"} <= set(named):
            raise NotRewritableError("state-create", node)
        params = self._value(named["params"])
        if params.kind not in OF_MODEL:
            raise NotRewritableError("state-create", node)
        model = params.text
        if not model:
            model = self.model
            self._before(node, f"{model} = ", named["params"])
        applied = named.get("apply_fn")
        applied = None if isinstance(applied, ast.Constant) else applied
        if applied is not None and self._value(applied).kind is not Kind.APPLY:
            raise NotRewritableError("state-apply", applied, text=ast.unparse(applied))
        self._plain(named["tx"])
        parts: list[Sequence[Part]] = [
            [model],
            [f"nnx.Optimizer({model}, ", named["tx"], ", wrt=nnx.Param)"],
        ]
        for name, each in named.items():
            if name in ("params", "tx", "apply_fn"):
                continue
            value = self._value(each)
            if not value.is_gone:
                self._plain(each, value)
                parts.append([f"{name}=", each])
        own: Part = function.value
        if cls is TrainState:
            is_name = isinstance(function.value, ast.Name)
            own = self.file.state = function.value.id if is_name else "TrainState"  # pyright: ignore
        self._change(node, own, Arguments(tuple(map(tuple, parts))))
        return Value(Kind.STATE)
