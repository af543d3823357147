"""What `model.encoder` is on a ToNNX: the dict of its Variables, and the submodule itself."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import jax
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx
from jax.core import Tracer

from bridge._conversion.linen_attributes import (
    LinenHolder,
    held_variables,
    name_of,
    report_hooks,
)
from bridge._conversion.neutral import Path, as_dicts
from bridge._errors import InvalidModuleError
from bridge._flax.linen_modules import children
from bridge._flax.objects import is_initializing

from .parts import below, bound_at, has_any, is_own_attribute, part_names, run_at
from .wrapped_module import OF_LINEN, field_names

# What the methods of a dict take: nothing, a key first, or other variables.
_TAKE_NOTHING = ("keys", "values", "items", "copy", "clear", "popitem")
_TAKE_KEY = ("get", "pop", "setdefault")
_METHODS = (*_TAKE_NOTHING, *_TAKE_KEY, "update")


def _is_for_dict(name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Whether the method of this name takes these arguments in a dict, which knows no arrays."""
    if name in _TAKE_NOTHING:
        return not args and not kwargs
    if name in _TAKE_KEY:
        return bool(args) and isinstance(args[0], str | int) and len(args) < 3
    is_given = len(args) < 2 and not any(hasattr(each, "dtype") for each in args)
    return is_given and all(isinstance(v, nnx.Variable | Mapping) for v in kwargs.values())


def _is_leaf(value: object) -> bool:
    # Linen keeps the variables of a list under the names of its items.
    return isinstance(value, nnx.Variable | list | tuple)


