"""The table of refusals: each row is raised, given by a model of the tests, and says what to do."""

import ast
import json
import pathlib
import re
import string
import sys
import types

import pytest
from flax import linen as nn

import bridge.rewrite
from bridge._demo import _models
from bridge.rewrite.plan._plans import Written
from bridge.rewrite.plan._refusals import _TABLE
from tests.rewrite.programs_left import LEFT
from tests.rewrite.test_left_linen import result_of
from tests.rewrite.training.test_training import OF_TRAINING

SOURCES = pathlib.Path(bridge.rewrite.__file__).parent
MODELS = pathlib.Path(__file__).parent
RAISED = ("NotRewritableError", "LayerNotRewritableError", "refused")
# Rows that no program in `LEFT` and no model's docstring gives, and the test that has them.
ELSEWHERE = {
    "not-asked-for": "test_in_place.py",
    "skipped": "test_writing.py",
    "rewriter-failed": "test_left_linen.py",
    "unknown-size": "test_traps.py",
    "around-left": "test_left_linen.py",
    "lacks-argument": "test_traps.py",
    "sequential-keywords": "test_sequential.py",
    "not-at-top": "test_left_linen.py",
    "not-utf8": "test_left_linen.py",
    "no-counterpart": "test_refusals.py",
    "class-elsewhere": "test_refusals.py",
    "lifted-class": "test_refusals.py",
    "no-file": "test_refusals.py",
    "not-parsed": "test_refusals.py",
    "new-class-raises": "test_refusals.py",
    **dict.fromkeys(OF_TRAINING, "training/test_training.py"),
}


def fields(template):
    """The names in a text."""
    return {name for _, name, _, _ in string.Formatter().parse(template) if name}


def is_in(template, text):
    fixed = (literal for literal, *_ in string.Formatter().parse(template))
    return re.search(".*".join(map(re.escape, fixed)), text)


def raised():
    """The ids in the sources, each with the values that it is given."""
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if name in RAISED and isinstance(node.args[0], ast.Constant):
                yield node.args[0].value, {keyword.arg for keyword in node.keywords}


def given():
    """The reasons of the programs, and the docstrings of the models."""
    return [row.reason for row in LEFT.values()] + [
        ast.get_docstring(node) or ""
        for path in MODELS.glob("models_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]


def test_each_row_is_raised_with_the_values_that_its_texts_name():
    found = list(raised())
    assert {id for id, _ in found} == set(_TABLE)
    wrong = [id for id, values in found if values != fields("".join(_TABLE[id]))]
    assert wrong == []


def test_each_row_is_given_by_a_model_or_tested_elsewhere():
    texts = given()
    untested = {
        id for id, (reason, _) in _TABLE.items() if not any(is_in(reason, text) for text in texts)
    }
    assert untested == set(ELSEWHERE), sorted(untested ^ set(ELSEWHERE))


def test_each_row_has_an_id_of_words_and_a_sentence_about_what_to_do():
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", id) for id in _TABLE)
    assert [id for id, (_, remedy) in _TABLE.items() if not remedy.endswith(".")] == []
    assert len({reason for reason, _ in _TABLE.values()}) == len(_TABLE)


def test_json_and_text_show_the_id_and_what_to_do(imported_program):
    module = imported_program(LEFT["while loop"].source)
    result = result_of(module.Model)
    (found,) = json.loads(result.to_json())["classes"]
    (refusal,) = found["refusals"]
    line = refusal.pop("line")
    reason = "a module is made in a while loop"
    assert f"{module.__name__}.py:{line}: {reason} [while-loop]" in found["notes"]
    assert refusal == {
        "id": "while-loop",
        "reason": reason,
        "remedy": "Write a `for` loop with a known number of iterations.",
    }
    assert f"[while-loop] {refusal['remedy']}" in str(result)


class Doubled(nn.Module):
    @nn.compact
    def __call__(self, x):
        return 2 * nn.Dense(3)(x)


class Local(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.ConvLocal(4, (2,))(x))


class Elsewhere(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(_models.DigitsCNN()(x[..., None], train=False))


class Negated(nn.Module):
    @nn.compact
    def __call__(self, x):
        return -x


class LiftedInside(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Negated()(nn.Sequential([nn.remat(Negated)(), nn.Dense(3)])(x))


class WeightsInside(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Doubled()(nn.Sequential([nn.remat(Doubled)(), nn.Dense(3)])(x))


@pytest.mark.parametrize(
    ("cls", "id"),
    [(Local, "no-counterpart"), (Elsewhere, "class-elsewhere"), (LiftedInside, "lifted-class")],
)
def test_a_layer_that_is_wrapped_has_its_refusal_in_the_class(cls, id):
    result = result_of(cls)
    (found,) = [each for each in result.classes if each.name == cls.__name__]
    assert found.level == "proven", str(result)
    (refusal,) = found.refusals
    assert refusal.id == id
    assert f":{refusal.line}: " in found.notes[0]
    assert f"[{id}]" in found.notes[0]


def test_the_inside_of_a_wrapped_layer_has_linen_s_names_and_is_not_native():
    result = result_of(WeightsInside)
    levels = {each.name: each.level for each in result.classes}
    assert levels == {"Doubled": "proven", "WeightsInside": "proven"}, str(result)
    # The last of three layers of 3 * 3 + 3 parameters is native, each of which is as large.
    assert result.native_share == pytest.approx(1 / 3)


class Halved(nn.Module):
    more: bool = False

    @nn.compact
    def __call__(self, x):
        if self.more:
            x = nn.relu(nn.Dense(3)(x))
        return nn.Dense(3)(x) / 2


class HoldsHalved(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Halved()(x)


class HoldsHolder(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.relu(HoldsHalved()(x))


class HoldsBoth(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Halved()(HoldsHalved()(x))


@pytest.mark.parametrize(
    ("cls", "level", "share"), [(HoldsHolder, "left Linen", 0), (HoldsBoth, "proven", 0.5)]
)
def test_what_only_a_wrapped_class_holds_is_not_native(cls, level, share):
    """Regression: a class that was run by itself, with another field, counted as rewritten."""
    result = result_of(cls, skip=["HoldsHalved"])
    levels = {each.name: each.level for each in result.classes}
    assert levels["Halved"] == level, str(result)
    assert result.native_share == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("class Doubled(nnx.Module)", "not-parsed"),
        (
            "class Doubled(nnx.Module):\n    def __init__(self, *, rngs):\n        1 / 0\n",
            "new-class-raises",
        ),
    ],
)
def test_a_new_text_that_is_wrong_is_told_with_what_python_says(text, id, monkeypatch):
    wrong = Written(text)
    monkeypatch.setattr("bridge.rewrite._rewriter.ClassText.written", lambda self: wrong)
    (found,) = result_of(Doubled).classes
    assert [each.id for each in found.refusals] == [id]


def test_a_class_that_was_typed_in_has_no_file(monkeypatch):
    module = types.ModuleType("typed_in")
    monkeypatch.setitem(sys.modules, "typed_in", module)
    vars(module)["nn"] = nn
    exec("class Typed(nn.Module):\n    def __call__(self, x):\n        return x\n", vars(module))
    (found,) = result_of(vars(module)["Typed"]).classes
    assert [each.id for each in found.refusals] == ["no-file"]
