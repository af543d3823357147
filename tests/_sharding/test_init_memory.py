"""The compiled initialisation holds shards and nothing whole, at the cost of the native one."""

import functools
import re

import jax
import pytest
from flax import linen as nn
from flax import nnx

from bridge._sharding.init_sharded import ShardedProgram
from tests._sharding.sharded_models import (
    BUILDS,
    KEY,
    LAYERS,
    LinenStack,
    NNXStack,
    X,
    leaves_by_path,
    linen_init,
    mesh,
    uniform,
)


class LinenTwin(nn.Module):
    """The parameters of the mixtures in pure Linen."""

    @nn.compact
    def __call__(self, x):
        last = linen_init("mesh", uniform, "embed", "mlp")
        return nn.Dense(8, kernel_init=last, name="last")(LinenStack(name="stack")(x))


def lowered(name, kind):
    make, rngs, _ = BUILDS[name]
    return ShardedProgram(make("mesh"), mesh(kind), (X,), {}, None, rngs, None).lower()


@functools.cache
def compiled(name, kind):
    return lowered(name, kind).compile()


@functools.cache
def pure_linen(*, mixed):
    module = LinenTwin() if mixed else LinenStack()
    shardings = nn.get_sharding(jax.eval_shape(module.init, KEY, X), mesh())
    with jax.set_mesh(mesh()):
        return jax.jit(module.init, out_shardings=shardings).lower(KEY, X).compile()


@functools.cache
def pure_nnx():
    make = lambda key: nnx.state(NNXStack(rngs=nnx.Rngs(key)))  # noqa: E731
    with jax.set_mesh(mesh()):
        shardings = nnx.get_named_sharding(jax.eval_shape(make, KEY), mesh())
        return jax.jit(make, out_shardings=shardings).lower(KEY).compile()


def peak(program):
    memory = program.memory_analysis()
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes


# The reference has the same parameters; where each library makes a part, so does either alone.
REFERENCES = {
    "ToNNX": lambda: pure_linen(mixed=False),
    "NNX holding ToNNX": lambda: pure_linen(mixed=True),
    "Linen holding ToLinen": lambda: pure_linen(mixed=True),
    "ToLinen": pure_nnx,
    "ToLinen of NNX holding ToNNX": lambda: pure_linen(mixed=True),
}


CASES = [
    ("ToNNX", "auto"),
    ("NNX holding ToNNX", "explicit"),
    ("Linen holding ToLinen", "auto"),
    ("ToLinen", "explicit"),
    ("ToLinen of NNX holding ToNNX", "auto"),
    ("ToLinen of NNX holding ToNNX", "explicit"),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_device_needs_no_more_memory_than_for_the_native_model(name, kind):
    assert peak(compiled(name, kind)) <= 1.1 * peak(REFERENCES[name]())


def shapes_in(program):
    """Every shape of a buffer in the optimised program of one device."""
    return {
        tuple(map(int, shape.split(",")))
        for shape in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", program.as_text())
    }


def whole_shapes(specs):
    """Shapes of annotated parameters, whole, and of one layer of them."""
    shapes = {(24, 40), (40, 24), (24, 16)} | ({(16, 8)} if "last/kernel" in specs else set())
    return shapes | {(LAYERS, *shape) for shape in shapes}


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_no_buffer_has_the_shape_of_a_whole_sharded_parameter(name, kind):
    specs = BUILDS[name][2]
    assert not shapes_in(compiled(name, kind)) & whole_shapes(specs)


def test_the_search_finds_whole_parameters_where_nothing_is_sharded():
    found = shapes_in(jax.jit(LinenStack().init).lower(KEY, X).compile())
    assert found >= {(LAYERS, 24, 40), (LAYERS, 40, 24), (24, 16)}


def test_the_search_is_for_the_shapes_of_all_annotated_matrices():
    specs = BUILDS["NNX holding ToNNX"][2]
    module = LinenTwin()
    leaves = leaves_by_path(nn.unbox(jax.eval_shape(module.init, KEY, X)))
    matrices = {leaves[path].shape for path in specs if leaves[path].size > 100}
    assert matrices <= whole_shapes(specs)
    assert len(matrices) == 4


def test_a_native_model_with_explicit_axes_is_made_in_its_shards_too():
    """Where NNX by itself makes every value whole on every device, and then reshards it."""
    ours = ShardedProgram(NNXStack, mesh("explicit"), (), {}, None, KEY, None).lower().compile()
    assert not shapes_in(ours) & whole_shapes({})
    assert peak(ours) <= 1.1 * peak(pure_nnx())
