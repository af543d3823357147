"""A class is proven only if it does the same for other values of its fields."""

from __future__ import annotations

import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import bridge
from bridge import port
from bridge.rewrite.prove._build import importable
from tests.rewrite import models_other_fields as models
from tests.rewrite.test_programs import spec
from tests.rewrite.weights import random_weights, without_weights

X = jnp.asarray(np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8))
# Each holds for all of these, and the class says so.
PROVEN = {
    "Plain": [
        {"width": 3, "depth": 1},
        {"width": 9, "depth": 4, "use_bias": False, "scale": 2.0},
        {"depth": 0},
    ],
    "Configured": [
        {"config": models.Config(width=3, scale=0.25), "activation": "tanh"},
        {"config": models.Config(width=11)},
    ],
    "Choosing": [{"kind": models.Kind.TANH}, {"kind": models.Kind.RELU}],
    "Refusing": [{"width": 8}],
    "Grouped": [{"groups": 1}, {"groups": 7}],
    "Ratio": [{"ratio": 0.25}, {"ratio": 2.0}],
    "Out": [{"out": 3}, {"out": None}],
    "Branching": [{"out": 3}, {"out": None}],
    "Hidden": [{"hidden": ()}, {"hidden": (3,)}, {"hidden": (2, 7, 5)}],
    "Skipping": [{"use": False}, {"use": False, "width": 9}, {"width": 3}],
    "Shortening": [{"channels": (5, 7)}, {"channels": (3, 9, 4)}, {"channels": (12,)}],
    "Concatenating": [{"use": False}, {"use": False, "width": 9}, {"width": 3}],
    "Growing": [{"growth": 3}, {"depth": 3, "growth": 5}, {"depth": 0}],
    "Residual": [{"widths": ()}, {"widths": (9,)}, {"widths": (3, 3, 8, 2)}],
    "InSetup": [{"use": False}, {"hidden": (), "width": 3}, {"use": False, "hidden": (7, 2, 9)}],
    "Flattening": [{"heads": 1}, {"heads": 3}],
    "Given": [{"out": None}, {"out": 3}, {"out": 16}],
    "Returning": [{"out": None}, {"deep": False}, {"out": 3}, {"out": None, "deep": False}],
    "Rematerialized": [{"remat": True}],
}
# Each of these is named as what does not hold.
FOUND = {
    "Shrinking": "width=7",
}


@pytest.fixture(scope="module")
def result():
    return bridge.rewrite(models.Model, spec(2, 8), gradients=False)


def rules_of(model):
    """Linen numbers the layers in the order in which they are made; lists come first."""
    own = sorted(vars(model).items())
    listed = [
        f"{name}.{place}"
        for name, each in own
        if name.startswith("denses") and isinstance(each, nnx.List)
        for place in range(len(each))
    ]
    single = [n for n, x in own if n.startswith("dense") and isinstance(x, nnx.Linear)]
    return {f"Dense_{place}": path for place, path in enumerate([*listed, *single])}


def level(result, name):
    (found,) = (each for each in result.classes if each.name == name)
    return found


@pytest.mark.parametrize("name", PROVEN)
def test_what_holds_for_other_values_is_proven(result, name):
    found = level(result, name)
    assert found.level == "proven", str(found)


@pytest.mark.parametrize(
    ("name", "fields"),
    [(name, each) for name, cases in PROVEN.items() for each in cases],
    ids=itertools.count(),
)
def test_what_is_proven_does_what_linen_does_for_values_of_ones_own(result, name, fields):
    linen = getattr(models, name)(**fields)
    variables = random_weights(linen, X)
    texts = {f"{models.__name__}_nnx": next(iter(result.sources.items()))}
    with importable(texts):
        new = getattr(importlib.import_module(f"{models.__name__}_nnx"), name)
    model = without_weights(lambda: new(**fields, in_features=8, rngs=nnx.Rngs(0)))
    port.plan(variables, model, rules_of(model)).apply()
    np.testing.assert_array_equal(model(X), linen.apply(variables, X))


@pytest.mark.parametrize("name", FOUND)
def test_what_does_not_hold_is_named_with_the_field_and_the_value(result, name):
    found = level(result, name)
    assert found.level == "proven for this configuration"
    assert any(FOUND[name] in note for note in found.notes), str(found)


def test_a_program_with_such_a_class_is_proven_for_its_configuration(result):
    assert result.is_proven
    assert result.ok
    assert "the program is proven for this configuration" in result.verdict
    assert result.native_share == 1.0


def test_a_fast_rewriting_claims_the_given_configuration_alone():
    result = bridge.rewrite(models.Rematerialized, spec(2, 8), gradients=False, fast=True)
    assert result.is_proven
    assert level(result, "Rematerialized").level == "proven for this configuration"
    assert any("were not varied" in note for note in level(result, "Rematerialized").notes)
    # Without fields, it has no other values.
    assert level(result, "Block").level == "proven"


def test_classes_are_imported_from_the_old_module_and_not_copied(result):
    (text,) = result.sources.values()
    assert f"from {models.__name__} import Config, Kind" in text
    assert "class Kind" not in text


def test_the_share_of_native_parameters_leaves_out_what_stays_linen():
    key = jax.random.key(0)
    options = {"gradients": False, "fast": True, "skip": ["Inner"]}
    result = bridge.rewrite(models.Drawing, spec(2, 8), key, **options)
    variables = jax.eval_shape(models.Drawing().init, key, X, key)["params"]
    sizes = {name: sum(x.size for x in jax.tree.leaves(v)) for name, v in variables.items()}
    expected = 1 - sizes["Inner_0"] / sum(sizes.values())
    assert result.native_share == pytest.approx(expected)
    count = len(result.classes)
    assert f"native: {count - 1} of {count} classes, {int(100 * expected)} %" in result.native


@pytest.mark.parametrize("fast", [False, True])
def test_fields_vary_as_the_model_would_vary_them(fast):
    """With its key, under the mode that a field brings along, and with inputs that fit."""
    result = bridge.rewrite(
        models.Drawing,
        spec(2, 8),
        jax.random.key(0),
        kwargs={"train": False},
        gradients=False,
        fast=fast,
    )
    # Also of a configuration that a class gets from the one around it.
    expected = "proven for this configuration" if fast else "proven"
    assert {each.name: each.level for each in result.classes} == {
        "Drawing": expected,
        "Normed": expected,
        "Inner": expected,
    }, str(result)


@pytest.mark.parametrize("make", [models.Small, models.Around])
def test_a_size_of_the_input_is_no_field_that_is_equal_by_chance(make):
    result = bridge.rewrite(make, spec(2, 3, 3), gradients=False)
    assert {each.level for each in result.classes} == {"proven"}, str(result)
    with importable({f"{models.__name__}_nnx": next(iter(result.sources.items()))}):
        new = importlib.import_module(f"{models.__name__}_nnx").Small
    for tokens in (3, 6):
        x = jnp.asarray(np.linspace(-1, 1, 2 * tokens * 5, dtype=np.float32).reshape(2, tokens, 5))
        linen = models.Small(7)
        variables = random_weights(linen, x)
        make = functools.partial(new, 7, in_features=5, tokens=tokens)
        model = without_weights(lambda make=make: make(rngs=nnx.Rngs(0)))
        port.plan(variables, model).apply()
        np.testing.assert_array_equal(model(x), linen.apply(variables, x))
