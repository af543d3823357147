"""A Linen scope that draws keys on demand, and a Linen module run in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
from flax import errors as flax_errors
from flax import linen as nn
from flax.core import Scope

from bridge._errors import MissingRngError

from .call_keys import CallKeys, LazyKeys, used_streams
from .filters import union
from .linen_modules import call_method, capturing, outer_capture
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
    attributes `rngs` and `rng_counters`. Flax makes the counters, of the names alone.
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

    def put_variable(self, col: str, name: str, value: Any) -> None:
        # Flax's own error keeps the collection only in its text.
        if not self.is_mutable_collection(col):
            raise ImmutableScopeError(col, name, self.path_text)
        super().put_variable(col, name, value)

    def push(self, name: str | None = None, prefix: str = "", reuse: bool = False) -> Scope:
        return self._drawing(super().push, name, prefix, reuse)

    def rewound(self, rewind_rngs: bool = False) -> Scope:
        return self._drawing(super().rewound, rewind_rngs)

    def _drawing(self, make: Callable[..., Scope], *args: Any) -> Scope:
        """A scope that Flax makes of this one, with keys on demand: Flax would compute them all."""
        own = self.rngs
        if not isinstance(own, LazyKeys):
            # A lifted transform has put keys of its own in the place of these.
            return make(*args)
        self.rngs = dict.fromkeys(own.draws.names)
        try:
            made: Any = make(*args)
        finally:
            self.rngs = own
        made.__class__ = type(self)
        made.rngs = LazyKeys(own.draws, own.suffix + made.path[len(self.path) :])
        return made


class CreatingScope(StreamScope):
    """The scope of an initialisation; tells keys of initial values from those of a forward pass."""

    def param(self, name: str, init_fn: Any, *init_args: Any, **options: Any) -> Any:
        return super().param(name, self._initializer(init_fn), *init_args, **options)

    def variable(
        self, col: str, name: str, init_fn: Any = None, *init_args: Any, **options: Any
    ) -> Any:
        return super().variable(col, name, self._initializer(init_fn), *init_args, **options)

    def _initializer(self, init_fn: Any) -> Any:
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


def undo_draws(scope: Scope | None, names: Iterable[str]) -> None:
    """Takes back the last draw from streams of a scope: the next one gives the same key again."""
    counters: dict[Any, Any] = scope.rng_counters if scope is not None else {}
    for name in names:
        counters[name] -= 1


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
    flags: dict[str, Any] = {"bridge_keys": draws}
    if initializing:
        flags["initializing"] = True
    if modes:
        flags["bridge_modes"] = tuple(sorted(modes.items()))
    kind = CreatingScope if initializing else StreamScope
    names: Any = dict.fromkeys(draws.names)
    scope = kind(variables, names, mutable=mutable, flags=flags, path=path)
    scope.rngs = LazyKeys(draws)
    counters = scope.rng_counters
    own: dict[str, Any] = {"name": path[-1]} if path else {}
    # The name stack of the modules above, as Linen makes it.
    named = jax.named_scope("/".join(path[:-1])) if path[1:] else nullcontext()
    with scope.temporary(), capturing(capture_intermediates), named:
        bound = module.clone(parent=scope, _deep_clone=True, **own, **fields)
        output = call_method(function, bound, args, kwargs)
    updates = scope.mutable_variables() if mutable is not False else {}
    return output, updates, used_streams(counters)
