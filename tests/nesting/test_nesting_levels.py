"""Modules nested in modules of the other kind: paths, values, updates and gradients."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from tests.models import assert_identical
from tests.nesting.nesting_models import (
    LinenOverNNX,
    LinenOverNNXOverLinenOverNNX,
    LinenSetupOverNNX,
    NNXOverLinen,
    NNXOverLinenOverNNX,
    X,
    dense,
    paths,
)

KEY = jax.random.key(0)
LAYER = ["bias", "kernel"]


def chain(params, *names):
    """The pure computation of Dense layers at some paths."""
    x = X
    for name in names:
        layer = params
        for key in name.split("/"):
            layer = layer[key]
        x = dense(x, layer)
    return x


@pytest.mark.parametrize("linen", [LinenOverNNX, LinenSetupOverNNX])
def test_nnx_over_linen_over_nnx_is_the_chain_of_its_layers(linen):
    model = bridge.ToNNX(linen(), nnx.Rngs(0)).lazy_init(X)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert paths(params) == [f"{n}/{leaf}" for n in ("first", "middle") for leaf in LAYER]
    assert_identical(model(X), chain(params, "first", "middle"))
    assert_identical(model.linen_variables()["params"], params)


def test_linen_over_nnx_over_linen_needs_no_call_of_lazy_init():
    """Defect 15: ScopeCollectionNotFound."""
    module = bridge.to_linen(NNXOverLinen, 4, 3)
    variables = module.init(KEY, X)
    assert paths(variables["params"]) == [f"{n}/{p}" for n in ("first", "middle") for p in LAYER]
    params = nn.meta.unbox(variables["params"])
    assert_identical(module.apply(variables, X), chain(params, "first", "middle"))


@pytest.mark.parametrize("depth", [3, 4])
def test_levels_that_alternate_have_the_attribute_name_of_each_in_the_path(depth):
    names = ("outer", "linen/first", "linen/middle")
    if depth == 4:
        names = tuple(f"nnx/{name}" for name in names)
        module = LinenOverNNXOverLinenOverNNX()
    else:
        module = bridge.to_linen(NNXOverLinenOverNNX, 4, 4)
    variables = module.init(KEY, X)
    params = nn.meta.unbox(variables["params"])
    assert paths(params) == sorted(f"{name}/{leaf}" for name in names for leaf in LAYER)

    def pure_loss(params):
        return (chain(params, *names) ** 2).sum()

    def loss(params):
        return (module.apply({**variables, "params": params}, X) ** 2).sum()

    assert_identical(module.apply(variables, X), chain(params, *names))
    gradient = jax.grad(loss)(variables["params"])
    assert_identical(nn.meta.unbox(gradient), jax.grad(pure_loss)(params))


def test_four_levels_in_an_nnx_wrapper_have_the_same_values_and_gradients():
    """Five levels, NNX outermost."""
    module = LinenOverNNXOverLinenOverNNX()
    model = bridge.ToNNX(module, nnx.Rngs(0)).lazy_init(X)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    names = ("nnx/outer", "nnx/linen/first", "nnx/linen/middle")
    assert paths(params) == sorted(f"{name}/{leaf}" for name in names for leaf in LAYER)
    gradient = nnx.jit(nnx.grad(lambda m: (m(X) ** 2).sum()))(model)
    expected = jax.jit(jax.grad(lambda p: (chain(p, *names) ** 2).sum()))(params)
    assert_identical(nnx.to_pure_dict(gradient), expected)
    assert_identical(nnx.jit(lambda m: m(X))(model), jax.jit(lambda p: chain(p, *names))(params))


class Norm(nnx.Module):
    """A native BatchNorm and a wrapped one, in training."""

    def __init__(self, features, _, *, rngs):
        self.native = nnx.BatchNorm(features, momentum=0.9, rngs=rngs)
        self.linen = bridge.ToNNX(nn.BatchNorm(False, momentum=0.9), rngs, mutable="existing")

    def __call__(self, x):
        return self.linen(self.native(x))


def two_norms(stats, x):
    """Two Linen BatchNorms one after the other, and their new statistics."""
    module = nn.BatchNorm(False, momentum=0.9)
    for name in ("native", "linen"):
        scale = {"scale": jnp.ones(4), "bias": jnp.zeros(4)}
        variables = {"params": scale, "batch_stats": stats[name]}
        x, new = module.apply(variables, x, mutable=["batch_stats"])
        stats = {**stats, name: new["batch_stats"]}
    return x, stats


FRESH = {name: {"mean": jnp.zeros(4), "var": jnp.ones(4)} for name in ("native", "linen")}


@pytest.mark.parametrize("levels", [2, 3])
def test_statistics_are_updated_at_every_level_of_a_linen_program(levels):
    inner = bridge.to_linen(Norm, 4, 4, name="norms")
    module = inner if levels == 2 else Holds()
    variables = module.init(KEY, X)
    stats = FRESH
    x = X if levels == 2 else None
    for _ in range(2):
        if levels == 3:
            x = dense(X, variables["params"]["first"])
        output, updates = module.apply(variables, X, mutable=["batch_stats"])
        variables = {**variables, **updates}
        expected, stats = two_norms(stats, x)
        assert jnp.allclose(output, expected, atol=1e-5)
        found = variables["batch_stats"] if levels == 2 else variables["batch_stats"]["middle"]
        found = nn.meta.unbox(found)
        assert paths(found) == paths(stats)
        assert all(map(jnp.allclose, jax.tree.leaves(found), jax.tree.leaves(stats)))


def Holds():  # noqa: N802 it stands for a class
    return LinenOverNNX(inner=Norm)


def test_the_outer_mutable_rules_over_the_wrappers_inside():
    module = bridge.to_linen(Norm, 4, 4)
    variables = module.init(KEY, X)
    with pytest.raises(
        bridge.ImmutableCollectionError, match=r"apply\(…, mutable=\['batch_stats'\]"
    ):
        module.apply(variables, X, mutable=["cache"])


def test_statistics_are_updated_at_every_level_of_an_nnx_program():
    model = bridge.ToNNX(LinenOverNNX(inner=Norm), nnx.Rngs(0), mutable="existing").lazy_init(X)
    stats = FRESH
    for _ in range(2):
        output = model(X)
        expected, stats = two_norms(stats, dense(X, nnx.to_pure_dict(nnx.state(model.first))))
        assert jnp.allclose(output, expected, atol=1e-5)
    found = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))["middle"]
    assert paths(found) == paths(stats)
    assert all(map(jnp.allclose, jax.tree.leaves(found), jax.tree.leaves(stats)))


class LinenCollections(nn.Module):
    """Bridged modules in a list, a dict and a tuple, beside native ones."""

    def setup(self):
        self.layers = [nn.Dense(4), bridge.to_linen(nnx.Linear, 4, 4), nn.Dense(4)]
        self.heads = {"a": bridge.to_linen(nnx.Linear, 4, 2), "b": nn.Dense(2)}

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.heads["a"](x) + self.heads["b"](x)


class NNXCollections(nnx.Module):
    """The same the other way round."""

    def __init__(self, rngs):
        self.layers = nnx.List(
            [
                nnx.Linear(4, 4, rngs=rngs),
                bridge.ToNNX(nn.Dense(4), rngs),
                bridge.ToNNX(nn.Dense(4), rngs),
            ]
        )
        self.heads = nnx.Dict(a=bridge.ToNNX(nn.Dense(2), rngs), b=nnx.Linear(4, 2, rngs=rngs))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.heads["a"](x) + self.heads["b"](x)


def layers_and_heads(layers, heads):
    x = X
    for layer in layers:
        x = dense(x, layer)
    return dense(x, heads[0]) + dense(x, heads[1])


def test_bridged_submodules_in_lists_and_dicts_of_linen_have_linen_names():
    module = LinenCollections()
    variables = module.init(KEY, X)
    params = nn.meta.unbox(variables["params"])
    names = ["heads_a", "heads_b", "layers_0", "layers_1", "layers_2"]
    assert sorted(params) == names
    layers = [params[f"layers_{i}"] for i in range(3)]
    expected = layers_and_heads(layers, [params["heads_a"], params["heads_b"]])
    assert_identical(module.apply(variables, X), expected)


@pytest.mark.parametrize("in_linen", [False, True])
def test_bridged_submodules_in_lists_and_dicts_of_nnx_have_nnx_paths(in_linen):
    if in_linen:
        module = bridge.to_linen(NNXCollections)
        variables = module.init(KEY, X)
        params = nn.meta.unbox(variables["params"])
        output = module.apply(variables, X)
        heads, layers = params["heads"], params["layers"]
    else:
        model = bridge.lazy_init(NNXCollections(nnx.Rngs(0)), X)
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        output = model(X)
        heads, layers = params["heads"], params["layers"]
    assert list(layers) == [0, 1, 2]
    expected = layers_and_heads([layers[i] for i in range(3)], [heads["a"], heads["b"]])
    assert_identical(output, expected)


class Dropouts(nnx.Module):
    """Native and wrapped dropout in one NNX module."""

    def __init__(self, features, _, *, rngs):
        self.native = nnx.Dropout(0.5, rngs=rngs)
        self.linen = bridge.ToNNX(nn.Dropout(0.5, deterministic=False), rngs)

    def __call__(self, x):
        return jnp.stack([self.native(x), self.linen(x)])


def test_dropout_of_every_level_follows_the_key_of_the_outer_apply():
    module = bridge.to_linen(Dropouts, 4, 4)
    x = jnp.ones((8, 8))
    variables = module.init({"params": KEY, "dropout": KEY}, x)
    keys = [jax.random.key(i) for i in (1, 2)]
    apply = jax.jit(lambda key: module.apply(variables, x, rngs={"dropout": key}))
    first, again, other = apply(keys[0]), apply(keys[0]), apply(keys[1])
    assert_identical(first, again)
    for level in (0, 1):
        assert (first[level] != other[level]).any()
    assert (first[0] != first[1]).any()
