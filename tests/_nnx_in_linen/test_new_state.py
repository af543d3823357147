"""State that only a call creates finds its place in a module, or none."""

import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge._nnx_in_linen.matched_variables import Attached, attach, noting_reads

ONE, TWO = jnp.ones(1), jnp.full(1, 2.0)


class Model(nnx.Module):
    fixed = 1

    def __init__(self):
        self.w = nnx.Param(jnp.zeros(1))
        self.empty = nnx.data(None)
        self.items = nnx.List([nnx.Cache(jnp.zeros(1))])
        self.plain = nnx.data({"a": nnx.Cache(jnp.zeros(1)), "deep": {}})
        self.child = nnx.Dict()
        self.linen = bridge.ToNNX(nn.Dense(1))


def attached(unknown):
    model = Model()
    return model, attach(model, unknown)


@pytest.mark.parametrize(
    ("path", "read"),
    [
        (("new",), lambda model: model.new),
        (("empty",), lambda model: model.empty),
        (("items", 1), lambda model: model.items[1]),
        (("items", "1"), lambda model: model.items[1]),
        (("plain", "b"), lambda model: model.plain["b"]),
        (("plain", "deep", "c"), lambda model: model.plain["deep"]["c"]),
        (("plain", "made", "c"), lambda model: model.plain["made"]["c"]),
        (("child", "a"), lambda model: model.child["a"]),
    ],
)
def test_a_leaf_is_put_where_nothing_is(path, read):
    model, found = attached({("cache", path): ONE})
    ((address, placed),) = found.items()
    assert address == ("cache", path)
    assert read(model) is placed.item
    assert type(placed.item) is nnx.Cache
    assert placed.item.get_raw_value() is ONE
    assert not placed.is_linen


@pytest.mark.parametrize(
    "address",
    [
        ("params", ("new",)),
        ("cache", ()),
        ("cache", ("w",)),
        ("cache", ("fixed",)),
        ("cache", ("items", 0)),
        ("cache", ("items", 5)),
        ("cache", ("items", "x")),
        ("cache", ("plain", "a")),
        ("cache", ("missing", "module", "w")),
        ("cache", ("w", "below")),
    ],
)
def test_a_leaf_without_a_place_is_ignored(address):
    model, found = attached({address: ONE})
    assert found == {}
    assert nnx.graphdef(model) == nnx.graphdef(Model())


def test_a_bare_array_stays_bare():
    model, found = attached({("nnx_arrays", ("new",)): ONE})
    assert model.new is ONE
    assert found["nnx_arrays", ("new",)].item is ONE


def test_a_leaf_of_a_wrapped_linen_module_is_linens():
    model, found = attached({("cache", ("linen", "Dense_0", "w")): ONE})
    assert found["cache", ("linen", "Dense_0", "w")].is_linen
    assert model.linen.Dense_0["w"].get_raw_value() is ONE


def test_items_of_a_list_come_in_their_order():
    unknown = {("cache", ("items", str(i))): jnp.full(1, float(i)) for i in (10, 9, 2, 1)}
    unknown |= {("cache", ("items", i)): jnp.full(1, float(i)) for i in (8, 7, 6, 5, 4, 3)}
    model, found = attached(unknown)
    assert len(found) == 10
    assert [float(item[0]) for item in model.items] == list(range(11))


def test_what_is_read_is_found_out_and_the_hooks_are_those_of_before():
    def own(variable, value):
        return value + 1

    variables = {("cache", (name,)): nnx.Cache(ONE) for name in "abc"}
    attached = {address: Attached(v, is_linen=False) for address, v in variables.items()}
    attached |= {("cache", ("d",)): Attached(nnx.Cache(ONE), is_linen=True)}
    variables["cache", ("b",)].set_metadata(on_get_value=own)
    before = {address: v.get_metadata() for address, v in variables.items()}
    read = set()
    with noting_reads(attached, read):
        assert read == {("cache", ("d",))}
        read.clear()
        assert float(variables["cache", ("a",)][0]) == 1
        assert float(variables["cache", ("b",)][0]) == 2
        assert read == {("cache", ("a",)), ("cache", ("b",))}
    assert {address: v.get_metadata() for address, v in variables.items()} == before
    assert float(variables["cache", ("c",)][0]) == 1
    assert len(read) == 2
