"""The examples of the lifting guide and of the reference of `flax.linen.transforms`.

Each runs twice: with native Linen layers, and with bridged NNX layers that hold the same values.
Both compute the same operations, so results are equal bit for bit unless a test says otherwise.
"""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import Scope, init, lift

import bridge
from tests.models import assert_identical
from tests.transforms.linen_states import transposed

KEY = jax.random.key(0)


def values(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape)


class Dense(nnx.Module):
    """An NNX layer with the signature of `nn.Dense`, so that examples stay as they are."""

    def __init__(self, features, in_features, use_bias=True, *, rngs):
        linear = nnx.Linear(in_features, features, use_bias=use_bias, rngs=rngs)
        self.kernel, self.bias = linear.kernel, linear.bias

    def __call__(self, x, *_):
        y = x @ self.kernel[...]
        return y if self.bias is None else y + jnp.broadcast_to(self.bias[...], y.shape)


class LinenDense(nn.Module):
    features: int
    in_features: int
    use_bias: bool = True

    @nn.compact
    def __call__(self, x, *_):
        kernel = self.param(
            "kernel", nn.linear.default_kernel_init, (self.in_features, self.features)
        )
        y = x @ kernel
        if not self.use_bias:
            return y
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return y + jnp.broadcast_to(bias, y.shape)


class Scale(nnx.Module):
    def __init__(self, *, rngs):
        self.scale = nnx.Param(jnp.full((), 3.0))

    def __call__(self, *factors):
        return functools.reduce(jnp.multiply, factors, self.scale[...])


class LinenScale(nn.Module):
    @nn.compact
    def __call__(self, *factors):
        scale = self.param("scale", lambda key: jnp.full((), 3.0))
        return functools.reduce(jnp.multiply, factors, scale)


class Residual(nnx.Module):
    """The layer of the residual network, with the signature of a scan body."""

    def __init__(self, *, rngs):
        self.dense = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x, _):
        return x + nnx.relu(self.dense(x)), None


class LinenResidual(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.relu(nn.Dense(2, name="dense")(x)), None


class MLP(nnx.Module):
    def __init__(self, *, rngs):
        self.hidden = nnx.Linear(4, 4, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, name="out")(nn.relu(nn.Dense(4, name="hidden")(x)))


class StatefulMLP(nnx.Module):
    def __init__(self, *, rngs):
        self.hidden = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, axis_name="batch", rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x, train):
        h = self.norm(self.hidden(x), use_running_average=not train)
        return self.out(nnx.relu(h))


