"""The NNX modules of a ToLinen, shown to Linen's interceptors, against the pure Linen model."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx, serialization

import bridge
from bridge._nnx_in_linen import module_views
from tests.models import assert_close

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


class LinenCore(nn.Module):
    def setup(self):
        self.fc = nn.Dense(5)
        self.layers = [nn.Dense(5), nn.Dense(3)]

    def __call__(self, x):
        x = self.encode(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def encode(self, x):
        return nn.relu(self.fc(x))


class LinenTop(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="head")(self.inner(x))


class Core(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(4, 5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(5, 5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)])

    def __call__(self, x):
        x = self.encode(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def encode(self, x):
        return jax.nn.relu(self.fc(x))


class Middle(nnx.Module):
    """As `LinenTop`, with the Linen module `LinenCore` or the NNX module `Core` inside."""

    def __init__(self, linen, rngs):
        inner = bridge.ToNNX(LinenCore(), rngs=rngs) if linen else Core(rngs)
        self.inner = inner
        self.head = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.inner(x))


PURE = LinenTop(LinenCore())
MIXTURES = {
    "linen(nnx)": LinenTop(bridge.to_linen(Core)),
    "ToLinen(nnx)": bridge.to_linen(Middle, False),
    "ToLinen(nnx(linen))": bridge.to_linen(Middle, True),
}


@functools.cache
def pure_variables():
    """The variables of the pure model; not made where these tests are only collected."""
    return PURE.init(jax.random.key(0), X)


def with_weights(model, variables=None):
    """Variables of a mixture that have the values of the pure model."""
    variables = pure_variables() if variables is None else variables
    own = model.init(jax.random.key(1), X)
    values = dict(jax.tree_util.tree_flatten_with_path(variables["params"])[0])
    named = {names(path): value for path, value in values.items()}
    return {
        **own,
        "params": jax.tree_util.tree_map_with_path(
            lambda path, _: named[names(path)], own["params"]
        ),
    }


def names(path):
    """A path with the names of lists' items as Linen has them."""
    text = "/".join(str(entry.key) for entry in path)
    return text.replace("layers/", "layers_")


def calls_of(model, variables, *, shown=True):
    """(path, method) of all calls that an interceptor gets, and the output."""
    found = []

    def note(next_function, args, kwargs, context):
        path = "/".join(context.module.path).replace("layers/", "layers_")
        found.append((path, context.method_name))
        return next_function(*args, **kwargs)

    with nn.intercept_methods(note):
        if not shown:
            return found, model.apply(variables, X)
        with bridge.nnx_modules_as_linen():
            return found, model.apply(variables, X)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_interceptors_get_the_calls_of_the_pure_model_by_their_whole_paths(mixture):
    model = MIXTURES[mixture]
    variables = with_weights(model)
    expected, y = calls_of(PURE, pure_variables())
    # Linen calls `setup` itself.
    expected = [call for call in expected if call[1] != "setup"]
    found, own = calls_of(model, variables)
    assert [call for call in found if call[1] != "setup"] == expected
    assert_close(own, y)


def test_without_being_asked_for_nothing_is_shown():
    model = MIXTURES["linen(nnx)"]
    found, _ = calls_of(model, with_weights(model), shown=False)
    assert found == [("", "__call__"), ("inner", "__call__"), ("head", "__call__")]


@pytest.mark.parametrize("mixture", MIXTURES)
def test_intermediates_are_captured_as_in_the_pure_model(mixture):
    model = MIXTURES[mixture]
    variables = with_weights(model)
    _, expected = PURE.apply(pure_variables(), X, capture_intermediates=True)
    with bridge.nnx_modules_as_linen():
        _, found = model.apply(variables, X, capture_intermediates=True)
    expected, found = (
        {names(path): value for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]}
        for tree in (as_dicts(expected), as_dicts(found))
    )
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name], value)


def as_dicts(updates):
    return jax.tree.map(
        lambda calls: dict(enumerate(calls)),
        updates["intermediates"],
        is_leaf=lambda x: isinstance(x, tuple),
    )


def scopes_of(model, variables):
    """The name stacks of the matrix products, without the outermost module's class."""
    jaxpr = jax.make_jaxpr(model.apply)(variables, X)
    stacks = [
        str(eqn.source_info.name_stack)
        for eqn in jaxpr.eqns
        if eqn.primitive is jax.lax.dot_general_p
    ]
    return [stack.partition("/")[2] for stack in stacks]


