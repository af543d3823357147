"""A `bridge.Module` that keeps its variables is an NNX module, under transforms and in tools."""

import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import bridge
from bridge import checkpoint, parity, port
from tests.models import assert_close

X = np.array([[1.0, 2.0, 3.0, 4.0], [-1.0, 0.5, 2.0, 0.0]], np.float32)
INIT = nn.initializers.normal()


def make(b):
    """(layer, model) on a base class."""

    class Dense(b.Module):
        features: int

        @b.compact
        def __call__(self, x):
            init = nn.with_partitioning(INIT, (None, "model"))
            kernel = self.param("kernel", init, (x.shape[-1], self.features))
            return jnp.tanh(jnp.dot(x, jnp.asarray(kernel)))

    class Noise(b.Module):
        deterministic: bool | None = None

        def __call__(self, x):
            if self.deterministic:
                return x
            return x * jax.random.bernoulli(self.make_rng("dropout"), 0.5, x.shape)

    class Model(b.Module):
        features: int = 8

        @b.compact
        def __call__(self, x, *, train=False):
            x = Dense(8)(x)
            x = Noise(deterministic=not train)(x)
            return Dense(self.features, name="out")(x)

    return Dense, Model


Dense, Model = make(bridge)
LinenDense, LinenModel = make(nn)


def made(**kwargs):
    return bridge.lazy_init(Model(rngs=0, **kwargs), X)


def linen(model, x=X, **kwargs):
    variables = bridge.nnx_to_linen(nnx.state(model, nnx.Param))
    return LinenModel(model.features).apply(variables, x, **kwargs)


def test_the_state_is_at_linens_paths_and_equal_to_inits():
    model = made()
    variables = Model().init(0, X)
    linen_paths = jax.tree.structure(LinenModel().init(jax.random.key(0), X))
    assert jax.tree.structure(variables) == linen_paths
    assert jax.tree.structure(bridge.nnx_to_linen(nnx.state(model, nnx.Param))) == linen_paths
    jax.tree.map(np.testing.assert_array_equal, model.variables.unfreeze(), variables)
    abstract = bridge.lazy_init(Model(rngs=0), jax.ShapeDtypeStruct(X.shape, X.dtype))
    jax.tree.map(np.testing.assert_array_equal, abstract.variables.unfreeze(), variables)
    assert np.array_equal(model(X), linen(model))


def test_a_call_that_draws_nothing_changes_nothing_and_can_be_closed_over():
    model = made()
    before = nnx.split(model)
    y = model(X)
    graphdef, state = nnx.split(model)
    assert graphdef == before[0]
    assert_close(jax.jit(model.__call__)(X), y)
    assert_close(
        jax.grad(lambda x: model(x).sum())(X), jax.grad(lambda x: linen(model, x).sum())(X)
    )
    assert jax.tree.all(jax.tree.map(np.array_equal, *map(_counts, (state, before[1]))))


def _counts(state):
    return nnx.to_pure_dict(nnx.filter_state(state, nnx.RngCount))


def test_a_training_step_is_linens():
    model = made()
    variables = bridge.nnx_to_linen(nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model, x):
        grads = nnx.grad(lambda model: (model(x) ** 2).sum())(model)
        state = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, state, grads))

    @jax.jit
    def linen_step(variables, x):
        grads = jax.grad(lambda v: (LinenModel().apply(v, x) ** 2).sum())(variables)
        return jax.tree.map(lambda p, g: p - 0.1 * g, variables, grads)

    for _ in range(2):
        step(model, X)
        variables = linen_step(variables, X)
    found = bridge.nnx_to_linen(nnx.state(model, nnx.Param))
    jax.tree.map(assert_close, found, variables)


def test_the_program_is_linens():
    model = made()
    variables = bridge.nnx_to_linen(nnx.state(model, nnx.Param))
    graphdef, state = nnx.split(model)
    found = [
        jax.make_jaxpr(lambda s, x: nnx.merge(graphdef, s)(x))(state, X),
        jax.make_jaxpr(Model().apply)(variables, X),
    ]
    expected = jax.make_jaxpr(LinenModel().apply)(variables, X)
    assert str(found[1]) == str(expected)
    assert [e.primitive for e in found[0].eqns] == [e.primitive for e in expected.eqns]


def test_keys_are_drawn_anew_at_each_call():
    model = made()
    first, second = model(X, train=True), model(X, train=True)
    assert not np.array_equal(first, second)
    # A key of a stream is its own, folded with the count.
    again = made()
    assert np.array_equal(again(X, train=True), first)