class LinenStatefulMLP(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        h = nn.Dense(4, name="hidden")(x)
        h = nn.BatchNorm(axis_name="batch", use_running_average=not train, name="norm")(h)
        return nn.Dense(1, name="out")(nn.relu(h))


class Native:
    """The layers of the examples as they are in the guides."""

    dense = LinenDense
    mlp = LinenMLP
    residual = LinenResidual
    scale = LinenScale
    stateful_mlp = LinenStatefulMLP


class Bridged:
    """The NNX layers in their place."""

    dense = bridge.to_linen_class(Dense)
    mlp = bridge.to_linen_class(MLP)
    residual = bridge.to_linen_class(Residual)
    scale = bridge.to_linen_class(Scale)
    stateful_mlp = bridge.to_linen_class(StatefulMLP)


def dense(kit, features, in_features, *, cls=None, **options):
    return (cls or kit.dense)(features=features, in_features=in_features, **options)


def manual_vmap(kit, module, xs):
    """Lifting by hand: the functions of a detached module are mapped."""
    mlp = kit.mlp(parent=None)

    def init_all(key, xs):
        keys = jax.random.split(key, xs.shape[0])
        return jax.vmap(lambda key, x: mlp.init(key, x)["params"])(keys, xs)

    params = module.param("mlp", init_all, xs)
    return jax.vmap(lambda params, x: mlp.apply({"params": params}, x))(params, xs)


def lifted_vmap(kit, module, xs):
    mapped = nn.vmap(kit.mlp, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=0)
    return mapped(name="mlp")(xs)


def stateful_vmap(kit, module, xs):
    mapped = nn.vmap(
        kit.stateful_mlp,
        variable_axes={"params": 0, "batch_stats": 0},
        split_rngs={"params": True},
        in_axes=(0, None),
        axis_name="batch",
    )
    return mapped(name="mlp")(xs, True)


def vmap_with_own_parameters(kit, module, x):
    mapped = nn.vmap(
        kit.dense,
        in_axes=0,
        out_axes=0,
        variable_axes={"params": 0},
        split_rngs={"params": True},
    )
    return dense(kit, 3, 4, cls=mapped, name="dense")(x)


def vmap_with_shared_parameters(kit, module, x):
    mapped = nn.vmap(
        kit.dense,
        in_axes=0,
        out_axes=0,
        variable_axes={"params": None},
        split_rngs={"params": False},
    )
    return dense(kit, 3, 4, cls=mapped, name="dense")(x)


def scan_over_layers(kit, module, x):
    layers = nn.scan(
        kit.residual,
        variable_axes={"params": 0},
        variable_broadcast=False,
        split_rngs={"params": True},
        length=4,
    )
    return layers(name="layers")(x, None)[0]


class CheckpointedMLP(nn.Module):
    kit: type

    @nn.checkpoint
    @nn.compact
    def __call__(self, x):
        x = dense(self.kit, 8, 4, name="hidden")(x)
        return dense(self.kit, 1, 8, name="out")(nn.relu(x))


def checkpointed(kit, module, x):
    return CheckpointedMLP(kit, name="mlp")(x)


def remat_scan(kit, module, x):
    stack = nn.remat_scan(kit.dense, lengths=(2, 3))
    return dense(kit, 4, 4, cls=stack, name="dense_stack")(x)


class CausalDense(nn.Module):
    """The weights are masked, so that an output depends only on the inputs before it."""

    kit: type

    def mask(self, variables):
        return variables if self.is_initializing() else jax.tree.map(jnp.triu, variables)

    def setup(self):
        causal = nn.map_variables(self.kit.dense, "params", self.mask, init=self.is_initializing())
        self.dense = dense(self.kit, 4, 4, cls=causal, use_bias=False)

    def __call__(self, x):
        return self.dense(x)


def causal(kit, module, x):
    return CausalDense(kit, name="causal")(x)


def jvp(kit, module, x):
    scale = kit.scale(name="scale")
    tangents = jax.tree.map(jnp.ones_like, scale.variables.get("params", {}))
    return nn.jvp(
        lambda mdl, x: mdl(x),
        scale,
        (x,),
        (jnp.zeros_like(x),),
        variable_tangents={"params": tangents},
    )


def vjp(kit, module, x):
    z, backward = nn.vjp(lambda mdl, x, y: mdl(x, y), kit.scale(name="scale"), x, 2 * x)
    return z, backward(jnp.ones(z.shape))


def value_and_grad(kit, module, x):
    return nn.value_and_grad(lambda mdl, x: mdl(x).sum(), kit.scale(name="scale"), x)


def grad(kit, module, x):
    return nn.grad(lambda mdl, x: mdl(x).sum(), kit.scale(name="scale"), x)


def custom_vjp(kit, module, x):
    def f(mdl, x):
        return mdl(x)

    def forward(mdl, x):
        return nn.vjp(f, mdl, x)

    def backward(vjp_fn, y_t):
        params_t, *inputs_t = vjp_fn(y_t)
        return (jax.tree.map(jnp.sign, params_t), *inputs_t)

    sign_grad = nn.custom_vjp(f, forward_fn=forward, backward_fn=backward)
    return sign_grad(dense(kit, 1, 4, name="dense"), x)


def while_loop(kit, module, x):
    def condition(mdl, c):
        return mdl.variables["state"]["acc"] < 10

    def body(mdl, c):
        acc = mdl.variable("state", "acc", lambda: jnp.array(0))
        acc.value += 1
        return dense(kit, 4, 4, name="dense")(c)

    if module.is_mutable_collection("params"):
        return body(module, x)
    return nn.while_loop(condition, body, module, x, carry_variables="state")


def cond(kit, module, x):
    module.variable("state", "true_count", lambda: 0)
    module.variable("state", "false_count", lambda: 0)

    def true_fn(mdl, x):
        mdl.variable("state", "true_count").value += 1
        return dense(kit, 2, 4, name="dense")(x)

    def false_fn(mdl, x):
        mdl.variable("state", "false_count").value += 1
        return -dense(kit, 2, 4, name="dense")(x)

    return nn.cond(x.sum() > 1e3, true_fn, false_fn, module, x)


def switch(kit, module, x):
    names = ("a", "b", "c")
    for name in names:
        module.variable("state", f"{name}_count", lambda: 0)

    def branch(name, sign):
        def run(mdl, x):
            mdl.variable("state", f"{name}_count").value += 1
            return sign * dense(kit, 2, 4, name="dense")(x)

        return run

    branches = [branch(name, sign) for name, sign in zip(names, (1, -1, 2), strict=True)]
    return nn.switch(jnp.int32(2), branches, module, x)


class MultiHeadSwitch(nn.Module):
    """Branches with parameters of different structure, all run at init."""

    kit: type

    def setup(self):
        self.heads = [
            nn.Sequential([dense(self.kit, 6, 4), dense(self.kit, 3, 6), dense(self.kit, 5, 3)]),
            nn.Sequential([dense(self.kit, 7, 4), dense(self.kit, 5, 7)]),
            dense(self.kit, 5, 4),
        ]

    def __call__(self, x, index):
        branches = [lambda mdl, x, i=i: mdl.heads[i](x) for i in range(len(self.heads))]
        if self.is_mutable_collection("params"):
            for branch in branches:
                branch(self, x)
        return nn.switch(index, branches, self, x)


def switch_with_different_heads(kit, module, x):
    return MultiHeadSwitch(kit, name="heads")(x, jnp.int32(1))


class Example(nn.Module):
    """One example with one kit of layers."""

    function: object
    kit: type

    @nn.compact
    def __call__(self, *args):
        return self.function(self.kit, self, *args)


EXAMPLES = {
    "lifting guide: by hand": (manual_vmap, values(3, 4), ()),
    "lifting guide: nn.vmap": (lifted_vmap, values(3, 4), ()),
    "lifting guide: with state": (stateful_vmap, values(3, 4), ("batch_stats",)),
    "vmap with own parameters": (vmap_with_own_parameters, values(2, 2, 4), ()),
    "vmap with shared parameters": (vmap_with_shared_parameters, values(2, 2, 4), ()),
    "scan over layers": (scan_over_layers, values(1, 2), ()),
    "checkpoint of a method": (checkpointed, values(1, 4), ()),
    "remat_scan": (remat_scan, values(1, 4), ()),
    "map_variables": (causal, values(1, 4), ()),
    "jvp": (jvp, values(2, 4), ()),
    "vjp": (vjp, values(2, 4), ()),
    "value_and_grad": (value_and_grad, values(2, 4), ()),
    "grad": (grad, values(2, 4), ()),
    "custom_vjp": (custom_vjp, values(4), ()),
    "while_loop": (while_loop, values(2, 4), ("state",)),
    "cond": (cond, values(2, 4), ("state",)),
    "switch": (switch, values(2, 4), ("state",)),
    "switch with different heads": (switch_with_different_heads, values(2, 4), ()),
}


@pytest.mark.parametrize(("function", "x", "mutable"), EXAMPLES.values(), ids=list(EXAMPLES))
def test_an_example_of_the_guides_computes_the_same_with_bridged_layers(function, x, mutable):
    native, bridged = Example(function, Native), Example(function, Bridged)
    variables = bridged.init(KEY, x)
    own = {name: tree for name, tree in variables.items() if name != "nnx"}
    initial = native.init(KEY, x)
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, initial)

    expected = native.apply(own, x, mutable=list(mutable))
    assert_identical(bridged.apply(variables, x, mutable=list(mutable)), expected)
    assert_identical(bridged.apply(own, x, mutable=list(mutable)), expected)

    if function is not while_loop:

        def loss(module, params):
            y, _ = module.apply(own | {"params": params}, x, mutable=list(mutable))
            return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(y))

        gradients = [jax.grad(functools.partial(loss, m))(own["params"]) for m in (bridged, native)]
        assert_identical(*gradients)


