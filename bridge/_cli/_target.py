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

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from bridge._errors import did_you_mean, shown
from bridge._nnx_in_linen.constructor import takes_rngs

from ._input_errors import InputError, ProgramError, first_line

# The types of what a dict may have besides the model.
_FIELDS: dict[str, Any] = {
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


@contextlib.contextmanager
def imported(target: str) -> Iterator[Callable[[], Any]]:
    """What a TARGET names, as a function that makes it.

    Inside of the block the modules beside the file (or in the current directory) can be imported,
    as for a script.

    Raises:
        InputError: there is no such file, module or name, or importing it raises.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise InputError("TARGET", repr(target), _FORM, "put the name behind a colon")
    is_file = place.endswith(".py")
    directory = pathlib.Path(place).expanduser().resolve().parent if is_file else pathlib.Path.cwd()
    before = list(sys.path)
    sys.path.insert(0, str(directory))
    try:
        module = _module_of_file(place) if is_file else _module_of_name(place)
        yield _maker(module, name, target)
    finally:
        sys.path[:] = before


def sample_of(
    made: Any,
    inputs: tuple[Any, ...] | None,
    target: str,
    kwargs: Mapping[str, Any] | None = None,
) -> Sample:
    """The documented forms of what a TARGET gives, as one.

    Args:
        made: what it gave.
        inputs: inputs from the command line, which replace those that came with the model.
        kwargs: keyword inputs from the command line, which are added to the model's.
        target: the TARGET, for the error.

    Raises:
        InputError: none of the forms.
    """
    fields: dict[str, Any] = {"model": made}
    if isinstance(made, tuple) and made:
        fields = {"model": made[0], "inputs": made[1:]}
    elif isinstance(made, Mapping) and "model" in made:
        fields = dict(made)
        wrong = [repr(key) for key in fields if key != "model" and key not in _FIELDS]
        wrong += [
            f"{shown(fields[key])} as {key!r}"
            for key, kinds in _FIELDS.items()
            if key in fields and not isinstance(fields[key], kinds)
        ]
        if wrong:
            raise InputError(
                target,
                f"a dict with {', '.join(wrong)}",
                "the keys 'model', 'inputs' (a tuple), 'kwargs' (a dict), 'method' (a name) and"
                " 'variables' (a dict), all but the first optional",
                "correct the dict",
            )
        fields["inputs"] = tuple(fields.get("inputs", ()))
    sample = Sample(**fields)
    if not isinstance(sample.model, nnx.Module | nn.Module):
        raise InputError(
            target,
            _described(sample.model),
            "an NNX module, a Linen module, (module, *inputs) or a dict with the key 'model'",
            "return one of them",
        )
    if inputs is not None:
        sample = dataclasses.replace(sample, inputs=inputs)
    return dataclasses.replace(sample, kwargs={**sample.kwargs, **(kwargs or {})})


def _described(found: object) -> str:
    """What was found, with its shape if it has one."""
    shape = getattr(found, "shape", None)
    return shown(found) + (f" and shape {shape}" if isinstance(shape, tuple) else "")


def parse_inputs(texts: Sequence[str] | None) -> tuple[jax.ShapeDtypeStruct, ...] | None:
    """The sample inputs of the command line, None if there are none.

    Raises:
        InputError: no such shape or dtype.
    """
    try:
        return None if texts is None else tuple(map(parse_input, texts))
    except ValueError as error:
        raise InputError("--input", str(error), "8,28,28,1 or 8,16:int32", "give a shape") from None


def parse_input(text: str) -> jax.ShapeDtypeStruct:
    """A sample input written as `8,28,28,1` or `8,16:int32`; `:float32` is a scalar.

    Raises:
        ValueError: no such shape or dtype.
    """
    shape, _, dtype = text.partition(":")
    parts = [part.strip() for part in shape.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{shape!r}, which is no shape")
    sizes = tuple(map(int, parts))
    try:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype or "float32"))
    except TypeError as error:
        raise ValueError(f"{dtype!r}, which is no dtype") from error


def _module_of_file(place: str) -> Any:
    path = pathlib.Path(place).expanduser().resolve()
    if not path.is_file():
        remedy = f"check the path{_question(path.parent, path.stem)}"
        raise InputError("TARGET", f"no file {place}", _FORM, remedy)
    name = path.stem
    there = sys.modules.get(name)
    if there is not None:
        if getattr(there, "__file__", None) == str(path):
            return there
        # A user's file such as `jax.py` must not hide a loaded module.
        name = f"_bridge_target_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError("TARGET", place, "a Python file", "check the path")
    module = importlib.util.module_from_spec(spec)
    # Linen and dataclasses look up the module that a class was defined in.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        raise ProgramError.of(f"importing {place}", error) from error
    return module


def _question(directory: pathlib.Path, name: str) -> str:
    """Which module beside it may be meant, empty if none is alike."""
    files = directory.iterdir() if directory.is_dir() else ()
    stems = {file.stem for file in files if file.suffix == ".py" or file.is_dir()}
    question = did_you_mean(name, sorted(stems - {name}))
    return f". {question}" if question else ""


def _module_of_name(place: str) -> Any:
    try:
        return importlib.import_module(place)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{place}.".startswith(f"{missing}."):
            found = f"no module {missing!r}"
            remedy = "run from the directory that holds it, or give the file's path"
            remedy += _question(pathlib.Path.cwd(), missing.rpartition(".")[2])
            raise InputError("TARGET", found, _FORM, remedy) from error
        raise ProgramError.of(f"importing {place}", error) from error


def is_nnx_class(target: str) -> bool:
    """Whether a TARGET names a class of NNX; inside of the block of `imported`."""
    place, _, name = target.rpartition(":")
    module = _module_of_file(place) if place.endswith(".py") else _module_of_name(place)
    found = functools.reduce(lambda made, part: getattr(made, part, None), name.split("."), module)
    return isinstance(found, type) and issubclass(found, nnx.Module)


def _maker(module: Any, name: str, target: str) -> Callable[[], Any]:
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [n for n, v in vars(module).items() if callable(v) and n[0] != "_"]
            question = did_you_mean(part, names)
            remedy = f"it has {', '.join(names) or 'none'}" + (f". {question}" if question else "")
            raise InputError(target, f"no name {part!r}", f"a name of {module.__name__}", remedy)
        found = getattr(found, part)
    if isinstance(found, nnx.Module | nn.Module) or not callable(found):
        return lambda: found

    def make() -> Any:
        try:
            return found(rngs=nnx.Rngs(0)) if _needs_rngs(found) else found()
        except jax.errors.JAXTypeError as error:
            raise InputError(
                target,
                f"{type(error).__name__}: {first_line(error)}",
                "something that runs without the values of arrays, as under jax.eval_shape",
                "pass --concrete to run it with real arrays",
            ) from error
        except Exception as error:
            raise ProgramError.of(target, error) from error

    return make


def _needs_rngs(function: Callable[..., Any]) -> bool:
    if isinstance(function, type) and issubclass(function, nnx.Pytree):
        return takes_rngs(function)
    parameter = inspect.signature(function).parameters.get("rngs")
    return parameter is not None and parameter.default is inspect.Parameter.empty
