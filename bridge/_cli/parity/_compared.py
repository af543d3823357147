"""The report of `bridge.parity.check` on two TARGETs."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from bridge import parity, port
from bridge._cli import _model, _rules_file, _target
from bridge._cli._input_errors import InputError, ProgramError
from bridge._errors import BridgeError
from bridge._linen_in_nnx.linen_call import function_of
from bridge.parity._models import RAISED_BY


def compared(arguments: argparse.Namespace) -> Any:
    """Makes both models and compares them, or proposes the rules that `--port` needs.

    Returns:
        The report; with `--suggest` a `port.Suggestions`.

    Raises:
        InputError: a TARGET gives no model, or no inputs are known.
        ProgramError: making or running a model raises.
        PortError: with `--port`, the values of A do not fit B.
    """
    given = _target.parse_inputs(arguments.inputs)
    rules = _rules_file.load(arguments.rules).paths or None
    common = dict(arguments.kwargs)
    with _target.imported(arguments.a) as make_a, _target.imported(arguments.b) as make_b:
        a = _target.sample_of(make_a(), given, arguments.a)
        b = _target.sample_of(make_b(), given, arguments.b)
        inputs = _values(a.inputs or b.inputs, arguments.seed)
        if not inputs and not (a.kwargs or common):
            raise InputError(
                arguments.a, "no inputs", "inputs for both models", "pass --input 1,28,28,1"
            )
        a_kwargs = {**a.kwargs, **common, **dict(arguments.a_kwarg)}
        b_kwargs = {**b.kwargs, **common, **dict(arguments.b_kwarg)}
        method = arguments.method or a.method
        options = parity.Options(
            a_kwargs=a_kwargs,
            b_kwargs=b_kwargs,
            layers=arguments.layers,
            steps=arguments.steps,
            tolerances={_dtype(name): rtol for name, rtol in arguments.tolerance},
            dtypes=arguments.dtypes,
            jit=arguments.jit,
            axis_sizes=dict(arguments.axis_size),
        )
        with _running(arguments.a):
            reference = _side(a, inputs, a_kwargs, method, arguments.seed)
        with _running(arguments.b):
            other = _side(b, inputs, b_kwargs, method, arguments.seed)
        if arguments.suggest:
            with _running(arguments.a, arguments.b):
                return _suggested((reference, a_kwargs), (other, b_kwargs), inputs, method, rules)
        if arguments.port:
            other = _ported(reference, other, rules)
        with _running(arguments.a, arguments.b):
            return parity.check(
                reference,
                other,
                *inputs,
                rules=rules,
                method=method,
                rngs={n: jax.random.key(seed) for n, seed in arguments.rngs} or None,
                train=arguments.train,
                gradients=arguments.gradients,
                sections=arguments.sections or None,
                options=options,
            )


@contextlib.contextmanager
def _running(*targets: str) -> Iterator[None]:
    """A block that runs the models of TARGETs, `a` before `b`; its error names the one at fault."""
    try:
        yield
    except BridgeError:
        raise
    except Exception as error:
        notes = getattr(error, "__notes__", ())
        raising = [t for side, t in zip("ab", targets, strict=False) if _has_note(notes, side)]
        named = raising or targets
        what = f"{' and '.join(named)}, run with {'its' if len(named) == 1 else 'their'} inputs,"
        raise ProgramError.of(what, error) from error


def _has_note(notes: Iterable[str], side: str) -> bool:
    return any(note.startswith(f"{RAISED_BY} {side} = ") for note in notes)


def _side(sample: Any, inputs: Any, kwargs: Any, method: str | None, seed: int) -> Any:
    """A model as `parity.check` takes it."""
    if not isinstance(sample.model, nn.Module):
        return sample.model
    if sample.variables is not None:
        return sample.model, sample.variables
    function = function_of(sample.model, method)
    key = jax.random.key(seed)
    return sample.model, sample.model.init(key, *inputs, method=function, **kwargs)


def _check_sides(a: Any, b: Any) -> None:
    if isinstance(a, tuple) == isinstance(b, tuple):
        raise InputError(
            "--port",
            "two models of one library",
            "a Linen model and an NNX model",
            "let TARGETs return models with the same values",
        )


def _ported(a: Any, b: Any, rules: Any) -> Any:
    """B with the values of A."""
    _check_sides(a, b)
    moved = port.plan(a[1], b, rules) if isinstance(a, tuple) else port.plan(a, b[1], rules)
    made = moved.apply()
    return made if isinstance(made, nnx.Module) else (b[0], made)


def _suggested(a: Any, b: Any, inputs: Any, method: str | None, rules: Any) -> Any:
    """The rules with which `--port` moves the values of A into B."""
    (first, _), (second, _) = a, b
    _check_sides(first, second)
    (linen, linen_kwargs), (native, kwargs) = (a, b) if isinstance(first, tuple) else (b, a)
    module, variables = linen
    sides = (variables, native) if linen is first else (native, variables)
    call = _model.applying(module, method, linen_kwargs)
    return port.suggest(*sides, *inputs, linen=call, rules=rules, **kwargs)


def _values(inputs: Any, seed: int) -> tuple[Any, ...]:
    """Inputs with values: random ones where only shapes are given."""
    rng = np.random.default_rng(seed)

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        is_number = jnp.issubdtype(leaf.dtype, jnp.inexact)
        drawn = rng.normal(size=leaf.shape) if is_number else rng.integers(0, 2, leaf.shape)
        return jnp.asarray(drawn, leaf.dtype)

    return tuple(jax.tree.map(value, tuple(inputs)))


def _dtype(name: str) -> Any:
    try:
        return jnp.dtype(name)
    except TypeError as error:
        raise InputError(
            "--tolerance", f"{name!r}, which is no dtype", "float32=1e-4", "name a dtype"
        ) from error
