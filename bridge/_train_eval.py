"""Passes `train()` and `eval()` on to wrapped Linen modules; sets only arguments left unset.

NNX sets attributes on every module of a tree. A Linen module takes the same choices as arguments of
the method that is called, or as dataclass fields. The first of these that says something wins:

1. what the caller gives: an argument of this very call;
2. what the model's author wrote: arguments inside the model, fields of the modules in it, also
   of the Linen layers in a `bridge.Module`;
3. the modes: arguments that the caller left out, the wrapped module's own mode fields, and mode
   fields at any depth that are None. An NNX module inside has its attributes set, as natively.

An argument of 1. is also the mode of this call for whatever is open below: `model(x, train=False)`
is an evaluation, though `model.train()` was called before.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import linen as nn
from flax import nnx

from ._flax.linen_modules import InterceptorContext, overridden
from ._flax.tabulate import mark_tabulated
from ._module_calls import joined

# The attributes that nnx.Module.train and eval set.
MODE_FIELDS: tuple[str, ...] = ("deterministic", "use_running_average")
# What Linen modules call an argument or a field that is true in training, and stands for both.
TRAINING = ("train", "training", "is_training")
MODE_NAMES = (*TRAINING, *MODE_FIELDS)

_NONE: Mapping[str, Any] = types.MappingProxyType({})
# The modes of the ToNNX that is being called, and that ToNNX.
_in_force: contextvars.ContextVar[tuple[Mapping[str, Any], nnx.Pytree | None]] = (
    contextvars.ContextVar("modes", default=(_NONE, None))
)


class Filled(NamedTuple):
    """A call of a Linen method, completed by the modes.

    Attributes:
      args: positional arguments without `self`.
      kwargs: keyword arguments.
      fields: fields that the wrapped module has in this call.
      modes: the modes for what is open below.
      opens_state: whether the state collections that exist may be updated.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    fields: Mapping[str, Any]
    modes: Mapping[str, Any]
    opens_state: bool


def filled(
    module: nn.Module,
    target: nn.Module,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    modes: Mapping[str, Any],
) -> Filled:
    """A call as it would be written with the modes' arguments in it.

    `target` is the module that the method belongs to: `module`, or a submodule. Only the signature
    of the unbound method `function` matters. `args` come without `self`. `modes` has `train` if it
    was set by itself, and otherwise what follows from the others.

    An argument that the method takes by position is passed by position, because `static_argnums` of
    `nn.remat` and `nn.jit` need it there.
    """
    if not modes:
        return Filled(args, kwargs, {}, {}, opens_state=False)
    parameters = _parameters(function)
    given = {p.name: value for p, value in zip(parameters, args, strict=False)}
    given.update(kwargs)
    in_force = _of_call(modes, given)
    # Inside of a bridge.Module the fields of a Linen layer are what its author wrote.
    fields = {n for n in _mode_fields(module) if getattr(module, n) is None or joined() is None}
    choices = _choices(in_force)
    is_open = choices.keys() - given.keys() - _mode_fields(target)
    args, kwargs = _completed(function, args, kwargs, {name: choices[name] for name in is_open})
    return Filled(
        args,
        kwargs,
        {n: choices[n] for n in fields & choices.keys() if given.get(n) is None},
        in_force,
        # A call's own argument closes them, and does not open them: that is what `mutable=` is for.
        opens_state=modes.get("use_running_average") is False
        and in_force.get("use_running_average") is False,
    )


@contextlib.contextmanager
def applied(modes: Mapping[str, Any], wrapper: nnx.Pytree | None = None) -> Iterator[None]:
    """Modes for the Linen modules that are called in this block, and the NNX modules within.

    A model that is called in the block but does not belong to the module keeps its own modes.
    """
    token = _in_force.set((modes, wrapper))
    try:
        with nn.intercept_methods(_intercept) if modes else contextlib.nullcontext():
            yield
    finally:
        _in_force.reset(token)


def modes_in_force() -> Mapping[str, Any]:
    """The modes that were set on the ToNNX that is being called."""
    return _in_force.get()[0]


def is_in_wrapper() -> bool:
    """Whether a ToNNX is being called, or a mode is in force."""
    modes, wrapper = _in_force.get()
    return wrapper is not None or bool(modes)


