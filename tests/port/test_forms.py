"""Rules that reshape, transpose, split and join, beside the same done by hand in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st

from bridge import checkpoint, parity, port
from tests.drawing import drawing
from tests.port.cases import random_values
from tests.port.forms import (
    CASES,
    INTERLEAVED,
    Fused,
    GeneralAttention,
    HuggingFaceGPT,
    Interleaved,
    Joined,
    JoinedInHeads,
    LinenGPT,
    List,
    NativeAttention,
    NativeGPT,
    NativeStacked,
    OneByOne,
    Separate,
    Stacked,
    TiedGPT,
    WithHeads,
    X,
    attend,
)
from tests.port.models import shapes_of
from tests.strategies import exact

EVERY = {**CASES, **INTERLEAVED}


@pytest.mark.parametrize("case", EVERY)
def test_values_are_those_that_numpy_makes_and_the_outputs_are_equal(case):
    linen, native, rules, by_hand = EVERY[case]
    variables = random_values(shapes_of(linen, X))
    model = native(nnx.Rngs(0))
    plan = port.plan(variables, model, rules)
    assert plan.ok, str(plan)
    plan.apply()
    expected = by_hand(jax.tree.map(np.asarray, variables["params"]))
    for name, (kernel, bias) in expected.items():
        layer = getattr(model, name)
        np.testing.assert_array_equal(layer.kernel[...], kernel)
        np.testing.assert_array_equal(layer.bias[...], bias)
    np.testing.assert_allclose(
        nnx.jit(call)(model, X), jax.jit(linen.apply)(variables, X), rtol=1e-5, atol=1e-5
    )
    assert exact(plan.inverse().apply()) == exact(variables)
    assert exact(port.plan(model, shapes_of(linen, X), rules).apply()) == exact(variables)


def call(model, x):
    return model(x)


@pytest.mark.parametrize("case", ["heads to features", "fused and transposed to separate"])
def test_parity_compares_what_a_rule_reshapes(case):
    linen, native, rules, _ = CASES[case]
    variables = random_values(shapes_of(linen, X))
    model = port.plan(variables, native(nnx.Rngs(0)), rules).apply()
    report = parity.check((linen, variables), model, X, rules=rules)
    assert report.ok, str(report)
    assert report.section("layers").compared
    model.q.kernel[...] += 1.0
    report = parity.check((linen, variables), model, X, rules=rules, gradients=False)
    assert not report.ok
    assert not report.section("weights").ok


TX = optax.sgd(1e-2, momentum=0.9)


@pytest.mark.parametrize("case", EVERY)
def test_moments_are_moved_as_numpy_moves_parameters_and_come_back(case):
    linen, native, rules, by_hand = EVERY[case]
    variables = random_values(shapes_of(linen, X))
    moments = random_values(shapes_of(linen, X), seed=1)["params"]
    empty = TrainState.create(apply_fn=linen.apply, params=variables["params"], tx=TX)
    state = empty.replace(opt_state=(optax.TraceState(trace=moments), *empty.opt_state[1:]))
    model = native(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    plan = port.plan(variables, model, rules)
    plan.apply_optimizer(state, optimizer)
    moved = optimizer.opt_state[0].trace
    for name, (kernel, bias) in by_hand(jax.tree.map(np.asarray, moments)).items():
        np.testing.assert_array_equal(moved[name]["kernel"][...], kernel)
        np.testing.assert_array_equal(moved[name]["bias"][...], bias)
    back = plan.inverse().apply_optimizer(optimizer, empty)
    assert exact(back.opt_state) == exact(state.opt_state)


@pytest.mark.parametrize(
    "case", ["heads to features", "fused to separate", "separate to q, k and v in each head"]
)
def test_training_goes_on_as_if_the_layout_had_always_been_this_one(case):
    linen, native, rules, _ = EVERY[case]
    variables = random_values(shapes_of(linen, X))
    others = {name: tree for name, tree in variables.items() if name != "params"}
    state = TrainState.create(apply_fn=linen.apply, params=variables["params"], tx=TX)

    @jax.jit
    def step(state):
        def loss(params):
            return ((linen.apply({"params": params, **others}, X) - 1.0) ** 2).mean()

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    @nnx.jit
    def native_step(model, optimizer):
        optimizer.update(model, nnx.grad(lambda model: ((model(X) - 1.0) ** 2).mean())(model))

    for _ in range(2):
        state = step(state)
    model = native(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    plan = port.plan({"params": state.params, **others}, model, rules)
    plan.apply()
    plan.apply_optimizer(state, optimizer)
    native_step(model, optimizer)
    ahead = step(state)
    back = plan.inverse()
    np.testing.assert_equal(int(optimizer.step[...]), int(ahead.step))
    moved = back.apply_optimizer(optimizer, state)
    for found, expected in (
        (back.apply()["params"], ahead.params),
        (moved.opt_state, ahead.opt_state),
    ):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected
        )


@pytest.mark.parametrize("case", INTERLEAVED)
def test_a_checkpoint_is_restored_by_the_same_rules_and_back(case, tmp_path):
    linen, native, rules, _ = INTERLEAVED[case]
    variables = random_values(shapes_of(linen, X))
    model = port.plan(variables, native(nnx.Rngs(0)), rules).apply()
    checkpoint.save(tmp_path / "linen", variables)
    restored = checkpoint.restore(tmp_path / "linen", native(nnx.Rngs(1)), rules=rules)
    assert exact(nnx.state(restored)) == exact(nnx.state(model))
    checkpoint.save(tmp_path / "nnx", model)
    back = checkpoint.restore(tmp_path / "nnx", shapes_of(linen, X), rules=rules)
    assert exact(back) == exact(variables)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    "case", ["heads to features", "fused to separate", "q, k and v in each head"]
)
def test_the_layers_of_a_stack_are_reshaped_and_split(axis, case):
    layer, native, rules, _ = EVERY[case]
    linen = Stacked(type(layer), axis)
    within = "layers/attn/attn" if type(layer) is WithHeads else "layers/attn"
    stacked = {
        f"{within}/{key.removeprefix('attn/')}": f"layers.*@{axis}.{value}"
        for key, value in {**rules, "out": "out"}.items()
        if type(layer) is not WithHeads or key != "out"
    }
    variables = random_values(shapes_of(linen, X))
    model = List(nnx.Rngs(0), native)
    plan = port.plan(variables, model, stacked)
    assert plan.ok, str(plan)
    plan.apply()
    np.testing.assert_allclose(model(X), linen.apply(variables, X), rtol=1e-4, atol=1e-4)
    assert exact(plan.inverse().apply()) == exact(variables)


IN_STACKS = [
    "heads to features",
    "fused to separate",
    "fused in heads to separate",
    "fused and transposed to separate",
    "separate to fused",
]


def check_suggestions(linen, make, x, path=None):
    """Checks what `suggest` proposes, both ways, by a plan and, at a path, by checkpoints."""
    variables = random_values(shapes_of(linen, x))
    model = make(nnx.Rngs(0))
    found = port.suggest(shapes_of(linen, x), model, x, linen=linen)
    assert found.plan.ok, f"{found}\n{found.plan}"
    plan = port.plan(variables, model, found.rules)
    plan.apply()
    np.testing.assert_allclose(model(x), linen.apply(variables, x), rtol=1e-4, atol=1e-4)
    assert exact(plan.inverse().apply()) == exact(variables)
    if path is None:
        return found
    renames = found.plan.renames()
    checkpoint.save(path / "linen", variables)
    restored = checkpoint.restore(path / "linen", make(nnx.Rngs(1)), rules=renames)
    assert exact(nnx.state(restored)) == exact(nnx.state(model))
    checkpoint.save(path / "nnx", model)
    back = checkpoint.restore(path / "nnx", shapes_of(linen, x), rules=renames)
    assert exact(back) == exact(variables)
    return found


@pytest.mark.parametrize(
    ("case", "axis"),
    [
        *((case, 0) for case in IN_STACKS),
        ("heads to features", 1),
        ("fused and transposed to separate", 1),
        ("fused in heads to separate", -1),
        ("separate to fused", -1),
    ],
)
def test_rules_for_the_layers_of_a_stack_are_suggested(case, axis, tmp_path):
    # Regression: in stacks only leaves of equal shapes were found, and on axis -1 wrong ones.
    layer, native, _, _ = CASES[case]
    linen = Stacked(type(layer), axis)
    path = tmp_path if axis else None
    check_suggestions(linen, lambda rngs: List(rngs, native), X, path)


@pytest.mark.parametrize(
    ("case", "axis", "is_named"),
    [
        *((case, 0, True) for case in IN_STACKS),
        ("fused to separate", 0, False),
        ("heads to features", 1, True),
        ("fused and transposed to separate", 1, False),
        ("fused in heads to separate", -1, False),
        ("separate to fused", -1, True),
    ],
)
def test_rules_for_layers_one_by_one_that_nnx_has_stacked_are_suggested(
    case, axis, is_named, tmp_path
):
    # Regression: nothing was found, or only leaves of equal shapes.
    layer, native, _, _ = CASES[case]
    linen = OneByOne(type(layer), is_named)
    path = tmp_path if axis else None
    found = check_suggestions(linen, lambda rngs: NativeStacked(rngs, native, axis), X, path)
    assert not any(each.is_weak for each in found.proposals), str(found)


@pytest.mark.parametrize(
    ("attention", "is_stacked"), [(NativeAttention, True), (GeneralAttention, False)]
)
def test_a_gpt_of_hugging_face_is_ported_by_suggested_rules(attention, is_stacked, tmp_path):
    # Regression: the bias beside a transposed square kernel was left over, and the transposed
    # kernels were reshaped into those of a LinearGeneral without their transposition.
    tokens, linen = jnp.asarray([[0, 3, 1], [5, 2, 4]]), HuggingFaceGPT()

    def make(rngs):
        return TiedGPT(rngs, attention, is_stacked)

    found = check_suggestions(linen, make, tokens, tmp_path)
    assert not any(each.is_weak for each in found.proposals), str(found)
    variables = random_values(shapes_of(linen, tokens))
    model = port.plan(variables, make(nnx.Rngs(0)), found.rules).apply()
    report = parity.check((linen, variables), model, tokens, rules=found.rules, gradients=False)
    assert report.ok, str(report)


class JittedDense(nn.Module):
    """Interleaved, with a compiled layer."""

    @nn.compact
    def __call__(self, x):
        x = nn.jit(nn.Dense)(24, name="qkv")(x).reshape(*x.shape[:2], 2, 3, 4)
        q, k, v = (x[..., n, :].reshape(*x.shape[:2], 8) for n in range(3))
        return nn.Dense(8, name="out")(attend(q, k, v))


class JittedHeads(nn.Module):
    """Interleaved, with a compiled function that takes the axis apart."""

    @nn.compact
    def __call__(self, x):
        @jax.jit
        def heads(x):
            x = x.reshape(*x.shape[:2], 2, 3, 4)
            return [x[..., n, :].reshape(*x.shape[:2], 8) for n in range(3)]

        return nn.Dense(8, name="out")(attend(*heads(nn.Dense(24, name="qkv")(x))))


class ByEinsum(nn.Module):
    """Interleaved, with a product that JAX compiles by itself."""

    @nn.compact
    def __call__(self, x):
        x = nn.Einsum((8, 24), "...d,df->...f", name="qkv")(x).reshape(*x.shape[:2], 2, 3, 4)
        q, k, v = (x[..., n, :].reshape(*x.shape[:2], 8) for n in range(3))
        return nn.Dense(8, name="out")(attend(q, k, v))


@pytest.mark.parametrize("linen", [JittedDense(), JittedHeads(), ByEinsum()])
def test_parts_in_each_head_are_seen_through_what_is_compiled(linen):
    # Regression: the parts were split as if each lay there once, and nothing was in doubt.
    found = port.suggest(shapes_of(linen, X), Separate(nnx.Rngs(0)), X, linen=linen)
    assert found.rules == {"qkv": "{2x q,k,v}"}


class PlainlyFused(nn.Module):
    @nn.compact
    def __call__(self, x):
        q, k, v = jnp.split(nn.Dense(24, name="qkv")(x), 3, -1)
        return nn.Dense(8, name="out")(attend(q, k, v))


@pytest.mark.parametrize("linen", [Interleaved(), PlainlyFused()])
@pytest.mark.parametrize("native", [Joined, JoinedInHeads])
def test_one_array_for_all_parts_is_in_doubt_if_one_model_has_them_by_head(linen, native):
    # Regression: nothing was said, as the plan is clean.
    found = port.suggest(shapes_of(linen, X), native(nnx.Rngs(0)), X, linen=linen)
    doubted = {key for each in found.proposals if each.is_disputed for key in each.rules}
    is_same = isinstance(linen, PlainlyFused) == (native is Joined)
    assert doubted == (set() if is_same else {"qkv/kernel"})


class Around(nn.Module):
    """A model of which another one holds all parameters, and which computes more."""

    @nn.compact
    def __call__(self, x):
        return nn.gelu(nn.Dense(8, name="inner")(x))[..., :2]


class NativeAround(nnx.Module):
    def __init__(self, rngs):
        self.kernel, self.bias = nnx.Param(jnp.zeros((8, 8))), nnx.Param(jnp.zeros(8))

    def __call__(self, x):
        return nnx.gelu(x @ self.kernel + self.bias[None, None])[..., :2]


def test_a_model_is_no_counterpart_of_the_layer_that_holds_all_parameters():
    # Regression: the outputs of the inner layer were compared with those of the whole model.
    linen, rules = Around(), {"inner/kernel": "kernel", "inner/bias": "bias"}
    variables = random_values(shapes_of(linen, X))
    model = port.plan(variables, NativeAround(nnx.Rngs(0)), rules).apply()
    report = parity.check((linen, variables), model, X, rules=rules, gradients=False)
    assert report.ok, str(report)


def test_kernels_that_are_stacked_on_another_axis_are_not_transposed():
    # Regression: `transpose` was proposed, which also exchanges the axes of each kernel.
    linen = Stacked(type(CASES["heads to features"][0]), -1)
    native = NativeStacked(nnx.Rngs(0), Separate)
    found = port.suggest(shapes_of(linen, X), native, X, linen=linen)
    assert not found.plan.ok
    assert not any("transpose" in rule for rule in found.rules.values()), str(found)


def test_only_calls_tell_two_stacks_of_another_layout_apart(tmp_path):
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Stacked(Fused, name="b")(Stacked(Fused, name="a")(x))

    class Lists(nnx.Module):
        def __init__(self, rngs):
            self.one, self.two = (List(rngs, CASES["fused to separate"][1]) for _ in range(2))

        def __call__(self, x):
            return self.one(self.two(x))

    check_suggestions(Two(), Lists, X, tmp_path)
    found = port.suggest(shapes_of(Two(), X), Lists(nnx.Rngs(0)))
    assert found.rules == {}


@st.composite
def forms(draw):
    """A leaf, its parts by hand, and the rule that makes them."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    if len(sizes) > 1:
        shape = tuple(sum(sizes) if n == axis % len(shape) else s for n, s in enumerate(shape))
    times = draw(st.integers(1, 3)) if len(sizes) > 1 else 1
    shape = tuple(s * times if n == axis % len(shape) else s for n, s in enumerate(shape))
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    blocks = [np.split(each, np.cumsum(sizes)[:-1], axis) for each in np.split(whole, times, axis)]
    parts = [np.concatenate(own, axis) for own in zip(*blocks, strict=True)]
    parts = parts if len(sizes) > 1 else [whole]
    words = ""
    if draw(st.booleans()):
        axes = draw(st.permutations(range(len(shape))))
        words += f" transpose({', '.join(map(str, axes))})"
        parts = [part.transpose(axes) for part in parts]
    if draw(st.booleans()):
        words += " reshape"
        parts = [
            part.reshape(draw(st.sampled_from([(-1,), (1, -1), (part.size, 1)]))) for part in parts
        ]
    names = [f"p{n}" for n in range(len(parts))]
    often = f"{times}x " if times > 1 else ""
    braces = "{" + often + ",".join(names) + f"@{axis}" + "}" if len(parts) > 1 else names[0]
    return whole, dict(zip(names, parts, strict=True)), braces + words


