"""Flax's own tools on mixed models: perturb, capture_intermediates, tabulate, display."""

import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from tests.models import assert_close, assert_identical, snapshot
from tests.nesting.nesting_models import (
    LinenOverNNX,
    LinenSetupOverNNX,
    NNXOverLinen,
    NNXOverLinenOverNNX,
    X,
    dense,
    paths,
)

KEY = jax.random.key(0)


class LinenPerturbs(nn.Module):
    """Perturbs between a native and a bridged layer."""

    @nn.compact
    def __call__(self, x):
        x = self.perturb("between", nn.Dense(4, name="first")(x))
        return bridge.to_linen(nnx.Linear, 4, 4, name="middle")(x)


class NNXPerturbs(nnx.Module):
    """Perturbs between a native and a wrapped layer."""

    def __init__(self, din, dout, *, rngs):
        self.first = nnx.Linear(din, 4, rngs=rngs)
        self.middle = bridge.ToNNX(nn.Dense(dout), rngs)

    def __call__(self, x):
        with warnings.catch_warnings():
            # Flax advises nnx.capture.
            warnings.simplefilter("ignore", DeprecationWarning)
            x = self.perturb("between", self.first(x))
        return self.middle(x)


def gradient_between(params):
    """What perturbations measure: the gradient at the output of the first layer."""
    between = dense(X, params["first"])
    return jax.grad(lambda h: (dense(h, params["middle"]) ** 2).sum())(between)


def test_perturb_in_linen_measures_the_gradient_above_a_bridged_layer():
    module = LinenPerturbs()
    variables = module.init(KEY, X)
    rest = {k: v for k, v in variables.items() if k != "perturbations"}

    def loss(perturbations):
        return (module.apply({**rest, "perturbations": perturbations}, X) ** 2).sum()

    gradient = jax.grad(loss)(variables["perturbations"])
    expected = gradient_between(nn.meta.unbox(variables["params"]))
    assert_identical(gradient, {"between": expected})


def test_perturb_in_a_wrapped_module_measures_above_a_bridged_layer():
    model = bridge.ToNNX(LinenPerturbs(), nnx.Rngs(0)).lazy_init(X)
    wrt = nnx.DiffState(0, nnx.Perturbation)
    gradient = nnx.grad(lambda m: (m(X) ** 2).sum(), argnums=wrt)(model)
    expected = gradient_between(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert_identical(nnx.to_pure_dict(gradient), {"between": expected})


def test_perturb_in_a_bridged_module_measures_above_a_wrapped_layer():
    module = bridge.to_linen(NNXPerturbs, 4, 4)
    variables = module.init(KEY, X)
    assert list(variables["perturbations"]) == ["between"]

    def loss(perturbations):
        return (module.apply({**variables, "perturbations": perturbations}, X) ** 2).sum()

    gradient = nn.meta.unbox(jax.grad(loss)(variables["perturbations"]))
    expected = gradient_between(nn.meta.unbox(variables["params"]))
    assert_identical(gradient, {"between": expected})


@pytest.mark.parametrize("parent", [LinenOverNNX, LinenSetupOverNNX])
def test_capture_intermediates_sees_the_bridged_submodule_as_any_other(parent):
    module = parent()
    variables = module.init(KEY, X)
    output, state = module.apply(variables, X, capture_intermediates=True)
    params = nn.meta.unbox(variables["params"])
    first = dense(X, params["first"])
    middle = dense(first, params["middle"])
    expected = {"first": {"__call__": (first,)}, "middle": {"__call__": (middle,)}}
    assert_identical(state["intermediates"], {**expected, "__call__": (middle,)})
    assert_identical(output, middle)


def test_capture_intermediates_sees_linen_modules_inside_of_a_bridged_one():
    module = bridge.to_linen(NNXOverLinen, 4, 3)
    variables = module.init(KEY, X)
    output, state = module.apply(variables, X, capture_intermediates=True)
    assert_identical(state["intermediates"]["__call__"], (output,))


def test_capture_intermediates_takes_a_filter_that_knows_bridged_modules():
    module = LinenOverNNX()
    variables = module.init(KEY, X)

    def is_bridged(module, name):
        return isinstance(module, bridge.ToLinen) and name == "__call__"

    _, state = module.apply(variables, X, capture_intermediates=is_bridged)
    assert paths(state["intermediates"]) == ["middle/__call__"]


def test_a_call_of_a_wrapped_module_takes_capture_intermediates():
    model = bridge.ToNNX(LinenOverNNX(), nnx.Rngs(0)).lazy_init(X)
    variables = model.linen_variables()
    model(X, capture_intermediates=True)
    _, state = LinenOverNNX().apply(variables, X, capture_intermediates=True)
    assert_identical(model.linen_variables()["intermediates"], state["intermediates"])
    nnx.pop(model, nnx.Intermediate)
    assert_identical(model.linen_variables(), variables)


MODELS = {
    "linen over nnx": LinenOverNNX,
    "setup over nnx": LinenSetupOverNNX,
    "linen over nnx over linen": lambda: LinenOverNNX(NNXOverLinen),
    "bridged": lambda: bridge.to_linen(nnx.Linear, 4, 4),
}
COUNTS = {
    "linen over nnx": 40,
    "setup over nnx": 40,
    "linen over nnx over linen": 60,
    "bridged": 20,
}


@pytest.mark.parametrize("name", MODELS)
def test_linen_tabulate_counts_the_parameters_of_bridged_modules(name):
    module = MODELS[name]()
    table = module.tabulate(KEY, X, console_kwargs={"width": 240})
    variables = jax.eval_shape(module.init, KEY, X)
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) == COUNTS[name]
    # Linen counts the leaves of all collections.
    assert f"Total Parameters: {sum(leaf.size for leaf in jax.tree.leaves(variables))} " in table
    assert nn.tabulate(module, KEY, console_kwargs={"width": 240})(X) == table
    if name != "bridged":
        assert "ToLinen" in table
        assert "middle" in table


