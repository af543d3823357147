"""`param`, `variable` and what else a `bridge.Module` does with its variables by name."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core import meta

import registry
from bridge._conversion.collections import OUTPUTS
from bridge._errors import MismatchError, NotInitializedError, path_text
from bridge._flax.objects import is_initializing
from bridge._flax.variables import raw_value
from bridge._module_calls.calls import LinenStyle, ModuleInCall, record_of
from bridge._sharding.eager import variables_in_shards
from bridge._types import VariableType

from . import variables
from .methods import is_creating
from .submodules import check_declaring, reserve


def declared(
    module: LinenStyle,
    collection: str,
    name: str,
    what: str,
    make: Callable[[], Any] | None,
    shapes: Callable[[], list[tuple[int, ...]]],
) -> nnx.Variable[Any]:
    """The variable of a name in a collection, which is created if it may be.

    Args:
      module: the module.
      collection: the collection.
      name: the name.
      what: `param`, whose shapes are checked, or `variable`.
      make: makes the initial value; without it the variable has to exist.
      shapes: the shapes of the initial value.
    """
    record = check_declaring(record_of(module), module, f"{what.capitalize()}s")
    reserve(record, name, collection, what)
    found = variables.find_declared(module, collection, name)
    if found is None:
        if make is None or not is_creating(record, collection):
            raise _absent(record, collection, name, shapes() if make else [])
        return _created(record, collection, name, make())
    if what == "param":
        wanted, value = shapes(), raw_value(found)
        if any(a != np.shape(b) for a, b in zip(wanted, jax.tree.leaves(value), strict=False)):
            path = path_text("params", (*record.path, name))
            raise MismatchError(_where(record), mis_shaped=_mis_shaped(path, wanted, value))
    return found


def param_key(module: LinenStyle) -> jax.Array:
    """The key that the initial value of a parameter is drawn from."""
    record = check_declaring(record_of(module), module, "Params")
    return record.scope.make_rng("params")


def put_variable(module: LinenStyle, collection: str, name: str, value: object) -> None:
    """Gives a variable a value, and creates it if there is none."""
    found = variables.find_declared(module, collection, name)
    if found is None:
        variables.add(module, collection, name, variables.made(collection, name, value))
    else:
        found.set_value(_merged(found.get_value(), value))


def _merged(before: object, value: object) -> Any:
    """A value in the place of another one; nested dicts are variables, and each keeps its own.

    Source: flax/core/scope.py:_put_variable @ 0.12.12
    """
    if not (isinstance(before, dict) and isinstance(value, Mapping)):
        return value
    return before | {key: _merged(before.get(key), item) for key, item in value.items()}


def sow(
    module: LinenStyle,
    collection: str,
    name: str,
    value: object,
    reduce_fn: Callable[[Any, Any], Any],
    init_fn: Callable[[], Any],
) -> bool:
    """Adds a value to an output collection, if the call keeps it."""
    record = record_of(module)
    if record is None or record.call.mutable is None:
        return False
    if is_initializing(module) and collection in OUTPUTS:
        return False
    if not record.scope.is_mutable_collection(collection):
        return False
    found = variables.find(module, collection, name)
    before = init_fn() if found is None else found.get_value()
    put_variable(module, collection, name, reduce_fn(before, value))
    return True


def perturb(module: LinenStyle, collection: str, name: str, value: object) -> Any:
    """A value plus the variable of that name, which `init` creates as zeros."""
    record = record_of(module)
    found = variables.find(module, collection, name)
    if found is None and record is not None and is_creating(record, collection):
        zeros = jax.tree.map(jax.numpy.zeros_like, value)
        put_variable(module, collection, name, zeros)
        found = variables.find(module, collection, name)
    return value if found is None else jax.tree.map(jax.numpy.add, value, found.get_value())


def _created(record: ModuleInCall, collection: str, name: str, value: object) -> nnx.Variable[Any]:
    if isinstance(value, meta.AxisMetadata):
        # As a layer of Flax beside it.
        given = {collection: {name: value}}
        value = variables_in_shards(given, None, _where(record))[collection][name]
    made = variables.made(collection, name, value)
    variables.add(record.module, collection, name, made)
    return made


# Weak keys: the cache must not keep initializers alive.
_known_shapes: weakref.WeakKeyDictionary[Any, dict[Any, list[tuple[int, ...]]]] = (
    weakref.WeakKeyDictionary()
)


def shapes_of_param(
    init_fn: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> list[tuple[int, ...]]:
    """The shapes that an initializer makes of these arguments.

    Linen traces the initializer at each call, which is most of what an eager call costs. Those of
    JAX itself depend on their arguments alone, so they make the same shapes again; any other one
    may read what has changed, and is traced.
    """

    def traced() -> list[tuple[int, ...]]:
        return shapes_of(lambda: init_fn(jax.random.key(0), *args, **kwargs))

    if getattr(init_fn, "__module__", None) not in _OF_JAX:
        return traced()
    try:
        known = _known_shapes.setdefault(init_fn, {})
        key = args, tuple(sorted(kwargs.items()))
        if key not in known:
            known[key] = traced()
        return known[key]
    except TypeError:
        # An argument cannot be hashed, such as a shape in a list.
        return traced()


_OF_JAX = {each.__module__ for each in (jax.nn.initializers.zeros, jax.nn.initializers.normal())}


def shapes_of(init_fn: Callable[[], Any]) -> list[tuple[int, ...]]:
    """The shapes of what an initializer makes."""

    def value() -> Any:
        made = init_fn()
        return made.raw_value if isinstance(made, nnx.VariableMetadata) else made

    return [np.shape(leaf) for leaf in jax.tree.leaves(jax.eval_shape(value))]


def _absent(
    record: ModuleInCall, collection: str, name: str, shapes: list[tuple[int, ...]]
) -> Exception:
    """The error for a variable that is not there."""
    root = record.call.root.module
    state = nnx.state(root, nnx.Not(nnx.RngState))
    if record.call.mutable is None and not nnx.to_flat_state(state):
        name = type(root).__name__
        return NotInitializedError(name, f"take existing ones with {name}(…).bind(variables)")
    path = path_text(collection, (*record.path, name))
    shown = str(shapes[0]) if len(shapes) == 1 else "a value"
    return MismatchError(_where(record), missing=[(path, shown)])


def _mis_shaped(
    path: str, wanted: list[tuple[int, ...]], value: object
) -> list[tuple[str, str, str]]:
    """The leaves of a value that have other shapes: path, expected, found."""
    found = jax.tree_util.tree_leaves_with_path(value)
    return [
        ("/".join([path, *(str(getattr(key, "key", key)) for key in keys)]), f"{a}", f"{shape}")
        for a, (keys, leaf) in zip(wanted, found, strict=False)
        if a != (shape := np.shape(leaf))
    ]


def _where(record: ModuleInCall) -> str:
    return type(record.call.root.module).__name__


def collection_name(variable_type: str | VariableType) -> str:
    """The collection that is meant by a name or a Variable type."""
    is_type = isinstance(variable_type, type)
    return registry.current().name_from_type(variable_type) if is_type else variable_type
