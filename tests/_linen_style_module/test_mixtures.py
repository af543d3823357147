"""Modules of all kinds inside of a `bridge.Module`, and it inside of all kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge as peer

import bridge
from tests.models import assert_close

X = np.array([[1.0, 2.0, 3.0, 4.0], [-1.0, 0.5, 2.0, 0.0]], np.float32)
INIT = nn.initializers.normal()


class Native(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


class Scale(bridge.Module):
    @bridge.compact
    def __call__(self, x):
        count = self.variable("stats", "count", lambda: jnp.zeros(()))
        if not self.is_initializing() and self.is_mutable_collection("stats"):
            count[...] += 1
        return x * self.param("scale", INIT, (1, 4))


def models(b):
    class Compact(b.Module):
        @b.compact
        def __call__(self, x):
            x = b.nnx_in_bridge_mdl(Native)(x)
            x = b.linen_in_bridge_mdl(nn.Dense(4))(x)
            x = b.nnx_in_bridge_mdl(Native, name="native")(x)
            return b.linen_in_bridge_mdl(nn.Dense(2), name="head")(x)

    class Setup(b.Module):
        def setup(self):
            self.native = b.nnx_in_bridge_mdl(Native)
            self.head = b.linen_in_bridge_mdl(nn.Dense(2))

        def __call__(self, x):
            return self.head(self.native(x))

    return {"compact": Compact, "setup": Setup}


@pytest.mark.parametrize("style", ["compact", "setup"])
def test_submodules_of_other_kinds_have_the_peers_values_and_outputs(style):
    theirs, ours = models(peer)[style](), models(bridge)[style]()
    expected_y, expected = theirs.init_with_output(1, X)
    y, variables = ours.init_with_output(1, X)
    jax.tree.map(np.testing.assert_array_equal, variables, expected)
    assert jax.tree.structure(variables) == jax.tree.structure(expected)
    assert np.array_equal(y, expected_y)
    keys = {"params": 2, "dropout": 3}
    expected_y = theirs.apply(expected, X, rngs=dict(keys))
    assert np.array_equal(ours.apply(variables, X, rngs=dict(keys)), expected_y)
    kept = bridge.lazy_init(models(bridge)[style](rngs=1), X)
    jax.tree.map(np.testing.assert_array_equal, kept.variables.unfreeze(), variables)
    kept.eval()
    assert np.array_equal(kept(X), kept(X))
    assert_close(jax.jit(kept.__call__)(X), kept(X))


def test_bare_modules_of_every_kind_are_submodules_in_setup_and_in_fields():
    class Model(bridge.Module):
        inner: nn.Module

        def setup(self):
            self.dense = nn.Dense(4)
            self.wrapped = bridge.ToNNX(nn.Dense(4), rngs=self.scope.rngs)
            self.to_linen = bridge.to_linen(nnx.Linear, 4, 4)
            self.layers = [nn.Dense(4), Scale()]

        def __call__(self, x):
            x = self.inner(self.to_linen(self.wrapped(self.dense(x))))
            for layer in self.layers:
                x = layer(x)
            return x

    variables = Model(nn.Dense(4)).init(0, X)
    names = {"dense", "wrapped", "to_linen", "layers_0", "layers_1", "inner"}
    assert variables["params"].keys() == names
    params = variables["params"]
    expected = X
    for name in ("dense", "wrapped", "to_linen", "inner", "layers_0"):
        expected = expected @ params[name]["kernel"] + params[name]["bias"].reshape(1, -1)
    expected = expected * params["layers_1"]["scale"]
    assert_close(Model(nn.Dense(4)).apply(variables, X), expected)
    kept = bridge.lazy_init(Model(nn.Dense(4), rngs=0), X)
    assert_close(kept(X), expected)


def normalised(b):
    """A model with Flax's BatchNorm and Dropout in a compact method; `of` makes a submodule."""
    of = getattr(b, "linen_in_bridge_mdl", lambda module: module)

    class Model(b.Module):
        @b.compact
        def __call__(self, x, train=False):
            x = of(nn.Dense(4))(x)
            x = of(nn.BatchNorm(use_running_average=not train))(x)
            return of(nn.Dropout(0.5, deterministic=not train))(x)

    return Model


