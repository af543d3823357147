"""A check takes every kind of model, leaves it alone, and reports all that it compared."""

import copy
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx

import bridge
from bridge import parity
from bridge.parity import _sections
from bridge.parity._models import TRAINING_MODES, Request, model_of
from bridge.parity._programs import ModelProgram
from tests.parity.parity_models import (
    WIDTH,
    X,
    linen_net,
    nnx_net,
)
from tests.strategies import exact


@pytest.fixture(scope="module")
def linen():
    return linen_net()


@pytest.fixture
def native(linen):
    return nnx_net(linen[1])


def snapshot(model):
    """Everything a check could change, bit by bit."""
    if isinstance(model, tuple):
        return exact(model[1])
    attributes = {
        (path, name): id(value)
        for path, module in nnx.iter_modules(model)
        for name, value in vars(module).items()
    }
    return exact(nnx.state(model)), attributes


def test_neither_model_is_changed(linen, native):
    wrapped = bridge.ToNNX.from_variables(*linen, rngs=nnx.Rngs(dropout=3))
    models = [linen, native, wrapped]
    before = [snapshot(model) for model in models]
    keys = {"dropout": jax.random.key(0)}

    for model in models[1:]:
        parity.check(linen, model, X, train=True, rngs=keys)

    assert [snapshot(model) for model in models] == before


def test_neither_model_is_changed_when_a_check_raises(linen, native):
    wrapped = bridge.ToNNX.from_variables(*linen)
    before = [snapshot(model) for model in (linen, native, wrapped)]

    def loss(output):
        raise ZeroDivisionError

    for b in (native, wrapped):
        with pytest.raises(ZeroDivisionError):
            parity.check(linen, b, X, train=False, options=parity.Options(loss=loss))
        with pytest.raises(TypeError):
            parity.check(linen, b)

    assert [snapshot(model) for model in (linen, native, wrapped)] == before


@pytest.mark.parametrize(
    "given",
    [nn.Dense(3), (nn.Dense(3),), nnx.Linear, nn.Dense, jnp.ones(3), ({"params": {}}, nn.Dense(3))],
    ids=["module alone", "1-tuple", "nnx class", "linen class", "array", "swapped"],
)
@pytest.mark.parametrize("argument", ["a", "b"])
def test_what_is_no_model_is_refused_with_the_argument_and_the_remedy(given, argument):
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    pair = (given, model) if argument == "a" else (model, given)

    remedy = "give a Linen module with its variables, .*, or an instance of an NNX class"
    with pytest.raises(bridge.InvalidModuleError, match=remedy) as raised:
        parity.check(*pair, X)

    assert f"argument {argument}" in str(raised.value)


def test_variables_that_are_none_are_refused():
    with pytest.raises(bridge.ConversionError, match=r"argument a.*found list"):
        parity.check((nn.Dense(3), [1]), nnx.Linear(3, 3, rngs=nnx.Rngs(0)), X)


def test_a_wrapper_without_variables_is_refused(linen):
    with pytest.raises(bridge.NotInitializedError, match="lazy_init"):
        parity.check(bridge.ToNNX(linen[0]), bridge.ToNNX(linen[0]), X)


def test_rngs_that_are_no_dict_are_refused(linen, native):
    with pytest.raises(bridge.InvalidRngsError, match=r"parity\.check"):
        parity.check(linen, native, X, rngs=jax.random.key(0))


def test_both_models_run_as_in_evaluation_by_default(linen):
    module, variables = linen
    evaluated = module.apply(variables, X, train=False)

    report = parity.check(
        linen, nnx_net(variables), X, options=parity.Options(tolerances={"float32": 0.0})
    )
    doubled = nnx_net(variables)
    doubled.last.bias[...] += evaluated[0]
    found = parity.check(linen, doubled, X).section("outputs").worst

    # Neither the training statistics nor a mask: else there would be rounding at the least.
    assert report.section("outputs").worst.verdict == "bitwise"
    np.testing.assert_allclose(float(found.values[0]), evaluated[found.index], rtol=1e-5)


def test_an_argument_wins_over_the_mode(linen):
    module, variables = linen
    wrapped = bridge.ToNNX.from_variables(module, variables)
    keys = {"dropout": jax.random.key(0)}

    masked = parity.check(linen, wrapped, X, kwargs={"train": True}, rngs=keys)
    one_side = parity.check(
        linen, wrapped, X, rngs=keys, options=parity.Options(a_kwargs={"train": True})
    )

    assert masked.ok
    assert not one_side.section("outputs").ok
    trained, _ = module.apply(variables, X, train=True, rngs=keys, mutable=["batch_stats"])
    index = one_side.section("outputs").worst.index
    value = float(one_side.section("outputs").worst.values[0])
    np.testing.assert_allclose(value, trained[index], rtol=1e-5)


