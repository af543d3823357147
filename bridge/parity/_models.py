"""A model as a function of its values, which leaves the model itself alone.

Linen and NNX models become one thing here: a flat mapping of values by (collection, path), and a
`run` that makes the output and the new values from it. The model's own code runs, Linen by `apply`
and NNX by `merge` and a call; no wrapper of this package stands in between.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from flax import nnx

import registry
from bridge._conversion import nnx_leaves
from bridge._conversion.neutral import Address, Leaf, Neutral
from bridge._errors import UnboundAxisError
from bridge._train_eval import MODE_FIELDS, TRAINING

from ._arrays_apart import under_axes

EVALUATION = dict.fromkeys(MODE_FIELDS, True)
TRAINING_MODES = dict.fromkeys(MODE_FIELDS, False)
# Running statistics are updated and nothing is dropped; what Linen modules call an argument that is
# true in training is set besides.
UPDATING = {**EVALUATION, "use_running_average": False, **dict.fromkeys(TRAINING, True)}

# The note on an error of a model: this, and the model's side.
RAISED_BY = "raised by"

Observing: TypeAlias = Callable[[nnx.Module], contextlib.AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True)
class Request:
    """How a model is called.

    Attributes:
      inputs: positional arguments.
      kwargs: keyword arguments.
      method: a name, a function of the module, or None.
      rngs: keys by stream name, None for the model's own.
      modes: what `train()` and `eval()` set, by name.
      axes: the sizes of the named axes that the model is called under.
      observing: from the NNX module that is called, if there is one, to a context for the call.
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
    """A model under comparison.

    Attributes:
      name: what it is called in the report.
      side: `a` or `b`.
      is_linen: whether Linen's names are its paths: a Linen module, or a wrapped one.
      module: the Linen or NNX module that the caller gave.
      values: the leaves that the model was given with.
    """

    name: str
    side: str
    is_linen: bool
    module: Any
    values: Neutral

    def run(self, values: Neutral, request: Request) -> tuple[Any, Neutral]:
        """The output of a call, and the values after it.

        Raises:
          UnboundAxisError: the model uses a named axis that the request has no size of.
        """

        def call() -> tuple[Any, list[tuple[Address, Leaf]]]:
            output, after = self._run(values, request)
            return output, list(after.items())

        try:
            output, after = under_axes(call, request.axes)
        except NameError as error:
            # Python notes the name that it does not find; JAX's error has none.
            if error.name is not None or isinstance(error, UnboundAxisError):
                self._note(error)
                raise
            raise UnboundAxisError(self.name, error) from error
        except Exception as error:
            self._note(error)
            raise
        return output, dict(after)

    def _note(self, error: Exception) -> None:
        note = f"{RAISED_BY} {self.side} = {self.name}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)

    @abc.abstractmethod
    def _run(self, values: Neutral, request: Request) -> tuple[Any, Neutral]:
        """`run` where all axes are bound."""

    @abc.abstractmethod
    def modes_of(self, request: Request) -> Mapping[str, Any]:
        """The modes that are set on Linen modules in a call."""

    @abc.abstractmethod
    def function(self, method: Callable[..., Any] | str | None) -> Any:
        """The function that a call calls, unbound or bound, for its parameters."""

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
    if address[0] == nnx_leaves.ARRAYS:
        return nnx.Variable in kinds
    return issubclass(registry.current().type_from_name(address[0]), kinds)