def test_flaxs_layers_in_a_compact_method_do_what_they_do_in_linen():
    variables = normalised(nn)().init(jax.random.key(0), X)
    ours, linen = normalised(bridge)(), normalised(nn)()
    assert jax.tree.structure(ours.init(0, X)) == jax.tree.structure(variables)
    assert np.array_equal(ours.apply(variables, X), linen.apply(variables, X))
    options = {"train": True, "mutable": ["batch_stats"]}
    _, updates = ours.apply(variables, X, rngs={"dropout": 1}, **options)
    _, expected = linen.apply(variables, X, rngs={"dropout": jax.random.key(1)}, **options)
    assert jax.tree.all(jax.tree.map(np.array_equal, updates, expected))
    kept = normalised(bridge)().bind(variables, rngs=nnx.Rngs(dropout=1))
    assert np.array_equal(kept(X), linen.apply(variables, X))
    # As for any ToNNX, train() opens its state.
    kept.train()
    kept(X, train=True)
    assert np.array_equal(
        kept.BatchNorm_0.mean[...], expected["batch_stats"]["BatchNorm_0"]["mean"]
    )


def normalisation(kind, b):
    of = getattr(b, "linen_in_bridge_mdl", lambda module: module)

    class Model(b.Module):
        @b.compact
        def __call__(self, x):
            if kind == "nnx":
                return bridge.nnx_in_bridge_mdl(lambda rngs: nnx.BatchNorm(4, rngs=rngs))(x)
            x = of(nn.BatchNorm(None if b is bridge else kind == "eval"))(x)
            # What the model says of its layers stands.
            return of(nn.Dropout(0.5, deterministic=True))(x)

    return Model()


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_mode_of_the_model_is_that_of_the_layers_of_a_compact_method(kind):
    variables = normalisation("train", nn).init(jax.random.key(0), X)
    y, updates = normalisation("train", nn).apply(variables, X, mutable=["batch_stats"])
    model = normalisation(kind, bridge).bind(variables)
    model.train()
    for _ in range(2):
        assert_close(model(X), y)
        assert_close(model.BatchNorm_0.mean[...], updates["batch_stats"]["BatchNorm_0"]["mean"])
        before = {**variables, **updates}
        _, updates = normalisation("train", nn).apply(before, X, mutable=["batch_stats"])
    model.eval()
    trained = model.variables.unfreeze()
    assert_close(model(X), normalisation("eval", nn).apply(trained, X))
    assert jax.tree.all(jax.tree.map(np.array_equal, model.variables.unfreeze(), trained))


def test_what_a_call_says_of_a_layer_stands_in_every_mode():
    variables = normalised(nn)().init(jax.random.key(0), X)
    model = normalised(bridge)().bind(variables, rngs=nnx.Rngs(dropout=1))
    model.train()
    assert np.array_equal(model(X), normalised(nn)().apply(variables, X))


