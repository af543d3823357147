"""The structure of a GraphDef lists by path all that it holds beyond its leaves."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bridge._graphdefs.structure import (
    differences,
    differences_but_modes,
    is_same_or_equal,
    structure,
)


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.rate = 0.5
        self.items = nnx.List([nnx.Cache(jnp.ones(1))])
        self.plain = nnx.data({"a": nnx.Cache(jnp.ones(1))})
        self.deterministic = False


def structure_of(change=lambda model: None):
    model = Model()
    change(model)
    return structure(nnx.graphdef(model))


def found(change):
    """The paths at which a changed model has another structure."""
    return sorted(differences(structure_of(), structure_of(change)), key=str)


def assign(name, value):
    return lambda model: setattr(model, name, value)


def test_two_models_of_one_definition_have_one_structure():
    assert found(lambda model: None) == []


@pytest.mark.parametrize(
    ("change", "paths"),
    [
        (assign("rate", 0.6), [("rate",)]),
        (assign("added", 1), [("added",)]),
        (lambda model: delattr(model, "rate"), [("rate",)]),
        (assign("w", nnx.BatchStat(jnp.ones(2))), [("w",)]),
        (assign("w", nnx.Param(jnp.ones(2), note="x")), [("w",)]),
        (lambda model: model.items.append(nnx.Cache(jnp.ones(1))), [("items", "_length")]),
        (lambda model: model.plain.update(b=nnx.Cache(jnp.ones(1))), [("plain", "b")]),
        (lambda model: model.plain.clear(), [("plain",), ("plain", "a")]),
    ],
)
def test_what_was_changed_is_told_by_its_path(change, paths):
    told = found(change)
    assert set(paths) <= set(told)
    assert {path[0] for path in told} == {path[0] for path in paths}


@pytest.mark.parametrize(
    "change",
    [
        assign("w", nnx.Param(jnp.zeros(5))),
        lambda model: model.w.set_value(jnp.zeros(2)),
        assign("sown", nnx.Intermediate((1,))),
        assign("_parity_place", "x"),
    ],
    ids=["another value", "set value", "sown", "observed"],
)
def test_values_and_what_is_sown_are_no_structure(change):
    assert found(change) == []


def test_a_shared_variable_is_told_from_two_equal_ones():
    def share(model):
        model.items[0] = model.plain["a"]

    def copied(model):
        model.items[0] = nnx.Cache(jnp.ones(1))

    assert found(copied) == []
    assert {path[0] for path in found(share)} & {"items", "plain"}


def test_modes_are_left_out_where_that_is_asked_for():
    before, after = structure_of(), structure_of(assign("deterministic", True))
    assert differences(before, after) == [("deterministic",)]
    assert differences_but_modes(before, after) == []
    gone = structure_of(lambda model: delattr(model, "deterministic"))
    assert differences_but_modes(before, gone) == []
    # A Variable of that name is no mode.
    variable = structure_of(assign("deterministic", nnx.data(nnx.Param(jnp.ones(1)))))
    assert ("deterministic",) in differences_but_modes(before, variable)


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (1, 1, True),
        (1, 2, False),
        ("x", "x", True),
        (np.ones(2), np.ones(2), False),
        (np.ones(1), np.ones(1), True),
        (float("nan"), float("nan"), False),
    ],
)
def test_what_cannot_be_compared_is_not_equal(a, b, equal):
    assert is_same_or_equal(a, b) is equal
    assert is_same_or_equal(a, a)
