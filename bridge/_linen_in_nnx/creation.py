"""What initialising a Linen module makes, before any of it is put into a wrapper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from flax.core import DenyList

from bridge._conversion import linen_leaves
from bridge._conversion.arrays import Arrays
from bridge._conversion.collections import OUTPUTS
from bridge._conversion.linen_attributes import HeldVariable
from bridge._conversion.matching import compare, inputs_text
from bridge._conversion.neutral import Address, Leaf, laid_over
from bridge._conversion.own_leaves import graphdefs_in, with_graphdefs
from bridge._errors import MismatchError
from bridge._flax.call_keys import CallKeys
from bridge._sharding import explicit_axes


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


def shapes(module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The abstract variables that these inputs would create, None if they do not fit."""
    given = Arrays((args, kwargs))

    def run(*values: Any) -> Any:
        args, kwargs = given.tree(list(values))
        # Passed on by Linen's `init`, an argument could not be called `rngs` or `self`.
        return module.init(jax.random.key(0), method=lambda bound: function(bound, *args, **kwargs))

    try:
        with jax.sharding.use_abstract_mesh(explicit_axes.NO_MESH):
            return jax.eval_shape(run, *given.avals)
    except Exception:
        # The inputs do not fit the module; Flax's own error says why.
        return None


def mismatch(
    module: nn.Module,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    held: Mapping[Address, HeldVariable],
    where: str,
) -> MismatchError | None:
    """Every difference between the variables and what these inputs would create."""
    wanted = shapes(module, function, args, kwargs)
    if wanted is None:
        return None
    expected = {a: leaf.value for a, leaf in linen_leaves.from_variables(wanted).items()}
    comparison = compare(expected, {a: entry.leaf.value for a, entry in held.items()})
    if comparison.fits:
        return None
    return comparison.error(f"{where} called with {inputs_text(args)}")
