"""One call of the Linen module in a ToNNX: what it is run with, and what is kept of it."""

# The annotations of Flax and JAX are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from flax import errors as flax_errors
from flax import linen as nn
from flax.core import DenyList, Scope

import registry
from bridge import _train_eval
from bridge._conversion import linen_attributes, linen_leaves
from bridge._conversion.collections import graphdefs_in, with_graphdefs
from bridge._conversion.linen_attributes import LinenHolder, name_of
from bridge._conversion.matching import compare, inputs_text
from bridge._conversion.neutral import Neutral, as_dicts
from bridge._errors import ImmutableCollectionError, InvalidMethodError, NotInitializedError
from bridge._flax import filters
from bridge._flax.linen_modules import unbound_function
from bridge._flax.objects import CAPTURES
from bridge._flax.scopes import CallKeys, ImmutableScopeError, run_linen
from bridge._flax.traces import live_inputs
from bridge._module_calls import mutable_around
from bridge._randomness.streams import sources
from bridge._sharding import eager, explicit_axes
from bridge._types import CollectionFilter, Rngs, Variables

from .parts import At

_NO_VARIABLES = (
    flax_errors.ScopeCollectionNotFound,
    flax_errors.ScopeParamNotFoundError,
    flax_errors.ScopeVariableNotFoundError,
)


