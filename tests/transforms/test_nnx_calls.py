"""NNX transforms of calls of a wrapped module, against the jax transform of pure Linen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import assert_identical
from tests.transforms.nnx_states import (
    CALLS,
    CUSTOM_VJP_TAKES_UPDATES,
    KINDS,
    SETTING,
    SETTINGS,
    WITHOUT_GRAPH_UPDATES,
    X,
    modules_are_pytrees,
    pure_params,
    pure_state,
    values,
    with_params,
)


def loss_of(output):
    y, sown = output
    return jnp.sum(y**2), (y, sown)


# Each transform twice: of `call(model, x) -> output`, which updates the model, and of
# `step(pure, x) -> (output, pure)`.


def nnx_jit(call, model, x):
    return nnx.jit(call)(model, x)


def jax_jit(step, pure, x):
    return jax.jit(step)(pure, x)


def nnx_remat(call, model, x):
    return nnx.remat(call)(model, x)


def jax_remat(step, pure, x):
    return jax.checkpoint(step)(pure, x)


def nnx_cond(call, model, x):
    double = lambda m, x: call(m, 2 * x)  # noqa: E731
    return [nnx.cond(jnp.array(p), call, double, model, x) for p in (True, False)]


def jax_cond(step, pure, x):
    double = lambda p, x: step(p, 2 * x)  # noqa: E731
    first, pure = jax.lax.cond(jnp.array(True), step, double, pure, x)
    second, pure = jax.lax.cond(jnp.array(False), step, double, pure, x)
    return [first, second], pure


def nnx_switch(call, model, x):
    branches = [lambda m, x, n=n: call(m, n * x) for n in (1.0, 2.0, 3.0)]
    return [nnx.switch(jnp.array(i), branches, model, x) for i in (2, 0)]


def jax_switch(step, pure, x):
    branches = [lambda p, x, n=n: step(p, n * x) for n in (1.0, 2.0, 3.0)]
    first, pure = jax.lax.switch(jnp.array(2), branches, pure, x)
    second, pure = jax.lax.switch(jnp.array(0), branches, pure, x)
    return [first, second], pure


def nnx_while_loop(call, model, x):
    first = call(model, x)

    def body(carry):
        i, m, output = carry
        return i + 1, m, call(m, output[0])

    return nnx.while_loop(lambda carry: carry[0] < 2, body, (jnp.array(0), model, first))[2]


def jax_while_loop(step, pure, x):
    first, pure = step(pure, x)

    def body(carry):
        i, pure, output = carry
        output, pure = step(pure, output[0])
        return i + 1, pure, output

    carry = jax.lax.while_loop(lambda carry: carry[0] < 2, body, (jnp.array(0), pure, first))
    return carry[2], carry[1]


def nnx_fori_loop(call, model, x):
    def body(i, carry):
        m, output = carry
        return m, call(m, output[0] + i)

    return nnx.fori_loop(0, 2, body, (model, call(model, x)))[1]


def jax_fori_loop(step, pure, x):
    def body(i, carry):
        pure, output = carry
        output, pure = step(pure, output[0] + i)
        return pure, output

    output, pure = step(pure, x)
    pure, output = jax.lax.fori_loop(0, 2, body, (pure, output))
    return output, pure


def nnx_scan_of_inputs(call, model, x):
    xs = jnp.stack([x, 2 * x])
    body = lambda m, x: (m, call(m, x))  # noqa: E731
    return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(model, xs)[1]


def jax_scan_of_inputs(step, pure, x):
    pure, outputs = jax.lax.scan(lambda p, x: step(p, x)[::-1], pure, jnp.stack([x, 2 * x]))
    return outputs, pure


def merged_call(call, model):
    """For transforms that see modules as pytrees: a loss of the parameters, and its arguments."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, x):
        return loss_of(call(nnx.merge(graphdef, params, rest), x))

    return loss, params, rest


