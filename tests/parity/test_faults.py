"""Each mistake of a migration is found, and its place is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge import parity
from tests.parity.parity_models import (
    WIDTH,
    NNXBlock,
    X,
    linen_deep,
    linen_net,
    nnx_deep,
    nnx_net,
    transposed,
)

DEPTH = 3


@pytest.fixture(scope="module")
def linen():
    return linen_deep(DEPTH)


@pytest.fixture
def native(linen):
    return nnx_deep(linen[1], DEPTH)


@pytest.fixture(scope="module")
def net():
    return linen_net()


def places(section):
    return [compared.place for compared in section.differing]


def test_models_that_are_the_same_agree_in_every_section(linen, native):
    report = parity.check(linen, native, X, options=parity.Options(steps=2))

    assert report.ok
    assert report.first_divergence is None
    assert all(not section.differing for section in report.sections)
    # Not vacuously so: four values in each block; the block, two layers in it, and the model.
    counts = {section.name: len(section.compared) for section in report.sections}
    assert counts == {
        "port plan": 0,
        "weights": 4 * DEPTH,
        "outputs": 1,
        "layers": 3 * DEPTH + 1,
        "fields": 3 * DEPTH + 1,
        "gradients": 4 * DEPTH,
        "state": 0,
        "steps": 4 * DEPTH,
        "partition specs": 0,
    }
    assert report.section("layers").note == ""


def test_one_wrong_weight_is_named_with_its_index_and_numbers(linen, native):
    kernel = native.layers[1].dense.kernel
    before = float(kernel[2, 3])
    kernel[...] = kernel[...].at[2, 3].add(0.5)

    report = parity.check(linen, native, X)

    [weight] = report.section("weights").differing
    assert weight.place == "params/layers_1/dense/kernel -> params/layers/1/dense/kernel"
    assert weight.index == (2, 3)
    assert weight.max_abs == pytest.approx(0.5, rel=1e-5)
    assert weight.values == (f"{before:.6g}", f"{before + 0.5:.6g}")
    assert report.first_divergence.path == ("layers_1", "dense")


def test_a_transposed_square_kernel_is_named(linen, native):
    kernel = native.layers[2].dense.kernel
    kernel[...] = transposed(kernel[...])

    report = parity.check(linen, native, X)

    assert places(report.section("weights")) == [
        "params/layers_2/dense/kernel -> params/layers/2/dense/kernel"
    ]
    assert report.first_divergence.path == ("layers_2", "dense")


def test_a_missing_bias_is_named_by_the_plan_and_by_the_layers(linen, native):
    block = NNXBlock(rngs=nnx.Rngs(0), bias=False)
    block.norm = native.layers[1].norm
    block.dense.kernel[...] = native.layers[1].dense.kernel[...]
    native.layers[1] = block

    report = parity.check(linen, native, X)

    assert not report.section("port plan").ok
    assert "layers_1/dense/bias" in report.section("port plan").differing[0].place
    assert report.first_divergence.path == ("layers_1", "dense")
    # What can be compared still is.
    assert len(report.section("weights").compared) == 4 * DEPTH - 1


def test_a_missing_bias_between_models_of_one_kind_is_a_weight_of_one_only():
    with_bias, without = nn.Dense(WIDTH), nn.Dense(WIDTH, use_bias=False)
    variables = with_bias.init(jax.random.key(0), X)
    kernel_only = {"params": {"kernel": variables["params"]["kernel"]}}
    whole, lacking = (with_bias, variables), (without, kernel_only)

    for a, b, note in [(whole, lacking, "only in a"), (lacking, whole, "only in b")]:
        report = parity.check(a, b, X, options=parity.Options(steps=1))
        for name in ("weights", "gradients", "steps"):
            [weight] = [c for c in report.section(name).differing if c.note]
            assert (weight.place, weight.note) == ("params/bias", note)


def test_two_layers_of_one_shape_that_were_swapped_are_both_named(linen, native):
    native.layers[0], native.layers[2] = native.layers[2], native.layers[0]

    report = parity.check(linen, native, X)

    assert {place.split(" -> ")[0] for place in places(report.section("weights"))} == {
        f"params/layers_{index}/{leaf}"
        for index in (0, 2)
        for leaf in ("norm/scale", "norm/bias", "dense/kernel", "dense/bias")
    }
    assert report.first_divergence.path == ("layers_0", "norm")


def test_another_epsilon_is_seen_by_the_layers_and_not_by_the_weights(linen, native):
    native.layers[1].norm.epsilon = 1e-3

    report = parity.check(linen, native, X)

    assert report.section("weights").ok
    assert report.first_divergence.path == ("layers_1", "norm")
    assert report.first_divergence.path_in_b == ("layers", "1", "norm")
    assert report.first_divergence.inputs.verdict == "bitwise"
    assert report.first_divergence.after == "layers_0 -> layers/0"


class Amplifying(nnx.Module):
    """A norm, and a layer that takes away most of what the norm returns for one input."""

    def __init__(self, epsilon=1e-6, weight=1.0, dtype=None):
        self.norm = nnx.LayerNorm(4, epsilon=epsilon, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(4, 4, dtype=dtype, rngs=nnx.Rngs(0))
        self.out.kernel[...] = jnp.eye(4).at[0, 0].set(weight)
        self.out.bias[...] = -0.9 * jnp.asarray(ROW) / np.std(ROW)

    def __call__(self, x):
        return self.out(self.norm(x))


ROW = np.asarray([-1.5, -0.5, 0.5, 1.5], np.float32)


@pytest.mark.parametrize(
    ("faults", "layer", "leaves"),
    [
        # The norm stays within tolerance, and the layer behind it does not.
        ({"epsilon": 1e-5}, "norm", "out"),
        ({"epsilon": 1.01e-6, "weight": 1.01}, "out", ""),
        ({"epsilon": 1.2e-6, "dtype": jnp.float16}, "out", ""),
    ],
)
def test_the_layer_at_fault_is_the_one_whose_inputs_do_not_explain_it(faults, layer, leaves):
    report = parity.check(Amplifying(), Amplifying(**faults), ROW[None], gradients=False)

    found = report.first_divergence
    assert found.path == (layer,)
    assert found.leaves_tolerance == leaves
    assert ("epsilon" in {field.name for field in found.fields}) == (layer == "norm")
    assert f"first layer that diverges: {layer} (" in str(report)
    assert ("within tolerance here, and out of it in out" in str(report)) == bool(leaves)


def test_another_activation_names_the_block_whose_layers_all_agree(linen, native):
    native.layers[1].activation = nnx.gelu

    report = parity.check(linen, native, X)

    assert report.section("weights").ok
    assert report.first_divergence.path == ("layers_1",)
    assert report.first_divergence.after == "layers_1/norm -> layers/1/norm"


def test_a_gradient_that_was_stopped_is_seen_by_the_gradients_alone(linen, native):
    native.layers[1].cut = True

    report = parity.check(linen, native, X, options=parity.Options(steps=2))

    failed = {section.name for section in report.sections if not section.ok}
    assert failed == {"gradients", "steps"}
    assert report.first_divergence is None
    # Layer 2 comes after the cut.
    assert not any("layers_2" in place for place in places(report.section("gradients")))
    assert report.section("steps").note == "step 1 of 2 is the first to differ"
    gradient = next(
        c
        for c in report.section("gradients").differing
        if c.place.startswith("params/layers_1/dense/kernel")
    )
    assert gradient.values[1] == "0"


def test_another_momentum_is_seen_by_the_updated_state_alone(net):
    agreeing = parity.check(net, nnx_net(net[1]), X)
    report = parity.check(net, nnx_net(net[1], momentum=0.99), X)

    assert agreeing.ok
    assert len(agreeing.section("state").compared) == 2
    assert [section.name for section in report.sections if not section.ok] == ["state"]
    assert places(report.section("state")) == [
        "batch_stats/norm/mean",
        "batch_stats/norm/var",
    ]


def test_the_updated_state_is_that_of_a_training_call(net):
    variables = net[1]
    # By hand: the running mean of the first layer's outputs.
    first = variables["params"]["first"]
    hidden = np.asarray(X) @ np.asarray(first["kernel"]) + np.asarray(first["bias"])
    mean = variables["batch_stats"]["norm"]["mean"]
    expected = 0.9 * mean + 0.1 * hidden.mean(axis=0)
    wrong = nnx_net(variables, momentum=0.5)

    [compared] = [
        c for c in parity.check(net, wrong, X).section("state").compared if c.place.endswith("mean")
    ]

    index = compared.index
    assert float(compared.values[0]) == pytest.approx(float(expected[index]), rel=1e-4)


def annotated(names, rules=None):
    kernel = nn.with_partitioning(nn.initializers.lecun_normal(), names)
    if rules is not None:
        kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names, rules=rules)
    module = nn.Dense(WIDTH, kernel_init=kernel)
    return module, module.init(jax.random.key(0), X)


def native_annotated(variables, **metadata):
    model = nnx.Linear(
        WIDTH, WIDTH, rngs=nnx.Rngs(0), kernel_metadata={**metadata, "eager_sharding": False}
    )
    params = nn.meta.unbox(variables)["params"]
    model.kernel[...] = params["kernel"]
    model.bias[...] = params["bias"]
    return model


def test_another_partition_spec_is_named_with_both_specs():
    linen = annotated((None, "model"))

    same = parity.check(linen, native_annotated(linen[1], out_sharding=(None, "model")), X)
    other = parity.check(linen, native_annotated(linen[1], out_sharding=("model", None)), X)
    bare = parity.check(linen, native_annotated(linen[1]), X)

    assert same.ok
    assert len(same.section("partition specs").compared) == 2
    [compared] = other.section("partition specs").differing
    assert compared.place == "params/kernel"
    assert compared.values == ("P(None, 'model')", "P('model',)")
    [compared] = bare.section("partition specs").differing
    assert compared.values == ("P(None, 'model')", "none")


def test_logical_names_agree_with_the_mesh_axes_that_their_rules_give():
    rules = (("embed", None), ("mlp", "model"))
    linen = annotated(("embed", "mlp"), rules)

    report = parity.check(linen, native_annotated(linen[1], out_sharding=(None, "model")), X)
    logical = parity.check(linen, native_annotated(linen[1], out_sharding=("embed", "mlp")), X)
    wrong = parity.check(linen, native_annotated(linen[1], out_sharding=("model", None)), X)

    assert report.ok
    assert logical.ok
    assert not wrong.section("partition specs").ok


def test_another_dtype_is_a_difference_unless_told_otherwise(linen):
    module, variables = linen
    halved = jax.tree.map(lambda v: v.astype(jnp.bfloat16), variables)
    whole = jax.tree.map(lambda v: v.astype(jnp.float32), halved)

    report = parity.check((module, whole), (module, halved), X, gradients=False)

    assert not report.ok
    assert {c.note for c in report.section("weights").differing} == {"another dtype"}
    assert {c.max_abs for c in report.section("weights").differing} == {0.0}
    assert parity.check(
        (module, whole), (module, halved), X, gradients=False, options=parity.Options(dtypes=False)
    ).ok


def test_a_wrapper_of_the_same_model_is_bitwise_equal_in_everything(net):
    module, variables = net
    wrapped = bridge.ToNNX.from_variables(module, variables)

    report = parity.check(net, wrapped, X, options=parity.Options(steps=2))

    compared = [c for section in report.sections for c in section.compared]
    assert {c.verdict for c in compared} == {"bitwise"}
    assert len(report.section("layers").compared) == 5


def test_a_fault_that_relu_hides_from_the_outputs_is_still_one():
    class Hidden(nnx.Module):
        def __init__(self, shift):
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
            self.shift = shift

        def __call__(self, x):
            return nnx.relu(self.inner(x))

        def inner(self, x):
            return self.dense(x) - self.shift

    report = parity.check(Hidden(1e3), Hidden(2e3), X)

    assert report.section("outputs").ok
    assert report.section("gradients").ok
    assert not report.ok
    assert report.first_divergence.place == "the model itself.inner"


def test_nan_on_one_side_is_a_difference_and_on_both_shows_nothing(linen):
    module, variables = linen
    broken = jax.tree.map(lambda v: v, variables)
    bias = broken["params"]["layers_1"]["dense"]["bias"]
    broken["params"]["layers_1"]["dense"]["bias"] = bias.at[0].set(jnp.nan)

    report = parity.check((module, variables), (module, broken), X, gradients=False)

    assert report.first_divergence.path == ("layers_1", "dense")
    assert np.isinf(report.first_divergence.output.max_abs)
    both = parity.check((module, broken), (module, broken), X, gradients=False)
    assert not both.ok
    assert both.first_divergence is None
    [output] = both.section("outputs").differing
    assert (output.verdict, output.note) == ("nan", "NaN on both sides in 12 of 12 elements")
    assert both.section("weights").ok
    assert "NOTHING IS SHOWN by outputs: NaN on both sides" in str(both)
    assert "NaN arises in both models in layers_1/dense, whose inputs have none" in str(both)


def test_a_reimplementation_with_other_names_needs_rules(linen, native):
    class Renamed(nnx.Module):
        def __init__(self, blocks):
            self.one, self.two, self.three = blocks

        def __call__(self, x):
            return self.three(self.two(self.one(x)))

    renamed = Renamed(native.layers)
    rules = {"layers_0": "one", "layers_1": "two", "layers_2": "three"}

    assert not parity.check(linen, renamed, X, gradients=False).section("port plan").ok
    assert parity.check(linen, renamed, X, rules=rules, options=parity.Options(steps=1)).ok
    renamed.two.norm.epsilon = 1e-2
    report = parity.check(linen, renamed, X, rules=rules, gradients=False)
    assert report.first_divergence.place == "layers_1/norm -> two/norm"


def test_either_model_may_be_the_reference(linen, native):
    native.layers[1].norm.epsilon = 1e-3

    report = parity.check(native, linen, X, gradients=False)

    assert report.first_divergence.path == ("layers", "1", "norm")
    assert report.first_divergence.path_in_b == ("layers_1", "norm")


def test_values_without_a_place_of_their_own_are_compared_as_fused():
    cell = nn.GRUCell(WIDTH)
    carry = jnp.zeros((3, WIDTH))
    variables = cell.init(jax.random.key(0), carry, X)
    model = nnx.GRUCell(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    params = variables["params"]
    for name in ("dense_i", "dense_h"):
        gates = [params[name[-1] + gate] for gate in "rzn"]
        getattr(model, name).kernel[...] = jnp.concatenate([g["kernel"] for g in gates], axis=1)
    model.dense_i.bias[...] = jnp.concatenate([params["i" + g]["bias"] for g in "rzn"])

    report = parity.check((cell, variables), model, carry, X)

    assert len(report.section("gradients").compared) == 3
    assert report.ok
    [place] = [c.place for c in report.section("weights").compared if "dense_h" in c.place]
    assert place.endswith(" -> params/dense_h/kernel")


class LinenWrap(nn.Module):
    """A layer that holds nothing but another one."""

    @nn.compact
    def __call__(self, x):
        return 2 * nn.Dense(WIDTH, name="dense")(x)


class LinenWrapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm(name="norm")(LinenWrap(name="wrap")(x))


class NNXWrap(nnx.Module):
    def __init__(self, factor):
        self.fc = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.factor = factor

    def __call__(self, x):
        return self.factor * self.fc(x)


class NNXWrapped(nnx.Module):
    def __init__(self, factor):
        self.around = NNXWrap(factor)
        self.ln = nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.ln(self.around(x))


@pytest.mark.parametrize("fault", ["around", "inside"])
def test_a_layer_is_told_from_the_only_layer_in_it(fault):
    module, model = LinenWrapped(), NNXWrapped(3 if fault == "around" else 2)
    variables = module.init(jax.random.key(0), X)
    dense = variables["params"]["wrap"]["dense"]
    model.around.fc.kernel[...] = dense["kernel"] * (2 if fault == "inside" else 1)
    model.around.fc.bias[...] = dense["bias"]
    rules = {"wrap": "around", "norm": "ln", "wrap/dense": "around.fc"}

    report = parity.check((module, variables), model, X, rules=rules, gradients=False)

    expected = {"around": "wrap -> around", "inside": "wrap/dense -> around/fc"}
    assert report.first_divergence.place == expected[fault]


class LinenRenamed(nn.Module):
    """`LinenWrapped` under other names."""

    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm(name="ln")(2 * nn.Dense(WIDTH, name="fc")(x))


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_rules_put_two_linen_modules_together_too(is_wrapped):
    module, renamed = LinenWrapped(), LinenRenamed()
    variables = module.init(jax.random.key(0), X)
    params = variables["params"]
    moved = {"params": {"ln": params["norm"], "fc": params["wrap"]["dense"]}}
    b = bridge.ToNNX.from_variables(renamed, moved) if is_wrapped else (renamed, moved)
    rules = {"wrap/dense": "fc", "norm": "ln"}

    report = parity.check((module, variables), b, X, rules=rules, options=parity.Options(steps=1))

    assert report.ok
    assert {c.place for c in report.section("gradients").compared} == {
        "params/wrap/dense/kernel -> params/fc/kernel",
        "params/wrap/dense/bias -> params/fc/bias",
        "params/norm/scale -> params/ln/scale",
        "params/norm/bias -> params/ln/bias",
    }