class LinenSubmodule(MutableMapping[Any, Any], dict[Any, Any]):  # type: ignore[misc]
    """The variables of a Linen submodule in a ToNNX by name, and its methods and fields.

    It is a view that looks the variables up each time, so it is never out of date, and writes reach
    the model. A submodule that was made in `setup`, or is a field of the Linen module, can be
    called, and so can its methods: `model.encoder(x)`, `model.encoder.attend(x)`.

    A submodule or method may be called like a method of dict. The arguments of a call say which of
    the two it means.

    Args:
      owner: the ToNNX.
      path: where the submodule is in it.
    """

    # Only C code, such as that of `json`, reads what a dict itself holds: here what there was when
    # the view was made. All else is looked up in the model.
    __slots__ = ("__weakref__", "_owner", "_path")
    # `jax.jit` and `jax.checkpoint` find traces by a weak reference to the function, and its hash:
    # that of the view itself, as the model may have changed since another one was traced.
    __hash__ = object.__hash__  # type: ignore[assignment]
    fromkeys: Any = dict.fromkeys

    def __init__(self, owner: LinenHolder, path: tuple[str, ...]):
        object.__setattr__(self, "_owner", owner)
        object.__setattr__(self, "_path", path)
        dict.__init__(self, self._dict)

    def __getitem__(self, key: Any) -> Any:
        value = self._dict[key]
        return self._below(key) if type(value) is dict else value

    def __setitem__(self, key: Any, value: object) -> None:
        value = as_dicts(value)
        for leaf in jax.tree.leaves(value, is_leaf=_is_leaf):
            if not isinstance(leaf, nnx.Variable):
                raise InvalidModuleError(
                    f"{place_text(self._owner, self._path)}[{key!r}]",
                    leaf,
                    "an nnx.Variable, or a dict of them",
                    "write into the Variable that is there, with [...] = value, or assign another"
                    " one, such as nnx.Param(value)",
                )
        report_hooks(self._owner, value)
        name, *rest = self._path
        if type(vars(self._owner).get(name)) is not dict:
            setattr(self._owner, name, nnx.data({}))
        found = vars(self._owner)[name]
        for each in rest:
            found = found.setdefault(each, {})
        found[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._dict[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dict)

    def __reversed__(self) -> Iterator[Any]:
        return reversed(self._dict)

    def __len__(self) -> int:
        return len(self._dict)

    def __repr__(self) -> str:
        return repr(self._dict)

    # `dict.__ne__` would compare the items of this object, not those of the view.
    def __ne__(self, other: object) -> bool:
        return not self == other

    def __or__(self, other: Any) -> Any:
        return {**self, **other} if isinstance(other, Mapping) else NotImplemented

    def __ror__(self, other: Any) -> Any:
        return {**other, **self} if isinstance(other, Mapping) else NotImplemented

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    # What is taken out is no view: nothing is left to look at in the model.
    def pop(self, key: Any, *default: Any) -> Any:
        return self._dict.pop(key, *default)

    def popitem(self) -> tuple[Any, Any]:
        return self._dict.popitem()

    def copy(self) -> dict[Any, Any]:
        """A plain dict of the same Variables, which belongs to no model."""
        return as_dicts(self._dict)

    __copy__ = copy

    def __reduce_ex__(self, protocol: object) -> Any:
        return dict, (as_dicts(self._dict),)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        *above, name = self._path
        if above and name in _METHODS and _is_for_dict(name, args, kwargs):
            return _DICT_METHODS[name](LinenSubmodule(self._owner, tuple(above)), *args, **kwargs)
        return run_at(self._path, "__call__", self._owner, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._dict:
            return self[name]
        found = found_at(self._owner, self._path, name)
        if found is not None:
            return found.value
        text = f"{place_text(self._owner, self._path)} has no variable, field or method {name!r}"
        if bound_at(self._owner, self._path) is None:
            text += (
                "; it is made in an nn.compact method, so outside of a call only its variables are"
                " known. Make it in setup to read its fields and call its methods"
            )
        raise AttributeError(text)

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(type(self), name):
            place = place_text(self._owner, self._path)
            raise AttributeError(
                f"{name!r} is a method of {place}, which is a dict too; set a variable of that name"
                f" as an item, {place}[{name!r}] = …"
            )
        check_assigned(self._owner, self._path, name, value)
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self._dict:
            raise AttributeError(f"{place_text(self._owner, self._path)} has no variable {name!r}")
        del self[name]

    def __dir__(self) -> list[str]:
        known = part_names(bound_at(self._owner, self._path))
        return sorted({*dir(dict), *known, *map(str, self._dict)})

    @property
    def _dict(self) -> dict[Any, Any]:
        """The dict in the model; an empty one if the submodule has no variables."""
        found: Any = vars(self._owner)
        for key in self._path:
            found = found.get(key) if type(found) is dict else None
        return found if type(found) is dict else {}

    def _below(self, name: str) -> LinenSubmodule:
        return LinenSubmodule(self._owner, (*self._path, name))


def _dict_method(name: str) -> property:
    """A method of a submodule's dict, whose name a part of the submodule may have too."""

    def get(self: LinenSubmodule) -> Any:
        if type(self._dict.get(name)) is dict:
            return self._below(name)

        def method(*args: Any, **kwargs: Any) -> Any:
            if not _is_for_dict(name, args, kwargs):
                found = found_at(self._owner, self._path, name)
                if found is not None:
                    return found.value(*args, **kwargs)
            return _DICT_METHODS[name](self, *args, **kwargs)

        return method

    return property(get)


_DICT_METHODS: dict[str, Callable[..., Any]] = {n: getattr(LinenSubmodule, n) for n in _METHODS}
for _name in _METHODS:
    setattr(LinenSubmodule, _name, _dict_method(_name))


def place_text(owner: LinenHolder, path: Path) -> str:
    """What messages call a submodule."""
    return ".".join((name_of(owner), *map(str, path)))


class Answer:
    """An attribute of a Linen module; a class of its own, since None is a value too."""

    def __init__(self, value: Any):
        self.value = value


def found_at(owner: LinenHolder, path: tuple[str, ...], name: str) -> Answer | None:
    """An attribute of a Linen module in a ToNNX, as the bound Linen module has it.

    Args:
      owner: the ToNNX.
      path: where the module is, empty for the wrapped one itself.
      name: the attribute.

    Returns:
      Submodules as `LinenSubmodule`s, methods so that a call goes through the wrapper, and anything
      else as it is; None if there is no such attribute.
    """
    if name in OF_LINEN:
        return None
    if not path and (found := _found_unbound(owner, name)) is not None:
        return found
    module = bound_at(owner, path)
    if module is None:
        return None
    is_own = is_own_attribute(type(module), name)
    if name in vars(module) and (is_own or not name.startswith("_")):
        value = getattr(module, name)
    elif isinstance(children(module).get(name), nn.Module):
        return Answer(LinenSubmodule(owner, (*path, name)))
    elif not is_own:
        return None
    else:
        static = inspect.getattr_static(type(module), name, None)
        if inspect.isfunction(static):
            return _method(owner, path, name)
        get = getattr(type(static), "__get__", None)
        try:
            value = static if get is None else get(static, module, type(module))
        except flax_errors.DescriptorAttributeError as error:
            # Linen wraps an AttributeError inside a property; the cause names the attribute.
            raise error.__cause__ or error from None
    is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))
    if is_traced and not held_variables(owner):
        if not is_initializing(owner):
            raise AttributeError(
                f"{place_text(owner, path)}.{name} depends on variables that do not exist yet;"
                " create them with bridge.lazy_init(model, *inputs)"
            )
        # Linen creates what `setup` makes before the first call as well.
        owner(method=lambda module: getattr(below(module, path), name))
        return Answer(getattr(LinenSubmodule(owner, path) if path else owner, name))
    return Answer(_as_parts(owner, value))


