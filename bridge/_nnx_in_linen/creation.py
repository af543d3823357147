"""Finds or makes the definition of a ToLinen's module, and creates its variables at `init`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

import registry
from bridge._conversion.collections import ARRAYS
from bridge._conversion.linen_attributes import LinenHolder, held_variables
from bridge._conversion.neutral import Address, by_address, has_leaf
from bridge._errors import MismatchError, MissingInputsError, path_text
from bridge._flax.linen_modules import is_bound
from bridge._flax.traces import trace_of
from bridge._flax.variables import leaf_value
from bridge._graphdefs import static_graphdef
from bridge._graphdefs.static_graphdef import StaticGraphDef
from bridge._initialization.lazy_init import initialized

from . import rebuilding, scope_variables
from .bound_module import method_in_modes, method_of
from .matched_variables import MatchedVariables, comparison, overlay
from .module_views import are_shown, showing, unshow
from .nnx_call import NNXCall
from .wrapper_scope import WrapperScope


def call_or_create(scope: WrapperScope, method: Any, args: Any, kwargs: Any) -> Any:
    """Calls a method of the module, whose variables are created first if they may and must be.

    Args:
      scope: the wrapper in its scope.
      method: a name or a function of the NNX module, None for a call.
      args: the method's positional arguments.
      kwargs: the method's keyword arguments.

    Returns:
      The method's output.
    """
    linen = scope.linen
    variables = scope_variables.read(linen)
    # As Linen's own `param` does, create what is missing if the collection is mutable.
    is_init = linen.is_initializing()
    may_create = is_init or (linen.is_mutable_collection("params") and not has_leaf(variables))
    found = _found(scope, variables, rebuilding.Call(method, args, kwargs))
    if found is not None:
        compared = comparison(found, rng=may_create)
        if not (may_create and compared.missing):
            scope.check(compared)
            return _called(scope, found, method, args, kwargs)
    output, graphdef = _create(scope, variables, method, args, kwargs)
    if is_init:
        return output
    # This is a call, and what it changes belongs to the result.
    found = scope.matched(graphdef, scope_variables.read(linen))
    return _called(scope, found, method, args, kwargs)


def rebuilt(scope: WrapperScope, variables: Mapping[str, Any], call: Any = None) -> StaticGraphDef:
    """The GraphDef that the constructor makes, for variables that came without it."""
    return rebuilding.rebuild(scope.recipe, scope.stream_names(variables), call, scope.where)


def _called(
    scope: WrapperScope, found: MatchedVariables, method: Any, args: Any, kwargs: Any
) -> Any:
    call = NNXCall(scope, found)
    output = call.run(method, args, kwargs)
    call.commit()
    return output


def _found(
    scope: WrapperScope, variables: Mapping[str, Any], call: rebuilding.Call
) -> MatchedVariables | None:
    """The variables against their definition, None if an `init` has to make that."""
    graphdef = scope_variables.stored_graphdef(scope.linen)
    make = functools.partial(rebuilt, scope, variables, call)
    # It may have been made with other arguments: one model for training and one for evaluation.
    if graphdef is not None and scope.recipe.made(graphdef, make):
        return scope.matched(graphdef, variables)
    if scope.linen.is_initializing():
        return None
    names = scope.stream_names(variables)
    return rebuilding.found_for(scope.recipe, names, call, variables, scope.where)


def _create(
    scope: WrapperScope, variables: Mapping[str, Any], method: Any, args: Any, kwargs: Any
) -> tuple[Any, StaticGraphDef]:
    """Constructs the module, and writes it and what the call creates: (output, definition)."""
    scope.store_graphdef(None)
    recipe = scope.recipe
    keys = scope.constructor_keys()
    module, nodes, given = recipe.construct(keys, scope.where)
    leaves = by_address(variables)
    if leaves:
        graphdef, constructed = static_graphdef.split(module)
        found = scope.matched(static_graphdef.with_given(graphdef, given), variables)
        scope.check(dataclasses.replace(comparison(found), missing=()))
        overlay(constructed, found)
    replaced = _write_shown(scope, module)
    output = call = None
    if scope.is_outermost and not _takes(method_of(module, method), args, kwargs):
        _check_complete(scope, module)
    else:
        call = rebuilding.Call(method, args, kwargs)
        find = functools.partial(method_in_modes, method=method)
        with showing(module, scope.linen):
            module, output = initialized(module, find, args, kwargs, nodes)
        if are_shown():
            unshow(module)
    graphdef, made = static_graphdef.split(module, recipe.origin, given)
    _replace_donated(scope, keys, graphdef, made)
    graphdef = rebuilding.without_tracers(graphdef, recipe, tuple(keys), call, scope.where)
    # An argument is not state: each call passes its own.
    arguments = {(ARRAYS, path) for path, _ in given}
    new = {a: x for a, x in scope.as_linen(graphdef, made).items() if a not in arguments}
    _check_kept(scope, new, leaves)
    kept = replaced()
    scope.write({a: x for a, x in new.items() if a not in kept}, leaves, {})
    # A bound Linen module has the variables of this `init`, and every call has its own.
    if not any(is_bound(item) for item in recipe.look().objects):
        scope.store_graphdef(graphdef)
    return output, graphdef


def _write_shown(scope: WrapperScope, module: Any) -> Callable[[], set[Address]]:
    """Writes the state as constructed at once where Linen's interceptors are to see it.

    Returns:
      What tells which of these leaves have been replaced since, by the interceptors.
    """
    if not are_shown():
        return set
    graphdef, constructed = static_graphdef.split(module)
    written = scope.as_linen(graphdef, constructed)
    scope.write(written, by_address(scope_variables.read(scope.linen)), {})

    def replaced() -> set[Address]:
        now = scope.matched(graphdef, scope_variables.read(scope.linen)).leaves
        return {a for a, leaf in written.items() if now.get(a) is not leaf}

    return replaced


def _replace_donated(
    scope: WrapperScope, keys: Mapping[str, Any], graphdef: StaticGraphDef, made: list[Any]
) -> None:
    """Constructs once more for values that are gone: the call has donated them to a program."""
    donated = [i for i, leaf in enumerate(made) if _is_gone(leaf_value(leaf))]
    if not donated:
        return
    again = scope.recipe.construct(keys, scope.where)
    new_graphdef, leaves = static_graphdef.split(again.module)
    new = {slot.address: leaf for slot, leaf in zip(new_graphdef.slots, leaves, strict=True)}
    for i in donated:
        made[i] = new.get(graphdef.slots[i].address, made[i])


def _is_gone(value: Any) -> bool:
    arrays = (value,) if isinstance(value, jax.Array) else jax.tree.leaves(value)
    # Neither a tracer nor a reference tells.
    concrete = [x for x in arrays if isinstance(x, jax.Array) and trace_of(x) is None]
    return any(not isinstance(x, jax.Ref) and x.is_deleted() for x in concrete)


def _takes(function: Any, args: Any, kwargs: Any) -> bool:
    """False for a call without any arguments of a method that needs some."""
    if args or kwargs:
        return True
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:
        # It has no signature to be read.
        return True
    return True


def _check_complete(scope: WrapperScope, module: Any) -> None:
    """Raises if modules lack variables that only a call with inputs can create."""
    lacking = [
        ("/".join(map(str, path)), type(item.to_nnx__module).__name__)
        for path, item in nnx.iter_modules(module)
        if isinstance(item, LinenHolder) and not held_variables(item)
    ]
    if lacking:
        raise MissingInputsError(scope.where, lacking)


def _check_kept(
    scope: WrapperScope, made: Mapping[Address, Any], found: Mapping[Address, Any]
) -> None:
    """Raises for variables that a lifted transform would leave behind, as Linen does."""
    is_mutable = functools.cache(scope.linen.is_mutable_collection)
    active = registry.current()
    lost = [
        (path_text(*address), "its collection among those that the transform lifts")
        for address in made
        if not is_mutable(address[0])
        and address not in found
        and not issubclass(active.type_from_name(address[0]), nnx.RngState | nnx.Intermediate)
    ]
    if lost:
        raise MismatchError(scope.where, missing=lost)