def test_a_mode_answers_where_the_model_leaves_it_open():
    class Open(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            return type(made().Noise_0)()(x)

    model = bridge.lazy_init(Open(rngs=0), X)
    model.eval()
    assert np.array_equal(model(X), X)
    model.train()
    assert not np.array_equal(model(X), X)


def test_modes_reach_a_submodule_that_has_other_fields_in_each_call():
    class Block(bridge.Module):
        function: Any
        deterministic: bool | None = None

        @bridge.compact
        def __call__(self, x):
            return self.function(x) * (2 if self.deterministic else 1)

    class Model(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            # Another function in each call.
            return Block(lambda x: x + 1)(x)

    model = bridge.lazy_init(Model(rngs=0), X)
    model.eval()
    assert np.array_equal(model(X), (X + 1) * 2)
    model.train()
    assert np.array_equal(model(X), X + 1)


def test_other_fields_at_a_later_call_use_the_same_variables():
    class Outer(bridge.Module):
        @bridge.compact
        def __call__(self, x, scale=1.0):
            return Scaled(scale=scale, name="inner")(x)

    class Scaled(bridge.Module):
        scale: float

        def setup(self):
            self.dense = Dense(4)

        def __call__(self, x):
            return self.dense(x) * self.scale

    model = bridge.lazy_init(Outer(rngs=0), X)
    inner, kernel = model.inner, model.inner.dense.kernel
    y = model(X)
    assert np.array_equal(model(X, scale=2.0), y * 2)
    assert_close(jax.jit(lambda x: model(x, scale=2.0))(X), y * 2)
    assert model.inner is inner
    assert model.inner.dense.kernel is kernel
    assert model.inner.scale == 1.0
    traced = jax.jit(lambda x, s: model(x, scale=s))(X, 3.0)
    assert_close(traced, y * 3)
    assert np.array_equal(model(X), y)


class Scaled(bridge.Module):
    scale: float = 1.0

    @bridge.compact
    def __call__(self, x):
        return x * self.param("s", nn.initializers.ones, (1, 4)) * self.scale


def test_a_name_of_a_submodule_with_other_fields_is_that_of_the_call():
    class Model(bridge.Module):
        @bridge.compact
        def __call__(self, x, scale=1.0):
            self.again = Scaled(scale)
            return self.again(x) + self.again.scale

    model = bridge.lazy_init(Model(rngs=0), X)
    graphdef = nnx.graphdef(model)
    assert np.array_equal(model(X, 2.0), X * 2 + 2)
    assert_close(jax.jit(model.__call__)(X, 3.0), X * 3 + 3)
    assert nnx.graphdef(model) == graphdef
    assert model.again is model.Scaled_0


def test_a_part_is_replaced_before_a_method_has_made_it():
    class Model(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            return Scaled()(x)

    model = Model().bind(Model().init(0, X))
    model.Scaled_0 = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    assert np.array_equal(model(X), model.Scaled_0(X))


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (lambda: Scaled(7.0).bind({"params": {"s": jnp.ones((1, 4))}}), X * 7),
        (lambda: nnx.Linear(4, 4, kernel_init=nn.initializers.ones, rngs=nnx.Rngs(0)), None),
        (lambda: bridge.ToNNX(nn.Dense(4)).lazy_init(X, rngs=nnx.Rngs(0)), None),
    ],
)
def test_a_replaced_part_is_used_where_a_method_makes_its_own(part, expected):
    class Inner(bridge.Module):
        factor: float

        def setup(self):
            self.dense, self.factors = nn.Dense(4), jnp.ones(3) * self.factor

        def __call__(self, x):
            return self.dense(x) * self.factors[0]

    class Model(bridge.Module):
        @bridge.compact
        def __call__(self, x, factor=1.0):
            return Inner(factor)(bridge.linen_in_bridge_mdl(nn.Dense(4))(Scaled()(x)))

    for name in ("Scaled_0", "Dense_0", "Inner_0.dense"):
        model = bridge.lazy_init(Model(rngs=0), X)
        *above, last = name.split(".")
        owner = getattr(model, above[0]) if above else model
        # The others do nothing.
        for layer in (model.Dense_0, model.Inner_0.dense):
            layer.kernel, layer.bias = nnx.Param(jnp.eye(4)), nnx.Param(jnp.zeros(4))
        setattr(owner, last, part())
        y = getattr(owner, last)(X) if expected is None else expected
        for each in (model, nnx.clone(model)):
            assert np.array_equal(each(X), y)
            assert np.array_equal(each(X, 2.0), y * 2)


def test_layers_are_stacked_by_vmap_and_run_by_scan():
    class Layer(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            return Dense(4)(x)

    keys = jax.random.split(jax.random.key(0), 3)
    layers = nnx.vmap(lambda key: bridge.lazy_init(Layer(rngs=nnx.Rngs(key)), X))(keys)
    assert layers.Dense_0.kernel.shape == (3, 4, 4)
    y = nnx.scan(lambda m, x: m(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(layers, X)
    expected = X
    for kernel in layers.Dense_0.kernel[...]:
        expected = LinenDense(4).apply({"params": {"kernel": kernel}}, expected)
    assert_close(y, expected)
    each = nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(layers, X)
    assert_close(each[0], LinenDense(4).apply({"params": {"kernel": layers.Dense_0.kernel[0]}}, X))


def test_layers_of_a_body_are_created_and_scanned_inside_of_it():
    class Stack(bridge.Module):
        def setup(self):
            @nnx.split_rngs(splits=2)
            @nnx.vmap(in_axes=(nnx.StateAxes({nnx.RngState: 0, ...: None}),), axis_size=2)
            def create(self):
                self.layers = Dense(4)

            create(self)

        def __call__(self, x):
            @nnx.split_rngs(splits=2)
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def run(layer, x):
                return layer(x)

            return run(self.layers, x)

    variables = nn.unbox(Stack().init(0, X))
    kernel = variables["params"]["layers"]["kernel"]
    assert kernel.shape == (2, 4, 4)
    assert not np.array_equal(kernel[0], kernel[1])
    expected = X
    for one in kernel:
        expected = LinenDense(4).apply({"params": {"kernel": one}}, expected)
    assert_close(Stack().apply(variables, X), expected)
    kept = bridge.lazy_init(Stack(rngs=0), X)
    assert_close(kept(X), expected)
    assert set(nnx.to_flat_state(nnx.state(kept, nnx.Param)).paths) == {("layers", "kernel")}
    assert "scope" not in vars(kept.layers)


def test_a_method_is_rematerialised():
    class Remat(bridge.Module):
        @bridge.compact
        def run(self, x):
            return Dense(4)(x)

        def __call__(self, x):
            return nnx.remat(type(self).run)(self, x)

    model = bridge.lazy_init(Remat(rngs=0), X)
    kernel = model.Dense_0.kernel[...]
    assert_close(model(X), LinenDense(4).apply({"params": {"kernel": kernel}}, X))
    grads = nnx.grad(lambda model: model(X).sum())(model)
    expected = jax.grad(lambda k: LinenDense(4).apply({"params": {"kernel": k}}, X).sum())(kernel)
    assert_close(grads["Dense_0"]["kernel"][...], expected)


def test_what_setup_makes_stays_in_a_module_without_variables():
    class Activation(bridge.Module):
        def __call__(self, x):
            return nn.relu(x)

    class Stateless(bridge.Module):
        def setup(self):
            self.factor = 3
            self.activation = Activation()

        def __call__(self, x):
            return self.activation(x) * self.factor

    model = bridge.lazy_init(Stateless(), X)
    assert np.array_equal(jax.jit(model.__call__)(X), nn.relu(X) * 3)
    assert np.array_equal(Stateless()(X), nn.relu(X) * 3)


def test_a_second_lazy_init_adds_what_is_missing():
    class Optional(bridge.Module):
        extra: bool = False

        @bridge.compact
        def __call__(self, x):
            x = Dense(4)(x)
            return Dense(4, name="more")(x) if self.extra else x

    model = bridge.lazy_init(Optional(rngs=0), X)
    kernel, value = model.Dense_0.kernel, model.Dense_0.kernel[...]
    model.extra = True
    bridge.lazy_init(model, X)
    assert model.Dense_0.kernel is kernel
    assert np.array_equal(kernel[...], value)
    # The stream has moved on, so the new layer has another value.
    assert not np.array_equal(model.more.kernel[...], value)
    variables = Optional(extra=False).init(0, X)
    with pytest.raises(bridge.MismatchError, match="params/more/kernel"):
        Optional(extra=True).apply(variables, X)


def test_a_second_lazy_init_adds_what_a_layer_of_flax_is_missing():
    class Layer(nn.Module):
        extra: bool

        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4)(x)
            return nn.Dense(4, name="more")(x) * self.param("g", INIT, (1, 4)) if self.extra else x

    class Optional(bridge.Module):
        extra: bool = False

        @bridge.compact
        def __call__(self, x):
            return bridge.linen_in_bridge_mdl(Layer(self.extra))(x)

    model = bridge.lazy_init(Optional(rngs=0), X)
    kernel = model.Layer_0.Dense_0["kernel"]
    model.extra = True
    bridge.lazy_init(model, X)
    assert model.Layer_0.Dense_0["kernel"] is kernel
    params = model.Layer_0.linen_variables()
    assert np.array_equal(model(X), Layer(extra=True).apply(params, X))


def test_every_leaf_of_a_parameter_with_another_shape_is_named():
    class Pair(bridge.Module):
        size: int

        @bridge.compact
        def __call__(self, x):
            sizes = {"a": 3, "b": self.size, "c": self.size}
            made = {name: jnp.ones(size) for name, size in sizes.items()}
            return x + self.param("w", lambda key: made)["b"].sum()

    with pytest.raises(bridge.MismatchError) as caught:
        Pair(5).apply(Pair(4).init(0, X), X)
    assert caught.value.mis_shaped == (
        ("params/w/b", "float32[5]", "float32[4]"),
        ("params/w/c", "float32[5]", "float32[4]"),
    )
    with pytest.raises(bridge.MismatchError) as caught:
        Pair(4).apply({"params": {"w": {"a": jnp.ones(3), "c": jnp.ones(4), "d": jnp.ones(4)}}}, X)
    assert caught.value.missing == (("params/w/b", "float32[4]"),)


def test_threads_call_one_model_at_once():
    model = made()
    expected = model(X)
    found, start = [], threading.Barrier(4)

    def call():
        start.wait()
        found.extend(model(X) for _ in range(5))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    assert all(np.array_equal(y, expected) for y in found)


def test_a_model_is_created_in_its_shards():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    model = bridge.init_sharded(lambda rngs: Model(rngs=rngs), mesh, X, rngs=jax.random.key(0))
    assert model.Dense_0.kernel.sharding.spec == PartitionSpec(None, "model")
    specs = nn.get_partition_spec(Model().init(0, X))
    assert specs == nn.get_partition_spec(LinenModel().init(jax.random.key(0), X))
    assert_close(model(X), linen(model))
    with jax.set_mesh(mesh):
        model = made()
    assert model.Dense_0.kernel.sharding.spec == PartitionSpec(None, "model")


def test_a_checkpoint_of_the_linen_model_fits(tmp_path):
    variables = LinenModel().init(jax.random.key(0), X)
    checkpoint.save(tmp_path / "model", variables)
    model = made()
    checkpoint.restore(tmp_path / "model", model)
    assert np.array_equal(model(X), LinenModel().apply(variables, X))
    checkpoint.save(tmp_path / "ours", model)
    restored = checkpoint.restore(tmp_path / "ours", LinenModel().init(jax.random.key(1), X))
    jax.tree.map(np.testing.assert_array_equal, restored, variables)


def test_the_linen_models_weights_are_ported_without_rules():
    variables = LinenModel().init(jax.random.key(0), X)
    model = made()
    plan = port.plan(variables, model)
    plan.apply()
    assert np.array_equal(model(X), LinenModel().apply(variables, X))


def test_parity_with_the_linen_class():
    model = made()
    variables = bridge.nnx_to_linen(nnx.state(model, nnx.Param))
    report = parity.check((LinenModel(), variables), model, X)
    assert report.ok, str(report)


def test_nnx_tools_take_the_module():
    model = made()
    y = model(X)
    assert np.array_equal(nnx.clone(model)(X), y)
    graphdef, state = nnx.split(model)
    assert np.array_equal(nnx.merge(graphdef, state)(X), y)
    assert "out" in nnx.tabulate(model, X)
    assert "Dense_0" in repr(model)
    assert_close(bridge.jit_partial(lambda model, x: model(x), model)(X), y)


@pytest.mark.parametrize("call", [lambda m: m(X), lambda m: m.Noise_0])
def test_a_module_without_variables_says_what_to_do(call):
    with pytest.raises((bridge.NotInitializedError, AttributeError)):
        call(Model(rngs=0))
    with pytest.raises(bridge.NotInitializedError, match="lazy_init"):
        Model()(X)
    with pytest.raises(bridge.MissingRngError, match="rngs="):
        bridge.lazy_init(Model(), X)


@pytest.mark.parametrize("transform", [nnx.remat, nnx.jit], ids=["remat", "jit"])
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "compiled"])
def test_apply_tells_an_update_from_what_a_transform_writes_back(transform, around):
    class Count(bridge.Module):
        @bridge.compact
        def __call__(self, x, train):
            calls = self.variable("stats", "calls", jnp.zeros, ())
            if train:
                calls[...] += 1
            return bridge.linen_in_bridge_mdl(nn.Dense(4))(x) + calls[...]

    class Parent(bridge.Module):
        def setup(self):
            self.inner, self.out = Count(), nn.Dense(3)

        def __call__(self, x, train=False):
            x = transform(lambda inner, x: inner(x, train))(self.inner, x)
            return transform(lambda out, x: out(x))(self.out, x)

    variables = Parent().init(0, X)
    expected = nn.Dense(4).apply({"params": variables["params"]["inner"]["Dense_0"]}, X)
    expected = nn.Dense(3).apply({"params": variables["params"]["out"]}, expected)
    assert_close(around(Parent().apply)(variables, X), expected)
    with pytest.raises(bridge.ImmutableCollectionError, match="'stats'"):
        around(lambda v: Parent().apply(v, X, train=True))(variables)
    _, updates = around(lambda v: Parent().apply(v, X, train=True, mutable=["stats"]))(variables)
    assert updates["stats"]["inner"]["calls"] == 1


@pytest.mark.filterwarnings("ignore:'.value':DeprecationWarning")
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "compiled"])
def test_apply_tells_an_update_beside_a_transform(around):
    def make(b, transform):
        class Parent(b.Module):
            def setup(self):
                self.out = nn.Dense(3)

            @b.compact
            def __call__(self, x):
                calls = self.variable("stats", "calls", jnp.zeros, ())
                x = transform(lambda out, x: out(x))(self.out, x)
                calls.value = calls.value + x.sum()
                return x

        return Parent()

    variables = make(nn, lambda f: f).init(jax.random.key(0), X)
    for model in (make(nn, lambda f: f), make(bridge, nnx.jit), make(bridge, nnx.remat)):
        with pytest.raises(flax_errors.ModifyScopeVariableError):
            around(model.apply)(variables, X)


