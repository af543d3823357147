"""Stacks under other names, which only one side keeps stacked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from bridge import port
from tests.port.cases import random_values
from tests.port.models import shapes_of
from tests.strategies import exact

X = jnp.asarray(np.random.default_rng(5).normal(size=(2, 4)), jnp.float32)


def suggested(linen, model, *, traces=True):
    """The suggestions of two models, if they move values to the right places."""
    variables = random_values(shapes_of(linen, X))
    given = (X,) if traces else ()
    found = port.suggest(variables, model, *given, linen=linen if traces else None)
    assert found.plan.ok, str(found.plan)
    found.plan.apply()
    np.testing.assert_allclose(model(X), linen.apply(variables, X), rtol=1e-4, atol=1e-5)
    return found


class ScannedBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(4, name="fc")(x)), None


class TwoScans(nn.Module):
    names: tuple[str, str] = ("encoder", "decoder")

    @nn.compact
    def __call__(self, x):
        for name in self.names:
            axes, rngs = {"params": 0}, {"params": True}
            scan = nn.scan(ScannedBlock, variable_axes=axes, split_rngs=rngs, length=3)
            x = scan(name=name)(x, None)[0]
        return x


class TwoListsInLinen(nn.Module):
    names: tuple[str, str] = ("encoder", "decoder")

    @nn.compact
    def __call__(self, x):
        for name in self.names:
            for n in range(3):
                x = nn.tanh(nn.Dense(4, name=f"{name}_{n}")(x))
        return x


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return nnx.tanh(self.linear(x))


class TwoLists(nnx.Module):
    def __init__(self, first, second):
        self.names = first, second
        for name in sorted(self.names):
            setattr(self, name, nnx.List([Block(nnx.Rngs(0)) for _ in range(3)]))

    def __call__(self, x):
        for name in self.names:
            for block in getattr(self, name):
                x = block(x)
        return x


class TwoStacks(nnx.Module):
    def __init__(self, first, second):
        self.names = first, second
        for name in sorted(self.names):
            setattr(self, name, nnx.vmap(Block)(nnx.Rngs(0).split(3)))

    def __call__(self, x):
        scan = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        for name in self.names:
            x = scan(x, getattr(self, name))
        return x


@pytest.mark.parametrize("names", [("one", "two"), ("two", "one"), ("decoder", "encoder")])
@pytest.mark.parametrize(
    ("linen", "native"), [(TwoScans, TwoLists), (TwoListsInLinen, TwoStacks), (TwoScans, TwoStacks)]
)
def test_the_order_of_calls_tells_two_stacks_apart(linen, native, names):
    found = suggested(linen(), native(*names))
    assert not any(each.is_weak for each in found.proposals)
    assert found.proposals[0].is_disputed == (names == ("decoder", "encoder"))


def test_two_stacks_without_traces_are_told_apart_by_their_names_or_weakly():
    variables = random_values(shapes_of(TwoScans(), X))
    named = port.suggest(variables, TwoLists("encoder_blocks", "decoder_blocks"))
    assert named.plan.ok
    assert not any(each.is_weak for each in named.proposals)
    made = TwoScans().init(jax.random.key(0), X)
    assert all(each.is_weak for each in port.suggest(made, TwoLists("one", "two")).proposals)


class Experts(nn.Module):
    """Three experts in stacked parameters, in a scope of their own or beside the gate."""

    is_nested: bool

    @nn.compact
    def __call__(self, x):
        if self.is_nested:
            return nn.vmap(
                nn.Dense,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=None,
                axis_size=3,
            )(5, name="expert")(x)
        kernel = self.param("w", nn.initializers.normal(), (3, 4, 5))
        bias = self.param("b", nn.initializers.normal(), (3, 1, 5))
        return jnp.einsum("bd,edf->ebf", x, kernel) + bias


class Mixture(nn.Module):
    is_nested: bool = False

    @nn.compact
    def __call__(self, x):
        gate = nn.softmax(nn.Dense(3, name="gate")(x))
        return jnp.einsum("ebf,be->bf", Experts(self.is_nested, name="experts")(x), gate)


class Affine(nnx.Module):
    def __init__(self):
        self.matrix, self.shift = nnx.Param(jnp.zeros((4, 5))), nnx.Param(jnp.zeros((1, 5)))

    def __call__(self, x):
        return x @ self.matrix[...] + self.shift[...]


class NativeMixture(nnx.Module):
    def __init__(self, make):
        self.gate = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        self.mlps = nnx.List([make() for _ in range(3)])

    def __call__(self, x):
        made = jnp.stack([mlp(x) for mlp in self.mlps])
        return jnp.einsum("ebf,be->bf", made, nnx.softmax(self.gate(x)))


@pytest.mark.parametrize("traces", [False, True])
def test_stacked_parameters_are_the_layers_of_a_list_under_other_names(traces):
    found = suggested(Mixture(), NativeMixture(Affine), traces=traces)
    stack, leaves = found.proposals
    assert stack.rules == {"experts": "mlps.*"}
    assert leaves.rules == {"experts/w": "mlps.*.matrix", "experts/b": "mlps.*.shift"}
    assert (stack.is_weak, leaves.is_weak) == (False, True)
    linear = NativeMixture(lambda: nnx.Linear(4, 5, rngs=nnx.Rngs(0)))
    suggested(Mixture(is_nested=True), linear, traces=traces)


def test_layers_one_by_one_are_the_parts_of_stacked_parameters():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = [nn.Dense(5, use_bias=False, name=f"expert_{n}") for n in range(3)]
            return sum(nn.tanh(layer(x)) for layer in layers)

    class Native(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.zeros((3, 4, 5)))

        def __call__(self, x):
            return nnx.tanh(jnp.einsum("bd,edf->ebf", x, self.w[...])).sum(0)

    found = suggested(Linen(), Native())
    assert found.rules == {r"expert_(\d+)/kernel": r"w[\1]"}
    assert [each.is_weak for each in found.proposals] == [True]


class Scan(nn.Module):
    is_reversed: bool

    @nn.compact
    def __call__(self, x):
        axes, rngs = {"params": 0}, {"params": True}
        scan = nn.scan(
            ScannedBlock,
            variable_axes=axes,
            split_rngs=rngs,
            length=3,
            reverse=self.is_reversed,
        )
        return scan(name="layers")(x, None)[0]


class Numbered(nn.Module):
    is_reversed: bool

    @nn.compact
    def __call__(self, x):
        for n in (2, 1, 0) if self.is_reversed else range(3):
            x = nn.tanh(nn.Dense(4, name=f"layers_{n}")(x))
        return x


class OneList(nnx.Module):
    def __init__(self, is_reversed):
        self.layers = nnx.List([Block(nnx.Rngs(0)) for _ in range(3)])
        self.is_reversed = is_reversed

    def __call__(self, x):
        for layer in reversed(self.layers) if self.is_reversed else self.layers:
            x = layer(x)
        return x


class OneStack(nnx.Module):
    def __init__(self, is_reversed):
        self.layers = nnx.vmap(Block)(nnx.Rngs(0).split(3))
        self.is_reversed = is_reversed

    def __call__(self, x):
        axes = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry, "reverse": self.is_reversed}
        return nnx.scan(lambda x, block: block(x), **axes)(x, self.layers)


@pytest.mark.parametrize("native_is_reversed", [False, True])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_layers_of_a_stack_are_numbered_as_the_scan_calls_them(is_reversed, native_is_reversed):
    found = suggested(Numbered(is_reversed), OneStack(native_is_reversed))
    is_disputed = is_reversed != native_is_reversed
    assert any(each.is_disputed for each in found.proposals) == is_disputed
    assert not any(each.is_weak for each in found.proposals)


@pytest.mark.parametrize("native", [OneList, OneStack])
@pytest.mark.parametrize("native_is_reversed", [False, True])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_scan_in_another_direction_is_in_doubt(native, is_reversed, native_is_reversed):
    linen, model = Scan(is_reversed), native(native_is_reversed)
    if is_reversed == native_is_reversed:
        found = suggested(linen, model)
        assert not any(each.is_disputed for each in found.proposals)
        return
    # No rule turns a stack around.
    found = port.suggest(random_values(shapes_of(linen, X)), model, X, linen=linen)
    first = found.proposals[0]
    assert (first.is_disputed, first.is_weak) == (True, True)


class AutomaticExperts(nn.Module):
    @nn.compact
    def __call__(self, x):
        return sum(nn.Dense(4)(nn.gelu(x + n)) for n in range(3))


class NativeExperts(nnx.Module):
    def __init__(self):
        self.mlps = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs))(nnx.Rngs(0).split(3))

    def __call__(self, x):
        moved = jnp.stack([nnx.gelu(x + n) for n in range(3)])
        return nnx.vmap(lambda layer, x: layer(x))(self.mlps, moved).sum(0)


def test_layers_of_automatic_names_that_no_call_orders_fill_a_stack_weakly():
    # Regression: nothing was proposed for automatic names.
    found = suggested(AutomaticExperts(), NativeExperts())
    assert found.rules == {r"Dense_(\d+)": r"mlps[\1]"}
    assert [each.is_weak for each in found.proposals] == [True]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_gates_of_cells_that_are_stacked_on_any_axis_are_side_by_side(axis):
    # Regression: on the last axis the gates were looked for along the layers.
    cell = nn.OptimizedLSTMCell(5)
    carry = (jnp.zeros((2, 5)), jnp.zeros((2, 5)))
    shapes = jax.eval_shape(cell.init, jax.random.key(0), carry, X)["params"]
    variables = random_values({"params": {f"cell_{n}": shapes for n in range(3)}})

    class Native(nnx.Module):
        def __init__(self):
            make = nnx.vmap(lambda rngs: nnx.OptimizedLSTMCell(4, 5, rngs=rngs), out_axes=axis)
            self.cells = make(nnx.Rngs(0).split(3))

    plan = port.plan(variables, Native(), {r"cell_(\d+)": rf"cells[\1@{axis}]"})
    kernels = plan.apply().cells.dense_i.kernel[...]
    for n in range(3):
        own = variables["params"][f"cell_{n}"]
        expected = np.concatenate([own[name]["kernel"] for name in ("ii", "if", "ig", "io")], 1)
        np.testing.assert_array_equal(jnp.moveaxis(kernels, axis, 0)[n], expected)
    assert exact(plan.inverse().apply()) == exact(variables)