@pytest.mark.parametrize("kit", [Native, Bridged])
def test_a_module_cannot_be_mapped_by_jax_itself(kit):
    def naive(kit, module, xs):
        return jax.vmap(lambda mlp, x: mlp(x))(kit.mlp(name="mlp"), xs)

    with pytest.raises(TypeError, match="not a valid JAX type"):
        Example(naive, kit).init(KEY, values(3, 4))


def test_a_transform_of_one_s_own_sees_the_parameters_transposed():
    """The guide's example on `pack`, whose functions take a scope."""

    def layer(scope, x):
        return Bridged.dense(features=2, in_features=2, parent=scope)(x)

    def native_layer(scope, x):
        return Native.dense(features=2, in_features=2, parent=scope)(x)

    x = values(3, 2)
    y, variables = init(transposed(layer))(KEY, x)
    native_y, native_variables = init(transposed(native_layer))(KEY, x)
    assert y.shape == native_y.shape
    own = {"params": variables["params"]}
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, dict(native_variables))
    expected = x @ own["params"]["kernel"].T + jnp.broadcast_to(own["params"]["bias"], y.shape)
    for given in (variables, own):
        assert_identical(flax.core.apply(transposed(layer))(given, x), expected)
    assert_identical(flax.core.apply(transposed(native_layer))(own, x), expected)


