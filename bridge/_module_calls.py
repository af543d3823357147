"""Knows the modules that are being called in a thread, what each of them does, and its scope."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeGuard

import jax
from flax import nnx
from flax.core import DenyList

from ._conversion.linen_attributes import IS_SETUP, LinenHolder, LinenStyle
from ._errors import InvalidRngsError, MissingRngError
from ._flax.filters import union
from ._flax.linen_modules import is_linen_innermost
from ._flax.linen_modules import outer_mutable as linen_mutable
from ._flax.nodes import nodes_below
from ._flax.objects import attributes_of, is_initializing, set_initializing
from ._randomness.streams import is_one_key
from ._types import CollectionFilter

# The attribute in which a copy of a module that a transform has made finds its scope.
SCOPE = "bridge__scope"


@dataclasses.dataclass(slots=True, eq=False)
class ModuleInCall:
    """A module while it is part of a call.

    Attributes:
      module: the module.
      call: the call of the outermost module.
      path: the names that lead to the module.
      rngs: the streams that its keys are drawn from.
      is_owned: whether it has its place in the tree, so that another attribute is a reference.
      in_setup: whether its `setup` runs.
      compact_depth: how many of its compact methods run.
      type_counter: how many submodules of each class, by name, its compact method has made.
      reserved: the names that are taken.
      is_set_up: whether its `setup` has run in this call.
      made: what `setup` has made for this call, by name.
      views: (submodule, the same with other fields) of those that it has made anew.
    """

    module: Any
    call: ModuleCall
    path: tuple[str, ...]
    rngs: nnx.Rngs
    is_owned: bool = True
    in_setup: bool = False
    compact_depth: int = 0
    type_counter: defaultdict[str, int] = dataclasses.field(
        default_factory=lambda: defaultdict(int)
    )
    reserved: set[str] = dataclasses.field(default_factory=set)
    is_set_up: bool = False
    made: dict[str, Any] = dataclasses.field(default_factory=dict)
    views: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    _scope: Scope | None = None

    @property
    def in_compact(self) -> bool:
        """Whether one of its compact methods runs."""
        return self.compact_depth > 0

    @property
    def is_repeating(self) -> bool:
        """Whether `setup` runs again, for a module that has all its parts."""
        return self.in_setup and bool(attributes_of(self.module)[IS_SETUP])

    @property
    def is_declaring(self) -> bool:
        """Whether it may declare variables and submodules."""
        return self.in_setup or self.compact_depth > 0

    def in_use(self, part: object) -> Any:
        """The view that this call uses in the place of a submodule, or the submodule itself."""
        return next((fresh for before, fresh in reversed(self.views) if before is part), part)

    @property
    def scope(self) -> Scope:
        """What the module shows as its scope."""
        if self._scope is None:
            self._scope = Scope(self.rngs, self.call.mutable, self.path)
        return self._scope


class ModuleCall:
    """A call of an outermost module, with everything that is called in it.

    Args:
      root: the outermost module.
      rngs: the streams that keys are drawn from, None for those that the module keeps.
      mutable: the collections that may be updated, None if nobody has said.
      capture: which outputs are sown, as for Linen's `capture_intermediates`.
      is_kept: whether the outermost module stays after the call, unlike the one of `apply`.

    Attributes:
      has_copies: whether a transform has made a copy of a module, or has written into one.
      holders: (the first wrapper, its path) of each Linen module, by the id of that.
    """

    def __init__(
        self,
        root: LinenStyle,
        rngs: nnx.Rngs | None = None,
        mutable: CollectionFilter | None = None,
        capture: Callable[[Any, str], bool] | None = None,
        *,
        is_kept: bool = True,
    ):
        self.mutable = mutable
        self.is_kept = is_kept
        self.capture = capture
        # Records hold their modules, so that an id stays that of its module.
        self._records: dict[int, ModuleInCall] = {}
        self.has_copies = False
        self._replaced: list[object] = []
        self.holders: dict[int, tuple[LinenHolder, tuple[str, ...]]] = {}
        self.attach(root, None, rngs=rngs)

    @property
    def root(self) -> ModuleInCall:
        """The record of the outermost module."""
        return next(iter(self._records.values()))

    def find(self, module: object) -> ModuleInCall | None:
        """The record of a module that is part of this call."""
        return self._records.get(id(module))

    def replace(self, module: object, by: LinenStyle) -> None:
        """Lets calls of a module be calls of another one, which is part of this call."""
        self._replaced.append(module)
        self._records[id(module)] = self._records[id(by)]

    def attach(
        self,
        module: LinenStyle,
        parent: ModuleInCall | None,
        name: str | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> ModuleInCall:
        """Makes a module part of the call, with its name in the parent if it has one.

        `rngs` are its streams, None for its own or those of the parent.
        """
        own = attributes_of(module)
        if rngs is None:
            rngs = own[SCOPE].rngs if SCOPE in own else own.get("bridge__rngs")
        if rngs is None:
            rngs = parent.rngs if parent else nnx.Rngs()
        path = (*parent.path, name or type(module).__name__) if parent else ()
        record = ModuleInCall(module, self, path, rngs)
        record.is_owned = name is not None or parent is None
        self._records[id(module)] = record
        if parent is not None and is_initializing(parent.module) and not is_initializing(module):
            set_initializing(nodes_below(module).objects, True)
        return record

    def close(self) -> None:
        """Removes the scopes that transforms have put into modules.

        The records refer to the call, and must not keep it and its modules alive.
        """
        records = list(self._records.values())
        self._records.clear()
        self.holders.clear()
        if self.has_copies:
            for node in nodes_below(records[0].module).objects:
                attributes_of(node).pop(SCOPE, None)


class _Stack(threading.local):
    """The modules that are being called in a thread, the innermost one last."""

    def __init__(self) -> None:
        self.module_stack: list[ModuleInCall | None] = [None]


MODULE_CONTEXT = _Stack()


def current_context() -> ModuleInCall | None:
    """The `bridge.Module` that is being called in this thread, and what it is doing.

    Returns:
      An object with the attributes `module`, `in_compact` and `type_counter`; None outside of any
      call.

    Source: flax/nnx/bridge/module.py:current_context @ 0.12.8
    """
    return MODULE_CONTEXT.module_stack[-1]


def current_module() -> Any:
    """The `bridge.Module` that is being called in this thread, None outside of any call.

    Example::

      >>> import bridge
      >>> class Model(bridge.Module):
      ...     def __call__(self):
      ...         return bridge.current_module() is self
      >>> Model().apply({}), bridge.current_module()
      (True, None)

    Source: flax/nnx/bridge/module.py:current_module @ 0.12.8
    """
    context = current_context()
    return None if context is None else context.module


def mutable_around() -> Any:
    """The `mutable` of the Linen or bridge module that is being called, None outside of any."""
    top = joined()
    return linen_mutable() if top is None else top.call.mutable


def joined() -> ModuleInCall | None:
    """The module that is calling another module now.

    None inside a Linen module, whose parts have their own keys and collections.
    """
    top = MODULE_CONTEXT.module_stack[-1]
    return None if top is None or is_linen_innermost() else top


def record_of(module: object) -> ModuleInCall | None:
    """The record of a module in the call that runs, None if it is not part of one."""
    top = MODULE_CONTEXT.module_stack[-1]
    return None if top is None else top.call.find(module)


@contextlib.contextmanager
def innermost(record: ModuleInCall | None) -> Iterator[None]:
    """Makes a module the one that is being called in this block.

    With None, modules made in the block do not become submodules of the one being called.
    """
    MODULE_CONTEXT.module_stack.append(record)
    try:
        yield
    finally:
        MODULE_CONTEXT.module_stack.pop()


def joined_record(module: LinenStyle) -> ModuleInCall | None:
    """The record of a module in the running call, also of a copy that a transform has made."""
    top = joined()
    if top is None:
        return None
    found = top.call.find(module)
    if found is None and SCOPE in attributes_of(module):
        found = top.call.attach(module, top)
    return found


class Scope(nnx.Pytree):
    """The keys and the mutable collections of a call, as a `bridge.Module` sees them.

    NNX's transforms split it together with the module during the call, so `nnx.split_rngs` gives
    each layer of a scan its own keys.

    Args:
      rngs: the streams that keys are drawn from.
      mutable: the collections that may be updated, as for Linen's `apply`; None if not given.
      path: the names that lead to the module.

    Source: flax/nnx/bridge/module.py:Scope @ 0.12.8
    """

    def __init__(
        self, rngs: nnx.Rngs, mutable: CollectionFilter | None, path: tuple[str, ...] = ()
    ):
        self.rngs = rngs
        # Hashable, as it becomes part of a GraphDef.
        self.mutable: CollectionFilter | None = mutable
        if mutable is not None and not isinstance(mutable, bool):
            self.mutable = union(mutable, ())
        self.path = path

    def copy(self) -> Self:
        """Another scope with the same streams."""
        return type(self)(self.rngs, self.mutable, self.path)

    def is_mutable_collection(self, collection: str) -> bool:
        """Whether a collection may be updated."""
        return is_in(self.mutable, collection)

    def has_rng(self, name: str) -> bool:
        """Whether there is a stream of this name, or a `default` stream of an `nnx.Rngs`."""
        if is_of_linen(self.rngs):
            # One key for all is that of `params` in Linen.
            names = set(self.rngs)
            return name in (names if names != {"default"} else {"params"})
        return name in self.rngs or "default" in self.rngs

    def make_rng(self, name: str = "default") -> jax.Array:
        """The next key of a stream; `default`, then `params`, replaces a missing one.

        Raises:
          MissingRngError: none of these streams exists.
        """
        for known in (name, "default", "params"):
            if known in self.rngs:
                return self.rngs[known]()
        raise MissingRngError(
            f"the bridge.Module at /{'/'.join(self.path)}",
            [name],
            self.rngs,
            f"pass rngs={{{name!r}: key}} to init, apply or bind, or to the constructor of the"
            " outermost module",
        )


class LinenRngs(nnx.Rngs):
    """Streams of a key or of keys by name, as Linen takes them."""


def is_of_linen(rngs: nnx.Rngs) -> bool:
    """Whether streams were given as Linen takes them, and not as an `nnx.Rngs`."""
    return isinstance(rngs, LinenRngs)


def as_rngs(rngs: object, where: str) -> nnx.Rngs:
    """Streams of an `rngs` argument: an `nnx.Rngs` as it is, a number, a key, keys by name, None.

    Raises InvalidRngsError if it has another form.
    """
    if isinstance(rngs, nnx.Rngs):
        return rngs
    if rngs is None:
        return nnx.Rngs()
    if isinstance(rngs, Mapping) and all(isinstance(name, str) for name in rngs):
        if all(_is_seed(key) for key in rngs.values()):
            return LinenRngs(**rngs)
    elif _is_seed(rngs):
        return LinenRngs(rngs)
    raise InvalidRngsError(rngs, where)


def _is_seed(value: object) -> TypeGuard[int | jax.Array | nnx.RngStream]:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number or isinstance(value, nnx.RngStream) or is_one_key(value)


def is_in(mutable: CollectionFilter | None, collection: str) -> bool:
    """Whether a filter of collections takes one; a filter that nobody has given takes all."""
    if mutable is None or isinstance(mutable, bool):
        return mutable is not False
    if isinstance(mutable, DenyList):
        return not is_in(mutable.deny, collection)
    return collection == mutable if isinstance(mutable, str) else collection in mutable
