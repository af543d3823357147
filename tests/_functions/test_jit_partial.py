"""`jit_partial` is `nnx.jit` with modules bound, whatever they hold and however they change."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx
from flax import linen as nn

import bridge
import registry
from benchmarks import programs
from tests.models import assert_close
from tests.strategies import exact

X = jax.random.normal(jax.random.key(7), (4, 3))


class LinenLayers(nn.Module):
    """Parameters, running statistics and a stream."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(3)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dropout(0.5)(x, deterministic=not train)


class LinenSower(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3)(x)
        self.sow("intermediates", "hidden", x)
        return x


class Mixed(nnx.Module):
    """A wrapped module beside a native one, in a list and under two names."""

    def __init__(self, *, rngs):
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs), wrapped(rngs)])
        self.first = self.layers[0]
        self.scale = nnx.data(jnp.full((), 2.0))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        for layer in self.layers:
            x = layer(x)
        return self.first(x) * self.scale


def wrapped(rngs=None):
    rngs = nnx.Rngs(0, dropout=1) if rngs is None else rngs
    return bridge.ToNNX(LinenLayers(), rngs=rngs).lazy_init(X)


def mixed():
    return Mixed(rngs=nnx.Rngs(0, dropout=1))


def sower():
    model = bridge.ToNNX(LinenSower(), rngs=nnx.Rngs(0), mutable=["intermediates"])
    bridge.lazy_init(model, X)
    return model


def call(model, x):
    return model(x)


def everything(model):
    return exact(nnx.to_pure_dict(nnx.state(model, graph=True)))


def assert_same_as_nnx_jit(make, fun, *changes):
    """Two calls, and two more after each change, return and leave what those of `nnx.jit` do."""
    model, reference = make(), make()
    compiled, native = bridge.jit_partial(fun, model), nnx.jit(fun)
    for change in (lambda model: None, *changes):
        change(model)
        change(reference)
        for _ in range(2):
            assert exact(compiled(X)) == exact(native(reference, X))
            assert everything(model) == everything(reference)


@pytest.mark.parametrize("make", [wrapped, mixed, sower])
def test_it_returns_and_leaves_what_nnx_jit_does(make):
    assert_same_as_nnx_jit(make, call)


def test_it_follows_train_and_eval():
    assert_same_as_nnx_jit(mixed, call, lambda m: m.train(), lambda m: m.eval())


def replace_a_kernel(model):
    model.first.kernel = nnx.Param(jnp.ones((3, 3)))


def replace_a_layer(model):
    model.layers[1] = nnx.Linear(3, 3, rngs=nnx.Rngs(5))


def replace_an_array(model):
    model.scale = jnp.full((), 3.0)


def add_an_alias(model):
    model.again = model.first


def remove_an_attribute(model):
    del model.first.bias
    model.first.bias = nnx.Param(jnp.full((3,), 0.5))


@pytest.mark.parametrize(
    "change",
    [replace_a_kernel, replace_a_layer, replace_an_array, add_an_alias, remove_an_attribute],
)
def test_it_follows_a_change_of_the_modules(change):
    assert_same_as_nnx_jit(mixed, call, change)


def test_two_attributes_that_change_names_are_told_apart():
    class Pair(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.Param(jnp.zeros(())), nnx.Param(jnp.ones(()))

        def swap(self):
            a, b = self.a, self.b
            del self.a, self.b
            self.b, self.a = a, b

    assert_same_as_nnx_jit(Pair, lambda model, x: x * model.a - model.b, Pair.swap)


def test_an_item_of_a_plain_list_may_be_replaced():
    class Listed(nnx.Module):
        def __init__(self):
            self.scales = nnx.data([nnx.Param(jnp.ones(())), nnx.Param(jnp.ones(()))])

    def replace(model):
        model.scales[1] = nnx.Param(jnp.full((), 4.0))

    def fun(model, x):
        return x * model.scales[0] * model.scales[1]

    assert_same_as_nnx_jit(Listed, fun, replace)


def test_sown_values_that_are_popped_are_sown_again():
    assert_same_as_nnx_jit(sower, call, lambda model: nnx.pop(model, nnx.Intermediate))


def test_a_new_attribute_and_a_new_value_of_a_bare_array_are_kept():
    def fun(model, x):
        model.latest = nnx.Cache(x)
        model.scale = model.scale + 1
        return model(x)

    assert_same_as_nnx_jit(mixed, fun)


def test_several_modules_may_share_parts():
    def step(model, optimizer, x):
        loss, gradient = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, gradient)
        return loss

    def made():
        model = mixed()
        model.train()
        return model, nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)

    model, optimizer = made()
    native_model, native_optimizer = made()
    compiled, native = bridge.jit_partial(step, model, optimizer), nnx.jit(step)
    for _ in range(3):
        assert exact(compiled(X)) == exact(native(native_model, native_optimizer, X))
    assert everything(model) == everything(native_model)
    assert everything(optimizer) == everything(native_optimizer)


