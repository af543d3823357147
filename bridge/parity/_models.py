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
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx

import registry
from bridge import _train_eval
from bridge._conversion import linen_leaves, nnx_leaves
from bridge._conversion.collections import STATIC
from bridge._conversion.neutral import Address, Leaf, Neutral, nest, walk
from bridge._errors import (
    BridgeError,
    ConversionError,
    InvalidModuleError,
    MissingRngError,
    UnboundAxisError,
)
from bridge._flax.linen_modules import InterceptorContext, overridden
from bridge._flax.objects import CAPTURES
from bridge._linen_in_nnx.linen_call import function_of
from bridge._linen_in_nnx.to_nnx import ToNNX
from bridge._nnx_in_linen.bound_module import method_of
from bridge._nnx_in_linen.to_linen import ToLinen
from bridge._randomness.typed_keys import is_key
from bridge._train_eval import MODE_FIELDS, TRAINING

from ._arrays_apart import under_axes

EVALUATION = dict.fromkeys(MODE_FIELDS, True)
TRAINING_MODES = dict.fromkeys(MODE_FIELDS, False)
# Running statistics are updated and nothing is dropped; what Linen modules call an argument that is
# true in training is set besides.
UPDATING = {**EVALUATION, "use_running_average": False, **dict.fromkeys(TRAINING, True)}

# How Flax's error names the layer, and the stream that has no key.
_NEEDS_KEY = re.compile(r'(\S+) needs PRNG for "([^"]+)"')
Observing: TypeAlias = Callable[[nnx.Module], contextlib.AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True)
class Request:
    """How a model is called.

    `rngs` is None for the model's own keys. `modes` are what `train()` and `eval()` set. `axes` are
    sizes of named axes. `observing` gives a context for the call of an NNX module.
    """

    inputs: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    method: Callable[..., Any] | str | None
    rngs: Mapping[str, Any] | None
    modes: Mapping[str, Any]
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    observing: Observing = lambda module: contextlib.nullcontext()

    @property
    def given(self) -> Any:
        """What the model is called with, arrays and all else."""
        return self.inputs, dict(self.kwargs), self.rngs and dict(self.rngs)

    def with_given(self, given: Any) -> Request:
        """The same call with other arrays."""
        inputs, kwargs, rngs = given
        return dataclasses.replace(self, inputs=tuple(inputs), kwargs=kwargs, rngs=rngs)


class Model(abc.ABC):
    """A model under comparison, the argument `side` of `check`.

    `linen` is the Linen module with the model's paths and calls, also within a ToNNX; None for
    other NNX models. `values` are the leaves that the model was given with.
    """

    name: str
    side: str
    linen: nn.Module | None
    module: Any
    values: Neutral

    @property
    def is_linen(self) -> bool:
        """Whether it is a Linen module, or a wrapped one."""
        return self.linen is not None

    def run(self, values: Neutral, request: Request) -> tuple[Any, Neutral]:
        """The output of a call, and the values after it.

        Raises UnboundAxisError if the model uses a named axis whose size the request does not have.
        """

        def call() -> tuple[Any, list[tuple[Address, Leaf]]]:
            output, after = self._run(values, request)
            return output, list(after.items())

        try:
            output, after = under_axes(call, request.axes)
        except Exception as error:
            # Python notes the name that it does not find; JAX's error has none.
            if type(error) is NameError and error.name is None:
                raise UnboundAxisError(self.name, error) from error
            error.add_note(f"raised by {self.side} = {self.name}")
            raise
        return output, dict(after)

    @abc.abstractmethod
    def _run(self, values: Neutral, request: Request) -> tuple[Any, Neutral]:
        """`run` where all axes are bound."""

    @abc.abstractmethod
    def native_variables(self) -> Any:
        """The variables as the other parts of the package take them: Linen's, or the module."""

    def names_mode(self, request: Request) -> bool:
        """Whether an argument tells a Linen module if this is training; then nothing else does.

        In NNX an argument wins over the attributes by itself.
        """
        if self.linen is None:
            return False
        function = function_of(self.linen, request.method)
        parameters = list(inspect.signature(function).parameters)
        names = parameters[1 : 1 + len(request.inputs)]
        return not UPDATING.keys().isdisjoint({*names, *request.kwargs})


