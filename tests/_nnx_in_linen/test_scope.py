"""A ToLinen in one call: its name, variables and streams, and what it reports."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge._conversion.neutral import by_address
from bridge._graphdefs.static_graphdef import split
from bridge._nnx_in_linen.scope import WrapperScope

KEY = jax.random.key(0)
X = jnp.ones((1, 3))


class Parent(nn.Module):
    strict: bool | None = None

    def setup(self):
        self.inner = bridge.ToLinen(nnx.Linear, (3, 2), strict=self.strict)

    def __call__(self, x):
        return self.inner(x)


VARIABLES = Parent().init(KEY, X)


def in_scope(function, rngs=None, mutable=False, **fields):
    """Calls a function of the wrapper's scope, inside of a Linen model."""
    return Parent(**fields).apply(
        VARIABLES, method=lambda m: function(WrapperScope(m.inner)), rngs=rngs, mutable=mutable
    )


def test_messages_name_the_class_and_the_place():
    assert in_scope(lambda scope: scope.where) == "ToLinen(Linear) at inner"
    assert WrapperScope(bridge.to_linen(nnx.Linear, 3, 2)).where == "ToLinen(Linear)"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("params",), {"default": "params"}),
        (("params", "dropout"), {"default": "params", "dropout": "dropout"}),
        (("params", "default"), {"params": "params", "default": "default"}),
    ],
)
def test_the_constructor_gets_the_keys_that_linen_gives_to_the_scope(names, expected):
    rngs = {name: jax.random.key(i) for i, name in enumerate(names)}
    found = in_scope(lambda scope: scope.constructor_keys(), rngs)

    def of_linen(scope):
        # What Linen's own scope has for each stream before anything is drawn.
        return {n: scope.linen.scope.rngs[old].as_jax_rng() for n, old in expected.items()}

    wanted = in_scope(of_linen, rngs)
    assert found.keys() == wanted.keys()
    assert all(bool(jnp.all(found[name] == wanted[name])) for name in wanted)


def test_streams_of_a_traced_constructor_are_the_call_s_and_the_variables():
    stored = {"RngKey": {"noise": {"key": {"value": KEY}}}}
    rngs = {"params": KEY, "dropout": KEY}
    assert in_scope(lambda scope: scope.stream_names({}), rngs) == ("default", "dropout")
    assert "default" in in_scope(lambda scope: scope.stream_names(by_address(stored)), rngs)


def mismatched(scope, kernel):
    variables = {"params": {"kernel": kernel, "bias": jnp.zeros(2)}}
    found = scope.matched(VARIABLES["nnx"]["inner"]["graphdef"], by_address(variables))
    scope.check(found.comparison())


def test_other_shapes_are_an_error_unless_strict_is_false():
    with pytest.raises(bridge.MismatchError, match=r"ToLinen\(Linear\) at inner") as caught:
        in_scope(lambda scope: mismatched(scope, jnp.ones((5, 2))))
    assert [path for path, *_ in caught.value.mis_shaped] == ["params/kernel"]
    in_scope(lambda scope: mismatched(scope, jnp.ones((5, 2))), strict=False)
    in_scope(lambda scope: mismatched(scope, jnp.ones((3, 2))))


def test_an_update_that_is_lost_is_said_once_or_is_an_error():
    # Of its own, so that no test before this one has been told.
    variable = type("LostHere", (nnx.Variable,), {})(jnp.ones(()))
    address = ("LostHere", ("x",))
    assert in_scope(lambda scope: scope.may_update(address, variable), mutable=["LostHere"])[0]
    with pytest.warns(bridge.BridgeWarning, match="'LostHere'"):
        assert not in_scope(lambda scope: scope.may_update(address, variable))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not in_scope(lambda scope: scope.may_update(address, variable))
    with pytest.raises(bridge.LostUpdateError, match="'LostHere'"):
        in_scope(lambda scope: scope.may_update(address, variable), strict=True)


def test_what_is_sown_is_lost_without_a_word():
    sown = nnx.Intermediate(jnp.ones(()))
    address = ("intermediates", ("x",))
    assert not in_scope(lambda scope: scope.may_update(address, sown), strict=True)


