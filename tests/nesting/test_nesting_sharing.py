"""Shared submodules and tied weights across the bridge: one Variable, one gradient."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from tests.models import assert_close, assert_identical
from tests.nesting.nesting_models import X, dense, paths

KEY = jax.random.key(0)


class LinenShares(nn.Module):
    """One bridged submodule called twice, in `setup`."""

    def setup(self):
        self.layer = bridge.to_linen(nnx.Linear, 4, 4)
        self.last = nn.Dense(4)

    def __call__(self, x):
        return self.last(self.layer(nn.tanh(self.layer(x))))


class LinenSharesCompact(nn.Module):
    """The same in a compact method."""

    @nn.compact
    def __call__(self, x):
        layer = bridge.to_linen(nnx.Linear, 4, 4, name="layer")
        return nn.Dense(4, name="last")(layer(nn.tanh(layer(x))))


class NNXShares(nnx.Module):
    """One wrapped module under two names, called twice."""

    def __init__(self, rngs):
        self.layer = bridge.ToNNX(nn.Dense(4), rngs)
        self.same = self.layer
        self.last = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(self.same(nn.tanh(self.layer(x))))


def shared_twice(params, x):
    layer = lambda x: dense(x, params["layer"])  # noqa: E731
    return dense(layer(jnp.tanh(layer(x))), params["last"])


def pure_gradient(params, function=shared_twice):
    return jax.grad(lambda p: (function(p, X) ** 2).sum())(params)


@pytest.mark.parametrize("parent", [LinenShares, LinenSharesCompact])
@pytest.mark.parametrize("outer", ["linen", "nnx"])
def test_a_bridged_submodule_called_twice_has_one_parameter_and_gradient(parent, outer):
    if outer == "linen":
        module = parent()
        variables = module.init(KEY, X)
        params = nn.meta.unbox(variables["params"])
        output = module.apply(variables, X)
        loss = lambda p: (module.apply({**variables, "params": p}, X) ** 2).sum()  # noqa: E731
        gradient = nn.meta.unbox(jax.grad(loss)(variables["params"]))
    else:
        model = bridge.ToNNX(parent(), nnx.Rngs(0)).lazy_init(X)
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        output = model(X)
        gradient = nnx.to_pure_dict(nnx.grad(lambda m: (m(X) ** 2).sum())(model))
    assert paths(params) == ["last/bias", "last/kernel", "layer/bias", "layer/kernel"]
    assert_identical(output, shared_twice(params, X))
    assert_identical(gradient, pure_gradient(params))


@pytest.mark.parametrize("outer", ["linen", "nnx"])
def test_a_wrapped_module_under_two_names_is_one_module(outer):
    if outer == "nnx":
        model = bridge.lazy_init(NNXShares(nnx.Rngs(0)), X)
        assert model.same is model.layer
        copy = nnx.clone(model)
        assert copy.same is copy.layer
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        output = model(X)
        gradient = nnx.to_pure_dict(nnx.grad(lambda m: (m(X) ** 2).sum())(model))
    else:
        module = bridge.to_linen(NNXShares)
        variables = module.init(KEY, X)
        params = nn.meta.unbox(variables["params"])
        output = module.apply(variables, X)
        loss = lambda p: (module.apply({**variables, "params": p}, X) ** 2).sum()  # noqa: E731
        gradient = nn.meta.unbox(jax.grad(loss)(variables["params"]))
    assert paths(params) == ["last/bias", "last/kernel", "layer/bias", "layer/kernel"]
    assert_identical(output, shared_twice(params, X))
    assert_identical(gradient, pure_gradient(params))


class NNXTied(nnx.Module):
    """A native embedding whose table is the kernel of a wrapped Dense layer, transposed."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(6, 4, rngs=rngs)
        self.head = bridge.ToNNX(nn.Dense(6, use_bias=False), rngs)

    def __call__(self, tokens):
        return self.head(self.embed(tokens))


