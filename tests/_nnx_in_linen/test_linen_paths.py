"""Paths of an NNX module and of the Linen module that it replaces, both ways."""

import pytest

from bridge._nnx_in_linen.scope import LinenPaths
from bridge._rules.rules import RulesError

TABLE = {r"layers_(\d+)": r"blocks.\1.up", "out": "head", "encoder/Dense_0": "encoder.dense"}
PAIRS = [
    (("params", ("blocks", 12, "up", "kernel")), ("params", ("layers_12", "kernel"))),
    (("params", ("head", "bias")), ("params", ("out", "bias"))),
    (
        ("batch_stats", ("encoder", "dense", "mean")),
        ("batch_stats", ("encoder", "Dense_0", "mean")),
    ),
    (("params", ("scale",)), ("params", ("scale",))),
    (("params", ("heads", "bias")), ("params", ("heads", "bias"))),
]


@pytest.mark.parametrize(("nnx", "linen"), PAIRS)
def test_an_address_of_the_nnx_module_has_its_linen_path(nnx, linen):
    assert LinenPaths(TABLE).to_linen(nnx) == linen


@pytest.mark.parametrize(("nnx", "linen"), PAIRS)
def test_a_linen_address_has_its_path_in_the_nnx_module(nnx, linen):
    collection, path = nnx
    found = LinenPaths(TABLE).by_nnx({linen: "the leaf"})
    assert found == {(collection, tuple(map(str, path))): "the leaf"}


def test_without_a_table_the_paths_are_alike():
    address = ("params", ("head", "bias"))
    assert LinenPaths({}).to_linen(address) == address
    assert LinenPaths({}).by_nnx({address: 1}) == {address: 1}


def test_the_definition_stays_where_it_is():
    definition = ("nnx", ("graphdef",))
    assert LinenPaths({"out": "graphdef"}).to_linen(definition) == definition


@pytest.mark.parametrize(
    "table", [{"layers": "blocks.*"}, {"out": "head transpose"}, {"qkv": "attention.{q,k,v}"}]
)
def test_a_rule_that_changes_arrays_is_refused(table):
    with pytest.raises(RulesError, match="rules that only rename"):
        LinenPaths(table)
