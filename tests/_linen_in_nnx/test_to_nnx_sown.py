"""ToNNX: sow, nnx.capture, nnx.pop, perturb and capture_intermediates."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import freeze

import bridge
from tests import models
from tests.models import assert_close, assert_identical, snapshot

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
KEY = jax.random.key(7)


def wrapped(module, *args, **options):
    return bridge.ToNNX(module, KEY, **options).lazy_init(*args)


def linen_sown(module, variables, *args, calls=1, collection="intermediates", **options):
    """What pure Linen sows in some calls that thread the collection."""
    sown = {}
    for _ in range(calls):
        output, updates = module.apply(
            {**variables, **sown}, *args, mutable=[collection], **options
        )
        sown = {collection: updates[collection]}
    return output, sown[collection]


def plain(tree):
    """Nested dicts of values from nested mappings of Variables."""
    if isinstance(tree, nnx.Variable):
        return tree.get_value()
    if hasattr(tree, "items"):
        return {key: plain(value) for key, value in tree.items()}
    return tree


def test_nothing_is_sown_by_default():
    module = models.LinenSows()
    model = wrapped(module, X)
    before = snapshot(model)
    assert_identical(model(X), module.apply(model.linen_variables(), X))
    assert snapshot(model) == before
    model.train()
    model(X)
    model.eval()
    assert not nnx.state(model, nnx.Intermediate)


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_sown_values_are_appended_to_the_intermediate_at_their_path(calls):
    module = models.LinenSows()
    model = wrapped(module, X)
    variables = model.linen_variables()
    for _ in range(calls):
        output = model(X, mutable=["intermediates"])
    expected, sown = linen_sown(module, variables, X, calls=calls)
    assert_identical(output, expected)
    assert type(model.sum) is nnx.Intermediate
    assert isinstance(model.sum.get_value(), tuple)
    assert len(model.sum.get_value()) == 2 * calls
    assert_identical(plain(nnx.state(model, nnx.Intermediate)), sown)
    assert_identical(model.linen_variables(), {**variables, "intermediates": sown})
    # A view: reading it does not change the variable's identity.
    variable = model.LinenInnerSows_0["out"]
    model(X, mutable=["intermediates"])
    assert model.LinenInnerSows_0["out"] is variable


def test_sow_in_a_wrapped_module_is_as_native_sow():
    class Native(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x)
            return x

    def call(module, x):
        module.sow("intermediates", "seen", x)
        return x

    native = Native()
    linen = wrapped(models.LinenApplies(call), X, mutable=["intermediates"])
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match="sow"):
            native(X)
        linen(X)
    assert type(linen.seen) is type(native.seen)
    assert_identical(linen.seen.get_value(), native.seen.get_value())
    assert_identical(nnx.pop(linen, nnx.Intermediate), nnx.pop(native, nnx.Intermediate))
    assert not hasattr(linen, "seen")


@pytest.mark.parametrize("transform", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_pop_empties_what_was_sown_and_the_state_does_not_grow(transform):
    module = models.LinenSows()
    model = wrapped(module, X)
    variables = model.linen_variables()
    structure = jax.tree.structure(nnx.state(model))
    _, expected = linen_sown(module, variables, X)
    traces = []

    def step(model, x):
        traces.append(1)
        model(x, mutable=["intermediates"])
        return nnx.pop(model, nnx.Intermediate)

    step = transform(step)
    for _ in range(3):
        sown = step(model, X)
        assert jax.tree.structure(nnx.state(model)) == structure
    assert_close(plain(sown), expected)
    assert len(traces) == (3 if transform is not nnx.jit else 1)


def test_pop_after_a_call_leaves_the_model_usable_by_linen():
    module = models.LinenSows()
    model = wrapped(module, X, mutable=["intermediates"])
    for _ in range(2):
        model(X)
        nnx.pop(model, nnx.Intermediate)
    assert "intermediates" not in model.linen_variables()
    assert_identical(model(X), module.apply(model.linen_variables(), X, mutable=False))


@pytest.mark.parametrize("frozen", [False, True])
def test_sown_values_that_came_with_the_variables_are_appended_to(frozen):
    module = models.LinenSows()
    variables = module.init(KEY, X)
    _, sown = linen_sown(module, variables, X)
    given = {**variables, "intermediates": sown}
    model = bridge.ToNNX.from_variables(module, freeze(given) if frozen else given)
    model(X, mutable=["intermediates"])
    _, expected = linen_sown(module, variables, X, calls=2)
    assert_identical(model.linen_variables()["intermediates"], expected)


def test_a_reduce_function_other_than_append_is_followed():
    def call(module, x):
        module.sow(
            "intermediates", "n", 1, reduce_fn=lambda a, b: a + b, init_fn=lambda: jnp.int32(0)
        )
        return x

    module = models.LinenApplies(call)
    model = wrapped(module, X, mutable=["intermediates"])
    for n in (1, 2, 3):
        model(X)
        assert int(model.n.get_value()) == n


def test_capture_collects_and_leaves_the_model_as_it_was():
    """Defect 12: nnx.capture raised."""
    module = models.LinenSows()
    model = wrapped(module, X)
    before = snapshot(model)
    output, captured = nnx.capture(model, nnx.Intermediate)(X)
    expected, sown = linen_sown(module, model.linen_variables(), X)
    assert_identical(output, expected)
    assert_identical(plain(captured), sown)
    assert snapshot(model) == before
    again = nnx.capture(model, nnx.Intermediate)(X)[1]
    assert_identical(plain(again), sown)


class Tree(nnx.Module):
    """Native modules and wrappers that all sow."""

    def __init__(self, rngs):
        self.native = nnx.Linear(4, 4, rngs=rngs)
        self.linen = bridge.ToNNX(models.LinenSows(), KEY)
        self.silent = bridge.ToNNX(nn.Dense(2), KEY)

    def prepare(self, x):
        self.silent(self.linen(x))

    def __call__(self, x):
        x = self.native(x)
        self.sow(nnx.Intermediate, "seen", x)
        return self.silent(self.linen(x))

    def twice(self, x):
        return self(x), self(x)


def test_capture_works_on_a_tree_that_holds_wrappers():
    """Defect 22: nnx.capture failed."""
    model = bridge.lazy_init(Tree(nnx.Rngs(0)).prepare, X).__self__
    before = snapshot(model)
    output, captured = nnx.capture(model, nnx.Intermediate)(X)
    inner = model.native(X)
    _, sown = linen_sown(models.LinenSows(), model.linen.linen_variables(), inner)
    assert_identical(plain(captured), {"seen": (inner,), "linen": sown})
    assert output.shape == (2, 2)
    assert snapshot(model) == before


def test_capture_of_a_method_that_calls_twice_collects_both():
    model = bridge.lazy_init(Tree(nnx.Rngs(0)).prepare, X).__self__
    _, captured = nnx.capture(model.twice, nnx.Intermediate)(X)
    inner = model.native(X)
    variables = model.linen.linen_variables()
    _, sown = linen_sown(models.LinenSows(), variables, inner, calls=2)
    assert_identical(plain(captured)["linen"], sown)
    assert len(plain(captured)["seen"]) == 2


def test_capture_of_a_wrapper_method():
    module = models.LinenAutoencoder()
    model = wrapped(module, X)
    _, captured = nnx.capture(model.encode, nnx.Intermediate)(X)
    assert plain(captured) == {}

    class Sowing(nn.Module):
        @nn.compact
        def encode(self, x):
            self.sow("intermediates", "x", x)
            return x

    model = bridge.ToNNX(Sowing())
    output, captured = nnx.capture(model.encode, nnx.Intermediate)(X)
    assert_identical((output, plain(captured)), (X, {"x": (X,)}))


def test_capture_under_jit_and_grad():
    model = wrapped(models.LinenSows(), X)
    _, expected = linen_sown(models.LinenSows(), model.linen_variables(), X)

    @nnx.jit
    def step(model, x):
        def loss(model):
            output, captured = nnx.capture(model, nnx.Intermediate)(x)
            return output.sum(), captured

        return nnx.grad(loss, has_aux=True)(model)

    before = jax.tree.structure(nnx.state(model))
    for _ in range(2):
        _, captured = step(model, X)
        assert_close(plain(captured), expected)
    assert jax.tree.structure(nnx.state(model)) == before


def test_a_capture_that_fails_leaves_the_model_as_it_was():
    def call(module, x, fail=False):
        module.sow("intermediates", "x", x)
        if fail:
            raise ZeroDivisionError
        return x

    model = wrapped(models.LinenApplies(call), X)
    before = variables_of(model)
    with pytest.raises(ZeroDivisionError):
        nnx.capture(model, nnx.Intermediate)(X, True)
    assert variables_of(model) == before
    assert_identical(model(X), X)
    assert variables_of(model) == before


def variables_of(model):
    """What `snapshot` says without what `nnx.capture` itself leaves on a module after an error."""
    return {p: s for p, s in snapshot(model).items() if p and p[0] != "__captures__"}


def test_capture_of_a_collection_of_ones_own():
    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("metrics", "loss", x.sum())
            self.sow("intermediates", "x", x)
            return nn.Dense(2)(x)

    module = Sowing()
    model = wrapped(module, X)
    model.lazy_init(X)
    metrics = bridge.linen_to_nnx({"metrics": {"a": jnp.ones(())}})["a"].var_type
    _, captured = nnx.capture(model, metrics)(X)
    assert_identical(plain(captured), {"loss": (X.sum(),)})


def test_perturbations_are_variables_as_in_linen():
    module = models.LinenPerturbs()
    model = wrapped(module, X)
    variables = module.init(KEY, X)
    assert_identical(model.linen_variables(), variables)
    assert type(model.after_dense) is nnx.Perturbation

    def linen_loss(perturbations):
        return module.apply({**variables, "perturbations": perturbations}, X)

    expected = jax.grad(linen_loss)(variables["perturbations"])
    grads = nnx.grad(lambda m: m(X), argnums=nnx.DiffState(0, nnx.Perturbation))(model)
    assert_identical(plain(grads), expected)


def test_perturbation_gradients_are_captured_as_for_native_modules():
    module = models.LinenPerturbs()
    variables = module.init(KEY, X)
    model = bridge.ToNNX.from_variables(module, {"params": variables["params"]})
    before = snapshot(model)
    _, perturbations = nnx.capture(model, nnx.Perturbation)(X)
    assert_identical(plain(perturbations), variables["perturbations"])
    assert snapshot(model) == before

    def loss(model, perturbations):
        return nnx.capture(model, init=perturbations)(X)

    expected = jax.grad(lambda p: module.apply({**variables, "perturbations": p}, X))(
        variables["perturbations"]
    )
    grads = nnx.grad(loss, argnums=1)(model, perturbations)
    assert_identical(plain(grads), expected)


@pytest.mark.parametrize("which", [True, lambda m, name: isinstance(m, nn.Dense)], ids=["all", "f"])
def test_capture_intermediates_keeps_what_linen_keeps(which):
    module = models.LinenMLP()
    model = wrapped(module, X)
    variables = model.linen_variables()
    expected, updates = module.apply(
        variables, X, capture_intermediates=which, mutable=["intermediates"]
    )
    assert_identical(model(X, capture_intermediates=which), expected)
    assert_identical(model.linen_variables(), {**variables, **updates})
    nnx.pop(model, nnx.Intermediate)
    assert_identical(model.linen_variables(), variables)


def test_a_write_of_another_collection_still_raises_inside_capture():
    model = wrapped(models.LinenWriter(), X)
    before = variables_of(model)
    with pytest.raises(bridge.ImmutableCollectionError, match="'counter'"):
        nnx.capture(model, nnx.Intermediate)(X)
    assert variables_of(model) == before
    with pytest.raises(bridge.ImmutableCollectionError):
        model(X)


def test_updates_and_captures_of_one_call_both_arrive():
    module = models.LinenCounter()
    model = wrapped(module, X, mutable=["counter"])
    _, captured = nnx.capture(model, nnx.Intermediate)(X)
    assert_identical(plain(captured), {"seen": (X.sum(),)})
    assert int(model.count.get_value()) == 1
    assert not hasattr(model, "seen")