def test_an_argument_for_one_side_goes_with_the_mode_of_the_other(linen, native):
    # The Linen model takes an argument where the NNX model has an attribute.
    assert parity.check(linen, native, X, options=parity.Options(a_kwargs={"train": False})).ok


def test_a_wrapper_and_what_it_wraps_draw_the_same_mask_in_training(linen):
    wrapped = bridge.ToNNX.from_variables(*linen)
    keys = {"dropout": jax.random.key(5)}

    report = parity.check(linen, wrapped, X, train=True, rngs=keys, options=parity.Options(steps=1))

    assert report.ok
    assert {c.verdict for s in report.sections for c in s.compared} == {"bitwise"}


class Mixed(nn.Module):
    """Linen around NNX layers that have modes."""

    @nn.compact
    def __call__(self, x):
        x = bridge.to_linen(nnx.BatchNorm, WIDTH, name="norm")(x)
        return bridge.to_linen(nnx.Dropout, 0.5, name="dropout")(x)


class MixedNNX(nnx.Module):
    """`Mixed` in NNX."""

    def __init__(self, *, rngs):
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(x))


def test_modes_reach_nnx_modules_that_are_within_linen_ones():
    module = Mixed()
    variables = module.init(jax.random.key(0), X)
    native = MixedNNX(rngs=nnx.Rngs(0))
    wrapped = bridge.ToNNX.from_variables(module, variables)
    expected = nnx.clone(native)
    expected.eval()

    for model in (native, wrapped, bridge.ToLinen.from_module(native)):
        report = parity.check((module, variables), model, X)
        assert report.ok
        assert len(report.section("state").compared) == 2
    shifted = MixedNNX(rngs=nnx.Rngs(0))
    shifted.norm.bias[...] += 1.0
    found = parity.check((module, variables), shifted, X).section("outputs").worst
    np.testing.assert_allclose(float(found.values[0]), expected(X)[found.index], rtol=1e-5)


def test_a_method_of_a_wrapped_nnx_module_is_called_by_name():
    class WithMethod(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(0))

        def encode(self, x, *, scale=1.0):
            return scale * self.dense(x)

    model = WithMethod()

    report = parity.check(
        model, bridge.ToLinen.from_module(model), X, method="encode", kwargs={"scale": 2.0}
    )

    assert report.ok
    assert [c.place for c in report.section("layers").compared] == [
        "dense",
        "the model itself.encode",
    ]


def test_state_that_needs_a_key_is_said_to_be_left_out():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            x = nn.BatchNorm(use_running_average=not train)(x)
            return nn.Dropout(0.5)(x, deterministic=not train)

    module = Noisy()
    variables = module.init(jax.random.key(0), X)

    report = parity.check((module, variables), (module, variables), X)

    assert report.ok
    assert report.section("state").compared == ()
    assert "not compared, Noisy needs a key" in report.section("state").note


def test_methods_are_called_by_name_or_as_functions():
    class Linen(nn.Module):
        def setup(self):
            self.encoder, self.decoder = nn.Dense(2), nn.Dense(3)

        def __call__(self, x):
            return self.decoder(self.encoder(x))

        def encode(self, x, *, scale):
            return scale * self.encoder(x)

    module = Linen()
    variables = module.init(jax.random.key(0), X)
    wrapped = bridge.ToNNX.from_variables(module, variables)
    bias = wrapped.decoder["bias"]
    bias[...] = bias[...] + 1.0

    for method in ("encode", lambda m, x, scale: m.encode(x, scale=scale)):
        report = parity.check((module, variables), wrapped, X, method=method, kwargs={"scale": 2.0})
        # The layer at fault is not called.
        assert [s.name for s in report.sections if not s.ok] == ["weights"]
        assert report.section("outputs").compared[0].shapes == ((3, 2), (3, 2))


def test_gradients_are_those_of_the_loss():
    model = nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(0))
    other = nnx.clone(model)
    other.kernel[...] *= 2

    report = parity.check(model, other, X, options=parity.Options(loss=lambda y: (y**2).sum()))

    # By hand: d/db of sum(y ** 2).
    y = np.asarray(X) @ np.asarray(model.kernel[...]) + np.asarray(model.bias[...])
    expected = 2 * y.sum(axis=0)
    [found] = [c for c in report.section("gradients").compared if c.place == "params/bias"]
    np.testing.assert_allclose(float(found.values[0]), expected[found.index], rtol=1e-5)