def test_a_variable_keeps_its_identity():
    model = wrapped()
    model.train()
    mean = model.BatchNorm_0["mean"]
    before = np.asarray(mean[...])
    bridge.jit_partial(call, model)(X)
    assert model.BatchNorm_0["mean"] is mean
    assert not np.array_equal(before, mean[...])


def test_a_change_made_outside_is_seen():
    model = mixed()
    compiled = bridge.jit_partial(call, model)
    compiled(X)
    model.first.kernel[...] = jnp.zeros((3, 3))
    model.first.bias[...] = jnp.ones(3)
    np.testing.assert_array_equal(compiled(X), jnp.full((4, 3), 2.0))


def test_each_structure_is_traced_once():
    traces = []

    def fun(model, x):
        traces.append(1)
        return model(x)

    model = wrapped()
    compiled = bridge.jit_partial(fun, model)
    for change in (model.train, model.eval, model.train, model.eval):
        change()
        compiled(X)
        compiled(X)
    assert len(traces) == 2


def test_another_registry_is_another_program():
    class Statistic(nnx.Variable): ...

    traces = []

    def fun(model, x):
        traces.append(1)
        return model(x)

    compiled = bridge.jit_partial(fun, wrapped())
    compiled(X)
    with registry.use(registry.current().extend({"statistics": Statistic})):
        compiled(X)
    compiled(X)
    assert len(traces) == 2


@pytest.mark.parametrize("donate", [False, True])
def test_a_static_argument_is_a_python_value(donate):
    def fun(model, x, *, times):
        model.calls[...] += times
        return [x * model.scale] * times

    model = mixed()
    compiled = bridge.jit_partial(fun, model, static_argnames="times", donate=donate)
    assert [len(compiled(X, times=n)) for n in (1, 3)] == [1, 3]
    assert int(model.calls[...]) == 4


@pytest.mark.parametrize("make", [wrapped, mixed])
def test_donating_changes_no_value_and_frees_what_is_replaced(make):
    models = make(), make()
    compiled = [
        bridge.jit_partial(call, m, donate=d) for m, d in zip(models, (True, False), strict=True)
    ]
    for model in models:
        model.train()
    old = nnx.to_flat_state(nnx.state(models[0], nnx.BatchStat))
    arrays = [variable.get_raw_value() for _, variable in old]
    for _ in range(2):
        assert exact(compiled[0](X)) == exact(compiled[1](X))
    assert everything(models[0]) == everything(models[1])
    assert all(array.is_deleted() for array in arrays)
    kept = nnx.state(models[0], nnx.Param)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(kept))


def test_an_error_in_the_function_leaves_the_model_alone():
    def fun(model, x):
        model(x)
        raise ZeroDivisionError

    model = mixed()
    model.train()
    before = everything(model)
    with pytest.raises(ZeroDivisionError):
        bridge.jit_partial(fun, model)(X)
    assert everything(model) == before


@pytest.mark.parametrize("other", [nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.Param(jnp.ones(3))])
def test_what_has_a_state_and_is_not_bound_is_refused(other):
    compiled = bridge.jit_partial(lambda model, others, x: x, mixed())
    with pytest.raises(bridge.InvalidModuleError, match="bind what has a state") as caught:
        compiled([other], X)
    assert type(caught.value.found) is type(other)


def test_a_state_is_an_argument_like_any_pytree():
    model = mixed()
    state = nnx.state(model, nnx.Param)
    compiled = bridge.jit_partial(lambda model, state: jax.tree.map(jnp.sum, state), model)
    assert exact(nnx.to_pure_dict(compiled(state))) == exact(
        nnx.to_pure_dict(jax.jit(lambda s: jax.tree.map(jnp.sum, s))(state))
    )


def test_nothing_to_bind_is_refused():
    with pytest.raises(bridge.InvalidModuleError, match="behind the function"):
        bridge.jit_partial(call)


def test_inside_another_trace_a_call_that_changes_nothing_works():
    model = wrapped()
    compiled = bridge.jit_partial(call, model)
    assert_close(jax.jit(lambda x: compiled(x) + 0)(X), nnx.jit(call)(model, X))


def test_inside_another_trace_a_call_that_changes_the_model_raises():
    model = wrapped()
    model.train()
    before = everything(model)
    compiled = bridge.jit_partial(call, model)
    with pytest.raises(errors.TraceContextError):
        jax.jit(compiled)(X)
    assert everything(model) == before


def test_in_tree_mode_it_does_the_same():
    model, reference = wrapped(), wrapped()
    with nnx.set_graph_mode(False):
        compiled = bridge.jit_partial(call, model)
        for _ in range(2):
            model.train()
            reference.train()
            assert exact(compiled(X)) == exact(nnx.jit(call)(reference, X))
    assert everything(model) == everything(reference)