def nnx_grad(call, model, x):
    if modules_are_pytrees():
        loss, params, rest = merged_call(call, model)
        gradient, aux = nnx.grad(loss, has_aux=True)(params, rest, x)
    else:
        loss = lambda m, x: loss_of(call(m, x))  # noqa: E731
        gradient, aux = nnx.grad(loss, has_aux=True)(model, x)
    return values(gradient), aux


def pure_loss(step):
    def loss(params, pure, x):
        output, pure = step(with_params(pure, params), x)
        value, aux = loss_of(output)
        return value, (aux, pure)

    return loss


def jax_grad(step, pure, x):
    gradient, (aux, pure) = jax.grad(pure_loss(step), has_aux=True)(pure_params(pure), pure, x)
    return (values(gradient), aux), pure


def nnx_value_and_grad(call, model, x):
    if modules_are_pytrees():
        loss, params, rest = merged_call(call, model)
        value, (gradient, dx) = nnx.value_and_grad(loss, argnums=(0, 2), has_aux=True)(
            params, rest, x
        )
    else:
        loss = lambda m, x: loss_of(call(m, x))  # noqa: E731
        value, (gradient, dx) = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(model, x)
    return value, values(gradient), dx


def jax_value_and_grad(step, pure, x):
    (value, (aux, pure)), (gradient, dx) = jax.value_and_grad(
        pure_loss(step), argnums=(0, 2), has_aux=True
    )(pure_params(pure), pure, x)
    return ((value, aux), values(gradient), dx), pure


def nnx_grad_of_remat(call, model, x):
    return nnx_grad(nnx.remat(call), model, x)


def jax_grad_of_remat(step, pure, x):
    return jax_grad(jax.checkpoint(step), pure, x)


def nnx_jit_of_grad(call, model, x):
    return nnx.jit(lambda m, x: nnx_grad(call, m, x))(model, x)


def jax_jit_of_grad(step, pure, x):
    return jax.jit(lambda p, x: jax_grad(step, p, x))(pure, x)


def nnx_vjp(call, model, x):
    loss, params, rest = merged_call(call, model)
    value, pullback, aux = nnx.vjp(loss, params, rest, x, has_aux=True)
    gradient, _, dx = pullback(jnp.array(3.0))
    return value, values(gradient), dx, aux


def jax_vjp(step, pure, x):
    loss = lambda params, x: pure_loss(step)(params, pure, x)  # noqa: E731
    value, pullback, (aux, new) = jax.vjp(loss, pure_params(pure), x, has_aux=True)
    gradient, dx = pullback(jnp.array(3.0))
    return (value, values(gradient), dx, aux), new


def nnx_jvp(call, model, x):
    loss, params, rest = merged_call(call, model)
    tangents = (jax.tree.map(jnp.ones_like, params), jax.tree.map(no_tangent, rest), 2 * x)
    return nnx.jvp(loss, (params, rest, x), tangents, has_aux=True)


def no_tangent(leaf):
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.zeros_like(leaf)
    return np.zeros(leaf.shape, jax.dtypes.float0)


def jax_jvp(step, pure, x):
    params = pure_params(pure)
    loss = lambda params, x: pure_loss(step)(params, pure, x)  # noqa: E731
    tangents = (jax.tree.map(jnp.ones_like, params), 2 * x)
    value, tangent, (aux, pure) = jax.jvp(loss, (params, x), tangents, has_aux=True)
    return (value, tangent, aux), pure


def nnx_eval_shape(call, model, x):
    return nnx.eval_shape(call, model, x)


def jax_eval_shape(step, pure, x):
    # Nothing is computed, so nothing is updated.
    return jax.eval_shape(step, pure, x)[0], pure