def test_the_default_loss_tells_apart_what_a_sum_does_not():
    class Pair(nnx.Module):
        def __init__(self, sign):
            self.w = nnx.Param(jnp.ones((WIDTH,)))
            self.sign = sign

        def __call__(self, x):
            # The sum of a softmax is always 1, so its gradient is 0 either way.
            y = jax.nn.softmax(self.w[...])
            return y + self.sign * (y - jax.lax.stop_gradient(y))

    report = parity.check(Pair(1.0), Pair(-1.0), X)

    assert report.section("outputs").ok
    assert not report.section("gradients").ok
    by_sum = parity.check(Pair(1.0), Pair(-1.0), X, options=parity.Options(loss=jnp.sum))
    assert by_sum.section("gradients").worst.max_abs < 1e-6


def test_steps_are_those_of_optax():
    model = nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(0))
    other = nnx.clone(model)
    other.bias[...] += 1.0
    optimizer = optax.sgd(1e-1)

    def loss(y):
        return (y**2).mean()

    report = parity.check(
        model, other, X, options=parity.Options(loss=loss, steps=3, optimizer=optimizer)
    )

    params = {"kernel": model.kernel[...], "bias": model.bias[...]}
    state = optimizer.init(params)
    grads = jax.grad(lambda p: loss(jnp.dot(X, p["kernel"]) + p["bias"][None]))(params)
    updates, _ = optimizer.update(grads, state, params)
    expected = optax.apply_updates(params, updates)["bias"]
    assert report.section("steps").note == "step 1 of 3 is the first to differ"
    [found] = [c for c in report.section("steps").compared if c.place == "params/bias"]
    np.testing.assert_allclose(float(found.values[0]), expected[found.index], rtol=1e-5)


def test_a_difference_that_only_a_later_step_shows_tells_its_step():
    class Late(nnx.Module):
        def __init__(self, bound):
            self.w = nnx.Param(jnp.zeros(()))
            self.bound = bound

        def __call__(self, x):
            return jnp.minimum(self.w[...], self.bound)

    report = parity.check(
        Late(1.0),
        Late(2.5),
        X,
        options=parity.Options(loss=lambda y: -y, steps=5, optimizer=optax.sgd(0.7)),
    )

    # 0.7, 1.4, and then only the second one still has a gradient.
    assert report.section("steps").note == "step 3 of 5 is the first to differ"


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_training_steps_carry_the_running_statistics_along(linen, native, kind):
    module, variables = linen
    keys = {"dropout": jax.random.key(0)}
    model = model_of(linen if kind == "linen" else native, "a")
    request = Request((X,), {}, None, keys, TRAINING_MODES)
    wanted = {"gradients", "after"}
    program = ModelProgram(model, request, TRAINING_MODES, _sections.projection, wanted)
    still = _sections.training(program, optax.sgd(0.0))

    next(still)
    after = next(still)

    # By hand: with parameters that stay, each step mixes in the same batch's mean.
    expected = variables
    for _ in range(2):
        _, updates = module.apply(expected, X, train=True, rngs=keys, mutable=["batch_stats"])
        expected = {**variables, **updates}
    np.testing.assert_array_equal(
        {path[-1]: v for (c, path), v in after.items() if c == "batch_stats"}["mean"],
        expected["batch_stats"]["norm"]["mean"],
    )


def test_compiled_checks_agree_too(linen, native):
    report = parity.check(linen, native, X, options=parity.Options(jit=True, steps=1))

    assert report.ok


def test_a_report_is_a_table_that_reads_well_in_a_pipe(linen, native):
    native.first.kernel[...] = native.first.kernel[...].T

    text = str(parity.check(linen, native, X, options=parity.Options(steps=1)))

    assert "a = LinenNet and b = NNXNet: they DIFFER" in text
    assert "first layer that diverges: first (Dense -> Linear)" in text
    assert "inputs: bitwise equal" in text
    assert "| params/first/kernel" in text
    assert "\x1b" not in text
    assert text.isascii() or set(filter(lambda c: not c.isascii(), text)) <= {"…"}
    assert max(map(len, text.splitlines())) <= 100


def test_a_report_is_json_with_null_for_what_is_not_finite(linen, native):
    native.first.bias[...] = jnp.full(WIDTH, jnp.inf)

    report = parity.check(linen, native, X)
    document = json.loads(report.to_json(), parse_constant=pytest.fail)

    assert document["ok"] is False
    assert [s["name"] for s in document["sections"]] == [s.name for s in report.sections]
    assert document["first_divergence"]["path"] == ["first"]
    assert document["first_divergence"]["output"]["max_abs"] is None
    [weights] = [s for s in document["sections"] if s["name"] == "weights"]
    assert [c["place"] for c in weights["compared"] if c["verdict"] == "differs"] == [
        "params/first/bias"
    ]


