"""ToNNX under NNX's and JAX's own tools and transforms, in both NNX modes."""

import concurrent.futures
import io
import pickle
import re
from contextlib import redirect_stdout

import cloudpickle
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict

import bridge
from tests import models
from tests.models import assert_close, assert_identical, leaf_paths, rng_counts, snapshot

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
KEY = jax.random.key(7)


def classifier():
    """A wrapper with parameters, statistics and RNG streams, and its Linen module."""
    module = models.LinenClassifier()
    rngs = nnx.Rngs(params=0, dropout=1)
    return bridge.ToNNX(module, rngs).lazy_init(X, train=False), module


def call(model):
    return model(X, train=False)


def test_split_and_merge_give_an_equal_model():
    model, _ = classifier()
    graphdef, params, statistics, rest = nnx.split(model, nnx.Param, nnx.BatchStat, ...)
    assert sorted(params) == ["BatchNorm_0", "Dense_0", "Dense_1"]
    assert sorted(statistics["BatchNorm_0"]) == ["mean", "var"]
    assert list(rest) == ["to_nnx__rngs"]
    merged = nnx.merge(graphdef, params, statistics, rest)
    assert_identical(call(merged), call(model))
    assert_identical(nnx.state(merged), nnx.state(model))
    assert hash(graphdef) == hash(nnx.graphdef(classifier()[0]))
    assert graphdef == nnx.graphdef(classifier()[0])


@pytest.mark.parametrize("noted", [{}, {"initializing": True}, {"is_setup": True}])
def test_what_nnx_notes_in_a_module_goes_through_its_graphdef(noted):
    def notes(model):
        state = vars(model)["_pytree__state"]
        return {"initializing": state.initializing, "is_setup": state.is_setup}

    model, _ = classifier()
    expected = {**notes(model), **noted}
    model._pytree__state._initializing = expected["initializing"]
    model._pytree__state._is_setup = expected["is_setup"]
    assert notes(nnx.merge(*nnx.split(model))) == expected
    assert notes(nnx.clone(model)) == expected
    seen = []
    nnx.jit(lambda model: seen.append(notes(model)))(model)
    assert seen == [expected]
    assert notes(model) == expected


def test_a_module_belongs_to_the_trace_that_it_is_made_in():
    model, _ = classifier()

    @nnx.jit
    def inside(model):
        model.seen = nnx.Variable(jnp.ones(()))

    inside(model)
    assert_identical(model.seen.get_value(), jnp.ones(()))

    def outside(x):
        model.late = nnx.Variable(x)

    with pytest.raises(flax.errors.TraceContextError):
        jax.jit(outside)(X)
    assert "late" not in vars(model)


def test_a_clone_shares_no_variable():
    model, module = classifier()
    before = snapshot(model)
    clone = nnx.clone(model)
    clone(X, train=True, mutable=["batch_stats"])
    assert snapshot(model) == before
    assert rng_counts(clone) != rng_counts(model)
    assert_identical(call(model), module.apply(model.linen_variables(), X, train=False))


def test_update_takes_a_state_of_another_model():
    model, module = classifier()
    other = bridge.ToNNX(module, nnx.Rngs(params=5, dropout=1)).lazy_init(X, train=False)
    kernel = model.Dense_0["kernel"]
    nnx.update(model, nnx.state(other, nnx.Param))
    assert model.Dense_0["kernel"] is kernel
    assert_identical(call(model), call(other))


def test_update_takes_a_dict_of_arrays():
    model, module = classifier()
    variables = module.init(jax.random.key(9), X, train=False)
    nnx.update(model, {**variables["params"], "BatchNorm_0": {"mean": jnp.full(4, 0.5)}})
    variables["params"]["BatchNorm_0"] = model.linen_variables()["params"]["BatchNorm_0"]
    variables["batch_stats"]["BatchNorm_0"]["mean"] = jnp.full(4, 0.5)
    variables = {**variables, "params": {**variables["params"]}}
    assert_identical(call(model), module.apply(variables, X, train=False))