class Leaves(nnx.Module):
    def __init__(self, leaves):
        for name, value in leaves.items():
            setattr(self, name, nnx.Param(jnp.zeros(value.shape, value.dtype)))


@drawing(25)
@given(forms())
def test_a_rule_and_its_inverse_move_every_element(case):
    whole, parts, rule = case
    variables = {"params": {"whole": jnp.asarray(whole)}}
    model = Leaves(parts)
    plan = port.plan(variables, model, {"whole": rule})
    assert plan.ok, str(plan)
    plan.apply()
    for name, expected in parts.items():
        np.testing.assert_array_equal(getattr(model, name)[...], expected)
    assert exact(plan.inverse().apply()) == exact(variables)


@pytest.mark.parametrize(
    ("rules", "kind", "note"),
    [
        ({"qkv": "{q,k}"}, "mis-shaped", "(8, 8) do not lie side by side in (8, 24) on axis -1"),
        ({"qkv": "{q,k,v@5}"}, "mis-shaped", "on axis 5"),
        ({"qkv": "{q,k,v@0}"}, "mis-shaped", "(8, 8) do not lie side by side in (8, 24) on axis 0"),
        ({"qkv": "{q,k,w}"}, "rule", "has no 'w' for qkv"),
        ({"qkv": "{3x q,k,v}"}, "mis-shaped", "in (8, 24) on axis -1 3 times"),
        ({"{qkv,nothing}": "q"}, "rule", "only some of its parts are there: qkv"),
        ({"{qkv,nothing}": "q"}, "rule", "matches no Linen path"),
        ({"out": "out transpose(1, 0) reshape", "qkv": "{q,k,v} transpose(0, 1)"}, "", ""),
        ({"out": "q reshape", "qkv": "{q,k,v}"}, "rule", "collides with rule 'out'"),
        ({"qkv": "q reshape"}, "mis-shaped", "(8, 24) is not (8, 8)"),
    ],
)
def test_what_does_not_fit_is_a_problem(rules, kind, note):
    variables = random_values(shapes_of(Fused(), X))
    params = {"params": {n: variables["params"][n] for n in ("qkv", "out")}}
    plan = port.plan(params, Separate(nnx.Rngs(0)), rules)
    found = [(each.kind, each.note) for each in plan.problems]
    assert (not kind and not found) or any(k == kind and note in n for k, n in found), str(plan)


