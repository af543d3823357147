"""`ToLinen`, `to_linen` and `to_linen_class`: an NNX module as a Linen module."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar, Self

from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict

from bridge._conversion import convert
from bridge._fingerprint import Fingerprint, fingerprint
from bridge._flax.linen_modules import NNXHolder
from bridge._graphdefs import static_graphdef
from bridge._graphdefs.static_graphdef import Indispensable, StaticGraphDef
from bridge._types import Method

from .bound_module import BoundModule, Call, Streams
from .constructor import (
    check_arguments,
    check_class,
    check_instance,
    hashable_arguments,
)
from .creation import create, found_without
from .module_views import SHOWN, showing
from .nnx_attributes import MISSING, linen_method, nnx_attribute
from .scope import WrapperScope

# The fields that flax.nnx.bridge does not have.
_OWN_OPTIONS = frozenset({"strict", "rng_state", "string_keys", "eager_sharding", "store_graphdef"})


class WithOptions(type(nn.Module)):
    """The metaclass of Linen modules with fields that the constructor need not take.

    Linen passes every field to the constructor when it clones a module or transforms its class. A
    constructor that forwards unknown arguments would pass them on to the NNX module's. Fields in
    `_options` reach only a constructor that names them.
    """

    _options: frozenset[str] = frozenset()

    def __call__(cls, *args: object, **given: object) -> Any:
        kept = cls._options - parameters_of(cls.__init__)
        options = {name: given.pop(name) for name in kept & given.keys()}
        made = super().__call__(*args, **given)
        for name, value in options.items():
            # Linen's modules are frozen by now.
            object.__setattr__(made, name, value)
        return made


@functools.lru_cache(maxsize=1024)
def parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    """The names of a function's parameters, without those of `*args` and `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))