TRANSFORMS = {
    "jit": (nnx_jit, jax_jit),
    "remat": (nnx_remat, jax_remat),
    "cond": (nnx_cond, jax_cond),
    "switch": (nnx_switch, jax_switch),
    "while_loop": (nnx_while_loop, jax_while_loop),
    "fori_loop": (nnx_fori_loop, jax_fori_loop),
    "scan_of_inputs": (nnx_scan_of_inputs, jax_scan_of_inputs),
    "grad": (nnx_grad, jax_grad),
    "value_and_grad": (nnx_value_and_grad, jax_value_and_grad),
    "grad_of_remat": (nnx_grad_of_remat, jax_grad_of_remat),
    "jit_of_grad": (nnx_jit_of_grad, jax_jit_of_grad),
    "vjp": (nnx_vjp, jax_vjp),
    "jvp": (nnx_jvp, jax_jvp),
    "eval_shape": (nnx_eval_shape, jax_eval_shape),
}


CELLS = [(t, s, setting) for (t, s), setting in SETTING.items() if t in CALLS]


@pytest.mark.parametrize(("transform", "state", "setting"), CELLS)
def test_a_transform_of_calls_is_that_of_pure_linen(transform, state, setting):
    kind, setting = KINDS[state], SETTINGS[setting]
    ours, reference = TRANSFORMS[transform]
    with setting.active():
        model = setting.model(kind)
        expected, pure = reference(kind.step, pure_state(model), kind.x)
        assert_identical(ours(kind.call, model, kind.x), expected)
    assert_identical(pure_state(model), pure)


@pytest.mark.parametrize("transform", WITHOUT_GRAPH_UPDATES)
def test_vjp_and_jvp_refuse_graph_updates_as_for_native_modules(transform):
    for model in (KINDS["parameters"].wrap(), nnx.Linear(4, 4, rngs=nnx.Rngs(0))):
        with pytest.raises(NotImplementedError, match="graph_updates is not supported"):
            TRANSFORMS[transform][0](KINDS["parameters"].call, model, X)


def _custom_vjp_cells():
    for state in KINDS:
        yield state, "in_a_parent"
        if CUSTOM_VJP_TAKES_UPDATES or state in ("parameters", "sown", "metadata"):
            yield state, "tree_mode"


@pytest.mark.parametrize(("state", "setting"), [*_custom_vjp_cells()])
def test_custom_vjp_gives_the_rule_s_gradient_and_the_call_s_updates(state, setting):
    """The rule: every parameter has the gradient of the sum of the output."""
    kind, setting = KINDS[state], SETTINGS[setting]
    with setting.active():
        model = setting.model(kind)
        ((y, _), pure) = kind.step(pure_state(model), kind.x)
        gradient = nnx_custom_vjp(kind.call, model, kind.x)
    expected = jax.tree.map(lambda p: jnp.full_like(p, (2 * y).sum()), values(pure_params(pure)))
    assert_identical(gradient, expected)
    assert_identical(pure_state(model), pure)


def nnx_custom_vjp(call, model, x):
    if modules_are_pytrees():
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        @nnx.custom_vjp
        def ruled(params, rest):
            return call(nnx.merge(graphdef, params, rest), x)[0]

        def backward(params, g):
            return jax.tree.map(lambda p: jnp.full_like(p, g.sum()), params), None

        ruled.defvjp(lambda params, rest: (ruled(params, rest), params), backward)
        return values(nnx.grad(lambda p, r: (ruled(p, r) ** 2).sum())(params, rest))
    diff = nnx.DiffState(0, nnx.Param)

    @functools.partial(nnx.custom_vjp, nondiff_argnums=(diff,))
    def ruled(m):
        return call(m, x)[0]

    def backward(_, g):
        (updates_g,), y_g = g
        params_g = nnx.filter_state(updates_g, nnx.Param)
        return (jax.tree.map(lambda p: jnp.full_like(p, y_g.sum()), params_g),)

    ruled.defvjp(lambda m: (ruled(m), None), backward)
    return values(nnx.grad(lambda m: (ruled(m) ** 2).sum(), argnums=diff)(model))
