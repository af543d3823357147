"""A Linen class with fields of its own runs an NNX module."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge


class Pair(nnx.Module):
    def __init__(self, width, layer=nnx.Linear, *, in_features, rngs):
        self.width = width
        self.layers = nnx.List([layer(in_features, width, rngs=rngs)])
        self.head = nnx.Linear(width, 3, rngs=rngs)

    def __call__(self, x):
        return self.decode(self.layers[0](x))

    def decode(self, z):
        return self.head(z)


@bridge.implemented_by(
    Pair,
    paths={r"layers_(\d+)": r"layers.\1", "out": "head"},
    sizes={"in_features": lambda self, x: x.shape[-1]},
    sizes_of_variables={"in_features": lambda v: v["params"]["layers_0"]["kernel"].shape[0]},
)
class LinenPair(nn.Module):
    """Two layers."""

    width: int
    layer: type = nn.Dense

    def __call__(self, x): ...

    def decode(self, z): ...

    @nn.nowrap
    def double(self):
        return 2 * self.width


X = jnp.ones((2, 5))


def test_variables_are_at_the_linen_paths_and_nothing_else_is_among_them():
    variables = LinenPair(4).init(jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, variables) == {
        "params": {
            "layers_0": {"kernel": (5, 4), "bias": (4,)},
            "out": {"kernel": (4, 3), "bias": (3,)},
        }
    }
    kernels = [variables["params"][name]["kernel"] for name in ("layers_0", "out")]
    assert (LinenPair(4).apply(variables, X) == X @ kernels[0] @ kernels[1]).all()


def test_fields_are_those_of_the_linen_class():
    model = LinenPair(4, name="pair")
    assert (model.width, model.name, model.double()) == (4, "pair", 8)
    assert model.clone(width=6) == LinenPair(6, name="pair")
    layer = functools.partial(nn.Dense, use_bias=False)
    variables = LinenPair(4, layer).init(jax.random.key(0), X)
    assert list(variables["params"]["layers_0"]) == ["kernel"]


def test_sizes_come_from_the_variables_where_arguments_do_not_tell_them():
    variables = LinenPair(4).init(jax.random.key(0), X)
    assert LinenPair(4).apply(variables, jnp.ones((2, 4)), method="decode").shape == (2, 3)
    with pytest.raises(bridge.InvalidModuleError, match="arguments that show in_feat"):
        LinenPair(4).init(jax.random.key(0), jnp.ones((2, 4)), method="decode")


def test_a_linen_parent_and_its_transforms_take_it():
    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.remat(LinenPair)(4, name="pair")(x)
            many = nn.vmap(
                LinenPair,
                in_axes=None,
                axis_size=3,
                variable_axes={"params": 0},
                split_rngs={"params": True},
            )
            return many(2)(x)

    variables = Parent().init(jax.random.key(0), X)
    shapes = jax.tree.map(jnp.shape, variables["params"])
    assert shapes["pair"]["layers_0"]["kernel"] == (5, 4)
    (name,) = shapes.keys() - {"pair"}
    assert shapes[name]["layers_0"]["kernel"] == (3, 3, 2)
    kernels = variables["params"][name]["layers_0"]["kernel"]
    assert not (kernels[0] == kernels[1]).all()
    assert Parent().apply(variables, X).shape == (3, 2, 3)


def test_errors_name_linen_paths():
    variables = LinenPair(4).init(jax.random.key(0), X)
    del variables["params"]["out"]
    with pytest.raises(bridge.MismatchError, match="params/out/kernel"):
        LinenPair(4).apply(variables, X)


def test_a_module_among_the_fields_and_another_class_are_refused():
    with pytest.raises(bridge.InvalidModuleError, match="a Linen class"):
        bridge.implemented_by(Pair)(Pair)
    with pytest.raises(bridge.InvalidModuleError, match="fields without Linen modules"):
        LinenPair(4, nn.Dense(3)).init(jax.random.key(0), X)


def test_paths_that_change_arrays_are_refused():
    with pytest.raises(ValueError, match="only rename"):
        bridge.implemented_by(Pair, paths={"layers": "layers.*"})
