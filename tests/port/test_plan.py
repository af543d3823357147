import copy
import json
import pickle

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import freeze, meta
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import bridge
from bridge import port
from tests.port.cases import random_values
from tests.port.models import (
    RULES,
    TOKENS,
    Block,
    LinenBlock,
    LinenNet,
    Net,
    net_variables,
    shapes_of,
)
from tests.strategies import exact


@pytest.fixture
def variables():
    return net_variables()


@pytest.fixture(scope="module")
def template():
    return nnx.jit(lambda: Net(nnx.Rngs(1)))()


@pytest.fixture
def model(template):
    return nnx.clone(template)


def kinds(plan):
    return {entry.kind for entry in plan.problems}


def test_modules_of_other_names_are_found_by_structure_and_rules(variables, model):
    plan = port.plan(variables, model, RULES)
    assert plan.ok, str(plan)
    expected = LinenNet().apply(variables, TOKENS)
    np.testing.assert_array_equal(plan.apply()(TOKENS), expected)
    assert exact(plan.inverse().apply()) == exact(variables)
    back = port.plan(model, shapes_of(LinenNet(), TOKENS), RULES)
    assert exact(back.apply()) == exact(variables)


class Twins(nnx.Module):
    def __init__(self, rngs):
        self.left = nnx.Linear(4, 4, rngs=rngs)
        self.right = nnx.Linear(4, 4, rngs=rngs)


@pytest.fixture
def twin_variables():
    return random_values({"params": {"one": dense_shapes(), "other": dense_shapes()}})


def dense_shapes():
    return shapes_of(nn.Dense(4), jnp.ones((1, 4)))["params"]


def test_two_modules_of_one_structure_are_ambiguous_and_nothing_is_written(twin_variables):
    model = Twins(nnx.Rngs(0))
    before = exact(nnx.state(model))
    plan = port.plan(twin_variables, model)
    assert not plan.ok
    assert {(e.kind, e.source, e.target) for e in plan.problems} == {
        ("ambiguous", ("one", "other"), ("left",)),
        ("ambiguous", ("one", "other"), ("right",)),
    }
    with pytest.raises(port.PortError) as raised:
        plan.apply()
    assert len(raised.value.problems) == 2
    assert exact(nnx.state(model)) == before
    # Of the reverse plan, the Linen side is the target.
    ambiguous = port.plan(model, twin_variables).problems
    assert {(e.source, e.target) for e in ambiguous} == {
        (("left",), ("one", "other")),
        (("right",), ("one", "other")),
    }


def test_an_automatic_name_tells_layers_of_the_same_shape_apart():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.GroupNorm(2)(nn.LayerNorm()(x))

    class Native(nnx.Module):
        def __init__(self, rngs):
            self.second = nnx.GroupNorm(4, 2, rngs=rngs)
            self.first = nnx.LayerNorm(4, rngs=rngs)

    variables = random_values(shapes_of(Linen(), jnp.ones((2, 4))))
    model = port.plan(variables, Native(nnx.Rngs(0))).apply()
    np.testing.assert_array_equal(
        model.first.scale[...], variables["params"]["LayerNorm_0"]["scale"]
    )
    np.testing.assert_array_equal(
        model.second.bias[...], variables["params"]["GroupNorm_0"]["bias"]
    )


def test_layers_inside_norms_and_rnns_are_found_beside_them():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.SpectralNorm(nn.Dense(3))(x, update_stats=False)
            x = nn.WeightNorm(nn.Dense(5))(x)
            x = nn.RNN(nn.GRUCell(2))(x)
            return nn.Bidirectional(nn.RNN(nn.LSTMCell(3)), nn.RNN(nn.SimpleCell(4)))(x)

    class Native(nnx.Module):
        def __init__(self, r):
            self.spectral = nnx.SpectralNorm(nnx.Linear(4, 3, rngs=r), rngs=r, update_stats=False)
            self.weight = nnx.WeightNorm(nnx.Linear(3, 5, rngs=r), rngs=r)
            self.rnn = nnx.RNN(nnx.GRUCell(5, 2, rngs=r), rngs=r)
            self.both = nnx.Bidirectional(
                nnx.RNN(nnx.LSTMCell(2, 3, rngs=r)), nnx.RNN(nnx.SimpleCell(2, 4, rngs=r))
            )

    variables = random_values(shapes_of(Linen(), jnp.ones((2, 3, 4))))
    # Without values of its own, so that whatever is in it afterwards came from Linen.
    plan = port.plan(variables, nnx.eval_shape(lambda: Native(nnx.Rngs(0))))
    assert plan.ok, str(plan)
    model, params = plan.apply(), variables["params"]
    stats = variables["batch_stats"]["SpectralNorm_0"]

    def same(variable, *expected):
        np.testing.assert_array_equal(variable[...], np.concatenate(expected, axis=-1))

    same(model.spectral.layer_instance.kernel, params["Dense_0"]["kernel"])
    same(model.spectral.batch_stats["kernel", "u"], stats["Dense_0/kernel/u"])
    same(model.weight.layer_instance.bias, params["Dense_1"]["bias"])
    same(model.weight.scales[("kernel",)], params["WeightNorm_0"]["Dense_1/kernel/scale"])
    gru = params["GRUCell_0"]
    same(model.rnn.cell.dense_i.kernel, *(gru[gate]["kernel"] for gate in ("ir", "iz", "in")))
    same(model.rnn.cell.dense_h.kernel, *(gru[gate]["kernel"] for gate in ("hr", "hz", "hn")))
    same(model.both.forward_rnn.cell.if_.kernel, params["LSTMCell_0"]["if"]["kernel"])
    same(model.both.backward_rnn.cell.dense_h.kernel, params["SimpleCell_0"]["h"]["kernel"])
    assert exact(plan.inverse().apply()) == exact(variables)


