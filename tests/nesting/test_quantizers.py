"""Quantization and LoRA by qwix, whose rules match module paths, on every mixture of modules.

Each mixture has the modules of the pure Linen model at the same paths, and the same weights: what
qwix makes of it has to be what it makes of the pure model.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

import bridge
from tests.models import assert_close

# qwix sets `variable.value`.
pytestmark = pytest.mark.filterwarnings("ignore:'.value' setter:DeprecationWarning")
X = jnp.asarray(np.random.RandomState(0).randn(7, 5), jnp.float32)
# What is quantized lies two modules below the outermost one.
INSIDE = "inner/core/.*"


class LinenCore(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(6, name="fc2")(nn.relu(nn.Dense(8, name="fc1")(x)))


class LinenInner(nn.Module):
    core: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="proj")(self.core(x))


class LinenTop(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="out")(self.inner(x))


class Core(nnx.Module):
    def __init__(self, rngs):
        self.fc1 = nnx.Linear(5, 8, rngs=rngs)
        self.fc2 = nnx.Linear(8, 6, rngs=rngs)

    def __call__(self, x):
        return self.fc2(jax.nn.relu(self.fc1(x)))


class Inner(nnx.Module):
    def __init__(self, core, rngs):
        self.core = core(rngs)
        self.proj = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        return self.proj(self.core(x))


class Top(nnx.Module):
    def __init__(self, inner, rngs):
        self.inner = inner(rngs)
        self.out = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.inner(x))


def in_nnx(module):
    return lambda rngs: bridge.ToNNX(module, rngs=rngs)


def nnx_inner(rngs):
    return Inner(Core, rngs)


def nnx_inner_of_linen(rngs):
    return Inner(in_nnx(LinenCore()), rngs)


def linen_inner():
    return LinenInner(LinenCore())


def linen_inner_of_nnx():
    return LinenInner(bridge.to_linen(Core))


PURE = LinenTop(linen_inner())
LINEN = {
    "linen(nnx)": lambda: LinenTop(bridge.to_linen(Inner, Core)),
    "linen(nnx(linen))": lambda: LinenTop(bridge.to_linen(Inner, in_nnx(LinenCore()))),
    "ToLinen(nnx)": lambda: bridge.to_linen(Top, nnx_inner),
    "ToLinen(nnx(linen))": lambda: bridge.to_linen(Top, in_nnx(linen_inner())),
}
NNX = {
    "nnx": lambda rngs: Top(nnx_inner, rngs),
    "nnx(linen)": lambda rngs: Top(in_nnx(linen_inner()), rngs),
    "nnx(linen(nnx))": lambda rngs: Top(in_nnx(linen_inner_of_nnx()), rngs),
    "nnx(nnx(linen))": lambda rngs: Top(nnx_inner_of_linen, rngs),
    "ToNNX(linen)": in_nnx(PURE),
    "ToNNX(linen(nnx))": in_nnx(LinenTop(linen_inner_of_nnx())),
}


@functools.cache
def pure_params():
    """The weights that all models have; not made where these tests are only collected."""
    return PURE.init(jax.random.key(0), X)["params"]


def rule(**options):
    return [qwix.QuantizationRule(module_path=INSIDE, weight_qtype=jnp.int8, **options)]


def lora(**options):
    return qwix.LoraProvider(
        module_path=INSIDE,
        rank=2,
        alpha=4.0,
        lora_a_initializer=nn.initializers.constant(0.25),
        lora_b_initializer=nn.initializers.constant(0.5),
        **options,
    )


PROVIDERS = {
    "weight-only PTQ": lambda: qwix.PtqProvider(rule()),
    "w8a8 PTQ": lambda: qwix.PtqProvider(rule(act_qtype=jnp.int8)),
    "dynamic QAT": lambda: qwix.QtProvider(rule(act_qtype=jnp.int8)),
    "static QAT": lambda: qwix.QtProvider(rule(act_qtype=jnp.int8, act_static_scale=True)),
    "LoRA": lora,
    "QLoRA": lambda: lora(weight_qtype=jnp.int8),
}


def leaves_of(tree):
    """Leaves by their path in the model, without what says how one side holds them."""
    found = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        names = [str(getattr(k, "key", getattr(k, "name", k))) for k in keys]
        path = [n for n in names if n not in ("params", "quant_stats", "array", "value", ".value")]
        found["/".join(path)] = np.asarray(leaf)
    return found


def linen_result(model, provider):
    """Outputs of two calls, of which the first may update statistics, and the leaves."""
    quantized = qwix.quantize_model(model, provider)
    created = quantized.init(jax.random.key(0), X)
    # As a checkpoint of the float model is quantized.
    weights = flatten_dict(qwix.quantize_params(pure_params(), created["params"]))
    params = unflatten_dict({**flatten_dict(created["params"]), **weights})
    variables = {**created, "params": params}
    first, updates = quantized.apply(variables, X, mutable=["quant_stats"])
    variables = {**variables, **updates}
    kept = {name: tree for name, tree in variables.items() if name in ("params", "quant_stats")}
    return first, quantized.apply(variables, X), leaves_of(kept)


def nnx_result(make, provider):
    """The same of an NNX model."""
    model = bridge.lazy_init(make(nnx.Rngs(0)), X)
    nnx.update(model, jax.tree.map(jnp.copy, pure_params()))
    bridge.set_module_paths(model)
    is_lora = isinstance(provider, qwix.LoraProvider)
    streams = {"rngs": nnx.Rngs(5)} if is_lora else {}
    with bridge.creating_variables():
        quantized = qwix.quantize_model(model, provider, X, **streams)
    quantized.train()
    first = quantized(X)
    quantized.eval()
    quantized.set_attributes(disable_quant_stats_update=True, raise_if_not_found=False)
    state = nnx.state(quantized, nnx.Not(nnx.RngState))
    return first, quantized(X), leaves_of(nnx.to_pure_dict(state))


@pytest.fixture(scope="module", params=PROVIDERS)
def provider(request):
    """A provider's constructor, and what it makes of the pure Linen model."""
    make = PROVIDERS[request.param]
    return make, linen_result(PURE, make())


