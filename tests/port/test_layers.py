import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge import parity, port
from tests.port.cases import CASES, cell_arguments, random_values
from tests.strategies import exact

# Fused gates are multiplied in one product instead of four: sums of few terms in another order.
ROUNDING = {"rtol": 1e-5, "atol": 1e-6}


def assert_agree(case, actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        if case.same_operations:
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, **ROUNDING)


@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_ported_layer_computes_what_linen_does_and_comes_back_bitwise(name):
    case = CASES[name]
    variables = random_values(case.shapes_of_variables())
    model = case.model()
    before = dict(nnx.iter_graph(model, graph=True))

    plan = port.plan(variables, model)
    assert plan.ok, str(plan)
    assert plan.apply() is model

    after = dict(nnx.iter_graph(model, graph=True))
    assert all(after[p] is item for p, item in before.items() if isinstance(item, nnx.Variable))
    back = port.plan(model, case.shapes_of_variables())
    assert back.ok, str(back)
    assert exact(back.apply()) == exact(variables)
    assert exact(plan.inverse().apply()) == exact(variables)

    arguments = cell_arguments(case.linen, case.inputs())
    mutable = ["batch_stats"] if case.updates else []
    apply = functools.partial(case.linen.apply, **case.linen_kwargs, mutable=mutable)
    call = functools.partial(type(model).__call__, **case.native_kwargs)
    if not case.same_operations:
        # One program each compiles faster than many, and there are no bits to keep.
        apply, call = jax.jit(apply), nnx.jit(call)
    expected, actual = apply(variables, *arguments), call(model, *arguments)
    assert_agree(case, actual, expected[0])
    if case.updates:
        moved = port.plan(model, {**variables, **expected[1]}).apply()
        assert_agree(case, moved["batch_stats"], expected[1]["batch_stats"])


def test_bfloat16_layers_agree_and_keep_their_dtype():
    linen = nn.Dense(3, param_dtype=jnp.bfloat16)
    model = nnx.Linear(4, 3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = jnp.linspace(-1, 1, 8, dtype=jnp.bfloat16).reshape(2, 4)
    shapes = jax.eval_shape(lambda: linen.init(jax.random.key(0), x))
    variables = random_values(shapes)
    port.plan(variables, model).apply()
    assert exact(port.plan(model, shapes).apply()) == exact(variables)
    actual, expected = model(x), linen.apply(variables, x)
    assert actual.dtype == expected.dtype == jnp.bfloat16
    np.testing.assert_array_equal(actual, expected)


def test_an_attention_cache_moves_over_in_the_middle_of_decoding():
    linen = nn.MultiHeadDotProductAttention(2, decode=True)
    model = nnx.MultiHeadAttention(2, 4, decode=True, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 4)), jnp.float32)
    variables = random_values(
        {"params": jax.eval_shape(lambda: linen.init(jax.random.key(0), tokens))["params"]}
    )
    cache = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        jax.eval_shape(lambda: linen.init(jax.random.key(0), tokens))["cache"],
    )
    variables = {**variables, "cache": cache}
    outputs = []
    step = jax.jit(functools.partial(linen.apply, mutable=["cache"]))
    for i in range(2):
        output, updates = step(variables, tokens[:, i : i + 1])
        variables = {**variables, **updates}
        outputs.append(output)
        if i == 0:
            after_one = variables

    without = port.plan(after_one, model)
    assert {entry.kind for entry in without.problems} == {"unexpected"}
    assert "init_cache" in without.problems[0].note
    model.init_cache(tokens.shape)
    port.plan(after_one, model).apply()
    actual = nnx.jit(nnx.MultiHeadAttention.__call__)(model, tokens[:, 1:])
    np.testing.assert_allclose(actual, outputs[1], **ROUNDING)
    assert exact(port.plan(model, variables).apply()["cache"]["cache_index"]) == exact(
        variables["cache"]["cache_index"]
    )


def test_a_linen_gru_bias_without_a_place_in_nnx_is_lossy_unless_zero():
    case = CASES["GRUCell"]
    variables = random_values(case.shapes_of_variables())
    variables["params"]["hn"]["bias"] = jnp.array([0.0, 1e-30, 0.0])
    model = case.model()
    before = exact(nnx.state(model))
    plan = port.plan(variables, model)
    (problem,) = plan.problems
    assert (problem.kind, problem.source) == ("lossy", ("params/hn/bias",))
    with pytest.raises(port.PortError, match="hn/bias"):
        plan.apply()
    assert exact(nnx.state(model)) == before
    # Shapes alone do not tell, and are not enough to move anything either.
    assert port.plan(case.shapes_of_variables(), model).ok
    with pytest.raises(port.PortError, match="shapes and no values"):
        port.plan(case.shapes_of_variables(), model).apply()


