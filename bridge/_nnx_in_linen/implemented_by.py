"""`implemented_by`: a Linen class with its own fields, whose methods run an NNX module."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import jax
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict, meta

from bridge._bounded_cache import BoundedCache
from bridge._errors import InvalidModuleError
from bridge._fingerprint import fingerprint
from bridge._layers.table import layer_of_linen

from .bound_module import Call
from .creation import shapes_of
from .scope import LinenPaths
from .to_linen import ToLinen, parameters_of

_T = TypeVar("_T", bound=type[nn.Module])
# The class attribute that holds the `Implementation`.
_ATTRIBUTE = "_implemented_by"


def implemented_by(
    nnx_class: str | type[nnx.Module],
    *,
    paths: Mapping[str, str] = MappingProxyType({}),
    sizes: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    sizes_of_parts: Mapping[str, tuple[str, int]] = MappingProxyType({}),
    sizes_of_variables: Mapping[str, Callable[[Any], Any]] = MappingProxyType({}),
    logical_axes: bool = False,
) -> Callable[[_T], _T]:
    """Makes a Linen class run an NNX module, for a program that stays Linen.

    The decorated class has the fields, and its methods only declare their arguments. Each call runs
    the method of the same name of the NNX module, which is constructed from the fields. The
    variables are where a Linen module would have them. RNG state and the definition of the module
    are not among them; keys come from `rngs=`.

    Args:
      nnx_class: the class, or `package.module:name`, which is imported at the first call. The
        module of that name may then import the one that this class is in.
      paths: NNX paths by Linen paths: rules that only rename.
      sizes: functions for the further arguments of the NNX constructor. Each takes arguments of a
        method under the names that the method gives them; `self` is the Linen module.
      sizes_of_parts: the same for sizes that the model computes: the attribute of the part that
        needs the size, and the axis of the first argument of its call. The model is called
        abstractly to find the size. For an `nnx.List` of parts it is a tuple.
      sizes_of_variables: the same from the variables `{collection: {path: array}}`, for methods
        without an argument that shows the size.
      logical_axes: whether annotated parameters are `nn.LogicallyPartitioned` instead of
        `nn.Partitioned`.

    Returns:
      A decorator of a class that derives from `nn.Module`.

    Raises:
      InvalidModuleError: the decorated object is not a Linen class.
      RulesError: a path is not a rule, or changes arrays.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn, nnx
      >>> import bridge
      >>> @bridge.implemented_by(nnx.Linear, sizes={'in_features': lambda inputs: inputs.shape[-1]})
      ... class Linear(nn.Module):
      ...     out_features: int = 3
      ...
      ...     def __call__(self, inputs): ...
      >>> variables = Linear().init(jax.random.key(0), jnp.ones((1, 2)))
      >>> variables['params']['kernel'].shape
      (2, 3)
    """
    LinenPaths(paths)
    implementation = Implementation(
        nnx_class, FrozenDict(paths), sizes, sizes_of_parts, sizes_of_variables, logical_axes
    )

    def decorate(cls: _T) -> _T:
        given: Any = cls
        if not (isinstance(given, type) and issubclass(given, nn.Module)):
            remedy = "decorate a class that derives from nn.Module"
            raise InvalidModuleError("implemented_by", cls, "a Linen class", remedy)
        declared = {
            name: method
            for name, method in vars(cls).items()
            if inspect.isfunction(method)
            and (not name.startswith("_") or name == "__call__")
            and not hasattr(method, "nowrap")
        }
        space: dict[str, Any] = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            _ATTRIBUTE: implementation,
            **{name: _running(name, inspect.unwrap(each)) for name, each in declared.items()},
        }
        metaclass: Any = type(cls)
        return metaclass(cls.__name__, (cls,), space)

    return decorate


class _AtLinenPaths(ToLinen):
    """A `ToLinen` with its variables at the paths of another Linen module.

    `linen_paths` are NNX paths by Linen paths.
    """

    linen_paths: Mapping[str, str] = FrozenDict({})  # pyright: ignore


@dataclasses.dataclass(frozen=True, eq=False)
class Implementation:
    """What runs the methods of a Linen class; the fields are the arguments of `implemented_by`."""

    given: str | type[nnx.Module]
    paths: Any
    sizes: Mapping[str, Callable[..., Any]]
    sizes_of_parts: Mapping[str, tuple[str, int]]
    sizes_of_variables: Mapping[str, Callable[[Any], Any]]
    logical_axes: bool
    _called: BoundedCache[dict[str, Any]] = dataclasses.field(
        default_factory=lambda: BoundedCache(maxsize=64)
    )

    @functools.cached_property
    def nnx_class(self) -> Any:
        """The NNX class."""
        if not isinstance(self.given, str):
            return self.given
        module, _, name = self.given.partition(":")
        return getattr(importlib.import_module(module), name)

    def run(self, linen: nn.Module, method: str, bound: inspect.BoundArguments) -> Any:
        """Calls a method of the NNX module in the scope of a Linen module.

        `bound` has the arguments of the call, with the module first.
        """
        if linen.scope is None:
            raise flax_errors.CallCompactUnboundModuleError()
        bound.apply_defaults()
        taken = parameters_of(self.nnx_class.__init__)
        fields = {
            name: getattr(linen, name)
            for name, field in linen.__dataclass_fields__.items()
            if field.init and name not in ("parent", "name")
        }
        arguments = {name: as_nnx(value) for name, value in fields.items() if name in taken}
        args, kwargs = bound.args[1:], dict(bound.kwargs)
        # A mode that is a field of the Linen class is an argument of the NNX module's call.
        of_call = parameters_of(getattr(self.nnx_class, method))
        kwargs |= {
            name: value
            for name, value in fields.items()
            if name not in taken
            and name in of_call
            and bound.arguments.get(name) is None
            and value is not None
        }
        arguments |= self._found_sizes(linen, method, bound)
        parts = {n: each for n, each in self.sizes_of_parts.items() if n not in arguments}
        if parts:
            shapes = shapes_of(Call(method, args, kwargs))
            key = tuple(parts), fingerprint((arguments, shapes))
            find = functools.partial(self._called_sizes, parts, arguments, method, args, kwargs)
            arguments |= self._called.get(key, find)
        inner = _AtLinenPaths(
            self.nnx_class,
            kwargs=arguments,
            metadata_fn=_logical if self.logical_axes else _partitioned,
            rng_state=False,
            store_graphdef=False,
            linen_paths=self.paths,
            parent=linen.scope,
        )
        with _quiet():
            is_init = linen.is_initializing()
            own = functools.partial(_initialized, method) if is_init else method
            return inner.run_nnx_method(own, *args, **kwargs)

    def _found_sizes(
        self, linen: nn.Module, method: str, bound: inspect.BoundArguments
    ) -> dict[str, Any]:
        """The sizes that the arguments of a call or the variables show."""
        arguments = {**bound.arguments, "self": linen}
        found: dict[str, Any] = {}
        for name in {**self.sizes, **self.sizes_of_variables}:
            size_of, stored = self.sizes.get(name), self.sizes_of_variables.get(name)
            if stored is not None and linen.variables.get("params"):
                found[name] = stored(meta.unbox(linen.variables))
            elif size_of is not None:
                own = inspect.signature(size_of).parameters
                if not own.keys() <= arguments.keys():
                    raise _unknown_size(method, f"with arguments that show {name}")
                found[name] = size_of(**{n: arguments[n] for n in own})
        return found

    def _called_sizes(
        self,
        parts: Mapping[str, tuple[str, int]],
        arguments: Mapping[str, Any],
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The sizes that parts are called with: a number, or a tuple of them for a list of parts.

        The module is made and called abstractly. The first part that is called with another size
        than it was made with stops the call and reveals its size. The next run assumes that later
        parts in the list have this size too, so there are as many runs as the size changes.
        """
        takes_rngs = "rngs" in parameters_of(self.nnx_class.__init__)
        known: dict[str, dict[int, int]] = {name: {} for name in parts}
        counts: dict[str, int] = {}

        def run() -> None:
            rngs = {"rngs": nnx.Rngs(0)} if takes_rngs else {}
            sizes = {name: _Sizes(each) for name, each in known.items()}
            module: Any = self.nnx_class(**arguments, **sizes, **rngs)
            for name, (part, axis) in parts.items():
                held: Any = getattr(module, part)
                if not isinstance(held, _LIST):
                    setattr(module, part, _Probe(held, known[name], 0, axis))
                    continue
                counts[name] = len(held)
                for number, each in enumerate(held):
                    held[number] = _Probe(each, known[name], number, axis)
            getattr(module, method)(*args, **kwargs)

        with _quiet(), nnx.use_eager_sharding(False):
            while True:
                try:
                    jax.eval_shape(run)  # pyright: ignore
                except _ChangedError:
                    continue
                break
        found: dict[str, Any] = {}
        for name, each in known.items():
            if not each:
                raise _unknown_size(method, f"that calls self.{parts[name][0]}")
            of_list = itertools.islice(_Sizes(each), counts.get(name, 0))
            found[name] = tuple(of_list) if name in counts else each[0]
        return found


