"""The methods with which a `bridge.Module` uses its variables and keys, named as Linen's are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from bridge._conversion.inner_boxes import boxed
from bridge._errors import DeclarationError
from bridge._flax.objects import CAPTURES, is_initializing
from bridge._flax.tabulate import uncounted
from bridge._module_calls.calls import LinenStyle, record_of
from bridge._module_calls.scope import Scope
from bridge._types import VariableType

from . import declarations, variables
from .attributes import SCOPE


class Declaring(LinenStyle):
    """The part of `bridge.Module` that declares, reads and writes variables."""

    @property
    def scope(self) -> Scope | None:
        """The keys and the mutable collections of the call, None outside of one."""
        record = record_of(self)
        return vars(self).get(SCOPE) if record is None else record.scope

    @property
    def path(self) -> tuple[str, ...]:
        """The names that lead from the outermost module of the call to this one.

        Raises:
          ValueError: outside of a call.
        """
        record = record_of(self)
        if record is None:
            raise DeclarationError.of_use("a module has a path", type(self).__name__)
        return record.path

    @uncounted
    def param(
        self,
        name: str,
        init_fn: Callable[..., Any],
        *init_args: object,
        unbox: bool = True,
        **init_kwargs: object,
    ) -> Any:
        """Declares a parameter.

        Args:
          name: its name.
          init_fn: makes the initial value from a key and the other arguments.
          *init_args: further arguments of `init_fn`.
          unbox: whether the Variable is returned rather than Linen's metadata box.
          **init_kwargs: keyword arguments of `init_fn`.

        Returns:
          The `nnx.Param`, or the box around its value.

        Raises:
          DeclarationError: neither `setup` nor a compact method runs.
          NameInUseError: the name is taken.
          MismatchError: there is no such parameter, or it has another shape.
          NotInitializedError: the module has no variables yet.
          MissingRngError: there is no key to draw the value from.
        """
        found = declarations.declared(
            self,
            "params",
            name,
            "param",
            lambda: init_fn(declarations.param_key(self), *init_args, **init_kwargs),
            lambda: declarations.shapes_of_param(init_fn, init_args, init_kwargs),
        )
        return found if unbox else boxed(found)

    @uncounted
    def variable(
        self,
        col: str,
        name: str,
        init_fn: Callable[..., Any] | None = None,
        *init_args: object,
        unbox: bool = True,
        **init_kwargs: object,
    ) -> Any:
        """Declares a variable of a collection.

        Args:
          col: the collection.
          name: the variable's name.
          init_fn: makes the initial value; without it the variable has to exist.
          *init_args: arguments of `init_fn`.
          unbox: of no effect: the Variable holds the value and the metadata.
          **init_kwargs: keyword arguments of `init_fn`.

        Returns:
          The Variable, of the type that belongs to the collection.

        Raises:
          DeclarationError: neither `setup` nor a compact method runs.
          NameInUseError: the name is taken in this collection, or by a submodule.
          MismatchError: there is no such variable, and the call may not create it.
          NotInitializedError: the module has no variables yet.
        """
        del unbox
        make = init_fn and functools.partial(init_fn, *init_args, **init_kwargs)
        return declarations.declared(
            self, col, name, "variable", make, lambda: declarations.shapes_of(make) if make else []
        )

    @uncounted
    def has_variable(self, col: str, name: str) -> bool:
        """Whether there is a variable, or a submodule with variables, of that name."""
        found = variables.find(self, col, name)
        return found is not None or variables.held_below(self, col, name) is not None

    @uncounted
    def get_variable(self, col: str, name: str, default: object = None) -> Any:
        """The value of a variable or the variables of a submodule, `default` if there are none."""
        found = variables.find(self, col, name)
        value = variables.held_below(self, col, name) if found is None else found.get_value()
        return default if value is None else value

    @uncounted
    def put_variable(self, col: str, name: str, value: object) -> None:
        """Gives a variable a value, and creates it if there is none.

        Raises:
          ImmutableCollectionError: from `apply`, if it may not update the collection.
        """
        declarations.put_variable(self, col, name, value)

    @uncounted
    def is_mutable_collection(self, col: str) -> bool:
        """Whether the call may update a collection; all of them, unless somebody said otherwise."""
        scope = self.scope
        return scope is None or scope.is_mutable_collection(col)

    @uncounted
    def is_initializing(self) -> bool:
        """Whether `init` or `lazy_init` runs."""
        return is_initializing(self)

    @uncounted
    def has_rng(self, name: str) -> bool:
        """Whether a key can be drawn from a stream."""
        scope = self.scope
        return scope is not None and scope.has_rng(name)

    @uncounted
    def make_rng(self, name: str = "default") -> jax.Array:
        """The next key of a stream; `default`, then `params`, stands for one that is not there.

        Raises:
          DeclarationError: outside of a call.
          MissingRngError: there is no such stream.
        """
        scope = self.scope
        if scope is None:
            raise DeclarationError.of_use("a module draws keys", type(self).__name__)
        return scope.make_rng(name)

    @uncounted
    def sow(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        variable_type: str | VariableType,
        name: str,
        value: object,
        reduce_fn: Callable[[Any, Any], Any] = lambda before, value: (*before, value),
        init_fn: Callable[[], Any] = tuple,
        capture_noop: bool | None = None,
    ) -> bool:
        """Adds a value to an output collection if the caller asks for it, as Linen does.

        Args:
          variable_type: the collection's name, or a Variable type.
          name: the name in the collection.
          value: the value.
          reduce_fn: (what is there, value) -> what is there then.
          init_fn: makes what is there at first.
          capture_noop: whether only `nnx.capture` may ask for it, as in `nnx.Module.sow`. None is
            False here: what `mutable` takes is no deprecated way.

        Returns:
          Whether the value was kept: below `nnx.capture`, or where `mutable` takes the collection.
        """
        if CAPTURES in vars(self):
            return super().sow(variable_type, name, value, reduce_fn, init_fn)
        if capture_noop:
            return False
        collection = declarations.collection_name(variable_type)
        return declarations.sow(self, collection, name, value, reduce_fn, init_fn)

    @uncounted
    def perturb(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        name: str,
        value: object,
        collection: str | VariableType = "perturbations",
        capture_noop: bool | None = None,
    ) -> Any:
        """Adds a variable that is zero to a value, so that the value has a gradient.

        Args:
          name: the variable's name.
          value: the value.
          collection: the variable's collection, or its type.
          capture_noop: whether only `nnx.capture` may ask for it, as in `sow`.

        Returns:
          The sum; `value` if there is no such variable.
        """
        if CAPTURES in vars(self):
            return super().perturb(name, value, collection)
        if capture_noop:
            return value
        return declarations.perturb(self, declarations.collection_name(collection), name, value)
