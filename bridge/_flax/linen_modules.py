"""Linen modules: the stack of those that are being called, interceptors, submodules, fields."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from flax import errors as flax_errors
from flax import linen as nn
from flax.core import FrozenDict, Scope
from flax.nnx.bridge import current_module

from .promises import part, required, unsupported

# Per thread: the modules that are being called, and what is captured of them.
_context = part("flax.linen.module", "_context")


def _has_stacks() -> bool:
    """Two lists say which modules are being called, and which of their outputs are kept."""
    return type(_context.module_stack) is list and type(_context.capture_stack) is list


_needs_stacks = required("flax.linen.module._context: module_stack, capture_stack", _has_stacks)


@_needs_stacks
@contextlib.contextmanager
def detached() -> Iterator[None]:
    """Linen modules made in this block do not attach themselves to the module that is being called.

    `parent=None` says the same for one module, but the constructors that run here are the user's.
    """
    _context.module_stack.append(None)
    try:
        yield
    finally:
        _context.module_stack.pop()


@_needs_stacks
@contextlib.contextmanager
def capturing(intermediates: bool | Callable[[nn.Module, str], bool]) -> Iterator[None]:
    """Sets `capture_intermediates` for this block; `nn.apply` would make a scope of its own.

    An interceptor could sow outputs, but could not keep an outer call from capturing them as well.
    """
    _context.capture_stack.append(is_call if intermediates is True else intermediates)
    try:
        yield
    finally:
        _context.capture_stack.pop()


def is_call(module: nn.Module, method: str) -> bool:
    """What `capture_intermediates=True` stands for."""
    return method == "__call__"


@_needs_stacks
def outer_capture() -> Any:
    """Which outputs the Linen call around this one captures, as `capturing` was told; or None."""
    return _context.capture_stack[-1] if _context.capture_stack else None


@_needs_stacks
def outer_mutable() -> Any:
    """The `mutable` of the Linen or bridge module that is being called, None outside of any."""
    bridge_parent = current_module()
    if bridge_parent is not None and bridge_parent.scope is not None:
        return bridge_parent.scope.mutable
    stack = _context.module_stack
    parent = stack[-1] if stack else None
    if parent is not None and parent.scope is not None:
        return parent.scope.mutable
    return None


@_needs_stacks
def is_linen_innermost() -> bool:
    """Whether the module that is being called is a Linen one, as far as this thread knows."""
    stack = _context.module_stack
    return bool(stack) and stack[-1] is not None


@_needs_stacks
def innermost_linen() -> nn.Module | None:
    """The module that is being called, if it is a Linen one and no wrapper of another kind."""
    stack = _context.module_stack
    top = stack[-1] if stack else None
    return top if isinstance(top, nn.Module) and not isinstance(top, NNXHolder) else None


def unbound_function(method: Callable[..., Any], owner: type = nn.Module) -> Callable[..., Any]:
    """The function behind a method that may be bound to a module.

    Raises ApplyModuleInvalidMethodError if it takes no module.
    """
    function: Any = method
    if inspect.ismethod(function) and isinstance(function.__self__, owner):
        function = function.__func__
    if not callable(function) or not inspect.signature(function).parameters:
        raise flax_errors.ApplyModuleInvalidMethodError(function)
    return function


def children(module: nn.Module) -> dict[str, nn.Module]:
    """The submodules of a bound Linen module by name, as far as they exist outside of a call.

    They are in its attributes once `setup` has run, which Linen does before it lists attributes.
    """
    nn.Module.__dir__(module)
    held = {name: value for name, value in vars(module).items() if name != "parent"}
    found = jax.tree.leaves(held, is_leaf=lambda x: isinstance(x, nn.Module))
    return {
        str(each.name): each
        for each in found
        if isinstance(each, nn.Module) and each.parent is module
    }


def remove_variable(module: nn.Module, collection: str, path: Sequence[Any]) -> None:
    """Removes a leaf from a mutable collection of a bound Linen module, and mappings left empty.

    `put_variable` merges, and `mutable_variables` is a copy if Flax is set to return FrozenDicts.
    """
    scope: Any = module.scope
    tree = scope.mutable_variables().get(collection)
    if isinstance(tree, FrozenDict):
        raise unsupported("flax.core.Scope.mutable_variables", "flax_return_frozendict is on")
    parents: list[tuple[Any, Any]] = []
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return
        parents.append((tree, key))
        tree = tree[key]
    del parents[-1][0][parents[-1][1]]
    for (parent, key), (below, _) in zip(parents[-2::-1], parents[:0:-1], strict=True):
        if not below:
            del parent[key]


@_needs_stacks
def shares_scope(module: nn.Module) -> bool:
    """Whether a module that is being called has the scope of this one, as of `nn.share_scope`."""
    scope: Any = module.scope
    return any(
        other is not None
        and other is not module
        and other.scope is not None
        and (other.scope is scope or _is_same_place(other.scope, scope))
        for other in _context.module_stack
    )


def is_lifted(module: nn.Module) -> bool:
    """Whether a bound module is inside a lifted transform, which makes a root scope of its own.

    Only the name that Flax shows for the scope, such as `jit(encoder)`, reveals it.
    """
    root: Any = module.scope and module.scope.root
    return root is not None and tuple(root.debug_path) != tuple(root.path)


def _is_same_place(a: Scope, b: Scope) -> bool:
    # A scope is made anew after a compact method, and goes on counting.
    return a.rng_counters is b.rng_counters


@contextlib.contextmanager
def overridden(module: nn.Module, fields: Mapping[str, Any]) -> Iterator[None]:
    """Gives fields of a bound Linen module other values during one method call.

    `clone` would make another module with another scope, but this one has to keep its place in the
    tree. Linen made the instance for this very call, so nobody else sees the change.
    """
    before = {name: getattr(module, name) for name in fields}
    for name, value in fields.items():
        object.__setattr__(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(module, name, value)


class NNXHolder(nn.Module):
    """A Linen module that holds an NNX module: what this package knows of a ToLinen."""


def base_class(cls: type[Any]) -> type[Any]:
    """The class that lifted transforms were applied to; they make theirs in one module of Flax."""
    return next(base for base in cls.__mro__ if base.__module__ != "flax.linen.transforms")


# What an interceptor is told: `module`, `method_name`, `orig_method`. The class has no public name.
InterceptorContext: TypeAlias = Any
