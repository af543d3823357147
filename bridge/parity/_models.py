"""A model as a function of its values, which leaves the model itself alone.

Linen and NNX models become one thing here: a flat mapping of values by (collection, path), and a
`run` that makes the output and the new values from it. The model's own code runs, Linen by `apply`
and NNX by `merge` and a call; no wrapper of this package stands in between.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

import registry
from bridge import _linen_side, _modes, _nnx_side
from bridge._errors import ConversionError, InvalidModuleError
from bridge._flax_internals import overridden
from bridge._found import Found
from bridge._graphdef import intern
from bridge._linen_methods import function_of
from bridge._merged import Merged, method_of
from bridge._neutral import Address, Neutral, nest, walk
from bridge._to_linen import ToLinen
from bridge._to_nnx import ToNNX

EVALUATION = {"deterministic": True, "use_running_average": True}
TRAINING = {"deterministic": False, "use_running_average": False}
# Running statistics are updated and nothing is dropped; what Linen modules call an argument that is
# true in training is set besides.
UPDATING = {
    "deterministic": True,
    "use_running_average": False,
    "train": True,
    "training": True,
    "is_training": True,
}


@dataclasses.dataclass(frozen=True)
class Request:
    """How a model is called.

    Attributes:
      inputs: positional arguments.
      kwargs: keyword arguments.
      method: a name, a function of the module, or None.
      rngs: keys by stream name, None for the model's own.
      modes: what `train()` and `eval()` set, by name.
      made: is told the NNX module that is called, if there is one.
    """

    inputs: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    method: Callable[..., Any] | str | None
    rngs: Mapping[str, Any] | None
    modes: Mapping[str, Any]
    made: Callable[[nnx.Module], None] = lambda module: None


class Model(abc.ABC):
    """A model under comparison.

    Attributes:
      name: what it is called in the report.
      is_linen: whether Linen's names are its paths: a Linen module, or a wrapped one.
      module: the Linen or NNX module that the caller gave.
      values: the leaves that the model was given with.
    """

    name: str
    is_linen: bool
    module: Any
    values: Neutral

    @abc.abstractmethod
    def run(self, values: Neutral, request: Request) -> tuple[Any, Neutral]:
        """The output of a call, and the values after it."""

    @abc.abstractmethod
    def native_variables(self) -> Any:
        """The variables as the other parts of the package take them: Linen's, or the module."""

    @abc.abstractmethod
    def names_mode(self, request: Request) -> bool:
        """Whether an argument tells a Linen module if this is training; then nothing else does.

        In NNX an argument wins over the attributes by itself.
        """


def is_of(address: Address, *kinds: type[nnx.Variable[Any]]) -> bool:
    """Whether a collection's Variable type is one of these, or derives from one."""
    if address[0] == _nnx_side.ARRAYS:
        return nnx.Variable in kinds
    return issubclass(registry.current().type_from_name(address[0]), kinds)


class LinenModel(Model):
    """A Linen module and its variables."""

    is_linen = True

    def __init__(self, module: nn.Module, variables: Mapping[str, Any]):
        self.module = module
        self.name = _linen_name(module)
        self.is_linen = not isinstance(module, ToLinen)
        self.values = _linen_side.from_variables(variables)
        self._is_wrapped = isinstance(module, ToLinen)
        self._static = {c: tree for c, tree in variables.items() if c == "nnx"}

    def names_mode(self, request: Request) -> bool:
        """By the arguments of the method, unless they are those of an NNX method."""
        return not self._is_wrapped and _names_mode(
            function_of(self.module, request.method), request
        )

    def native_variables(self) -> Any:
        """Linen variables, or the NNX module if it is a wrapped one."""
        variables = _linen_side.to_variables(self.values)
        stored = self._static.get("nnx", {}).get("graphdef")
        if self.is_linen or not isinstance(stored, nnx.GraphDef):
            return variables if self.is_linen else nnx.State(nest(_nnx_side.to_leaves(self.values)))
        return Merged(Found(intern(stored), variables), lambda slot: None).module

    def run(self, values: Neutral, request: Request) -> tuple[Any, Neutral]:
        """`apply` with every collection mutable that holds state."""
        module, kwargs = self.module, dict(request.kwargs)
        function = function_of(module, None if self._is_wrapped else request.method)
        if self._is_wrapped and request.method is not None:
            kwargs["nnx_method"] = request.method
        modes = {} if self.names_mode(request) else request.modes
        state = {a[0] for a in values if not is_of(a, nnx.Param, nnx.Intermediate)}
        call = _modes.filled(module, module, function, request.inputs, kwargs, modes)
        with _modes.applied(call.modes), _quiet(modes):
            output, updates = module.clone(**call.fields).apply(
                {**_linen_side.to_variables(values), **self._static},
                *call.args,
                rngs=request.rngs,
                method=function,
                mutable=sorted(state),
                **call.kwargs,
            )
        return output, {**values, **_linen_side.from_variables(updates)}