class LinenModel(Model):
    """A Linen module and its variables."""

    def __init__(self, side: str, module: nn.Module, variables: Mapping[str, Any]):
        self.side, self.module = side, module
        self.name = type(module).__name__
        if isinstance(module, ToLinen):
            self.name = f"ToLinen({getattr(module.nnx_class, '__name__', self.name)})"
        self.linen = None if isinstance(module, ToLinen) else module
        self.values = linen_leaves.from_variables(variables)
        self._static = {c: tree for c, tree in variables.items() if c == STATIC}

    def native_variables(self) -> Any:
        """Linen variables, or the NNX state if it is a wrapped one."""
        if self.is_linen:
            return linen_leaves.to_variables(self.values)
        return nnx.State(nest(nnx_leaves.to_leaves(self.values)))

    def _run(self, values: Neutral, request: Request) -> tuple[Any, Neutral]:
        """`apply` with every collection mutable that holds state."""
        module, kwargs = self.module, dict(request.kwargs)
        function = function_of(module, request.method if self.is_linen else None)
        if not self.is_linen and request.method is not None:
            kwargs["nnx_method"] = request.method
        modes = {} if self.names_mode(request) else request.modes
        state = {a[0] for a in values if not is_of(a, nnx.Param, nnx.Intermediate)}
        call = _train_eval.filled(module, module, function, request.inputs, kwargs, modes)
        with _train_eval.applied(call.modes), _quiet(modes), self._naming_the_model():
            output, updates = module.clone(**call.fields).apply(
                {**linen_leaves.to_variables(values), **self._static},
                *call.args,
                rngs=request.rngs,
                method=function,
                mutable=sorted(state),
                **call.kwargs,
            )
        return output, {**values, **linen_leaves.from_variables(updates)}

    @contextlib.contextmanager
    def _naming_the_model(self) -> Iterator[None]:
        """Flax's error for a missing key names neither the model nor a remedy."""
        try:
            yield
        except flax_errors.InvalidRngError as error:
            found = _NEEDS_KEY.search(str(error))
            if isinstance(error, BridgeError) or found is None:
                raise
            layer, stream = found.groups()
            remedy = (
                f"give it one with rngs={{{stream!r}: key}}; or turn dropout off in it with"
                " deterministic=True in kwargs, the model or its config, or with None there, so"
                " that the check chooses"
            )
            where = self.name if layer == "None" else f"{self.name}, layer {layer},"
            raise MissingRngError(where, [stream], [], remedy) from error


class NnxModel(Model):
    """An NNX module, which may be a wrapped Linen module."""

    def __init__(self, side: str, module: nnx.Module):
        self.side, self.module = side, module
        self.linen = inner = module.to_nnx__module if isinstance(module, ToNNX) else None
        self.name = f"ToNNX({type(inner).__name__})" if inner else type(module).__name__
        self._graphdef, state = nnx.split(module, graph=True)
        self.values = nnx_leaves.from_leaves(walk(state))

    def native_variables(self) -> Any:
        """The module, or Linen variables if it is a wrapped one."""
        if isinstance(self.module, ToNNX):
            return self.module.linen_variables()
        return nnx.merge(self._graphdef, self._state(self.values))

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
            wrap = jax.random.wrap_key_data
            keys: dict[str, Any] = {
                n: key if is_key(key) else wrap(key) for n, key in request.rngs.items()
            }
            nnx.reseed(module, graph=True, **keys)
            if isinstance(module, ToNNX):
                kwargs.setdefault("rngs", dict(request.rngs))
        method = request.method
        if isinstance(module, ToNNX) and method is not None:
            kwargs["method"], method = method, None
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

    Raises InvalidModuleError if it is neither `(Linen module, variables)` nor an NNX module, and
    ConversionError if the variables are not Linen variables.
    """
    if isinstance(given, nnx.Module):
        return NnxModel(argument, given)
    where = f"parity.check, argument {argument},"
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], nn.Module)):
        expected = "(linen_module, variables) or an NNX module"
        remedy = (
            "give a Linen module with its variables, (module, module.init(key, *inputs)), or an"
            " instance of an NNX class"
        )
        raise InvalidModuleError(where, given, expected, remedy)
    module, variables = given
    if not isinstance(variables, Mapping):
        raise ConversionError(
            f"{where} expected the Linen module's variables, that is {{collection: {{name:"
            f" array}}}}, found {type(variables).__name__}"
        )
    return LinenModel(argument, module.clone(parent=None) if module.scope else module, variables)


def _drop_sown(module: nnx.Module) -> None:
    """Lets what a module sows go nowhere, as `nnx.capture` does where it captures nothing.

    `nnx.capture` gives containers the attribute too, and an attribute of an `nnx.Dict` is an item.
    """
    below: Any
    for _, below in nnx.iter_modules(module, graph=True):
        if not isinstance(below, nnx.List | nnx.Dict):
            setattr(below, CAPTURES, nnx.data(()))


def _quiet(modes: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """With the modes of `UPDATING`, nothing is dropped, though `train` may say so to a Dropout."""
    is_updating = modes.keys() == UPDATING.keys()
    return nn.intercept_methods(_not_dropping) if is_updating else contextlib.nullcontext()


def _not_dropping(function: Any, args: Any, kwargs: Any, context: InterceptorContext) -> Any:
    """Fills `deterministic` even where the model's author ties it to `train`."""
    module = context.module
    is_tied = isinstance(vars(module).get("deterministic"), bool)
    with overridden(module, {"deterministic": True} if is_tied else {}):
        return function(*args, **kwargs)


def is_of(address: Address, *kinds: type[nnx.Variable[Any]]) -> bool:
    """Whether a collection's Variable type is one of these, or derives from one."""
    if address[0] == nnx_leaves.ARRAYS:
        return nnx.Variable in kinds
    return issubclass(registry.current().type_from_name(address[0]), kinds)