@pytest.mark.parametrize("mixture", MIXTURES)
def test_named_scopes_are_those_of_the_pure_model(mixture):
    model = MIXTURES[mixture]
    variables = with_weights(model)
    expected = scopes_of(PURE, pure_variables())
    assert len(expected) == 4
    with bridge.nnx_modules_as_linen():
        assert scopes_of(model, variables) == expected


@pytest.mark.parametrize("mixture", MIXTURES)
def test_the_program_is_the_same_whether_modules_are_shown_or_not(mixture):
    model = MIXTURES[mixture]
    variables = with_weights(model)
    expected = str(jax.make_jaxpr(model.apply)(variables, X))
    with bridge.nnx_modules_as_linen():
        assert str(jax.make_jaxpr(model.apply)(variables, X)) == expected


def adapted(next_function, args, kwargs, context):
    """Adds a parameter and a count of calls to every layer, and a statistic where it may."""
    y = next_function(*args, **kwargs)
    if context.method_name != "__call__" or type(context.module).__name__ not in LAYERS:
        return y
    scope = context.module.scope
    kernel = scope.get_variable("params", "kernel")
    adapter = scope.param("adapter", nn.initializers.normal(), (kernel.shape[0], 1))
    calls = scope.variable("counts", "calls", lambda: jnp.zeros(()))
    if scope.is_mutable_collection("counts") and not scope.has_flag("initializing"):
        calls.value = calls.value + 1.0
    return y + args[0] @ adapter


LAYERS = ("Dense", "Linear")


@pytest.mark.parametrize("mixture", MIXTURES)
def test_what_interceptors_put_into_a_scope_is_part_of_the_variables(mixture):
    model = MIXTURES[mixture]
    with nn.intercept_methods(adapted), bridge.nnx_modules_as_linen():
        pure = PURE.init(jax.random.key(0), X)
        variables = {
            **with_weights(model, pure),
            "counts": model.init(jax.random.key(0), X)["counts"],
        }
        expected, updates = PURE.apply(pure, X, mutable=["counts"])
        y, own = model.apply(variables, X, mutable=["counts"])
        assert_close(y, expected)
        assert_close(sum(jax.tree.leaves(own)), sum(jax.tree.leaves(updates)))
        assert len(jax.tree.leaves(own)) == len(jax.tree.leaves(updates)) == 4
        # The adapters learn as those of the pure model do.
        grads = jax.grad(lambda v: (model.apply(v, X) ** 2).sum(), allow_int=True)(variables)[
            "params"
        ]
        expected = jax.grad(lambda v: (PURE.apply(v, X) ** 2).sum())(pure)["params"]
    found = {names(p): g for p, g in jax.tree_util.tree_flatten_with_path(grads)[0]}
    for path, gradient in jax.tree_util.tree_flatten_with_path(expected)[0]:
        assert_close(found[names(path)], gradient)


def test_a_scope_holds_the_arrays_that_the_module_computes_with():
    model = MIXTURES["linen(nnx)"]
    variables = with_weights(model)
    seen = []

    def note(next_function, args, kwargs, context):
        if type(context.module).__name__ == "Linear":
            kernel = context.module.scope.get_variable("params", "kernel")
            seen.append(kernel is context.module.nnx_module.kernel.get_value())
        return next_function(*args, **kwargs)

    with nn.intercept_methods(note), bridge.nnx_modules_as_linen():
        model.apply(variables, X)
    assert seen == [True] * 3


def test_items_of_lists_are_found_under_text_too():
    model = MIXTURES["ToLinen(nnx)"]
    variables = with_weights(model)
    template = jax.tree.map(jnp.zeros_like, variables["params"])
    data = serialization.msgpack_serialize(serialization.to_state_dict(variables["params"]))
    restored = {**variables, "params": serialization.msgpack_restore(data)}
    assert jax.tree.structure(template) != jax.tree.structure(restored["params"])
    expected, y = calls_of(model, variables)
    found, own = calls_of(model, restored)
    assert found == expected
    np.testing.assert_array_equal(own, y)


