"""The NNX modules of a ToLinen as Linen sees modules: with a path, a scope and interceptors."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Generator, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from flax.core import Scope

from bridge._conversion.linen_attributes import LinenHolder, LinenStyle
from bridge._conversion.neutral import Path
from bridge._flax.nodes import nodes_below

# Whether the NNX modules of a ToLinen that is called now are shown to Linen.
SHOWN: ContextVar[bool] = ContextVar("shown", default=False)


@contextlib.contextmanager
def nnx_modules_as_linen() -> Generator[None, None, None]:
    """Shows the NNX modules in every `ToLinen` to Linen's interceptors, in this block.

    Each method of an NNX module inside runs like that of a Linen module. Interceptors of
    `nn.intercept_methods` get it as `context.module`, `capture_intermediates` and `jax.named_scope`
    see it, and its `path` begins at the outermost Linen module. Its scope holds its variables under
    the names in the `ToLinen`, with the very arrays that the module computes with. Variables that
    an interceptor puts into the scope go to the collections of the `ToLinen`; those that the NNX
    module does not have belong to the interceptor.

    `context.module.nnx_module` is the NNX module. The call of the outermost module is that of the
    `ToLinen`, which Linen shows anyway. Copies that `nnx` transforms make inside a module are not
    shown. A program that `jax.jit` has compiled before does not notice the block.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn, nnx
      >>> import bridge
      >>> class Model(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.fc = nnx.Linear(3, 2, rngs=rngs)
      ...     def __call__(self, x):
      ...         return self.fc(x)
      >>> model, x = bridge.to_linen(Model), jnp.ones((1, 3))
      >>> variables = model.init(jax.random.key(0), x)
      >>> def tell(next_function, args, kwargs, context):
      ...     print(context.module.path, type(context.module).__name__)
      ...     return next_function(*args, **kwargs)
      >>> with nn.intercept_methods(tell), bridge.nnx_modules_as_linen():
      ...     y = model.apply(variables, x)
      () ToLinen
      ('fc',) Linear
    """
    token = SHOWN.set(True)
    try:
        yield
    finally:
        SHOWN.reset(token)


class NNXModuleView(nn.Module):
    """An NNX module as a Linen module of its path; a subclass for each class has its methods."""

    @property
    def nnx_module(self) -> nnx.Module:
        """The module that is shown."""
        return vars(self)["_nnx_module"]


class _Shown:
    """The modules of one ToLinen that are shown, by their ids; `modules` has (path, module)."""

    def __init__(self, modules: Sequence[tuple[Path, Any]], scope: Scope):
        # The modules are held, so that an id stays that of its module.
        self._modules = {id(module): (path, module) for path, module in modules}
        self._scope = scope
        self._is_entered = False

    def view(self, module: object) -> NNXModuleView | None:
        """The view of a module, None for a copy that a transform has made, which is not shown.

        The call of the outermost module is that of the ToLinen, which Linen sees already.
        """
        path, _ = self._modules.get(id(module), (None, None))
        if path is None or (not path and not self._is_entered):
            self._is_entered = True
            return None
        scope = self._scope
        for key in path:
            scope = _child(scope, key)
        name = _name(path) if path else scope.name
        view = vars(type(module))[_VIEW](parent=scope, name=name)
        object.__setattr__(view, "_nnx_module", module)
        return view


_shown: ContextVar[_Shown | None] = ContextVar("modules", default=None)


# By class, which Flax's and JAX's own registers of NNX classes keep anyway: the subclass that its
# modules have while they are shown. Not attributes of the class: with other attributes its
# constructor would count as another one.
_made: dict[type, type] = {}
# Of such a subclass: the class that it stands for, and the class of the modules' views.
_BASE, _VIEW = "bridge__base", "bridge__view"


@contextlib.contextmanager
def showing(module: nnx.Module, linen: Any) -> Generator[None, None, None]:
    """Shows the modules below an NNX module in this block.

    The module is that of a bound ToLinen; no one else has it.
    """
    scope = linen.scope
    found = list(nnx.iter_modules(module, graph=True))
    wrappers = [(path, each) for path, each in found if isinstance(each, LinenHolder)]
    shown = [(path, each) for path, each in found if _has_methods(each)]
    told = [vars(each).get("to_nnx__path") for _, each in wrappers]
    token = _shown.set(_Shown(shown, scope))
    try:
        for path, each in wrappers:
            vars(each)["to_nnx__path"] = (*scope.path, *map(str, path))
        for _, each in shown:
            # Python looks `__call__` up in the class, and another object would not be the module
            # that the parent calls, so the class is exchanged for the time of the call.
            each.__class__ = _shown_class(each)
        yield
    finally:
        _shown.reset(token)
        # The call may have added modules, and taken some away.
        _unshow(each for _, each in shown)
        unshow(module)
        for (_, each), path in zip(wrappers, told, strict=True):
            if path is None:
                vars(each).pop("to_nnx__path", None)
            else:
                vars(each)["to_nnx__path"] = path


def unshow(module: object) -> None:
    """Gives the modules below one their own classes, also in a copy that was made in a block."""
    _unshow(nodes_below(module).objects)


def _unshow(nodes: Iterable[object]) -> None:
    for node in nodes:
        kind: type = type(node)
        base = vars(kind).get(_BASE)
        if base is not None:
            node.__class__ = base


def _has_methods(module: object) -> bool:
    """Whether a module is shown by itself; lists and dicts have no methods of their own."""
    is_shown_otherwise = isinstance(module, LinenHolder | LinenStyle)
    return not is_shown_otherwise and not isinstance(module, nnx.List | nnx.Dict)


def _shown_class(module: object) -> type:
    """A class with methods that run through the view of the module, made once for each class."""
    kind: type = type(module)
    if kind not in _made:
        methods = _methods(kind)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        views = {name: _of_view(name, function) for name, function in methods.items()}
        view = type(kind.__name__, (NNXModuleView,), {**views, **names})
        own = {name: _through_view(name, function) for name, function in methods.items()}
        own |= {**names, _BASE: kind, _VIEW: view}
        # A subclass is a pytree unless it says otherwise, whatever its base is.
        options = {"pytree": not jax.tree_util.all_leaves([module])}
        _made[kind] = types.new_class(kind.__name__, (kind,), options, lambda new: new.update(own))
    return _made[kind]


def _methods(kind: type) -> dict[str, Callable[..., Any]]:
    """The public methods of a class that are its own, and `__call__`."""
    names = {n for n in dir(kind) if n == "__call__" or not n.startswith("_")}
    found = {n: inspect.getattr_static(kind, n) for n in names - _NOT_OWN}
    return {n: function for n, function in found.items() if inspect.isfunction(function)}


_NOT_OWN = frozenset((*dir(nnx.Module), *dir(nn.Module))) - {"__call__"}


def _through_view(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # NNX looks at the signatures of methods, to tell which of them take `rngs` for example.
    @functools.wraps(function)
    def method(self: Any, /, *args: object, **kwargs: object) -> Any:
        shown = _shown.get()
        view = None if shown is None else shown.view(self)
        if view is None:
            return function(self, *args, **kwargs)
        return getattr(view, name)(*args, **kwargs)

    method.__name__ = name
    return method


def _of_view(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: Any, /, *args: object, **kwargs: object) -> Any:
        return function(self.nnx_module, *args, **kwargs)

    method.__name__ = name
    return method


def _child(scope: Scope, key: Any) -> Scope:
    """The scope of an attribute or an item; a number may be one in the variables, or text."""
    child = scope.push(str(key), reuse=True)
    if any(key in tree for tree in scope.variables().values()):
        child.name = key
    return child


def _name(path: Path) -> str:
    """The Linen name: an item of a list has that of the list and its number."""
    if isinstance(path[-1], str) or len(path) == 1:
        return str(path[-1])
    return f"{path[-2]}_{path[-1]}"
