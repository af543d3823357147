"""`ToNNX`: a Linen module as an NNX module."""

# The annotations of Flax and JAX are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from flax import linen as nn
from flax import nnx

from bridge import _train_eval
from bridge._conversion import linen_attributes, linen_leaves
from bridge._conversion.collections import graphdefs_in
from bridge._conversion.linen_attributes import OWN_PREFIX, HeldModule, LinenHolder, name_of
from bridge._conversion.neutral import as_dicts
from bridge._flax import filters
from bridge._flax.objects import (
    is_data_attribute,
    is_initializing,
    is_note,
)
from bridge._initialization.creating import CREATING
from bridge._initialization.lazy_init import lazy_init
from bridge._randomness.streams import owned
from bridge._sharding import eager
from bridge._types import CollectionFilter, Rngs

from .creation import CreatingCall
from .linen_call import LinenCall
from .parts import bound_at, has_any, own_attributes, part_names
from .submodule import ABSENT, LinenSubmodule, check_assigned, found_at
from .wrapped_module import call_signature, check_module, field_names, free_module


class ToNNX(LinenHolder):
    """An NNX module that behaves as the Linen module it wraps.

    Its variables are created by `lazy_init` from sample inputs, or taken from `from_variables`.
    They are Variables at the Linen path: `model.kernel`, `model.Dense_0['kernel']`.

    Example::

      >>> import jax.numpy as jnp
      >>> from flax import linen as nn, nnx
      >>> import bridge
      >>> model = bridge.ToNNX(nn.Dense(64), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 32)))
      >>> model(jnp.ones((1, 32))).shape, model.kernel.shape
      ((1, 64), (32, 64))

    Args:
      module: a Linen module instance. If it was bound to variables by `bind`, the wrapper has them.
      rngs: where keys come from: an `nnx.Rngs`, which is forked, one key, or a dict of keys by
        stream name. With a key, `lazy_init(x)` gives bit for bit what `module.init(key, x)` gives.
      mutable: the collections that every call may update: names, True, a `DenyList`, or
        `'existing'` for the state collections that exist. By default none, as in Linen.
      eager_sharding: whether annotated variables are sharded over the mesh in force when they are
        created or taken in. By default they are if `nnx.using_eager_sharding()` is true, as native
        Variables are. A variable is left unsharded if its names are not axes of the mesh, or if no
        mesh is set; with True either is an error.

    Raises:
      InvalidModuleError: `module` is not a Linen module instance.
      InvalidRngsError: `rngs` is not one of the forms listed above.
      InvalidFilterError: `mutable` is not one of the forms listed above.
      ShardingError: later, if an annotation does not fit the mesh.

    Source: flax/nnx/bridge/wrappers.py:ToNNX @ 0.12.8
    """

    def __init__(
        self,
        module: nn.Module,
        rngs: Rngs = None,
        *,
        mutable: CollectionFilter = False,
        eager_sharding: bool | None = None,
    ):
        check_module(module)
        self.to_nnx__module, variables = free_module(module)
        where = name_of(self)
        streams, plain = owned(rngs, where)
        if streams is not None:
            self.to_nnx__rngs: nnx.Rngs | None = streams
        if plain:
            self.to_nnx__plain_keys = plain
        if (mutable := filters.checked(mutable, where)) is not False:
            self.to_nnx__mutable = mutable
        if eager_sharding is not None:
            self.to_nnx__eager_sharding: bool | None = eager_sharding
        if variables:
            self._take_in(variables)

    @classmethod
    def from_variables(
        cls, module: nn.Module, variables: Mapping[str, Any], rngs: Rngs = None, **options: Any
    ) -> Self:
        """A wrapper that holds existing Linen variables.

        Args:
          module: a Linen module instance.
          variables: `{collection: {name: array, box or mapping}}`, as `module.init` returns them.
          rngs: the streams that calls draw from, such as `nnx.Rngs(dropout=0)` for a model that is
            trained with dropout, or one key for all streams. No parameters are initialised, so a
            model that draws nothing in a call needs none.
          **options: as for `ToNNX`.

        Returns:
          A `ToNNX` that needs no `lazy_init`.

        Raises:
          ConversionError: `variables` are not Linen variables.
          UnsupportedBoxError: a metadata box cannot be carried.
          ReservedNameError: a name starts with `to_nnx__`.
          ShardingError: an annotation does not fit the mesh in force.
        """
        check_module(module)
        wrapper = cls(free_module(module)[0], rngs, **options)
        wrapper._take_in(variables)
        return wrapper

    def _take_in(self, variables: Mapping[str, Any]) -> None:
        linen_leaves.check_variables(variables)
        # From the host to the shards, without a whole copy on one device.
        leaves = eager.in_shards(
            linen_leaves.from_variables(variables), self.to_nnx__eager_sharding, name_of(self)
        )
        linen_attributes.store(self, linen_attributes.as_arrays(leaves), {})
        linen_attributes.note_collections(self, variables)
        if graphdefs := graphdefs_in(variables):
            self.to_nnx__graphdefs = graphdefs

    def set_view(
        self, deterministic: bool | None = None, use_running_average: bool | None = None
    ) -> None:
        """Sets the modes of this module; `nnx.view` calls it on the copy that it makes.

        Args:
          deterministic: if True, nothing is dropped.
          use_running_average: if True, stored batch statistics are used.
        """
        if deterministic is not None:
            self.deterministic = deterministic
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def linen_variables(self) -> Any:
        """The variables as Linen has them; the inverse of `from_variables`.

        Returns:
          `{collection: {name: array, box or mapping}}`, a dict or, if Flax's
          `flax_return_frozendict` is on, a FrozenDict. The bridge's own state, such as RNG streams,
          is not among them.
        """
        held = linen_attributes.held_variables(self)
        return linen_leaves.to_variables({address: entry.leaf for address, entry in held.items()})

    def lazy_init(self, /, *args: object, **kwargs: object) -> Self:
        """`bridge.lazy_init` of this module."""
        return lazy_init(self, *args, **kwargs)

    def __call__(
        self,
        /,
        *args: Any,
        rngs: Rngs = None,
        method: Callable[..., Any] | str | None = None,
        mutable: CollectionFilter | None = None,
        capture_intermediates: bool | Callable[[nn.Module, str], bool] = False,
        **kwargs: Any,
    ) -> Any:
        """Calls a method of the Linen module.

        Args:
          *args: the method's arguments.
          rngs: keys for this call, as for `ToNNX`; by default the wrapper's own streams. A key is
            drawn only if the Linen module asks for it.
          method: a name or a function of the Linen module, `__call__` by default.
          mutable: the collections that this call may update in place, as for `ToNNX`. It has no
            effect during `lazy_init` and `init`, which create all variables.
          capture_intermediates: as for Linen's `apply`.
          **kwargs: the method's keyword arguments.

        Returns:
          The method's output, whatever `mutable` is.

        Raises:
          NotInitializedError: there are no variables yet.
          MismatchError: the inputs do not fit the variables.
          ImmutableCollectionError: the module writes to a collection that the call may not update.
          MissingRngError: the module asks for a stream that does not exist.
          InvalidMethodError: there is no such method.
          InvalidFilterError: `mutable` is not one of the forms listed above.
        """
        is_creating = CREATING.get() or is_initializing(self)
        call = (CreatingCall if is_creating else LinenCall)(
            self,
            method,
            args,
            kwargs,
            rngs=rngs,
            mutable=mutable,
            capture_intermediates=capture_intermediates,
        )
        try:
            output = call.run()
            call.commit()
        except Exception as error:
            explained = call.explained(error)
            if explained is None:
                raise
            raise explained from error
        return output

    def _graph_node_init(self, attributes: Iterable[tuple[str | int, Any]]) -> None:
        # Past a property of a subclass.
        vars(self).update({str(name): value for name, value in attributes})

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name[:2] == "__":
            return value
        if type(value) is HeldModule:
            return value.module
        is_tree, is_variable = type(value) is dict, isinstance(value, nnx.Variable)
        if (is_tree or is_variable) and hasattr(type(self), name):
            # A Linen name must not take a method of the wrapper away.
            return getattr(type(self), name).__get__(self)
        if is_tree and is_data_attribute(self, name):
            return LinenSubmodule(self, (name,))
        return value

    def __getattr__(self, name: str) -> Any:
        if name == "__signature__" and "to_nnx__module" in vars(self):
            return call_signature(type(self), self.to_nnx__module)
        if (
            "to_nnx__module" not in vars(self)
            or name.startswith(("__", OWN_PREFIX))
            or is_note(name)
        ):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if hasattr(type(self), name):
            # A property of a subclass raised; reading it again raises its own error.
            return super().__getattribute__(name)
        module = self.to_nnx__module
        if name in _train_eval.MODE_FIELDS:
            # Answered whatever the top module's fields are: a module further down may have the
            # field.
            return dict(self.to_nnx__modes).get(name, getattr(module, name, None))
        found = found_at(self, (), name)
        if found is not ABSENT:
            return found
        if name in ("module", "rngs"):
            warnings.warn(
                f"ToNNX.{name} is deprecated, use to_nnx__{name}", DeprecationWarning, stacklevel=2
            )
            return getattr(self, f"to_nnx__{name}")
        raise AttributeError(
            f"ToNNX({type(module).__name__}) has no variable, field or method {name!r}"
            + (
                ""
                if linen_attributes.held_variables(self)
                else "; bridge.lazy_init(model, *inputs) creates its variables"
            )
        )

    def __dir__(self) -> list[str]:
        known = part_names(bound_at(self, ())) or own_attributes(type(self.to_nnx__module))
        # Python's own methods are those of the wrapper.
        public = {name for name in known if not name.startswith("__")}
        return sorted({*super().__dir__(), *field_names(self.to_nnx__module), *public})

    def __setattr__(self, name: str, value: object) -> None:
        # The results of nnx.data and nnx.static say how to store them, so store them unchanged.
        is_marked, is_tree = (
            type(value) is dataclasses.Field,
            isinstance(value, dict | nnx.Variable),
        )
        is_linen = not is_marked and not linen_attributes.is_own_name(name)
        if is_linen and issubclass(type(value), list | tuple | Mapping):
            check_assigned(self, (), name, value)
            # It may belong to another model: share the Variables, but not the dict.
            value = as_dicts(value) if has_any(value, LinenSubmodule) else value
        if is_linen and is_tree:
            linen_attributes.report_hooks(self, value)
        # Linen variables may have the name of a mode; train() and eval() do not set them.
        is_mode = is_linen and not is_tree and name in _train_eval.MODE_FIELDS
        is_linen = is_linen and name not in vars(self)
        if (is_mode or (is_linen and name in _train_eval.TRAINING)) and (
            modes := _train_eval.with_mode(self.to_nnx__module, self.to_nnx__modes, name, value)
        ):
            self.to_nnx__modes = modes
            return
        if is_linen and name in field_names(self.to_nnx__module) and not nnx.has_data(value):
            updates: dict[str, Any] = {name: value}
            self.to_nnx__module: nn.Module = self.to_nnx__module.clone(**updates)
            return
        if not is_marked and not nnx.is_data(value) and nnx.has_data(value):
            value = nnx.data(value)
        if isinstance(value, nn.Module) and name == "to_nnx__module":
            value = HeldModule(value)
        super().__setattr__(name, value)
