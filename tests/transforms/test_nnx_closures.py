"""Plain jax transforms that close over a wrapped module which changes nothing."""

import jax
import jax.numpy as jnp
import pytest
from flax import errors as flax_errors
from flax import nnx

from tests.models import assert_identical, snapshot
from tests.transforms.nnx_states import CLOSED, CLOSURES, KINDS, Parent, pure_state

TRANSFORMS = {
    "jax_jit": jax.jit,
    "jax_vmap": jax.vmap,
    "jax_checkpoint": jax.checkpoint,
    "jax_grad": lambda f: jax.grad(lambda xs: (f(xs) ** 2).sum()),
    "jax_value_and_grad": lambda f: jax.value_and_grad(lambda xs: (f(xs) ** 2).sum()),
    "jax_jacfwd": lambda f: jax.jacfwd(lambda s: f(s * XS[0]).sum()),
    "jax_jvp": lambda f: lambda xs: jax.jvp(f, (xs,), (2 * xs,)),
    "jax_vjp": lambda f: lambda xs: jax.vjp(f, xs)[1](xs),
    "jax_scan": lambda f: lambda xs: jax.lax.scan(lambda h, x: (f(h + x), x), xs[0], xs),
    "jax_map": lambda f: lambda xs: jax.lax.map(f, xs),
    "jax_cond": lambda f: lambda xs: jax.lax.cond(True, f, lambda x: x, xs),
    "jax_while_loop": lambda f: (
        lambda xs: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1])), (0, xs))[1]
    ),
    "jax_fori_loop": lambda f: lambda xs: jax.lax.fori_loop(0, 2, lambda i, x: f(x) + i, xs),
    "jax_jit_of_vmap_of_grad": lambda f: jax.jit(jax.vmap(jax.grad(lambda x: f(x).sum()))),
}
XS = jnp.linspace(-1.0, 1.0, 16).reshape(2, 2, 4)
ON_SLICES = ("jax_vmap", "jax_scan", "jax_map", "jax_jit_of_vmap_of_grad")


@pytest.mark.parametrize("state", CLOSED)
@pytest.mark.parametrize("transform", CLOSURES)
def test_a_closure_over_a_deterministic_module_is_one_over_pure_linen(transform, state):
    kind = CLOSED[state]
    model = Parent(kind.wrap())
    before, pure = snapshot(model), pure_state(model)
    change = TRANSFORMS[transform]
    x = 2.0 if transform == "jax_jacfwd" else XS if transform in ON_SLICES else XS[0]
    expected = change(lambda x: kind.step(pure, x)[0][0])(x)
    assert_identical(change(model.__call__)(x), expected)
    assert snapshot(model) == before


class NativeDropout(nnx.Module):
    def __init__(self):
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dropout(x)


class NativeNorm(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x)


@pytest.mark.parametrize(
    ("state", "native"),
    [
        ("dropout", NativeDropout),
        ("batch_stats_by_train", NativeNorm),
        ("batch_stats_by_mutable", NativeNorm),
        ("custom_variable", NativeNorm),
    ],
)
def test_a_closure_over_a_module_that_changes_is_refused_as_natively(state, native):
    kind = KINDS[state]
    wrapped = kind.wrap()
    before = snapshot(wrapped)
    native = native()
    for transform, x in ((jax.jit, XS[0]), (jax.vmap, XS), (jax.checkpoint, XS[0])):
        with pytest.raises(flax_errors.TraceContextError):
            transform(native)(x)
        with pytest.raises(flax_errors.TraceContextError):
            transform(lambda x: kind.call(wrapped, x)[0])(x)
        assert snapshot(wrapped) == before
