"""`ToLinen`: an NNX module as a Linen module."""

from __future__ import annotations

import functools
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import jax
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict, meta

import registry

from . import _conversion, _graphdef, _nnx_run, _nnx_side
from ._constructor import Existing, check_class, freeze_arguments, takes_rngs, thaw
from ._errors import (
  BridgeWarning,
  LostUpdateError,
  MissingRngError,
  lost_update_text,
  unknown_paths_text,
)
from ._flax_internals import detached
from ._graphdef import Slot, StaticGraphDef
from ._lazy_init import run_initializing
from ._neutral import Address, Path, nest
from ._once import Once

_rebuilt: Once[tuple[StaticGraphDef, bool]] = Once(maxsize=256)
_warned: Once[bool] = Once(maxsize=4096)


class ToLinen(nn.Module):
  """A Linen module that behaves as the NNX module it constructs.

  The module is constructed once, at `init`; its state goes to one collection for each Variable type,
  its static definition to collection `nnx`. `apply` puts the two together and calls the module.

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
    metadata_fn: Variable -> the leaf in Linen variables; by default a value, or a metadata box if the
      Variable's metadata says something. None for bare values always.
    strict: True makes unknown variables and dropped updates errors, False takes what fits. By default
      missing and mis-shaped parameters are errors, and the others warnings.
    rng_state: False keeps RNG state out of the variables; keys then come from `rngs=` alone.
    string_keys: True writes the integer keys of `nnx.List` as strings, for tools that join paths.

  Raises:
    InvalidModuleError: `nnx_class` is an instance, a function or a Linen class.

  Source: flax/nnx/bridge/wrappers.py:ToLinen @ 0.12.8
  """

  nnx_class: Callable[..., Any]
  args: Any = ()
  kwargs: Mapping[str, Any] = FrozenDict({})
  skip_rng: bool = False
  metadata_fn: Callable[[Any], Any] | None = _conversion.to_linen_var
  strict: bool | None = None
  rng_state: bool = True
  string_keys: bool = False

  def __post_init__(self) -> None:
    check_class(self.nnx_class)
    # Linen hashes and compares modules by their fields.
    args, kwargs = freeze_arguments(self.args, self.kwargs)
    object.__setattr__(self, 'args', args)
    object.__setattr__(self, 'kwargs', kwargs)
    super().__post_init__()

  @classmethod
  def from_module(cls, module: nnx.Module, **options: Any) -> tuple[Self, Any]:
    """The Linen module and the variables of an NNX module that exists.

    Args:
      module: an NNX module; it is not changed.
      **options: fields of `ToLinen`, such as `strict`.

    Returns:
      `(linen_module, variables)`. The module has no constructor, so it cannot be `init`ed.
    """
    graphdef, leaves = _graphdef.split(module)
    linen = cls(Existing(graphdef), **options)
    flat = linen._as_linen(zip(graphdef.slots, leaves, strict=True))
    return linen, {**nest({(c, *p): v for (c, p), v in flat.items()}), 'nnx': {'graphdef': graphdef}}

  @nn.compact
  def __call__(self, *args: Any, nnx_method: Any = None, **kwargs: Any) -> Any:
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
    leaves = dict(self._leaves())
    graphdef = self._stored_graphdef()
    if graphdef is None and self._may_construct(leaves):
      return self._init(leaves, nnx_method, args, kwargs)
    if graphdef is None:
      graphdef = self._rebuild(leaves, nnx_method, args, kwargs)
    return self._apply(graphdef, leaves, nnx_method, args, kwargs)

  # -- init ------------------------------------------------------------------------------------------

  def _may_construct(self, leaves: Mapping[Address, Any]) -> bool:
    """Whether this call creates the variables, as Linen's `param` does where it may and has to."""
    return self.is_initializing() or (not leaves and self.is_mutable_collection('params'))

  def _init(self, found: Mapping[Address, Any], method: Any, args: Any, kwargs: Any) -> Any:
    module = self._construct(self._streams(self.scope.rngs))
    if found:
      graphdef, leaves = _graphdef.split(module)
      known = _nnx_run.Found.of(found, graphdef.slots)
      comparison = _nnx_run.comparison(graphdef, known)
      if comparison.mis_shaped:
        raise comparison.error(self._where)
      _nnx_run.overlay(leaves, graphdef.slots, known)
    call = functools.partial(_nnx_run.method_of(module, method), module)
    output = run_initializing(module, call, *args, **kwargs)
    graphdef, leaves = _graphdef.split(module)
    self._put(self._as_linen(zip(graphdef.slots, leaves, strict=True)), found)
    if self.is_mutable_collection('nnx'):
      self.put_variable('nnx', 'graphdef', graphdef)
    return output

  def _streams(self, names: Any) -> dict[str, Any]:
    """The keys of the scope, by the stream names of `nnx.Rngs`; `params` serves what is missing."""
    keys = {name: self.scope.rngs[name].as_jax_rng() for name in names}
    if 'params' in keys and 'default' not in keys:
      keys['default'] = keys.pop('params')
    return keys

  def _construct(self, streams: Mapping[str, Any]) -> Any:
    kwargs = {name: thaw(value) for name, value in self.kwargs.items()}
    if not self.skip_rng and 'rngs' not in kwargs and takes_rngs(self.nnx_class):
      kwargs['rngs'] = nnx.Rngs(**streams)
    try:
      with detached():
        return self.nnx_class(*map(thaw, self.args), **kwargs)
    except (AttributeError, KeyError) as error:
      if 'No RngStream named' not in str(error):
        raise
      raise MissingRngError(
        f'the constructor of {self._where}', [str(error).split("'")[1]], streams, 'pass a key to init'
      ) from error

  def _rebuild(
    self, leaves: Mapping[Address, Any], method: Any, args: Any, kwargs: Any
  ) -> StaticGraphDef:
    """The GraphDef for variables that came without it; nothing is computed, and the result is kept."""
    if isinstance(self.nnx_class, Existing):
      return self.nnx_class.graphdef
    tags = {box.metadata['tag'] for box in leaves.values() if _has_tag(box)}
    names = tuple(sorted((tags | set(self.scope.rngs) | {'default'}) - {'params'}))
    key = (self.nnx_class, self.args, self.kwargs, self.skip_rng, names, registry.current())
    graphdef, needs_call = _rebuilt.get(key, lambda: self._abstract(names, None))
    if not needs_call:
      return graphdef
    inputs = jax.tree.map(_aval_or_static, (args, kwargs))
    key = (*key, method, str(inputs))
    return _rebuilt.get(key, lambda: self._abstract(names, (method, args, kwargs)))[0]

  def _abstract(self, names: tuple[str, ...], call: Any) -> tuple[StaticGraphDef, bool]:
    """Constructs the module (and calls it) with abstract values.

    Returns:
      (GraphDef, whether only a call would tell all variables).
    """
    made: list[Any] = []
    arrays, tree = jax.tree.flatten(call[1:] if call else ())
    traced = [i for i, x in enumerate(arrays) if hasattr(x, 'shape') and hasattr(x, 'dtype')]

    def construct(inputs: list[Any]) -> Any:
      module = self._construct({name: jax.random.key(0) for name in names})
      if call is not None:
        known = dict(zip(traced, inputs, strict=True))
        args, kwargs = tree.unflatten([known.get(i, x) for i, x in enumerate(arrays)])
        method = functools.partial(_nnx_run.method_of(module, call[0]), module)
        run_initializing(module, method, *args, **kwargs)
      nodes = [n for _, n in nnx.iter_graph(module, graph=True)]
      made.append(any(hasattr(type(n), 'linen_variables') for n in nodes))
      graphdef, leaves = _graphdef.split(module)
      made.append(graphdef)
      return [x.get_value() if isinstance(x, nnx.Variable) else x for x in leaves]

    jax.eval_shape(construct, [jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in traced])
    return made[1], made[0]

  # -- apply -----------------------------------------------------------------------------------------

  def _apply(
    self, graphdef: StaticGraphDef, leaves: Mapping[Address, Any], method: Any, args: Any, kwargs: Any
  ) -> Any:
    found = _nnx_run.Found.of(leaves, graphdef.slots)
    self._check(graphdef, found)
    merged = _nnx_run.Merged(graphdef, found, self._seeds(graphdef))
    output = merged.call(method, args, kwargs, self._where)
    self._report_unknown(merged)
    updates = {a: v for a, v in merged.changed().items() if a not in merged.seeded}
    created = merged.created()
    if self.is_initializing():
      # The state at init is the state as constructed.
      updates = {}
    kept = {a: v for a, v in {**updates, **created}.items() if self._may_update(a, v)}
    self._put({a: self._leaf(v) for a, v in kept.items()}, found.leaves, found.keys)
    return output

  def _check(self, graphdef: StaticGraphDef, found: _nnx_run.Found) -> None:
    comparison = _nnx_run.comparison(graphdef, found)
    if comparison.fits:
      return
    if self.strict is not False or comparison.missing:
      raise comparison.error(self._where)

  def _report_unknown(self, merged: _nnx_run.Merged) -> None:
    used = merged.changed()
    unknown = [
      _nnx_side_text(a)
      for a, variable in merged.unknown.items()
      if a not in used and not (variable is not None and isinstance(variable, nnx.Intermediate))
    ]
    if not unknown or self.strict is False:
      return
    text = unknown_paths_text(self._where, unknown)
    if self.strict:
      raise LostUpdateError(text)
    _warn_once((self.nnx_class, self.path, tuple(unknown)), text)

  def _seeds(self, graphdef: StaticGraphDef) -> Callable[[Slot], Any]:
    """The keys that the call's own `rngs` give to the module's streams."""
    if self.is_initializing() or not self.scope.rngs:
      return lambda slot: None
    avals = dict(zip(graphdef.slots, graphdef.avals or (), strict=False)) if False else {}

    def seeds(slot: Slot) -> Any:
      name = _stream_for(slot.metadata.get('tag'), self.scope.rngs)
      return None if name is None else _nnx_run.seed(self.scope.rngs[name], slot, avals.get(slot))

    return seeds

  def _may_update(self, address: Address, variable: nnx.Variable[Any]) -> bool:
    """Whether an update can be kept; if not, says so once."""
    collection = address[0]
    if self.is_mutable_collection(collection):
      return True
    is_sown = issubclass(variable.var_type, nnx.Intermediate)
    is_rng = issubclass(variable.var_type, nnx.RngState)
    if is_sown or (is_rng and not self.rng_state):
      return False
    text = lost_update_text(self._where, collection, is_rng)
    if self.strict:
      raise LostUpdateError(text)
    _warn_once((self.nnx_class, self.path, collection), text)
    return False

  # -- reading and writing the scope -----------------------------------------------------------------

  @property
  def _where(self) -> str:
    target = self.nnx_class.func if isinstance(self.nnx_class, functools.partial) else self.nnx_class
    name = getattr(target, '__name__', None) or repr(target)
    place = '/'.join(self.path) if self.scope is not None and self.path else ''
    return f'ToLinen({name})' + (f' at {place}' if place else '')

  def _stored_graphdef(self) -> StaticGraphDef | None:
    stored = self.get_variable('nnx', 'graphdef')
    return _graphdef.intern(stored) if isinstance(stored, nnx.GraphDef) else None

  def _leaves(self) -> Iterator[tuple[Address, Any]]:
    for collection, tree in self.variables.items():
      if collection != 'nnx':
        for path, leaf in _nnx_side.walk(tree):
          yield (collection, path), leaf

  def _leaf(self, item: Any) -> Any:
    if not isinstance(item, nnx.Variable):
      return item
    return item.get_value() if self.metadata_fn is None else self.metadata_fn(item)

  def _as_linen(self, items: Any) -> dict[Address, Any]:
    """Leaves of Linen variables for the leaves of a module."""
    return {
      slot.address: self._leaf(leaf)
      for slot, leaf in items
      if self.rng_state or not (slot.var_type and issubclass(slot.var_type, nnx.RngState))
    }

  def _put(
    self, leaves: Mapping[Address, Any], found: Mapping[Address, Any], keys: Any = FrozenDict()
  ) -> None:
    """Writes leaves into the mutable collections; a box that is there stays and gets the value."""
    by_collection: dict[str, dict[Path, Any]] = {}
    for address, leaf in leaves.items():
      old = found.get(address)
      if isinstance(old, meta.AxisMetadata):
        leaf = old.replace_boxed(meta.unbox(leaf) if not isinstance(leaf, meta.AxisMetadata) else leaf.unbox())
      collection, path = keys.get(address, address)
      path = tuple(map(str, path)) if self.string_keys else (str(path[0]), *path[1:])
      by_collection.setdefault(collection, {})[path] = leaf
    for collection, flat in by_collection.items():
      if self.is_mutable_collection(collection):
        for name, tree in nest(flat).items():
          self.put_variable(collection, name, tree)

  # -- attributes ------------------------------------------------------------------------------------

  def __getattr__(self, name: str) -> Any:
    own = self.__dict__
    if name.startswith('_') or 'nnx_class' not in own or 'kwargs' not in own:
      return super().__getattr__(name)
    if name in own['kwargs']:
      return thaw(own['kwargs'][name])
    cls = own['nnx_class']
    cls = cls.module_type if isinstance(cls, Existing) else getattr(cls, 'func', cls)
    if callable(getattr(cls, name, None)):
      return types.MethodType(functools.partial(_call_method, name), self)
    if own.get('scope') is not None and (found := self._attribute(name)) is not None:
      return found
    return super().__getattr__(name)

  def _attribute(self, name: str) -> Any:
    """An attribute of the bound NNX module; a submodule can be called, and so can its methods."""
    graphdef = self._stored_graphdef()
    if graphdef is None:
      return None
    found = _nnx_run.Found.of(dict(self._leaves()), graphdef.slots)
    if not _nnx_run.comparison(graphdef, found).fits:
      return None
    module = _nnx_run.Merged(graphdef, found, lambda slot: None).module
    return _wrap(self, (name,), getattr(module, name, None))