@pytest.mark.parametrize("kit", [Native, Bridged])
def test_the_functional_core_differentiates_the_scope_of_a_module(kit):
    """The reference's examples of `lift.jvp` and `lift.value_and_grad`."""

    def learn_scale(scope, x):
        return kit.scale(parent=scope)(x)

    def tangent(scope, x):
        ones = jax.tree.map(jnp.ones_like, scope.variables().get("params", {}))
        return lift.jvp(
            learn_scale, scope, (x,), (jnp.zeros_like(x),), variable_tangents={"params": ones}
        )[1]

    def summed(scope, x):
        return lift.value_and_grad(lambda scope, x: learn_scale(scope, x).sum(), scope, x)

    x = values(2, 4)
    variables = {"params": {"scale": jnp.full((), 3.0)}}
    root = Scope(variables)
    assert_identical(tangent(root, x), x)
    value, gradients = summed(Scope(variables), x)
    np.testing.assert_allclose(value, 3 * x.sum(), rtol=1e-6)
    assert_identical(gradients, (jnp.full_like(x, 3.0),))


class Cell(nnx.Module):
    """An LSTM with the carry's initialiser of NNX."""

    def __init__(self, *, rngs):
        self.cell = nnx.LSTMCell(7, 4, rngs=rngs)

    def __call__(self, carry, x):
        return self.cell(carry, x)

    def initialize_carry(self, shape):
        return jnp.zeros((*shape[:-1], 4)), jnp.zeros((*shape[:-1], 4))


class ScannedClass(nn.Module):
    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(
            bridge.to_linen_class(Cell),
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )
        lstm = scanned(name="lstm")
        carry = lstm.initialize_carry(x[:, 0].shape)
        return lstm(carry, x)[1]


class ScannedFunction(nn.Module):
    @nn.compact
    def __call__(self, x):
        cell = bridge.to_linen(Cell, name="lstm")
        scanned = nn.scan(
            lambda cell, carry, x: cell(carry, x),
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )
        carry = cell.initialize_carry(x[:, 0].shape)
        return scanned(cell, carry, x)[1]


@pytest.mark.parametrize("model", [ScannedClass(), ScannedFunction()], ids=["class", "function"])
def test_a_recurrent_cell_is_scanned_over_time(model):
    """A method that is not transformed runs as it is, on a class that is."""
    x = values(2, 5, 7)
    y, variables = model.init_with_output(KEY, x)
    cell = Cell(rngs=nnx.Rngs(0))
    nnx.update(cell, variables["params"]["lstm"])
    carry, expected = cell.initialize_carry(x[:, 0].shape), []
    for t in range(x.shape[1]):
        carry, h = cell(carry, x[:, t])
        expected.append(h)
    # Compiled loops round in other places than single operations.
    for given in (variables, {"params": variables["params"]}):
        y = model.apply(given, x)
        np.testing.assert_allclose(y, jnp.stack(expected, 1), rtol=2e-6, atol=1e-7)