def test_a_pure_dict_replaces_the_state():
    model, _ = classifier()
    other = bridge.ToNNX(models.LinenClassifier(), nnx.Rngs(3)).lazy_init(X, train=False)
    pure = nnx.to_pure_dict(nnx.state(other, nnx.Param))
    assert_identical(pure, other.linen_variables()["params"])
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, pure)
    nnx.update(model, state)
    assert_identical(call(model), call(other))


def test_pop_takes_a_collection_out_and_a_call_can_bring_it_back():
    model = bridge.ToNNX(models.LinenCounter(), KEY).lazy_init(X)
    popped = nnx.pop(model, type(model.count))
    assert list(popped) == ["count"]
    assert not hasattr(model, "count")
    assert "counter" not in model.linen_variables()
    model(X, mutable=["counter"])
    assert int(model.count.get_value()) == 1


@pytest.mark.parametrize(
    "selection",
    [
        nnx.PathContains("Dense_0"),
        nnx.All(nnx.Param, nnx.PathContains("Dense_0")),
        lambda path, _: "/".join(map(str, path)).startswith("Dense_0"),
    ],
    ids=["path", "all", "joined"],
)
def test_filters_by_path_select_linen_submodules(selection):
    model, _ = classifier()
    selected = [path for path, _ in nnx.to_flat_state(nnx.state(model, selection))]
    assert selected == [("Dense_0", "bias"), ("Dense_0", "kernel")]


def test_iter_graph_and_iter_modules_pass_over_the_mappings():
    model, _ = classifier()
    assert [m for _, m in nnx.iter_modules(model) if isinstance(m, bridge.ToNNX)] == [model]
    variables = {p for p, v in nnx.iter_graph(model) if isinstance(v, nnx.Param)}
    assert ("Dense_0", "kernel") in variables
    assert len(nnx.to_flat_state(nnx.state(model))) == len(leaf_paths(model)) + 4


@pytest.mark.parametrize("make", [lambda: classifier()[0], lambda: bridge.ToNNX(nn.Dense(3))])
def test_repr_and_display_work(make):
    model = make()
    before = snapshot(model)
    assert "ToNNX" in repr(model)
    assert "ToNNX" in str(model)
    with redirect_stdout(io.StringIO()) as shown:
        nnx.display(model)
    assert "ToNNX" in shown.getvalue()
    assert snapshot(model) == before


PLAIN = {"width": 200, "force_terminal": False}


def class_attributes():
    classes = (nnx.Module, nnx.Pytree, bridge.ToNNX, nnx.Rngs, nnx.RngStream)
    return {(c, n): getattr(c, n) for c in classes for n in dir(c) if n not in UNSTABLE}


# A new object at each access.
UNSTABLE = {"__dir__", "__init_subclass__", "__subclasshook__"}


@pytest.mark.parametrize("name", [None, "module", "rngs", "train", "lazy_init", "sow"])
def test_tabulate_works_and_leaves_the_model_and_nnx_as_they_were(name):
    """Defect 11: tabulate failed and left NNX classes patched."""
    before_classes = class_attributes()
    module = models.LinenMLP() if name is None else models.LinenNamed(name)
    model = bridge.ToNNX(module, nnx.Rngs(0)).lazy_init(X)
    before = snapshot(model)
    table = nnx.tabulate(model, X, console_kwargs=PLAIN)
    assert "ToNNX" in table
    assert "float32[2,3]" in table
    assert snapshot(model) == before
    assert class_attributes() == before_classes
    assert_identical(model(X), module.apply(model.linen_variables(), X))


