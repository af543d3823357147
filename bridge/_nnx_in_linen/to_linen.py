"""`ToLinen`: an NNX module as a Linen module."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, ClassVar, Self

import jax
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict

import registry
from bridge._conversion import convert
from bridge._conversion.matching import Comparison
from bridge._conversion.neutral import Address, by_address, has_leaf, nest
from bridge._conversion.own_leaves import ARRAYS, GRAPHDEF, STATIC, with_graphdefs
from bridge._equality.bounded_cache import BoundedCache
from bridge._equality.contents import contents
from bridge._errors import (
    LostUpdateError,
    MismatchError,
    lost_update_text,
    path_text,
    unknown_paths_text,
    untold_change_text,
    warn,
)
from bridge._flax.linen_modules import PlainFields, registered_names, shares_scope
from bridge._graphdefs import static_graphdef
from bridge._graphdefs.leaves import GraphDefLeaf
from bridge._graphdefs.static_graphdef import StaticGraphDef
from bridge._initialization.lazy_init import initialized, run_initializing
from bridge._randomness.streams import fold_path, stream_for, stream_of

from . import construction, scope_variables
from .arguments import Existing, check_class, freeze_arguments, holds_no_module, thaw
from .bound_module import BoundModule, method_in_modes
from .given import check_arguments, check_instance
from .matched_variables import MatchedVariables, comparison, overlay, slot_avals
from .nnx_attributes import attribute, bound_method
from .subclassing import GivenArgs, GivenKwargs, WithOptions, frozen

_warned: BoundedCache[bool] = BoundedCache(maxsize=4096)


# The fields of a ToLinen that never hold a Linen module, and with those that may.
_OPTIONS = frozenset(
    (
        "nnx_class",
        "skip_rng",
        "strict",
        "rng_state",
        "string_keys",
        "eager_sharding",
        "metadata_fn",
    )
)
_ALL_FIELDS = _OPTIONS | {"args", "kwargs"}
# Those that flax.nnx.bridge does not have.
_OWN_OPTIONS = frozenset({"strict", "rng_state", "string_keys", "eager_sharding"})


class ToLinen(PlainFields, metaclass=WithOptions):
    """A Linen module that behaves as the NNX module it constructs.

    The module is constructed once, at `init`; its state goes to one collection for each Variable
    type, its static definition to collection `nnx`. `apply` puts the two together and calls the
    module.

    What a call changes comes back in the collections that are mutable. If it changes more than
    leaves tell (a Python attribute, the class of a submodule, a parameter that it creates or
    removes), `nnx` has to be one of them: the new definition is in it, and what was removed is gone
    from the returned collections.

    An array among the constructor's arguments that the module keeps as it is, such as
    `self.table = table`, is configuration and no state: it is not in the variables, and each call
    uses the argument that it is given, with its gradient. It becomes state in `nnx_arrays` when a
    call puts another array in its place. What the constructor computes is state from `init` on.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> import bridge
      >>> model = bridge.ToLinen(nnx.Linear, args=(32, 64))
      >>> variables = model.init(jax.random.key(0), jnp.ones((1, 32)))
      >>> sorted(variables), variables['params']['kernel'].shape
      (['nnx', 'params'], (32, 64))

    Attributes:
      nnx_class: the NNX module's class, not an instance.
      args: its constructor's positional arguments.
      kwargs: its constructor's keyword arguments; `rngs` is added if the constructor takes it.
      skip_rng: True if `rngs` must not be passed even though the constructor takes it.
      metadata_fn: Variable -> the leaf in Linen variables; by default a value, or a metadata box if
        the Variable's metadata says something. None for bare values always.
      strict: True makes unknown variables and dropped updates errors, False takes what is there. By
        default missing and mis-shaped parameters are errors, and the others warnings.
      rng_state: False keeps RNG state out of the variables; keys then come from `rngs=` alone.
      string_keys: True writes the integer keys of `nnx.List` as strings, for tools that join paths.
      eager_sharding: whether the constructor's annotated Variables are sharded at once. By default
        they are if a mesh is in force and `nnx.using_eager_sharding()`, as natively; those whose
        names are no axes of the mesh are left as they are, and so are all without a mesh, where a
        native constructor raises.

    Raises:
      InvalidModuleError: `nnx_class` is an instance, a function or a Linen class; or `args` are no
        sequence, or `kwargs` no mapping by name.

    Source: flax/nnx/bridge/wrappers.py:ToLinen @ 0.12.8
    """

    nnx_class: Callable[..., Any]
    args: Any = ()
    kwargs: Mapping[str, Any] = FrozenDict({})
    skip_rng: bool = False
    metadata_fn: Callable[[Any], Any] | None = convert.to_linen_var
    strict: bool | None = None
    rng_state: bool = True
    string_keys: bool = False
    eager_sharding: bool | None = None

    # Annotated it must be a ClassVar: a field would be an argument of the constructor itself.
    _options: ClassVar[frozenset[str]] = _OWN_OPTIONS

    def __post_init__(self) -> None:
        check_class(self.nnx_class)
        check_arguments(self.nnx_class, self.args, self.kwargs)
        # Linen hashes and compares modules by their fields.
        args, kwargs = freeze_arguments(frozen(self.args), frozen(self.kwargs))
        is_plain = holds_no_module(args) and holds_no_module(kwargs)
        if is_plain and type(self) is not ToLinen:
            # A subclass may construct the module itself.
            args, kwargs = GivenArgs(args), GivenKwargs(kwargs)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)
        object.__setattr__(self, "_plain_fields", _ALL_FIELDS if is_plain else _OPTIONS)
        super().__post_init__()

    @nn.nowrap
    def clone(self, **options: Any) -> Self:
        # A deep clone looks for modules in every list and dict, and turns it into another type.
        arguments = {"args": frozen(self.args), "kwargs": frozen(self.kwargs)}
        is_deep = options.get("_deep_clone", False) is not False
        return super().clone(**(arguments if is_deep else {}) | options)

    def __init_subclass__(cls, **options: Any) -> None:
        # A dataclass gets its own, which compare what its fields are and not what they hold.
        for name in ("__eq__", "__hash__"):
            if name not in vars(cls):
                setattr(cls, name, vars(ToLinen)[name])
        super().__init_subclass__(**options)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ToLinen) or type(self) is not type(other):
            return NotImplemented
        return self is other or self._contents == other._contents

    def __hash__(self) -> int:
        return hash(self._contents)

    @property
    def _contents(self) -> Any:
        """What the fields hold at this moment."""
        fields: Any = [f.name for f in dataclasses.fields(self) if f.compare]
        return contents(tuple(getattr(self, name) for name in fields), ordered=False).key

    @classmethod
    def from_module(cls, module: nnx.Module, **options: Any) -> tuple[Self, Any]:
        """The Linen module and the variables of an NNX module that exists.

        Args:
          module: an NNX module; it is not changed.
          **options: fields of `ToLinen`, such as `strict`.

        Returns:
          `(linen_module, variables)`. The module has no constructor, so it cannot be `init`ed.

        Raises:
          InvalidModuleError: `module` is a class, a State or a Linen module.
        """
        check_instance(module)
        graphdef, leaves = static_graphdef.split(module)
        linen = cls(Existing(graphdef), **options)
        flat = linen._as_linen(graphdef, leaves)
        variables = nest(
            {
                (collection, *scope_variables.spelled(path, linen.string_keys)): leaf
                for (collection, path), leaf in flat.items()
            }
        )
        return linen, with_graphdefs(variables, (((GRAPHDEF,), graphdef),))

    @nn.compact
    def __call__(self, /, *args: Any, nnx_method: Any = None, **kwargs: Any) -> Any:
        """Calls a method of the NNX module.

        Args:
          *args: the method's arguments.
          nnx_method: a name or a function of the NNX module, `__call__` by default.
          **kwargs: the method's keyword arguments.

        Returns:
          The method's output.

        Raises:
          MismatchError: the variables do not fit the module.
          MissingRngError: a key is drawn from a stream that has none.
          InvalidMethodError: there is no such method.
          LostUpdateError: `strict` is True and an update would be dropped.
        """
        return self._run(nnx_method, args, kwargs)

    def run_nnx_method(self, nnx_method: Any, /, *args: Any, **kwargs: Any) -> Any:
        """`__call__` with the method first, which stays as it is on a class that was transformed.

        A lifted transform of the class takes only the methods that it is told to, `__call__` by
        default; the others run outside of it, as the methods of any Linen module do.
        """
        return self._run(nnx_method, args, kwargs)

    @nn.nowrap
    def _run(self, nnx_method: Any, args: Any, kwargs: Any) -> Any:
        variables = scope_variables.read(self)
        graphdef = scope_variables.stored_graphdef(self)
        call = construction.Call(nnx_method, args, kwargs)
        rebuilt = functools.partial(self._rebuilt, variables, call)
        if graphdef is not None and not self._recipe.made(graphdef, rebuilt):
            # Made with other arguments: one model for training and one for evaluation, say.
            graphdef = None
        # As with Linen's own `param`, a call creates what is not there where it may.
        is_init = self.is_initializing()
        may_create = is_init or (self.is_mutable_collection("params") and not has_leaf(variables))
        found = None if graphdef is None else self._found(graphdef, variables)
        if found is None and not is_init:
            names = self._stream_names(variables)
            found = construction.found_for(self._recipe, names, call, variables, self._where)
        if found is not None:
            compared = comparison(found, rng=may_create)
            if not (may_create and compared.missing):
                self._check(compared)
                return self._apply(found, nnx_method, args, kwargs)
        output, graphdef = self._init(variables, nnx_method, args, kwargs)
        if is_init:
            return output
        # This is a call, and what it changes belongs to the result.
        return self._apply(
            self._found(graphdef, scope_variables.read(self)), nnx_method, args, kwargs
        )

    @nn.nowrap
    def _found(self, graphdef: StaticGraphDef, variables: Mapping[str, Any]) -> MatchedVariables:
        return MatchedVariables(graphdef, variables, self._recipe.kept(graphdef))

    @nn.nowrap
    def _check(self, compared: Comparison) -> None:
        if compared.missing or (compared.mis_shaped and self.strict is not False):
            raise compared.error(self._where)

    @nn.nowrap
    def _init(
        self, variables: Mapping[str, Any], method: Any, args: Any, kwargs: Any
    ) -> tuple[Any, StaticGraphDef]:
        """Constructs the module, and writes it and what the call creates: (output, definition)."""
        scope_variables.store_graphdef(self, None)
        recipe = self._recipe
        module, nodes, given = recipe.construct(self._streams(), self._where)
        leaves = by_address(variables)
        if leaves:
            graphdef, constructed = static_graphdef.split(module)
            graphdef = static_graphdef.with_given(graphdef, given)
            found = self._found(graphdef, variables)
            self._check(dataclasses.replace(comparison(found), missing=()))
            overlay(constructed, found)
        find = functools.partial(method_in_modes, method=method)
        module, output = initialized(module, find, args, kwargs, nodes)
        graphdef, made = static_graphdef.split(module, recipe.origin, given)
        # An argument is no state: each call is given its own.
        arguments = {(ARRAYS, path) for path, _ in given}
        new = {a: x for a, x in self._as_linen(graphdef, made).items() if a not in arguments}
        self._check_kept(new, leaves)
        self._write(new, leaves, {})
        scope_variables.store_graphdef(self, graphdef)
        return output, graphdef

    @nn.nowrap
    def _check_kept(self, made: Mapping[Address, Any], found: Mapping[Address, Any]) -> None:
        """Raises for variables that a lifted transform would leave behind, as Linen does."""
        is_mutable = functools.cache(self.is_mutable_collection)
        active = registry.current()
        lost = [
            (path_text(*address), "its collection among those that the transform lifts")
            for address in made
            if not is_mutable(address[0])
            and address not in found
            and not issubclass(active.type_from_name(address[0]), nnx.RngState | nnx.Intermediate)
        ]
        if lost:
            raise MismatchError(self._where, missing=lost)

    @nn.nowrap
    def _rebuilt(
        self, variables: Mapping[str, Any], call: construction.Call | None = None
    ) -> StaticGraphDef:
        names = self._stream_names(variables)
        return construction.rebuild(self._recipe, names, call, self._where)

    @nn.nowrap
    def _stream_names(self, variables: Mapping[str, Any]) -> tuple[str, ...]:
        """The RNG streams that a constructor gets which is only traced."""
        stored = (stream_of(address, leaf) for address, leaf in by_address(variables).items())
        return tuple(sorted({*self._rngs, "default", *filter(None, stored)} - {"params"}))

    @nn.nowrap
    def _apply(self, found: MatchedVariables, method: Any, args: Any, kwargs: Any) -> Any:
        keys: dict[str, Any] = {}
        streams: dict[Address, str] = {}
        merged = BoundModule(
            found,
            functools.partial(self._seed, keys, streams, found.leaves),
            self.is_mutable_collection,
            [name for name in self._rngs if name != "params"],
        )
        self._report_unknown(merged.refused() if self.strict else ())
        # The state at init is the state as constructed, and what the call creates.
        run = run_initializing if self.is_initializing() else None
        output = merged.call(method, args, kwargs, self._where, run)
        self._give_back(keys.keys() - {streams[address] for address in merged.drawn()})
        self._report_unknown(merged.unused())
        self._keep(found, merged)
        return output

    @nn.nowrap
    def _keep(self, found: MatchedVariables, merged: BoundModule) -> None:
        """Writes what a call has changed, all of it or none."""
        updates = merged.updates()
        kept = {a: self._leaf(item) for a, item in updates.items() if self._may_update(a, item)}
        graphdef = self._new_definition(found, merged, kept)
        if graphdef is not None:
            # Before the updates: a leaf may be gone to make room for a subtree.
            gone = merged.removed() - graphdef.slots.addresses
            scope_variables.remove(self, map(found.placed, gone))
            scope_variables.store_graphdef(self, graphdef)
        if kept:
            places = {address: found.placed(address) for address in kept}
            self._write(kept, found.leaves, places)

    @nn.nowrap
    def _new_definition(
        self, found: MatchedVariables, merged: BoundModule, kept: Mapping[Address, Any]
    ) -> StaticGraphDef | None:
        """The GraphDef to be stored: None if it is the old one, or if it cannot be.

        It cannot where its collection is not mutable, or another one whose leaves come or go with
        it: a definition and the leaves that it needs have to stay together.
        """
        graphdef = merged.definition()
        if graphdef is None:
            return None
        addresses, updates = graphdef.slots.addresses, merged.updates()
        given = ((ARRAYS, path) for path, _ in found.graphdef.given)
        still = {a for a in given if a in addresses and a not in updates}
        graphdef = static_graphdef.with_given(
            graphdef, tuple(item for item in found.graphdef.given if (ARRAYS, item[0]) in still)
        )
        is_mutable = functools.cache(self.is_mutable_collection)
        needed = {s.address for s in graphdef.slots if self.rng_state or not s.is_rng}
        touched = {STATIC, *(collection for collection, _ in merged.removed())}
        if needed <= found.leaves.keys() | kept.keys() and all(map(is_mutable, touched)):
            return graphdef
        untold = merged.untold(self._leaf)
        if untold:
            places = ["/".join(map(str, path)) for path in untold]
            text = untold_change_text(self._where, places)
            if self.strict:
                raise LostUpdateError(text)
            self._warn_once(tuple(places), text)
        return None

    @nn.nowrap
    def _streams(self) -> dict[str, Any]:
        """The scope's keys by the stream names of `nnx.Rngs`; `params` serves what is missing."""
        keys = {name: rng.as_jax_rng() for name, rng in self._rngs.items()}
        if "params" in keys and "default" not in keys:
            keys["default"] = keys.pop("params")
        return keys

    @nn.nowrap
    def _seed(
        self,
        keys: dict[str, Any],
        streams: dict[Address, str],
        stored: Container[Address],
        slot: GraphDefLeaf,
    ) -> Any:
        """The key that this call's `rngs` give to a stream: another for each stream and call.

        Args:
          keys: what was drawn from the scope so far, by its streams; is added to.
          streams: the scope's stream behind each leaf; is added to.
          stored: the leaves that the variables have.
          slot: a leaf of the stream.
        """
        is_stored = slot.address in stored
        name = stream_for(slot.metadata.get("tag"), self._rngs, is_stored=is_stored)
        if name is None or self.is_initializing():
            return None
        streams[slot.address] = name
        if name not in keys:
            keys[name] = self.make_rng(name)
        return fold_path(keys[name], slot.path[:-1])

    @nn.nowrap
    def _give_back(self, unused: Iterable[str]) -> None:
        """Undoes the draws from streams of the scope whose keys the call has not used.

        The module has to have its keys before it is called. A `ToNNX` around it moves the streams
        on that were drawn from, and one that is deterministic is to leave them alone.
        """
        counters: Any = self.scope.rng_counters if self.scope is not None else {}
        for name in unused:
            counters[name] -= 1

    @nn.nowrap
    def _report_unknown(self, unknown: Iterable[Address]) -> None:
        if type(self).__call__.__module__ != ToLinen.__call__.__module__ or shares_scope(self):
            # A subclass may have variables of its own, also some that it makes after this, and so
            # may a module that shares the scope.
            return
        own = registered_names(self)
        addresses = [a for a in unknown if not a[1] or a[1][0] not in own]
        if addresses and self.strict:
            raise MismatchError(self._where, unknown=[path_text(*a) for a in addresses])
        if addresses and self.strict is None:
            paths = tuple(path_text(*address) for address in addresses)
            self._warn_once(paths, unknown_paths_text(self._where, paths))

    @nn.nowrap
    def _may_update(self, address: Address, item: Any) -> bool:
        """Whether an update can be kept; if it cannot, that is said once."""
        collection = address[0]
        if self.is_mutable_collection(collection):
            return True
        var_type = item.var_type if isinstance(item, nnx.Variable) else object
        is_rng = issubclass(var_type, nnx.RngState)
        if not issubclass(var_type, nnx.Intermediate) and (self.rng_state or not is_rng):
            text = lost_update_text(self._where, collection, is_rng)
            if self.strict:
                raise LostUpdateError(text)
            self._warn_once(collection, text)
        return False

    @nn.nowrap
    def _warn_once(self, what: Any, text: str) -> None:
        if _warned.is_new((contents(self.nnx_class).key, self.path, what)):
            warn(text)

    @property
    def _rngs(self) -> Mapping[str, Any]:
        return self.scope.rngs if self.scope is not None else {}

    @property
    def _recipe(self) -> construction.Recipe:
        return construction.Recipe(
            self.nnx_class,
            frozen(self.args),
            frozen(self.kwargs),
            self.skip_rng,
            self.eager_sharding,
        )

    @property
    def _where(self) -> str:
        place = "/".join(self.path) if self.scope is not None else ""
        return f"ToLinen({self._recipe.name})" + (f" at {place}" if place else "")

    @nn.nowrap
    def _leaf(self, item: Any) -> Any:
        if not isinstance(item, nnx.Variable):
            return item
        return item.get_value() if self.metadata_fn is None else self.metadata_fn(item)

    @nn.nowrap
    def _as_linen(self, graphdef: StaticGraphDef, leaves: Iterable[Any]) -> dict[Address, Any]:
        """Leaves of Linen variables for the leaves of a module."""
        return {
            slot.address: self._leaf(leaf)
            for slot, leaf in zip(graphdef.slots, leaves, strict=True)
            if self.rng_state or not slot.is_rng
        }

    @nn.nowrap
    def _write(
        self,
        leaves: Mapping[Address, Any],
        found: Mapping[Address, Any],
        keys: Mapping[Address, Address],
    ) -> None:
        scope_variables.write(self, leaves, found, keys, string_keys=self.string_keys)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if not name.startswith("_") and "nnx_class" in own and "kwargs" in own:
            if name in own["kwargs"]:
                return thaw(own["kwargs"][name])
            cls = own["nnx_class"]
            cls = cls.module_type if isinstance(cls, Existing) else getattr(cls, "func", cls)
            if callable(getattr(cls, name, None)):
                return bound_method(self, name)
            found = self._attribute(name) if own.get("scope") is not None else _MISSING
            if found is _MISSING and inspect.getattr_static(cls, name, None) is not None:
                found = self._constant(name)
            if found is not _MISSING:
                return found
        return super().__getattr__(name)

    @nn.nowrap
    def _attribute(self, name: str) -> Any:
        """An attribute of the bound NNX module, `_MISSING` if there is none."""
        variables = scope_variables.read(self)
        graphdef = scope_variables.stored_graphdef(self) or self._rebuilt(variables)
        found = self._found(graphdef, variables)
        if not comparison(found).fits:
            return _MISSING
        module = BoundModule(found, lambda slot: None).module
        return attribute(self, (name,), getattr(module, name, _MISSING))

    @nn.nowrap
    def _constant(self, name: str) -> Any:
        """A property of the class that needs no variables, `_MISSING` if it does need them."""
        graphdef = self._rebuilt({})
        module = graphdef.blueprint.build(slot_avals(graphdef)).module
        try:
            value = getattr(module, name, _MISSING)
        except Exception:
            # It computes with a value, and there are only shapes.
            return _MISSING
        is_abstract = any(
            isinstance(leaf, nnx.Pytree | nnx.Variable | jax.ShapeDtypeStruct)
            for leaf in jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, nnx.Variable))
        )
        return _MISSING if is_abstract else value