def test_a_mode_reaches_what_a_later_call_makes():
    class Inner(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            x = bridge.nnx_in_bridge_mdl(lambda rngs: nnx.Dropout(0.5, rngs=rngs))(x)
            x = bridge.linen_in_bridge_mdl(nn.Dropout(0.5))(type(made().Noise_0)()(x))
            return bridge.linen_in_bridge_mdl(nn.BatchNorm())(x)

    class Outer(bridge.Module):
        def setup(self):
            self.inner = [Inner()]

        def __call__(self, x):
            return self.inner[0](x)

    stats = {"mean": jnp.zeros(4), "var": jnp.ones(4)}
    variables = {
        "params": {"inner_0": {"BatchNorm_0": {"scale": jnp.ones(4), "bias": jnp.zeros(4)}}},
        "batch_stats": {"inner_0": {"BatchNorm_0": stats}},
    }
    model = Outer().bind(variables, rngs=0)
    model.eval()
    assert np.allclose(model(X), X, atol=1e-4)
    model = nnx.List([Outer().bind(variables, rngs=0)])
    nnx.Sequential(*model).train()
    many = np.ones((64, 4), np.float32)
    assert 0 < (model[0](many) < 0).mean() < 1
    assert (model[0].inner[0].BatchNorm_0.mean[...] != 0).any()


def test_setup_keeps_a_function_beside_arrays_of_its_own():
    def make(b):
        class Model(b.Module):
            def setup(self):
                self.kernel = self.param("kernel", INIT, (4, 4))
                self.table = {"twice": self.kernel * 2, "all": [self.kernel.sum(), 3]}
                self.run = functools.partial(jnp.matmul, b=self.kernel)

            def __call__(self, x):
                return self.run(x) @ self.table["twice"] + self.table["all"][0]

        return Model()

    variables = make(nn).init(jax.random.key(0), X)
    expected, grads = jax.value_and_grad(lambda v: make(nn).apply(v, X).sum())(variables)
    assert_close(make(bridge).apply(variables, X).sum(), expected)
    found, own = nnx.value_and_grad(lambda m: m(X).sum())(make(bridge).bind(variables))
    assert_close(found, expected)
    assert_close(own["kernel"][...], grads["params"]["kernel"])