@pytest.mark.parametrize("strict", [True, None, False])
def test_unknown_variables_are_treated_as_strict_says(strict):
    unknown = [("params", (f"not_there_{strict}",))]
    report = lambda scope: scope.report_unknown(unknown)  # noqa: E731
    if strict:
        with pytest.raises(bridge.MismatchError, match="not_there_True"):
            in_scope(report, strict=strict)
    elif strict is None:
        with pytest.warns(bridge.BridgeWarning, match="not_there_None"):
            in_scope(report, strict=strict)
    else:
        in_scope(report, strict=strict)


ONE, TWO = jnp.ones(1), jnp.full(1, 2.0)
GRAPHDEF = split(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))[0]


def bound(variables, mutable=True, **options):
    return WrapperScope(bridge.ToLinen(nnx.Linear, **options).bind(variables, mutable=mutable))


def written(leaves, variables=(), mutable=True, **options):
    scope = bound(dict(variables), mutable, **options)
    scope.write(leaves, scope.read()[0])
    return scope.linen.variables


def test_a_graphdef_is_stored_and_found_again():
    scope = bound({})
    assert scope.read() == ({}, None)
    scope.store_graphdef(GRAPHDEF)
    assert scope.read() == ({}, GRAPHDEF)


@pytest.mark.parametrize("stand_in", [{}, None])
def test_what_a_checkpoint_has_in_its_place_is_none(stand_in):
    assert bound({"nnx": {"graphdef": stand_in}}).read() == ({}, None)


@pytest.mark.parametrize("options", [{"mutable": ["params"]}, {"store_graphdef": False}])
def test_it_is_not_stored_where_the_collection_or_the_option_leaves_it_out(options):
    scope = bound({}, **options)
    scope.store_graphdef(GRAPHDEF)
    assert "nnx" not in scope.linen.variables


def test_variables_are_read_without_graphdefs_and_what_is_empty():
    variables = {"params": {"w": ONE}, "cache": {}, "nnx": {"graphdef": GRAPHDEF}}
    assert bound(variables).read() == ({("params", ("w",)): ONE}, GRAPHDEF)
    own = {"nnx": {"graphdef": GRAPHDEF, "graphdef_other": GRAPHDEF, "mine": ONE}}
    assert bound(own).read() == ({("nnx", ("mine",)): ONE}, GRAPHDEF)


def test_leaves_are_written_into_mutable_collections_alone():
    leaves = {("params", ("w",)): ONE, ("cache", ("a", 0)): TWO}
    assert written(leaves) == {"params": {"w": ONE}, "cache": {"a": {0: TWO}}}
    assert written(leaves, mutable=["cache"]) == {"cache": {"a": {0: TWO}}}


def test_a_box_that_is_there_stays_and_gets_the_new_value():
    variables = {"params": {"w": nn.Partitioned(ONE, ("a",))}}
    for leaf in (TWO, nn.Partitioned(TWO, ("b",))):
        found = written({("params", ("w",)): leaf}, variables)["params"]["w"]
        assert found.names == ("a",)
        assert found.value is TWO


@pytest.mark.parametrize(
    ("string_keys", "expected"), [(False, ("0", 1, "w")), (True, ("0", "1", "w"))]
)
def test_integers_below_the_top_are_strings_where_that_is_asked_for(string_keys, expected):
    found = written({("params", (0, 1, "w")): ONE}, string_keys=string_keys)
    (top, (second, _)) = (expected[0], expected[1:])
    assert found == {"params": {top: {second: {"w": ONE}}}}


def test_the_place_of_the_graphdef_is_reserved():
    with pytest.raises(bridge.ReservedNameError, match="nnx/graphdef"):
        written({("nnx", ("graphdef",)): ONE})


def test_a_removed_leaf_takes_along_what_held_nothing_else():
    variables = {"cache": {"a": {"b": {"w": ONE}}, "c": TWO}, "params": {"w": ONE}}
    scope = bound(variables)
    scope.remove([("cache", ("a", "b", "w"))])
    assert scope.linen.variables == {"cache": {"c": TWO}, "params": {"w": ONE}}
