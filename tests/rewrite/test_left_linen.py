"""A class that is not rewritten stays Linen, says why, and still runs."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import bridge
from bridge import rewrite
from tests.rewrite import models_left as models
from tests.rewrite import models_left_arguments as arguments
from tests.rewrite import models_left_calls as others
from tests.rewrite import models_left_functions as functions
from tests.rewrite import models_left_inner as inner
from tests.rewrite import models_left_makers as makers
from tests.rewrite import models_left_places as places
from tests.rewrite import models_left_ties as ties
from tests.rewrite import models_wrapped_lifts as lifts

LEFT = [
    cls
    for module in (models, others, arguments, functions, inner, makers, places, ties)
    for cls in vars(module).values()
    if (
        inspect.isclass(cls)
        and issubclass(cls, nn.Module)
        and cls.__module__ == module.__name__
        and cls.__doc__
        and cls.__doc__[0].islower()
    )
    or cls in (models.OwnTrain, models.ReadsPath, models.FieldCls, models.Spectral)
]
INPUT = jax.ShapeDtypeStruct((2, 4, 3), "float32")


def result_of(make, *inputs, **options):
    return bridge.rewrite(make, *(inputs or (INPUT,)), gradients=False, **options)


def level(result, cls):
    return next(each for each in result.classes if each.name == cls.__name__)


SPECIAL = {
    others.NeverSeen: others.MakesNeverSeen,
    others.ReadsAMode: others.GivesAMode,
    models.Hidden: models.HidesIt,
    functions.StacksField: functions.MakesField,
    makers.Uncalled: lambda: makers.Uncalled(nn.Dense(3)),
    makers.GivenSequential: lambda: makers.GivenSequential(nn.Sequential([nn.Dense(3)])),
    models.OwnLayer: lambda: models.OwnLayer([nn.Dense(3)]),
}


# Linen drops the keyword, with a warning.
@pytest.mark.filterwarnings("ignore:kwargs are not supported in vmap:RuntimeWarning")
@pytest.mark.parametrize("cls", LEFT, ids=lambda cls: cls.__name__)
def test_a_class_that_stays_linen_says_why(cls):
    around = getattr(places, f"Makes{cls.__name__}", cls)
    result = result_of(SPECIAL.get(cls, around))
    found = level(result, cls)
    assert found.level == "left Linen", str(result)
    assert cls.__doc__ in found.notes[0]
    (refusal,) = found.refusals
    assert cls.__doc__ in refusal.reason
    assert refusal.line is None or f":{refusal.line}: " in found.notes[0]
    assert f"[{refusal.id}] {refusal.remedy}" in result.remedies
    assert not result.ok


@pytest.mark.parametrize("name", ["Maybe", "OfKinds", "Sometimes", "WithoutName"])
def test_a_lifted_layer_that_stays_linen_says_why(name):
    cls = getattr(lifts, name)
    result = result_of(cls)
    assert result.is_proven, str(result)
    found = level(result, cls)
    assert f"stays Linen: {cls.__doc__} [" in found.notes[0]
    assert [each.reason for each in found.refusals] == [cls.__doc__]


def test_what_the_rewriter_cannot_do_by_mistake_stays_linen(monkeypatch):
    def failed(self):
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr("bridge.rewrite._rewriter.ClassText.written", failed)
    found = level(result_of(lifts.Step), lifts.Step)
    assert found.notes == ("the rewriter failed: ZeroDivisionError: a mistake [rewriter-failed]",)


@pytest.mark.parametrize("cls", [others.CountsWhenMutable, others.CountsUnderFlag])
def test_state_that_asks_whether_it_is_mutable_is_reviewed(cls):
    result = result_of(cls)
    found = level(result, cls)
    assert result.is_proven, str(result)
    assert found.level == "needs review"
    assert found.notes[0].endswith(cls.__doc__)


def test_a_method_that_nothing_ran_may_apply_its_module_and_is_reviewed():
    result = result_of(others.AppliesItself)
    found = level(result, others.AppliesItself)
    assert result.is_proven, str(result)
    assert found.level == "needs review"
    assert found.notes[0].endswith("self.apply is called where nothing ran")


@pytest.mark.parametrize(
    "part",
    [models.MadeByFunction, models.InnerFunction, models.WhileLoop, models.TryBlock],
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


def test_a_part_that_stays_linen_may_hold_what_a_constructor_computed():
    result = result_of(AroundInitializer)
    assert result.is_proven, str(result)
    assert level(result, AroundInitializer).level == "proven"
    assert level(result, arguments.Declared).level == "left Linen"


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


class AroundTry(nn.Module):
    @nn.compact
    def __call__(self, x):
        return models.TryBlock()(nn.Dense(3)(x))


class AroundInitializer(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = jnp.sqrt(3.0)
        init = lambda key, shape: nn.initializers.ones(key, shape) / scale  # noqa: E731
        return arguments.Declared(init)(nn.Dense(3)(x))


PROGRAMS = {
    models.MadeByFunction: AroundFunction,
    models.InnerFunction: AroundInner,
    models.WhileLoop: AroundWhile,
    models.TryBlock: AroundTry,
}


def test_an_inner_function_stays_with_its_class():
    result = result_of(inner.InnerOfOther)
    functions = [each for each in result.classes if each.name == "dense"]
    assert {each.level for each in result.classes} == {"left Linen"}, functions
    assert not result.sources
