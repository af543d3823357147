"""A call of the Linen module in a ToNNX that creates variables, as `init` does."""

# The annotations of Flax and JAX are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import jax
from flax import nnx
from flax.core import DenyList

import registry
from bridge import _train_eval
from bridge._conversion import linen_attributes, linen_leaves
from bridge._conversion.collections import OUTPUTS, graphdefs_in, holds_state, with_graphdefs
from bridge._conversion.neutral import Leaf, laid_over
from bridge._flax.scopes import CallKeys
from bridge._initialization.creating import CREATING
from bridge._sharding import explicit_axes

from .linen_call import LinenCall

# The collections that the ToNNX further down only sow into, in the initialisation of one around
# them: one in an NNX module in a Linen module leaves no trace in that one's variables.
_sown_below: ContextVar[set[str] | None] = ContextVar("sown", default=None)


class CreatingCall(LinenCall):
    """A `LinenCall` that creates missing variables, whatever `mutable` says.

    With `creating_variables` it also replaces those that exist.
    """

    is_creating = True

    def run(self) -> Any:
        self._sown_below: set[str] = set()
        token = _sown_below.set(self._sown_below)
        try:
            if self._is_boxed:
                return super().run()
            call = self._call
            with _train_eval.applied(call.modes, self._wrapper):
                try:
                    variables = self._created_in_auto_axes()
                except Exception:
                    # The module may hold an array of the mesh, which fits the Explicit axes alone.
                    with suppress(Exception):
                        return super().run()
                    raise
                return self._run(variables, self._keys, call.args, call.kwargs)[0]
        finally:
            _sown_below.reset(token)

    def _created_in_auto_axes(self) -> dict[str, Any]:
        """All variables, bare; what the call creates is made with all axes Auto.

        Linen knows no other axes. The variables are in their annotated shards if sharding is eager,
        and replicated if it is not.
        """
        used: set[str] = set()

        def init(
            variables: dict[str, Any],
            keys: Mapping[str, Any],
            args: tuple[Any, ...],
            kwargs: Mapping[str, Any],
        ) -> Any:
            inner = CallKeys(keys)
            _, updates, streams = self._run(variables, inner, args, kwargs)
            used.update(streams)
            self._keys.initial |= inner.initial
            return updates

        variables = self._variables()
        keys = {name: self._keys.key(name) for name in self._keys.names}
        inputs = (variables, keys, self._call.args, self._call.kwargs)
        updates = explicit_axes.init_in_auto_axes(init, *inputs, eager=self._is_eager)
        self._updates, self._used = updates, used
        bare = {
            address: Leaf(leaf.value)
            for tree in (variables, updates)
            for address, leaf in linen_leaves.from_variables(tree).items()
        }
        graphdefs = graphdefs_in(laid_over(variables, updates))
        return with_graphdefs(linen_leaves.to_variables(bare), graphdefs)

    def commit(self) -> None:
        changed = self._changed()
        made = {collection for collection, path in changed if path} | self._sown_below
        # What holds no arrays says something of the model, such as the axes of parameters.
        sown = self._sown({a[0] for a, leaf in changed.items() if jax.tree.leaves(leaf.value)})
        if (around := _sown_below.get()) is not None:
            around |= sown | self._sown_below
        changed = {a: leaf for a, leaf in changed.items() if a[0] not in sown}
        # Other draws of the forward pass are undone with its other effects.
        is_new = bool(changed.keys() - self._held.keys())
        used: set[str] = self._used & (self._keys.initial | {"params"}) if is_new else set()
        self._store(changed, used, update=CREATING.get())
        linen_attributes.note_collections(self._wrapper, made)

    def _mutable(self, mutable: object) -> Any:
        return DenyList("intermediates")

    def _sown(self, made: set[str]) -> set[str]:
        """The collections that an initialisation has only sown into: outputs, and no state."""
        candidates = set(filter(_may_be_sown, made)) - {collection for collection, _ in self._held}
        with (
            _train_eval.applied(self._call.modes, self._wrapper),
            jax.sharding.use_abstract_mesh(explicit_axes.NO_MESH),
        ):
            return set(filter(self._does_without, candidates))

    def _does_without(self, collection: str) -> bool:
        """Whether an initialisation runs without a collection, as with one that it only sows into.

        If the collection is not mutable, `sow` stores nothing, and everything else that makes a
        variable raises. Nothing is computed.
        """

        def init() -> None:
            inputs = (self._call.args, self._call.kwargs)
            mutable = DenyList((collection, *OUTPUTS))
            self._run(self._variables(), self._keys.replaced({}), *inputs, mutable=mutable)

        try:
            jax.eval_shape(init)
        except Exception:
            return False
        return True


def _may_be_sown(collection: str) -> bool:
    """Whether a collection may hold outputs: the streams of an NNX module inside are state."""
    variable_type = registry.variable_type_from_name(collection, create=True)
    return holds_state(collection) and not issubclass(variable_type, nnx.RngState)