def _found_unbound(owner: LinenHolder, name: str) -> Answer | None:
    """A field or a method of the wrapped module; binding it to variables would be slow."""
    module = owner.to_nnx__module
    if name in field_names(module):
        value = getattr(module, name)
        return None if has_any(value, nn.Module) else Answer(value)
    is_method = inspect.isfunction(inspect.getattr_static(type(module), name, None))
    return _method(owner, (), name) if is_method and is_own_attribute(type(module), name) else None


def _method(owner: LinenHolder, path: tuple[str, ...], name: str) -> Answer:
    return Answer(types.MethodType(functools.partial(run_at, path, name), owner))


def check_assigned(owner: LinenHolder, path: tuple[str, ...], name: str, value: object) -> None:
    """Refuses what is assigned to a list, tuple or dict of submodules.

    Linen keeps their variables under the name of each item (`blocks_0`), so an attribute of the
    name of the list (`blocks`) would be read by nobody.

    Args:
      owner: the ToNNX.
      path: where the module with the list is, empty for the wrapped one itself.
      name: the attribute.
      value: what is assigned.

    Raises:
      InvalidModuleError: `value` has Variables in it, and is or replaces such a container.
    """
    is_part = isinstance(value, LinenSubmodule | nnx.Variable)
    if is_part or not has_any(value, LinenSubmodule | nnx.Variable):
        return
    found = found_at(owner, path, name)
    own = None if found is None or isinstance(found.value, LinenSubmodule) else found.value
    is_list = not isinstance(value, Mapping) and has_any(value, LinenSubmodule)
    if is_list or has_any(own, LinenSubmodule):
        raise InvalidModuleError(
            place_text(owner, (*path, name)),
            value,
            "an nnx.Variable, a dict of them or a submodule",
            "assign to each submodule by its own name, such as model.blocks_0",
        )


def _as_parts(owner: LinenHolder, value: Any) -> Any:
    """A value with the bound Linen modules in it as LinenSubmodules."""
    if isinstance(value, nn.Module):
        return LinenSubmodule(owner, value.path)
    if not has_any(value, nn.Module):
        return value
    if isinstance(value, Mapping):
        # A FrozenDict would make FrozenDicts of LinenSubmodules.
        return {key: _as_parts(owner, item) for key, item in value.items()}
    items = [_as_parts(owner, item) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _flatten(submodule: LinenSubmodule) -> tuple[Any, tuple[Any, ...]]:
    own = as_dicts(submodule)
    keys = tuple(sorted(own))
    return [(jax.tree_util.DictKey(key), own[key]) for key in keys], keys


def _unflatten(keys: tuple[Any, ...], values: Iterable[Any]) -> Any:
    # A mapped tree belongs to no model, so it is a plain dict.
    return dict(zip(keys, values, strict=True))


jax.tree_util.register_pytree_with_keys(LinenSubmodule, _flatten, _unflatten)