class Transposed(nn.Module):
    """A Dense layer with the table of an embedding as its kernel."""

    @nn.compact
    def __call__(self, x):
        return x @ self.param("embedding", nn.initializers.normal(), (6, 4)).T


def test_one_variable_may_serve_a_native_and_a_wrapped_module():
    tokens = jnp.array([[0, 5, 2]])
    model = NNXTied(nnx.Rngs(0))
    model.head = bridge.ToNNX(Transposed(), nnx.Rngs(0)).lazy_init(jnp.ones((1, 3, 4)))
    model.head.embedding = model.embed.embedding
    assert len(nnx.to_flat_state(nnx.state(model, nnx.Param))) == 1
    table = model.embed.embedding.get_value()
    pure = lambda table: table[tokens] @ table.T  # noqa: E731
    assert_identical(model(tokens), pure(table))
    gradient = nnx.grad(lambda m: (m(tokens) ** 2).sum())(model)
    (leaf,) = jax.tree.leaves(gradient)
    expected = jax.grad(lambda t: (pure(t) ** 2).sum())(table)
    assert_close(leaf, expected)
    # An update through one is seen by the other, and through a transform too.
    nnx.update(model, jax.tree.map(lambda p: 2 * p, nnx.state(model, nnx.Param)))
    assert model.head.embedding is model.embed.embedding
    assert_identical(nnx.jit(lambda m: m(tokens))(model), jax.jit(pure)(2 * table))
    assert model.head.embedding is model.embed.embedding


class LinenTied(nn.Module):
    """`attend` of a bridged embedding: tied weights within one NNX module."""

    def setup(self):
        self.embed = bridge.to_linen(nnx.Embed, 6, 4)

    def __call__(self, tokens):
        return self.embed(self.embed(tokens), nnx_method="attend")


@pytest.mark.parametrize("outer", ["linen", "nnx"])
def test_a_bridged_embedding_ties_its_weights_by_attend(outer):
    tokens = jnp.array([[0, 5, 2]])
    if outer == "linen":
        module = LinenTied()
        variables = module.init(KEY, tokens)
        table = nn.meta.unbox(variables["params"])["embed"]["embedding"]
        output = module.apply(variables, tokens)
        loss = lambda p: (module.apply({**variables, "params": p}, tokens) ** 2).sum()  # noqa: E731
        (gradient,) = jax.tree.leaves(jax.grad(loss)(variables["params"]))
    else:
        model = bridge.ToNNX(LinenTied(), nnx.Rngs(0)).lazy_init(tokens)
        (table,) = jax.tree.leaves(nnx.state(model, nnx.Param))
        output = model(tokens)
        (gradient,) = jax.tree.leaves(nnx.grad(lambda m: (m(tokens) ** 2).sum())(model))
    pure = lambda table: table[tokens] @ table.T  # noqa: E731
    assert_identical(output, pure(table))
    expected = jax.grad(lambda t: (pure(t) ** 2).sum())(table)
    assert_close(gradient, expected)


class Outer(nn.Module):
    """A bridged module that shares the scope of its parent."""

    def setup(self):
        self.inner = bridge.to_linen(nnx.Linear, 4, 4)
        nn.share_scope(self, self.inner)

    def __call__(self, x):
        return self.inner(x)


class SharesScope(nn.Module):
    """A Linen module that shares its scope with a submodule which holds a bridged one."""

    def setup(self):
        self.inner = LinenShares()
        nn.share_scope(self, self.inner)

    def __call__(self, x):
        return self.inner(x)


@pytest.mark.parametrize("outer", ["linen", "nnx"])
def test_share_scope_removes_one_level_of_the_path(outer):
    cases = {
        Outer: (["bias", "kernel"], lambda p, x: dense(x, p)),
        SharesScope: (["last/bias", "last/kernel", "layer/bias", "layer/kernel"], shared_twice),
    }
    for parent, (expected_paths, pure) in cases.items():
        if outer == "linen":
            variables = parent().init(KEY, X)
            params, output = variables["params"], parent().apply(variables, X)
        else:
            model = bridge.ToNNX(parent(), nnx.Rngs(0)).lazy_init(X)
            params, output = nnx.to_pure_dict(nnx.state(model, nnx.Param)), model(X)
        params = nn.meta.unbox(params)
        assert paths(params) == expected_paths
        assert_identical(output, pure(params, X))


