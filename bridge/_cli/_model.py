"""The model that a TARGET names, made without allocating anything."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from bridge import InvalidMethodError, lazy_init
from bridge._linen_in_nnx.linen_call import function_of
from bridge._nnx_in_linen.bound_module import method_of

from ._input_errors import InputError, ProgramError
from ._target import Sample, imported, sample_of


def abstract_values(
    target: str,
    inputs: tuple[Any, ...] | None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    to_nnx: bool,
    option: str = "--model",
) -> Any:
    """What the model of a TARGET needs: shapes and dtypes, without values.

    Args:
        target: see `_target`.
        inputs: see `_target`.
        kwargs: see `_target`.
        to_nnx: which of the two it has to be.
        option: what names the TARGET.

    Returns:
        An NNX module with abstract Variables, or a Linen model's abstract variables.

    Raises:
        InputError: TARGET gives no model, or one of the other library.
        ProgramError: making or running it raises.
    """
    with imported(target) as make:

        def run() -> Any:
            given = sample_of(make(), inputs, target, kwargs)
            if isinstance(given.model, nnx.Module) != to_nnx:
                raise InputError(
                    option,
                    f"{type(given.model).__name__}, which is {'Linen' if to_nnx else 'NNX'}",
                    f"{'an NNX' if to_nnx else 'a Linen'} model",
                    "--model is what the checkpoint is converted for, --source-model what wrote it",
                )
            model, variables = initialised(given, target)
            return model if to_nnx else variables

        return nnx.eval_shape(run) if to_nnx else jax.eval_shape(run)


def called(target: str, inputs: tuple[Any, ...] | None, kwargs: Mapping[str, Any]) -> Sample:
    """The model of a TARGET with the shapes of its sample inputs; an NNX model has no values.

    Args:
        target: see `_target`.
        inputs: see `_target`.
        kwargs: keyword inputs; those that the model does not take are left out.

    Raises:
        InputError: TARGET gives no model.
        ProgramError: making it raises.
    """
    found: list[Sample] = []

    def run() -> None:
        given = sample_of(make(), inputs, target)
        if isinstance(given.model, nn.Module):
            function = function_of(given.model, given.method)
        else:
            function = method_of(given.model, given.method)
        shapes = jax.tree.map(_shape, given.inputs)
        own = {**given.kwargs, **taken(function, kwargs)}
        found.append(dataclasses.replace(given, inputs=shapes, kwargs=own))

    with imported(target) as make:
        jax.eval_shape(run)
    return found[0]


def applying(
    module: nn.Module, method: str | None, kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """A function that applies a Linen model to variables and inputs, for `port.suggest`."""

    def apply(variables: Any, *inputs: Any) -> Any:
        # Every stream that is not given is drawn from `params`.
        rngs = {"params": jax.random.key(0)}
        name = method or "__call__"
        return module.apply(variables, *inputs, rngs=rngs, mutable=True, method=name, **kwargs)

    return apply


def taken(function: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments that a function takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in kwargs.items() if takes_all or name in parameters}


def initialised(sample: Sample, target: str) -> tuple[Any, Any]:
    """The model, with what its `ToNNX` lacked, and the variables of a Linen model."""
    args, kwargs = jax.tree.map(_array, (sample.inputs, dict(sample.kwargs)))
    model = sample.model
    try:
        if isinstance(model, nn.Module):
            function = function_of(model, sample.method)
            _check_inputs(function, model, args, kwargs, target)
            return model, model.init(jax.random.key(0), *args, method=function, **kwargs)
        if args or kwargs:
            # One that was made outside of the trace cannot be written to.
            model = nnx.clone(model, graph=True)
            method: Any = method_of(model, sample.method) if sample.method else model
            lazy_init(method, *args, **kwargs)
    except (InputError, InvalidMethodError):
        raise
    except Exception as error:
        raise ProgramError.of(
            f"the model of {target}, run with its sample inputs,", error
        ) from error
    return model, None


def _check_inputs(function: Any, model: nn.Module, args: Any, kwargs: Any, target: str) -> None:
    try:
        inspect.signature(function).bind(model, *args, **kwargs)
    except TypeError as error:
        named = f" and {', '.join(kwargs)}" if kwargs else ""
        raise InputError(
            target,
            f"{len(args)} sample inputs{named} ({error})",
            f"those of {type(model).__name__}, which makes its submodules when it sees them",
            "return (module, *inputs), or pass --input 1,28,28,1, and --kwarg NAME=VALUE for what"
            " has a name",
        ) from error


def _shape(value: Any) -> Any:
    return jax.ShapeDtypeStruct(value.shape, value.dtype) if hasattr(value, "shape") else value


def _array(value: Any) -> Any:
    return jnp.zeros(value.shape, value.dtype) if isinstance(value, jax.ShapeDtypeStruct) else value