def test_tabulate_counts_the_parameters_of_a_mixed_tree():
    class Mixed(nnx.Module):
        def __init__(self, rngs):
            self.linen = bridge.ToNNX(nn.Dense(3), rngs)
            self.native = nnx.Linear(3, 2, rngs=rngs)

        def __call__(self, x):
            return self.native(self.linen(x))

    model = bridge.lazy_init(Mixed(nnx.Rngs(0)), X)
    table = nnx.tabulate(model, X, console_kwargs=PLAIN)
    assert "linen" in table
    assert "native" in table
    assert str(4 * 3 + 3 + 3 * 2 + 2) in table


class NativeMLP(nnx.Module):
    """`LinenMLP` in NNX, by the names of its variables."""

    def __init__(self, rngs):
        self.Dense_0 = nnx.Linear(5, 3, rngs=rngs)
        self.Dense_1 = nnx.Linear(4, 4, rngs=rngs)
        self.Dense_2 = nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, x):
        return self.Dense_0(nnx.relu(self.Dense_2(self.Dense_1(x))))


def test_tabulate_counts_as_for_native_modules():
    model = bridge.ToNNX(models.LinenMLP()).lazy_init(X, rngs=KEY)
    native = nnx.tabulate(NativeMLP(nnx.Rngs(0)), X, console_kwargs=PLAIN)
    table = nnx.tabulate(model, X, console_kwargs=PLAIN)
    totals = [re.findall(r"Total Parameters: (\d+)", text)[0] for text in (native, table)]
    assert totals[0] == totals[1]
    assert "_nnx_tabulate_id" not in vars(model)


PICKLERS = {"pickle": pickle, "cloudpickle": cloudpickle}


@pytest.mark.parametrize("pickler", PICKLERS)
@pytest.mark.parametrize("initialised", [True, False])
def test_a_pickled_wrapper_is_the_same_wrapper(pickler, initialised):
    model = classifier()[0] if initialised else bridge.ToNNX(models.LinenDot(), nnx.Rngs(0))
    model.label = "x"
    restored = PICKLERS[pickler].loads(PICKLERS[pickler].dumps(model))
    assert restored.label == "x"
    assert rng_counts(restored) == rng_counts(model)
    assert leaf_paths(restored) == leaf_paths(model)
    if initialised:
        assert_identical(call(restored), call(model))
        assert_identical(restored.linen_variables(), model.linen_variables())
    else:
        expected = model.lazy_init(X).linen_variables()
        assert_identical(restored.lazy_init(X).linen_variables(), expected)


@pytest.mark.parametrize("pickler", PICKLERS)
def test_a_wrapper_with_a_type_made_on_demand_is_pickled(pickler):
    model = bridge.ToNNX(models.LinenCounter(), KEY).lazy_init(X)
    restored = PICKLERS[pickler].loads(PICKLERS[pickler].dumps(model))
    assert type(restored.count) is type(model.count)
    restored(X, mutable=["counter"])
    assert int(restored.count.get_value()) == 1
    assert int(model.count.get_value()) == 0


def test_a_graphdef_and_a_state_are_pickled():
    model, _ = classifier()
    graphdef, state = pickle.loads(pickle.dumps(nnx.split(model)))
    assert graphdef == nnx.graphdef(model)
    assert_identical(call(nnx.merge(graphdef, state)), call(model))


