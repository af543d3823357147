"""Decides what all other calls become: transforms, and functions of the program."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from flax import core, jax_utils
from flax import linen as nn
from flax.training.train_state import TrainState

from bridge.rewrite.plan._refusals import NotRewritableError

from ._changes import Dropped, Part, separated
from ._kinds import DROPPED, GONE, OF_MODEL, OTHER, Kind, Value, fresh
from ._state_calls import StateCalls

_UNBOXING = (nn.unbox, nn.meta.unbox, core.freeze, core.unfreeze)
# What they return is of the kind that they are given.
_KEEPING = (jax_utils.replicate, jax_utils.unreplicate, jax.device_put, jax.device_get)
# A function of a state returns it, so these may take modules as the trees that they are.
_OF_TREES = (jax.pmap, jax.vmap, jax.checkpoint, jax.named_call)
_GRADIENTS = {jax.grad: "nnx.grad", jax.value_and_grad: "nnx.value_and_grad"}


class Calls(StateCalls):
    """The calls in a function."""

    def _call(self, node: ast.Call) -> Value:
        made = None if self._is_local(node.func) else self.file.made(node.func)
        if made is not None:
            for each in [*node.args, *(k.value for k in node.keywords)]:
                self._plain(each)
            return Value(Kind.MODEL, made=node)
        function = None if self._is_local(node.func) else self.file.value_of(node.func)
        if function in _UNBOXING and len(node.args) == 1:
            value = self._value(node.args[0])
            if value.kind in (*OF_MODEL, *GONE):
                self._change(node, node.args[0])
                return value
            self._plain(node.args[0], value)
            return OTHER
        if function in _KEEPING and node.args:
            value = self._value(node.args[0])
            if value.kind in (Kind.STATE, *OF_MODEL) and value.text:
                self._rest(node.args[1:], node.keywords)
                return fresh(value)
        if function in (jax.jit, functools.partial, *_OF_TREES) and node.args:
            return self._wrapped(node, function)
        if function is jax.lax.scan and node.args:
            value = self._value(node.args[0])
            self._rest(node.args[1:], node.keywords)
            return fresh(value.parts[0]) if value.kind is Kind.FUNCTION else OTHER
        if function in _GRADIENTS and node.args:
            value = self._value(node.args[0])
            if value.kind is Kind.FUNCTION:
                return self._gradient(node, node.func, value, node.keywords)
        if isinstance(node.func, ast.Attribute):
            found = self._method(node, node.func)
            if found is not None:
                return found
        value = self._value(node.func)
        if value.kind is Kind.CLASS:
            self._rest(node.args, node.keywords)
            return Value(Kind.MODEL, made=node)
        if value.kind is Kind.INIT:
            return self._initialised(node, value)
        if value.kind is Kind.APPLY:
            return self._applied(node, value)
        if value.kind is Kind.GRADIENT:
            return self._arguments_of(node, value)
        if value.kind is Kind.FUNCTION:
            return self._arguments_of(node, value)
        self._plain(node.func, value)
        self._passed(node)
        self._rest(node.args, node.keywords)
        return OTHER

    def _method(self, node: ast.Call, function: ast.Attribute) -> Value | None:
        """A method of a state or a model."""
        if function.attr == "create":
            cls = self.file.value_of(function.value)
            if isinstance(cls, type) and issubclass(cls, TrainState):
                return self._created(node, function, cls)
        if function.attr not in ("apply_gradients", "replace"):
            return None
        holder = self._value(function.value)
        if holder.kind is Kind.STATE and function.attr in ("apply_gradients", "replace"):
            return self._updated(node, holder, function.attr)
        self._plain(function.value, holder)
        self._rest(node.args, node.keywords)
        return OTHER

    def _arguments_of(self, node: ast.Call, function: Value) -> Value:
        """A call of a function of the program."""
        kinds = dict(function.arguments)
        names = [*kinds]
        given = [*zip(names, node.args, strict=False)]
        given += [(None, each) for each in node.args[len(names) :]]  # pyright: ignore
        given += [(k.arg, k.value) for k in node.keywords]
        for name, each in given:
            own = each.value if isinstance(each, ast.Starred) else each
            value = self._value(own)
            if kinds.get(name or "") in DROPPED:
                keyword = self.source.parents[each]
                last = keyword if isinstance(keyword, ast.keyword) else each
                self.changes.append(Dropped(last, last))
                continue
            if value.kind in OF_MODEL and kinds.get(name or "") in OF_MODEL:
                if value.kind is Kind.PARAMS and not value.text:
                    raise NotRewritableError("variables-use", own, text=ast.unparse(own))
                if any(k.value is each for k in node.keywords):
                    raise NotRewritableError("params-keyword", own, name=name)
            elif value.kind is not Kind.STATE:
                self._plain(own, value)
        return fresh(function.parts[0]) if function.parts else OTHER

    def _wrapped(self, node: ast.Call, function: Any) -> Value:
        value = self._value(node.args[0])
        self._rest(node.args[1:], node.keywords)
        if value.kind in (Kind.INIT, Kind.APPLY):
            return value
        if value.kind is not Kind.FUNCTION:
            self._plain(node.args[0], value)
            return OTHER
        if function is jax.jit and self._needs_nnx(value):
            self._change(node.func, "nnx.jit")
        if function is functools.partial:
            for (_, kind), each in zip(value.arguments, node.args[1:], strict=False):
                if kind in DROPPED:
                    self.changes.append(Dropped(each, each))
            return dataclasses.replace(value, arguments=value.arguments[len(node.args) - 1 :])
        self._renumbered(node.keywords, value)
        return value

    def _renumbered(self, keywords: Iterable[ast.keyword], function: Value) -> None:
        """Positions of arguments, where some of these are dropped."""
        gone = [i for i, (_, kind) in enumerate(function.arguments) if kind in DROPPED]
        for each in keywords if gone else ():
            if each.arg not in ("static_argnums", "donate_argnums"):
                if each.arg in ("in_axes", "in_shardings", "static_argnames", "donate_argnames"):
                    raise NotRewritableError("argument-options", each.value, name=each.arg)
                continue
            numbers = getattr(each.value, "elts", [each.value])
            if not all(isinstance(n, ast.Constant) for n in numbers):
                raise NotRewritableError("argument-options", each.value, name=each.arg)
            kept = [n.value for n in numbers if n.value not in gone]
            moved = [number - sum(i < number for i in gone) for number in kept]
            self._change(each.value, f"({', '.join(map(str, moved))}{',' * (len(moved) == 1)})")

    def _decorated(self, decorator: ast.expr, found: Value) -> Value:
        value = self.file.value_of(decorator)
        keywords = decorator.keywords if isinstance(decorator, ast.Call) else ()
        if isinstance(decorator, ast.Call):
            is_partial = self.file.value_of(decorator.func) is functools.partial
            inner = decorator.args[0] if is_partial and decorator.args else decorator.func
            value = self.file.value_of(inner)
            if value in _GRADIENTS:
                return self._gradient(decorator, inner, found, keywords)
            decorator = inner
        if value in _GRADIENTS:
            return self._gradient(None, decorator, found, ())
        if value is jax.jit and self._needs_nnx(found):
            self._change(decorator, "nnx.jit")
        elif value not in (jax.jit, *_OF_TREES) and self._needs_nnx(found):
            raise NotRewritableError("training-decorator", decorator, text=ast.unparse(decorator))
        self._renumbered(keywords, found)
        return found

    def _needs_nnx(self, function: Value) -> bool:
        return any(part.is_special for part in function.parts) or any(
            kind in (Kind.STATE, *OF_MODEL) for _, kind in function.arguments
        )

    def _gradient(
        self,
        node: ast.Call | None,
        function: ast.expr,
        loss: Value,
        keywords: Iterable[ast.keyword],
    ) -> Value:
        """`jax.grad` and `jax.value_and_grad` of a loss."""
        if not loss.arguments or loss.arguments[0][1] not in OF_MODEL:
            return Value(Kind.OTHER)
        for each in keywords:
            if each.arg != "has_aux" or not isinstance(each.value, ast.Constant):
                raise NotRewritableError("gradient-option", each.value, name=each.arg)
        name = _GRADIENTS[self.file.value_of(function)]
        has_aux = any(k.value.value for k in keywords)  # pyright: ignore
        returned = loss.parts[0]
        self._change(function, name)
        if has_aux and len(returned.kept) == 1 and node is not None:
            given: list[Sequence[Part]] = [[each] for each in node.args]
            if node.func is function:
                self._change(node, name, "(", *separated(given), ")")
            else:
                self._change(node, name)
        gradient = OTHER
        if name == "nnx.grad":
            returned = Value(Kind.TUPLE, parts=(gradient, returned.parts[1])) if has_aux else OTHER
        else:
            returned = Value(Kind.TUPLE, parts=(returned, gradient))
        return Value(Kind.GRADIENT, parts=(returned,), arguments=loss.arguments)

    def _passed(self, node: ast.Call) -> None:
        """Refuses a function that needs NNX's transforms where JAX's would run it."""
        called = self.file.value_of(node.func)
        if not (getattr(called, "__module__", None) or "").startswith("jax"):
            return
        for each in [*node.args, *(k.value for k in node.keywords)]:
            is_partial = isinstance(each, ast.Call) and (
                self.file.value_of(each.func) is functools.partial
            )
            if is_partial or isinstance(each, ast.Name | ast.Attribute | ast.Lambda):
                value = self._value(each)
                if value.kind is Kind.FUNCTION and self._needs_nnx(value):
                    raise NotRewritableError(
                        "training-transform", node, text=ast.unparse(node.func)
                    )