class NnxModel(Model):
    """An NNX module, which may be a wrapped Linen module."""

    def __init__(self, module: nnx.Module):
        self.module = module
        self.is_linen = isinstance(module, ToNNX)
        inner = module.to_nnx__module if isinstance(module, ToNNX) else None
        self.name = f"ToNNX({type(inner).__name__})" if inner else type(module).__name__
        self._graphdef, state = nnx.split(module, graph=True)
        self.values = _nnx_side.from_leaves(walk(state))

    def names_mode(self, request: Request) -> bool:
        """By the arguments of the wrapped method, if this is a wrapper."""
        if not isinstance(self.module, ToNNX):
            return False
        return _names_mode(function_of(self.module.to_nnx__module, request.method), request)

    def native_variables(self) -> Any:
        """The module, or Linen variables if it is a wrapped one."""
        if isinstance(self.module, ToNNX):
            return self.module.linen_variables()
        return nnx.merge(self._graphdef, self._state(self.values))

    def run(self, values: Neutral, request: Request) -> tuple[Any, Neutral]:
        """A call of a module made for it; what it sows goes nowhere, as in Linen."""
        module = nnx.merge(self._graphdef, self._state(values))
        kwargs = dict(request.kwargs)
        modes: dict[str, Any] = {}
        if self.names_mode(request):
            # What `train()` would have allowed.
            kwargs.setdefault("mutable", "existing")
        else:
            modes = {name: request.modes[name] for name in _modes.MODE_FIELDS}
            module.set_attributes(**modes, raise_if_not_found=False, graph=True)
            for _, node in nnx.iter_graph(module, graph=True):
                if isinstance(node, ToNNX):
                    # With what is to be filled in for `train`.
                    node.to_nnx__modes = tuple(sorted(request.modes.items()))
        if request.rngs is not None:
            nnx.reseed(module, graph=True, **_streams(request.rngs))
            if isinstance(module, ToNNX):
                kwargs.setdefault("rngs", dict(request.rngs))
        is_wrapped = isinstance(module, ToNNX) and request.method is not None
        if is_wrapped:
            kwargs["method"] = request.method
        method = None if is_wrapped else request.method

        def call(module: nnx.Module) -> Any:
            return method_of(module, method)(*request.inputs, **kwargs)

        request.made(module)
        with _quiet(request.modes if modes else {}):
            output = nnx.capture(call)(module)
        state = nnx.state(module, graph=True)
        return output, {**values, **_nnx_side.from_leaves(walk(state))}

    def _state(self, values: Neutral) -> nnx.State[Any, Any]:
        known = {address: leaf for address, leaf in values.items() if address in self.values}
        return nnx.State(nest(_nnx_side.to_leaves(known)))


def model_of(given: Any, argument: str) -> Model:
    """The model that an argument of `check` stands for.

    Raises:
      InvalidModuleError: it is neither `(Linen module, variables)` nor an NNX module.
      ConversionError: the variables are no Linen variables.
    """
    if isinstance(given, nnx.Module):
        return NnxModel(given)
    expected = "(linen_module, variables) or an NNX module"
    where = f"parity.check, argument {argument},"
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], nn.Module):
        module, variables = given
        if not isinstance(variables, Mapping):
            raise ConversionError(
                f"{where} expected the Linen module's variables, that is {{collection: {{name:"
                f" array}}}}, found {type(variables).__name__}"
            )
        return LinenModel(module.clone(parent=None) if module.scope else module, variables)
    if isinstance(given, nn.Module) or (
        isinstance(given, tuple) and given and isinstance(given[0], nn.Module)
    ):
        remedy = "give its variables with it: (module, module.init(key, *inputs))"
    elif isinstance(given, type) and issubclass(given, nn.Module | nnx.Module):
        remedy = f"make an instance of it: {given.__name__}(…)"
    else:
        remedy = "give a Linen module with its variables in a tuple, or an NNX module instance"
    raise InvalidModuleError(where, given, expected, remedy)


@contextlib.contextmanager
def _quiet(modes: Mapping[str, Any]) -> Iterator[None]:
    """With the modes of `UPDATING`, nothing is dropped, though `train` may say so to a Dropout."""
    with contextlib.ExitStack() as stack:
        if modes.keys() == UPDATING.keys():
            stack.enter_context(nn.intercept_methods(_not_dropping))
        yield


def _not_dropping(
    function: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
    """Fills `deterministic` even where the model's author ties it to `train`."""
    module = context.module
    is_tied = isinstance(vars(module).get("deterministic"), bool)
    with overridden(module, {"deterministic": True} if is_tied else {}):
        return function(*args, **kwargs)


def _names_mode(function: Callable[..., Any], request: Request) -> bool:
    names = list(inspect.signature(function).parameters)[1 : 1 + len(request.inputs)]
    return not UPDATING.keys().isdisjoint({*names, *request.kwargs})


def _linen_name(module: nn.Module) -> str:
    if isinstance(module, ToLinen):
        cls = module.nnx_class
        cls = getattr(cls, "module_type", getattr(cls, "func", cls))
        return f"ToLinen({getattr(cls, '__name__', type(module).__name__)})"
    return type(module).__name__


def _streams(rngs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: jax.random.wrap_key_data(key)
        if jax.numpy.issubdtype(key.dtype, jax.numpy.uint32)
        else key
        for name, key in rngs.items()
    }