@pytest.mark.parametrize(
    ("native", "base"),
    [
        (lambda r: nnx.LoRALinear(4, 3, lora_rank=2, rngs=r), ()),
        (
            lambda r: nnx.LoRA(4, 2, 3, base_module=nnx.Linear(4, 3, rngs=r), rngs=r),
            ("base_module",),
        ),
    ],
)
def test_a_linen_dense_becomes_the_base_of_a_lora_layer(native, base):
    variables = random_values(CASES["Dense"].shapes_of_variables())
    model = native(nnx.Rngs(0))
    plan = port.plan(variables, model)
    assert {e.target[0].split(".")[-1] for e in plan.entries if e.kind == "kept"} == {
        "lora_a",
        "lora_b",
    }
    plan.apply()
    x = CASES["Dense"].inputs()[0]
    # lora_b is zero at first, so the adapter adds nothing.
    np.testing.assert_array_equal(model(x), nn.Dense(3).apply(variables, x))
    assert exact(port.plan(model, variables).apply()) == exact(variables)

    adapter = model.lora if not base else model
    adapter.lora_b[...] = jnp.ones((2, 3))
    assert {p.kind for p in port.plan(model, variables).problems} == {"lossy"}


def test_a_linen_module_of_ones_own_with_adapters_fills_a_lora_layer():
    class LinenLoRA(nn.Module):
        @nn.compact
        def __call__(self, x):
            a = self.param("lora_a", nn.initializers.normal(), (4, 2))
            return x @ a @ self.param("lora_b", nn.initializers.normal(), (2, 3))

    x = CASES["Dense"].inputs()[0]
    variables = LinenLoRA().init(jax.random.key(0), x)
    model = nnx.LoRA(4, 2, 3, rngs=nnx.Rngs(1))
    port.plan(variables, model).apply()
    np.testing.assert_array_equal(model(x), LinenLoRA().apply(variables, x))
    assert exact(port.plan(model, variables).apply()) == exact(variables)


def computed(call):
    """The leaves of what a call returns.

    On a CPU without F16C, XLA compiles no conversion to float8 or float16; there they are shapes.
    """
    try:
        return jax.tree.leaves(call())
    except jax.errors.JaxRuntimeError as error:
        if "convert" not in str(error):
            raise
        return [np.asarray(x.shape) for x in jax.tree.leaves(jax.eval_shape(call))]


@pytest.mark.parametrize(
    ("linen", "shapes", "name"),
    [
        (nn.ConvLocal(3, (2,)), ((2, 5, 4),), "ConvLocal"),
        (nn.MGUCell(3), ((2, 3), (2, 4)), "MGUCell"),
        (nn.ConvLSTMCell(3, (2,)), (((2, 5, 3), (2, 5, 3)), (2, 5, 4)), "ConvLSTMCell"),
        (nn.Dense(3, dot_general_cls=nn.Fp8DirectDotGeneralOp), ((2, 4),), "Fp8"),
    ],
)
def test_a_layer_without_an_nnx_class_is_named_and_works_wrapped(linen, shapes, name):
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, *inputs):
            return linen.copy(parent=self, name=f"{type(linen).__name__}_0")(*inputs)

    class Native(nnx.Module):
        def __init__(self, layer):
            setattr(self, f"{type(linen).__name__}_0", layer)

    is_shape = lambda s: isinstance(s[0], int)  # noqa: E731
    inputs = jax.tree.map(
        jnp.ones, list(shapes), is_leaf=lambda s: type(s) is tuple and is_shape(s)
    )
    shapes_of = jax.eval_shape(lambda: Linen().init(jax.random.key(0), *inputs))
    native = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    problems = port.plan(shapes_of, Native(native)).problems
    unsupported = [p for p in problems if p.kind == "unsupported"]
    assert unsupported
    assert all(name in p.note and "ToNNX" in p.note for p in unsupported)

    variables = random_values(shapes_of)
    # Their initial values would need the conversion, too.
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes_of)
    own = {collection: tree[f"{type(linen).__name__}_0"] for collection, tree in zeros.items()}
    wrapped = bridge.ToNNX.from_variables(linen, own)
    model = Native(wrapped)
    port.plan(variables, model).apply()
    expected = computed(lambda: Linen().apply(variables, *inputs))
    for actual, wanted in zip(computed(lambda: wrapped(*inputs)), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)
    assert exact(port.plan(model, variables).apply()) == exact(variables)


