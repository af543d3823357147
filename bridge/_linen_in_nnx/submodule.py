"""Defines `model.encoder` on a ToNNX: the dict of its Variables, and the submodule itself."""

# The annotations of Flax and JAX are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, cast

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


class LinenSubmodule(dict[Any, Any]):
    """The variables of a Linen submodule in a ToNNX by name, and its methods and fields.

    As a dict it holds what there was when it was read. Writes into it reach the model, and its
    attributes are those of the model. A submodule that was made in `setup`, or is a field of the
    Linen module, can be called, and so can its methods: `model.encoder(x)`,
    `model.encoder.attend(x)`.

    A submodule or method may have the name of a method of dict. The arguments of a call decide
    which of the two is meant. A Variable of such a name is the attribute, unless it is `items`.
    `of_dict` is the dict method of the parent that has this submodule's name, None if there is
    none.
    """

    __slots__ = ("__weakref__", "_of_dict", "_owner", "_path")
    _owner: LinenHolder
    _path: tuple[str, ...]
    _of_dict: Callable[..., Any] | None
    # `jax.jit` and `jax.checkpoint` find traces by a weak reference to the function, and its hash:
    # that of the view itself, as the model may have changed since another one was traced.
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(
        self,
        owner: LinenHolder,
        path: tuple[str, ...],
        of_dict: Callable[..., Any] | None = None,
    ):
        object.__setattr__(self, "_owner", owner)
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_of_dict", of_dict)
        super().__init__(_dict_at(owner, path))

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        return LinenSubmodule(self._owner, (*self._path, key)) if type(value) is dict else value

    def __setitem__(self, key: str, value: object) -> None:
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
            empty: dict[Any, Any] = {}
            setattr(self._owner, name, nnx.data(empty))
        found = vars(self._owner)[name]
        for each in rest:
            found = found.setdefault(each, {})
        found[key] = value
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        del _dict_at(self._owner, self._path)[key]
        super().__delitem__(key)

    def __ior__(self, other: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Any:  # type: ignore[override]
        MutableMapping.update(self, other)
        return self

    def __copy__(self) -> dict[Any, Any]:
        """A plain dict of the same Variables, which belongs to no model."""
        return as_dicts(self)

    def __reduce_ex__(self, protocol: object) -> Any:
        return dict, (as_dicts(self),)

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        if self._of_dict is not None and _is_for_dict(args, kwargs):
            return self._of_dict(*args, **kwargs)
        return run_at(self._path, "__call__", self._owner, *args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        if name not in _METHODS:
            return super().__getattribute__(name)
        of_dict = functools.partial(_METHODS[name], self)
        held: Any = _dict_at(self._owner, self._path).get(name)
        is_tree, is_variable = type(held) is dict, isinstance(held, nnx.Variable)
        if is_tree:
            return LinenSubmodule(self._owner, (*self._path, name), of_dict)
        # Whoever takes dicts apart calls `items`.
        if is_variable and name != "items":
            return held

        def method(*args: object, **kwargs: object) -> Any:
            is_for_dict = _is_for_dict(args, kwargs)
            found = ABSENT if is_for_dict else found_at(self._owner, self._path, name)
            return (of_dict if found is ABSENT else found)(*args, **kwargs)

        return method

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        here = LinenSubmodule(self._owner, self._path)
        if name in here:
            return here[name]
        found = found_at(self._owner, self._path, name)
        if found is not ABSENT:
            return found
        text = f"{place_text(self._owner, self._path)} has no variable, field or method {name!r}"
        if bound_at(self._owner, self._path) is None:
            text += (
                "; it is made in an nn.compact method, so outside of a call only its variables are"
                " known. Make it in setup to read its fields and call its methods"
            )
        raise AttributeError(text)

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(type(self), name) and not (name in _METHODS and name in self):
            place = place_text(self._owner, self._path)
            raise AttributeError(
                f"{name!r} is a method of {place}, which is a dict too; set a variable of that name"
                f" as an item, {place}[{name!r}] = …"
            )
        check_assigned(self._owner, self._path, name, value)
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(f"{place_text(self._owner, self._path)} has no variable {name!r}")
        del self[name]

    def __dir__(self) -> list[str]:
        known = part_names(bound_at(self._owner, self._path))
        return sorted({*dir(dict), *known, *map(str, self)})


# The methods of dict that a part of a submodule may be called like. Those that write do so by item.
_METHODS: dict[str, Callable[..., Any]] = {
    **{name: getattr(dict, name) for name in ("keys", "values", "items", "get")},
    **{
        name: getattr(MutableMapping, name)
        for name in ("pop", "popitem", "setdefault", "update", "clear")
    },
    "copy": LinenSubmodule.__copy__,
}


def _is_for_dict(args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Whether a dict's method takes these arguments: no array, but keys or other variables."""
    return all(isinstance(x, str | int | Mapping) for x in args[:1]) and all(
        isinstance(x, nnx.Variable | Mapping) for x in kwargs.values()
    )


def _is_leaf(value: object) -> bool:
    # Linen keeps the variables of a list under the names of its items.
    return isinstance(value, nnx.Variable | list | tuple)


def _dict_at(owner: LinenHolder, path: tuple[str, ...]) -> dict[Any, Any]:
    """The dict in the model; an empty one if the submodule has no variables."""
    found: dict[Any, Any] = vars(owner)
    for key in path:
        below: Any = found.get(key)
        if type(below) is not dict:
            return {}
        found = cast("dict[Any, Any]", below)
    return found


def place_text(owner: LinenHolder, path: Path) -> str:
    """What messages call a submodule."""
    return ".".join((name_of(owner), *map(str, path)))


# What `found_at` returns where there is no such attribute: None is a value too.
ABSENT: Any = object()


def found_at(owner: LinenHolder, path: tuple[str, ...], name: str) -> Any:
    """An attribute of a Linen module in a ToNNX, as the bound Linen module has it.

    `path` is where the module is, empty for the wrapped one itself. Returns submodules as
    `LinenSubmodule`s, methods so that a call goes through the wrapper, and anything else as it is;
    `ABSENT` if there is no such attribute.
    """
    if name in OF_LINEN:
        return ABSENT
    top = owner.to_nnx__module
    is_field = name in field_names(top) and not has_any(getattr(top, name), nn.Module)
    # Binding a large module takes time, and these are known without.
    is_known = not path and (is_field or _is_method(top, name))
    module = top if is_known else bound_at(owner, path)
    if module is None:
        return ABSENT
    if _is_method(module, name):
        return types.MethodType(functools.partial(run_at, path, name), owner)
    if is_own_attribute(type(module), name) or (name in vars(module) and name[0] != "_"):
        try:
            value = getattr(module, name)
        except flax_errors.DescriptorAttributeError as error:
            # Linen wraps an AttributeError inside a property; the cause names the attribute.
            raise error.__cause__ or error from None
    else:
        value = children(module).get(name)
        if value is None:
            return ABSENT
    is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))
    if is_traced and not held_variables(owner):
        if not is_initializing(owner):
            raise AttributeError(
                f"{place_text(owner, path)}.{name} depends on variables that do not exist yet;"
                " create them with bridge.lazy_init(model, *inputs)"
            )

        # Linen creates what `setup` makes before the first call as well.
        def read(module: nn.Module) -> Any:
            return getattr(below(module, path), name)

        owner(method=read)
        return getattr(LinenSubmodule(owner, path) if path else owner, name)
    return _as_parts(owner, value)


def _is_method(module: nn.Module, name: str) -> bool:
    is_function = inspect.isfunction(inspect.getattr_static(type(module), name, None))
    return is_function and is_own_attribute(type(module), name)


def check_assigned(owner: LinenHolder, path: tuple[str, ...], name: str, value: object) -> None:
    """Refuses what is assigned to a list, tuple or dict of submodules.

    Linen keeps their variables under the name of each item (`blocks_0`), so nothing would read an
    attribute with the name of the list (`blocks`). `path` is where the module with the list is,
    empty for the wrapped one itself.

    Raises InvalidModuleError if `value` has Variables in it, and is or replaces such a container.
    """
    is_container, is_mapping = isinstance(value, list | tuple | Mapping), isinstance(value, Mapping)
    is_part = not is_container or isinstance(value, LinenSubmodule)
    if is_part or not has_any(value, LinenSubmodule | nnx.Variable):
        return
    found = found_at(owner, path, name)
    own = None if isinstance(found, LinenSubmodule) else found
    is_list = not is_mapping and has_any(value, LinenSubmodule)
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
        items = cast("Mapping[Any, Any]", value).items()
        return {key: _as_parts(owner, item) for key, item in items}
    parts = [_as_parts(owner, item) for item in value]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _flatten(submodule: LinenSubmodule) -> tuple[Any, tuple[Any, ...]]:
    own = as_dicts(submodule)
    keys = tuple(sorted(own))
    return [(jax.tree_util.DictKey(key), own[key]) for key in keys], keys


def _unflatten(keys: tuple[Any, ...], values: Iterable[Any]) -> Any:
    # A mapped tree belongs to no model, so it is a plain dict.
    return dict(zip(keys, values, strict=True))


jax.tree_util.register_pytree_with_keys(LinenSubmodule, _flatten, _unflatten)