def test_the_modules_are_themselves_after_a_call_and_after_an_error():
    kept = []

    class Holds(nnx.Module):
        def __init__(self, rngs):
            self.fc = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x, fails=False):
            kept.append(self.fc)
            assert isinstance(self.fc, nnx.Linear)
            if fails:
                raise ZeroDivisionError
            return self.fc(x)

    model = bridge.to_linen(Holds)
    variables = model.init(jax.random.key(0), X)
    with bridge.nnx_modules_as_linen():
        y = model.apply(variables, X)
        with pytest.raises(ZeroDivisionError):
            model.apply(variables, X, fails=True)
    assert [type(each) for each in kept] == [nnx.Linear] * 3
    np.testing.assert_array_equal(kept[1](X), y)


def test_modules_without_pytrees_and_copies_compute_the_same():
    class NoPytree(nnx.Module, pytree=False):
        def __init__(self, rngs):
            self.fc = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.fc(x)

    class Holds(nnx.Module):
        def __init__(self, rngs):
            self.layer = NoPytree(rngs)

        def __call__(self, x):
            return nnx.remat(lambda layer, x: layer(x))(self.layer, x) + self.layer(x)

    model = bridge.to_linen(Holds)
    variables = model.init(jax.random.key(0), X)
    y = model.apply(variables, X)
    with bridge.nnx_modules_as_linen():
        assert_close(model.apply(variables, X), y)


def test_another_thread_is_not_concerned():
    model = MIXTURES["linen(nnx)"]
    variables = with_weights(model)
    found = []

    def run():
        found.append(calls_of(model, variables, shown=False)[0])

    with bridge.nnx_modules_as_linen():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(found[0]) == 3


def test_a_table_has_a_row_for_each_module():
    model = MIXTURES["linen(nnx)"]
    with bridge.nnx_modules_as_linen():
        table = model.tabulate(jax.random.key(0), X, console_kwargs={"width": 200})
    for row in ("inner/fc", "inner/layers/0", "inner/layers/1", "head"):
        assert row in table


class Drops(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5))

    def __call__(self, x, *, rngs):
        return self.layers(x, rngs=rngs)


def test_methods_keep_their_signatures_which_nnx_reads():
    model = bridge.to_linen(Drops)

    def run(variables):
        # A keyword `rngs` of the module itself goes through a function of it.
        return model.apply(
            variables, X, nnx_method=lambda module, x: module(x, rngs=nnx.Rngs(dropout=3))
        )

    variables = bridge.ToLinen.from_module(Drops(nnx.Rngs(0)))[1]
    expected = run(variables)
    assert bool((expected == 0).any())
    with bridge.nnx_modules_as_linen():
        np.testing.assert_array_equal(run(variables), expected)


def test_a_module_that_needs_an_axis_is_stored_as_its_own_class():
    class Normalized(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(4, axis_name="batch", rngs=rngs)

        def __call__(self, x):
            return self.norm(x)

    model = bridge.to_linen(Normalized)
    expected = model.init(jax.random.key(0), X)
    with bridge.nnx_modules_as_linen():
        found = model.init(jax.random.key(0), X)
    assert model.apply(found, X, nnx_method=lambda module, x: type(module.norm)) is nnx.BatchNorm
    jax.tree.map(np.testing.assert_array_equal, found["batch_stats"], expected["batch_stats"])


def test_what_cannot_be_shown_leaves_nothing_behind():
    class NeedsMore(nnx.Module):
        def __init_subclass__(cls, *, more, **options):
            super().__init_subclass__(**options)

        def __init__(self, rngs):
            self.fc = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.fc(x)

    class Holds(nnx.Module):
        def __init__(self, rngs):
            self.inner = NeedsMore(rngs)

        def __call__(self, x):
            return self.inner(x)

    model = bridge.to_linen(Holds)
    variables = model.init(jax.random.key(0), X)
    y = model.apply(variables, X)
    with bridge.nnx_modules_as_linen(), pytest.raises(TypeError, match="more"):
        model.apply(variables, X)
    np.testing.assert_array_equal(model.apply(variables, X), y)
    assert module_views._shown.get() is None


def test_a_path_that_was_told_before_stays():
    model, linen = bridge.ToNNX(LinenCore(), rngs=nnx.Rngs(0)).lazy_init(X), None
    holder = nnx.Dict(inner=model)
    bridge.set_module_paths(holder)
    linen, variables = bridge.ToLinen.from_module(holder)
    with bridge.nnx_modules_as_linen():
        _, updates = linen.apply(
            variables, X, nnx_method=lambda holder, x: holder["inner"](x), mutable=["nnx"]
        )
    assert not updates.get("nnx") or updates["nnx"] == variables["nnx"]