def test_hijax_variables_are_updated_where_jax_jit_may_update_them():
    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.count[...] += 1
            return x * self.count[...]

    def natively(x):
        graphdef, state = nnx.split(native)
        output = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)
        nnx.update(native, state)
        return output

    with nnx.var_defaults(hijax=True):
        model, native = Counter(), Counter()
    compiled = bridge.jit_partial(call, model)
    for _ in range(2):
        try:
            expected = natively(X)
        except errors.ImmutableVariableError:
            # Since Flax 0.12.9.
            with pytest.raises(errors.ImmutableVariableError):
                compiled(X)
        else:
            np.testing.assert_array_equal(compiled(X), expected)
        assert int(model.count[...]) == int(native.count[...])


def test_calls_from_several_threads_take_turns():
    model = mixed()
    model.train()

    def fun(model, x):
        model.calls[...] += 1
        return model.calls[...]

    compiled = bridge.jit_partial(fun, model)
    seen, barrier = [], threading.Barrier(4)

    def run():
        barrier.wait()
        seen.extend(int(compiled(X)) for _ in range(25))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(1, 101))


def shift(model, x):
    """Changes every parameter of a model."""
    nnx.update(model, jax.tree.map(lambda p: p + x.sum(), nnx.state(model, nnx.Param)))


class Deep(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = nn.Dense(3)(x)
        return x


def calls_of_python(compiled):
    for _ in range(2):
        compiled(X)
    return programs.python_calls(lambda: compiled(X))


def test_a_call_runs_one_function_of_python_more_for_each_further_variable():
    def calls(layers):
        model = bridge.ToNNX(Deep(layers), rngs=nnx.Rngs(0)).lazy_init(X)
        return calls_of_python(bridge.jit_partial(call, model))

    assert calls(9) == calls(1) + 8 * 2


def test_a_call_that_changes_all_runs_less_python_than_under_nnx_jit():
    model = bridge.ToNNX(Deep(9), rngs=nnx.Rngs(0)).lazy_init(X)
    ours = calls_of_python(bridge.jit_partial(shift, model))
    bias = model.Dense_0["bias"].get_value()
    np.testing.assert_allclose(bias, 3 * X.sum(), rtol=1e-6)
    jitted = nnx.jit(shift)
    theirs = calls_of_python(lambda x: jitted(model, x))
    assert 2 * ours < theirs


RETURNS = {
    "the module itself": lambda model: model,
    "a part of it": lambda model: model.layers[0],
    "a container": lambda model: model.layers,
    "a Variable": lambda model: model.calls,
    "both in a pytree": lambda model: (model.first, {"calls": model.calls}),
    "its state": lambda model: nnx.state(model, graph=True),
}


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("what", RETURNS)
def test_a_module_or_a_variable_that_is_returned_is_the_one_that_is_bound(what, graph):
    model = mixed()
    step = bridge.jit_partial(lambda model: (model(X), RETURNS[what](model))[1], model)
    for calls in (1, 2):
        with nnx.set_graph_mode(graph):
            returned = step()
        is_object = lambda x: isinstance(x, nnx.Pytree | nnx.Variable)  # noqa: E731
        expected = RETURNS[what](model)
        found, wanted = (jax.tree.leaves(t, is_leaf=is_object) for t in (returned, expected))
        objects = [(a, b) for a, b in zip(found, wanted, strict=True) if is_object(b)]
        assert objects
        assert all(a is b for a, b in objects)
        assert int(model.calls[...]) == calls


def test_gradients_that_are_returned_are_values_and_cost_no_other_path(monkeypatch):
    model = mixed()
    expected = nnx.grad(lambda model: model(X).sum())(model)
    step = bridge.jit_partial(nnx.grad(lambda model: model(X).sum()), mixed())
    monkeypatch.setattr(nnx, "jit", None)
    assert jax.tree.structure(step()) == jax.tree.structure(expected)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ((lambda m, x: m.init(x, X), nn.Dense(3)), "jax.jit on its apply"),
        ((lambda m, x: x, nnx.Linear), "instances of modules"),
        ((lambda m, x: x, nn.Dense), "instances of modules"),
        ((nnx.Linear(3, 3, rngs=nnx.Rngs(0)), lambda m: m(X)), "the function first"),
        ((nnx.Variable(X), nnx.Linear(3, 3, rngs=nnx.Rngs(0))), "behind the function"),
        ((3, nnx.Linear(3, 3, rngs=nnx.Rngs(0))), "behind the function"),
    ],
    ids=["Linen module", "class", "Linen class", "wrong order", "a Variable first", "a number"],
)
def test_what_is_no_function_of_nnx_modules_is_refused_with_the_remedy(arguments, hint):
    with pytest.raises(bridge.InvalidModuleError, match=hint):
        bridge.jit_partial(*arguments)
