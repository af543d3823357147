"""`implemented_by`: a Linen class with its own fields, whose methods run an NNX module."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Generator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict, meta

from bridge._bounded_cache import BoundedCache
from bridge._errors import InvalidModuleError
from bridge._fingerprint import fingerprint
from bridge._layers.table import layer_of_linen

from .bound_module import Call
from .definitions import shapes_of
from .linen_paths import LinenPaths
from .part_sizes import PartSize, found_sizes
from .to_linen import ToLinen

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
    LinenPaths.of(paths)
    implementation = Implementation(
        nnx_class, paths, sizes, sizes_of_parts, sizes_of_variables, logical_axes
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


class Implementation:
    """What runs the methods of a Linen class; the arguments are those of `implemented_by`.

    The three kinds of sizes come from the arguments of a call (`sizes`), from calls of parts, and
    from variables.
    """

    def __init__(
        self,
        nnx_class: str | type[nnx.Module],
        paths: Mapping[str, str],
        sizes: Mapping[str, Callable[..., Any]],
        sizes_of_parts: Mapping[str, tuple[str, int]],
        sizes_of_variables: Mapping[str, Callable[[Any], Any]],
        logical_axes: bool,
    ):
        self._boxed = _logical if logical_axes else _partitioned
        self._nnx_class = nnx_class
        self._paths: Any = FrozenDict(paths)
        self._sizes, self._sizes_of_variables = dict(sizes), dict(sizes_of_variables)
        self._sizes_of_parts = {name: PartSize(*each) for name, each in sizes_of_parts.items()}
        self._seen: BoundedCache[dict[str, Any]] = BoundedCache(maxsize=64)

    @functools.cached_property
    def nnx_class(self) -> Any:
        """The NNX class."""
        if not isinstance(self._nnx_class, str):
            return self._nnx_class
        module, _, name = self._nnx_class.partition(":")
        return getattr(importlib.import_module(module), name)

    def run(self, linen: nn.Module, method: str, bound: inspect.BoundArguments) -> Any:
        """Calls a method of the NNX module in the scope of a Linen module.

        `bound` has the arguments of the call, with the module first.
        """
        if linen.scope is None:
            raise flax_errors.CallCompactUnboundModuleError()
        taken = _taken(self.nnx_class.__init__)
        fields = _fields(linen)
        arguments = {name: as_nnx(value) for name, value in fields.items() if name in taken}
        arguments |= self._found_sizes(linen, method, bound)
        args, kwargs = bound.args[1:], dict(bound.kwargs)
        # A mode that is a field of the Linen class is an argument of the NNX module's call.
        of_call = _taken(getattr(self.nnx_class, method))
        kwargs |= {
            name: value
            for name, value in fields.items()
            if name not in taken
            and name in of_call
            and bound.arguments.get(name) is None
            and value is not None
        }
        missing = {n: p for n, p in self._sizes_of_parts.items() if n not in arguments}
        if missing:
            arguments |= self._called_sizes(missing, arguments, method, args, kwargs)
        inner = _AtLinenPaths(
            self.nnx_class,
            kwargs=arguments,
            metadata_fn=self._boxed,
            rng_state=False,
            store_graphdef=False,
            linen_paths=self._paths,
            parent=linen.scope,
        )
        with _quiet():
            is_init = linen.is_initializing()
            own = functools.partial(_initialized, method) if is_init else method
            return inner.run_nnx_method(own, *args, **kwargs)

    def _found_sizes(
        self, linen: nn.Module, method: str, bound: inspect.BoundArguments
    ) -> dict[str, Any]:
        bound.apply_defaults()
        arguments = {**bound.arguments, "self": linen}
        found: dict[str, Any] = {}
        for name in {**self._sizes, **self._sizes_of_variables}:
            size_of, stored = self._sizes.get(name), self._sizes_of_variables.get(name)
            if stored is not None and linen.variables.get("params"):
                found[name] = stored(meta.unbox(linen.variables))
            elif size_of is not None:
                own = inspect.signature(size_of).parameters
                if not own.keys() <= arguments.keys():
                    expected = f"a method with arguments that show {name}"
                    remedy = "initialise by another method, or name it in sizes_of_variables"
                    raise InvalidModuleError("implemented_by", method, expected, remedy)
                found[name] = size_of(**{n: arguments[n] for n in own})
        return found

    def _called_sizes(
        self,
        sizes: Mapping[str, PartSize],
        arguments: Mapping[str, Any],
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The sizes that parts are called with, found once for the same arguments."""
        has_rngs = "rngs" in _taken(self.nnx_class.__init__)

        def make(found: Mapping[str, Any]) -> Any:
            rngs = {"rngs": nnx.Rngs(0)} if has_rngs else {}
            return self.nnx_class(**arguments, **found, **rngs)

        def call(module: nnx.Module) -> None:
            getattr(module, method)(*args, **kwargs)

        def find() -> dict[str, Any]:
            with _quiet(), nnx.use_eager_sharding(False):
                try:
                    return found_sizes(make, call, sizes)
                except LookupError as error:
                    expected = f"a method that calls self.{sizes[error.args[0]].part}"
                    remedy = "initialise by another method, or name it in sizes_of_variables"
                    raise InvalidModuleError("implemented_by", method, expected, remedy) from error

        shapes = shapes_of(Call(method, args, dict(kwargs)))
        return self._seen.get((tuple(sizes), fingerprint((arguments, shapes))), find)


def _initialized(method: str, module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
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


def _partitioned(variable: nnx.Variable[Any]) -> Any:
    """A Variable as Linen's own initialisers box it."""
    names = variable.get_metadata().get("out_sharding")
    if names is None:
        return variable.get_value()
    made: Any = nn.Partitioned
    return made(variable.get_value(), tuple(names))


def _logical(variable: nnx.Variable[Any]) -> Any:
    boxed: Any = _partitioned(variable)
    is_boxed = type(boxed) is nn.Partitioned
    return nn.LogicallyPartitioned(boxed.value, boxed.names) if is_boxed else boxed


def _running(name: str, declared: Callable[..., Any]) -> Callable[..., Any]:
    """A Linen method that runs the NNX module's of the same name."""
    signature = inspect.signature(declared)

    @functools.wraps(declared)
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        implementation: Implementation = getattr(self, _ATTRIBUTE)
        return implementation.run(self, name, signature.bind(self, *args, **kwargs))

    return method


def _fields(linen: nn.Module) -> dict[str, Any]:
    return {
        name: getattr(linen, name)
        for name, field in linen.__dataclass_fields__.items()
        if field.init and name not in ("parent", "name")
    }


@functools.lru_cache(maxsize=1024)
def _taken(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
