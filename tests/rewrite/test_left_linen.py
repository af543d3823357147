"""What is not rewritten stays Linen, says why, and still runs."""

import inspect

import jax
import pytest
from flax import linen as nn

import bridge
from bridge import rewrite
from tests.rewrite import models_left as models
from tests.rewrite import models_left_calls as others

LEFT = [
    cls
    for cls in (*vars(models).values(), *vars(others).values())
    if (
        inspect.isclass(cls)
        and issubclass(cls, nn.Module)
        and cls.__module__ in (models.__name__, others.__name__)
        and cls.__doc__
        and cls.__doc__[0].islower()
    )
    or cls in (models.OwnTrain, models.TrainField, models.ReadsPath)
]
INPUT = jax.ShapeDtypeStruct((2, 4, 3), "float32")


def result_of(make, *inputs, **options):
    return bridge.rewrite(make, *(inputs or (INPUT,)), gradients=False, **options)


def level(result, cls):
    return next(each for each in result.classes if each.name == cls.__name__)


SPECIAL = {
    others.NeverSeen: others.MakesNeverSeen,
    models.Hidden: models.HidesIt,
    models.OwnLayer: lambda: models.OwnLayer(3),
}


@pytest.mark.parametrize("cls", LEFT, ids=lambda cls: cls.__name__)
def test_a_class_that_stays_linen_says_why(cls):
    result = result_of(SPECIAL.get(cls, cls))
    found = level(result, cls)
    assert found.level == "left Linen", str(result)
    assert cls.__doc__ in found.notes[0]
    assert not result.ok


@pytest.mark.parametrize(
    "part",
    [models.MadeByFunction, models.InnerFunction, models.WhileLoop, models.Starred],
    ids=lambda cls: cls.__name__,
)
def test_the_program_around_it_is_rewritten_and_proven(part):
    class_ = PROGRAMS[part]
    result = result_of(class_)
    assert result.is_proven, str(result)
    assert level(result, class_).level == "proven"
    text = next(iter(result.sources.values()))
    assert f"bridge.ToNNX(_linen.models.{part.__name__}(" in text
    assert "# Stays Linen: " in text


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
        bridge.rewrite(models.NeedsValue)
    with pytest.raises(rewrite.RewriteError, match="expected a Linen module"):
        bridge.rewrite(3)


class AroundFunction(nn.Module):
    @nn.compact
    def __call__(self, x):
        return models.MadeByFunction()(nn.Dense(3)(x))


class AroundInner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return models.InnerFunction()(nn.Dense(3)(x))


class AroundWhile(nn.Module):
    @nn.compact
    def __call__(self, x):
        return models.WhileLoop()(nn.Dense(3)(x))


class AroundStarred(nn.Module):
    @nn.compact
    def __call__(self, x):
        return models.Starred()(nn.Dense(3)(x))


PROGRAMS = {
    models.MadeByFunction: AroundFunction,
    models.InnerFunction: AroundInner,
    models.WhileLoop: AroundWhile,
    models.Starred: AroundStarred,
}