class Unseen(nnx.Linear):
    """A class that no other test constructs, so that nothing about it is cached."""


def nnx_models():
    rngs = nnx.Rngs(0)
    yield bridge.ToNNX(LinenOverNNX(), rngs)
    yield NNXOverLinen(4, 4, rngs=rngs)
    yield NNXOverLinenOverNNX(4, 4, rngs=rngs)
    yield nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), bridge.ToNNX(nn.Dense(4), rngs))
    yield bridge.ToNNX(LinenOverNNX(inner=Unseen), rngs)


@pytest.fixture
def unpatched():
    """Puts back the methods that nnx.tabulate replaces, even if it fails."""
    classes = (nnx.Linear, nnx.Sequential, nnx.Rngs, nnx.RngStream, bridge.ToNNX)
    classes += (NNXOverLinen, NNXOverLinenOverNNX, Unseen)
    before = [dict(vars(c)) for c in classes]
    yield
    for cls, attributes in zip(classes, before, strict=True):
        for name in set(vars(cls)) - set(attributes):
            delattr(cls, name)
        for name, value in attributes.items():
            if vars(cls)[name] is not value:
                setattr(cls, name, value)


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("index", range(5))
def test_nnx_tabulate_counts_wrapped_parameters_and_changes_nothing(index):
    model = bridge.lazy_init(list(nnx_models())[index], X)
    before = snapshot(model)
    total = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    table = nnx.tabulate(model, X, console_kwargs={"width": 240, "no_color": True})
    assert f"Total Parameters: {total} " in re.sub("\x1b\\[[0-9;]*m", "", table)
    # By path: a row has the type of what was called first there, the wrapper or what is inside.
    wrappers = [path for path, node in nnx.iter_graph(model) if isinstance(node, bridge.ToNNX)]
    assert wrappers
    assert all("/".join(map(str, path)) in table for path in wrappers)
    assert snapshot(model) == before
    assert model(X).shape == (2, 4)


@pytest.mark.parametrize("index", range(4))
def test_nnx_display_and_repr_show_wrapped_modules(index, capsys):
    model = bridge.lazy_init(list(nnx_models())[index], X)
    before = snapshot(model)
    nnx.display(model)
    nnx.display(nnx.state(model))
    shown = capsys.readouterr().out
    assert "ToNNX" in shown
    assert "ToNNX" in repr(model)
    assert "kernel" in shown
    assert snapshot(model) == before


def test_eval_shape_and_jit_of_init_agree_with_init_at_every_level():
    module = LinenOverNNX(NNXOverLinen)
    variables = module.init(KEY, X)
    abstract = jax.eval_shape(module.init, KEY, X)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(lambda leaf: leaf.shape, abstract)
    assert_close(jax.jit(module.init)(KEY, X), variables)