class ToLinen(NNXHolder, metaclass=WithOptions):
    """A Linen module that behaves as the NNX module it constructs.

    The module is constructed once, at `init`. Its state goes to one collection for each Variable
    type, and its static definition to collection `nnx`. `apply` puts the two together and calls the
    module. `init(key)` without inputs only constructs the module and has no output; it is enough if
    no variable depends on an input.

    Updates of a call come back in the collections that are mutable. A call may also change the
    definition: a Python attribute, the class of a submodule, or the set of parameters. Then `nnx`
    has to be mutable too. It holds the new definition, and removed variables are missing from the
    returned collections.

    A stored definition fits as long as the constructor and its arguments are equal. A configuration
    object is compared by its content at the time of the call, a function by its code and the values
    that it closes over, and an array by identity. Values that the constructor looks up elsewhere,
    such as globals, are read when it runs. All calls share the Python objects in static attributes:
    what one call, including `init`, writes into such an object stays there. Only lists, dicts and
    sets are made anew for each call.

    If the module keeps an array from the constructor's arguments, as in `self.table = table`, that
    array is configuration and not state. It is not in the variables; each call uses the argument,
    and gradients flow to it. It becomes state in `nnx_arrays` when a call replaces it. Arrays that
    the constructor computes are state from `init` on.

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
      metadata_fn: Variable -> the leaf in Linen variables. By default it is the value, or a
        metadata box if the Variable has metadata to keep. None stands for bare values always.
      strict: True makes unknown variables and dropped updates errors too; False accepts all
        variables. By default missing and mis-shaped parameters are errors, and the others warnings.
      rng_state: False keeps RNG state out of the variables; keys then come only from `rngs=`.
      string_keys: True writes the integer keys of `nnx.List` as strings, for tools that join paths.
      eager_sharding: whether the constructor's annotated Variables are sharded at once. By default
        they are if a mesh is set and `nnx.using_eager_sharding()` is true, as in native code. A
        Variable is left unsharded if its names are not axes of the mesh, or if no mesh is set; a
        native constructor raises then.
      store_graphdef: False leaves collection `nnx` out of the variables, for programs that expect
        every leaf to be an array. The definition is then derived from the constructor, once for
        all equal arguments, and a call cannot keep a change of it.

    Raises:
      InvalidModuleError: `nnx_class` is an instance, a function or a Linen class; or `args` is not
        a sequence, or `kwargs` not a mapping by name.
      MissingInputsError: `init` got no inputs, and a `ToNNX` in the module needs them.
      OuterStateError: in a JAX transform, or without collection `nnx`, the constructor draws from
        streams of its caller.

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
    store_graphdef: bool = True
    # A subclass has it as a field. Linen does some twenty calls for each field of a module.
    linen_paths: ClassVar[Mapping[str, str] | None] = None

    # Annotated it must be a ClassVar: a field would be an argument of the constructor itself.
    _options: ClassVar[frozenset[str]] = _OWN_OPTIONS

    def __post_init__(self) -> None:
        check_class(self.nnx_class)
        if (type(self.args), type(self.kwargs)) != (tuple, FrozenDict):
            check_arguments(self.nnx_class, self.args, self.kwargs)
        # Linen hashes and compares modules by their fields.
        args, kwargs = hashable_arguments(self.args, self.kwargs)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)
        super().__post_init__()

    @nn.nowrap
    def clone(self, **options: object) -> Self:
        # Linen would look for modules in every field, which only a subclass has some in.
        if type(self) is ToLinen:
            options.pop("_deep_clone", None)
        linen: Any = super()
        return linen.clone(**options)

    def __init_subclass__(cls, **options: Any) -> None:
        # A dataclass gets its own, which compare what its fields are and not what they hold.
        for name in ("__eq__", "__hash__"):
            if name not in vars(cls):
                setattr(cls, name, vars(ToLinen)[name])
        super().__init_subclass__(**options)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ToLinen) or type(self) is not type(other):
            return NotImplemented
        return self is other or self._fingerprint == other._fingerprint

    def __hash__(self) -> int:
        return hash(self._fingerprint)

    @property
    def _fingerprint(self) -> Fingerprint:
        """What the fields hold at this moment."""
        fields: Any = [f.name for f in dataclasses.fields(self) if f.compare]
        return fingerprint(tuple(getattr(self, name) for name in fields), ordered=False)

    @classmethod
    def from_module(cls, module: nnx.Module, **options: Any) -> tuple[Self, Any]:
        """Turns an existing NNX module into a Linen module and its variables.

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
        definition: Any = graphdef
        linen: Any = cls(definition, **options)
        scope = WrapperScope(linen.bind({}, mutable=True))
        scope.store_graphdef(graphdef)
        scope.write(scope.as_linen(zip(graphdef.slots.places, leaves, strict=True)), {})
        return linen, scope.linen.variables

    @nn.nowrap
    def __getstate__(self) -> dict[str, Any]:
        held = self.nnx_class
        # One among variables may be left out; here nothing else says what is called.
        own = {"nnx_class": Indispensable(held)} if isinstance(held, StaticGraphDef) else {}
        return {**vars(self), **own}

    @nn.nowrap
    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        held = state["nnx_class"]
        if isinstance(held, Indispensable):
            vars(self)["nnx_class"] = held.graphdef

    @nn.compact
    def __call__(self, /, *args: Any, nnx_method: Method = None, **kwargs: Any) -> Any:
        """Calls a method of the NNX module.

        Args:
          *args: the method's arguments.
          nnx_method: a name or a function of the NNX module, `__call__` by default.
          **kwargs: the method's keyword arguments.

        Returns:
          The method's output.

        Raises:
          MismatchError: the variables do not fit the module.
          MissingRngError: the module draws from a stream that got no key.
          InvalidMethodError: there is no such method.
          InvalidModuleError: `init` runs in a JAX transform, and the constructor stores an array
            that depends on a key outside of the state, such as in a function.
          LostUpdateError: `strict` is True and an update would be dropped.
        """
        return _run(self, Call(nnx_method, args, kwargs))

    def run_nnx_method(self, nnx_method: Method, /, *args: object, **kwargs: object) -> Any:
        """`__call__` with the method as its first argument; a lifted transform does not change it.

        A lifted transform of the class applies only to the methods that it names, `__call__` by
        default. Other methods run outside of it, as those of any Linen module do.
        """
        return _run(self, Call(nnx_method, args, kwargs))

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if not name.startswith("_") and "nnx_class" in own and "kwargs" in own:
            if name in own["kwargs"]:
                return own["kwargs"][name]
            found = nnx_attribute(WrapperScope(self), name)
            if found is not MISSING:
                return found
        return super().__getattr__(name)


