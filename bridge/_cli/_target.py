"""The model that a TARGET on the command line names.

A TARGET is `package.module:name` or `path/to/file.py:name`. The name is a model, or something to
call that returns one: a function without arguments, or a module class; an argument called `rngs`
is passed if it has no default. What comes out is one of

- an NNX module or a Linen module;
- `(module, *inputs)`, with sample inputs for its `__call__`;
- `{"model": module, "inputs": (…), "kwargs": {…}, "method": "name", "variables": {…}}`, all but the
  first optional.

Inputs may be arrays or `jax.ShapeDtypeStruct`s.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from bridge import lazy_init
from bridge._errors import shown
from bridge._linen_in_nnx.linen_call import function_of
from bridge._nnx_in_linen.bound_module import method_of
from bridge._nnx_in_linen.constructor import takes_rngs

from ._command import InputError

# The types of what a dict may have.
_FIELDS: dict[str, Any] = {
    "model": nnx.Module | nn.Module,
    "inputs": tuple | list,
    "kwargs": Mapping,
    "method": str | None,
    "variables": Mapping | None,
}
_FORM = "package.module:name or path/to/file.py:name"


@dataclasses.dataclass(frozen=True)
class Sample:
    """A model and the call that shows what it needs.

    Attributes:
        model: an NNX or Linen module.
        inputs: sample inputs.
        kwargs: sample keyword inputs.
        method: the method that they are for, None for `__call__`.
        variables: a Linen model's variables, which `parity` runs it with.
    """

    model: nnx.Module | nn.Module
    inputs: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    method: str | None = None
    variables: Mapping[str, Any] | None = None

    @property
    def function(self) -> Callable[..., Any]:
        """What is called, unbound for a Linen module."""
        if isinstance(self.model, nn.Module):
            return function_of(self.model, self.method)
        return method_of(self.model, self.method)


@contextlib.contextmanager
def opened(target: str, arguments: argparse.Namespace) -> Iterator[Callable[[], Sample]]:
    """What a TARGET names, as a function that makes it.

    Inside of the block the modules beside the file (or in the current directory) can be imported,
    as for a script. The `--input` of `arguments` replaces the model's own inputs, and its `--kwarg`
    is added to the model's own. Raises InputError if there is no such file, module or name.
    """
    with opened_name(target) as found:

        def make() -> Sample:
            sample = _sample_of(_made(found), target)
            kwargs = {**sample.kwargs, **dict(arguments.kwargs)}
            inputs = sample.inputs if arguments.inputs is None else tuple(arguments.inputs)
            return dataclasses.replace(sample, inputs=inputs, kwargs=kwargs)

        yield make


@contextlib.contextmanager
def opened_name(target: str) -> Iterator[Any]:
    """What a TARGET names, as it is; see `opened`.

    Raises InputError if there is no such file, module or name.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise InputError("TARGET", repr(target), _FORM, "put the name behind a colon")
    is_file = place.endswith(".py")
    path = pathlib.Path(place).expanduser().resolve()
    before = list(sys.path)
    sys.path[:0] = map(str, [_top(path), path.parent] if is_file else [pathlib.Path.cwd()])
    try:
        yield _named(_module_of_file(path) if is_file else _module_of_name(place), name, target)
    finally:
        sys.path[:] = before


def abstract(target: str, arguments: argparse.Namespace) -> Any:
    """The model of a TARGET as shapes: an NNX module, or the variables of a Linen model."""
    with opened(target, arguments) as make:

        def run() -> Any:
            model, variables = initialised(make(), target)
            return variables if isinstance(model, nn.Module) else model

        return nnx.eval_shape(run)


def initialised(sample: Sample, target: str) -> tuple[Any, Any]:
    """The model, with what its `ToNNX` lacked, and the variables of a Linen model."""
    args, kwargs = jax.tree.map(_array, (sample.inputs, dict(sample.kwargs)))
    model = sample.model
    if isinstance(model, nn.Module):
        _check_inputs(sample, args, target)
        return model, model.init(jax.random.key(0), *args, method=sample.function, **kwargs)
    if args or kwargs:
        # One that was made outside of the trace cannot be written to.
        model = nnx.clone(model, graph=True)
        method: Any = method_of(model, sample.method) if sample.method else model
        lazy_init(method, *args, **kwargs)
    return model, None


