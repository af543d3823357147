"""A call of the Linen module in a ToNNX that creates variables, as `init` does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.core import DenyList

import registry
from bridge import _train_eval
from bridge._conversion import linen_attributes, linen_leaves
from bridge._conversion.collections import OUTPUTS, holds_state
from bridge._conversion.neutral import Leaf, laid_over
from bridge._conversion.own_leaves import graphdefs_in, with_graphdefs
from bridge._flax.scopes import CallKeys
from bridge._initialization.creating import CREATING
from bridge._sharding import explicit_axes

from .linen_call import LinenCall


class CreatingCall(LinenCall):
    """A `LinenCall` that creates the variables that are not there, whatever `mutable` says.

    With `creating_variables` it replaces those that are, too.
    """

    is_creating = True

    def run(self) -> Any:
        with noting_sown() as self._sown_below:
            if self._is_boxed:
                return super().run()
            call = self._call
            with _train_eval.applied(call.modes, self._wrapper):
                made = created(
                    self._run,
                    self._variables(),
                    self._keys,
                    call.args,
                    call.kwargs,
                    eager=self._is_eager,
                )
                output, _, _ = self._run(made.variables, self._keys, call.args, call.kwargs)
            self._updates, self._used = made.updates, made.used
            return output

    def commit(self) -> None:
        changed = self._changed()
        made = {collection for collection, path in changed if path} | self._sown_below
        # What holds no arrays says something of the model, such as the axes of parameters.
        sown = self._sown({a[0] for a, leaf in changed.items() if jax.tree.leaves(leaf.value)})
        note_sown(sown | self._sown_below)
        changed = {a: leaf for a, leaf in changed.items() if a[0] not in sown}
        # Other draws of the forward pass are undone with its other effects.
        is_new = bool(changed.keys() - self._held.keys())
        used = self._used & (self._keys.initial | {"params"}) if is_new else set()
        self._store(changed, used, update=CREATING.get())
        linen_attributes.note_collections(self._wrapper, made)

    def _mutable(self, mutable: Any) -> Any:
        return DenyList("intermediates")

    def _sown(self, made: set[str]) -> set[str]:
        """The collections that an initialisation has only sown into: outputs, and no state."""
        candidates = set(filter(_may_be_sown, made)) - {collection for collection, _ in self._held}
        inputs = (self._call.args, self._call.kwargs)
        with _train_eval.applied(self._call.modes, self._wrapper):
            return {
                collection
                for collection in candidates
                if does_without(
                    self._run, collection, self._variables(), self._keys.replaced({}), *inputs
                )
            }


def _may_be_sown(collection: str) -> bool:
    """Whether a collection may hold outputs: the streams of an NNX module inside are state."""
    variable_type = registry.variable_type_from_name(collection, create=True)
    return holds_state(collection) and not issubclass(variable_type, nnx.RngState)


class Created(NamedTuple):
    """What an initialisation where the mesh has Explicit axes has made.

    Attributes:
      variables: all Linen variables, bare, for the call itself.
      updates: those of the mutable collections, in their boxes.
      used: the RNG streams that were used.
    """

    variables: dict[str, Any]
    updates: Mapping[str, Any]
    used: set[str]


def created(
    run: Callable[..., Any],
    variables: Mapping[str, Any],
    draws: CallKeys,
    args: Any,
    kwargs: Any,
    *,
    eager: bool,
) -> Created:
    """The variables that a call creates, made with all axes Auto: Linen knows no others.

    They are in their annotated shards if `eager`, and else replicated.
    """
    used: set[str] = set()

    def init(variables: Any, keys: Any, args: Any, kwargs: Any) -> Any:
        inner = CallKeys(keys)
        _, updates, streams = run(variables, inner, args, kwargs)
        used.update(streams)
        draws.initial |= inner.initial
        return updates

    keys = {name: draws.key(name) for name in draws.names}
    updates = explicit_axes.init_in_auto_axes(init, variables, keys, args, kwargs, eager=eager)
    bare = {
        address: Leaf(leaf.value)
        for tree in (variables, updates)
        for address, leaf in linen_leaves.from_variables(tree).items()
    }
    graphdefs = graphdefs_in(laid_over(variables, updates))
    return Created(with_graphdefs(linen_leaves.to_variables(bare), graphdefs), updates, used)


_sown: ContextVar[set[str] | None] = ContextVar("sown", default=None)


@contextlib.contextmanager
def noting_sown() -> Iterator[set[str]]:
    """Yields the collections that the ToNNX in this block only sow into, further down.

    Such a ToNNX in an NNX module in a Linen module leaves no trace in that one's variables.
    """
    found: set[str] = set()
    token = _sown.set(found)
    try:
        yield found
    finally:
        _sown.reset(token)


def note_sown(collections: set[str]) -> None:
    """Tells the ToNNX around this one which collections it only sows into."""
    around = _sown.get()
    if around is not None:
        around |= collections


def does_without(
    run: Callable[..., Any],
    collection: str,
    variables: Mapping[str, Any],
    draws: CallKeys,
    args: Any,
    kwargs: Any,
) -> bool:
    """Whether an initialisation gets by without a collection, as it does with one that it sows.

    Where the collection is not mutable, `sow` stores nothing, and whatever else makes a variable
    raises. Nothing is computed.
    """

    def init() -> None:
        run(variables, draws, args, kwargs, mutable=DenyList((collection, *OUTPUTS)))

    try:
        with jax.sharding.use_abstract_mesh(explicit_axes.NO_MESH):
            jax.eval_shape(init)
    except Exception:
        return False
    return True
