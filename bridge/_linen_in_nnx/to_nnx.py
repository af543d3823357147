"""`ToNNX`: a Linen module as an NNX module."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx
from flax.core import DenyList

from bridge import _train_eval
from bridge._conversion import linen_attributes, linen_leaves
from bridge._conversion.neutral import Neutral, Path, as_dicts
from bridge._conversion.own_leaves import graphdefs_in, with_graphdefs
from bridge._errors import ImmutableCollectionError, NotInitializedError
from bridge._flax.call_keys import CallKeys
from bridge._flax.filters import union
from bridge._flax.linen_modules import outer_mutable
from bridge._flax.objects import (
    graph_attributes,
    is_data_attribute,
    is_initializing,
    is_note,
    set_graph_attributes,
)
from bridge._flax.scopes import run_linen
from bridge._flax.tabulate import as_tabulated, tabulated_as
from bridge._initialization.lazy_init import lazy_init
from bridge._randomness.streams import owned, sources
from bridge._sharding import eager, explicit_axes

from . import captured, creation, mutable_filter
from .bound import bound_state
from .methods import called, check_module, field_names, linen_attribute
from .submodule import Submodule, assign_parts, has_submodules

_INIT_MUTABLE = DenyList("intermediates")
_NO_VARIABLES = (
    flax_errors.ScopeCollectionNotFound,
    flax_errors.ScopeParamNotFoundError,
    flax_errors.ScopeVariableNotFoundError,
)


class ToNNX(nnx.Module):
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
      module: a Linen module instance. One that was bound to variables, by `bind`, brings them and
        its keys along.
      rngs: where keys come from: an `nnx.Rngs`, which is forked, one key, or a dict of keys by
        stream name. With a key, `lazy_init(x)` gives bit for bit what `module.init(key, x)` gives.
      mutable: the collections that every call may update: names, True, a `DenyList`, or
        `'existing'` for the state collections that exist. By default none, as in Linen.
      eager_sharding: whether annotated variables are sharded over the mesh in force when they are
        created or taken in. By default they are if `nnx.using_eager_sharding()`, as native
        Variables; those whose names are no axes of the mesh are left as they are, and so are all
        without a mesh. True makes either an error.

    Raises:
      InvalidModuleError: `module` is no Linen module instance.
      InvalidRngsError: `rngs` is none of the above.
      InvalidFilterError: `mutable` is none of the above.
      ShardingError: later, if an annotation does not fit the mesh.

    Source: flax/nnx/bridge/wrappers.py:ToNNX @ 0.12.8
    """

    # What a wrapper leaves as it is stays on the class: NNX walks through every attribute of an
    # instance, at each `nnx.jit` for instance.
    to_nnx__rngs: nnx.Rngs | None = None
    to_nnx__plain_keys: frozenset[str] = frozenset()
    to_nnx__mutable: Any = False
    to_nnx__modes: tuple[tuple[str, Any], ...] = ()
    to_nnx__eager_sharding: bool | None = None
    # Collection `nnx` of the modules inside: static, so no Variables, but not to be made anew.
    to_nnx__graphdefs: tuple[tuple[Path, nnx.GraphDef[Any]], ...] = ()

    def __init__(
        self,
        module: nn.Module,
        rngs: Any = None,
        *,
        mutable: Any = False,
        eager_sharding: bool | None = None,
    ):
        check_module(module)
        bound = bound_state(module)
        module = bound.module
        self.to_nnx__module = module
        where = f"ToNNX({type(module).__name__})"
        streams, plain = owned(bound.keys if rngs is None else rngs, where)
        if streams is not None:
            self.to_nnx__rngs = streams
        if plain:
            self.to_nnx__plain_keys = plain
        if (mutable := mutable_filter.checked(mutable, where)) is not False:
            self.to_nnx__mutable = mutable
        if eager_sharding is not None:
            self.to_nnx__eager_sharding = eager_sharding
        if bound.variables:
            self._take_in(bound.variables)

    @classmethod
    def from_variables(
        cls, module: nn.Module, variables: Mapping[str, Any], rngs: Any = None, **options: Any
    ) -> Self:
        """A wrapper that holds existing Linen variables.

        Args:
          module: a Linen module instance.
          variables: `{collection: {name: array, box or mapping}}`, as `module.init` returns them.
          rngs: as for `ToNNX`.
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
        linen_leaves.check_variables(variables)
        wrapper = cls(bound_state(module).module, rngs, **options)
        wrapper._take_in(variables)
        return wrapper

    def _take_in(self, variables: Mapping[str, Any]) -> None:
        # From the host to the shards, without a whole copy on one device.
        leaves = self._in_shards(linen_leaves.from_variables(variables))
        linen_attributes.store(self, linen_attributes.as_arrays(leaves), {})
        if graphdefs := graphdefs_in(variables):
            self.to_nnx__graphdefs = graphdefs

    def set_view(
        self, deterministic: bool | None = None, use_running_average: bool | None = None
    ) -> None:
        """Sets the modes of this module; what `nnx.view` calls on its copy.

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

    def lazy_init(self, /, *args: Any, **kwargs: Any) -> Self:
        """`bridge.lazy_init` of this module."""
        return lazy_init(self, *args, **kwargs)

    def __call__(
        self,
        /,
        *args: Any,
        rngs: Any = None,
        method: Callable[..., Any] | str | None = None,
        mutable: Any = None,
        capture_intermediates: bool | Callable[[nn.Module, str], bool] = False,
        **kwargs: Any,
    ) -> Any:
        """Calls a method of the Linen module.

        Args:
          *args: the method's arguments.
          rngs: keys for this call, as for `ToNNX`; by default the wrapper's own streams. A key is
            drawn only if the Linen module asks for it.
          method: a name or a function of the Linen module, `__call__` by default.
          mutable: the collections that this call may update, in place; as for `ToNNX`. It limits
            nothing while `lazy_init` or `init` runs, which create all variables.
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
          InvalidFilterError: `mutable` is none of the above.
        """
        module = self.to_nnx__module
        initializing = is_initializing(self)
        function, target, kwargs = called(module, method, kwargs)
        call = _train_eval.filled(module, target, function, args, kwargs, dict(self.to_nnx__modes))
        held = linen_attributes.held_variables(self)
        draws = self._draws(rngs, initializing)
        captures = captured.active(self)
        mutable = (
            _INIT_MUTABLE
            if initializing
            else self._mutable_collections(mutable, held, call.opens_state)
        )
        run = functools.partial(
            run_linen,
            module,
            function,
            mutable=union(mutable, captures.collections) if captures.collections else mutable,
            initializing=initializing,
            capture_intermediates=capture_intermediates,
            fields=call.fields,
            modes=call.modes,
        )
        is_explicit = explicit_axes.any_explicit()
        variables = with_graphdefs(
            {**linen_attributes.to_linen(held, boxed=not is_explicit), **captures.variables()},
            self.to_nnx__graphdefs,
        )
        try:
            with _train_eval.applied(call.modes), tabulated_as(self):
                created = (
                    creation.created(
                        run, variables, draws, call.args, call.kwargs, eager=self._is_eager
                    )
                    if initializing and is_explicit
                    else None
                )
                output, updates, used = run(
                    created.variables if created else variables, draws, call.args, call.kwargs
                )
            if created:
                updates, used = created.updates, created.used
            changed = linen_leaves.from_variables(captures.take(updates))
            new = self._in_shards({a: leaf for a, leaf in changed.items() if a not in held})
            changed = {**changed, **new}
            if initializing:
                # What a forward pass draws besides is undone with its other effects.
                used &= draws.initial | {"params"} if changed.keys() - held.keys() else set()
            else:
                # An empty collection in the output says that nothing was written.
                changed = {a: leaf for a, leaf in changed.items() if a[1] or a in held}
            linen_attributes.store(
                self,
                changed,
                held,
                update=not initializing,
                whole={collection for collection, _ in changed},
                boxed=not is_explicit,
                then=lambda: draws.commit(used),
            )
            if graphdefs := graphdefs_in(updates):
                self.to_nnx__graphdefs = graphdefs
        except Exception as error:
            explained = self._explained(error, held, function, call)
            if explained is None:
                raise
            raise explained from error
        return output

    def _draws(self, rngs: Any, initializing: bool) -> CallKeys:
        if rngs is not None:
            return CallKeys(sources(rngs, self._where))
        plain = self.to_nnx__plain_keys if initializing else ()
        return CallKeys(sources(self.to_nnx__rngs, self._where), plain)

    @property
    def _is_eager(self) -> bool:
        return eager.is_eager(self.to_nnx__eager_sharding)

    def _in_shards(self, leaves: Neutral) -> Neutral:
        return eager.in_shards(leaves, self.to_nnx__eager_sharding, self._where)

    @property
    def _where(self) -> str:
        return f"ToNNX({type(self.to_nnx__module).__name__})"

    def _mutable_collections(self, mutable: Any, held: Mapping[Any, Any], opens_state: bool) -> Any:
        """The filter for a call: its own; else that of an outer Linen call; else the wrapper's."""
        existing = linen_attributes.state_collections(held)
        mutable = mutable_filter.checked(mutable, f"a call of {self._where}")
        if mutable is None and (outer := outer_mutable()) is not None:
            return outer
        if mutable is None:
            mutable = self.to_nnx__mutable
            if opens_state:
                mutable = union(existing if mutable == "existing" else mutable, existing)
        return existing or False if mutable == "existing" else mutable

    def _explained(
        self, error: Exception, held: Mapping[Any, Any], function: Any, call: _train_eval.Filled
    ) -> Exception | None:
        """The error a user can act on, for what Flax raised; None if that says it all."""
        module = self.to_nnx__module.clone(**call.fields)
        if isinstance(error, flax_errors.ModifyScopeVariableError):
            return ImmutableCollectionError.from_flax(module, error, outer_mutable() is not None)
        if isinstance(error, _NO_VARIABLES) and not held:
            return NotInitializedError(module)
        if isinstance(error, (*_NO_VARIABLES, flax_errors.ScopeParamShapeError)):
            with _train_eval.applied(call.modes):
                return creation.mismatch(
                    module, function, call.args, call.kwargs, held, self._where
                )
        if self._is_eager and isinstance(error, ValueError) and is_initializing(self):
            # Linen stops at the first annotation that it cannot follow.
            with _train_eval.applied(call.modes):
                wanted = creation.shapes(module, function, call.args, call.kwargs)
            return explicit_axes.misfit(
                wanted, self._where, strict=self.to_nnx__eager_sharding is True
            )
        return None

    def _graph_node_flatten(self) -> tuple[list[tuple[str, Any]], type[Self]]:
        return graph_attributes(self), type(self)

    def _graph_node_init(self, attributes: Iterable[tuple[str | int, Any]]) -> None:
        set_graph_attributes(self, attributes)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name[:2] == "__":
            return value
        is_tree = type(value) is dict
        if is_tree or isinstance(value, nnx.Variable):
            if hasattr(type(self), name):
                # A Linen name must not take a method of the wrapper away.
                return getattr(type(self), name).__get__(self)
            if is_tree and is_data_attribute(self, name):
                return Submodule(self, (name,))
        return value

    def __getattr__(self, name: str) -> Any:
        module = vars(self).get("to_nnx__module")
        is_own = name.startswith(("__", linen_attributes.OWN_PREFIX)) or is_note(name)
        if module is None or is_own:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if hasattr(type(self), name):
            # A property of a subclass has raised; asked again, it says why.
            return super().__getattribute__(name)
        if name in _train_eval.MODE_FIELDS:
            # Answered whatever the top module's fields are: a module further down may have the
            # field.
            return dict(self.to_nnx__modes).get(name, getattr(module, name, None))
        found = linen_attribute(self, module, name)
        if found is not None:
            return found.value
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
                else "; its variables are created by lazy_init"
            )
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Submodule):
            # One of another model, perhaps; the Variables are shared, and the dict is not.
            value = value.copy()
        elif isinstance(value, list | tuple | Mapping) and not linen_attributes.is_own_name(name):
            if assign_parts(self, (), name, value):
                return
            value = as_dicts(value) if has_submodules(value) else value
        # What nnx.data and nnx.static return says how to store it, so it is meant as it is.
        is_marked = isinstance(value, dataclasses.Field)
        is_linen = not is_marked and not linen_attributes.is_own_name(name)
        is_tree = isinstance(value, dict | nnx.Variable)
        # Linen variables may have the name of a mode; they are no answer to train() and eval().
        is_mode = is_linen and not is_tree and name in _train_eval.MODE_FIELDS
        is_linen = is_linen and name not in vars(self)
        is_linen = is_linen and name not in ("name", "parent")
        if (is_mode or (is_linen and name in _train_eval.TRAINING)) and (
            modes := _train_eval.with_mode(self.to_nnx__module, self.to_nnx__modes, name, value)
        ):
            self.to_nnx__modes = modes
            return
        if is_linen and name in field_names(self.to_nnx__module) and not nnx.has_data(value):
            updates: dict[str, Any] = {name: value}
            self.to_nnx__module = self.to_nnx__module.clone(**updates)
            return
        if not is_marked and not nnx.is_data(value) and nnx.has_data(value):
            value = nnx.data(value)
        super().__setattr__(name, as_tabulated(name, value))
