"""No operation leaves garbage that only a collection finds: it would hold the arrays until then."""

import argparse
import functools
import gc

import jax
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from benchmarks.models import stack
from bridge._cli.report import _report
from tests.garbage_collection import earlier_objects_left_out

CASE = stack(2)
STATE = bridge.linen_to_nnx(CASE.variables)


class Inner(bridge.Module):
    @bridge.compact
    def __call__(self, x):
        return x * self.param("scale", nn.initializers.ones, (1, x.shape[-1]))


class Outer(bridge.Module):
    def setup(self):
        self.inner = Inner()

    @bridge.compact
    def __call__(self, x):
        return Inner()(self.inner(x))


MODULE = bridge.lazy_init(Outer(rngs=0), CASE.x)
MODULE_VARIABLES = Outer().init(0, CASE.x)


def call(model, x):
    return model(x)


def lazily_initialised():
    return bridge.ToNNX(CASE.linen, nnx.Rngs(0)).lazy_init(CASE.x)


OPERATIONS = {
    "ToLinen.apply": lambda: CASE.to_linen.apply(CASE.to_linen_variables, CASE.x),
    "ToLinen.apply without nnx": lambda: CASE.to_linen.apply(
        {"params": CASE.to_linen_variables["params"]}, CASE.x
    ),
    "ToLinen.init": lambda: CASE.to_linen.init(CASE.key, CASE.x),
    "ToNNX call": lambda: CASE.to_nnx(CASE.x),
    "lazy_init": lazily_initialised,
    "from_variables": lambda: bridge.ToNNX.from_variables(CASE.linen, CASE.variables),
    "bridge.Module call": lambda: MODULE(CASE.x),
    "bridge.Module.apply": lambda: Outer().apply(MODULE_VARIABLES, CASE.x),
    "bridge.Module.init": lambda: Outer().init(0, CASE.x),
    "linen_variables": CASE.to_nnx.linen_variables,
    "linen_to_nnx": lambda: bridge.linen_to_nnx(CASE.variables),
    "nnx_to_linen": lambda: bridge.nnx_to_linen(STATE),
    "eval_shape": lambda: jax.eval_shape(CASE.to_linen.apply, CASE.to_linen_variables, CASE.x),
    "nnx.jit": functools.partial(nnx.jit(call), CASE.to_nnx, CASE.x),
    "jit_partial": functools.partial(bridge.jit_partial(call, CASE.to_nnx), CASE.x),
    "report": lambda: _report.modules_in(
        "tests._cli.mixed_models:make_mixed",
        argparse.Namespace(inputs=None, kwargs=[]),
    ),
}


def garbage(operation):
    """How many objects a collection finds after an operation that was done before."""
    with earlier_objects_left_out():
        for _ in range(2):
            operation()
        gc.collect()
        gc.disable()
        try:
            operation()
            return gc.collect()
        finally:
            gc.enable()


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_what_an_operation_leaves_behind_is_freed_at_once(operation):
    assert garbage(operation) == 0


def test_garbage_is_found():
    def leaves_a_cycle():
        cycle = []
        cycle.append(cycle)

    assert garbage(leaves_a_cycle) == 1