def test_a_norm_that_a_rule_names_takes_its_neighbour_and_its_collection():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            norm = nn.SpectralNorm(nn.Dense(4), collection_name="spectra")
            return nn.Dense(4)(norm(x, update_stats=False))

    class Native(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.SpectralNorm(nnx.Linear(4, 4, rngs=rngs), rngs=rngs)
            self.fc = nnx.Linear(4, 4, rngs=rngs)

    variables = random_values(shapes_of(Linen(), X))
    abstract = nnx.eval_shape(lambda: Native(nnx.Rngs(0)))
    plan = port.plan(variables, abstract, {"SpectralNorm_0": "norm"})
    assert plan.ok, str(plan)
    model = plan.apply()
    spectra = variables["spectra"]["SpectralNorm_0"]
    inner, other = "Dense_0", "Dense_1"
    kernels = {name: layer["kernel"] for name, layer in variables["params"].items()}
    np.testing.assert_array_equal(model.norm.layer_instance.kernel[...], kernels[inner])
    np.testing.assert_array_equal(model.fc.kernel[...], kernels[other])
    stats = model.norm.batch_stats["kernel", "u"][...]
    np.testing.assert_array_equal(stats, spectra[f"{inner}/kernel/u"])
    assert exact(plan.inverse().apply()) == exact(variables)


def test_missing_bias_transposed_kernel_and_swapped_layers_are_named(variables, model):
    before = exact(nnx.state(model))

    def problems(change):
        changed = copy.deepcopy(variables)
        change(changed["params"])
        plan = port.plan(changed, model, RULES)
        with pytest.raises(port.PortError):
            plan.apply()
        assert exact(nnx.state(model)) == before
        return {(e.kind, *e.source, *e.target): e.note for e in plan.problems}

    assert problems(lambda p: p["head"].pop("bias")).keys() == {("missing", "head.bias")}
    assert problems(lambda p: p["head"].update(extra=jnp.ones(2))).keys() == {
        ("unexpected", "params/head/extra")
    }
    transposed = problems(lambda p: p["head"].update(kernel=p["head"]["kernel"].T))
    assert transposed == {
        ("mis-shaped", "params/head/kernel", "head.kernel"): "the transpose would fit"
    }

    def swap(params):
        params["head"], params["embed"] = params["embed"], params["head"]

    swapped = problems(swap).keys()
    assert {key[-1].split(".")[0].split("/")[-2 if "/" in key[-1] else 0] for key in swapped} == {
        "head",
        "embed",
    }


def test_swapped_layers_are_not_taken_for_transposed_ones():
    linen = {name: {"kernel": jnp.ones(shape)} for name, shape in (("a", (3, 8)), ("b", (8, 3)))}
    rngs = nnx.Rngs(0)
    model = nnx.Dict(
        a=nnx.Linear(8, 3, use_bias=False, rngs=rngs), b=nnx.Linear(3, 8, use_bias=False, rngs=rngs)
    )
    notes = {entry.target: entry.note for entry in port.plan({"params": linen}, model).problems}
    assert notes == {
        ("a.kernel",): "of the same shape: b.kernel",
        ("b.kernel",): "of the same shape: a.kernel",
    }


def test_a_block_with_a_missing_bias_names_that_bias_by_its_layer(variables, model):
    del variables["params"]["block_1"]["Dense_0"]["bias"]
    problems = port.plan(variables, model, RULES).problems
    assert {(e.kind, *e.source, *e.target) for e in problems} == {
        ("missing", "blocks.1.down.bias"),
        ("missing", "blocks.1.down.kernel"),
        ("unexpected", "params/block_1/Dense_0/kernel"),
    }
    settled = {**RULES, r"block_(\d+)/Dense_0": r"blocks.\1.down"}
    (problem,) = port.plan(variables, model, settled).problems
    assert (problem.kind, problem.target) == ("missing", ("blocks.1.down.bias",))


@pytest.mark.parametrize(
    ("rules", "note"),
    [
        ({"blok": "blocks.0"}, "matches no Linen path; did you mean 'block_0'?"),
        ({r"blocks_(\d+)/Dense_0": r"x.\1"}, "no Linen path; did you mean 'block_0/Dense_0'?"),
        ({"zzz": "head"}, "matches no Linen path"),
        ({r"block_(\d+)": r"block.\1"}, "has no 'block.0' for block_0; did you mean 'blocks.0'?"),
        ({r"block_(\d+)": "blocks.0"}, "collides"),
        ({"block_0": "blocks.0", "block_.": "blocks.1"}, "collides"),
        ({"block_(": "blocks.0"}, "not a regular expression"),
        ({"block_0": r"blocks.\7"}, "not a regular expression"),
        ({"block_0": 0}, "not a regular expression"),
        ({"block_0": "blocks.[x"}, "not an NNX path"),
        ({"head": "head.*"}, "has no"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_a_problem(variables, model, rules, note):
    plan = port.plan(variables, model, rules)
    assert any(note in e.note for e in plan.problems if e.kind == "rule"), str(plan)
    with pytest.raises(port.PortError):
        plan.apply()


def test_a_rule_may_name_leaves_and_the_parts_of_a_path(variables, model):
    variables["params"]["top"] = {"weight": variables["params"].pop("head")["kernel"]}
    variables["params"]["top"]["offset"] = jnp.ones(3)
    rules = {**RULES, "top/weight": "head.kernel", "top/offset": "head.bias"}
    plan = port.plan(variables, model, rules)
    assert plan.ok, str(plan)
    assert exact(plan.apply().head.bias[...]) == exact(jnp.ones(3))
    assert exact(plan.inverse().apply()) == exact(variables)


class LinenScanned(nn.Module):
    axis: int = 0

    @nn.compact
    def __call__(self, x):
        def body(block, carry, _):
            return block(carry), None

        layers = nn.scan(
            body, variable_axes={"params": self.axis}, split_rngs={"params": True}, length=3
        )
        return layers(LinenBlock(name="layers"), x, None)[0]


class Layered(nnx.Module):
    def __init__(self, rngs, name="layers"):
        setattr(self, name, nnx.List([Block(rngs) for _ in range(3)]))

    def __call__(self, x):
        (layers,) = [v for k, v in vars(self).items() if not k.startswith("_")]
        for block in layers:
            x = block(x)
        return x


class Stacked(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            return Block(rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, block):
            return block(x)

        return nnx.jit(forward)(x, self.layers)


X = jnp.asarray(np.random.default_rng(5).normal(size=(2, 4)), jnp.float32)


@pytest.mark.parametrize("axis", [0, 1])
def test_scanned_linen_layers_fill_a_list_of_nnx_blocks(axis):
    linen = LinenScanned(axis)
    variables = random_values(shapes_of(linen, X))
    # Every kernel and bias fits one axis only.
    model = nnx.eval_shape(lambda: Layered(nnx.Rngs(0)))
    plan = port.plan(variables, model)
    assert plan.ok, str(plan)
    plan.apply()
    expected = jax.jit(linen.apply)(variables, X)
    np.testing.assert_allclose(model(X), expected, rtol=1e-5, atol=1e-6)
    assert exact(port.plan(model, shapes_of(linen, X)).apply()) == exact(variables)

    renamed = nnx.eval_shape(lambda: Layered(nnx.Rngs(0), "blocks"))
    rules = {"layers": "blocks.*" if axis == 0 else "blocks.*@1"}
    port.plan(variables, renamed, rules).apply()
    np.testing.assert_array_equal(renamed(X), model(X))
    assert exact(port.plan(renamed, variables, rules).apply()) == exact(variables)


def test_scanned_linen_layers_fill_stacked_nnx_layers_one_to_one():
    variables = random_values(shapes_of(LinenScanned(), X))
    model = nnx.eval_shape(lambda: Stacked(nnx.Rngs(0)))
    port.plan(variables, model).apply()
    expected = jax.jit(LinenScanned().apply)(variables, X)
    np.testing.assert_allclose(model(X), expected, rtol=1e-5, atol=1e-6)
    assert exact(port.plan(model, variables).apply()) == exact(variables)


class LinenList(nn.Module):
    name_of_layers: str = "layers"

    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = LinenBlock(name=f"{self.name_of_layers}_{i}")(x)
        return x


def test_linen_layers_one_by_one_fill_stacked_nnx_layers():
    variables = random_values(shapes_of(LinenList(), X))
    model = nnx.eval_shape(lambda: Stacked(nnx.Rngs(0)))
    plan = port.plan(variables, model)
    assert plan.ok, str(plan)
    plan.apply()
    expected = LinenList().apply(variables, X)
    np.testing.assert_allclose(model(X), expected, rtol=1e-5, atol=1e-6)
    assert exact(port.plan(model, shapes_of(LinenList(), X)).apply()) == exact(variables)

    other = LinenList("block")
    named = random_values(shapes_of(other, X))
    plan = port.plan(named, model, {r"block_(\d+)": r"layers[\1]"})
    assert plan.ok, str(plan)
    plan.apply()
    np.testing.assert_allclose(model(X), other.apply(named, X), rtol=1e-5, atol=1e-6)
    assert exact(plan.inverse().apply()) == exact(named)
    # A layer too few leaves part of the stack without a source.
    del named["params"]["block_1"]
    assert kinds(port.plan(named, model, {r"block_(\d+)": r"layers[\1]"})) == {"missing"}


def test_stacked_layers_that_fit_two_axes_are_ambiguous():
    class Native(nnx.Module):
        def __init__(self, count):
            rngs = nnx.Rngs(0)
            self.layers = nnx.List(
                [nnx.Linear(3, 3, use_bias=False, rngs=rngs) for _ in range(count)]
            )

    kernel = jnp.arange(27.0).reshape(3, 3, 3)
    variables = {"params": {"layers": {"kernel": kernel}}}
    (problem,) = port.plan(variables, Native(3)).problems
    assert problem.kind == "ambiguous"
    assert "axis 0 and 1 and 2 all fit" in problem.note
    for axis in (0, 1, 2, -1):
        model = port.plan(variables, Native(3), {"layers": f"layers.*@{axis}"}).apply()
        for i, layer in enumerate(model.layers):
            np.testing.assert_array_equal(layer.kernel[...], np.take(np.asarray(kernel), i, axis))
    assert "mis-shaped" in kinds(port.plan(variables, Native(2), {"layers": "layers.*"}))


def test_a_stacked_fused_cell_is_cut_twice():
    class Native(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.cells = nnx.List([nnx.GRUCell(4, 3, rngs=rngs) for _ in range(2)])

    one = [
        random_values(shapes_of(nn.GRUCell(3), jnp.ones((1, 3)), jnp.ones((1, 4))), seed)["params"]
        for seed in (1, 2)
    ]
    variables = {"params": {"cells": jax.tree.map(lambda *x: jnp.stack(x), *one)}}
    plan = port.plan(variables, Native())
    assert plan.ok, str(plan)
    model = plan.apply()
    for cell, params in zip(model.cells, one, strict=True):
        expected = np.concatenate([params[g]["kernel"] for g in ("ir", "iz", "in")], axis=-1)
        np.testing.assert_array_equal(cell.dense_i.kernel[...], expected)
    assert exact(plan.inverse().apply()) == exact(variables)


def test_a_wrapped_linen_module_in_the_target_matches_by_its_linen_paths(variables, model):
    embed = bridge.ToNNX(nn.Embed(5, 4), rngs=nnx.Rngs(0)).lazy_init(TOKENS)
    model.embed = embed
    port.plan(variables, model, RULES).apply()
    np.testing.assert_array_equal(model(TOKENS), LinenNet().apply(variables, TOKENS))
    assert exact(port.plan(model, variables, RULES).apply()) == exact(variables)


class LinenPair(nn.Module):
    """Two layers of the same shape, which only their names tell apart."""

    names: tuple

    @nn.compact
    def __call__(self, x):
        for name in self.names:
            x = nn.Dense(4, name=name)(x)
        return x


def pair_of_values(names):
    """Linen parameters of `LinenPair` that are told apart by their values."""
    return {
        name: {"kernel": jnp.full((4, 4), 1.0 + number), "bias": jnp.full((4,), -1.0 - number)}
        for number, name in enumerate(names)
    }


def wrapped_pair(*names):
    zeros = jax.tree.map(jnp.zeros_like, pair_of_values(names))
    return bridge.ToNNX.from_variables(LinenPair(names), {"params": zeros})


def test_rules_reach_the_linen_paths_of_a_wrapped_root_in_both_directions():
    variables = {"params": pair_of_values(("a", "b"))}
    model = wrapped_pair("c", "d")
    assert kinds(port.plan(variables, model)) == {"ambiguous"}
    plan = port.plan(variables, model, {"a": "d", "b/kernel": "c.kernel", "b/bias": "c.bias"})
    assert plan.ok, str(plan)
    plan.apply()
    for name, number in (("d", 1), ("c", 2)):
        layer = getattr(model, name)
        np.testing.assert_array_equal(layer["kernel"][...], np.full((4, 4), number))
        np.testing.assert_array_equal(layer["bias"][...], np.full(4, -number))
    assert exact(plan.inverse().apply()) == exact(variables)
    back = port.plan(model, jax.eval_shape(lambda: variables), {"a": "d", "b": "c"})
    assert exact(back.apply()) == exact(variables)


def test_rules_reach_below_a_wrapper_and_the_rest_goes_by_name():
    class Model(nnx.Module):
        def __init__(self):
            self.encoder = wrapped_pair("c", "d")
            self.head = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    old = pair_of_values(("a", "d", "head"))
    variables = {"params": {"old": {"a": old["a"], "d": old["d"]}, "head": old["head"]}}
    model = Model()
    rules = {"old": "encoder", "old/a": "encoder.c"}
    plan = port.plan(variables, model, rules)
    assert plan.ok, str(plan)
    plan.apply()
    places = (model.encoder.c["kernel"], model.encoder.d["kernel"], model.head.kernel)
    assert [float(place[0, 0]) for place in places] == [1, 2, 3]
    assert exact(plan.inverse().apply()) == exact(variables)
    assert exact(port.plan(model, variables, rules).apply()) == exact(variables)
    (problem,) = (
        e for e in port.plan(variables, model, {"old/a": "encoder.x"}).problems if e.kind == "rule"
    )
    assert problem.note.startswith("the NNX model has no 'encoder.x' for old/a; did you")


def test_a_layer_of_another_name_below_a_wrapper_is_found_by_structure():
    variables = {"params": {"a": {"kernel": jnp.full((4, 2), 3.0)}, "q": {"bias": jnp.ones(2)}}}
    zeros = {"params": {"b": {"kernel": jnp.zeros((4, 2))}, "q": {"bias": jnp.zeros(2)}}}
    model = bridge.ToNNX.from_variables(nn.Dense(2), zeros)
    port.plan(variables, model).apply()
    np.testing.assert_array_equal(model.b["kernel"][...], np.full((4, 2), 3.0))
    # Two automatic names that tell different layers.
    norm, other = (
        {"params": {name: {"scale": jnp.ones(2)}}} for name in ("LayerNorm_0", "GroupNorm_0")
    )
    model = bridge.ToNNX.from_variables(nn.Dense(2), other)
    assert kinds(port.plan(norm, model)) == {"missing", "unexpected"}


def test_a_name_shared_by_collections_below_a_wrapper_is_moved_in_each():
    def values(name, sign):
        return {
            "params": {name: {"x": jnp.full(2, sign * 1.0)}, "y": jnp.full(2, sign * 2.0)},
            "batch_stats": {
                name: {"x": jnp.full(2, sign * 3.0)},
                "y": {"below": jnp.full(2, sign * 4.0)},
            },
            "empty": {},
        }

    variables = values("a", 1)
    for rules in ({"a": "b"}, {"a/x": "b.x"}):
        model = bridge.ToNNX.from_variables(nn.Dense(2), values("b", -1))
        plan = port.plan(variables, model, rules)
        assert plan.ok, str(plan)
        plan.apply()
        assert exact(model.linen_variables()) == exact(values("b", 1))
        assert exact(plan.inverse().apply()) == exact(variables)


def test_a_wrapped_nnx_module_inside_the_source_matches_by_its_nnx_paths(model):
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = bridge.ToLinen(nnx.Embed, (5, 4), name="embed")(tokens)
            x = bridge.ToLinen(nnx.Dropout, (0.5,), name="dropout")(x)
            for i in range(2):
                x = LinenBlock(name=f"block_{i}")(x)
            return nn.Dense(3, name="head")(x)

    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    source = jax.jit(Linen().init)(keys, TOKENS)
    plan = port.plan(source, model, RULES)
    assert plan.ok, str(plan)
    assert "nnx" in plan.left_alone
    assert any(path.startswith("RngKey/dropout") for path in plan.left_alone)
    plan.apply()
    np.testing.assert_array_equal(
        model.embed.embedding[...], source["params"]["embed"]["embedding"]
    )
    back = plan.inverse().apply()
    assert jax.tree.structure(back) == jax.tree.structure(source)
    assert exact(back["params"]) == exact(source["params"])


def test_built_in_nnx_layers_inside_a_linen_source_have_nnx_layouts():
    makers = {
        "gru": lambda rngs: nnx.GRUCell(4, 3, rngs=rngs),
        "lstm": lambda rngs: nnx.LSTMCell(4, 3, rngs=rngs),
        "spectral": lambda rngs: nnx.SpectralNorm(nnx.Linear(4, 3, rngs=rngs), rngs=rngs),
        "weight": lambda rngs: nnx.WeightNorm(nnx.Linear(4, 3, rngs=rngs), rngs=rngs),
        "sequence": lambda rngs: nnx.Sequential(nnx.Linear(4, 3, rngs=rngs)),
    }

    class Native(nnx.Module):
        def __init__(self):
            for name, make in makers.items():
                setattr(self, name, make(nnx.Rngs(0)))

    # What ToLinen keeps of a module is what nnx_to_linen makes of it.
    source = Native()
    variables = bridge.nnx_to_linen(source)
    plan = port.plan(variables, nnx.eval_shape(Native))
    assert plan.ok, str(plan)
    assert exact(nnx.to_pure_dict(nnx.state(plan.apply()))) == exact(
        nnx.to_pure_dict(nnx.state(source))
    )
    assert exact(plan.inverse().apply()) == exact(variables)


def test_boxes_stay_the_targets_and_values_in_boxes_are_read():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.normal(), (None, "model"))
            return nn.Dense(3, kernel_init=init, name="fc")(x)

    class Native(nnx.Module):
        def __init__(self):
            self.fc = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

    variables = Linen().init(jax.random.key(0), X)
    model = port.plan(variables, Native()).apply()
    np.testing.assert_array_equal(model.fc.kernel[...], variables["params"]["fc"]["kernel"].value)
    assert exact(port.plan(model, variables).apply()) == exact(variables)
    unboxed = port.plan(model, meta.unbox(variables)).apply()
    assert exact(unboxed) == exact(meta.unbox(variables))
    assert exact(port.plan(model, freeze(variables)).apply()) == exact(freeze(variables))


def test_the_target_keeps_its_sharding():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    model = nnx.Linear(4, 16, rngs=nnx.Rngs(0))
    model.kernel.set_value(jax.device_put(model.kernel[...], sharding))
    variables = random_values(shapes_of(nn.Dense(16), X))
    port.plan(variables, model).apply()
    assert model.kernel[...].sharding == sharding
    np.testing.assert_array_equal(model.kernel[...], variables["params"]["kernel"])

    tx = optax.sgd(1e-2, momentum=0.9)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    state = TrainState.create(apply_fn=None, params=variables["params"], tx=tx)
    state = state.replace(opt_state=jax.tree.map(np.ones_like, state.opt_state))
    port.plan(variables, model).apply_optimizer(state, optimizer)
    moments = optimizer.opt_state[0].trace["kernel"][...]
    assert moments.sharding == sharding
    np.testing.assert_array_equal(moments, np.ones((4, 16)))

    # Shapes alone say where values go as well.
    abstract = nnx.eval_shape(lambda: nnx.Linear(4, 16, rngs=nnx.Rngs(0)))
    place = jax.ShapeDtypeStruct((4, 16), jnp.float32, sharding=sharding)
    abstract.kernel.set_value(place)
    on_host = jax.tree.map(np.asarray, variables)
    assert port.plan(on_host, abstract).apply().kernel[...].sharding == sharding
    wanted = {"params": {"kernel": place, "bias": variables["params"]["bias"]}}
    assert port.plan(model, wanted).apply()["params"]["kernel"].sharding == sharding


@pytest.mark.parametrize("place", ["uncommitted", "committed", "sharded", "abstract"])
def test_later_writes_to_the_given_numpy_arrays_change_no_model(place):
    kernel, moment = (on_a_boundary(np.ones((8, 16), np.float32)) for _ in range(2))
    model = nnx.Linear(8, 16, use_bias=False, rngs=nnx.Rngs(0))
    if place == "abstract":
        model = nnx.eval_shape(lambda: nnx.Linear(8, 16, use_bias=False, rngs=nnx.Rngs(0)))
    elif place != "uncommitted":
        mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = NamedSharding(mesh, PartitionSpec("x"))
        device = sharding if place == "sharded" else jax.devices()[0]
        model.kernel.set_value(jax.device_put(model.kernel[...], device))
    variables = {"params": {"kernel": kernel}}
    plan = port.plan(variables, model)
    plan.apply()
    returned = plan.inverse().apply()
    kernel += 1
    np.testing.assert_array_equal(model.kernel[...], np.ones((8, 16)))
    np.testing.assert_array_equal(returned["params"]["kernel"], np.ones((8, 16)))

    tx = optax.sgd(1e-2, momentum=0.9)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    state = TrainState.create(apply_fn=None, params=variables["params"], tx=tx)
    state = state.replace(opt_state=jax.tree.map(lambda _: moment, state.opt_state))
    port.plan(variables, model).apply_optimizer(state, optimizer)
    moment += 1
    np.testing.assert_array_equal(optimizer.opt_state[0].trace["kernel"][...], np.ones((8, 16)))


def on_a_boundary(values):
    """A copy that begins at a multiple of 64 bytes, as JAX needs to use it without copying."""
    memory = np.empty(values.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def test_a_cast_that_changes_values_is_lossy_and_one_that_does_not_is_made():
    model = nnx.Linear(4, 3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    variables = random_values(shapes_of(nn.Dense(3), X))
    assert kinds(port.plan(variables, model)) == {"lossy"}
    short = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), variables)
    port.plan(short, model).apply()
    assert model.kernel.dtype == jnp.bfloat16
    back = port.plan(model, short)
    assert exact(back.apply()) == exact(short)
    # NumPy arrays, as restored checkpoints hold them, in a type that JAX does not have by default.
    double = jax.tree.map(lambda x: np.asarray(x, np.float64), short)
    port.plan(double, nnx.Linear(4, 3, rngs=nnx.Rngs(0))).apply()
    assert kinds(port.plan(jax.tree.map(lambda x: x + 1e-12, double), model)) == {"lossy"}


def test_a_failed_write_leaves_the_model_as_it_was(variables, model, monkeypatch):
    before = exact(nnx.state(model))
    plan = port.plan(variables, model, RULES)
    write, calls = port._moving.assign_raw_value, []

    def failing(variable, value):
        calls.append(variable)
        if len(calls) == 5:
            raise MemoryError
        write(variable, value)

    monkeypatch.setattr(port._moving, "assign_raw_value", failing)
    with pytest.raises(MemoryError):
        plan.apply()
    assert exact(nnx.state(model)) == before


@pytest.mark.parametrize("to_nnx", [True, False], ids=["target", "source"])
def test_a_model_that_changed_since_the_plan_is_refused(variables, model, to_nnx):
    sides = (variables, model) if to_nnx else (model, variables)
    plan = port.plan(*sides, RULES)
    model.head = nnx.Linear(4, 3, rngs=nnx.Rngs(5))
    before = exact(nnx.state(model))
    with pytest.raises(port.PortError, match=r"head.kernel: the Variable of the plan"):
        plan.apply()
    assert exact(nnx.state(model)) == before
    port.plan(*sides, RULES).apply()


def test_an_abstract_model_is_filled_and_states_serve_as_either_side(variables):
    abstract = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    port.plan(variables, abstract, RULES).apply()
    np.testing.assert_array_equal(abstract(TOKENS), LinenNet().apply(variables, TOKENS))
    back = port.plan(nnx.state(abstract), variables, RULES)
    assert back.ok, str(back)
    assert exact(back.apply()) == exact(variables)


def test_convert_moves_gradients_as_parameters_and_can_be_undone():
    variables = random_values(shapes_of(LinenBlock(), X))
    model = Block(nnx.Rngs(0))
    plan = port.plan(variables, model)
    before = exact(nnx.state(model))
    gradient = jax.jit(jax.grad(lambda p: LinenBlock().apply({"params": p}, X).sum()))
    expected = gradient(variables["params"])
    converted = plan.convert(expected)
    assert exact(plan.convert({"params": expected})) == exact(converted)
    assert exact(nnx.state(model)) == before
    plan.apply()
    gradients = nnx.jit(nnx.grad(lambda m: m(X).sum()))(model)
    flat = {path: leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(gradients))}
    assert converted.keys() == {("params", path) for path in flat}
    for path, leaf in flat.items():
        np.testing.assert_allclose(converted["params", path], leaf, rtol=1e-5, atol=1e-6)
    back = plan.inverse().convert(converted)
    original = nnx.traversals.flatten_mapping(expected)
    assert exact(back) == exact({("params", path): leaf for path, leaf in original.items()})
    values = nnx.traversals.flatten_mapping(variables["params"])
    expected = exact({("params", path): leaf for path, leaf in values.items()})
    assert exact(plan.inverse().convert(model)) == expected


def test_convert_takes_trees_with_leaves_missing_but_no_leaf_in_part():
    variables = random_values(shapes_of(nn.GRUCell(3), jnp.ones((2, 3)), X))
    plan = port.plan(variables, nnx.GRUCell(4, 3, rngs=nnx.Rngs(0)))
    params = dict(variables["params"])
    only_h = {name: params[name] for name in ("hr", "hz", "hn")}
    assert set(plan.convert(only_h)) == {("params", ("dense_h", "kernel"))}
    del only_h["hz"]
    with pytest.raises(port.PortError, match="params/hz/kernel is not in the tree"):
        plan.convert(only_h)
    with pytest.raises(port.PortError, match="expected the leaf's own shape"):
        plan.convert(jax.tree.map(lambda x: x.sum(), variables))


def test_convert_refuses_what_is_no_such_tree(variables, model):
    plan = port.plan(variables, model, RULES)
    with pytest.raises(bridge.ConversionError):
        plan.convert(jnp.ones(3))
    with pytest.raises(bridge.ConversionError):
        plan.inverse().convert(jnp.ones(3))


def test_a_part_of_a_stack_without_a_place_is_unexpected_both_ways():
    one = random_values(shapes_of(LinenBlock(), X))["params"]
    variables = {"params": {"block_0": one, "block_2": one}}
    model = nnx.eval_shape(lambda: Stacked(nnx.Rngs(0)))
    rules = {r"block_(\d+)": r"layers[\1]"}
    assert kinds(port.plan(variables, model, rules)) == {"missing"}
    assert kinds(port.plan(model, variables, rules)) == {"unexpected"}
    stacked = {"params": {"layers": jax.tree.map(lambda x: jnp.stack([x] * 3), one)}}
    two = nnx.eval_shape(lambda: Layered(nnx.Rngs(0)))
    rules = {"layers": "layers.*", "layers/Dense_0/bias": "layers.0.down.bias"}
    assert not port.plan(stacked, two, rules).ok
    assert not port.plan(two, stacked, rules).ok


def test_what_must_be_zero_cannot_be_moved_while_it_is_traced():
    cell = nn.GRUCell(3)
    variables = random_values(shapes_of(cell, jnp.ones((2, 3)), X))
    model = nnx.eval_shape(lambda: nnx.GRUCell(4, 3, rngs=nnx.Rngs(0)))

    @jax.jit
    def moved(variables):
        plan = port.plan(variables, model)
        assert [entry.note for entry in plan.problems] == [
            "it must be zero, which cannot be known while it is traced"
        ]
        return jax.tree.leaves(plan.convert(variables))

    assert len(moved(variables)) == 3


def test_a_plan_prints_a_plain_table_and_makes_json(variables, model):
    del variables["params"]["head"]["bias"]
    plan = port.plan(variables, model, RULES)
    text = str(plan)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 120
    assert text.splitlines()[0] == "Linen -> NNX: 1 missing, 14 matched"
    assert "params/block_1/LayerNorm_0/scale" in text
    told = json.loads(plan.to_json())
    assert told["ok"] is False
    assert told["direction"] == "linen_to_nnx"
    assert [e["target"] for e in told["entries"] if e["kind"] == "missing"] == [["head.bias"]]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (lambda v, m: v, lambda v, m: v),
        (lambda v, m: m, lambda v, m: m),
        (lambda v, m: LinenNet(), lambda v, m: m),
        (lambda v, m: m, lambda v, m: LinenNet()),
        (lambda v, m: jnp.ones(3), lambda v, m: m),
        (lambda v, m: {"params": jnp.ones(3)}, lambda v, m: m),
    ],
)
def test_anything_but_one_of_each_kind_is_refused(variables, model, source, target):
    with pytest.raises(bridge.ConversionError):
        port.plan(source(variables, model), target(variables, model))


def test_a_port_error_keeps_its_problems_through_pickling(twin_variables):
    with pytest.raises(port.PortError) as raised:
        port.plan(twin_variables, Twins(nnx.Rngs(0))).apply()
    error = pickle.loads(pickle.dumps(raised.value))
    assert str(error) == str(raised.value)
    assert error.problems == raised.value.problems
    assert isinstance(error, ValueError | bridge.BridgeError)
    assert not isinstance(error, flax.errors.FlaxError)


def test_dicts_of_layers_and_a_tied_layer_are_matched_by_name():
    class Linen(nn.Module):
        def setup(self):
            self.heads = {"left": nn.Dense(3), "right": nn.Dense(3)}
            self.embed = nn.Embed(4, 4)

        def __call__(self, x):
            return self.embed.attend(x), self.heads["left"](x) - self.heads["right"](x)

    class Native(nnx.Module):
        def __init__(self, r):
            self.heads = nnx.Dict(left=nnx.Linear(4, 3, rngs=r), right=nnx.Linear(4, 3, rngs=r))
            self.embed = nnx.Embed(4, 4, rngs=r)
            self.readout = self.embed

        def __call__(self, x):
            return self.readout.attend(x), self.heads["left"](x) - self.heads["right"](x)

    variables = random_values(shapes_of(Linen(), X))
    model = port.plan(variables, Native(nnx.Rngs(0))).apply()
    for actual, expected in zip(model(X), Linen().apply(variables, X), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert exact(port.plan(model, variables).apply()) == exact(variables)


def test_a_wrapper_without_variables_is_pointed_out(variables, model):
    model.embed = bridge.ToNNX(nn.Embed(5, 4))
    (problem,) = port.plan(variables, model, RULES).problems
    assert (problem.kind, problem.source) == ("unexpected", ("params/embed/embedding",))
    assert "embed: a ToNNX without variables, which bridge.lazy_init creates" in problem.note


def test_a_plan_is_clean_if_only_a_cache_is_there_on_one_side():
    linen = nn.MultiHeadDotProductAttention(2)
    variables = random_values(shapes_of(linen, X[None]))
    model = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
    model.init_cache((1, 2, 4))
    plan = port.plan(variables, model)
    assert [e.target[0] for e in plan.entries if e.kind == "kept"] == [
        "cache_index",
        "cached_key",
        "cached_value",
    ]
    plan.apply()
    assert {e.kind for e in port.plan(model, variables).problems} == {"unexpected"}


@pytest.mark.parametrize(
    ("graph", "variables_are"),
    [(False, {"hijax": False}), (True, {"hijax": True}), (True, {"ref": True})],
)
def test_plans_work_in_every_mode_of_nnx(graph, variables_are):
    with nnx.set_graph_mode(graph), nnx.var_defaults(**variables_are):
        variables = random_values(shapes_of(nn.Dense(3), X))
        model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        port.plan(variables, model).apply()
        assert exact(port.plan(model, variables).apply()) == exact(variables)
        actual = model(X)
    np.testing.assert_array_equal(actual, nn.Dense(3).apply(variables, X))


def test_a_plan_tells_which_leaves_make_up_another():
    variables = {"params": {name: {"kernel": jnp.ones((2, 3))} for name in "qk"}}
    model = nnx.Dict(qk=nnx.Linear(2, 6, use_bias=False, rngs=nnx.Rngs(0)))
    plan = port.plan(variables, model, {"{q,k}": "qk"})
    whole, parts = ("params", ("qk", "kernel")), [("params", (name, "kernel")) for name in "qk"]
    assert plan.sources == {whole: tuple(parts)}
    assert plan.inverse().sources == dict.fromkeys(parts, (whole,))