# Stands for a size that is not known yet, and is a multiple of most numbers of heads and groups.
_UNKNOWN = 5040 * 16


class _Sizes(int):
    """The size of a part, or one by one those of the parts of a list, as far as they are known.

    A size that is not known is that of the last part before it.
    """

    known: Mapping[int, int]

    def __new__(cls, known: Mapping[int, int]) -> _Sizes:
        sizes = super().__new__(cls, known.get(0, _UNKNOWN))
        sizes.known = known
        return sizes

    def __iter__(self) -> Iterator[int]:
        size = int(self)
        for number in itertools.count():
            size = self.known.get(number, size)
            yield size


_LIST: Any = nnx.List


class _ChangedError(Exception):
    """A part was called with another size than it was made with."""


class _Probe:
    """Stands for a part, and notes the size of its first call."""

    def __init__(self, part: Callable[..., Any], known: dict[int, int], number: int, axis: int):
        self._part, self._known, self._number, self._axis = part, known, number, axis
        self._made_with: int | None = next(itertools.islice(_Sizes(known), number, None))

    def __call__(self, first: jax.Array, *args: object, **kwargs: object) -> Any:
        if self._made_with is not None:
            made_with, self._made_with = self._made_with, None
            size = self._known[self._number] = first.shape[self._axis]
            if size != made_with:
                raise _ChangedError
        return self._part(first, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


def _unknown_size(method: str, which: str) -> InvalidModuleError:
    remedy = "initialise by another method, or name it in sizes_of_variables"
    return InvalidModuleError("implemented_by", method, f"a method {which}", remedy)


def _initialized(method: str, module: nnx.Module, *args: object, **kwargs: object) -> Any:
    """Calls a method as `init` does in Linen, where attention makes its cache without decoding."""
    module.set_attributes(nnx.MultiHeadAttention, decode=False, raise_if_not_found=False)
    return getattr(module, method)(*args, **kwargs)


def is_implemented(cls: type) -> bool:
    """Whether a class is decorated with `implemented_by`."""
    return hasattr(cls, _ATTRIBUTE)


def as_nnx(value: object) -> Any:
    """A field of a Linen module as the NNX module takes it: Linen classes in it are NNX classes."""
    if isinstance(value, nn.Module):
        remedy = "give a class, or a function that makes it"
        raise InvalidModuleError("implemented_by", value, "fields without Linen modules", remedy)
    given: Any = value
    if type(given) in (list, tuple):
        return type(given)(map(as_nnx, given))
    if isinstance(value, functools.partial):
        own: Any = given.func
        row = layer_of_linen(own) if isinstance(own, type) else None
        names: Any = row.fields if row is not None else {}
        keywords: Any = {names.get(n, n): as_nnx(each) for n, each in given.keywords.items()}
        return functools.partial(as_nnx(own), *map(as_nnx, given.args), **keywords)
    if isinstance(value, type) and issubclass(value, nn.Module):
        implementation = getattr(given, _ATTRIBUTE, None)
        if implementation is not None:
            return implementation.nnx_class
        row = layer_of_linen(value)
        return value if row is None or row.nnx is None else row.nnx
    if isinstance(value, dict | FrozenDict):
        return {name: as_nnx(each) for name, each in given.items()}
    return given


@contextlib.contextmanager
def _quiet() -> Generator[None, None, None]:
    with warnings.catch_warnings():
        # Linen's `sow` is at home outside of `nnx.capture`, and this program is Linen's.
        warnings.filterwarnings("ignore", "Using 'Module.(sow|perturb)", DeprecationWarning)
        yield


def _partitioned(variable: nnx.Variable[Any], box: Any = nn.Partitioned) -> Any:
    """A Variable as Linen's own initialisers box it."""
    names = variable.get_metadata().get("out_sharding")
    value = variable.get_value()
    return value if names is None else box(value, tuple(names))


def _logical(variable: nnx.Variable[Any]) -> Any:
    return _partitioned(variable, nn.LogicallyPartitioned)


def _running(name: str, declared: Callable[..., Any]) -> Callable[..., Any]:
    """A Linen method that runs the NNX module's of the same name."""
    signature = inspect.signature(declared)

    @functools.wraps(declared)
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        implementation: Implementation = getattr(self, _ATTRIBUTE)
        return implementation.run(self, name, signature.bind(self, *args, **kwargs))

    return method
