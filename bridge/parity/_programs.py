"""One compiled program for each model: its output, its gradients, and its updated state.

Compiling is most of what a check costs. So all that is compared of a model comes from one program,
and the programs of both models are compiled beside each other, while the layers are observed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors as flax_errors
from flax import nnx

from bridge._conversion.neutral import Neutral

from ._arrays_apart import Apart, OnlyArrays, apart
from ._layouts import AddressedValues
from ._models import Model, Request, is_of
from ._numbers import is_comparable

# A model that asks for the values of its arrays in Python cannot be traced.
_NOT_TRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@dataclasses.dataclass(frozen=True)
class Results:
    """What a program computed; what was not wanted is None or empty.

    `after` are the values after the call, for another step, and `state` those after a call that
    updates state.
    """

    output: Any
    gradients: AddressedValues
    after: Neutral
    state: Neutral


class ModelProgram:
    """A model, and what is to be known about it, as one function of its values.

    `updating` are the modes of the call that updates state. `wanted` has names of fields of
    `Results`. `note` says why it is not compiled though it was to
    be, and `state_note` why the updated state is not known; they are empty if there is no reason.
    """

    def __init__(
        self,
        model: Model,
        request: Request,
        updating: Mapping[str, Any],
        loss: Callable[[Any], Any],
        wanted: Set[str],
    ):
        self.model, self.request = model, request
        self.wanted = wanted
        self.note = self.state_note = ""
        self._updating, self._loss = updating, loss
        self._compiled: Future[Any] | None = None
        self._first: Results | None = None

    def start(self, pool: ThreadPoolExecutor) -> None:
        """Traces the model, which raises what the model raises, and begins to compile it."""
        try:
            self._compile(self.model.values, pool)
        except _NOT_TRACEABLE as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.note = f"{self.model.name} was run operation by operation, not compiled: {reason}"

    def first(self) -> Results:
        """What the program computes for the values that the model was given with."""
        if self._first is None:
            self._first = self(self.model.values)
        return self._first

    def __call__(self, values: Neutral) -> Results:
        """What the program computes for values."""
        if self._compiled is None:
            return self.computed(values, self.request.given)
        given = self._given(values)
        if self._signature != _signature(values, given):
            with ThreadPoolExecutor(1) as pool:
                self._compile(values, pool)
        arrays = self._compiled.result()(given.arrays)
        output, *by_address = self._only_arrays.rebuild(arrays)
        return Results(output, *map(dict, by_address))

    def _given(self, values: Neutral) -> Apart:
        """The arrays that the program is a function of."""
        return apart(([leaf.value for leaf in values.values()], self.request.given))

    def _compile(self, values: Neutral, pool: ThreadPoolExecutor) -> None:
        """Begins to compile the program for values of one structure."""
        given = self._given(values)

        def compute(arrays: list[Any]) -> Any:
            new, called_with = given.rebuild(arrays)
            results = self.computed(
                with_values(values, dict(zip(values, new, strict=True))), called_with
            )
            # As pairs: JAX sorts the keys of a dict, and addresses have no order.
            by_address = results.gradients, results.after, results.state
            return results.output, *(list(field.items()) for field in by_address)

        self._only_arrays = OnlyArrays(compute)
        self._signature = _signature(values, given)
        lowered = jax.jit(self._only_arrays).lower(given.arrays)
        options = None if "after" in self.wanted else _run_once(given.arrays)
        self._compiled = pool.submit(lowered.compile, compiler_options=options)

    def computed(self, values: Neutral, given: Any) -> Results:
        """The program itself.

        The values are arrays or tracers.
        """
        request = self.request.with_given(given)
        output, gradients, after = None, {}, values
        if self.wanted - {"state"}:
            output, gradients, after = self._differentiated(values, request)
        state: Neutral = {}
        if "state" in self.wanted:
            try:
                updating = dataclasses.replace(request, modes=self._updating)
                is_known = self._updating == request.modes and self.wanted & {"gradients", "after"}
                state = after if is_known else self.model.run(values, updating)[1]
            except flax_errors.InvalidRngError as error:
                self.state_note = f"not compared, {self.model.name} needs a key: {error}"
        return Results(
            output if "output" in self.wanted else None,
            gradients,
            after if "after" in self.wanted else {},
            state,
        )

    def _differentiated(
        self, values: Neutral, request: Request
    ) -> tuple[Any, AddressedValues, Neutral]:
        """The output, the gradients by address, and the values after the call."""
        if "gradients" not in self.wanted:
            output, after = self.model.run(values, request)
            return output, {}, after
        parameters = [x for x in values if is_of(x, nnx.Param) and _is_float(values[x].value)]

        def call(new: list[Any]) -> Any:
            changed = with_values(values, dict(zip(parameters, new, strict=True)))
            output, after = self.model.run(changed, request)
            return output, list(after.items())

        called = OnlyArrays(call)

        def objective(new: list[Any]) -> tuple[Any, list[Any]]:
            arrays = called(new)
            return self._loss(called.rebuild(arrays)[0]), arrays

        found, arrays = jax.grad(objective, has_aux=True)([values[x].value for x in parameters])
        output, after = called.rebuild(arrays)
        # The parameters themselves come back as they were differentiated.
        return output, dict(zip(parameters, found, strict=True)), dict(after)


def with_values(values: Neutral, changed: AddressedValues) -> Neutral:
    """Leaves with some values replaced."""
    return {**values, **{x: values[x]._replace(value=value) for x, value in changed.items()}}


def _signature(values: Neutral, given: Apart) -> Any:
    """What a compiled program depends on; all that is not an array is compiled in."""
    kinds = []
    for array in given.arrays:
        sharding = getattr(array, "sharding", None)
        is_whole = isinstance(sharding, jax.sharding.SingleDeviceSharding)
        weak = getattr(array, "weak_type", False)
        kinds.append((tuple(array.shape), array.dtype, weak, None if is_whole else sharding))
    return list(values), given.rest, kinds


def _run_once(arrays: Sequence[Any]) -> dict[str, Any] | None:
    """Compiler options of a program that runs once, where compiling takes most of the time.

    On a CPU, LLVM's optimisations take half of it. Both programs of a check get the same options,
    and XLA's own passes, which choose the operations, run in any case.
    """
    devices = {d for array in arrays if isinstance(array, jax.Array) for d in array.devices()}
    platforms = {device.platform for device in devices} or {jax.default_backend()}
    return {"xla_backend_optimization_level": 0} if platforms == {"cpu"} else None


def _is_float(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(
        is_comparable(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves
    )
