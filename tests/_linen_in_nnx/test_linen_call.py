"""A call of a ToNNX changes nothing before it is committed; pure Linen is the reference."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import bridge
import registry
from bridge._linen_in_nnx.linen_call import LinenCall, function_of
from tests.drawing import drawing
from tests.models import LinenAutoencoder, assert_close, assert_identical

KEY = jax.random.key(3)
X = jnp.arange(6.0).reshape(2, 3)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(3)(x))
        return nn.Dropout(0.5, deterministic=False)(x)


def model(**options):
    return bridge.ToNNX(Net(), nnx.Rngs(0), **options).lazy_init(X)


def call(wrapper, *args, rngs=None, mutable=None, method=None, capture=False):
    return LinenCall(
        wrapper, method, args, {}, rngs=rngs, mutable=mutable, capture_intermediates=capture
    )


def test_a_call_writes_when_it_is_committed_and_not_before():
    wrapper = model()
    variables, key = wrapper.linen_variables(), jax.random.key(1)
    before = jax.tree.map(jnp.copy, nnx.state(wrapper))
    prepared = call(wrapper, X, rngs={"dropout": key}, mutable=["batch_stats"])
    y = prepared.run()
    assert_identical(nnx.state(wrapper), before)
    prepared.commit()
    expected, updates = Net().apply(variables, X, rngs={"dropout": key}, mutable=["batch_stats"])
    assert_identical(y, expected)
    assert_identical(wrapper.linen_variables(), {**variables, **updates})


def test_only_the_streams_that_linen_used_move_on():
    wrapper = model()
    counts = {name: int(s.count[...]) for name, s in wrapper.to_nnx__rngs.items()}
    prepared = call(wrapper, X, mutable=["batch_stats"], method=lambda m, x: m.make_rng("noise"))
    prepared.run()
    prepared.commit()
    after = {name: int(s.count[...]) for name, s in wrapper.to_nnx__rngs.items()}
    assert after == {**counts, "default": counts["default"] + 1}


@pytest.mark.parametrize(
    ("inputs", "options", "error"),
    [
        ((X,), {"mutable": False}, bridge.ImmutableCollectionError),
        ((jnp.ones((2, 5)),), {"mutable": True}, bridge.MismatchError),
    ],
)
def test_an_error_of_flax_becomes_one_that_says_what_to_do(inputs, options, error):
    wrapper = model()
    before = nnx.state(wrapper)
    prepared = call(wrapper, *inputs, **options)
    with pytest.raises(Exception, match=r".") as caught:
        prepared.run()
    assert not isinstance(caught.value, bridge.BridgeError)
    assert isinstance(prepared.explained(caught.value), error)
    assert_identical(nnx.state(wrapper), before)


def test_before_there_are_variables_the_error_says_how_to_create_them():
    prepared = call(bridge.ToNNX(Net(), nnx.Rngs(0)), X)
    with pytest.raises(Exception, match=r".") as caught:
        prepared.run()
    assert isinstance(prepared.explained(caught.value), bridge.NotInitializedError)


def test_an_error_of_the_model_itself_says_it_all():
    def fail(module, x):
        raise ZeroDivisionError

    prepared = call(model(), X, method=fail)
    with pytest.raises(ZeroDivisionError) as caught:
        prepared.run()
    assert prepared.explained(caught.value) is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"method": "absent"}, bridge.InvalidMethodError),
        ({"mutable": 3}, bridge.InvalidFilterError),
        ({"rngs": "dropout"}, bridge.InvalidRngsError),
    ],
)
def test_what_cannot_be_is_refused_before_linen_runs(options, error):
    with pytest.raises(error):
        call(model(), X, **options)


SUM = {"reduce_fn": lambda a, b: a + b, "init_fn": lambda: jnp.zeros(())}


class LinenAuxiliary(nn.Module):
    """Layers that sow a loss, each below what `lifts` says; with statistics of its own if asked."""

    lifts: tuple[str, ...]
    is_summed: bool
    collection: str
    has_state: bool

    @nn.compact
    def __call__(self, x):
        def body(module, x):
            x = nn.Dense(4, name="dense")(x)
            module.sow(self.collection, "loss", (x**2).mean(), **(SUM if self.is_summed else {}))
            return x

        for i, lift in enumerate(self.lifts):
            x = LinenLifted(body, lift, self.collection, name=f"layer{i}")(x)
        if self.has_state:
            x = nn.BatchNorm(use_running_average=True)(x)
        return x


class LinenLifted(nn.Module):
    body: Any
    lift: str
    collection: str

    @nn.compact
    def __call__(self, x):
        axes = {
            "variable_axes": {"params": 0, self.collection: 0},
            "split_rngs": {"params": True},
        }
        step = lambda module, x, _: (self.body(module, x), None)  # noqa: E731
        lifted = {
            "none": lambda: self.body(self, x),
            "remat": lambda: nn.remat(self.body)(self, x),
            "scan": lambda: nn.scan(step, **axes, length=2)(self, x, None)[0],
            "vmap": lambda: nn.vmap(self.body, **axes)(self, x),
        }
        return lifted[self.lift]()


@drawing(12)
@given(
    st.lists(st.sampled_from(["none", "remat", "scan", "vmap"]), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from(["losses", "sown_metrics"]),
    st.booleans(),
    st.sampled_from(["train", "call", "wrapper", "existing", "variables"]),
)
def test_each_step_gives_its_own_auxiliary_losses(lifts, is_summed, collection, has_state, how):
    module = LinenAuxiliary(tuple(lifts), is_summed, collection, has_state)
    x = jnp.ones((2, 4))
    kind = registry.variable_type_from_name(collection, create=True)
    mutable = {"wrapper": collection, "existing": "existing"}.get(how, False)
    if how == "variables":
        variables = module.init(KEY, x)
        model = bridge.ToNNX.from_variables(module, variables, mutable=mutable)
        # As with Linen's own apply, what these variables hold is added to.
        nnx.pop(model, kind)
    else:
        model = bridge.ToNNX(module, KEY, mutable=mutable).lazy_init(x)
        state = {c: tree for c, tree in module.init(KEY, x).items() if c != collection}
        assert_identical(model.linen_variables(), state)
    if how in ("train", "variables"):
        model.train()
    for _ in range(2):
        before = model.linen_variables()
        options = {"mutable": [collection]} if how == "call" else {}
        expected, sown = module.apply(before, x, mutable=[collection])
        assert_identical(model(x, **options), expected)
        assert_identical(nnx.to_pure_dict(nnx.pop(model, kind)), sown[collection])
        assert_identical(model.linen_variables(), before)


def test_variables_of_a_collection_that_is_sown_into_as_well_are_kept():
    class Both(nn.Module):
        @nn.compact
        def __call__(self, x):
            count = self.variable("stats", "count", jnp.zeros, ())
            self.sow("stats", "mean", x.mean())
            return x + count.value

    model = bridge.ToNNX(Both()).lazy_init(jnp.ones(3))
    assert_identical(model.linen_variables(), Both().init(KEY, jnp.ones(3)))


def test_variables_that_init_alone_makes_are_kept():
    class OnlyInit(nn.Module):
        @nn.compact
        def __call__(self, x):
            if self.is_initializing():
                self.variable("frozen", "scale", jnp.ones, ())
            return x * self.get_variable("frozen", "scale")

    model = bridge.ToNNX(OnlyInit()).lazy_init(jnp.ones(3))
    assert_identical(model.linen_variables(), OnlyInit().init(KEY, jnp.ones(3)))


def test_the_state_of_an_nnx_module_inside_is_not_taken_for_sown():
    class Inside(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("losses", "loss", x.mean())
            x = bridge.to_linen(nnx.BatchNorm, 4)(x)
            return bridge.to_linen(nnx.Dropout, 0.5)(x)

    x = jnp.ones((2, 4))
    model = bridge.ToNNX(Inside(), KEY).lazy_init(x)
    expected = Inside().init(KEY, x).keys() - {"losses", "nnx"}
    assert model.linen_variables().keys() == expected
    assert {"batch_stats", "RngCount", "RngKey"} < expected


def test_a_training_step_with_auxiliary_losses_has_the_gradient_of_linen():
    module = LinenAuxiliary(("scan", "remat"), True, "losses", True)
    x = jax.random.normal(KEY, (2, 4))
    model = bridge.ToNNX(module, KEY).lazy_init(x)
    model.train()
    variables = model.linen_variables()

    @nnx.jit
    def step(model, x):
        def loss(model):
            y = model(x)
            sown = nnx.pop(model, registry.auto.losses)
            return (y**2).mean() + sum(jnp.sum(each) for each in jax.tree.leaves(sown))

        return nnx.value_and_grad(loss)(model)

    def linen(params):
        y, sown = module.apply({**variables, "params": params}, x, mutable=["losses"])
        return (y**2).mean() + sum(jnp.sum(each) for each in jax.tree.leaves(sown))

    expected, gradient = jax.value_and_grad(linen)(variables["params"])
    for _ in range(2):
        found, state = step(model, x)
        assert_close(found, expected)
        assert_close(nnx.to_pure_dict(state), gradient)
    assert_identical(model.linen_variables(), variables)


class NnxAround(nnx.Module):
    def __init__(self, *, rngs):
        self.inner = bridge.ToNNX(LinenAuxiliary(("none",), True, "losses", False), rngs=rngs)

    def __call__(self, x):
        return self.inner(x)


class LinenAround(nn.Module):
    @nn.compact
    def __call__(self, x):
        return bridge.to_linen(NnxAround)(x)


@pytest.mark.parametrize("is_abstract", [False, True])
@pytest.mark.parametrize("is_deep", [False, True])
def test_a_collection_that_is_sown_into_is_known_at_any_depth(is_deep, is_abstract):
    module = LinenAround() if is_deep else LinenAuxiliary(("none",), True, "losses", False)
    x = jnp.ones((2, 4))
    model = bridge.ToNNX(module, KEY)
    model.lazy_init(jax.ShapeDtypeStruct(x.shape, x.dtype) if is_abstract else x)
    assert model.linen_variables().keys() & {"params", "losses"} == {"params"}
    model.train()
    dense = (model.ToLinen_0.inner if is_deep else model).layer0["dense"]
    expected = (nn.Dense(4).apply({"params": jax.tree.map(jnp.asarray, dense)}, x) ** 2).mean()
    for _ in range(3):
        model(x)
        sown = nnx.to_pure_dict(nnx.pop(model, registry.auto.losses))
        assert_identical(jax.tree.leaves(sown), [expected])


MODULE = LinenAutoencoder(features=7)


def scaled(module, x):
    return module.features * x


@pytest.mark.parametrize("method", ["encode", LinenAutoencoder.encode, MODULE.encode])
def test_a_method_is_meant_by_its_name_by_its_function_and_bound(method):
    assert function_of(MODULE, method).__name__ == "encode"


def test_without_a_method_the_call_is_meant():
    assert function_of(MODULE, None).__name__ == "__call__"


def test_any_function_of_a_module_will_do():
    assert function_of(MODULE, scaled)(MODULE, 2) == 14


@pytest.mark.parametrize("method", ["encod", "features", "missing", 3])
def test_what_is_no_method_is_an_error_that_lists_those_that_are(method):
    with pytest.raises(bridge.InvalidMethodError) as caught:
        function_of(MODULE, method)
    for name in ("__call__", "decode", "encode"):
        assert name in str(caught.value)
    # Neither what every Linen module has nor fields are offered.
    assert "apply" not in str(caught.value)