class LinenCall:
    """A call that is prepared, run, and committed; nothing changes before it is committed.

    `method` is a name or a function of the Linen module, None for a call. `rngs` are keys for this
    call, None for the wrapper's streams. `mutable` are the collections that the call may update,
    None for what the wrapper says. `capture_intermediates` is as for Linen's `apply`.

    Raises:
      InvalidMethodError: there is no such method.
      InvalidFilterError: `mutable` is not a filter of collections.
      InvalidRngsError: `rngs` are not keys.
    """

    is_creating: ClassVar[bool] = False

    def __init__(
        self,
        wrapper: LinenHolder,
        method: Callable[..., Any] | str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        rngs: Rngs,
        mutable: CollectionFilter | None,
        capture_intermediates: bool | Callable[[nn.Module, str], bool],
    ):
        module = target = wrapper.to_nnx__module
        if isinstance(method, At):
            target = method.target or module
            kwargs = {**kwargs, **method.kwargs}
        self._wrapper = wrapper
        self._function = function_of(module, method)
        modes = dict(wrapper.to_nnx__modes)
        self._call = _train_eval.filled(module, target, self._function, args, kwargs, modes)
        self._held = linen_attributes.held_variables(wrapper)
        plain = wrapper.to_nnx__plain_keys if self.is_creating and rngs is None else ()
        given = wrapper.to_nnx__rngs if rngs is None else rngs
        self._keys = CallKeys(sources(given, name_of(wrapper)), plain)
        # What `nnx.capture` collects: a Variable by collection, which holds that as nested dicts.
        active = registry.current()
        captured = vars(wrapper).get(CAPTURES, ())
        self._captured = {active.name_from_type(v.var_type): v for v in captured}
        # Where the mesh has Explicit axes, Linen must not see the boxes: they constrain values.
        has_boxes = self.is_creating or any(entry.leaf.box for entry in self._held.values())
        self._is_boxed = not (has_boxes and explicit_axes.any_explicit())
        updated = self._mutable(mutable)
        if self._captured:
            updated = filters.union(updated, tuple(self._captured))
        self._run = functools.partial(
            run_linen,
            module,
            self._function,
            mutable=updated,
            initializing=self.is_creating,
            capture_intermediates=capture_intermediates,
            fields=self._call.fields,
            modes=self._call.modes,
            path=wrapper.to_nnx__path,
        )

    def run(self) -> Any:
        """Calls the Linen module, and returns its output."""
        call = self._call
        with _train_eval.applied(call.modes, self._wrapper):
            output, self._updates, self._used = self._run(
                self._variables(), self._keys, call.args, call.kwargs
            )
            if self._keys.are_folded and not self.is_creating:
                self._used = self._live_streams()
        return output

    def commit(self) -> None:
        """Puts what the call has changed into the wrapper, all of it or none.

        Raises TraceContextError if a Variable or a stream belongs to another trace.
        """
        if self._updates:
            changed = self._changed()
            # An empty collection in the output says that nothing was written.
            changed = {a: leaf for a, leaf in changed.items() if a[1] or a in self._held}
            self._store(changed, self._used, update=True)
        elif self._used:
            self._keys.commit(self._used)

    def _store(self, changed: Neutral, used: set[str], *, update: bool) -> None:
        linen_attributes.store(
            self._wrapper,
            changed,
            self._held,
            update=update,
            boxed=self._is_boxed,
            then=lambda: self._keys.commit(used),
        )
        if graphdefs := graphdefs_in(self._updates):
            self._wrapper.to_nnx__graphdefs = graphdefs

    def explained(self, error: Exception) -> Exception | None:
        """The error a user can act on, for what Flax raised; None if that says it all."""
        with _train_eval.applied(self._call.modes, self._wrapper):
            return self._explained(error)

    def _explained(self, error: Exception) -> Exception | None:
        where = name_of(self._wrapper)
        if isinstance(error, flax_errors.ModifyScopeVariableError):
            remedy = (
                "for this call with model(…, {mutable}), for good with ToNNX(…, {mutable}), or for"
                " training with model.train()"
                if mutable_around() is None
                else "at the Linen module around it: apply(…, {mutable})"
            )
            return ImmutableCollectionError(where, self._written_to(error), remedy, str(error))
        if isinstance(error, _NO_VARIABLES) and not self._held:
            kind = type(self._wrapper.to_nnx__module).__name__
            taken = f"ToNNX.from_variables({kind}(…), variables)"
            return NotInitializedError(where, f"take existing ones with {taken}")
        if isinstance(error, (*_NO_VARIABLES, flax_errors.ScopeParamShapeError)):
            expected = linen_leaves.from_variables(self._abstract())
            found = {address: entry.leaf.value for address, entry in self._held.items()}
            comparison = compare({a: leaf.value for a, leaf in expected.items()}, found)
            called = f"{where} called with {inputs_text(self._call.args)}"
            return None if comparison.fits else comparison.error(called)
        if self._is_eager and isinstance(error, ValueError) and self.is_creating:
            # Linen stops at the first annotation that it cannot follow.
            is_strict = self._wrapper.to_nnx__eager_sharding is True
            return explicit_axes.misfit(self._abstract(), where, strict=is_strict)
        return None

    def _abstract(self) -> Variables:
        """The abstract variables that these inputs would create, empty if the inputs do not fit."""
        inputs = (CallKeys({"params": jax.random.key(0)}), self._call.args, self._call.kwargs)
        mutable = DenyList("intermediates")

        def create() -> Variables:
            created = self._run({}, *inputs, mutable=mutable, initializing=True)[1]
            # What the call captures is among them, whatever `mutable` says.
            return {name: tree for name, tree in created.items() if name != "intermediates"}

        try:
            with jax.sharding.use_abstract_mesh(explicit_axes.NO_MESH):
                return jax.eval_shape(create)
        except Exception:
            # Flax's own error says why.
            return {}

    def _variables(self) -> dict[str, Any]:
        """The Linen variables that the call begins with; Linen appends to what was collected."""
        variables = linen_attributes.as_variables(self._held, boxed=self._is_boxed)
        variables.update({c: as_dicts(v.get_value()) for c, v in self._captured.items()})
        graphdefs = self._wrapper.to_nnx__graphdefs
        return with_graphdefs(variables, graphdefs) if graphdefs else variables

    def _live_streams(self) -> set[str]:
        """The streams that the output and the updates depend on."""

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

        def updates(mutable: CollectionFilter) -> Any:
            return self._run(*inputs, mutable=mutable)[1]

        scope = Scope({}, mutable=self._run.keywords["mutable"])
        for collection in sorted({name for name, _ in self._held}):
            if scope.is_mutable_collection(collection):
                continue
            try:
                jax.eval_shape(functools.partial(updates, DenyList(collection)))
            except flax_errors.ModifyScopeVariableError:
                return collection
            except Exception:
                return None
        return None

    def _changed(self) -> Neutral:
        """The leaves that the call has made, those that are new in their shards."""
        for collection, variable in self._captured.items():
            variable.set_value(as_dicts(self._updates.get(collection, {})))
        kept = {c: tree for c, tree in self._updates.items() if c not in self._captured}
        changed = linen_leaves.from_variables(kept)
        new = {a: leaf for a, leaf in changed.items() if a not in self._held}
        if not new:
            return changed
        option = self._wrapper.to_nnx__eager_sharding
        return {**changed, **eager.in_shards(new, option, name_of(self._wrapper))}

    @property
    def _is_eager(self) -> bool:
        return eager.is_eager(self._wrapper.to_nnx__eager_sharding)

    def _mutable(self, mutable: CollectionFilter | None) -> Any:
        """The filter of the call itself; else that of an outer Linen call; else the wrapper's."""
        if mutable is not None:
            mutable = filters.checked(mutable, f"a call of {name_of(self._wrapper)}")
        elif (outer := mutable_around()) is not None:
            mutable = outer
        else:
            mutable = self._wrapper.to_nnx__mutable
            if self._call.opens_state:
                mutable = False if mutable == "existing" else mutable
                mutable = filters.union(mutable, self._existing())
        return self._existing() or False if mutable == "existing" else mutable

    def _existing(self) -> tuple[str, ...]:
        return linen_attributes.state_collections(self._wrapper, self._held)


def function_of(module: nn.Module, method: Callable[..., Any] | str | None) -> Callable[..., Any]:
    """The unbound function to call, for what `Module.apply` accepts as `method`."""
    kind: Any = type(module)
    if method is None:
        return kind.__call__
    found = getattr(kind, method, None) if isinstance(method, str) else method
    if not callable(found):
        raise InvalidMethodError(kind, method, _method_names(module))
    return found if isinstance(method, str) else unbound_function(found)


def _method_names(module: nn.Module) -> set[str]:
    own = {n for n in dir(type(module)) if inspect.isfunction(getattr(type(module), n, None))}
    own -= set(dir(nn.Module)) | set(type(module).__dataclass_fields__)
    return {n for n in own if not n.startswith("_")} | {"__call__"}
