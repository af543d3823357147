"""The report of `bridge.parity.check` on two TARGETs."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from bridge import parity, port
from bridge._cli import _command, _target
from bridge._cli._command import InputError
from bridge._cli._output import Result

_PORTED = """\
--port has placed the values by rules, names and shapes, which may mislead. --suggest in its place
compares the order of calls too, and prints other rules if that says otherwise."""


def compared(arguments: argparse.Namespace) -> Result:
    """Makes both models and compares them, or proposes the rules that `--port` needs.

    Raises InputError if a TARGET gives no model or no inputs are known, and PortError if, with
    `--port`, the values of A do not fit B.
    """
    rules = _command.load_rules(arguments.rules)
    with (
        _target.opened(arguments.a, arguments) as make_a,
        _target.opened(arguments.b, arguments) as make_b,
    ):
        given = dict(arguments.kwargs).keys()
        a, b = _fitting(make_a(), given), _fitting(make_b(), given)
        if unknown := given - {**a.kwargs, **b.kwargs}.keys():
            known = "arguments that one of the models takes"
            raise InputError("--kwarg", ", ".join(sorted(unknown)), known, "correct it")
        inputs = _values(a.inputs or b.inputs)
        if not inputs and not a.kwargs:
            raise _target.no_inputs(arguments.a)
        reference, other = _side(a, inputs), _side(b, inputs)
        is_moved = arguments.suggest or arguments.port
        if is_moved and isinstance(reference, tuple) == isinstance(other, tuple):
            raise InputError(
                "--port",
                "two models of one library",
                "a Linen model and an NNX model",
                "let TARGETs return models with the same values",
            )
        if arguments.suggest:
            return _suggested(a, reference, b, other, inputs, rules)
        if arguments.port:
            other = _ported(reference, other, rules)
        report = parity.check(
            reference,
            other,
            *inputs,
            rules=rules,
            method=a.method,
            rngs={name: jax.random.key(seed) for name, seed in arguments.rngs} or None,
            train=arguments.train,
            gradients=arguments.gradients,
            sections=arguments.sections or None,
            options=parity.Options(
                a_kwargs=a.kwargs,
                b_kwargs=b.kwargs,
                steps=arguments.steps,
                tolerances=dict(arguments.tolerance),
            ),
        )
    shown = [str(report)]
    if arguments.port and not report.ok:
        shown.append(_PORTED)
    return Result("parity", json.loads(report.to_json()), shown, report.ok)


def _fitting(sample: _target.Sample, given: Set[str]) -> _target.Sample:
    """A model without those `--kwarg` that only the other one takes."""
    parameters = inspect.signature(sample.function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return sample
    refused = given - parameters.keys()
    kwargs = {name: value for name, value in sample.kwargs.items() if name not in refused}
    return dataclasses.replace(sample, kwargs=kwargs)


def _side(sample: _target.Sample, inputs: Any) -> Any:
    """A model as `parity.check` takes it."""
    if not isinstance(sample.model, nn.Module):
        return sample.model
    if sample.variables is not None:
        return sample.model, sample.variables
    key = jax.random.key(0)
    return sample.model, sample.model.init(key, *inputs, method=sample.function, **sample.kwargs)


def _ported(a: Any, b: Any, rules: Any) -> Any:
    """B with the values of A."""
    moved = port.plan(a[1], b, rules) if isinstance(a, tuple) else port.plan(a, b[1], rules)
    made = moved.apply()
    return made if isinstance(made, nnx.Module) else (b[0], made)


def _suggested(
    a: _target.Sample, reference: Any, b: _target.Sample, other: Any, inputs: Any, rules: Any
) -> Result:
    """The rules with which `--port` moves the values of A into B, as Python and as TOML."""
    linen, native = (a, b) if isinstance(reference, tuple) else (b, a)
    source, target = (side[1] if isinstance(side, tuple) else side for side in (reference, other))
    call = _target.applying(linen)
    found = port.suggest(source, target, *inputs, linen=call, rules=rules, **native.kwargs)
    shown = [str(found)]
    if found.rules:
        shown += ["", "# for --rules:", found.to_toml().rstrip()]
    return Result("parity-suggestions", json.loads(found.to_json()), shown, found.plan.ok)


def _values(inputs: Any) -> tuple[Any, ...]:
    """Inputs with values: random ones where only shapes are given."""
    rng = np.random.default_rng(0)

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        is_number = jnp.issubdtype(leaf.dtype, jnp.inexact)
        drawn = rng.normal(size=leaf.shape) if is_number else rng.integers(0, 2, leaf.shape)
        return jnp.asarray(drawn, leaf.dtype)

    return tuple(jax.tree.map(value, tuple(inputs)))