def nested(kind):
    """A model with a Scale in it, and the path to that."""

    class NativeAround(nnx.Module):
        def __init__(self, *, rngs):
            self.scale = Scale(rngs=rngs)

        def __call__(self, x):
            return self.scale(x)

    class LinenAround(nn.Module):
        @nn.compact
        def __call__(self, x):
            return bridge.to_linen(Scale, name="scale")(x)

    class ModuleAround(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            return bridge.linen_in_bridge_mdl(LinenAround(), name="linen")(x)

    return {"nnx": NativeAround, "linen": LinenAround, "module": ModuleAround}[kind]


def test_inside_of_a_native_module():
    model = bridge.lazy_init(nested("nnx")(rngs=nnx.Rngs(0)), X)
    assert np.array_equal(model(X), X * model.scale.scale[...])
    assert model.scale.count[...] == 1
    nnx.jit(lambda model, x: model(x))(model, X)
    assert model.scale.count[...] == 2


def test_inside_of_a_linen_module():
    model = nested("linen")()
    variables = model.init(jax.random.key(0), X)
    scale = variables["params"]["scale"]["scale"]
    assert np.array_equal(model.apply(variables, X), X * scale)
    y, updates = model.apply(variables, X, mutable=["stats"])
    assert updates["stats"]["scale"]["count"] == 1
    # Variables that come without the definition of the NNX module fit too.
    bare = {"params": variables["params"], "stats": updates["stats"]}
    assert np.array_equal(model.apply(bare, X), y)


def test_inside_of_a_linen_module_in_a_to_nnx():
    model = bridge.lazy_init(bridge.ToNNX(nested("linen")(), rngs=nnx.Rngs(0)), X)
    assert np.array_equal(model(X), X * model.scale["scale"][...])


def test_inside_of_a_linen_module_inside_of_another_one():
    model = nested("module")()
    variables = model.init(0, X)
    scale = variables["params"]["linen"]["scale"]["scale"]
    y, updates = model.apply(variables, X, mutable=["stats"])
    assert np.array_equal(y, X * scale)
    assert updates["stats"]["linen"]["scale"]["count"] == 1
    assert np.array_equal(model.apply(variables, X), y)
    # A definition may come with the variables; the module makes its own.
    definition = nested("linen")().init(jax.random.key(0), X)["nnx"]
    assert np.array_equal(model.apply({**variables, "nnx": {"linen": definition}}, X), y)
    # The collections of the inner call are those of the outer one.
    assert bridge.lazy_init(nested("module")(rngs=0), X)(X).shape == y.shape


def test_priorities_decide_the_path_of_a_shared_module():
    def make(b, priority):
        class Inner(b.Module):
            @b.compact
            def __call__(self, x):
                return x * jnp.asarray(self.param("w", INIT, (1, 4)))

        class Outer(b.Module):
            def setup(self):
                self.zzz = Native2(Inner())
                self.aaa = Native2(self.zzz.inner)
                self.set_attr_priority("zzz", priority)

            def __call__(self, x):
                return self.aaa.inner(x) + self.zzz.inner(x)

        return Outer()

    class Native2(nnx.Module):
        def __init__(self, inner):
            self.inner = inner

    for priority, path in ((bridge.AttrPriority.HIGH, "zzz"), (bridge.AttrPriority.LOW, "aaa")):
        variables = make(bridge, priority).init(0, X)
        assert variables["params"].keys() == {path}
    assert [p.name for p in bridge.AttrPriority] == [p.name for p in peer.AttrPriority]
    assert list(map(int, bridge.AttrPriority)) == list(map(int, peer.AttrPriority))


def test_the_context_is_that_of_the_module_that_runs():
    seen = []

    class Model(bridge.Module):
        def setup(self):
            seen.append((bridge.current_module() is self, bridge.current_context().in_compact))

        @bridge.compact
        def __call__(self):
            seen.append((bridge.current_module() is self, bridge.current_context().in_compact))
            return Scale().scope, Scale(parent=None).scope

    attached, alone = Model().apply({}, rngs=1)
    assert seen == [(True, False), (True, True)]
    assert attached.rngs.default.key[...] == jax.random.key(1)
    assert alone is None
    assert bridge.current_context() is None
    for function in (bridge.nnx_in_bridge_mdl, bridge.linen_in_bridge_mdl):
        with pytest.raises(bridge.DeclarationError, match=r"only while a bridge\.Module"):
            function(nn.Dense(3))


def test_a_variable_of_a_layer_is_read_before_its_first_call():
    class Inner(nn.Module):
        def setup(self):
            self.embed = nn.Embed(5, 4)

        def __call__(self, x):
            return self.embed(x)

    def make(b):
        class Model(b.Module):
            other: nn.Module

            def setup(self):
                self.embed, self.inner = nn.Embed(5, 4), Inner()

            def __call__(self, x):
                tables = [self.embed.embedding, self.inner.embed.embedding, self.other.embedding]
                return sum(jnp.asarray(table) for table in tables)[x] + self.embed(x)

        return Model(nn.Embed(5, 4))

    x = jnp.array([1, 2])
    variables = make(nn).init(jax.random.key(0), x)
    own = make(bridge).init(0, x)
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, variables)
    assert np.array_equal(make(bridge).apply(own, x), make(nn).apply(own, x))


@pytest.mark.parametrize("place", ["field", "setup", "compact"])
def test_a_layer_of_flax_in_a_field_draws_the_keys_of_the_call(place):
    class Around(bridge.Module):
        inner: nn.Module

        def __call__(self, x):
            return self.inner(x)

    class Model(bridge.Module):
        def setup(self):
            self.around = Around(nn.Dropout(0.5, deterministic=False))

        @bridge.compact
        def __call__(self, x):
            made = self.around if place == "setup" else None
            return (made or Around(nn.Dropout(0.5, deterministic=False)))(x)

    model = Around(nn.Dropout(0.5, deterministic=False)) if place == "field" else Model()
    y = model.apply({}, X, rngs={"dropout": 1})
    assert np.array_equal(y, model.bind({}, rngs={"dropout": 1})(X))
    assert not np.array_equal(y, model.apply({}, X, rngs={"dropout": 2}))
    with pytest.raises(bridge.MissingRngError):
        model.apply({}, X)