@pytest.mark.parametrize("case", EVERY)
def test_suggest_proposes_the_rules_that_shapes_and_calls_leave(case):
    linen, native, rules, _ = EVERY[case]
    variables = random_values(shapes_of(linen, X))
    model = native(nnx.Rngs(0))
    found = port.suggest(variables, model, X, linen=linen)
    assert found.rules == rules
    # That an axis is taken apart does not say that it is into the parts.
    assert {each.is_weak for each in found.proposals} == {"2x " in str(rules)}
    assert found.plan.ok


def test_a_gpt_of_another_layout_is_ported_by_suggested_rules_and_back(tmp_path):
    variables = random_values(shapes_of(LinenGPT(), X))
    model = NativeGPT(nnx.Rngs(0))
    found = port.suggest(variables, model, X, linen=LinenGPT())
    assert found.plan.ok, str(found)
    assert len(found.rules) <= 10, str(found)
    plan = port.plan(variables, model, found.rules)
    plan.apply()
    np.testing.assert_allclose(model(X), LinenGPT().apply(variables, X), rtol=1e-4, atol=1e-4)
    report = parity.check((LinenGPT(), variables), model, X, rules=found.rules)
    assert report.ok, str(report)
    assert exact(plan.inverse().apply()) == exact(variables)
    checkpoint.save(tmp_path / "linen", variables)
    restored = checkpoint.restore(tmp_path / "linen", NativeGPT(nnx.Rngs(1)), rules=plan.renames())
    assert exact(nnx.state(restored)) == exact(nnx.state(model))


class Three(nnx.Module):
    def __init__(self, rngs):
        self.one, self.two, self.three = (nnx.Linear(8, 8, rngs=rngs) for _ in range(3))
        self.out = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.out(attend(self.one(x), self.two(x), self.three(x)))


def test_an_order_of_parts_that_only_calls_tell_is_weak():
    linen = Fused()
    variables = random_values(shapes_of(linen, X))
    params = {"params": {n: variables["params"][n] for n in ("qkv", "out")}}

    def call(variables, x):
        own = variables["params"]
        parts = jnp.split(nn.Dense(24).apply({"params": own["qkv"]}, x), 3, -1)
        return nn.Dense(8).apply({"params": own["out"]}, attend(*parts))

    (proposal,) = port.suggest(params, Three(nnx.Rngs(0)), X, linen=call).proposals
    assert proposal.rules == {"qkv": "{one,two,three}"}
    assert proposal.is_weak


def test_sizes_that_do_not_add_up_are_not_proposed():
    variables = random_values(shapes_of(Fused(8, 4), X))
    params = {"params": {n: variables["params"][n] for n in ("qkv", "out")}}
    assert port.suggest(params, Three(nnx.Rngs(0)), X).rules == {}
