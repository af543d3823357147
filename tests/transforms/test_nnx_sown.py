"""Sown values are kept in the model or collected by capture, under NNX transforms too."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.models import assert_close, assert_identical, snapshot
from tests.transforms.nnx_states import (
    KEEPS_SOWN,
    KINDS,
    SETTINGS,
    X,
    pure_state,
    values,
    wrapper_in,
)

KIND = KINDS["sown"]
XS = jnp.stack([X, 2 * X, 3 * X])


def nnx_grad(call, model):
    def loss(model):
        y, *others = call(model, X)
        return (y**2).sum(), (y, *others)

    return nnx.grad(loss, has_aux=True)(model)[1]


# Of `call(model, x)`, over one model, or over a stack of three for vmap.
TRANSFORMS = {
    "jit": lambda call, model: nnx.jit(call)(model, X),
    "remat": lambda call, model: nnx.remat(call)(model, X),
    "cond": lambda call, model: nnx.cond(jnp.array(True), call, call, model, X),
    "vmap": lambda call, model: nnx.vmap(call)(model, XS),
    "grad": nnx_grad,
}


def model_for(transform, setting):
    if transform != "vmap":
        return setting.model(KIND)
    models = [setting.model(KIND, seed) for seed in range(3)]
    state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(nnx.state, models))
    return nnx.merge(nnx.graphdef(models[0]), state)


def pure_calls(transform, pure, calls):
    """The last output, and what was sown in all of some calls."""

    def apply(pure, x):
        variables = dict(pure["variables"])
        for _ in range(calls):
            y, sown = KIND.module.apply(variables, x, mutable=["intermediates"])
            variables.update(sown)
        return y * pure.get("scale", 1.0), variables["intermediates"]

    return jax.vmap(apply)(pure, XS) if transform == "vmap" else apply(pure, X)


@pytest.mark.parametrize("setting", ["alone", "in_a_parent"])
@pytest.mark.parametrize("transform", KEEPS_SOWN)
def test_a_transform_keeps_what_was_sown_as_pure_linen_does(transform, setting):
    model = model_for(transform, SETTINGS[setting])
    pure = pure_state(model)
    for calls in (1, 2):
        call = lambda m, x: (m(x, mutable=["intermediates"]),)  # noqa: E731
        (output,) = TRANSFORMS[transform](call, model)
        expected, sown = pure_calls(transform, pure, calls)
        assert_close(output, expected)
        assert_close(wrapper_in(model).linen_variables()["intermediates"], sown)
    nnx.pop(model, nnx.Intermediate)
    assert_identical(pure_state(model), pure)


@pytest.mark.parametrize("transform", KEEPS_SOWN)
def test_capture_collects_through_a_transform_as_natively(transform):
    model = model_for(transform, SETTINGS["in_a_parent"])
    before = snapshot(model)
    expected, sown = pure_calls(transform, pure_state(model), 1)
    for _ in range(2):
        call = lambda m, x: nnx.capture(m, nnx.Intermediate)(x)  # noqa: E731
        output, captured = TRANSFORMS[transform](call, model)
        assert_close(output, expected)
        assert_close(values(captured)["inner"], sown)
    assert snapshot(model) == before