def linen_loss(module, variables, x, rngs):
    output, updates = module.apply(variables, x, True, rngs=rngs, mutable=["batch_stats"])
    return (output**2).mean(), updates


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("jit", [True, False])
def test_training_with_state_follows_pure_linen(graph, jit):
    module = models.LinenClassifier()
    variables = module.init(KEY, X, train=False)
    optimizer = optax.sgd(0.1)
    params, statistics = variables["params"], {"batch_stats": variables["batch_stats"]}
    opt_state = optimizer.init(params)
    streams = nnx.Rngs(dropout=1).fork()

    with nnx.set_graph_mode(graph):
        model = bridge.ToNNX.from_variables(module, variables, nnx.Rngs(dropout=1))
        model.train()
        nnx_optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

        def step(model, nnx_optimizer, x):
            loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
            nnx_optimizer.update(model, grads)
            return loss

        if not graph:
            # In tree mode what a differentiated function changes has to be returned.
            def step(model, nnx_optimizer, x):
                graphdef, trainable, rest = nnx.split(model, nnx.Param, ...)

                def loss_of(trainable):
                    copy = nnx.merge(graphdef, trainable, rest, copy=True)
                    loss = (copy(x) ** 2).mean()
                    return loss, nnx.state(copy, nnx.Not(nnx.Param))

                (loss, changed), grads = jax.value_and_grad(loss_of, has_aux=True)(trainable)
                nnx.update(model, changed)
                nnx_optimizer.update(model, grads)
                return loss

        step = nnx.jit(step) if jit else step
        for _ in range(3):
            rngs = {"dropout": streams.dropout()}

            def loss_of(params, statistics=statistics, rngs=rngs):
                return linen_loss(module, {"params": params, **statistics}, X, rngs)

            (expected, statistics), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            np.testing.assert_allclose(step(model, nnx_optimizer, X), expected, rtol=1e-4)
    result = model.linen_variables()
    expected = {"params": params, **statistics}
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_nnx_jit_traces_once_when_state_changes():
    model, _ = classifier()
    model.train()
    traces = []

    @nnx.jit
    def step(model, x):
        traces.append(1)
        return model(x)

    for _ in range(3):
        step(model, X)
    assert len(traces) == 1


def test_nnx_vmap_over_models_with_state_follows_linen():
    module = models.LinenClassifier()
    variables = [module.init(jax.random.key(i), X, train=False) for i in range(3)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *variables)
    model = bridge.ToNNX.from_variables(module, stacked, mutable=["batch_stats"])
    mean = model.BatchNorm_0["mean"]
    rngs = {"dropout": KEY}

    @nnx.vmap(in_axes=(0, None))
    def forward(model, x):
        return model(x, train=True, rngs=rngs)

    outputs = forward(model, X)
    assert model.BatchNorm_0["mean"] is mean
    for i, each in enumerate(variables):
        expected, updates = module.apply(each, X, True, rngs=rngs, mutable=["batch_stats"])
        np.testing.assert_allclose(outputs[i], expected, rtol=1e-4, atol=1e-6)
        expected_mean = updates["batch_stats"]["BatchNorm_0"]["mean"]
        assert_close(mean.get_value()[i], expected_mean)


