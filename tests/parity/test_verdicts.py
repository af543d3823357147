"""A report says why values differ, what was not compared, and what to do."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge import parity
from tests.parity import fault_models
from tests.parity.fault_models import GPT_
from tests.parity.parity_models import WIDTH, X, linen_net, nnx_net

FORWARD = ("outputs", "layers", "fields")


@pytest.fixture(scope="module")
def gpt():
    return GPT_.linen({}), fault_models.variables_of(GPT_)


class ScannedBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.gelu(nn.Dense(8, name="fc")(x))
        return x + nn.Dropout(0.1, deterministic=True)(nn.Dense(WIDTH, name="proj")(y)), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(ScannedBlock, variable_axes={"params": 0}, split_rngs={}, length=3)
        return scan(name="blocks")(x, None)[0]


class ListBlock(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(WIDTH, 8, rngs=rngs)
        self.proj = nnx.Linear(8, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.act = nnx.gelu

    def __call__(self, x):
        return x + self.drop(self.proj(self.act(self.fc(x))))


class Listed(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([ListBlock(rngs) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def scanned():
    draw = np.random.default_rng(0)
    shapes = {
        "fc": {"kernel": (3, 4, 8), "bias": (3, 8)},
        "proj": {"kernel": (3, 8, 4), "bias": (3, 4)},
    }
    blocks = jax.tree.map(
        lambda shape: jnp.asarray(draw.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return Scanned(), {"params": {"blocks": blocks}}


def listed(variables):
    return bridge.port.plan(variables, Listed(nnx.Rngs(0))).apply()


@pytest.mark.parametrize("is_scanned_first", [True, False])
def test_a_fault_between_two_layers_of_a_scanned_block_is_between_items(scanned, is_scanned_first):
    model = listed(scanned[1])
    model.blocks[1].act = nnx.relu
    pair = (scanned, model) if is_scanned_first else (model, scanned)

    report = parity.check(*pair, X, sections=FORWARD)

    found = report.first_divergence
    places = ["blocks -> blocks/1", "blocks/fc -> blocks/1/fc", "blocks/proj -> blocks/1/proj"]
    places = [f"{place}, call 1" for place in places]
    if not is_scanned_first:
        places = ["blocks/1 -> blocks", "blocks/1/fc -> blocks/fc", "blocks/1/proj -> blocks/proj"]
    assert [found.place, found.after, found.before] == places
    assert f"between {places[1]} and {places[2]}" in " ".join(str(report).split())


def test_every_call_of_a_scanned_block_has_its_counterpart_in_a_list(scanned):
    report = parity.check(scanned, listed(scanned[1]), X, sections=FORWARD)

    assert report.ok
    assert report.section("layers").note == ""
    assert len(report.section("layers").compared) == 3 * 4 + 1


def test_calls_without_a_counterpart_are_listed_by_path(gpt):
    lacking = fault_models.native(GPT_, gpt[1], {"block 1": {"no drop": True}})

    report = parity.check(gpt, lacking, GPT_.inputs, sections=FORWARD)

    assert "calls without a counterpart, only in a: blocks_1/Dropout_0 (Dropout)" in str(report)
    assert "only in b" not in str(report)
    swapped = parity.check(lacking, gpt, GPT_.inputs, sections=FORWARD)
    assert "calls without a counterpart, only in b: blocks_1/Dropout_0 (Dropout)" in str(swapped)


def test_a_difference_within_tolerance_is_told_with_the_field(gpt):
    module = GPT_.linen({"block 1": {"ln1": {"epsilon": 1.1e-6}}})

    report = parity.check(gpt, (module, gpt[1]), GPT_.inputs, gradients=False)

    assert report.ok
    assert report.first_inexact.path == ("blocks_1", "ln1")
    [difference] = report.first_inexact.fields
    assert str(difference) == "epsilon is 1e-06 in a and 1.1e-06 in b"
    text = str(report)
    # The epsilon, and the two fields in which the Linen models hold their faults.
    assert "they agree, but for 3 static fields" in text
    assert "not bitwise equal though its inputs are: blocks_1/ln1 (LayerNorm)" in text
    assert "epsilon is 1e-06 in a and 1.1e-06 in b" in text


def test_layers_with_other_fields_and_the_same_values_agree_by_default():
    a, b = (nnx.Dropout(rate, rngs=nnx.Rngs(0)) for rate in (0.1, 0.5))

    report = parity.check(a, b, X)

    assert report.ok
    [field] = report.section("fields").differing
    assert (field.place, field.values) == ("the model itself: rate", ("0.1", "0.5"))
    assert not parity.check(a, b, X, sections=["fields"]).ok


def test_state_that_no_call_updates_is_not_called_equal():
    linen = linen_net()
    native = nnx_net(linen[1], momentum=0.99)

    told = parity.check(
        linen, native, X, sections=["state"], options=parity.Options(a_kwargs={"train": False})
    )
    free = parity.check(linen, native, X, sections=["state"])

    assert told.section("state").compared == ()
    assert "nothing was updated, so nothing was compared" in told.section("state").note
    assert len(free.section("state").differing) == 2


class Normed(nn.Module):
    axis: str | None = "batch"

    @nn.compact
    def __call__(self, x, train=False):
        return nn.BatchNorm(use_running_average=not train, axis_name=self.axis, name="norm")(x)


class NormedNNX(nnx.Module):
    def __init__(self, axis):
        self.norm = nnx.BatchNorm(WIDTH, axis_name=axis, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x)


def test_a_named_axis_without_a_size_is_refused_and_with_one_is_bound():
    variables = Normed(None).init(jax.random.key(0), X)
    linen, native = (Normed(), variables), NormedNNX("batch")

    with pytest.raises(bridge.UnboundAxisError, match=r"batch.*axis_sizes=\{'NAME': 1\}"):
        parity.check(linen, native, X, sections=["state"])
    report = parity.check(linen, native, X, options=parity.Options(axis_sizes={"batch": 2}))

    assert report.ok
    assert len(report.section("state").compared) == 2
    # By hand: every member of the axis has the same batch.
    _, updated = Normed(None).apply(variables, X, train=True, mutable=["batch_stats"])
    native.norm.mean[...] = updated["batch_stats"]["norm"]["mean"]
    assert not parity.check(
        linen, native, X, sections=["weights"], options=parity.Options(axis_sizes={"batch": 2})
    ).ok
    alone = parity.check(
        linen, NormedNNX(None), X, sections=FORWARD, options=parity.Options(axis_sizes={"batch": 2})
    )
    assert [c.place for c in alone.section("fields").differing] == ["norm: axis_name"]


@dataclasses.dataclass(frozen=True)
class Config:
    deterministic: bool = False


class Dropping(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, name="dense")(x)
        return nn.Dropout(0.5, name="drop")(x, deterministic=self.config.deterministic)


class DroppingNNX(nnx.Module):
    def __init__(self, config, rngs):
        self.config = config
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.dense(x), deterministic=self.config.deterministic)


def dropping():
    native = DroppingNNX(Config(), nnx.Rngs(0))
    dense = {"kernel": native.dense.kernel[...], "bias": native.dense.bias[...]}
    return (Dropping(Config()), {"params": {"dense": dense}}), native


def test_dropout_that_needs_a_key_is_named_with_how_to_turn_it_off():
    linen, native = dropping()

    with pytest.raises(bridge.MissingRngError) as raised:
        parity.check(linen, native, X)

    text = str(raised.value)
    assert "Dropping, layer drop, draws from the RNG streams 'dropout'" in text
    assert "turn dropout off in it with deterministic=True in kwargs, the model or its" in text


class Noisy(nn.Module):
    def setup(self):
        self.dense = nn.Dense(WIDTH)

    def noise(self, x):
        self.dense(x)
        return jax.random.normal(self.make_rng("noise"), x.shape)

    def __call__(self, x):
        return x + self.noise(self.dense(x))


def test_a_stream_of_the_model_s_own_that_has_no_key_is_named():
    linen = Noisy()
    streams = {"params": jax.random.key(0), "noise": jax.random.key(1)}

    with pytest.raises(bridge.MissingRngError) as raised:
        parity.check((linen, linen.init(streams, X)), dropping()[1], X)

    assert raised.value.streams == ("noise",)
    assert "Noisy draws from the RNG streams 'noise'" in str(raised.value)


def test_dropout_that_makes_outputs_differ_is_named():
    linen, native = dropping()

    report = parity.check(linen, native, X, rngs={"dropout": jax.random.key(0)}, sections=FORWARD)

    assert report.first_divergence.place == "drop"
    assert report.first_divergence.dropout_rate == 0.5
    assert "its dropout rate is 0.5: where dropout is on" in str(report)
    off = dataclasses.replace(linen[0].config, deterministic=True)
    native.config = off
    assert parity.check((Dropping(off), linen[1]), native, X, sections=FORWARD).ok


def test_the_verdict_names_the_sections_and_they_can_be_chosen():
    kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    annotated = nn.Dense(WIDTH, kernel_init=kernel)
    boxed = annotated.init(jax.random.key(0), X)
    plain = nn.Dense(WIDTH), nn.meta.unbox(boxed)

    report = parity.check((annotated, boxed), plain, X, gradients=False)
    chosen = parity.check((annotated, boxed), plain, X, sections=["weights", "outputs"])

    assert "they DIFFER in partition specs\n" in str(report)
    assert chosen.ok
    assert [section.name for section in chosen.sections] == ["weights", "outputs"]


@pytest.mark.parametrize("sections", ["weight", ["outputs", "grads"]])
def test_a_section_that_is_none_is_refused_with_those_that_there_are(sections):
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    with pytest.raises(bridge.InvalidOptionsError, match="'weights'"):
        parity.check(model, model, X, sections=sections)


class Counting(nnx.Module):
    """Counts how often its code runs, and fails where its inputs are concrete."""

    runs: list[str]

    def __init__(self, is_failing):
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.is_failing = is_failing

    def __call__(self, x):
        x = self.layer(x)
        is_traced = isinstance(x, jax.core.Tracer)
        Counting.runs.append("traced" if is_traced else "eager")
        if self.is_failing:
            raise ZeroDivisionError("by the model")
        return x


def test_a_run_that_fails_is_not_followed_by_another_one():
    sound = Counting(False)

    Counting.runs = []
    with pytest.raises(ZeroDivisionError, match="by the model") as raised:
        parity.check(Counting(True), sound, X, gradients=False)

    assert Counting.runs == ["eager"]
    assert "the last layer called is layer" in "\n".join(raised.value.__notes__)


@pytest.mark.parametrize("sections", [("outputs",), ("layers",), ("gradients",)])
@pytest.mark.parametrize("side", ["a", "b"])
def test_the_model_that_raises_is_named(side, sections):
    Counting.runs = []
    pair = [Counting(False), Counting(False)]
    pair["ab".index(side)] = Counting(True)

    with pytest.raises(ZeroDivisionError) as raised:
        parity.check(*pair, X, sections=sections)

    assert f"raised by {side} = Counting" in raised.value.__notes__


def test_shapes_are_refused_as_inputs_and_small_dtypes_are_not():
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    shape = jax.ShapeDtypeStruct((2, 3), "float32")
    with pytest.raises(bridge.ConversionError, match="found shapes"):
        parity.check(model, model, {"x": shape})
    half = jnp.ones((2, 3), jnp.bfloat16)
    assert parity.check(model, model, np.asarray(half), sections=["outputs"]).ok


HOW_MANY = "sections, optimizer: say how many steps are made: steps=3"


@pytest.mark.parametrize(
    ("arguments", "options", "problem"),
    [
        ({}, {"steps": -1}, "steps: found -1, expected a number from 0 on"),
        ({"sections": ["steps"]}, {}, HOW_MANY),
        ({}, {"optimizer": optax.adam(1e-3)}, HOW_MANY),
        ({}, {"axis_sizes": {"n": 0}}, "axis_sizes: found 0 for 'n', expected a number from 1 on"),
        ({"gradients": False}, {"loss": jnp.sum}, "loss: neither gradients nor steps are compared"),
    ],
)
def test_options_without_a_use_or_too_small_are_refused(arguments, options, problem):
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    with pytest.raises(bridge.InvalidOptionsError) as raised:
        parity.check(model, model, X, **arguments, options=parity.Options(**options))

    assert raised.value.problems == (problem,)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_all_faults_of_options_come_in_one_error():
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    options = parity.Options(optimizer=optax.adam(1e-3))

    with pytest.raises(bridge.InvalidOptionsError) as raised:
        parity.check(model, model, X, sections=["gradients", "grads"], options=options)

    found = [problem.partition(":")[0] for problem in raised.value.problems]
    assert found == ["sections", "sections, optimizer"]


def test_sections_decide_over_gradients_and_steps_are_added():
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    options = parity.Options(steps=1)

    report = parity.check(model, model, X, sections="gradients", gradients=False, options=options)

    assert [section.name for section in report.sections] == ["gradients", "steps"]


def test_options_of_another_type_are_refused():
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    with pytest.raises(bridge.InvalidOptionsError, match=r"found .*expected a parity\.Options"):
        parity.check(model, model, X, options={"steps": 3})


def test_the_headline_counts_static_fields_beside_what_differs():
    a, b = (
        nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0)),
        nnx.LayerNorm(WIDTH, epsilon=0.1, rngs=nnx.Rngs(0)),
    )

    text = str(parity.check(a, b, X, sections=None, gradients=False))

    assert "they DIFFER in outputs, layers; 1 static field not alike" in text.splitlines()[0]


def test_a_report_says_that_initialisers_are_not_compared():
    a, b = nn.Dense(2), nn.Dense(2, kernel_init=nn.initializers.ones)
    variables = a.init(jax.random.key(0), X)

    report = parity.check((a, variables), (b, variables), X, sections=["fields"])

    assert report.ok
    assert "fields: initialisers and functions without a name are not compared" in str(report)


class Changing(nnx.Module):
    """A layer that gets its input in another form, which its output loses."""

    def __init__(self, change, back):
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.change, self.back = change, back

    def __call__(self, x):
        return self.back(self.layer(self.change(x)))


def same(x):
    return x


def swap(x):
    return x.swapaxes(0, 1)


@pytest.mark.parametrize("is_flat", [True, False])
def test_a_layer_that_gets_and_returns_another_shape_is_no_divergence(is_flat):
    given = jnp.stack([X, X + 1])
    flat = (lambda x: x.reshape(-1, WIDTH), lambda x: x.reshape(given.shape))
    other = Changing(*(flat if is_flat else (swap, swap)))

    report = parity.check(Changing(same, same), other, given, sections=FORWARD[:2])

    assert report.ok
    # Axes that are joined are split again for the comparison.
    assert len(report.section("layers").compared) == 1 + is_flat
    note = "" if is_flat else "calls not compared, of other shapes in and out: 1"
    assert report.section("layers").note == note


def test_a_layer_of_another_shape_is_reported_with_both_shapes():
    def conv(padding):
        return nnx.Conv(2, 2, (3, 3), padding=padding, rngs=nnx.Rngs(0))

    report = parity.check(conv("SAME"), conv("VALID"), jnp.ones((1, 5, 5, 2)), gradients=False)

    assert report.first_divergence.output.shapes == ((1, 5, 5, 2), (1, 3, 3, 2))
    text = " ".join(str(report).split())
    assert "output: float32[1, 5, 5, 2] against float32[1, 3, 3, 2] (another shape)" in text
    assert "padding is 'SAME' in a and 'VALID' in b" in text


def test_each_model_is_traced_once_for_gradients_and_run_once_for_layers():
    Counting.runs = []

    assert parity.check(Counting(False), Counting(False), X, options=parity.Options(steps=3)).ok

    assert sorted(Counting.runs) == ["eager", "eager", "traced", "traced"]


class DependsOnValues(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
        y = self.layer(x)
        return y if (y > 0).any() else -y


def test_a_model_that_cannot_be_traced_is_differentiated_eagerly():
    report = parity.check(DependsOnValues(), DependsOnValues(), X)

    assert report.ok
    assert {c.verdict for c in report.section("gradients").compared} == {"bitwise"}
    note = report.section("gradients").note
    assert "DependsOnValues was run operation by operation, not compiled" in note


def test_the_text_of_a_large_difference_is_short_and_the_whole_can_be_had():
    places = [f"params/w{number}" for number in range(40)]
    compared = tuple(
        parity.Compared(place, "differs", 1.0 + n, 1.0) for n, place in enumerate(places)
    )
    many = parity.Report("a", "b", (parity.Section("weights", compared),))
    assert "and 32 more in weights; print(report.text(whole=True)) shows all" in str(many)
    assert "more in weights" not in many.text(whole=True)
    assert all(f"{place} " in many.text(whole=True) for place in places)


def test_repeated_blocks_are_one_row_and_the_largest_difference_is_shown():
    places = [f"params/blocks_{n}/w -> blocks/{n}/w" for n in range(6)]
    compared = (
        *(parity.Compared(place, "differs", note="only in a") for place in places),
        parity.Compared("params/small", "differs", 1e-3, 0.5),
        parity.Compared("params/large", "differs", 7.0, 0.1),
    )
    report = parity.Report("a", "b", (parity.Section("weights", compared),))

    rows = [line for line in str(report).splitlines() if line.startswith("| params/")]
    assert [row.split("|")[1].strip() for row in rows] == [
        "params/blocks_{0..5}/w -> blocks/{0..5}/w: only in a",
        "params/small",
        "params/large",
    ]
    [summary] = [line for line in str(report).splitlines() if line.startswith("| weights  | D")]
    assert "7.0e+00" in summary
    assert sum(f"blocks/{n}/w" in report.text(whole=True) for n in range(6)) == 6
