"""Rules that are proposed, and what a plan settles by itself."""

import cProfile
import functools
import json
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge import parity, port
from tests.port.architectures import ARCHITECTURES
from tests.port.cases import random_values
from tests.port.models import shapes_of
from tests.strategies import exact

X = jnp.asarray(np.random.default_rng(3).normal(size=(2, 4)), jnp.float32)


@functools.cache
def suggested(name):
    """Variables, what is suggested for them, and the NNX model that a plan of it fills."""
    architecture = ARCHITECTURES[name]
    variables = random_values(architecture.shapes())
    abstract = nnx.eval_shape(lambda: architecture.native(nnx.Rngs(0)))
    # Not one of them is clear without.
    assert not port.plan(variables, abstract).ok
    found = port.suggest(variables, abstract, *architecture.inputs, linen=architecture.apply)
    model = architecture.native(nnx.Rngs(0))
    model.eval()
    plan = port.plan(variables, model, found.rules)
    assert plan.ok, str(plan)
    return variables, found, plan.apply()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_first_plan_with_the_suggestions_computes_what_linen_does(name):
    architecture = ARCHITECTURES[name]
    variables, suggestions, model = suggested(name)
    assert suggestions.plan.ok
    assert not any(each.is_weak for each in suggestions.proposals)
    assert len(str(suggestions).splitlines()) < 40
    expected = architecture.apply(variables, *architecture.inputs)
    np.testing.assert_allclose(model(*architecture.inputs), expected, rtol=1e-4, atol=1e-4)
    report = parity.check(
        (architecture.linen, variables),
        model,
        *architecture.inputs,
        rules=suggestions.rules,
        sections=("port plan", "weights"),
        options=parity.Options(a_kwargs=architecture.linen_kwargs),
    )
    assert report.ok, str(report)
    # The text is Python source and the file is TOML, of the same table.
    scope = {}
    exec(str(suggestions), scope)
    assert scope["rules"] == suggestions.rules
    assert tomllib.loads(suggestions.to_toml())["rules"] == suggestions.rules
    assert json.loads(suggestions.to_json())["rules"] == suggestions.rules


def dense(count):
    return {f"layer_{n}": shapes_of(nn.Dense(4), X)["params"] for n in range(count)}


class Layers(nnx.Module):
    def __init__(self, count, *others):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(count)])
        for name in others:
            setattr(self, name, nnx.Linear(4, 4, rngs=nnx.Rngs(0)))


def moved(plan):
    """Which Linen scope became which NNX module."""
    return {e.target[0].rpartition(".")[0]: e.source[0].split("/")[1] for e in plan.entries}


def test_numbers_in_the_same_order_need_no_rule_and_ten_follows_nine():
    variables = random_values({"params": dense(12)})
    plan = port.plan(variables, nnx.eval_shape(lambda: Layers(12)))
    assert plan.ok
    assert moved(plan) == {f"layers.{n}": f"layer_{n}" for n in range(12)}
    assert port.suggest(variables, nnx.eval_shape(lambda: Layers(12))).rules == {}


