"""Initialisation, eager, compiled and in shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge as flax_bridge

import bridge

from . import programs
from .models import Case
from .row import Subject


def _native_init(case: Case) -> Callable[[], Any]:
    def init(key: Any) -> Any:
        model = case.construct(nnx.Rngs(key))
        model(case.x)
        return nnx.state(model)

    return lambda: init(case.key)


def _init(form: str) -> Subject:
    return lambda case: lambda: getattr(case, form).init(case.key, case.x)


def _to_nnx_init(wrapper: Any, lazy_init: Any) -> Subject:
    return lambda case: lambda: lazy_init(wrapper(case.linen, rngs=nnx.Rngs(0)), case.x)


class LeastWrapper(nn.Module):
    """An NNX module whose variables are stored in Linen's, and nothing else.

    It keeps what the call does to the state, writes no definition, and cannot be applied: what is
    left is what every wrapper has to do.

    Attributes:
      nnx_class: the NNX module's class.
      argument: the positional argument of its constructor.
    """

    nnx_class: Callable[..., nnx.Module]
    argument: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Constructs, calls and stores."""
        model: Any = self.nnx_class(self.argument, rngs=nnx.Rngs(self.make_rng("params")))
        output = model(x)
        _, state = nnx.split(model)
        self.put_variable("params", "model", nnx.to_pure_dict(state))
        return output


def _least_init(case: Case) -> Callable[[], Any]:
    least = LeastWrapper(case.nnx_class, case.argument)
    return lambda: least.init(case.key, case.x)


INITS: Mapping[str, Subject] = {
    "NNX": _native_init,
    "ToLinen": _init("to_linen"),
    "flax ToLinen": _init("flax_to_linen"),
    "no more than stored": _least_init,
    "Linen": _init("linen"),
    "ToNNX": _to_nnx_init(bridge.ToNNX, bridge.lazy_init),
    "flax ToNNX": _to_nnx_init(flax_bridge.ToNNX, flax_bridge.lazy_init),
}
INITS_TO_LINEN = {name: INITS[name] for name in ("NNX", "ToLinen", "flax ToLinen")}


def peak_live(init: Subject) -> Subject:
    """The most bytes of arrays alive in an initialisation."""
    return lambda case: programs.peak_live_bytes(init(case))


def compiled_peak(init: Subject) -> Subject:
    """The memory of the compiled initialisation."""
    return lambda case: programs.compiled_bytes(_of_key(init, case), case.key, case.x)


# Initialisation in shards: every call traces and compiles.


def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((jax.device_count(),), ("data",))


def jitted_in_shards(init: Subject) -> Subject:
    """Shapes first, then `jax.jit` with `out_shardings`, as without this package."""

    def prepared(case: Case) -> Callable[[], Any]:
        mesh = _mesh()

        def call() -> Any:
            run = _of_key(init, case)
            shapes = jax.eval_shape(run, case.key, case.x)
            return jax.jit(run, out_shardings=nn.get_sharding(shapes, mesh))(case.key, case.x)

        return call

    return prepared


def _of_key(init: Subject, case: Case) -> Callable[..., Any]:
    """An initialisation as a function of the key and the input."""

    def run(key: Any, x: Any) -> Any:
        inner = dataclasses.replace(case)
        vars(inner).update(key=key, x=x)
        return init(inner)()

    return run


def to_linen_in_shards(case: Case) -> Callable[[], Any]:
    """`init_sharded` of a `ToLinen`."""
    mesh = _mesh()
    return lambda: bridge.init_sharded(case.to_linen, mesh, case.x, rngs=case.key)


def to_nnx_in_shards(case: Case) -> Callable[[], Any]:
    """`init_sharded` of a `ToNNX`."""
    mesh = _mesh()
    return lambda: bridge.init_sharded(lambda: bridge.ToNNX(case.linen, case.key), mesh, case.x)
