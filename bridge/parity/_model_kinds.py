"""The two kinds of models: a Linen module with its variables, and an NNX module."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx

from bridge import _train_eval
from bridge._conversion import linen_leaves, nnx_leaves
from bridge._conversion.collections import GRAPHDEF, STATIC
from bridge._conversion.neutral import Neutral, by_address, nest, walk
from bridge._errors import BridgeError, ConversionError, InvalidModuleError, MissingRngError
from bridge._flax.linen_modules import InterceptorContext, overridden
from bridge._flax.objects import CAPTURES
from bridge._graphdefs.static_graphdef import as_static
from bridge._linen_in_nnx.linen_call import function_of
from bridge._linen_in_nnx.to_nnx import ToNNX
from bridge._nnx_in_linen.bound_module import BoundModule, method_of
from bridge._nnx_in_linen.constructor import Constructor
from bridge._nnx_in_linen.matched_variables import MatchedVariables
from bridge._nnx_in_linen.to_linen import ToLinen

from ._dropout import remedy
from ._models import UPDATING, Model, Request, is_of


class LinenModel(Model):
    """A Linen module and its variables."""

    is_linen = True

    def __init__(self, module: nn.Module, variables: Mapping[str, Any]):
        self.module = module
        self.name = _linen_name(module)
        self.is_linen = not isinstance(module, ToLinen)
        self.values = linen_leaves.from_variables(variables)
        self._is_wrapped = isinstance(module, ToLinen)
        self._static = {c: tree for c, tree in variables.items() if c == STATIC}

    def names_mode(self, request: Request) -> bool:
        """By the arguments of the method, unless they are those of an NNX method."""
        return not self._is_wrapped and _names_mode(
            function_of(self.module, request.method), request
        )

    def native_variables(self) -> Any:
        """Linen variables, or the NNX module if it is a wrapped one."""
        variables = linen_leaves.to_variables(self.values)
        stored = self._static.get(STATIC, {}).get(GRAPHDEF)
        if self.is_linen or not isinstance(stored, nnx.GraphDef):
            return (
                variables if self.is_linen else nnx.State(nest(nnx_leaves.to_leaves(self.values)))
            )
        graphdef, wrapper = as_static(stored), self.module
        recipe = Constructor(wrapper.nnx_class, wrapper.args, wrapper.kwargs, wrapper.skip_rng)
        found = MatchedVariables(graphdef, by_address(variables), recipe.kept(graphdef))
        return BoundModule(found).module

    def modes_of(self, request: Request) -> Mapping[str, Any]:
        """None, if an argument says whether this is training."""
        return {} if self.names_mode(request) else request.modes

    def function(self, method: Callable[..., Any] | str | None) -> Any:
        """The unbound method; that of the NNX class, if this is a wrapped one."""
        if not self._is_wrapped:
            return function_of(self.module, method)
        return (
            getattr(self.module.nnx_class, method or "__call__", None)
            if not callable(method)
            else method
        )

    def _naming_the_layer(
        self, function: Any, args: Any, kwargs: Any, context: InterceptorContext
    ) -> Any:
        """Flax's error names neither the model nor the path, and the stream only in its text."""
        with _drawn_streams(context.module) as streams:
            try:
                return function(*args, **kwargs)
            except flax_errors.InvalidRngError as error:
                if isinstance(error, BridgeError):
                    raise
                stream = streams[-1]
                place = "/".join(context.module.path) or "the model itself"
                where = f"{self.name}, layer {place} ({type(context.module).__name__}),"
                raise MissingRngError(where, [stream], [], self._remedy(stream, context)) from error

    def _remedy(self, stream: str, context: InterceptorContext) -> str:
        given = f"give it: rngs={{{stream!r}: key}}"
        if stream != "dropout":
            return given
        return f"dropout is on in it, {remedy(self.module, self.function(None))}"

    def _run(self, values: Neutral, request: Request) -> tuple[Any, Neutral]:
        """`apply` with every collection mutable that holds state."""
        module, kwargs = self.module, dict(request.kwargs)
        function = function_of(module, None if self._is_wrapped else request.method)
        if self._is_wrapped and request.method is not None:
            kwargs["nnx_method"] = request.method
        modes = self.modes_of(request)
        state = {a[0] for a in values if not is_of(a, nnx.Param, nnx.Intermediate)}
        call = _train_eval.filled(module, module, function, request.inputs, kwargs, modes)
        naming = nn.intercept_methods(self._naming_the_layer)
        with _train_eval.applied(call.modes), _quiet(modes), naming:
            output, updates = module.clone(**call.fields).apply(
                {**linen_leaves.to_variables(values), **self._static},
                *call.args,
                rngs=request.rngs,
                method=function,
                mutable=sorted(state),
                **call.kwargs,
            )
        return output, {**values, **linen_leaves.from_variables(updates)}


