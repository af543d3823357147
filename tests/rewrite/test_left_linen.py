"""A class that is not rewritten stays Linen, says why, and still runs."""

import jax
import pytest
from flax import linen as nn

import bridge
from bridge import rewrite
from tests.rewrite import models_wrapped_lifts as lifts
from tests.rewrite.programs_left import ELSEWHERE, LEFT, REVIEWED

INPUT = jax.ShapeDtypeStruct((2, 4, 3), "float32")


def result_of(make, *inputs, **options):
    return bridge.rewrite(make, *(inputs or (INPUT,)), gradients=False, **options)


def level(result, name):
    return next(each for each in result.classes if each.name == name)


# Linen drops the keyword, with a warning.
@pytest.mark.filterwarnings("ignore:kwargs are not supported in vmap:RuntimeWarning")
@pytest.mark.parametrize("name", LEFT)
def test_a_class_that_stays_linen_says_why(name, imported_program):
    reason, source = LEFT[name]
    module = imported_program(source, ELSEWHERE)
    result = result_of(getattr(module, "Root", module.Model), fast=True)
    found = level(result, "Model")
    assert found.level == "left Linen", str(result)
    assert reason in found.notes[0]
    (refusal,) = found.refusals
    assert reason in refusal.reason
    assert refusal.line is None or f":{refusal.line}: " in found.notes[0]
    assert f"[{refusal.id}] {refusal.remedy}" in result.remedies
    assert not result.ok


@pytest.mark.parametrize("name", REVIEWED)
def test_a_class_that_is_rewritten_and_reviewed_says_why(name, imported_program):
    reason, source = REVIEWED[name]
    result = result_of(imported_program(source).Model)
    found = level(result, "Model")
    assert result.is_proven, str(result)
    assert found.level == "needs review"
    assert found.notes[0].endswith(reason)
    assert "proven, but 1 class needs review" in result.verdict


@pytest.mark.parametrize(
    "name", ["Maybe", "OfKinds", "OfOptions", "OfTable", "Sometimes", "Unseen", "WithoutName"]
)
def test_a_lifted_layer_that_stays_linen_says_why(name):
    cls = getattr(lifts, name)
    result = result_of(cls)
    assert result.is_proven, str(result)
    found = level(result, name)
    assert f"stays Linen: {cls.__doc__} [" in found.notes[0]
    assert [each.reason for each in found.refusals] == [cls.__doc__]


def test_what_the_rewriter_cannot_do_by_mistake_stays_linen(monkeypatch):
    def failed(self):
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr("bridge.rewrite._rewriter.ClassText.written", failed)
    found = level(result_of(lifts.Step), "Step")
    assert found.notes == ("the rewriter failed: ZeroDivisionError: a mistake [rewriter-failed]",)


AROUND = """


class Around(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Model()(nn.Dense(3)(x))
"""


@pytest.mark.parametrize("name", ["made by function", "inner function", "while loop", "try block"])
def test_the_program_around_it_is_rewritten_and_proven(name, imported_program):
    result = result_of(imported_program(LEFT[name].source + AROUND).Around)
    assert result.is_proven, str(result)
    assert level(result, "Around").level == "proven"
    text = next(iter(result.sources.values()))
    assert "bridge.ToNNX(_linen.Model(" in text
    assert "# Stays Linen: " in text


AROUND_INITIALIZER = """


class Around(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = jnp.sqrt(3.0)
        init = lambda key, shape: nn.initializers.ones(key, shape) / scale
        return Model(init)(nn.Dense(3)(x))
"""


def test_a_part_that_stays_linen_may_hold_what_a_constructor_computed(imported_program):
    result = result_of(imported_program(LEFT["declared"].source + AROUND_INITIALIZER).Around)
    assert result.is_proven, str(result)
    assert level(result, "Around").level == "proven"
    assert level(result, "Model").level == "left Linen"


def program_around(tmp_path, monkeypatch, text, name):
    (tmp_path / f"{name}.py").write_bytes(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return __import__(name)


def test_a_class_made_by_exec_stays_linen():
    space = {"__name__": __name__, "nn": nn}
    exec(
        "class Made(nn.Module):\n"
        "    @nn.compact\n"
        "    def __call__(self, x):\n"
        "        return nn.Dense(3)(x)\n",
        space,
    )
    result = result_of(space["Made"])
    assert [each.level for each in result.classes] == ["left Linen"]
    assert not result.is_proven
    assert not result.sources


def test_a_class_made_in_a_function_stays_linen():
    class Local(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x)

    (found,) = result_of(Local).classes
    assert found.level == "left Linen"
    assert "not defined at the top of its file" in found.notes[0]


LATIN = """# -*- coding: latin-1 -*-
from flax import linen as nn
NAME = "caf\xe9"
class Latin(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)
"""


def test_a_source_that_is_not_utf8_stays_linen(tmp_path, monkeypatch):
    module = program_around(tmp_path, monkeypatch, LATIN.encode("latin-1"), "latin_models")
    (found,) = result_of(module.Latin).classes
    assert found.level == "left Linen"
    assert "not UTF-8" in found.notes[0]


UNICODE = '''"""Größen."""
from flax import linen as nn


class Größe(nn.Module):
    größe: int = 4  # wie groß

    @nn.compact
    def __call__(self, x):
        é = nn.Dense(self.größe, name="é")(x); y = nn.Dense(2)(é)  # „zwei“
        return y
'''


def test_a_source_beyond_ascii_is_rewritten(tmp_path, monkeypatch):
    module = program_around(tmp_path, monkeypatch, UNICODE.encode(), "unicode_models")
    result = result_of(module.Größe)
    assert result.ok, str(result)


def test_a_model_that_cannot_be_run_is_an_error_that_says_so():
    with pytest.raises(rewrite.RewriteError, match="cannot be run with its sample inputs"):
        bridge.rewrite(lifts.Step)
    with pytest.raises(rewrite.RewriteError, match="expected a Linen module"):
        bridge.rewrite(3)


def test_an_inner_function_stays_with_its_class(imported_program):
    result = result_of(imported_program(LEFT["inner of other"].source).Model)
    functions = [each for each in result.classes if each.name == "dense"]
    assert {each.level for each in result.classes} == {"left Linen"}, functions
    assert not result.sources
