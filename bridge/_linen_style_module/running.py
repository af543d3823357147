"""The methods with which a `bridge.Module` is run on variables, named as Linen's are."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict

from bridge._conversion.arrays import is_taken, taken
from bridge._conversion.collections import OUTPUTS
from bridge._conversion.linen_attributes import LinenStyle
from bridge._errors import InvalidMethodError
from bridge._flax import filters
from bridge._flax.linen_modules import is_call, unbound_function
from bridge._flax.nodes import nodes_below
from bridge._flax.objects import set_initializing
from bridge._flax.passed_values import PassedValues
from bridge._flax.tabulate import uncounted
from bridge._flax.variables import raw_value
from bridge._initialization.lazy_init import lazy_init
from bridge._module_calls import (
    ModuleCall,
    ModuleInCall,
    as_rngs,
    innermost,
    is_in,
)
from bridge._types import CollectionFilter, Method, Rngs, Variable

from .attributes import IS_SETUP
from .calling import call_of, in_call, is_entering, set_up
from .containers import mapped
from .variables import immutable, install, linen_collection, linen_variables

# The options of `nnx.tabulate` and Linen's `tabulate`; the method's arguments are the others.
_OF_TABLE = ("depth", "row_filter", "table_kwargs", "column_kwargs", "console_kwargs")


def _as_array(x: object) -> Any:
    return jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x


class Running(LinenStyle):
    """The part of `bridge.Module` that runs it on variables outside of it."""

    @property
    def variables(self) -> FrozenDict[str, Any]:
        """The variables by collection, as Linen has them."""
        return FrozenDict(linen_variables(self))

    @uncounted
    def init(
        self,
        rngs: Rngs | int = None,
        *args: object,
        method: Method = None,
        mutable: CollectionFilter = True,
        **kwargs: Any,
    ) -> Any:
        """`init_with_output` without the output."""
        return self.init_with_output(rngs, *args, method=method, mutable=mutable, **kwargs)[1]

    @uncounted
    def init_with_output(
        self,
        rngs: Rngs | int = None,
        *args: object,
        method: Method = None,
        mutable: CollectionFilter = True,
        capture_intermediates: bool | Callable[[Any, str], bool] = False,
        **kwargs: object,
    ) -> tuple[Any, Any]:
        """Runs a method on a clone that creates its variables.

        Args:
          rngs: an `nnx.Rngs`, a number, a key, or a dict of keys by stream name.
          *args: the method's arguments.
          method: a name, or a function of a module; None is `__call__`.
          mutable: the collections to return.
          capture_intermediates: as for Linen's `init`.
          **kwargs: the method's keyword arguments.

        Returns:
          (output, variables by collection).

        Raises:
          InvalidRngsError: `rngs` has another form.
          InvalidMethodError: there is no such method.
          MissingRngError: a key is drawn from a stream that does not exist.
        """
        mutable = True if mutable is False else mutable
        return _applied(
            self, {}, args, kwargs, rngs, method, mutable, capture_intermediates, initializing=True
        )

    @uncounted
    def apply(
        self,
        variables: Mapping[str, Any],
        *args: object,
        rngs: Rngs | int = None,
        method: Method = None,
        mutable: CollectionFilter = False,
        capture_intermediates: bool | Callable[[Any, str], bool] = False,
        **kwargs: object,
    ) -> Any:
        """Runs a method on a clone that holds these variables.

        Args:
          variables: as `init` returns them.
          *args: the method's arguments.
          rngs: as for `init`.
          method: a name, or a function of a module; None is `__call__`.
          mutable: the collections that the call may update, as for Linen's `apply`.
          capture_intermediates: as for Linen's `apply`.
          **kwargs: the method's keyword arguments.

        Returns:
          The output, or (output, variables of the mutable collections) if there are any.

        Raises:
          MismatchError: the variables do not fit.
          ImmutableCollectionError: the call has updated another collection.
          ConversionError: `variables` are not Linen variables.
          InvalidRngsError: `rngs` are not keys.
          InvalidFilterError: `mutable` is not a filter.
          InvalidMethodError: there is no such method.
        """
        output, updates = _applied(
            self, variables, args, kwargs, rngs, method, mutable, capture_intermediates
        )
        is_pure = mutable is False and not capture_intermediates
        return output if is_pure else (output, updates)

    @uncounted
    def bind(
        self,
        variables: Mapping[str, Any],
        *,
        rngs: Rngs | int = None,
        mutable: CollectionFilter = True,
    ) -> Self:
        """A clone that holds variables, as an NNX module does.

        Args:
          variables: as `init` returns them.
          rngs: where keys come from, as for `init`.
          mutable: the collections that calls may update.

        Returns:
          The module.

        Raises:
          ConversionError: `variables` are not Linen variables.
          InvalidRngsError: `rngs` are not keys.
        """
        where = f"{type(self).__name__}.bind"
        clone = cloned(self)
        install(clone, variables)
        if rngs is not None:
            clone.bridge__rngs = as_rngs(rngs, where)
        if mutable is not True:
            clone.bridge__mutable = filters.checked(mutable, where)
        with in_call(call_of(clone)) as record:
            _set_up_all(record)
        return clone

    @uncounted
    def unbind(self) -> tuple[Self, dict[str, Any]]:
        """The inverse of `bind`: (a module with the same fields, the variables)."""
        return cloned(self), linen_variables(self)

    @uncounted
    def tabulate(
        self, rngs: Rngs | int, *args: object, method: str | None = None, **kwargs: Any
    ) -> str:
        """The table of `nnx.tabulate` for an initialised clone, as Linen's `tabulate` makes it.

        Args:
          rngs: as for `init`.
          *args: the method's arguments, or `jax.ShapeDtypeStruct`s.
          method: the method's name; None is `__call__`.
          **kwargs: options of `nnx.tabulate`, such as `depth`, and the method's keyword arguments.

        Returns:
          The table.
        """
        own = {n: kwargs.pop(n) for n in list(kwargs) if n in _OF_TABLE}
        made = cloned(self)
        made.bridge__rngs = as_rngs(rngs, f"{type(self).__name__}.tabulate")
        lazy_init(getattr(made, method) if method else made, *args, **kwargs)
        # Which runs the method on what it is given.
        args, kwargs = jax.tree.map(_as_array, (args, kwargs))
        return nnx.tabulate(made, *args, method=method or "__call__", **own, **kwargs)

    @uncounted
    def clone(self, **updates: object) -> Self:
        """A module without variables, with the same fields except for those given here."""
        return cloned(self, None, **updates)


def cloned(module: LinenStyle, memo: dict[int, Any] | None = None, **updates: object) -> Any:
    """A module with the same fields that has no variables yet, as Linen's `clone` makes it.

    `memo` has the clones that exist already, by the id of the original; `updates` are other values
    for fields.
    """
    memo = {} if memo is None else memo

    def cloned_item(suffix: str, item: object) -> Any:
        if isinstance(item, LinenStyle):
            return cloned(item, memo)
        if isinstance(item, nnx.Pytree):
            if id(item) not in memo:
                memo[id(item)] = nnx.clone(item)
            return memo[id(item)]
        return item

    if id(module) in memo:
        return memo[id(module)]
    with innermost(None):
        if type(module).bridge__has_own_init:
            made = nnx.clone(module)
            vars(made)[IS_SETUP] = False
        else:
            fields = [field.name for field in dataclasses.fields(module) if field.init]
            values = {name: getattr(module, name) for name in fields}
            made = type(module)(**{n: mapped(x, cloned_item) for n, x in values.items()} | updates)
    memo[id(module)] = made
    return made


def _applied(
    module: LinenStyle,
    variables: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rngs: Rngs | int,
    method: Method,
    mutable: CollectionFilter,
    capture_intermediates: bool | Callable[[Any, str], bool],
    *,
    initializing: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Runs a method of a clone: (output, variables of the mutable collections)."""
    where = f"a call of {type(module).__name__}"
    filters.checked(mutable, where)
    if capture_intermediates:
        mutable = filters.union(mutable, ["intermediates"])
    clone = cloned(module)
    install(clone, variables)
    if initializing:
        set_initializing(nodes_below(clone).objects, True)
    capture = is_call if capture_intermediates is True else capture_intermediates or None
    call = ModuleCall(clone, as_rngs(rngs, where), mutable, capture, is_kept=False)
    before = [(variable, taken(raw_value(variable))) for variable in _fixed(clone, mutable)]
    with in_call(call) as record:
        set_up(record)
        output = _function(clone, method)(*args, **kwargs)
    _check_fixed(clone, before, [] if initializing else _fixed(clone, mutable))
    if mutable is False:
        return output, {}
    return output, {c: x for c, x in linen_variables(clone).items() if is_in(mutable, c)}