class Pair(nnx.Module):
    def __init__(self, rngs):
        self.fc1, self.fc2 = (nnx.Linear(4, 4, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return self.fc2(nnx.relu(self.fc1(x)))


class Nested(nn.Module):
    """The outer layer is constructed first and called last."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.relu(nn.Dense(4)(x)))


class Sequence(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(4)(x))
        return nn.Dense(4)(x)


@pytest.mark.parametrize("linen", [Nested(), Sequence()])
def test_automatic_numbers_of_layers_are_not_settled(linen):
    variables = random_values(shapes_of(linen, X))
    model = Pair(nnx.Rngs(0))
    plan = port.plan(variables, model)
    assert {entry.kind for entry in plan.problems} == {"ambiguous"}
    # Numbers alone are a weak proposal, and a trace of both models is not.
    (weak,) = port.suggest(variables, model, X).proposals
    assert weak.is_weak
    assert "count constructions, not calls" in weak.evidence
    (proposal,) = port.suggest(variables, model, X, linen=linen).proposals
    assert not proposal.is_weak
    port.plan(variables, model, proposal.rules).apply()
    np.testing.assert_array_equal(model(X), linen.apply(variables, X))


class OwnBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(4, name="down")(nn.relu(nn.Dense(5, name="up")(x)))


class NestedBlocks(nn.Module):
    """OwnBlock_0 is constructed first and called last."""

    @nn.compact
    def __call__(self, x):
        return OwnBlock()(OwnBlock()(x))


class SequenceOfBlocks(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = OwnBlock()(x)
        return x


class NativeBlock(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 5, rngs=rngs)
        self.down = nnx.Linear(5, 4, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class NativeBlocks(nnx.Module):
    def __init__(self, rngs, *, is_reversed=False):
        self.blocks = nnx.List([NativeBlock(rngs) for _ in range(2)])
        self.is_reversed = is_reversed

    def __call__(self, x):
        for block in reversed(self.blocks) if self.is_reversed else self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("linen", [NestedBlocks(), SequenceOfBlocks()])
def test_automatic_numbers_of_own_blocks_are_not_settled_in_any_order(linen, is_reversed):
    # As `init` made them without `jax.jit`, sorted, and sorted the other way.
    made = linen.init(jax.random.key(0), X)
    names = sorted(made["params"])
    orders = (list(made["params"]), names, names[::-1])
    model = NativeBlocks(nnx.Rngs(0), is_reversed=is_reversed)
    for order in orders:
        variables = {"params": {name: made["params"][name] for name in order}}
        plan = port.plan(variables, model)
        assert {entry.kind for entry in plan.problems} == {"ambiguous"}
        for found in (port.suggest(variables, model), port.suggest(variables, model, X)):
            assert [each.is_weak for each in found.proposals] == [True]
        (proposal,) = port.suggest(variables, model, X, linen=linen).proposals
        assert not proposal.is_weak
        port.plan(variables, model, proposal.rules).apply()
        np.testing.assert_array_equal(model(X), linen.apply(variables, X))


class Parallel(nn.Module):
    names: tuple[str, str]

    @nn.compact
    def __call__(self, x):
        value, gate = (nn.Dense(4, name=name) for name in self.names)
        return value(x) * nn.sigmoid(gate(x))


class NativeParallel(nnx.Module):
    """The same two calls, in the other order or in one program of their own."""

    def __init__(self, rngs, *, is_jitted=False):
        self.gate, self.main = (nnx.Linear(4, 4, rngs=rngs) for _ in range(2))
        self.is_jitted = is_jitted

    def __call__(self, x):
        call = nnx.jit(lambda layer, x: layer(x)) if self.is_jitted else lambda layer, x: layer(x)
        gate = nnx.sigmoid(call(self.gate, x))
        return call(self.main, x) * gate


@pytest.mark.parametrize("is_jitted", [False, True])
def test_an_order_of_calls_that_use_no_results_of_each_other_is_weak(is_jitted):
    model = NativeParallel(nnx.Rngs(0), is_jitted=is_jitted)
    linen = Parallel(("value", "mask"))
    found = port.suggest(random_values(shapes_of(linen, X)), model, X, linen=linen)
    assert {each.is_weak for each in found.proposals} == {True}
    assert "any order would do" in str(found)
    # Names that tell them apart need no order.
    linen = Parallel(("main_value", "gate_value"))
    found = port.suggest(random_values(shapes_of(linen, X)), model, X, linen=linen)
    assert found.rules == {"main_value": "main", "gate_value": "gate"}
    assert {each.is_weak for each in found.proposals} == {False}


def test_numbers_that_a_trace_contradicts_are_not_used():
    class Linen(nn.Module):
        def setup(self):
            self.layers = [nn.Dense(4), nn.Dense(4)]

        def __call__(self, x):
            return self.layers[0](nn.relu(self.layers[1](x)))

    variables = random_values(shapes_of(Linen(), X))
    model = Pair(nnx.Rngs(0))
    rules = port.suggest(variables, model, X, linen=Linen()).rules
    assert rules == {"layers_0": "fc2", "layers_1": "fc1"}
    port.plan(variables, model, rules).apply()
    np.testing.assert_array_equal(model(X), Linen().apply(variables, X))


@pytest.mark.parametrize("others", [("head",), ("head", "tail")])
def test_what_nothing_tells_apart_gets_no_rule(others):
    names = {name: shapes_of(nn.Dense(4), X)["params"] for name in ("alpha", "beta")}
    variables = random_values({"params": {**dense(2), **names}})
    found = port.suggest(variables, Layers(2, *others))
    assert not found.plan.ok
    assert not {"alpha", "beta"} & found.rules.keys()


def test_stacked_leaves_of_another_name_need_no_rule_if_only_one_list_fits():
    one = random_values(shapes_of(nn.Dense(4), X))["params"]
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf + n for n in range(3)]), one)
    variables = {"params": {"h": stacked}}
    assert port.suggest(variables, Layers(3)).rules == {}
    plan = port.plan(variables, Layers(3))
    assert plan.ok
    for n, layer in enumerate(plan.apply().layers):
        np.testing.assert_array_equal(layer.kernel[...], one["kernel"] + n)
    # Two that could be exchanged are not.
    twice = {"params": {"h": stacked, "g": stacked}}
    assert "ambiguous" not in {e.kind for e in port.plan(twice, Layers(3)).entries}
    assert not port.plan(twice, Layers(3)).ok


def test_layers_one_by_one_fill_a_stack_of_another_name():
    class Native(nnx.Module):
        def __init__(self):
            make = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs))
            self.blocks = make(nnx.Rngs(0).split(3))

    variables = random_values({"params": dense(3)})
    assert port.suggest(variables, Native()).rules == {}
    model = port.plan(variables, Native()).apply()
    for n in range(3):
        np.testing.assert_array_equal(
            model.blocks.kernel[n], variables["params"][f"layer_{n}"]["kernel"]
        )


def test_stacks_that_fit_two_axes_are_proposed_on_scan_s_and_not_settled():
    variables = {"params": {"h": {"kernel": jnp.arange(64.0).reshape(4, 4, 4)}}}

    class Native(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.layers = nnx.List([nnx.Linear(4, 4, use_bias=False, rngs=rngs) for _ in range(4)])

    assert not port.plan(variables, Native()).ok
    (proposal,) = port.suggest(variables, Native()).proposals
    assert (proposal.rules, proposal.is_weak) == ({"h": "layers.*"}, True)
    assert port.plan(variables, Native(), proposal.rules).ok


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_renames_of_a_plan_are_rules_that_restore_takes(name, tmp_path):
    variables, found, moved = suggested(name)
    renames = found.plan.renames()
    bridge.checkpoint.save(tmp_path / "linen", variables)
    restored = bridge.checkpoint.restore(
        tmp_path / "linen", ARCHITECTURES[name].native(nnx.Rngs(1)), rules=renames
    )
    assert exact(nnx.to_pure_dict(weights(restored))) == exact(nnx.to_pure_dict(weights(moved)))
    # Without a model, and back again.
    assert port.plan(moved, variables, renames).ok


def weights(model):
    return nnx.state(model, nnx.Not(nnx.RngState))


def test_a_plan_with_problems_has_no_renames():
    with pytest.raises(port.PortError, match="not clean"):
        port.plan(NestedBlocks().init(jax.random.key(0), X), NativeBlocks(nnx.Rngs(0))).renames()


class SquareBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(4, use_bias=False, name="fc")(x)), None


class ScannedSquares(nn.Module):
    """Four layers of width four: every axis of the kernel could be that of the layers."""

    axis: int
    is_unrolled: bool = False

    @nn.compact
    def __call__(self, x):
        axes, rngs = {"params": self.axis}, {"params": True}
        block = nn.remat(SquareBlock) if self.is_unrolled else SquareBlock
        return nn.scan(block, variable_axes=axes, split_rngs=rngs, length=4)(name="h")(x, None)[0]


class NativeSquares(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, use_bias=False, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.tanh(layer(x))
        return x


@pytest.mark.parametrize("is_unrolled", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_linen_trace_tells_the_axis_of_stacked_square_layers(axis, is_unrolled):
    linen = ScannedSquares(axis, is_unrolled)
    variables = random_values(jax.eval_shape(linen.init, jax.random.key(0), X))
    model = NativeSquares(nnx.Rngs(0))
    (guess,) = port.suggest(variables, model, X).proposals
    assert guess.is_weak
    assert "nn.scan's default" in guess.evidence
    (proposal,) = port.suggest(variables, model, X, linen=linen).proposals
    assert not proposal.is_weak
    port.plan(variables, model, proposal.rules).apply()
    np.testing.assert_allclose(model(X), linen.apply(variables, X), rtol=1e-5)


class LinenSquares(nn.Module):
    @nn.compact
    def __call__(self, x):
        for n in range(4):
            x = nn.tanh(nn.Dense(4, use_bias=False, name=f"layer_{n}")(x))
        return x


class ScannedNativeSquares(nnx.Module):
    def __init__(self, axis):
        axes = nnx.StateAxes({nnx.Param: axis})
        make = nnx.vmap(
            lambda rngs: nnx.Linear(4, 4, use_bias=False, rngs=rngs), in_axes=0, out_axes=axes
        )
        self.blocks, self.axes = make(nnx.Rngs(0).split(4)), axes

    def __call__(self, x):
        def step(x, layer):
            return nnx.tanh(layer(x))

        return nnx.scan(step, in_axes=(nnx.Carry, self.axes), out_axes=nnx.Carry)(x, self.blocks)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_an_nnx_trace_tells_the_axis_of_stacked_square_layers(axis):
    variables = random_values(shapes_of(LinenSquares(), X))
    model = ScannedNativeSquares(axis)
    (proposal,) = port.suggest(variables, model, X).proposals
    assert not proposal.is_weak
    port.plan(variables, model, proposal.rules).apply()
    np.testing.assert_allclose(model(X), LinenSquares().apply(variables, X), rtol=1e-5)


def calls_of_a_plan(count):
    """How many Python functions a plan of as many blocks calls that could all be exchanged."""
    names = (f"Block_{n}" for n in range(count))
    one = {"fc": {"kernel": np.ones((4, 8), np.float32), "bias": np.ones(8, np.float32)}}
    model = nnx.eval_shape(
        lambda: nnx.Dict(
            blocks=nnx.List([nnx.Dict(up=nnx.Linear(4, 8, rngs=nnx.Rngs(0))) for _ in range(count)])
        )
    )
    profile = cProfile.Profile()
    plan = profile.runcall(port.plan, {"params": dict.fromkeys(names, one)}, model)
    assert len(plan.problems) == count
    return sum(row.callcount for row in profile.getstats() if not isinstance(row.code, str))


def test_the_time_of_a_plan_grows_slower_than_the_square_of_ambiguity():
    assert calls_of_a_plan(120) < 8 * calls_of_a_plan(20)


def test_a_plan_of_fifty_ambiguous_layers_is_short_by_default():
    others = {name: shapes_of(nn.Dense(4), X)["params"] for name in ("one", "two")}
    variables = random_values({"params": {**dense(50), **others}})
    plan = port.plan(variables, nnx.eval_shape(lambda: Layers(50, "left", "right")))
    assert len(plan.problems) == 52
    assert len(str(plan).splitlines()) < 20
    assert "layer_{0..49}" in str(plan)
    assert "layers.{0..49}" in str(plan)
    assert len(plan.text(whole=True).splitlines()) > 52
    with pytest.raises(port.PortError) as raised:
        plan.apply()
    assert len(str(raised.value).splitlines()) < 20


def test_a_long_table_of_different_problems_is_cut_and_says_how_to_see_all():
    widths = {f"n{'x' * n}": {"kernel": np.zeros((n + 1, 2), np.float32)} for n in range(250)}
    plan = port.plan({"params": widths}, nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    assert len(str(plan).splitlines()) < 200
    assert "more lines; print(plan.text(whole=True)) shows all" in str(plan)
    with pytest.raises(port.PortError, match="more; print") as raised:
        plan.apply()
    assert len(str(raised.value).splitlines()) < 200


def test_a_model_that_cannot_be_traced_is_named_with_the_remedy():
    variables = random_values(shapes_of(Sequence(), X))
    with pytest.raises(bridge.PortError, match="the NNX model cannot be traced"):
        port.suggest(variables, Pair(nnx.Rngs(0)), jnp.ones((2, 3)))
    with pytest.raises(bridge.PortError, match="the Linen model cannot be traced") as raised:
        port.suggest(variables, Pair(nnx.Rngs(0)), X, linen=lambda v, x: nn.Dense(3).apply(v, x))
    assert "linen=lambda variables, x" in str(raised.value)


def test_rules_that_are_given_stay_and_either_side_may_be_the_source():
    variables = random_values(shapes_of(Sequence(), X))
    model = Pair(nnx.Rngs(0))
    found = port.suggest(model, variables, X, rules={"Dense_1": "fc1"})
    assert found.rules == {"Dense_1": "fc1", "Dense_0": "fc2"} or found.rules == {"Dense_1": "fc1"}
    assert found.plan.ok
    assert not found.plan.to_nnx


def test_a_parameter_cast_before_its_use_counts_where_it_is_used():
    class Cast(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = (nnx.Linear(4, 4, rngs=rngs) for _ in range(2))

        def __call__(self, x):
            late, early = (m.kernel[...].astype(jnp.bfloat16) for m in (self.first, self.second))
            return (x.astype(jnp.bfloat16) @ early) @ late

    uses = port._traces.of_nnx(Cast(nnx.Rngs(0)), (X,), {})
    assert 0 < uses["second", "kernel"].bit < uses["first", "kernel"].bit


class Norm(nn.Module):
    """A norm with leaf names of its own, or with one leaf of the layer's two."""

    names: tuple[str, ...]

    @nn.compact
    def __call__(self, x):
        x = nn.standardize(x)
        for name in self.names:
            leaf = self.param(name, nn.initializers.ones, (4,))
            leaf = leaf.reshape(1, 4)
            x = x * leaf if name in ("scale", "gamma") else x + leaf
        return x


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("traces", [False, True])
def test_a_leaf_of_a_flax_layer_is_no_other_leaf_of_its_shape(is_named, traces):
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Norm(("scale",), name="norm")(x)

    class Native(nnx.Module):
        def __init__(self):
            norm = nnx.LayerNorm(4, use_scale=False, rngs=nnx.Rngs(0))
            setattr(self, "norm" if is_named else "ln", norm)

        def __call__(self, x):
            return (self.norm if is_named else self.ln)(x)

    variables = random_values(shapes_of(Linen(), X))
    given = (X,) if traces else ()
    found = port.suggest(variables, Native(), *given, linen=Linen() if traces else None)
    assert not found.plan.ok
    assert {entry.kind for entry in found.plan.problems} == {"missing", "unexpected"}
    assert not any("scale" in key for key in found.rules)


def test_leaves_with_other_names_may_be_those_of_a_flax_layer():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Norm(("gamma", "beta"), name="norm")(x)

    class Native(nnx.Module):
        def __init__(self):
            self.norm = nnx.LayerNorm(4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.norm(x)

    variables, model = random_values(shapes_of(Linen(), X)), Native()
    found = port.suggest(variables, model, X, linen=Linen())
    assert found.rules == {"norm/gamma": "norm.scale", "norm/beta": "norm.bias"}
    found.plan.apply()
    np.testing.assert_allclose(model(X), Linen().apply(variables, X), rtol=1e-3, atol=1e-4)
    assert all(each.is_weak for each in port.suggest(variables, model).proposals)


@pytest.mark.parametrize(
    ("shape", "name", "is_weak"),
    [((4, 3), "alpha", True), ((4, 3), "weight", False), ((4, 4), "weight", True)],
)
def test_the_same_shape_is_weak_evidence(shape, name, is_weak):
    class Native(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.zeros(shape))

    (proposal,) = port.suggest({"params": {name: jnp.ones(shape)}}, Native()).proposals
    assert (proposal.rules, proposal.is_weak) == ({name: "w"}, is_weak)
    assert ("transpose" in proposal.evidence) == (shape == (4, 4))


class Product(nn.Module):
    """A product with a square matrix."""

    name_of_leaf: str
    uses_transpose: bool

    @nn.compact
    def __call__(self, x):
        matrix = self.param(self.name_of_leaf, nn.initializers.normal(), (4, 4))
        return x @ (matrix.T if self.uses_transpose else matrix)


class NativeProduct(nnx.Module):
    def __init__(self, *, is_jitted):
        self.w, self.is_jitted = nnx.Param(jnp.zeros((4, 4))), is_jitted

    def __call__(self, x):
        call = nnx.jit(lambda w, x: x @ w[...]) if self.is_jitted else lambda w, x: x @ w[...]
        return call(self.w, x)


@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("name", ["w", "weight"])
@pytest.mark.parametrize("uses_transpose", [False, True])
def test_traces_tell_the_transpose_of_a_square_matrix(name, uses_transpose, is_jitted):
    linen, model = Product(name, uses_transpose), NativeProduct(is_jitted=is_jitted)
    variables = random_values(shapes_of(linen, X))
    found = port.suggest(variables, model, X, linen=linen)
    if uses_transpose:
        assert found.rules == {name: "w transpose"}
    assert not any(each.is_weak or each.is_disputed for each in found.proposals)
    found.plan.apply()
    np.testing.assert_array_equal(model(X), linen.apply(variables, X))


def test_a_jitted_function_may_transpose_a_square_matrix():
    # Regression: no rule was proposed, and the plan was clean.
    class Turned(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.zeros((4, 4)))

        def __call__(self, x):
            return x @ jax.jit(jnp.transpose)(self.w[...])

    class Straight(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("w", nn.initializers.normal(), (4, 4))

    x = jnp.arange(4.0)[None]
    linen, model = Straight(), Turned()
    variables = random_values(shapes_of(linen, x))
    found = port.suggest(variables, model, x, linen=linen)
    assert found.rules == {"w": "w transpose"}
    found.plan.apply()
    np.testing.assert_array_equal(model(x), linen.apply(variables, x))
