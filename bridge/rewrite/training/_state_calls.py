"""Decides what the calls of a state become: `create`, `apply_gradients` and `replace`."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from flax.training.train_state import TrainState

from bridge.rewrite.plan._refusals import NotRewritableError

from ._changes import Arguments, Part
from ._kinds import Kind, Value
from ._model_calls import ModelCalls


class StateCalls(ModelCalls):
    """The calls that make a state, and change it in place."""

    def _updated(self, node: ast.Call, state: Value, method: str) -> Value:
        """`apply_gradients` and `replace`, which NNX does in place."""
        name = state.text
        if not name or node.args:
            raise NotRewritableError("state-use", node, text=ast.unparse(node.func))
        others = [k for k in node.keywords if k.arg != "grads"]
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
            else:
                self._before(node, f"{name}.{each.arg} = ", each.value)
        self._change(node, name)
        return Value(Kind.STATE, name)

    def _created(self, node: ast.Call, function: ast.Attribute, cls: type) -> Value:
        """`TrainState.create`."""
        named = {k.arg: k.value for k in node.keywords}
        if node.args or not {"params", "tx"} <= set(named):
            raise NotRewritableError("state-create", node)
        params = self._value(named["params"])
        if params.kind is not Kind.PARAMS:
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