def _fixed(module: LinenStyle, mutable: CollectionFilter) -> list[Variable]:
    """The Variables of collections that a call may not update."""
    return [
        variable
        for variable in nodes_below(module).variables
        if not isinstance(variable, nnx.RngState)
        and (name := linen_collection(variable)) not in OUTPUTS
        and not is_in(mutable, name)
    ]


def _check_fixed(
    module: LinenStyle, before: Sequence[tuple[Variable, Any]], after: Sequence[Variable]
) -> None:
    """Raises ImmutableCollectionError if the call has changed one of these Variables.

    NNX Variables can be written whatever `mutable` says, so this is checked after the call. Values
    that have only passed through an NNX transform come back in new arrays, and are not changes.
    """
    passed = PassedValues()
    changed = [
        variable
        for variable, value in before
        if not is_taken(now := raw_value(variable), value) and not passed.are_same(now, value)
    ]
    # Dicts that the module has made of given Variables, when it declared them.
    known = {id(x) for _, value in before for x in jax.tree.leaves(value)}
    for variable in after:
        value = raw_value(variable)
        if isinstance(value, Mapping) and not known.issuperset(map(id, jax.tree.leaves(value))):
            changed.append(variable)
    if changed:
        raise immutable(module, linen_collection(changed[0]))


def _set_up_all(record: ModuleInCall) -> None:
    """Runs `setup` of a module and of those below it, so that their submodules are accessible."""
    set_up(record)
    for value in list(vars(record.module).values()):
        below = record.call.find(value)
        if below is not None and below.is_owned:
            _set_up_all(below)


def _function(module: LinenStyle, method: Method) -> Callable[..., Any]:
    """The method of this module that a name, a function or a method of another one means."""
    method = "__call__" if method is None else method
    if isinstance(method, str):
        found = getattr(module, method, None)
        if not callable(found):
            names = [n for n, x in inspect.getmembers(type(module)) if is_entering(x)]
            raise InvalidMethodError(type(module), method, names)
        return found
    return functools.partial(unbound_function(method, nnx.Module), module)
