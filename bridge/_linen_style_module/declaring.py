"""The methods with which a `bridge.Module` uses its variables and keys, named as Linen's are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from flax.core import meta

import registry
from bridge._bounded_cache import BoundedCache
from bridge._conversion import linen_leaves
from bridge._conversion.collections import OUTPUTS
from bridge._conversion.inner_boxes import boxed
from bridge._conversion.linen_attributes import LinenStyle
from bridge._conversion.matching import compare, same_shape
from bridge._conversion.neutral import Address
from bridge._errors import DeclarationError, MismatchError, NotInitializedError, path_text
from bridge._fingerprint import fingerprint
from bridge._flax.nodes import nodes_below
from bridge._flax.objects import CAPTURES, is_initializing
from bridge._flax.tabulate import uncounted
from bridge._flax.variables import raw_value
from bridge._module_calls import ModuleInCall, Scope, record_of
from bridge._sharding.eager import in_shards
from bridge._types import VariableType

from . import variables
from .attributes import SCOPE
from .submodules import reserve


class Declaring(LinenStyle):
    """The part of `bridge.Module` that declares, reads and writes variables."""

    @property
    def scope(self) -> Scope | None:
        """The keys and the mutable collections of the call, None outside of a call."""
        record = record_of(self)
        return vars(self).get(SCOPE) if record is None else record.scope

    @property
    def path(self) -> tuple[str, ...]:
        """The names that lead from the outermost module of the call to this one.

        Raises:
          ValueError: outside of a call.
        """
        record = record_of(self)
        if record is None:
            raise DeclarationError.of_use("a module has a path", type(self).__name__)
        return record.path

    @uncounted
    def param(
        self,
        name: str,
        init_fn: Callable[..., Any],
        *init_args: object,
        unbox: bool = True,
        **init_kwargs: object,
    ) -> Any:
        """Declares a parameter.

        Args:
          name: its name.
          init_fn: a function that makes the initial value from a key and the other arguments.
          *init_args: further arguments of `init_fn`.
          unbox: whether to return the Variable instead of Linen's metadata box.
          **init_kwargs: keyword arguments of `init_fn`.

        Returns:
          The `nnx.Param`, or the box around its value.

        Raises:
          DeclarationError: neither `setup` nor a compact method runs.
          NameInUseError: the name is taken.
          MismatchError: there is no such parameter, or it has another shape.
          NotInitializedError: the module has no variables yet.
          MissingRngError: there is no key for the initial value.
        """
        record = _declared(self, name, "param")
        found = variables.find_declared(self, "params", name)
        if found is None and _is_creating(record, "params"):
            key = record.scope.make_rng("params")
            found = _created(record, "params", name, init_fn(key, *init_args, **init_kwargs))
            return found if unbox else boxed(found)
        wanted = _abstract_param(init_fn, init_args, init_kwargs)
        if found is None:
            raise _absent(record, "params", name, wanted)
        _check(record, "params", name, wanted, raw_value(found))
        return found if unbox else boxed(found)

    @uncounted
    def variable(
        self,
        col: str,
        name: str,
        init_fn: Callable[..., Any] | None = None,
        *init_args: object,
        unbox: bool = True,
        **init_kwargs: object,
    ) -> Any:
        """Declares a variable of a collection.

        Args:
          col: the collection.
          name: the variable's name.
          init_fn: a function that makes the initial value; without it the variable has to exist.
          *init_args: arguments of `init_fn`.
          unbox: has no effect, because the Variable holds the value and the metadata.
          **init_kwargs: keyword arguments of `init_fn`.

        Returns:
          The Variable, of the collection's Variable type.

        Raises:
          DeclarationError: neither `setup` nor a compact method runs.
          NameInUseError: the name is taken, also by a variable of another collection.
          MismatchError: there is no such variable, and the call may not create it.
          NotInitializedError: the module has no variables yet.
        """
        del unbox
        record = _declared(self, name, "variable")
        found = variables.find_declared(self, col, name)
        if found is None and init_fn is not None and _is_creating(record, col):
            found = _created(record, col, name, init_fn(*init_args, **init_kwargs))
        elif found is None:
            make = init_fn and functools.partial(init_fn, *init_args, **init_kwargs)
            raise _absent(record, col, name, make and _abstract(col, make))
        return found

    @uncounted
    def has_variable(self, col: str, name: str) -> bool:
        """Whether there is a variable, or a submodule with variables, of that name."""
        found = variables.find(self, col, name)
        return found is not None or variables.held_below(self, col, name) is not None

    @uncounted
    def get_variable(self, col: str, name: str, default: object = None) -> Any:
        """The value of a variable or the variables of a submodule; `default` if neither exists."""
        found = variables.find(self, col, name)
        value = variables.held_below(self, col, name) if found is None else found.get_value()
        return default if value is None else value

    @uncounted
    def put_variable(self, col: str, name: str, value: object) -> None:
        """Gives a variable a value, and creates it if it does not exist.

        Raises:
          ImmutableCollectionError: the call may not update the collection; of a variable that
            exists it is raised by `apply`, after the call.
        """
        found = variables.find_declared(self, col, name)
        if found is None:
            if not Declaring.is_mutable_collection(self, col):
                raise variables.immutable(self, col)
            variables.add(self, col, name, variables.made(col, name, value))
        else:
            found.set_value(_merged(found.get_value(), value))

    @uncounted
    def is_mutable_collection(self, col: str) -> bool:
        """Whether the call may update a collection; by default it may update all."""
        scope = self.scope
        return scope is None or scope.is_mutable_collection(col)

    @uncounted
    def is_initializing(self) -> bool:
        """Whether `init` or `lazy_init` runs."""
        return is_initializing(self)

    @uncounted
    def has_rng(self, name: str) -> bool:
        """Whether a key can be drawn from a stream."""
        scope = self.scope
        return scope is not None and scope.has_rng(name)

    @uncounted
    def make_rng(self, name: str = "default") -> jax.Array:
        """The next key of a stream; `default`, then `params`, replaces a missing one.

        Raises:
          DeclarationError: outside of a call.
          MissingRngError: there is no such stream.
        """
        scope = self.scope
        if scope is None:
            raise DeclarationError.of_use("a module draws keys", type(self).__name__)
        return scope.make_rng(name)

    @uncounted
    def sow(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        variable_type: str | VariableType,
        name: str,
        value: object,
        reduce_fn: Callable[[Any, Any], Any] = lambda before, value: (*before, value),
        init_fn: Callable[[], Any] = tuple,
        capture_noop: bool | None = None,
    ) -> bool:
        """Adds a value to an output collection if the caller asks for it, as Linen does.

        Args:
          variable_type: the collection's name, or a Variable type.
          name: the name in the collection.
          value: the value.
          reduce_fn: (stored value, value) -> the new stored value.
          init_fn: makes the first stored value.
          capture_noop: whether only `nnx.capture` may ask for it, as in `nnx.Module.sow`. None is
            False here: what `mutable` takes is not a deprecated way.

        Returns:
          Whether the value was kept: inside `nnx.capture`, or if `mutable` has the collection.
        """
        if CAPTURES in vars(self):
            return super().sow(variable_type, name, value, reduce_fn, init_fn)
        record, collection = record_of(self), _collection_name(variable_type)
        if (
            capture_noop
            or record is None
            or record.call.mutable is None
            or (is_initializing(self) and collection in OUTPUTS)
            or not record.scope.is_mutable_collection(collection)
        ):
            return False
        found = variables.find(self, collection, name)
        before = init_fn() if found is None else found.get_value()
        # A submodule may be called `put_variable`.
        Declaring.put_variable(self, collection, name, reduce_fn(before, value))
        return True

    @uncounted
    def perturb(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        name: str,
        value: object,
        collection: str | VariableType = "perturbations",
        capture_noop: bool | None = None,
    ) -> Any:
        """Adds a variable that is zero to a value, so that the value has a gradient.

        Args:
          name: the variable's name.
          value: the value.
          collection: the variable's collection, or its type.
          capture_noop: whether only `nnx.capture` may ask for it, as in `sow`.

        Returns:
          The sum; `value` if there is no such variable.
        """
        if CAPTURES in vars(self):
            return super().perturb(name, value, collection)
        if capture_noop:
            return value
        record, collection = record_of(self), _collection_name(collection)
        found = variables.find(self, collection, name)
        if found is None and record is not None and _is_creating(record, collection):
            zeros = jax.tree.map(jax.numpy.zeros_like, value)
            Declaring.put_variable(self, collection, name, zeros)
            found = variables.find(self, collection, name)
        return value if found is None else jax.tree.map(jax.numpy.add, value, found.get_value())


def _declared(module: LinenStyle, name: str, what: str) -> ModuleInCall:
    """Takes a name for a `param` or `variable` and returns the record of the module.

    Raises:
      DeclarationError: nothing may be declared now.
      NameInUseError: the name is taken.
    """
    record = record_of(module)
    if record is None or not record.is_declaring:
        kind, is_bound = type(module).__name__, record is not None
        raise DeclarationError.of_place(f"{what.capitalize()}s", kind, is_bound=is_bound)
    reserve(record, name, what)
    return record


def _is_creating(record: ModuleInCall, collection: str) -> bool:
    """Whether a variable may be created now."""
    if is_initializing(record.module):
        return True
    return record.call.mutable is not None and record.scope.is_mutable_collection(collection)


def _merged(before: object, value: object) -> Any:
    """A value that replaces another one, except that nested dicts are merged.

    Source: flax/core/scope.py:_put_variable @ 0.12.12
    """
    if not (isinstance(before, dict) and isinstance(value, Mapping)):
        return value
    return before | {key: _merged(before.get(key), item) for key, item in value.items()}


def _created(record: ModuleInCall, collection: str, name: str, value: object) -> nnx.Variable[Any]:
    root = record.call.root.module
    is_loose = not (record.is_owned or record.call.has_copies)
    # A native module below the root may hold it.
    if is_loose and not any(node is record.module for node in nodes_below(root).objects):
        raise DeclarationError.of_loose(type(record.module).__name__, type(root).__name__)
    if isinstance(value, meta.AxisMetadata):
        # As a layer of Flax beside it.
        leaves = linen_leaves.from_variables({collection: {name: value}})
        placed = in_shards(leaves, None, _where(record))
        value = linen_leaves.to_variables(placed)[collection][name]
    made = variables.made(collection, name, value)
    variables.add(record.module, collection, name, made)
    return made


# By fingerprint, as `normal()` in a method is another function in each call.
_known: BoundedCache[Any] = BoundedCache(maxsize=1024)


def _abstract_param(
    init_fn: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Any:
    """What an initializer makes of these arguments, as shapes.

    Linen traces the initializer at each call, which is most of what an eager call costs. JAX's own
    initializers depend on their arguments only, so they make the same shapes again. Any other one
    may read something that has changed, and is traced.
    """

    def traced() -> Any:
        return _abstract("params", lambda: init_fn(jax.random.key(0), *args, **kwargs))

    if getattr(init_fn, "__module__", None) not in _OF_JAX:
        return traced()
    return _known.get(fingerprint((init_fn, args, dict(kwargs))), traced)


_OF_JAX = {each.__module__ for each in (jax.nn.initializers.zeros, jax.nn.initializers.normal())}


def _abstract(collection: str, init_fn: Callable[[], Any]) -> Any:
    """The value of the Variable that an initializer makes, as shapes."""
    return jax.eval_shape(lambda: raw_value(variables.made(collection, "", init_fn())))


def _absent(record: ModuleInCall, collection: str, name: str, wanted: object) -> Exception:
    """The error for a variable that is not there; `wanted` is None if nothing is known of it."""
    root = record.call.root.module
    state = nnx.state(root, nnx.Not(nnx.RngState))
    if record.call.mutable is None and not nnx.to_flat_state(state):
        name = type(root).__name__
        return NotInitializedError(name, f"take existing ones with {name}(…).bind(variables)")
    if wanted is None:
        missing = [(path_text(collection, (*record.path, name)), "a value")]
        return MismatchError(_where(record), missing=missing)
    return compare(_leaves(record, collection, name, wanted), {}).error(_where(record))


def _check(record: ModuleInCall, collection: str, name: str, wanted: object, value: object) -> None:
    """Raises MismatchError if a variable lacks a leaf, or has one of another shape."""
    if not same_shape(wanted, value):
        comparison = compare(*(_leaves(record, collection, name, x) for x in (wanted, value)))
        if not comparison.fits:
            raise comparison.error(_where(record))


def _leaves(record: ModuleInCall, collection: str, name: str, value: object) -> dict[Address, Any]:
    """The leaves of a variable by address."""
    return {
        (collection, (*record.path, name, *(str(getattr(key, "key", key)) for key in keys))): leaf
        for keys, leaf in jax.tree_util.tree_leaves_with_path(value)
    }


def _where(record: ModuleInCall) -> str:
    return type(record.call.root.module).__name__


def _collection_name(variable_type: str | VariableType) -> str:
    """The collection that is meant by a name or a Variable type."""
    is_type = isinstance(variable_type, type)
    return registry.current().name_from_type(variable_type) if is_type else variable_type
