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
class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dropout(0.5, deterministic=not train)(x)
class Wrong(Native):
    activation = staticmethod(nnx.gelu)
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
    same = ("with_variables", "with_variables", "--no-gradients", "--no-layers")
    assert parity(capsys, *same).code == 0
    assert parity(capsys, *same, "--kwarg", "scale=2.0").code == 0
    assert parity(capsys, *same, "--b-kwarg", "scale=1.001").code == 1
    close = ("--b-kwarg", "scale=1.001", "--tolerance", "float32=0.1")
    assert parity(capsys, *same, *close).code == 0


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


def test_sizes_of_named_axes_are_passed_on(capsys):
    models = ("Normed", "NativeNormed", "--input", "2,4", "--port", "--train")
    without = parity(capsys, *models)
    assert without.code == 2
    assert "unbound axis name: batch" in without.err
    assert "--axis-size NAME=1" in without.err
    sized = parity(capsys, *models, "--axis-size", "batch=1")
    assert sized.code == 0, sized.out + sized.err
    for text in ("batch", "batch=0"):
        wrong = parity(capsys, *models, "--axis-size", text)
        assert (wrong.code, "not NAME=N, such as batch=8" in wrong.err) == (2, True)


def test_training_runs_draw_from_keys_of_ones_own(capsys):
    models = ("Dropping", "Dropping", "--input", "2,4", "--train")
    without = parity(capsys, *models)
    assert (without.code, "--rngs dropout=0" in without.err) == (2, True)
    assert parity(capsys, *models, "--rngs", "dropout=3").code == 0
    wrong = parity(capsys, *models, "--rngs", "dropout=x")
    assert (wrong.code, "not NAME=SEED" in wrong.err) == (2, True)


def test_the_remaining_options_are_those_of_the_function(capsys):
    models = ("linen", "Native", "--input", "2,4", "--port", "--json")
    told = parity(capsys, *models, "--no-layers", "--no-gradients", "--no-jit", "--steps", "2")
    assert told.code == 0, told.out + told.err
    sections = {section["name"]: section for section in told.document["sections"]}
    assert "steps" in " ".join(sections)
    assert "layers" not in sections
    assert "gradients" not in sections


@pytest.mark.parametrize(
    ("a", "b", "options", "message"),
    [
        ("linen", "Fails", (*QUICK,), "ZeroDivisionError: asked to fail"),
        ("linen", "Native", (), "no inputs"),
        ("Native", "Native", (*QUICK, "--port"), "two models of one library"),
        ("linen", "Native", (*QUICK, "--tolerance", "floaty=1"), "which is no dtype"),
        ("linen", "linen", (*QUICK, "--method", "foo"), "no method 'foo'"),
        ("Native", "Native", (*QUICK, "--method", "foo"), "no method 'foo'"),
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


def test_a_port_that_does_not_fit_names_the_options_and_fails_as_convert_does(capsys, place):
    (place / "parity_models.py").write_text(MODELS + ALIKE)

    outcome = parity(capsys, "Alike", "NativeAlike", *QUICK, "--port")

    assert outcome.code == 1
    assert "--rules; --suggest of convert and parity proposes one" in outcome.err
    assert "rules={" not in outcome.err


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
def test_the_model_that_raises_is_the_one_that_is_named(capsys, models):
    outcome = parity(capsys, *models, *QUICK)

    assert outcome.code == 2
    assert "parity_models.py:Fails, run with its inputs, raised ZeroDivisionError" in outcome.err
    assert "Native" not in outcome.err


@pytest.mark.parametrize("option", ["--steps", "--seed"])
@pytest.mark.parametrize("number", ["-2", "1.5", "nan", "x"])
def test_steps_and_a_seed_are_whole_numbers_from_zero_on(capsys, option, number):
    outcome = parity(capsys, "Native", "Native", *QUICK, option, number)

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


def test_a_port_that_fits_and_is_wrong_names_the_option_that_finds_the_rules(capsys, place):
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


HINTED = """
class Switched(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=False):
        return nn.Dropout(0.5)(nn.Dense(3)(x), deterministic=deterministic)
class NativeSwitched(nnx.Module):
    def __init__(self, rngs):
        self.Dense_0, self.drop = nnx.Linear(4, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    def __call__(self, x, deterministic=False):
        return self.drop(self.Dense_0(x), deterministic=deterministic)
class Averaging(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x))
class NativeAveraging(nnx.Module):
    def __init__(self, rngs):
        self.Dense_0, self.BatchNorm_0 = nnx.Linear(4, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)
    def __call__(self, x, train=False):
        return self.BatchNorm_0(self.Dense_0(x), use_running_average=not train)
"""


@pytest.mark.parametrize(
    ("models", "options", "told"),
    [
        ("Switched NativeSwitched", "", "--kwarg deterministic=True"),
        ("Switched NativeSwitched", "", "with it: --train, --rngs dropout=0"),
        ("Switched NativeSwitched", "--train", "with it: --train, --rngs dropout=0"),
        ("Switched NativeSwitched", "--train --rngs dropout=0", "without\n--train, or"),
        ("Averaging NativeAveraging", "--kwarg train=False", "leave it out, or check with --train"),
        ("Averaging NativeAveraging", "--sections steps", "steps are made: --steps 3"),
        (
            "Averaging NativeAveraging",
            "--train --a-kwarg train=False --b-kwarg train=True",
            "or give --kwarg train=True",
        ),
    ],
)
def test_hints_name_options_and_not_arguments(capsys, place, models, options, told):
    (place / "parity_models.py").write_text(MODELS + HINTED)
    command = (*models.split(), "--input", "2,4", "--no-gradients", "--port", *options.split())
    outcome = parity(capsys, *command)
    text = outcome.out + outcome.err
    assert told.replace("\n", " ") in " ".join(text.split())
    assert [name for name in ("kwargs=", "train=True", "rngs=", "steps=") if name in text] == (
        ["train=True"] if "--kwarg train=True" in told else []
    )
    if outcome.code == 1:
        document = parity(capsys, *command, "--json").document
        assert told.replace("\n", " ") in " ".join(document["hints"])


def test_help_tells_the_sections_and_how_a_missing_dropout_shows(capsys):
    out = " ".join(run(capsys, "parity", "--help").out.split())
    assert ", ".join(SECTIONS) in out
    assert "dropout that one of them lacks" in out
    assert "--sections outputs,layers,fields" in out
