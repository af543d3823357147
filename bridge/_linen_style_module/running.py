"""The methods with which a `bridge.Module` is run on variables, named as Linen's are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict

from bridge._conversion.linen_attributes import LinenHolder
from bridge._errors import InvalidModuleError, InvalidRngsError
from bridge._flax.tabulate import uncounted
from bridge._module_calls.calls import LinenStyle
from bridge._types import CollectionFilter, Method, Rngs

from . import functional
from .submodules import is_lazy
from .variables import linen_variables

# The options of `nnx.tabulate` and Linen's `tabulate`; the method's arguments are the others.
_OF_TABLE = ("depth", "row_filter", "table_kwargs", "column_kwargs", "console_kwargs")


def _as_array(x: object) -> Any:
    return jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x


class Running(LinenStyle):
    """The part of `bridge.Module` that runs it on variables which it does not hold."""

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
          InvalidRngsError: `rngs` is none of these.
          InvalidMethodError: there is no such method.
          MissingRngError: a key is drawn from a stream that is not there.
        """
        return functional.apply_module(
            self,
            {},
            args,
            kwargs,
            rngs=rngs,
            method=method,
            mutable=True if mutable is False else mutable,
            capture_intermediates=capture_intermediates,
            initializing=True,
        )

    @uncounted
    def lazy_init(
        self, rngs: Rngs | int, *args: object, method: str | None = None, **kwargs: object
    ) -> Any:
        """`init` from sample inputs of which some are `jax.ShapeDtypeStruct`s, as Linen's.

        Args:
          rngs: as for `init`.
          *args: the method's arguments.
          method: the method's name; None is `__call__`.
          **kwargs: the method's keyword arguments.

        Returns:
          The variables by collection; the module stays as it is, unlike with `bridge.lazy_init`.

        Raises:
          InvalidRngsError: `rngs` are no keys.
          AbstractInputError: a variable depends on the values of an input that is a shape.
        """
        return linen_variables(functional.initialized_clone(self, rngs, args, kwargs, method))

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
          InvalidRngsError: `rngs` are no keys.
          InvalidFilterError: `mutable` is no filter.
          InvalidMethodError: there is no such method.
        """
        output, updates = functional.apply_module(
            self,
            variables,
            args,
            kwargs,
            rngs=rngs,
            method=method,
            mutable=mutable,
            capture_intermediates=capture_intermediates,
        )
        is_pure = mutable is False and not capture_intermediates
        return output if is_pure else (output, updates)

    @uncounted
    def bind(
        self,
        variables: Mapping[str, Any],
        *args: object,
        rngs: Rngs | int = None,
        mutable: CollectionFilter = True,
    ) -> Self:
        """A clone that holds variables, as an NNX module does.

        Args:
          variables: as `init` returns them.
          *args: none.
          rngs: where keys come from, as for `init`.
          mutable: the collections that calls may update.

        Returns:
          The module.

        Raises:
          ConversionError: `variables` are not Linen variables.
          InvalidRngsError: `rngs` are no keys.
        """
        if args:
            raise InvalidRngsError(args, f"{type(self).__name__}.bind")
        return functional.bound(self, variables, rngs, mutable)

    @uncounted
    def unbind(self) -> tuple[Self, dict[str, Any]]:
        """The inverse of `bind`: (a module with the same fields, the variables)."""
        return functional.cloned(self), linen_variables(self)

    @uncounted
    def tabulate(
        self, rngs: Rngs | int, *args: object, method: str | None = None, **kwargs: Any
    ) -> str:
        """`nnx.tabulate` of a clone that `init` would create, as Linen's `tabulate` of its modules.

        Args:
          rngs: as for `init`.
          *args: the method's arguments, or `jax.ShapeDtypeStruct`s.
          method: the method's name; None is `__call__`.
          **kwargs: options of `nnx.tabulate`, such as `depth`, and the method's keyword arguments.

        Returns:
          The table.
        """
        own = {n: kwargs.pop(n) for n in list(kwargs) if n in _OF_TABLE}
        made = functional.initialized_clone(self, rngs, args, kwargs, method)
        # Which runs the method on what it is given.
        args, kwargs = jax.tree.map(_as_array, (args, kwargs))
        return nnx.tabulate(made, *args, method=method or "__call__", **own, **kwargs)

    @uncounted
    def module_paths(
        self, rngs: Rngs | int, *args: object, method: str | None = None, **kwargs: object
    ) -> dict[str, Any]:
        """The modules of this one by path, without variables; those below Linen modules are not.

        Args:
          rngs: as for `init`.
          *args: the method's arguments, or `jax.ShapeDtypeStruct`s.
          method: the method's name; None is `__call__`.
          **kwargs: the method's keyword arguments.

        Returns:
          Copies of `bridge.Module`s and Linen modules by path, such as `encoder/Dense_0`.
        """
        found: dict[str, Any] = {}
        made = functional.initialized_clone(self, rngs, args, kwargs, method)
        for path, node in nnx.iter_graph(made, graph=True):
            name = "/".join(map(str, path))
            if is_lazy(node):
                found[name] = functional.cloned(node)
            elif isinstance(node, LinenHolder):
                found[name] = node.to_nnx__module.clone()
        return dict(sorted(found.items()))

    @uncounted
    def clone(self, **updates: object) -> Self:
        """A module with the same fields, but for those given here, and without variables.

        Raises:
          InvalidModuleError: `nn.init` or `nn.apply` asks for it, which take Linen modules.
        """
        if "_deep_clone" in updates:
            remedy = "call module.init(rngs, …, method=function), or module.apply"
            raise InvalidModuleError("nn.init or nn.apply", self, "a Linen module", remedy)
        return functional.cloned(self, None, **updates)