def test_nnx_scan_over_steps_threads_state_and_counters():
    module = models.LinenClassifier()
    model, reference = (
        bridge.ToNNX(module, nnx.Rngs(0, dropout=1)).lazy_init(X, train=False) for _ in range(2)
    )
    model.train()
    reference.train()
    xs = jnp.stack([X, 2 * X, 3 * X])

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def run(model, x):
        return model, model(x)

    _, outputs = run(model, xs)
    for output, x in zip(outputs, xs, strict=True):
        np.testing.assert_allclose(output, reference(x), rtol=1e-4, atol=1e-6)
    assert rng_counts(model) == rng_counts(reference)
    for a, b in zip(
        jax.tree.leaves(model.linen_variables()),
        jax.tree.leaves(reference.linen_variables()),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("transform", [nnx.remat, nnx.jit], ids=["remat", "jit"])
def test_gradients_through_nnx_transforms_are_those_of_linen(transform):
    module = models.LinenMLP()
    model = bridge.ToNNX(module, KEY).lazy_init(X)
    variables = model.linen_variables()
    expected = jax.grad(lambda v: module.apply(v, X).sum())(variables)["params"]
    inner = transform(lambda m, x: m(x))
    grads = nnx.grad(lambda m: inner(m, X).sum())(model)
    assert jax.tree.structure(nnx.to_pure_dict(grads)) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_jax_grad_of_a_state_is_that_of_linen():
    module = models.LinenMLP()
    model = bridge.ToNNX(module, KEY).lazy_init(X)
    graphdef, state, rest = nnx.split(model, nnx.Param, ...)
    grads = jax.jit(jax.grad(lambda s: nnx.merge(graphdef, s, rest)(X).sum()))(state)
    expected = jax.grad(lambda v: module.apply(v, X).sum())(model.linen_variables())
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_method_and_a_submodule_can_be_transformed():
    module = models.LinenAutoencoder()
    model = bridge.ToNNX(module, KEY).lazy_init(X)
    expected = module.apply(model.linen_variables(), X, method="encode")
    assert_close(jax.jit(model.encode)(X), expected)
    assert_close(jax.vmap(model.encode)(X), expected)
    assert_close(nnx.jit(lambda m, x: m.activation(m.encoder(x)))(model, X), expected)


@pytest.mark.parametrize("name", ["LinenMLP", "LinenSameName", "LinenCounter", "LinenSows"])
def test_tree_mode_gives_the_same_model_as_graph_mode(name):
    def build():
        model = bridge.ToNNX(getattr(models, name)(), nnx.Rngs(0)).lazy_init(X)
        return model, model(X, mutable=True), model.linen_variables()

    _, expected, expected_variables = build()
    with nnx.set_graph_mode(False):
        model, output, variables = build()
        assert_identical((output, variables), (expected, expected_variables))
        merged = nnx.merge(*nnx.split(model))
        assert_identical(merged.linen_variables(), variables)
        assert leaf_paths(merged) == leaf_paths(model)


def test_updates_arrive_in_tree_mode():
    """Defect 21: updates were lost without a word."""
    module = models.LinenWriter()
    with nnx.set_graph_mode(False):
        model = bridge.ToNNX(module, {"params": KEY}, mutable=["counter"]).lazy_init(X)
        for transform in (nnx.jit, nnx.remat):
            transform(lambda m, x: m(x))(model, X)
        nnx.vmap(lambda m, x: m(x), in_axes=(0, 0))(
            stacked := bridge.ToNNX.from_variables(
                module,
                jax.tree.map(lambda v: jnp.stack([v, v]), model.linen_variables()),
                mutable=["counter"],
            ),
            jnp.stack([X, X]),
        )
    assert float(model.count_counter.get_value()) == 2
    assert_identical(stacked.count_counter.get_value(), jnp.full(2, 3.0))


def test_shared_wrappers_stay_shared_in_graph_mode():
    class Shared(nnx.Module):
        def __init__(self):
            self.a = bridge.ToNNX(models.LinenWriter(), {"params": KEY}, mutable=["counter"])
            self.b = self.a

        def __call__(self, x):
            return self.b(self.a(x))

    model = bridge.lazy_init(Shared(), X)
    nnx.jit(lambda m, x: m(x))(model, X)
    assert model.a is model.b
    assert float(model.a.count_counter.get_value()) == 2


@pytest.mark.parametrize("ref", [False, True])
@pytest.mark.parametrize("graph", [True, False])
def test_hijax_variables_follow_linen(graph, ref):
    module = models.LinenClassifier()
    expected_variables = module.init(KEY, X, train=False)
    expected, updates = module.apply(
        expected_variables, X, True, rngs={"dropout": KEY}, mutable=["batch_stats"]
    )
    with nnx.set_graph_mode(graph), nnx.var_defaults(hijax=True, ref=ref):
        model = bridge.ToNNX(module, KEY).lazy_init(X, train=False)
        mean = model.BatchNorm_0["mean"]
        assert mean.var_type is nnx.BatchStat
        assert leaf_paths(model)["Dense_0", "kernel"] is nnx.Param
        assert_identical(model.linen_variables(), expected_variables)
        output = model(X, train=True, rngs={"dropout": KEY}, mutable=["batch_stats"])
        assert_identical(output, expected)
        assert_identical(model.linen_variables(), {**expected_variables, **updates})

        assert_identical(model(X, train=False), nnx.clone(model)(X, train=False))


class Counter(nnx.Module):
    """What `models.LinenWriter` does, natively."""

    def __init__(self):
        self.count_counter = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.count_counter[...] += 1
        return x


def nnx_jit_in_tree_mode(model):
    with nnx.set_graph_mode(False):
        return nnx.jit(lambda model, x: model(x))(model, X)


def jax_jit_without_a_returned_state(model):
    graphdef, state = nnx.split(model)
    output = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, X)
    nnx.update(model, state)
    return output


