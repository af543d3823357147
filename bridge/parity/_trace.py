"""What every layer of a model got and returned, in the order in which the calls ended.

Linen has `nn.intercept_methods` for this. NNX has no counterpart. Replacing `__call__` of the
classes, as `nnx.capture` and `nnx.tabulate` do, changes them for every thread, misses classes that
are first met during the call, and two checks at once would restore each other's replacement. So NNX
calls are observed from outside by Python's profiling hook, which belongs to one thread and is put
back as it was. The model runs as it is, on any kind of module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax

from ._captured import LayerCall as LayerCall
from ._captured import Trace as Trace
from ._models import Observing
from ._recorder import Recorder


def trace(
    run: Callable[[Observing], Any],
    modes: Mapping[str, Any] = MappingProxyType({}),
    *,
    is_traceable: bool = False,
) -> Trace:
    """Runs a model and returns what its layers did.

    The run is eager, also inside of `nnx.jit` and `nn.scan`, so that each step of a scan is a call
    of its own with ordinary values; `vmap` and `remat` still trace, and their values come out by
    callbacks.

    A model that fails is not run again, with one exception: a model of which it is known that JAX
    can trace it fails only because it runs eagerly. It is observed as it runs compiled, and the
    note says so.

    Args:
      run: calls the model. It gets a function for the NNX module that it makes, if it makes one,
        which says that this is where paths begin, and gives the context of the call.
      modes: those that are set on Linen modules.
      is_traceable: whether the model was traced before.
    """
    recorder = Recorder(modes, is_eager=True)
    try:
        with jax.disable_jit(), recorder.recording():
            output = run(recorder.observing)
    except Exception as error:
        if not is_traceable:
            error.add_note(
                "raised while parity.check ran the model eagerly to observe its layers"
                f"{recorder.position()}; if it runs only under jit, leave them out: layers=False"
            )
            raise
        reason = (str(error).strip() or "no message").splitlines()[0]
        recorder = Recorder(modes, is_eager=False)
        with recorder.recording():
            output = run(recorder.observing)
        recorder.note(
            f"run a second time, compiled, as the eager run raised {type(error).__name__}:"
            f" {reason[:200]}; order may vary"
        )
    return recorder.trace(output)