def test_a_subclass_of_a_built_in_layer_uses_its_rule():
    class Cell(nnx.GRUCell):
        pass

    case = CASES["GRUCell"]
    variables = random_values(case.shapes_of_variables())
    model = nnx.eval_shape(lambda: Cell(4, 3, rngs=nnx.Rngs(0)))
    port.plan(variables, model).apply()
    assert exact(port.plan(model, variables).apply()) == exact(variables)


def test_an_embedding_looks_up_and_attends_as_in_linen_and_comes_back():
    linen, native = nn.Embed(5, 4), nnx.Embed(5, 4, rngs=nnx.Rngs(0))
    tokens, queries = jnp.array([[0, 4], [2, 2]]), jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
    variables = random_values(jax.eval_shape(lambda: linen.init(jax.random.key(0), tokens)))
    port.plan(variables, native).apply()
    np.testing.assert_array_equal(native(tokens), linen.apply(variables, tokens))
    attended = linen.apply(variables, queries, method="attend")
    np.testing.assert_array_equal(native.attend(queries), attended)
    assert exact(port.plan(native, variables).apply()) == exact(variables)


def rotated(x):
    """Rotary embedding of (…, length, heads, size), as a Linen program writes it itself."""
    half = x.shape[-1] // 2
    frequencies = 1 / 10000 ** (jnp.arange(0.0, x.shape[-1], 2) / x.shape[-1])
    angles = jnp.outer(jnp.arange(float(x.shape[-3])), frequencies)
    sin, cos = (jnp.tile(f(angles), 2)[None, :, None] for f in (jnp.sin, jnp.cos))
    return x * cos + jnp.concatenate([-x[..., half:], x[..., :half]], -1) * sin


def rotated_attention(query, key, value, **kwargs):
    return nn.dot_product_attention(rotated(query), rotated(key), value, **kwargs)


class LinenRotary(nn.Module):
    names: tuple[str, str]

    @nn.compact
    def __call__(self, x):
        attention = nn.MultiHeadDotProductAttention(
            2, attention_fn=rotated_attention, name=self.names[0]
        )
        return nn.Dense(3, name=self.names[1])(attention(x))


class Rotary(nnx.Module):
    def __init__(self, rngs, length):
        size = None if length is None else 4
        self.rope = nnx.RoPE(embedding_size=size, max_seq_len=length)
        self.attention = nnx.MultiHeadAttention(
            2,
            8,
            decode=False,
            attention_fn=functools.partial(nnx.dot_product_attention_with_rope, rope=self.rope),
            rngs=rngs,
        )
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.attention(x))


# nnx.RoPE of Flax 0.12.12 reads its own tables through a deprecated name.
@pytest.mark.filterwarnings("ignore:'.value' access is now deprecated:DeprecationWarning")
@pytest.mark.skipif(not hasattr(nnx, "RoPE"), reason="Flax has no nnx.RoPE in this version")
@pytest.mark.parametrize(
    ("names", "length"), [(("attention", "out"), None), (("mixer", "head"), 8)]
)
def test_tables_of_rotary_embeddings_need_no_counterpart(names, length):
    linen, x = LinenRotary(names), jax.random.normal(jax.random.key(1), (2, 5, 8))
    variables = random_values(jax.eval_shape(linen.init, jax.random.key(0), x))
    model = Rotary(nnx.Rngs(0), length)
    tables = nnx.state(model.rope)
    plan = port.plan(variables, model)
    assert plan.ok, str(plan)
    kept = {name for entry in plan.entries if entry.kind == "kept" for name in entry.target}
    assert kept == {f"rope.{name}" for name in ("cached_sin", "cached_cos") if length}
    plan.apply()
    np.testing.assert_array_equal(model(x), linen.apply(variables, x))
    assert exact(nnx.state(model.rope)) == exact(tables)
    assert exact(plan.inverse().apply()) == exact(variables)
    report = parity.check((linen, variables), model, x)
    assert report.ok, str(report)