class _Submodule:
  """A submodule of a bound NNX module: calls go through the wrapper, so that updates are kept."""

  def __init__(self, owner: ToLinen, path: tuple[str, ...], module: nnx.Module):
    self._owner = owner
    self._path = path
    self._module = module

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self._owner(*args, nnx_method=_at(self._path), **kwargs)

  def __getattr__(self, name: str) -> Any:
    return _wrap(self._owner, (*self._path, name), getattr(self._module, name))


def _wrap(owner: ToLinen, path: tuple[str, ...], value: Any) -> Any:
  if isinstance(value, nnx.Module):
    return _Submodule(owner, path, value)
  if isinstance(value, types.MethodType):
    return functools.partial(owner, nnx_method=_at(path))
  return value


def _at(path: tuple[str, ...]) -> Callable[..., Any]:
  def call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return functools.reduce(getattr, path, module)(*args, **kwargs)

  return call


def _call_method(name: str, owner: ToLinen, *args: Any, **kwargs: Any) -> Any:
  return owner(*args, nnx_method=name, **kwargs)


def _stream_for(tag: Any, rngs: Mapping[str, Any]) -> str | None:
  """Which of the call's streams seeds a stream of this tag.

  A module built from `nnx.Rngs(key)` has one stream, `default`, that stands for all.
  """
  if tag in rngs:
    return tag
  others = sorted(name for name in rngs if name != 'params')
  return others[0] if tag == 'default' and others else None


def _has_tag(leaf: Any) -> bool:
  return isinstance(leaf, meta.AxisMetadata) and 'tag' in (getattr(leaf, 'metadata', None) or ())


def _aval_or_static(value: Any) -> Any:
  return (value.shape, str(value.dtype)) if hasattr(value, 'dtype') else value


def _nnx_side_text(address: Address) -> str:
  return '/'.join([address[0], *map(str, address[1])])


def _warn_once(key: Any, text: str) -> None:
  first = threading.Event()
  _warned.get(key, lambda: first.set() or True)
  if first.is_set():
    warnings.warn(text, BridgeWarning, stacklevel=3)


def to_linen(
  nnx_class: Callable[..., Any],
  *args: Any,
  metadata_fn: Callable[[Any], Any] | None = _conversion.to_linen_var,
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
    kwargs=FrozenDict(kwargs),
    metadata_fn=metadata_fn,
    skip_rng=skip_rng,
    name=name,
  )