def test_assert_same_returns_the_report_or_raises_it(linen, native):
    assert parity.assert_same(linen, native, X).ok
    native.last.bias[...] += 1.0

    with pytest.raises(AssertionError, match="first layer that diverges: last") as raised:
        parity.assert_same(linen, native, X)

    assert isinstance(raised.value, bridge.BridgeError)
    assert raised.value.report.first_divergence.path == ("last",)
    for again in (pickle.loads(pickle.dumps(raised.value)), copy.copy(raised.value)):
        assert type(again) is parity.ParityError
        assert str(again) == str(raised.value)
        assert again.report == raised.value.report


def test_sections_are_found_by_name(linen, native):
    report = parity.check(linen, native, X, sections=["weights", "outputs"])

    assert report.section("outputs").name == "outputs"
    assert {s.name for s in report.sections}.isdisjoint({"layers", "gradients", "steps"})
    with pytest.raises(KeyError):
        report.section("layers")


def test_outputs_of_any_structure_are_compared_leaf_by_leaf():
    class Many(nnx.Module):
        def __init__(self, extra=False, key=0):
            self.extra, self.key = extra, key

        def __call__(self, x):
            out = {"x": (x, None), "n": 3, "key": jax.random.key(self.key)}
            return {**out, "more": x[0]} if self.extra else out

    assert parity.check(Many(), Many(), X).ok
    [other_key] = parity.check(Many(), Many(key=1), X).section("outputs").differing
    [more] = parity.check(Many(), Many(extra=True), X).section("outputs").differing

    assert other_key.place == "output['key']"
    assert (more.place, more.note) == ("output['more']", "only in b")


def test_sharded_weights_are_compared_as_a_whole():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    module = nn.Dense(8)
    variables = module.init(jax.random.key(0), X)
    kernel = jax.device_put(
        variables["params"]["kernel"],
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data")),
    )
    sharded = {"params": {**variables["params"], "kernel": kernel}}
    wrong = {"params": {**variables["params"], "kernel": kernel.at[2, 5].add(1.0)}}
    assert len(kernel.addressable_shards) == 8

    assert parity.check(
        (module, variables),
        (module, sharded),
        X,
        sections=["weights", "outputs"],
    ).ok
    report = parity.check((module, variables), (module, wrong), X, gradients=False)
    [weight] = report.section("weights").differing
    assert weight.index == (2, 5)
    assert report.first_divergence.path == ()


def test_a_model_in_tree_mode_is_checked_as_in_graph_mode(linen):
    with nnx.set_graph_mode(False):
        native = nnx_net(linen[1])
        report = parity.check(linen, native, X, options=parity.Options(steps=1))

    assert report.ok


def test_sown_values_and_keys_are_no_part_of_the_comparison():
    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(WIDTH, name="dense")(x)
            self.sow("intermediates", "seen", x)
            return x

    class SowingNNX(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=1))

        def __call__(self, x):
            x = self.dense(x)
            self.sow(nnx.Intermediate, "seen", x)
            return self.dropout(x)

    module, model = Sowing(), SowingNNX()
    variables = {
        "params": {"dense": {"kernel": model.dense.kernel[...], "bias": model.dense.bias[...]}}
    }

    report = parity.check((module, variables), model, X, options=parity.Options(steps=1))

    assert report.ok
    assert {c.place for c in report.section("weights").compared} == {
        "params/dense/kernel",
        "params/dense/bias",
    }


def test_a_model_that_fails_raises_its_own_error(linen, native):
    with pytest.raises(flax_errors.ScopeParamShapeError):
        parity.check(linen, native, X[:, :2])


def test_a_model_may_iterate_over_layers_in_an_nnx_dict():
    class InDict(nn.Module):
        def setup(self):
            self.layers = {name: nn.Dense(WIDTH) for name in ("first", "second")}

        def __call__(self, x):
            for layer in self.layers.values():
                x = layer(x)
            return x

    class InNNXDict(nnx.Module):
        def __init__(self, params):
            self.layers = nnx.Dict()
            for name in ("first", "second"):
                layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
                layer.kernel[...] = params[f"layers_{name}"]["kernel"]
                self.layers[name] = layer

        def __call__(self, x):
            assert list(self.layers) == ["first", "second"]
            for layer in self.layers.values():
                x = layer(x)
            return x

    module = InDict()
    variables = module.init(jax.random.key(0), X)

    assert parity.check((module, variables), InNNXDict(variables["params"]), X).ok
    wrong = InNNXDict(variables["params"])
    wrong.layers["second"].bias[...] += 1.0
    report = parity.check((module, variables), wrong, X, gradients=False)
    assert report.first_divergence.path == ("layers_second",)
