"""One call of the Linen module in a ToNNX: what it is run with, and what is kept of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx
from flax.core import DenyList, Scope

import registry
from bridge import _train_eval
from bridge._conversion import linen_attributes, linen_leaves
from bridge._conversion.collections import holds_state
from bridge._conversion.linen_holder import LinenHolder, name_of
from bridge._conversion.neutral import Neutral
from bridge._conversion.own_leaves import graphdefs_in, with_graphdefs
from bridge._errors import ImmutableCollectionError, NotInitializedError
from bridge._flax.call_keys import CallKeys
from bridge._flax.filters import union
from bridge._flax.objects import is_initializing
from bridge._flax.scopes import ImmutableScopeError, run_linen
from bridge._flax.tabulate import tabulated_as
from bridge._initialization.creating import is_creating_variables
from bridge._module_calls.calls import mutable_around
from bridge._randomness.live_inputs import live_inputs
from bridge._randomness.streams import sources
from bridge._sharding import eager, explicit_axes

from . import captured, creation, mutable_filter
from .methods import called

_INIT_MUTABLE = DenyList("intermediates")
_NO_VARIABLES = (
    flax_errors.ScopeCollectionNotFound,
    flax_errors.ScopeParamNotFoundError,
    flax_errors.ScopeVariableNotFoundError,
)


def _may_be_sown(collection: str) -> bool:
    """Whether a collection may hold outputs: the streams of an NNX module inside are state."""
    variable_type = registry.variable_type_from_name(collection, create=True)
    return holds_state(collection) and not issubclass(variable_type, nnx.RngState)


class LinenCall:
    """A call that is prepared, run, and committed; nothing changes before it is committed.

    Args:
      wrapper: the ToNNX.
      method: a name or a function of the Linen module, None for a call.
      args: the method's positional arguments.
      kwargs: the method's keyword arguments.
      rngs: keys for this call, None for the wrapper's streams.
      mutable: the collections that the call may update, None for what the wrapper says.
      capture_intermediates: as for Linen's `apply`.

    Raises:
      InvalidMethodError: there is no such method.
      InvalidFilterError: `mutable` is no filter of collections.
      InvalidRngsError: `rngs` are no keys.
    """

    def __init__(
        self,
        wrapper: LinenHolder,
        method: Callable[..., Any] | str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        rngs: Any,
        mutable: Any,
        capture_intermediates: bool | Callable[[nn.Module, str], bool],
    ):
        module = wrapper.to_nnx__module
        self._wrapper = wrapper
        # Beside variables that exist, if that was asked for.
        self._replaces = is_creating_variables()
        self._initializing = self._replaces or is_initializing(wrapper)
        self._function, target, kwargs = called(module, method, kwargs)
        modes = dict(wrapper.to_nnx__modes)
        self._call = _train_eval.filled(module, target, self._function, args, kwargs, modes)
        self._held = linen_attributes.held_variables(wrapper)
        self._keys = self._call_keys(rngs)
        self._captures = captured.active(wrapper)
        # Where the mesh has Explicit axes, Linen must not see the boxes: they constrain values.
        self._is_boxed = not explicit_axes.any_explicit()
        self._run = functools.partial(
            run_linen,
            module,
            self._function,
            mutable=self._mutable(mutable),
            initializing=self._initializing,
            capture_intermediates=capture_intermediates,
            fields=self._call.fields,
            modes=self._call.modes,
            path=wrapper.to_nnx__path,
        )

    def run(self) -> Any:
        """Calls the Linen module, and returns its output."""
        if not self._initializing:
            return self._output()
        with creation.noting_sown() as self._sown_below:
            return self._output()

    def _output(self) -> Any:
        call = self._call
        variables = self._variables()
        with _train_eval.applied(call.modes), tabulated_as(self._wrapper):
            if not self._initializing or self._is_boxed:
                output, self._updates, self._used = self._run(
                    variables, self._keys, call.args, call.kwargs
                )
                if self._keys.are_folded and not self._initializing:
                    self._used = self._live_streams()
                return output
            created = creation.created(
                self._run, variables, self._keys, call.args, call.kwargs, eager=self._is_eager
            )
            output, _, _ = self._run(created.variables, self._keys, call.args, call.kwargs)
        self._updates, self._used = created.updates, created.used
        return output

    def commit(self) -> None:
        """Puts what the call has changed into the wrapper, all of it or none.

        Raises:
          TraceContextError: a Variable or a stream belongs to another trace.
        """
        changed, used = self._changed(), self._used
        made: set[str] = set()
        if self._initializing:
            made = {collection for collection, path in changed if path}
            # What holds no arrays says something of the model, such as the axes of parameters.
            sown = self._sown({a[0] for a, leaf in changed.items() if jax.tree.leaves(leaf.value)})
            made |= self._sown_below
            creation.note_sown(sown | self._sown_below)
            changed = {a: leaf for a, leaf in changed.items() if a[0] not in sown}
            # Other draws of the forward pass are undone with its other effects.
            is_new = bool(changed.keys() - self._held.keys())
            used = used & (self._keys.initial | {"params"}) if is_new else set()
        else:
            # An empty collection in the output says that nothing was written.
            changed = {a: leaf for a, leaf in changed.items() if a[1] or a in self._held}
        linen_attributes.store(
            self._wrapper,
            changed,
            self._held,
            update=self._replaces or not self._initializing,
            whole={collection for collection, _ in changed},
            boxed=self._is_boxed,
            then=lambda: self._keys.commit(used),
        )
        linen_attributes.note_collections(self._wrapper, made)
        if graphdefs := graphdefs_in(self._updates):
            self._wrapper.to_nnx__graphdefs = graphdefs

    def explained(self, error: Exception) -> Exception | None:
        """The error a user can act on, for what Flax raised; None if that says it all."""
        call, where = self._call, name_of(self._wrapper)
        module = self._wrapper.to_nnx__module.clone(**call.fields)
        if isinstance(error, flax_errors.ModifyScopeVariableError):
            found = self._written_to(error)
            return ImmutableCollectionError(
                module, found, str(error), inside_linen=mutable_around() is not None
            )
        if isinstance(error, _NO_VARIABLES) and not self._held:
            return NotInitializedError(module)
        inputs = (module, self._function, call.args, call.kwargs)
        if isinstance(error, (*_NO_VARIABLES, flax_errors.ScopeParamShapeError)):
            with _train_eval.applied(call.modes):
                return creation.mismatch(*inputs, self._held, where)
        if self._is_eager and isinstance(error, ValueError) and self._initializing:
            # Linen stops at the first annotation that it cannot follow.
            with _train_eval.applied(call.modes):
                wanted = creation.shapes(*inputs)
            is_strict = self._wrapper.to_nnx__eager_sharding is True
            return explicit_axes.misfit(wanted, where, strict=is_strict)
        return None

    def _variables(self) -> dict[str, Any]:
        """The Linen variables that the call begins with."""
        bare = linen_attributes.as_variables(self._held, boxed=self._is_boxed)
        return with_graphdefs(
            {**bare, **self._captures.variables()}, self._wrapper.to_nnx__graphdefs
        )

    def _sown(self, made: set[str]) -> set[str]:
        """The collections that an initialisation has only sown into: outputs, and no state."""
        candidates = set(filter(_may_be_sown, made)) - {collection for collection, _ in self._held}
        inputs = (self._call.args, self._call.kwargs)
        with _train_eval.applied(self._call.modes):
            return {
                collection
                for collection in candidates
                if creation.does_without(
                    self._run, collection, self._variables(), self._keys.replaced({}), *inputs
                )
            }

    def _live_streams(self) -> set[str]:
        """The streams whose keys the output and the updates depend on."""

        def outcome(keys: dict[str, Any]) -> Any:
            draws = self._keys.replaced(keys)
            return self._run(self._variables(), draws, self._call.args, self._call.kwargs)[:2]

        drawn = self._keys.drawn
        return live_inputs(outcome, drawn) if drawn else set()

    def _written_to(self, error: Exception) -> str | None:
        """The collection that the module writes to, although it is not mutable."""
        if isinstance(error, ImmutableScopeError):
            return error.collection
        # The scopes of lifted transforms are Flax's. So we look for a collection which alone is
        # enough to make the call fail.
        inputs = (self._variables(), self._keys, self._call.args, self._call.kwargs)
        scope = Scope({}, mutable=self._run.keywords["mutable"])
        for collection in sorted({name for name, _ in self._held}):
            if scope.is_mutable_collection(collection):
                continue
            run = functools.partial(self._run, mutable=DenyList(collection))
            try:
                with _train_eval.applied(self._call.modes):
                    jax.eval_shape(lambda run=run: run(*inputs)[1])
            except flax_errors.ModifyScopeVariableError:
                return collection
            except Exception:
                return None
        return None

    def _changed(self) -> Neutral:
        """The leaves that the call has made, those that are new in their shards."""
        changed = linen_leaves.from_variables(self._captures.take(self._updates))
        new = {a: leaf for a, leaf in changed.items() if a not in self._held}
        option = self._wrapper.to_nnx__eager_sharding
        return {**changed, **eager.in_shards(new, option, name_of(self._wrapper))}

    @property
    def _is_eager(self) -> bool:
        return eager.is_eager(self._wrapper.to_nnx__eager_sharding)

    def _call_keys(self, rngs: Any) -> CallKeys:
        wrapper = self._wrapper
        if rngs is not None:
            return CallKeys(sources(rngs, name_of(wrapper)))
        plain = wrapper.to_nnx__plain_keys if self._initializing else ()
        return CallKeys(sources(wrapper.to_nnx__rngs, name_of(wrapper)), plain)

    def _mutable(self, mutable: Any) -> Any:
        """The filter for this call, and what `nnx.capture` collects."""
        captured_ones = self._captures.collections
        found = _INIT_MUTABLE if self._initializing else self._mutable_state(mutable)
        return union(found, captured_ones) if captured_ones else found

    def _mutable_state(self, mutable: Any) -> Any:
        """The filter of the call itself; else that of an outer Linen call; else the wrapper's."""
        existing = linen_attributes.state_collections(self._wrapper, self._held)
        mutable = mutable_filter.checked(mutable, f"a call of {name_of(self._wrapper)}")
        if mutable is None and (outer := mutable_around()) is not None:
            return outer
        if mutable is None:
            mutable = self._wrapper.to_nnx__mutable
            if self._call.opens_state:
                mutable = union(existing if mutable == "existing" else mutable, existing)
        return existing or False if mutable == "existing" else mutable