def set_on(module: nnx.Pytree, objects: Sequence[nnx.Pytree]) -> None:
    """Sets the modes in force on an NNX module that a Linen module wraps, as NNX itself does.

    For `nnx.tabulate` its objects count as the ToNNX around.
    """
    modes, wrapper = _in_force.get()
    mark_tabulated(objects, wrapper)
    own = {name: value for name, value in modes.items() if name in MODE_FIELDS}
    if own and isinstance(module, nnx.Module):
        module.set_attributes(**own, raise_if_not_found=False, graph=True)


def with_mode(
    module: nn.Module, modes: tuple[tuple[str, Any], ...], name: str, value: object
) -> tuple[tuple[str, Any], ...] | None:
    """The wrapped module's modes after an attribute was set; None if it is not one of its modes."""
    if name in MODE_FIELDS:
        # Replace an earlier value of the module's own `train`.
        rest = {n: v for n, v in modes if n not in TRAINING}
        return tuple(sorted({**rest, name: value}.items()))
    if name in TRAINING and name in _mode_fields(module) and modes:
        return tuple(sorted({**dict(modes), name: value}.items()))
    return None


def _intercept(
    next_function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: InterceptorContext,
) -> Any:
    """Fills the fields of a module that are None, but for what its method is called with."""
    module, method = context.module, context.method_name
    modes, _ = _in_force.get()
    fields: dict[str, Any] = {}
    # What `setup` hands on is what was written; the fields of the modules it makes are open again.
    if modes and method != "setup":
        choices = _choices(modes)
        names = _mode_fields(module) & choices.keys()
        fields = {name: choices[name] for name in names if getattr(module, name) is None}
    if fields:
        parameters = _parameters(getattr(type(module), method, None))
        passed = {p.name: value for p, value in zip(parameters, args, strict=False)} | kwargs
        fields = {name: value for name, value in fields.items() if passed.get(name) is None}
    if not fields:
        return next_function(*args, **kwargs)
    with overridden(module, fields):
        return next_function(*args, **kwargs)


def _of_call(modes: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The modes of one call: what its caller says of the mode, and the rest as it was set."""
    said = {name: given[name] for name in MODE_NAMES if given.get(name) is not None}
    if not said:
        return dict(modes)
    found = {name: value for name, value in modes.items() if name in MODE_FIELDS}
    for name, value in said.items():
        for mode in found.keys() & set(MODE_FIELDS if name in TRAINING else (name,)):
            if isinstance(value, bool | int | np.bool_):
                found[mode] = bool(value) is (name in MODE_FIELDS)
            else:
                # Traced, for instance: the mode is unknown, so fill nothing.
                del found[mode]
    return found


def _choices(modes: Mapping[str, Any]) -> dict[str, Any]:
    """The modes, and what follows for `train`: it stands for both, so nothing may contradict it."""
    if not modes:
        return {}
    train = not any(value for name, value in modes.items() if name in MODE_FIELDS)
    return {**dict.fromkeys(TRAINING, train), **modes}


def _completed(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    choices: Mapping[str, Any],
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """A call's arguments with those choices that the method has a parameter for."""
    known = _parameters(function)
    named = [p for p in known if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = {p.name: choices[p.name] for p in named if p.name in choices}
    if not missing:
        return args, kwargs
    positional = [p for p in named if p.kind is not p.KEYWORD_ONLY]
    values = list(args)
    passed = 0
    for p in positional[len(args) :]:
        if p.name in missing:
            values.append(missing[p.name])
            passed = len(values)
        elif p.name not in kwargs and p.default is not p.empty:
            values.append(p.default)
        else:
            # The caller passes it by keyword, so what comes behind it can only follow likewise.
            break
    by_position = {p.name for p in positional[:passed]}
    rest = {name: value for name, value in missing.items() if name not in by_position}
    return values[: max(passed, len(args))], {**kwargs, **rest}


def _mode_fields(module: nn.Module) -> set[str]:
    """The fields of a module that are modes; one of such a name may hold a submodule instead."""
    own = type(module).__dataclass_fields__
    names = [name for name in MODE_NAMES if name in own]
    return {name for name in names if isinstance(getattr(module, name), bool | None)}


def _parameters(function: Any) -> list[inspect.Parameter]:
    """The parameters of an unbound method without `self`."""
    try:
        return list(inspect.signature(function).parameters.values())[1:]
    except (TypeError, ValueError):
        # A builtin, or a name that only a lifted transform knows.
        return []