class NnxModel(Model):
    """An NNX module, which may be a wrapped Linen module."""

    def __init__(self, module: nnx.Module):
        self.module = module
        self.is_linen = isinstance(module, ToNNX)
        inner = module.to_nnx__module if isinstance(module, ToNNX) else None
        self.name = f"ToNNX({type(inner).__name__})" if inner else type(module).__name__
        self._graphdef, state = nnx.split(module, graph=True)
        self.values = nnx_leaves.from_leaves(walk(state))

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

    def modes_of(self, request: Request) -> Mapping[str, Any]:
        """Those of the Linen modules that are within."""
        return {} if self.names_mode(request) else request.modes

    def function(self, method: Callable[..., Any] | str | None) -> Any:
        """The method, bound to the module; that of the Linen class, if this is a wrapped one."""
        if isinstance(self.module, ToNNX):
            return function_of(self.module.to_nnx__module, method)
        return method_of(self.module, method)

    def _run(self, values: Neutral, request: Request) -> tuple[Any, Neutral]:
        """A call of a module made for it; what it sows goes nowhere, as in Linen."""
        module = nnx.merge(self._graphdef, self._state(values))
        kwargs = dict(request.kwargs)
        modes: dict[str, Any] = {}
        if self.names_mode(request):
            # The collections that `train()` makes mutable.
            kwargs.setdefault("mutable", "existing")
        else:
            modes = {name: request.modes[name] for name in _train_eval.MODE_FIELDS}
            module.set_attributes(**modes, raise_if_not_found=False, graph=True)
            for _, node in nnx.iter_graph(module, graph=True):
                if isinstance(node, ToNNX):
                    # Including the value for arguments named `train`.
                    node.to_nnx__modes = tuple(sorted(request.modes.items()))
        if request.rngs is not None:
            nnx.reseed(module, graph=True, **_streams(request.rngs))
            if isinstance(module, ToNNX):
                kwargs.setdefault("rngs", dict(request.rngs))
        is_wrapped = isinstance(module, ToNNX) and request.method is not None
        if is_wrapped:
            kwargs["method"] = request.method
        method = None if is_wrapped else request.method

        _drop_sown(module)
        with _quiet(request.modes if modes else {}), request.observing(module):
            output = method_of(module, method)(*request.inputs, **kwargs)
        state = nnx.state(module, graph=True)
        return output, {**values, **nnx_leaves.from_leaves(walk(state))}

    def _state(self, values: Neutral) -> nnx.State[Any, Any]:
        known = {address: leaf for address, leaf in values.items() if address in self.values}
        return nnx.State(nest(nnx_leaves.to_leaves(known)))


def model_of(given: Any, argument: str) -> Model:
    """The model that an argument of `check` stands for.

    Raises:
      InvalidModuleError: it is neither `(Linen module, variables)` nor an NNX module.
      ConversionError: the variables are no Linen variables.
    """
    model = _model_of(given, argument)
    model.side = argument
    return model


def _model_of(given: Any, argument: str) -> Model:
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


def _drop_sown(module: nnx.Module) -> None:
    """Lets what a module sows go nowhere, as `nnx.capture` does where it captures nothing.

    `nnx.capture` gives containers the attribute too, and an attribute of an `nnx.Dict` is an item.
    """
    below: Any
    for _, below in nnx.iter_modules(module, graph=True):
        if not isinstance(below, nnx.List | nnx.Dict):
            setattr(below, CAPTURES, nnx.data(()))


@contextlib.contextmanager
def _quiet(modes: Mapping[str, Any]) -> Iterator[None]:
    """With the modes of `UPDATING`, nothing is dropped, though `train` may say so to a Dropout."""
    with contextlib.ExitStack() as stack:
        if modes.keys() == UPDATING.keys():
            stack.enter_context(nn.intercept_methods(_not_dropping))
        yield


def _not_dropping(function: Any, args: Any, kwargs: Any, context: InterceptorContext) -> Any:
    """Fills `deterministic` even where the model's author ties it to `train`."""
    module = context.module
    is_tied = isinstance(vars(module).get("deterministic"), bool)
    with overridden(module, {"deterministic": True} if is_tied else {}):
        return function(*args, **kwargs)


@contextlib.contextmanager
def _drawn_streams(module: nn.Module) -> Iterator[list[str]]:
    """The streams that a method of a bound Linen module asks for, in a list that grows."""
    # Linen draws initial values from it without asking the module.
    streams = ["params"]
    before = vars(module).get("make_rng")

    def make_rng(name: str = "params") -> Any:
        streams.append(name)
        return type(module).make_rng(module, name)

    # Linen made the instance for this very call, so nobody else sees it.
    object.__setattr__(module, "make_rng", make_rng)
    try:
        yield streams
    finally:
        object.__delattr__(module, "make_rng")
        if before is not None:
            object.__setattr__(module, "make_rng", before)


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
