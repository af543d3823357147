"""Observes the class of every Linen module while the model runs.

A Linen module makes its submodules when it is called, so variables tell their paths and not their
classes. `observing` looks on while a program runs, for real or under `jax.eval_shape`; it changes
nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from flax import linen as nn
from flax import nnx

from bridge._conversion.neutral import Path
from bridge._flax.linen_modules import InterceptorContext, base_class
from bridge._linen_in_nnx.to_nnx import ToNNX
from bridge._nnx_in_linen.bound_module import Call
from bridge._nnx_in_linen.constructor import Constructor
from bridge._nnx_in_linen.to_linen import ToLinen

# Programs that move over from `flax.nnx.bridge` have its wrappers in places, which keep the same
# things under the same names.
LINEN_WRAPPERS: tuple[type[Any], ...] = (ToNNX, nnx.bridge.ToNNX)
NNX_WRAPPERS: tuple[type[Any], ...] = (ToLinen, nnx.bridge.ToLinen)
_CALLS = frozenset(wrapper.__call__.__code__ for wrapper in LINEN_WRAPPERS)


@dataclasses.dataclass
class LinenRecord:
    """What was seen of one Linen module and the modules below it.

    Attributes:
        module: the outermost Linen module, None for the one that no `ToNNX` wraps.
        classes: the class by path below it, in the order of the calls. A lifted transform makes a
            class of its own, which is not among them; the class that it transforms is.
        calls: for each `ToLinen` what constructs its NNX module, and the call.
    """

    module: nn.Module | None
    classes: dict[Path, type[nn.Module]] = dataclasses.field(default_factory=dict)
    calls: dict[Path, tuple[Constructor, Call]] = dataclasses.field(default_factory=dict)


class Observed:
    """Every Linen module that was called, by the wrapper that it was called in."""

    def __init__(self) -> None:
        self._records: list[LinenRecord] = []

    def of(self, module: nn.Module | None) -> LinenRecord | None:
        """What was seen of the module of a `ToNNX`, or of the model itself for None.

        A call under `nnx.jit` runs no Python if an equal module was traced before, so an equal
        module's record stands in.
        """
        for record in self._records:
            if record.module is module:
                return record
        return next((r for r in self._records if _equal(r.module, module)), None)

    def record(
        self,
        next_function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        context: InterceptorContext,
    ) -> Any:
        """An interceptor for `nn.intercept_methods`."""
        module = context.module
        wrapper = _calling_wrapper()
        owner = None if wrapper is None else wrapper.to_nnx__module
        record = next((r for r in self._records if r.module is owner), None)
        if record is None:
            record = LinenRecord(owner)
            self._records.append(record)
        record.classes.setdefault(module.path, base_class(type(module)))
        if isinstance(module, NNX_WRAPPERS) and context.method_name == "__call__":
            inputs = {k: v for k, v in kwargs.items() if k != "nnx_method"}
            call = Call(kwargs.get("nnx_method"), args, inputs)
            record.calls.setdefault(module.path, (recipe_of(module), call))
        return next_function(*args, **kwargs)


@contextlib.contextmanager
def observing() -> Iterator[Observed]:
    """Records the Linen modules that are called in this block."""
    observed = Observed()
    with nn.intercept_methods(observed.record):
        yield observed


def recipe_of(module: Any) -> Constructor:
    """What constructs the NNX module of a `ToLinen`."""
    return Constructor(module.nnx_class, module.args, module.kwargs, module.skip_rng)


def _calling_wrapper() -> Any:
    """The innermost `ToNNX` that is being called, None outside of any.

    The Linen module does not know it: it runs on a copy that has no way back.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code in _CALLS:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def _equal(a: nn.Module | None, b: nn.Module | None) -> bool:
    try:
        return type(a) is type(b) and bool(a == b)
    except (TypeError, ValueError):
        # Fields that are arrays have no truth value.
        return False