def _run(linen: ToLinen, call: Call) -> Any:
    """A call in the scope of a ToLinen: variables, module, call, changes, variables."""
    is_extended = type(linen).__call__.__module__ != __name__
    scope = WrapperScope(linen, is_extended=is_extended)
    leaves, stored = scope.read()
    is_init = linen.is_initializing()
    # It may have been made with other arguments: one model for training and one for evaluation.
    if stored is not None and scope.constructor.made(stored):
        found = scope.matched(stored, leaves)
    else:
        found = None if is_init else found_without(scope, leaves, call)
    # As Linen's own `param` does, create what is missing if the collection is mutable.
    may_create = is_init or (not leaves and linen.is_mutable_collection("params"))
    compared = found.comparison(rng=may_create) if found is not None else None
    if found is None or compared is None or (may_create and compared.missing):
        output, graphdef = create(scope, leaves, call)
        if is_init:
            return output
        # This is a call, and what it changes belongs to the result.
        found = scope.matched(graphdef, scope.read()[0])
    else:
        scope.check(compared)
    streams = Streams(linen, scope.rngs, found.leaves) if scope.rngs else None
    module = BoundModule(found, streams)
    if linen.strict:
        scope.report_unknown(module.refused())
    show = functools.partial(showing, linen=linen) if SHOWN.get() else nullcontext
    output = module.call(call, show, is_init=is_init)
    if module.streams and module.changes is not None:
        module.streams.settle(module.changes, scope.where)
    if found.unknown:
        scope.report_unknown(module.unused())
    if module.changes:
        module.changes.commit(scope)
    return output


def to_linen(
    nnx_class: Callable[..., Any],
    *args: object,
    metadata_fn: Callable[[Any], Any] | None = convert.to_linen_var,
    name: str | None = None,
    skip_rng: bool = False,
    abstract_init: bool = True,
    **kwargs: object,
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


def to_linen_class(
    base_nnx_class: Callable[..., Any],
    base_metadata_fn: Callable[[Any], Any] | None = convert.to_linen_var,
    base_skip_rng: bool = False,
    **partial_kwargs: object,
) -> type[ToLinen]:
    """A Linen module class that takes the arguments of an NNX module's constructor.

    Args:
      base_nnx_class: the NNX module's class.
      base_metadata_fn: as `ToLinen.metadata_fn`.
      base_skip_rng: as `ToLinen.skip_rng`.
      **partial_kwargs: default values for the constructor's arguments.

    Returns:
      A subclass of `ToLinen` called `<Class>ToLinen`. It takes the NNX constructor's keyword
      arguments and the fields of `ToLinen` (`args`, `kwargs`, `strict`, `name` …). A field wins
      over an argument of the same name; pass such an argument in `kwargs`.

    Raises:
      InvalidModuleError: `base_nnx_class` is an instance, a function or a Linen class.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> import bridge
      >>> Linear = bridge.to_linen_class(nnx.Linear, use_bias=False)
      >>> model = Linear(in_features=2, out_features=3)
      >>> list(model.init(jax.random.key(0), jnp.ones((1, 2)))['params'])
      ['kernel']

    Source: flax/nnx/bridge/wrappers.py:to_linen_class @ 0.12.8
    """
    check_class(base_nnx_class)
    name = getattr(base_nnx_class, "__name__", type(base_nnx_class).__name__)
    defaults: dict[str, Any] = {
        "nnx_class": base_nnx_class,
        "metadata_fn": base_metadata_fn,
        "skip_rng": base_skip_rng,
        "kwargs": hashable_arguments((), partial_kwargs)[1],
    }

    class Made(ToLinen):
        def __init_subclass__(cls, **options: Any) -> None:
            super().__init_subclass__(**options)
            # The dataclass machinery of Linen gives every subclass a constructor of its own.
            made: Any = cls
            generated = made.__init__

            def construct(
                self: Any,
                /,
                args: object = None,
                kwargs: Mapping[str, Any] | None = None,
                **given: object,
            ) -> None:
                check_arguments(base_nnx_class, args or (), kwargs or {})
                own = cls.__dataclass_fields__
                constructor = {n: v for n, v in given.items() if n not in own}
                # None stands for the default in programs written for flax.nnx.bridge.
                fields = {
                    n: v
                    for n, v in given.items()
                    if n in own and (v is not None or n not in defaults)
                }
                merged = {**partial_kwargs, **(kwargs or {}), **constructor}
                generated(self, args=args or (), kwargs=merged, **fields)

            made.__init__ = construct

    own = set(dir(base_nnx_class)).difference(dir(nnx.Module), dir(ToLinen))
    methods = [n for n in own if n[0] != "_" and inspect.isfunction(getattr(base_nnx_class, n))]
    attributes: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": f"The NNX module {name} as a Linen module.",
        "__annotations__": {field: ToLinen.__annotations__[field] for field in defaults},
        # Lifted transforms look methods up on the class.
        **{method: linen_method(method) for method in methods},
        **defaults,
    }
    return type(f"{name}ToLinen", (Made,), attributes)