@pytest.mark.parametrize("step", [nnx_jit_in_tree_mode, jax_jit_without_a_returned_state])
def test_a_hijax_model_is_updated_in_a_trace_where_a_native_one_is(step):
    # Up to Flax 0.12.8. Since then a trace may not update a hijax Variable.
    with nnx.var_defaults(hijax=True):
        wrapped = bridge.ToNNX(models.LinenWriter(), {"params": KEY}, mutable=["counter"])
        wrapped.lazy_init(X)
        native = Counter()
    for _ in range(2):
        try:
            expected = step(native)
        except flax.errors.ImmutableVariableError:
            with pytest.raises(flax.errors.ImmutableVariableError):
                step(wrapped)
        else:
            assert_identical(step(wrapped), expected)
        assert_identical(wrapped.count_counter.get_value(), native.count_counter.get_value())


@pytest.fixture
def frozen():
    flax.config.update("flax_return_frozendict", True)
    yield
    flax.config.update("flax_return_frozendict", False)


@pytest.mark.usefixtures("frozen")
def test_flax_return_frozendict_freezes_variables_and_breaks_nothing():
    module = models.LinenClassifier()
    expected = module.init(KEY, X, train=False)
    assert isinstance(expected, FrozenDict)
    model = bridge.ToNNX(module, KEY).lazy_init(X, train=False)
    variables = model.linen_variables()
    assert isinstance(variables, FrozenDict)
    assert_identical(variables, expected)
    output, updates = module.apply(
        variables, X, True, rngs={"dropout": KEY}, mutable=["batch_stats"]
    )
    assert_identical(model(X, train=True, rngs={"dropout": KEY}, mutable=True), output)
    assert_identical(model.linen_variables()["batch_stats"], updates["batch_stats"])
    given = bridge.ToNNX.from_variables(module, expected)
    assert_identical(given.linen_variables(), expected)
    sows = bridge.ToNNX(models.LinenSows(), KEY).lazy_init(jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert len(nnx.capture(sows, nnx.Intermediate)(X)[1]) == 2


def test_models_in_several_threads_do_not_disturb_each_other():
    def work(seed):
        key = jax.random.key(seed)
        module = models.LinenClassifier()
        model = bridge.ToNNX(module, key).lazy_init(X, train=False)
        model.train()
        for _ in range(3):
            model(X, rngs={"dropout": key})
        model.eval()
        return model(X), model.linen_variables()

    def linen(seed):
        key = jax.random.key(seed)
        module = models.LinenClassifier()
        variables = module.init(key, X, train=False)
        for _ in range(3):
            _, updates = module.apply(
                variables, X, True, rngs={"dropout": key}, mutable=["batch_stats"]
            )
            variables = {**variables, **updates}
        return module.apply(variables, X, False), variables

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(8)))
    for seed, result in enumerate(results):
        assert_identical(result, linen(seed))


def test_a_model_made_in_one_thread_is_used_in_another():
    model, module = classifier()
    expected = module.apply(model.linen_variables(), X, train=False)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert_identical(pool.submit(call, model).result(), expected)
        pool.submit(lambda: model(X, train=True, mutable=["batch_stats"])).result()
    assert float(jnp.abs(model.BatchNorm_0["mean"].get_value()).sum()) > 0