class Field(nn.Module):
    """Uses a submodule that it was given."""

    layer: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.layer(x)


class TwoFields(nn.Module):
    """Gives one bridged submodule to two others."""

    @nn.compact
    def __call__(self, x):
        layer = bridge.to_linen(nnx.Linear, 4, 4, name="layer")
        return nn.Dense(4, name="last")(Field(layer)(nn.tanh(Field(layer)(x))))


def test_a_bridged_submodule_passed_to_two_modules_has_one_parameter():
    variables = TwoFields().init(KEY, X)
    params = nn.meta.unbox(variables["params"])
    assert paths(params) == ["last/bias", "last/kernel", "layer/bias", "layer/kernel"]
    assert_identical(TwoFields().apply(variables, X), shared_twice(params, X))


class Counting(nnx.Module):
    def __init__(self, name, factor):
        self.factor = factor
        self.calls = 0
        setattr(self, name, nnx.Param(jnp.eye(4) * factor))
        self._name = name

    def __call__(self, x, counted=False):
        self.calls += counted
        return x @ getattr(self, self._name)[...] * self.factor


class SharesOneScopeThrice(nn.Module):
    def setup(self):
        self.first = bridge.to_linen(Counting, "a", 2.0)
        self.second = bridge.to_linen(Counting, "b", 3.0)
        # Of the parameters of the first one.
        self.third = bridge.to_linen(Counting, "a", 5.0)
        for part in (self.first, self.second, self.third):
            nn.share_scope(self, part)

    def __call__(self, x):
        return self.first(self.second(self.third(self.first(x))))


class SharesOneScopeThriceCompact(nn.Module):
    @nn.compact
    def __call__(self, x):
        parts = [bridge.to_linen(Counting, *of) for of in (("a", 2.0), ("b", 3.0), ("a", 5.0))]
        for part in parts:
            nn.share_scope(self, part)
        return parts[0](parts[1](parts[2](parts[0](x))))


class SharesThroughAnother(nn.Module):
    def setup(self):
        self.inner = SharesOneScopeThrice()
        nn.share_scope(self, self.inner)

    def __call__(self, x):
        return self.inner(x)


class HoldsThem(nn.Module):
    @nn.compact
    def __call__(self, x):
        return SharesOneScopeThrice(name="first")(x)


class HoldsThemCompiled(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.jit(SharesOneScopeThrice)()(x)


@pytest.mark.parametrize("with_definition", [True, False])
@pytest.mark.parametrize(
    "outer",
    [
        SharesOneScopeThrice,
        SharesOneScopeThriceCompact,
        SharesThroughAnother,
        HoldsThem,
        HoldsThemCompiled,
    ],
)
def test_modules_in_one_scope_are_made_of_their_own_definitions(outer, with_definition):
    first, second, third = Counting("a", 2.0), Counting("b", 3.0), Counting("a", 5.0)
    third.a = first.a
    model = outer()
    variables = model.init(KEY, X)
    if not with_definition:
        variables = {"params": variables["params"]}
    assert_close(model.apply(variables, X), first(second(third(first(X)))))


def test_a_change_of_a_definition_in_a_shared_scope_is_said_to_be_lost():
    class Shares(nn.Module):
        def setup(self):
            self.part = bridge.to_linen(Counting, "a", 2.0)
            nn.share_scope(self, self.part)

        def __call__(self, x, counted=False):
            return self.part(x, counted)

    variables = Shares().init(KEY, X)
    with pytest.warns(bridge.BridgeWarning, match="calls"):
        Shares().apply(variables, X, counted=True, mutable=True)
