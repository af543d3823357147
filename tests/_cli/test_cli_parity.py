"""`python -m bridge parity`."""

import sys

import pytest

from bridge.parity._report import SECTIONS

from .command_line import run

MODELS = """\
import jax, jax.numpy as jnp
from flax import linen as nn, nnx
class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, scale=1.0):
        return scale * nn.Dense(3)(nn.relu(nn.Dense(5)(x)))
def linen():
    return Linen()
def with_variables():
    model, x = Linen(), jnp.ones((2, 4))
    return {"model": model, "inputs": (x,), "variables": model.init(jax.random.key(7), x)}
def scaled():
    return {**with_variables(), "kwargs": {"scale": 1.001}}
class Native(nnx.Module):
    activation = staticmethod(nnx.relu)
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(4, 5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)
    def __call__(self, x, scale=1.0):
        return scale * self.down(self.activation(self.up(x)))
class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.BatchNorm(use_running_average=not train, axis_name="batch")(nn.Dense(3)(x))
class NativeNormed(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(4, 3, rngs=rngs)
        self.bn = nnx.BatchNorm(3, axis_name="batch", rngs=rngs)
    def __call__(self, x):
        return self.bn(self.fc(x))
class Averaging(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.BatchNorm(use_running_average=not train, name="bn")(nn.Dense(3, name="fc")(x))
class Normalizing(nnx.Module):
    def __init__(self, rngs):
        self.fc, self.bn = nnx.Linear(4, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)
    def __call__(self, x):
        return self.bn(self.fc(x))
class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dropout(0.5, deterministic=not train)(x)
class Wrong(Native):
    activation = staticmethod(nnx.gelu)
def linen_foo():
    return {"model": Linen(), "method": "foo"}
def native_foo():
    return {"model": Native(nnx.Rngs(0)), "method": "foo"}
class Fails(Native):
    def __call__(self, x):
        raise ZeroDivisionError("asked to fail")
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parity_models.py").write_text(MODELS)
    yield tmp_path
    sys.modules.pop("parity_models", None)


def parity(capsys, a, b, *options):
    targets = [f"parity_models.py:{name}" for name in (a, b)]
    return run(capsys, "parity", *targets, *options)


QUICK = ("--input", "2,4", "--no-gradients")


def test_two_models_with_the_same_values_do_the_same(capsys):
    outcome = parity(capsys, "linen", "Native", *QUICK, "--port", "--json")
    assert outcome.code == 0, outcome.out + outcome.err
    assert outcome.document["schema"] == "linen-nnx-bridge/parity"
    assert outcome.document["ok"] is True


def test_models_that_differ_are_exit_code_one(capsys):
    outcome = parity(capsys, "linen", "Wrong", *QUICK, "--port")
    assert outcome.code == 1
    # Their initial values are others too.
    assert parity(capsys, "linen", "Native", *QUICK, "--json").document["ok"] is False


def test_variables_keyword_arguments_and_tolerances_can_be_given(capsys):
    same = ("with_variables", "with_variables", "--no-gradients")
    assert parity(capsys, *same).code == 0
    assert parity(capsys, *same, "--kwarg", "scale=2.0").code == 0
    scaled = ("with_variables", "scaled", "--sections", "outputs")
    assert parity(capsys, *scaled).code == 1
    assert parity(capsys, *scaled, "--tolerance", "float32=0.1").code == 0


def test_sections_are_chosen_and_only_they_count(capsys):
    # Another activation: the weights agree, and the outputs do not.
    models = ("linen", "Wrong", *QUICK, "--port", "--json")
    chosen = parity(capsys, *models, "--sections", "weights, partition specs")
    assert chosen.code == 0, chosen.out + chosen.err
    assert chosen.document["ok"] is True
    names = {section["name"] for section in chosen.document["sections"]}
    assert "outputs" not in names
    both = parity(capsys, *models, "--sections", "weights,outputs")
    assert (both.code, both.document["ok"]) == (1, False)
    unknown = parity(capsys, *models, "--sections", "weigths")
    assert (unknown.code, "weigths" in unknown.err, "weights" in unknown.err) == (2, True, True)


def test_a_named_axis_whose_size_is_not_known_is_told(capsys):
    models = ("Normed", "NativeNormed", "--input", "2,4", "--port", "--train")
    without = parity(capsys, *models)
    assert without.code == 2
    assert "unbound axis name: batch" in without.err
    assert "parity.Options(axis_sizes=" in without.err


def test_a_model_that_does_not_take_an_argument_runs_without_it(capsys):
    models = ("Averaging", "Normalizing", "--input", "2,4", "--port", "--no-gradients")
    outcome = parity(capsys, *models, "--kwarg", "train=False")
    assert outcome.code == 0, outcome.out + outcome.err


def test_training_runs_draw_from_keys_of_ones_own(capsys):
    models = ("Dropping", "Dropping", "--input", "2,4", "--train")
    without = parity(capsys, *models)
    assert (without.code, "rngs={'dropout': key}" in without.err) == (2, True)
    assert parity(capsys, *models, "--rngs", "dropout=3").code == 0
    wrong = parity(capsys, *models, "--rngs", "dropout=x")
    assert (wrong.code, "not NAME=SEED" in wrong.err) == (2, True)


def test_the_remaining_options_are_those_of_the_function(capsys):
    models = ("linen", "Native", "--input", "2,4", "--port", "--json")
    told = parity(capsys, *models, "--no-gradients", "--steps", "2")
    assert told.code == 0, told.out + told.err
    sections = {section["name"]: section for section in told.document["sections"]}
    assert "steps" in " ".join(sections)
    assert "gradients" not in sections


@pytest.mark.parametrize(
    ("a", "b", "options", "message"),
    [
        ("linen", "Fails", (*QUICK,), "ZeroDivisionError: asked to fail"),
        ("linen", "Native", (), "no inputs"),
        ("Native", "Native", (*QUICK, "--port"), "two models of one library"),
        ("linen", "Native", (*QUICK, "--tolerance", "floaty=1"), "'floaty'"),
        ("linen_foo", "linen", (*QUICK,), "no method 'foo'"),
        ("native_foo", "Native", (*QUICK,), "no method 'foo'"),
    ],
)
def test_what_cannot_be_compared_is_a_short_message(capsys, a, b, options, message):
    outcome = parity(capsys, a, b, *options)
    assert outcome.code == 2
    assert message in outcome.err
    assert len(outcome.err.splitlines()) <= 4


ALIKE = """
class Alike(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.Dense(4)(x))
class NativeAlike(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
    def __call__(self, x):
        return self.down(self.up(x))
"""


def test_a_port_that_does_not_fit_fails_as_convert_does(capsys, place):
    (place / "parity_models.py").write_text(MODELS + ALIKE)

    outcome = parity(capsys, "Alike", "NativeAlike", *QUICK, "--port")

    assert outcome.code == 1
    assert "the plan is not clean" in outcome.err


@pytest.mark.parametrize("models", [("Alike", "NativeAlike"), ("NativeAlike", "Alike")])
def test_the_rules_that_are_suggested_make_the_port_fit(capsys, place, models):
    (place / "parity_models.py").write_text(MODELS + ALIKE)

    suggested = parity(capsys, *models, *QUICK, "--suggest")
    table = suggested.out.partition("# for --rules:")[2]
    (place / "rules.toml").write_text(table)
    document = parity(capsys, *models, *QUICK, "--suggest", "--json").document
    compared = parity(capsys, *models, *QUICK, "--port", "--rules", "rules.toml")

    assert suggested.code == 0
    assert document["schema"] == "linen-nnx-bridge/parity-suggestions"
    assert document["ok"]
    assert compared.code == 0
    assert "# proposed: the order of calls in both models" in suggested.out


@pytest.mark.parametrize("models", [("Fails", "Native"), ("Native", "Fails")])
def test_the_line_that_raises_is_told(capsys, models):
    outcome = parity(capsys, *models, *QUICK)

    assert outcome.code == 2
    line = MODELS.splitlines().index('        raise ZeroDivisionError("asked to fail")') + 1
    assert f"parity_models.py, line {line}; --traceback shows all of it" in outcome.err


@pytest.mark.parametrize("number", ["-2", "1.5", "nan", "x"])
def test_steps_are_a_whole_number_from_zero_on(capsys, number):
    outcome = parity(capsys, "Native", "Native", *QUICK, "--steps", number)

    assert outcome.code == 2
    assert "is not a whole number from 0 on" in outcome.err


MISLEADING = """
class Named(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="b")(nnx.relu(nn.Dense(4, name="a")(x)))
class Swapped(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
    def __call__(self, x):
        return self.a(nnx.relu(self.b(x)))
class Same(Swapped):
    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))