def applying(sample: Sample) -> Callable[..., Any]:
    """A function that applies a Linen model to variables and inputs, for `port.suggest`."""

    def apply(variables: Any, *inputs: Any) -> Any:
        # Every stream that is not given is drawn from `params`.
        call = {"rngs": {"params": jax.random.key(0)}, "mutable": True, "method": sample.function}
        module: Any = sample.model
        return module.apply(variables, *inputs, **call, **sample.kwargs)

    return apply


def no_inputs(target: str) -> InputError:
    """The error for a model that has to be run, and comes without inputs."""
    return InputError(target, "no inputs", "inputs for the model", "pass --input 1,28,28,1")


def _sample_of(made: Any, target: str) -> Sample:
    """The documented forms of what a TARGET gives, as one."""
    if isinstance(made, tuple) and made:
        made = {"model": made[0], "inputs": made[1:]}
    fields = dict(made) if isinstance(made, Mapping) and "model" in made else {"model": made}
    wrong = [
        f"{shown(value)} as {key!r}"
        for key, value in fields.items()
        if not isinstance(value, _FIELDS.get(key, ()))
    ]
    if wrong:
        raise InputError(
            target,
            ", ".join(wrong),
            "an NNX or Linen module, (module, *inputs), or a dict with the keys 'model', 'inputs'"
            " (a tuple), 'kwargs' (a dict), 'method' (a name) and 'variables' (a dict)",
            "return one of them",
        )
    return Sample(**{**fields, "inputs": tuple(fields.get("inputs", ()))})


def _module_of_file(path: pathlib.Path) -> Any:
    if not path.is_file():
        raise InputError("TARGET", f"no file {path}", _FORM, "check the path")
    top = _top(path)
    names = path.relative_to(top).with_suffix("").parts
    name = ".".join(names[:-1] if names[-1] == "__init__" else names)
    there = getattr(sys.modules.get(names[0]), "__file__", None)
    own = (top / f"{names[0]}.py", top / names[0] / "__init__.py")
    if names[0] not in sys.modules or (there and pathlib.Path(there).resolve() in own):
        # A file of a package may import its neighbours relatively, and they it by its whole name.
        return importlib.import_module(name)
    # A user's file such as `jax.py` must not hide a loaded module.
    spec = importlib.util.spec_from_file_location(f"_bridge_target_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError("TARGET", str(path), "a Python file", "check the path")
    module = importlib.util.module_from_spec(spec)
    # Linen and dataclasses look up the module that a class was defined in.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _top(path: pathlib.Path) -> pathlib.Path:
    """The folder that holds a file, or the outermost package that it is in."""
    inside = itertools.takewhile(lambda each: (each / "__init__.py").is_file(), path.parents)
    return path.parents[len(list(inside))]


def _module_of_name(place: str) -> Any:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if not f"{place}.".startswith(f"{error.name}."):
            raise
        remedy = "run from the directory that holds it, or give the file's path"
        # Not as the cause, which says that an extra is missing.
        raise InputError("TARGET", f"no module {error.name!r}", _FORM, remedy) from None


def _named(module: Any, name: str, target: str) -> Any:
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [n for n, v in vars(module).items() if callable(v) and n[0] != "_"]
            remedy = f"it has {', '.join(names) or 'none'}"
            raise InputError(target, f"no name {part!r}", f"a name of {module.__name__}", remedy)
        found = getattr(found, part)
    return found


def _made(found: Any) -> Any:
    if isinstance(found, nnx.Module | nn.Module) or not callable(found):
        return found
    return found(rngs=nnx.Rngs(0)) if _needs_rngs(found) else found()


def _needs_rngs(function: Callable[..., Any]) -> bool:
    if isinstance(function, type) and issubclass(function, nnx.Pytree):
        return takes_rngs(function)
    parameter = inspect.signature(function).parameters.get("rngs")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _check_inputs(sample: Sample, args: Any, target: str) -> None:
    try:
        inspect.signature(sample.function).bind(sample.model, *args, **sample.kwargs)
    except TypeError as error:
        named = f" and {', '.join(sample.kwargs)}" if sample.kwargs else ""
        raise InputError(
            target,
            f"{len(args)} sample inputs{named} ({error})",
            f"those of {type(sample.model).__name__}, which makes its submodules when it sees them",
            "return (module, *inputs), or pass --input 1,28,28,1, and --kwarg NAME=VALUE for what"
            " has a name",
        ) from error


def _array(value: Any) -> Any:
    return jnp.zeros(value.shape, value.dtype) if isinstance(value, jax.ShapeDtypeStruct) else value