_MISSING = object()


def to_linen(
    nnx_class: Callable[..., Any],
    *args: Any,
    metadata_fn: Callable[[Any], Any] | None = convert.to_linen_var,
    name: str | None = None,
    skip_rng: bool = False,
    abstract_init: bool = True,
    **kwargs: Any,
) -> ToLinen:
    """`ToLinen` with the constructor's arguments passed as in the constructor's own call.

    Args:
      nnx_class: the NNX module's class.
      *args: its constructor's positional arguments.
      metadata_fn: as for `ToLinen`.
      name: the Linen name. A constructor argument called `name` goes through `ToLinen(…, kwargs=)`.
      skip_rng: as for `ToLinen`.
      abstract_init: accepted for programs that pass it; it never had an effect.
      **kwargs: its constructor's keyword arguments.

    Returns:
      A Linen module.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> import bridge
      >>> model = bridge.to_linen(nnx.Linear, 32, out_features=64)
      >>> model.init_with_output(jax.random.key(0), jnp.ones((1, 32)))[0].shape
      (1, 64)

    Source: flax/nnx/bridge/wrappers.py:to_linen @ 0.12.8
    """
    return ToLinen(
        nnx_class,
        args=args,
        kwargs=kwargs,
        metadata_fn=metadata_fn,
        skip_rng=skip_rng,
        name=name,
    )