"""


def test_a_wrong_port_that_fits_names_the_option_that_finds_the_rules(capsys, place):
    (place / "parity_models.py").write_text(MODELS + MISLEADING)
    ported = parity(capsys, "Named", "Swapped", *QUICK, "--port")
    assert (ported.code, "--suggest in its place" in ported.out) == (1, True)
    told = parity(capsys, "Named", "Swapped", *QUICK, "--suggest")
    (place / "rules.toml").write_text(told.out.partition("# for --rules:")[2])
    right = parity(capsys, "Named", "Swapped", *QUICK, "--port", "--rules", "rules.toml")
    assert (right.code, "--suggest" in right.out) == (0, False)


def test_a_model_that_needs_no_rules_is_told_so(capsys, place):
    """Regression: an empty table was printed, twice."""
    (place / "parity_models.py").write_text(MODELS + MISLEADING)
    told = parity(capsys, "Named", "Same", *QUICK, "--suggest")
    assert (told.code, told.out) == (0, "# No rules are needed: Linen -> NNX: 4 matched\n")


def test_help_tells_the_sections_and_how_a_missing_dropout_shows(capsys):
    out = " ".join(run(capsys, "parity", "--help").out.split())
    assert ", ".join(SECTIONS) in out
    assert "a missing dropout or another rate changes no number" in out
    assert "--sections outputs,layers,fields" in out
