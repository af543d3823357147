"""`Module`: the base class of NNX modules that are written as Linen modules."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Generator, Iterable
from typing import Any, Self, dataclass_transform

from flax import nnx

from bridge._conversion.linen_attributes import LinenStyle
from bridge._errors import DeclarationError
from bridge._flax.objects import attributes_of, is_note
from bridge._flax.tabulate import uncounted
from bridge._module_calls import as_rngs, joined, record_of
from bridge._train_eval import MODE_FIELDS

from .attributes import (
    IS_SETUP,
    MODULE_PREFIX,
    NAMES,
    SCOPE,
    Ref,
    drop_name,
    is_part,
    names_of,
    priorities_of,
    put_part,
    refs,
    set_name,
    set_priority,
)
from .calling import made_by_setup, with_entries
from .containers import mapped
from .declaring import Declaring
from .running import Running
from .submodules import assign, auto_name, place_submodule

# Quicker than `super()`.
_get = object.__getattribute__


# Says that a constructor was given no `parent`; None stands for a module that stands alone.
_UNSET: Any = object()


class ModuleMeta(type(nnx.Module)):
    """Takes `name`, `parent` and `rngs` of a constructor, and gives a submodule its place."""

    bridge__has_own_init: bool

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        parameters: Any = getattr(cls, "__dataclass_fields__", {})
        if cls.bridge__has_own_init:
            parameters = inspect.signature(cls.__init__).parameters
        parent = _UNSET if "parent" in parameters else kwargs.pop("parent", _UNSET)
        rngs = None if "rngs" in parameters else kwargs.pop("rngs", None)
        name = kwargs.get("name") if "name" in parameters else kwargs.pop("name", None)
        if name is not None and not isinstance(name, str):
            raise DeclarationError.of_argument(cls.__name__, "name as a str", name)
        module: Any = super().__call__(*args, **kwargs)
        if rngs is not None:
            streams = as_rngs(rngs, cls.__name__)
            module.bridge__rngs = streams.fork() if isinstance(rngs, nnx.Rngs) else streams
        return _placed(module, name, parent)

    def _pytree_meta_construct(cls, self: Any, *args: object, **kwargs: object) -> None:
        vars(self)[IS_SETUP] = False
        super()._pytree_meta_construct(self, *args, **kwargs)


@dataclass_transform(field_specifiers=(dataclasses.field,))
class Module(  # pyright: ignore[reportIncompatibleMethodOverride]
    Declaring, Running, metaclass=ModuleMeta
):
    """An NNX module that is written like a Linen class: only its base class is another one.

    Annotations are fields; submodules and variables are made in `setup` or in a `compact` method.
    `lazy_init` creates the variables and leaves them in the module. From then on it is an NNX
    module like any other: `model.Dense_0.kernel`. `init` and `apply` do not change the module and
    work on variables by collection, as Linen's do.

    A submodule may be another `bridge.Module`, any NNX module, or a Linen module, which becomes a
    `ToNNX`. In a compact method, `linen_in_bridge_mdl` and `nnx_in_bridge_mdl` give it its name.

    Args:
      *args: the fields, in order.
      name: the name in the module around it; by default the attribute's, or `Dense_0`.
      parent: None for a module that is no submodule, though a method of another one makes it.
      rngs: where the keys of `lazy_init` and of later calls come from: an `nnx.Rngs`, which is
        forked, a number, a key, or a dict of keys by stream name.
      **kwargs: fields by name.

    Raises:
      InvalidRngsError: `rngs` has another form.
      DeclarationError: `name` is not text, or `parent` is not a module that is being called.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> import bridge
      >>> class Dense(bridge.Module):
      ...     features: int
      ...     @bridge.compact
      ...     def __call__(self, x):
      ...         init, shape = jax.nn.initializers.lecun_normal(), (x.shape[-1], self.features)
      ...         return x @ self.param('kernel', init, shape)
      >>> x = jnp.ones((1, 2))
      >>> model = bridge.lazy_init(Dense(3, rngs=0), x)
      >>> model(x).shape, type(model.kernel).__name__
      ((1, 3), 'Param')
      >>> variables = Dense(3).init(0, x)
      >>> bool(jnp.array_equal(variables['params']['kernel'], model.kernel[...]))
      True

    Source: flax/nnx/bridge/module.py:Module @ 0.12.8
    """

    bridge__rngs: nnx.Rngs | None = None
    # The submodules that the user has put in the place of others, in which they stay.
    bridge__replaced: tuple[str, ...] = ()

    def __init_subclass__(cls, kw_only: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.bridge__has_own_init = True
        with_entries(cls)
        _with_fields(cls, kw_only=kw_only)

    def __post_init__(self) -> None:
        """Does nothing; a class that has its own may call it, as in Linen."""

    def setup(self) -> None:
        """Makes submodules and variables; runs once, before the first method."""

    @property
    def attr_priorities(self) -> dict[str, int]:
        """The values that `set_attr_priority` has set, by attribute."""
        return priorities_of(self)

    @uncounted
    def set_attr_priority(self, name: str, value: int) -> None:
        """Sets which of several attributes gives the variables of a shared module their path.

        Args:
          name: the attribute.
          value: an `AttrPriority`; the smallest one decides.
        """
        set_priority(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        # No `__getattr__`, which Python does not ask where the class has the name: a default, or a
        # method of NNX.
        own = attributes_of(self)
        if NAMES in own:
            for known, structure in own[NAMES]:
                if known == name:
                    return _read(self, name, structure)
        return _get(self, name)

    def __getattr__(self, name: str) -> Any:
        if not (name.startswith(("__", MODULE_PREFIX)) or is_note(name)):
            if hasattr(type(self), name):
                # A property raised; reading it again raises its own error.
                return super().__getattribute__(name)
            own, top = vars(self), joined()
            is_here = top is None or top.call.find(self)
            if name not in own and not own.get(IS_SETUP, True) and is_here:
                made_by_setup(self)
                if name in own or name in names_of(self):
                    return getattr(self, name)
            if name == "name":
                # No property: a class may have a field of that name.
                record = record_of(self)
                return record.path[-1] if record is not None and record.path else None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __nnx_repr__(self) -> Generator[Any]:
        for item in super().__nnx_repr__():
            if not str(getattr(item, "key", "")).startswith(MODULE_PREFIX):
                yield item

    def __setattr__(self, name: str, value: object) -> None:
        assign(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name in names_of(self) and name not in vars(self):
            drop_name(self, name)
        else:
            super().__delattr__(name)

    def _graph_node_flatten(self) -> tuple[list[tuple[str, Any]], type[Self]]:
        flattened: list[Any] = super()._graph_node_flatten()[0]
        attributes = [item for item in flattened if item[0] != SCOPE]
        scope = self.scope
        if scope is not None:
            attributes.append((SCOPE, scope))
            # `nnx.merge` hands out the leaves in the order of the names.
            attributes.sort(key=lambda item: item[0])
        return attributes, type(self)

    def _graph_node_init(self, attributes: Iterable[tuple[str | int, Any]]) -> None:
        record = record_of(self)
        held: dict[Any, Any] = dict(attributes)
        if record is not None:
            held.pop(SCOPE, None)
        top = joined()
        if top is not None:
            top.call.has_copies = True
        vars(self).update(held)

    def _graph_node_set_key(self, key: str, value: object) -> None:
        held = vars(self).get(key)
        if isinstance(held, nnx.Variable) and isinstance(value, nnx.Variable):
            held.update_from_state(value)
        elif is_part(value):
            put_part(self, key, value)
        else:
            setattr(self, key, value)

    def _graph_node_pop_key(self, key: str) -> Any:
        value = vars(self)[key]
        if key not in names_of(self) and hasattr(type(self), key):
            # What comes back is read again, and not the member of the class.
            set_name(self, key, Ref(key))
        delattr(self, key)
        return value


for _mode in MODE_FIELDS:
    # NNX sets what a module has. No type checker takes it for a field.
    setattr(Module, _mode, None)


def _with_fields(cls: Any, *, kw_only: bool) -> None:
    """Makes the annotations of a class fields of a dataclass."""
    for name in inspect.get_annotations(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), None)
        if owner in Module.__mro__:
            # Else a method of Linen or NNX, such as `train`, would be the default of the field.
            setattr(cls, name, dataclasses.field())
    dataclasses.dataclass(repr=False, kw_only=kw_only)(cls)
    # A dataclass that compares by value is not hashable, and NNX needs its nodes to be.
    cls.__hash__ = object.__hash__


def _placed(module: LinenStyle, name: str | None, parent: object) -> Any:
    """Makes a module a submodule of the one that is being called, unless it is to stand alone."""
    record = joined()
    if parent is None or (record is None and parent is _UNSET):
        return module
    if parent is not _UNSET:
        record = record and record.call.find(parent)
        if record is None:
            expected = "parent=None or a bridge.Module that is being called"
            raise DeclarationError.of_argument(type(module).__name__, expected, parent)
    if record is None or (record.in_setup and name is None):
        # In setup it gets its name when it is assigned.
        return module
    if not record.is_declaring:
        what = f"Submodule {type(module).__name__}"
        raise DeclarationError.of_place(what, type(record.module).__name__)
    return place_submodule(record, name or auto_name(record, type(module)), module)


def _read(module: LinenStyle, name: str, structure: object) -> Any:
    """What a read of an attribute returns, if `set_name` has said something about it.

    Raises:
      AttributeError: a part is gone, or the class has no member of this name.
    """
    own = attributes_of(module)
    if any(n not in own and not n.startswith(MODULE_PREFIX) for n in refs(structure)):
        found: Any = inspect.getattr_static(type(module), name)
        get = getattr(type(found), "__get__", None)
        return found if get is None else get(found, module, type(module))

    def resolved(_: str, item: object) -> Any:
        if not isinstance(item, Ref):
            return item
        if item.name not in own:
            return made_by_setup(module)[item.name]
        record = record_of(module)
        return own[item.name] if record is None else record.in_use(own[item.name])

    return mapped(structure, resolved)
