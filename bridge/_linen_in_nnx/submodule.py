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

from bridge._conversion.linen_attributes import report_hooks
from bridge._conversion.neutral import Path, as_dicts
from bridge._errors import InvalidModuleError
from bridge._flax.linen_modules import children
from bridge._flax.objects import is_initializing

from .parts import (
    OF_LINEN,
    below,
    bound_at,
    dict_for_writing,
    has_modules,
    has_variables,
    is_own_attribute,
    part_names,
)
from .submodule_call import run_at
from .submodule_texts import (
    method_name_text,
    misfit_error,
    not_created_text,
    not_found_text,
    place_text,
)


def _leaves(tree: Any) -> list[Any]:
    # Linen keeps the variables of a list under the names of its items.
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable | list | tuple))


# What the methods of a dict take: nothing, a key first, or other variables.
_TAKE_NOTHING = ("keys", "values", "items", "copy", "clear", "popitem")
_TAKE_KEY = ("get", "pop", "setdefault")
_TAKE_VARIABLES = ("update",)


def _is_for_dict(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the method of this name takes these arguments in a dict, which knows no arrays."""
    if name in _TAKE_NOTHING:
        return not args and not kwargs
    if name in _TAKE_KEY:
        return bool(args) and isinstance(args[0], str | int) and len(args) < 3
    is_given = len(args) < 2 and not any(hasattr(each, "dtype") for each in args)
    return is_given and all(isinstance(v, nnx.Variable | Mapping) for v in kwargs.values())


def _dict_method(name: str, function: Callable[..., Any]) -> property:
    """A method of a submodule's dict, whose name a part of the submodule may have too.

    The arguments of a call say which of the two it means.
    """

    def get(self: LinenSubmodule) -> Any:
        is_part = type(self._dict.get(name)) is dict
        part = LinenSubmodule(self._owner, (*self._path, name)) if is_part else None

        def method(*args: Any, **kwargs: Any) -> Any:
            if not _is_for_dict(name, args, kwargs):
                if part is not None:
                    return part(*args, **kwargs)
                if (found := found_at(self._owner, self._path, name)) is not None:
                    return found.value(*args, **kwargs)
            return function(self, *args, **kwargs)

        if part is None:
            return method
        return _NamedSubmodule(self._owner, (*self._path, name), method)

    return property(get)


class LinenSubmodule(MutableMapping[Any, Any], dict[Any, Any]):  # type: ignore[misc]
    """The variables of a Linen submodule in a ToNNX by name, and its methods and fields.

    It is a view that looks the variables up each time, so it is never out of date, and writes reach
    the model. A submodule that was made in `setup`, or is a field of the Linen module, can be
    called, and so can its methods: `model.encoder(x)`, `model.encoder.attend(x)`.

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

    def __init__(self, owner: Any, path: Path):
        object.__setattr__(self, "_owner", owner)
        object.__setattr__(self, "_path", path)
        dict.__init__(self, self._dict)

    def __getitem__(self, key: Any) -> Any:
        value = self._dict[key]
        return LinenSubmodule(self._owner, (*self._path, key)) if type(value) is dict else value

    def __setitem__(self, key: Any, value: Any) -> None:
        value = as_dicts(value)
        for leaf in _leaves(value):
            if not isinstance(leaf, nnx.Variable):
                raise InvalidModuleError(
                    f"{place_text(self._owner, self._path)}[{key!r}]",
                    leaf,
                    "an nnx.Variable, or a dict of them",
                    "write into the Variable that is there, with [...] = value, or assign another"
                    " one, such as nnx.Param(value)",
                )
        report_hooks(self._owner, value)
        dict_for_writing(self._owner, self._path)[key] = value

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

    def __eq__(self, other: object) -> bool:
        return as_dicts(self) == (as_dicts(other) if isinstance(other, LinenSubmodule) else other)

    # `dict.__eq__` would compare the items of this object, not those of the view.
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

    def __copy__(self) -> dict[Any, Any]:
        return as_dicts(self._dict)

    def copy(self) -> dict[Any, Any]:
        """A plain dict of the same Variables, which belongs to no model."""
        return as_dicts(self._dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return run_at(self._path, "__call__", self._owner, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return (
            self[name] if name in self._dict else submodule_attribute(self._owner, self._path, name)
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            raise AttributeError(method_name_text(self._owner, self._path, name))
        if not assign_parts(self._owner, self._path, name, value):
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


for _name in (*_TAKE_NOTHING, *_TAKE_KEY, *_TAKE_VARIABLES):
    setattr(LinenSubmodule, _name, _dict_method(_name, getattr(LinenSubmodule, _name)))


class _NamedSubmodule(LinenSubmodule):
    """A submodule that is called like a method of the dict that it is in, such as `keys`."""

    __slots__ = ("_method",)

    def __init__(self, owner: Any, path: Path, method: Callable[..., Any]):
        super().__init__(owner, path)
        object.__setattr__(self, "_method", method)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)


def submodule_attribute(owner: Any, path: Path, name: str) -> Any:
    """An attribute of a Linen module in a ToNNX, as the bound Linen module has it.

    Args:
      owner: the ToNNX.
      path: where the module is, empty for the wrapped one itself.
      name: the attribute.

    Returns:
      Submodules as `LinenSubmodule`s, methods so that a call goes through the wrapper, and anything
      else as it is.

    Raises:
      AttributeError: there is none.
    """
    found = found_at(owner, path, name)
    if found is None:
        is_made = bound_at(owner, path) is not None
        raise AttributeError(not_found_text(owner, path, name, is_made=is_made))
    return found.value


class Answer:
    """An attribute of a Linen module; a class of its own, since None is a value too."""

    def __init__(self, value: Any):
        self.value = value


def found_at(owner: Any, path: Path, name: str) -> Answer | None:
    """What `submodule_attribute` returns, None if there is none."""
    module = bound_at(owner, path)
    if module is None or name in OF_LINEN:
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
            return Answer(types.MethodType(functools.partial(run_at, path, name), owner))
        get = getattr(type(static), "__get__", None)
        try:
            value = static if get is None else get(static, module, type(module))
        except flax_errors.DescriptorAttributeError as error:
            # Linen wraps an AttributeError inside a property; the cause names the attribute.
            raise error.__cause__ or error from None
    is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))
    if is_traced and not has_variables(owner):
        if not is_initializing(owner):
            raise AttributeError(not_created_text(owner, path, name))
        # Linen creates what `setup` makes before the first call as well.
        owner(method=lambda module: getattr(below(module, path), name))
        holder = submodule_attribute(owner, path[:-1], path[-1]) if path else owner
        return Answer(getattr(holder, name))
    return Answer(_as_parts(owner, value))


def assign_parts(owner: Any, path: Path, name: str, value: Any) -> bool:
    """Gives the submodules of a list, tuple or dict the variables of other ones.

    Linen keeps these variables under the name of each item (`blocks_0`), so an attribute of the
    name of the list (`blocks`) would be read by nobody.

    Args:
      owner: the ToNNX.
      path: where the module with the list is, empty for the wrapped one itself.
      name: the attribute.
      value: what was assigned.

    Returns:
      Whether that was it; if not, nothing has happened.

    Raises:
      InvalidModuleError: the items of `value` are not those of the list.
    """
    if isinstance(value, LinenSubmodule) or not _has_variables(value):
        return False
    found = found_at(owner, path, name)
    own = None if found is None else found.value
    if isinstance(own, LinenSubmodule) or not has_submodules(own):
        if isinstance(value, Mapping) or not has_submodules(value):
            return False
        raise misfit_error(
            owner, (*path, name), value, "an nnx.Variable, a dict of them or a submodule"
        )
    pairs = _pairs(own, value)
    if pairs is None:
        raise misfit_error(
            owner, (*path, name), value, f"submodules, or dicts of Variables, as in {own!r}"
        )
    for part, variables in pairs:
        part.clear()
        part.update(variables)
    return True


def _has_variables(value: Any) -> bool:
    """Whether a list, tuple or dict has submodules or Variables in it."""
    if isinstance(value, Mapping):
        return isinstance(value, LinenSubmodule) or any(map(_has_variables, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_variables, value))
    return isinstance(value, nnx.Variable)


def has_submodules(value: Any) -> bool:
    if isinstance(value, LinenSubmodule):
        return True
    items = value.values() if isinstance(value, Mapping) else value
    return isinstance(value, Mapping | list | tuple) and any(map(has_submodules, items))


def _pairs(own: Any, value: Any) -> list[tuple[LinenSubmodule, Mapping[Any, Any]]] | None:
    """Each submodule with what was assigned to it; None if something has no counterpart."""
    if isinstance(own, LinenSubmodule):
        # A copy, as these may be the same submodules in another order.
        given = as_dicts(value) if isinstance(value, Mapping) else value
        is_tree = given is not value and all(isinstance(v, nnx.Variable) for v in _leaves(given))
        return [(own, given)] if is_tree else None
    if isinstance(own, Mapping):
        is_alike = isinstance(value, Mapping) and own.keys() == value.keys()
        items = [(own[key], value[key]) for key in own] if is_alike else None
    elif isinstance(own, list | tuple):
        is_alike = isinstance(value, list | tuple) and len(own) == len(value)
        items = list(zip(own, value, strict=True)) if is_alike else None
    else:
        # The model's own code creates everything else, which cannot be replaced.
        is_alike = own is value or (isinstance(own, bool | int | float | str) and own == value)
        return [] if is_alike else None
    found = [_pairs(*item) for item in items or ()]
    is_whole = items is not None and None not in found
    return [pair for pairs in found for pair in pairs or ()] if is_whole else None


def _as_parts(owner: Any, value: Any) -> Any:
    """A value with the bound Linen modules in it as LinenSubmodules."""
    if isinstance(value, nn.Module):
        return LinenSubmodule(owner, value.path)
    if not has_modules(value):
        return value
    if isinstance(value, Mapping):
        # A FrozenDict would make FrozenDicts of LinenSubmodules.
        return {key: _as_parts(owner, item) for key, item in value.items()}
    items = [_as_parts(owner, item) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _flatten(submodule: LinenSubmodule) -> tuple[Any, tuple[Any, ...]]:
    own = submodule.copy()
    keys = tuple(sorted(own))
    return [(jax.tree_util.DictKey(key), own[key]) for key in keys], keys


def _unflatten(keys: tuple[Any, ...], values: Iterable[Any]) -> Any:
    # A mapped tree belongs to no model, so it is a plain dict.
    return dict(zip(keys, values, strict=True))


for _class in (LinenSubmodule, _NamedSubmodule):
    jax.tree_util.register_pytree_with_keys(_class, _flatten, _unflatten)
