"""Runs a Linen module in a scope that draws keys when the module asks for them.

A wrapped Linen module draws from NNX streams. A key is drawn once in a call, and only if a module
asks for it, so a call that needs no randomness leaves every counter alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from typing import Any

import jax
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx
from flax.core import Scope

from bridge._errors import MissingRngError
from bridge._types import CollectionFilter

from .filters import union
from .linen_modules import capturing, outer_capture
from .traces import WITHOUT_INPUTS

DEFAULT = "default"
# The streams that Linen's own layers ask for, besides `params`.
_STANDARD = ("dropout",)


class CallKeys:
    """The keys that one call may draw, by Linen's stream names.

    A key is computed when it is looked up, and the stream moves on when the call is over, if the
    key was used: a lifted transform takes all keys along, whether its body needs them or not.

    A source `default` serves every stream without a source of its own. Each takes one draw, in the
    order in which they are first asked for, as in `nnx.Rngs`.

    A source is a key, or a stream to draw it from. Streams in `plain` give their own key instead of
    a key drawn from them. `names` are the streams that exist, and those of Linen's own layers that
    `default` serves.
    """

    def __init__(self, sources: Mapping[str, Any], plain: Collection[str] = ()):
        self._sources = dict(sources)
        self._plain = plain
        self._keys: dict[str, Any] = {}
        # By stream that `default` serves: which of its draws in this call.
        self._served: dict[str, int] = {}
        self.initializers = 0
        # The streams that initial values were drawn from.
        self.initial: set[str] = set()
        # Whether a transform has drawn a key from every stream, asked for or not.
        self.are_folded = False
        # Last, so that a lifted transform, which takes all along, draws for the others first.
        last = [DEFAULT] if DEFAULT in self._sources else []
        served = [name for name in _STANDARD if last and name not in self._sources]
        self.names = (*(name for name in self._sources if name != DEFAULT), *served, *last)

    # As a flag of a scope. `nn.jit` and `nn.fold_rngs` draw a key from each stream that there is,
    # and then keep the counters for the next call that looks alike, so the counters do not say what
    # was asked for. Both hash the flags of the module's scope, to tell whether they have compiled
    # this before; to them all keys are the same.
    def __hash__(self) -> int:
        self.are_folded = True
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallKeys)

    @property
    def drawn(self) -> dict[str, Any]:
        """The keys that were drawn from streams so far, by name."""
        default = self._sources.get(DEFAULT)
        return {
            name: key
            for name, key in self._keys.items()
            if isinstance(self._sources.get(name, default), nnx.RngStream)
        }

    def replaced(self, keys: Mapping[str, Any]) -> CallKeys:
        """The same streams with other keys, for the same call once more."""
        copy = CallKeys(self._sources, self._plain)
        copy._keys = {**self._keys, **keys}
        return copy

    def has(self, name: object) -> bool:
        """Whether there is a stream of this very name."""
        return name in self._sources

    def serves(self, name: object) -> bool:
        """Whether there is a key for this name, of its own or from `default`."""
        return name in self._sources or DEFAULT in self._sources

    def key(self, name: str) -> Any:
        """The key of a stream; the same one however often it is asked for."""
        if name not in self._keys:
            self._keys[name] = self._draw(name)
        return self._keys[name]

    def _draw(self, name: str) -> Any:
        source = self._sources.get(name)
        is_stream = isinstance(source, nnx.RngStream)
        if source is not None and not is_stream:
            return source
        if is_stream and name in self._plain:
            return source.key[...]
        if is_stream and name != DEFAULT:
            return jax.random.fold_in(source.key[...], source.count[...])
        nth = self._served.setdefault(name, len(self._served))
        default = self._sources[DEFAULT]
        if isinstance(default, nnx.RngStream):
            return jax.random.fold_in(default.key[...], default.count[...] + nth)
        return jax.random.fold_in(default, nth)

    def commit(self, used: Set[str]) -> None:
        """Advances the streams that were used, as drawing from them would have done.

        Raises TraceContextError if a stream belongs to another trace.
        """
        moves = dict.fromkeys(used - self._served.keys() - set(self._plain), 1)
        if served := used & self._served.keys():
            # A later draw may have been used where an earlier one was not, and no key may come
            # again.
            moves[DEFAULT] = max(self._served[name] + 1 for name in served)
        for name, count in moves.items():
            source = self._sources.get(name)
            if isinstance(source, nnx.RngStream):
                source.count[...] += count


class LazyKeys(Mapping[str, Any]):
    """What a Linen scope keeps as its `rngs`; a key is computed on look-up.

    Args:
      draws: the keys, common to all scopes of a call.
      rngs: what Flax has made for this scope of any other keys. Each is a pytree with the key as
        its leaf; the names that Linen folds into that key, all at once, are static.

    Attributes:
      unkeyed: one of those pytrees; None where there are no streams.
    """

    def __init__(self, draws: CallKeys, rngs: Mapping[str, Any]):
        self.draws = draws
        self.unkeyed = next(iter(rngs.values()), None)

    def copy(self) -> LazyKeys:
        """The same keys; Linen copies what it is about to replace."""
        return self

    def __getitem__(self, name: str) -> Any:
        if not self.draws.serves(name):
            raise KeyError(name)
        key = self.draws.key(name)
        return jax.tree.unflatten(jax.tree.structure(self.unkeyed), [key])

    def __contains__(self, name: object) -> bool:
        # As in Linen and in `nnx.Rngs`, a stream that another one stands in for is not there.
        return self.draws.has(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.draws.names)

    def __len__(self) -> int:
        return len(self.draws.names)


def used_streams(counters: Mapping[Any, Any]) -> set[str]:
    """The streams that were asked for a key, from the counters of a Linen scope and its children.

    A lifted transform shares the counters with its body, so they know more than the scope itself.
    """
    used: set[str] = set()
    for name, count in counters.items():
        if isinstance(count, Mapping):
            used |= used_streams(count)
        elif count:
            used.add(name)
    return used


class ImmutableScopeError(flax_errors.ModifyScopeVariableError):
    """Flax's error for a write to a collection that is not mutable, with the collection's name."""

    def __init__(self, collection: str, name: str, where: str):
        self.collection = collection
        super().__init__(collection, name, where)
        # Flax's text ends with a link that is made of the class's name.
        self.args = flax_errors.ModifyScopeVariableError(collection, name, where).args


class StreamScope(Scope):
    """A Linen scope that draws keys when a module asks for them.

    Flax's scope wants every key at the start and passes all of them to every child, which would
    advance each RNG stream in each call. The methods overridden here are public, and so are the
    attributes `rngs` and `rng_counters`. Flax makes the counters from the names only.
    """

    rngs: Any

    def make_rng(self, name: str = "params") -> Any:
        own = self.rngs
        draws = own.draws if isinstance(own, LazyKeys) else None
        if name not in own and not (draws is not None and draws.serves(name)):
            if "params" not in own:
                raise MissingRngError(
                    f"the Linen module at {self.path_text}",
                    [name],
                    own,
                    f"pass rngs= with a stream {name!r}, params or default to ToNNX or to the call",
                )
            name = "params"
        if draws is None:
            return super().make_rng(name)
        if draws.initializers:
            draws.initial.add(name)
        self.rng_counters.setdefault(name, 0)
        # Flax would turn to `params` for a stream that `default` serves.
        self.rngs = {name: own[name]}
        try:
            return super().make_rng(name)
        finally:
            self.rngs = own

    def put_variable(self, col: str, name: str, value: object) -> None:
        # Flax's own error keeps the collection only in its text.
        if not self.is_mutable_collection(col):
            raise ImmutableScopeError(col, name, self.path_text)
        super().put_variable(col, name, value)

    def push(self, name: str | None = None, prefix: str = "", reuse: bool = False) -> Scope:
        return self._drawing(super().push, name, prefix, reuse)

    def rewound(self, rewind_rngs: bool = False) -> Scope:
        return self._drawing(super().rewound, rewind_rngs)

    def _drawing(self, make: Callable[..., Scope], *args: object) -> Scope:
        """A scope that Flax makes of this one, with keys on demand: Flax would compute them all."""
        own = self.rngs
        if not isinstance(own, LazyKeys):
            # A lifted transform has put keys of its own in the place of these.
            return make(*args)
        self.rngs = dict.fromkeys(own.draws.names, own.unkeyed)
        try:
            made: Any = make(*args)
        finally:
            self.rngs = own
        made.__class__ = type(self)
        made.rngs = LazyKeys(own.draws, made.rngs)
        return made


class CreatingScope(StreamScope):
    """The scope of an initialisation; tells keys of initial values from those of a forward pass."""

    def param(
        self, name: str, init_fn: Callable[..., Any], *init_args: object, **options: Any
    ) -> Any:
        with WITHOUT_INPUTS.get()():
            return super().param(name, self._initializer(init_fn), *init_args, **options)

    def variable(
        self,
        col: str,
        name: str,
        init_fn: Callable[..., Any] | None = None,
        *init_args: object,
        **options: Any,
    ) -> Any:
        with WITHOUT_INPUTS.get()():
            return super().variable(col, name, self._initializer(init_fn), *init_args, **options)

    def _initializer(self, init_fn: Callable[..., Any] | None) -> Any:
        if init_fn is None or not isinstance(self.rngs, LazyKeys):
            return init_fn
        draws = self.rngs.draws

        def initialize(*args: object, **kwargs: object) -> Any:
            draws.initializers += 1
            try:
                return init_fn(*args, **kwargs)
            finally:
                draws.initializers -= 1

        return initialize


def undo_draws(scope: Scope | None, names: Iterable[str]) -> None:
    """Takes back the last draw from streams of a scope: the next one gives the same key again."""
    counters: dict[Any, Any] = scope.rng_counters if scope is not None else {}
    for name in names:
        counters[name] -= 1


def run_linen(
    module: nn.Module,
    function: Callable[..., Any],
    variables: dict[str, Any],
    draws: CallKeys,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    mutable: CollectionFilter,
    initializing: bool,
    capture_intermediates: bool | Callable[[nn.Module, str], bool],
    fields: Mapping[str, Any],
    modes: Mapping[str, Any],
    path: tuple[str, ...] = (),
) -> tuple[Any, Mapping[str, Any], set[str]]:
    """`module.apply`, or `module.init_with_output` if `initializing`, with keys drawn on demand.

    `nn.apply` and `flax.core.apply` make a scope of their own that holds every key, and neither can
    initialise a module with some of its variables.

    `function` is an unbound method. Linen writes into the nested dicts of `variables`. `fields` are
    other values for fields of the module. `modes` are what else the program depends on; `nn.jit`
    looks at a scope's flags, and not at interceptors, to tell whether it has compiled this before.
    `path` is where the module is in the outermost one.

    Returns the output, the variables of the mutable collections, and the RNG streams that were
    used. If the keys `are_folded` after the call, these streams say nothing.
    """
    if path and not capture_intermediates:
        # A part of the model around it, and of what that captures.
        capture_intermediates = outer_capture()
    if capture_intermediates:
        mutable = union(mutable, ["intermediates"])
    flags: dict[str, Any] = {"bridge_keys": draws}
    if initializing:
        flags["initializing"] = True
    if modes:
        flags["bridge_modes"] = tuple(sorted(modes.items()))
    kind = CreatingScope if initializing else StreamScope
    unkeyed: Any = dict.fromkeys(draws.names, 0)
    scope = kind(variables, unkeyed, mutable=mutable, flags=flags, path=path)
    scope.rngs = LazyKeys(draws, scope.rngs)
    counters = scope.rng_counters
    name = path[-1] if path else module.name
    # The name stack of the modules above, as Linen makes it.
    named = jax.named_scope("/".join(path[:-1])) if path[1:] else nullcontext()
    with scope.temporary(), capturing(capture_intermediates), named:
        # The caller's submodules stay as they are.
        bound = module.copy(parent=scope, name=name, **fields)
        output = function(bound, *args, **kwargs)
    updates = scope.mutable_variables() if mutable is not False else {}
    return output, updates, used_streams(counters)
