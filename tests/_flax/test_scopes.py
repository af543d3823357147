"""The keys of one call: drawn as NNX draws them, counted as NNX counts them."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import Scope

from bridge._flax.scopes import CallKeys, LazyKeys, used_streams
from tests.models import assert_identical

KEY, OTHER = jax.random.key(0), jax.random.key(1)


def streams(**seeds):
    return nnx.Rngs(**seeds)


def call_keys(rngs, **options):
    return CallKeys({name: rngs[name] for name in rngs}, **options)


def counts(rngs):
    return {name: int(rngs[name].count[...]) for name in rngs}


class Asks(nn.Module):
    """Returns what `has_rng` and `make_rng` say about some streams."""

    names: tuple[str, ...]

    @nn.compact
    def __call__(self):
        return {name: self.make_rng(name) for name in self.names}


def test_each_stream_is_drawn_from_as_natively_and_moves_on_after_the_call():
    ours, native = streams(params=0, dropout=1), streams(params=0, dropout=1)
    for _ in range(2):
        keys = call_keys(ours)
        drawn = {name: keys.key(name) for name in ("dropout", "params", "dropout")}
        assert counts(ours) == counts(native)
        assert_identical(drawn, {"dropout": native.dropout(), "params": native.params()})
        keys.commit({"dropout", "params"})
        assert counts(ours) == counts(native)


def test_a_stream_whose_key_was_not_used_stays_where_it_is():
    rngs = streams(params=0, dropout=1)
    keys = call_keys(rngs)
    keys.key("params"), keys.key("dropout")
    keys.commit({"dropout"})
    assert counts(rngs) == {"params": 0, "dropout": 1}
    keys.commit(set())
    assert counts(rngs) == {"params": 0, "dropout": 1}


def test_a_default_stream_that_was_not_used_stays_where_it_is():
    rngs = streams(default=0, dropout=1)
    keys = call_keys(rngs)
    keys.key("noise"), keys.key("dropout")
    keys.commit({"dropout"})
    assert counts(rngs) == {"default": 0, "dropout": 1}


def test_a_key_is_computed_once():
    keys = call_keys(streams(params=0))
    assert keys.key("params") is keys.key("params")


def test_a_plain_key_is_given_as_it_is_and_never_moves_on():
    rngs = streams(params=0, dropout=1)
    keys = CallKeys({"params": rngs.params, "noise": KEY}, plain={"params"})
    assert_identical(keys.key("params"), rngs.params.key[...])
    assert keys.key("noise") is KEY
    keys.commit({"params", "noise"})
    assert counts(rngs) == {"params": 0, "dropout": 0}


def test_default_serves_each_other_stream_with_one_draw_in_order():
    ours, native = streams(default=0, params=1), streams(default=0, params=1)
    keys = call_keys(ours)
    assert_identical(keys.key("noise"), native.noise())
    assert_identical(keys.key("dropout"), native.dropout())
    assert_identical(keys.key("noise"), keys.key("noise"))
    assert_identical(keys.key("default"), native.default())
    assert_identical(keys.key("params"), native.params())
    keys.commit({"noise", "dropout", "default", "params"})
    assert counts(ours) == counts(native) == {"default": 3, "params": 1}
    # The second call goes on where the first one ended.
    again = call_keys(ours)
    assert_identical(again.key("dropout"), native.dropout())
    assert_identical(again.key("noise"), native.noise())


def test_a_draw_that_was_not_used_is_skipped_if_a_later_one_was():
    ours = streams(default=0)
    keys = call_keys(ours)
    keys.key("noise"), keys.key("dropout"), keys.key("other")
    keys.commit({"dropout"})
    assert counts(ours) == {"default": 2}
    fresh = call_keys(ours)
    drawn = {name: keys.key(name) for name in ("noise", "dropout")}
    native = streams(default=0)
    assert_identical(drawn, {"noise": native.noise(), "dropout": native.dropout()})
    assert_identical(fresh.key("dropout"), native.dropout())


def test_a_default_key_is_folded_with_the_number_of_the_draw():
    keys = CallKeys({"default": KEY})
    assert_identical(keys.key("noise"), jax.random.fold_in(KEY, 0))
    assert_identical(keys.key("dropout"), jax.random.fold_in(KEY, 1))
    keys.commit({"noise", "dropout"})
    assert keys.key("default") is KEY


def test_the_sources_may_change_after_the_keys_were_made():
    sources = {"params": KEY}
    keys = CallKeys(sources)
    sources["params"] = OTHER
    assert keys.key("params") is KEY


def lazy_keys(keys, path=()):
    scope = Scope({}, dict.fromkeys(keys.names, 0))
    for name in path:
        scope = scope.push(name)
    return LazyKeys(keys, scope.rngs)


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        ({"params": KEY}, ("params",)),
        ({"dropout": KEY, "params": KEY}, ("dropout", "params")),
        ({"default": KEY}, ("dropout", "default")),
        ({"default": KEY, "params": KEY}, ("params", "dropout", "default")),
        ({"default": KEY, "dropout": KEY}, ("dropout", "default")),
        ({}, ()),
    ],
)
def test_the_streams_that_a_lifted_transform_takes_along_end_with_default(sources, names):
    keys = CallKeys(sources)
    assert keys.names == names
    lazy = lazy_keys(keys)
    assert tuple(lazy) == names
    assert len(lazy) == len(names)


def test_a_served_stream_has_a_key_and_is_not_there():
    keys = CallKeys({"default": KEY, "params": OTHER})
    lazy = lazy_keys(keys)
    assert keys.has("params")
    assert not keys.has("noise")
    assert keys.serves("noise")
    assert "params" in lazy
    assert "noise" not in lazy
    assert_identical(lazy["noise"].as_jax_rng(), jax.random.fold_in(KEY, 0))


def test_without_default_there_are_no_other_streams():
    keys = CallKeys({"params": KEY})
    assert not keys.serves("noise")
    assert keys.serves("params")
    with pytest.raises(KeyError, match="noise"):
        lazy_keys(keys)["noise"]


def test_nothing_was_initialized_before_the_call():
    keys = CallKeys({})
    assert keys.initializers == 0
    assert keys.initial == set()


@pytest.mark.parametrize("names", [(), ("Dense_0",), ("a", "b")])
def test_a_scope_gets_the_key_that_linen_derives_from_its_path(names):
    class Outer(nn.Module):
        names: tuple[str, ...]

        @nn.compact
        def __call__(self):
            if self.names:
                return Outer(self.names[1:], name=self.names[0])()
            return self.scope.rngs["noise"].as_jax_rng()

    keys = CallKeys({"noise": KEY})
    lazy = lazy_keys(keys, names)
    expected = Outer(names).apply({}, rngs={"noise": KEY})
    assert_identical(lazy["noise"].as_jax_rng(), expected)
    assert lazy.draws is lazy.copy().draws is keys
    assert_identical(lazy.copy()["noise"].as_jax_rng(), expected)


def test_the_streams_used_are_those_that_linen_counts_draws_of():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self):
            Asks(("dropout",), name="inner")()
            self.make_rng("noise")
            return dict(self.scope.rng_counters)

    counters = Outer().apply({}, rngs=dict.fromkeys(("params", "dropout", "noise"), KEY))
    assert used_streams(counters) == {"dropout", "noise"}
    assert used_streams({"params": 0, "a": {"b": {"other": 2}, "params": 0}}) == {"other"}
    assert used_streams({}) == set()


def test_keys_are_drawn_inside_of_a_program_as_outside():
    ours, native = streams(dropout=1), streams(dropout=1)

    @nnx.jit
    def draw(rngs):
        keys = call_keys(rngs)
        drawn = keys.key("dropout")
        keys.commit({"dropout"})
        return drawn

    assert_identical(draw(ours), native.dropout())
    assert counts(ours) == counts(native)
    assert jnp.all(ours.dropout.count[...] == 1)
