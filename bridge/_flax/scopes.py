"""A Linen scope that draws keys on demand, and a Linen module run in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from flax import errors as flax_errors
from flax import linen as nn
from flax.core import Scope

from bridge._errors import MissingRngError

from .call_keys import CallKeys, LazyKeys, used_streams
from .filters import union
from .interceptors import call_method
from .linen_modules import capturing, outer_capture
from .promises import required


class ImmutableScopeError(flax_errors.ModifyScopeVariableError):
    """Flax's error for a write to a collection that is not mutable, with the collection.

    Attributes:
      collection: the collection's name.
    """

    def __init__(self, collection: str, name: str, where: str):
        self.collection = collection
        super().__init__(collection, name, where)


class StreamScope(Scope):
    """A Linen scope whose keys are drawn when a module asks for them.

    Flax's scope wants every key at the start and hands all of them to every child, which would
    advance each RNG stream in each call. What is overridden here is public, and so are the
    attributes `rngs` and `rng_counters`.
    """

    rngs: Any

    def __init__(self, variables: Any, streams: LazyKeys, counters: dict[Any, Any], **options: Any):
        super().__init__(variables, **options)
        self.rng_counters = counters
        self._draw_from(streams)

    def _draw_from(self, streams: LazyKeys) -> None:
        # The stream that a key is being drawn from.
        self._drawn: str | None = None
        self.rngs = streams
        for name in streams:
            self.rng_counters.setdefault(name, 0)

    def has_rng(self, name: str) -> bool:
        # Flax would turn to `params` for a stream that `default` serves.
        return name == self._drawn or super().has_rng(name)

    def make_rng(self, name: str = "params") -> Any:
        draws = self.rngs.draws if isinstance(self.rngs, LazyKeys) else None
        is_served = draws is not None and draws.serves(name)
        if not is_served and not self.has_rng(name):
            if not self.has_rng("params"):
                raise MissingRngError(
                    f"the Linen module at {self.path_text}",
                    [name],
                    self.rngs,
                    f"pass rngs= with a stream {name!r}, params or default to ToNNX or to the call",
                )
            name = "params"
        if draws is not None and draws.initializers:
            draws.initial.add(name)
        self.rng_counters.setdefault(name, 0)
        self._drawn = name
        try:
            return super().make_rng(name)
        finally:
            self._drawn = None

    def param(self, name: str, init_fn: Any, *init_args: Any, **options: Any) -> Any:
        return super().param(name, self._initializer(init_fn), *init_args, **options)

    def variable(
        self, col: str, name: str, init_fn: Any = None, *init_args: Any, **options: Any
    ) -> Any:
        return super().variable(col, name, self._initializer(init_fn), *init_args, **options)

    def put_variable(self, col: str, name: str, value: Any) -> None:
        # Flax's own error keeps the collection only in its text.
        if not self.is_mutable_collection(col):
            raise ImmutableScopeError(col, name, self.path_text)
        super().put_variable(col, name, value)

    def _initializer(self, init_fn: Any) -> Any:
        """Tells keys of initial values from those that a forward pass draws."""
        if init_fn is None or not isinstance(self.rngs, LazyKeys):
            return init_fn
        draws = self.rngs.draws

        def initialize(*args: Any, **kwargs: Any) -> Any:
            draws.initializers += 1
            try:
                return init_fn(*args, **kwargs)
            finally:
                draws.initializers -= 1

        return initialize

    def push(self, name: str | None = None, prefix: str = "", reuse: bool = False) -> Scope:
        if not isinstance(self.rngs, LazyKeys):
            # A lifted transform has put keys of its own in the place of these.
            return super().push(name, prefix, reuse)
        child = self._without_keys(lambda: super(StreamScope, self).push(name, prefix, reuse))
        return _drawing(child, self.rngs.below(child.name))

    def rewound(self, rewind_rngs: bool = False) -> Scope:
        if not isinstance(self.rngs, LazyKeys):
            return super().rewound(rewind_rngs)
        plain = self._without_keys(lambda: super(StreamScope, self).rewound(rewind_rngs))
        return _drawing(plain, self.rngs)

    def _without_keys(self, make: Callable[[], Scope]) -> Scope:
        """Flax would compute all keys to pass them on."""
        own, self.rngs = self.rngs, {}
        try:
            return make()
        finally:
            self.rngs = own


def _drawing(made: Any, streams: LazyKeys) -> StreamScope:
    """The scope that Flax has just made, with keys on demand."""
    made.__class__ = StreamScope
    made._draw_from(streams)
    return made


class _FoldNote:
    """A flag of a scope that notes whether `nn.jit` or `nn.fold_rngs` ran in it, or below.

    Both draw a key from each stream that there is, and then keep the counters for the next call
    that looks alike, so the counters do not say what was asked for. Both hash the flags of the
    module's scope, to tell whether they have compiled this before. All notes have one hash.
    """

    def __init__(self, draws: CallKeys):
        self._draws = draws

    def __hash__(self) -> int:
        self._draws.are_folded = True
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _FoldNote)


def undo_draws(scope: Scope | None, names: Iterable[str]) -> None:
    """Takes back the last draw from streams of a scope: the next one gives the same key again."""
    counters: dict[Any, Any] = scope.rng_counters if scope is not None else {}
    for name in names:
        counters[name] -= 1


def _named(path: tuple[str, ...]) -> AbstractContextManager[object]:
    """The name stack of a path, as Linen makes it of the modules above."""
    return jax.named_scope("/".join(path)) if path else nullcontext()


def _has_deep_clone() -> bool:
    """A clone has submodules of its own if it is to be deep."""
    parameters = inspect.signature(nn.Module.clone).parameters
    return "_deep_clone" in parameters and "parent" in parameters


@required("flax.linen.Module.clone with _deep_clone", _has_deep_clone)
def run_linen(
    module: nn.Module,
    function: Callable[..., Any],
    variables: dict[str, Any],
    draws: CallKeys,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    mutable: Any,
    initializing: bool,
    capture_intermediates: Any,
    fields: Mapping[str, Any],
    modes: Mapping[str, Any],
    path: tuple[str, ...] = (),
) -> tuple[Any, Mapping[str, Any], set[str]]:
    """`module.apply`, or `module.init_with_output` if `initializing`, with keys drawn on demand.

    `nn.apply` and `flax.core.apply` make a scope of their own that holds every key, and neither can
    initialise a module some of whose variables exist.

    Args:
      module: the Linen module.
      function: its unbound method.
      variables: nested dicts, which Linen writes into.
      draws: where keys come from.
      args: the method's positional arguments.
      kwargs: the method's keyword arguments.
      mutable: the collections that may be updated.
      initializing: whether variables are created.
      capture_intermediates: as for `apply`.
      fields: other values for fields of the module.
      modes: what else the program depends on; `nn.jit` looks at a scope's flags, and not at
        interceptors, to tell whether it has compiled this before.
      path: where the module is in the outermost one.

    Returns:
      (output, variables of the mutable collections, RNG streams that were used). If the keys
      `are_folded` after the call, these streams say nothing.
    """
    if path and not capture_intermediates:
        # A part of the model around it, and of what that captures.
        capture_intermediates = outer_capture()
    if capture_intermediates:
        mutable = union(mutable, "intermediates")
    flags: dict[str, Any] = {"bridge_folds": _FoldNote(draws)}
    if initializing:
        flags["initializing"] = True
    if modes:
        flags["bridge_modes"] = tuple(sorted(modes.items()))
    counters: dict[Any, Any] = {}
    scope = StreamScope(
        variables, LazyKeys(draws), counters, mutable=mutable, flags=flags, path=path
    )
    own: dict[str, Any] = {"name": path[-1]} if path else {}
    with scope.temporary(), capturing(capture_intermediates), _named(path[:-1]):
        bound = module.clone(parent=scope, _deep_clone=True, **own, **fields)
        output = call_method(function, bound, args, kwargs)
    updates = scope.mutable_variables() if mutable is not False else {}
    return output, updates, used_streams(counters)