def check(result, expected, provider):
    first, second, leaves = result
    assert leaves.keys() == expected[2].keys()
    for path, leaf in expected[2].items():
        # A quantized value is a rounded one: it is the same, or the rule was another.
        np.testing.assert_allclose(leaves[path], leaf, rtol=1e-6, err_msg=path)
    assert_close(first, expected[0])
    assert_close(second, expected[1])
    assert not provider.get_unused_rules()


@pytest.mark.parametrize("mixture", LINEN)
def test_a_linen_model_is_quantized_as_the_pure_one(mixture, provider):
    make, expected = provider
    made = make()
    with bridge.nnx_modules_as_linen():
        check(linen_result(LINEN[mixture](), made), expected, made)


@pytest.mark.parametrize("mixture", NNX)
def test_an_nnx_model_is_quantized_as_the_pure_linen_one(mixture, provider):
    make, expected = provider
    made = make()
    shown = bridge.nnx_modules_as_linen() if "(nnx))" in mixture else contextlib.nullcontext()
    with shown:
        check(nnx_result(NNX[mixture], made), expected, made)


def test_the_pure_model_is_quantized_at_all(provider):
    """What the others are compared with is another model than the float one."""
    make, (first, _, leaves) = provider
    assert np.abs(first - PURE.apply({"params": pure_params()}, X)).max() > 1e-4
    assert (leaves.keys() == leaves_of(pure_params()).keys()) == (make is PROVIDERS["dynamic QAT"])


class Between(nnx.Module):
    """An NNX module in a Linen one, which holds a Linen one again."""

    def __init__(self, *, rngs):
        self.fc1 = bridge.ToNNX(nn.Dense(8), rngs=rngs)
        self.fc2 = nnx.Linear(8, 6, rngs=rngs)

    def __call__(self, x):
        return self.fc2(jax.nn.relu(self.fc1(x)))


def test_copies_of_a_deep_mixture_are_adapted_each_for_itself(provider):
    """NNX holds Linen, which holds NNX, which holds Linen; the model itself stays as it is."""
    make, expected = provider
    float_model = bridge.lazy_init(
        in_nnx(LinenTop(LinenInner(bridge.to_linen(Between))))(nnx.Rngs(0)), X
    )
    y = float_model(X)
    for _ in range(2):
        made = make()
        with bridge.nnx_modules_as_linen():
            result = nnx_result(lambda rngs: nnx.clone(float_model), made)
            check(result, expected, made)
        np.testing.assert_array_equal(float_model(X), y)
