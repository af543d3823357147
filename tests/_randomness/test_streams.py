"""Every form of an `rngs` argument names its streams and keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import bridge
import registry
from bridge._randomness.streams import (
    fold_path,
    is_one_key,
    owned,
    sources,
    stream_for,
    stream_of,
)
from tests.models import assert_identical, linen_key_at

KEY, OTHER = jax.random.key(0), jax.random.key(1)
BITS = jax.random.PRNGKey(0)
KEYS = jax.random.split(KEY, 2)


def test_no_rngs_are_no_sources():
    assert sources(None, "here") == {}


@pytest.mark.parametrize("key", [KEY, BITS, nnx.Rngs(3).params], ids=["typed", "bits", "stream"])
def test_one_source_alone_is_for_params(key):
    assert sources(key, "here") == {"params": key}


def test_the_sources_of_an_nnx_rngs_are_its_streams_themselves():
    rngs = nnx.Rngs(params=0, dropout=1)
    found = sources(rngs, "here")
    assert list(found) == ["params", "dropout"]
    assert all(found[name] is rngs[name] for name in found)


def test_a_mapping_names_the_sources_and_is_not_written_into():
    given_keys = {"default": KEY, "dropout": nnx.Rngs(3).dropout}
    found = sources(given_keys, "here")
    assert found == {"params": KEY, "dropout": given_keys["dropout"]}
    assert list(given_keys) == ["default", "dropout"]


def test_default_serves_as_params_where_there_is_none():
    stream = nnx.Rngs(0)
    assert sources(stream, "here") == {"params": stream["default"]}
    both = {"default": KEY, "params": OTHER}
    assert sources(both, "here") == both


@pytest.mark.parametrize(
    "rngs",
    [
        0,
        "params",
        jnp.ones(2),
        jnp.uint32(3),
        np.zeros(2, np.uint32),
        {"params": 0},
        {0: KEY},
        {"params": KEY, "dropout": None},
        [KEY],
    ],
)
@pytest.mark.parametrize("function", [sources, owned])
def test_what_is_no_source_is_an_error_that_names_the_place(function, rngs):
    with pytest.raises(bridge.InvalidRngsError, match=r"^the wrapper expected") as caught:
        function(rngs, "the wrapper")
    assert caught.value.found is rngs
    # No remedy for several keys where there are none.
    assert str(caught.value).endswith(f"of type {type(rngs).__name__}")


@pytest.mark.parametrize("rngs", [KEYS, jax.random.key_data(KEYS), {"a": KEY, "b": KEYS}])
def test_an_array_of_keys_for_one_has_a_remedy(rngs):
    with pytest.raises(bridge.InvalidRngsError, match=r"array of keys.*pass one of them"):
        sources(rngs, "here")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (KEY, True),
        (BITS, True),
        (KEYS, False),
        (jax.random.key_data(KEYS), False),
        (jnp.zeros(2, jnp.int32), False),
        (jnp.uint32(0), False),
        (np.zeros(2, np.uint32), False),
        (None, False),
    ],
)
def test_one_key_is_told_from_several_and_from_other_arrays(value, expected):
    assert is_one_key(value) is expected


def test_no_rngs_own_no_streams():
    assert owned(None, "here") == (None, frozenset())


def test_a_wrapper_owns_a_fork_of_an_nnx_rngs():
    rngs, same = nnx.Rngs(0, dropout=1), nnx.Rngs(0, dropout=1)
    found, plain = owned(rngs, "here")
    assert plain == frozenset()
    assert_identical(nnx.state(found), nnx.state(same.fork()))
    assert rngs.dropout.count[...] == same.dropout.count[...] == 1


def test_streams_made_of_plain_keys_hold_these_very_keys():
    stream, same = nnx.Rngs(dropout=3).dropout, nnx.Rngs(dropout=3).dropout
    found, plain = owned({"params": KEY, "dropout": stream}, "here")
    assert plain == frozenset({"params"})
    assert_identical(found.params.key[...], KEY)
    assert_identical(found.dropout.key[...], same.fork().key[...])
    assert list(found) == ["params", "dropout"]


@given(st.lists(st.sampled_from(["a", "b", "ab", "layers", "0"]), max_size=3))
def test_the_key_of_a_path_is_the_one_that_linen_gives_a_submodule_there(path):
    assert_identical(fold_path(KEY, tuple(path)), linen_key_at(KEY, *path))


def test_a_key_of_bits_becomes_a_typed_one():
    folded = fold_path(BITS, ("a", 0))
    assert_identical(folded, linen_key_at(KEY, "a", "0"))


@pytest.mark.parametrize(
    ("tag", "names", "expected"),
    [
        ("dropout", ("params", "dropout"), "dropout"),
        ("params", ("params",), "params"),
        ("dropout", ("params",), None),
        ("dropout", ("noise",), None),
        ("default", ("default", "noise"), "default"),
        ("default", ("params", "noise", "dropout"), "dropout"),
        ("default", ("params",), None),
        ("default", (), None),
    ],
)
def test_a_stored_stream_is_seeded_by_name_and_default_by_any_but_params(tag, names, expected):
    assert stream_for(tag, dict.fromkeys(names, KEY)) == expected


@pytest.mark.parametrize(
    ("tag", "names", "expected"),
    [
        ("dropout", ("params",), "params"),
        ("default", ("params",), "params"),
        ("default", ("params", "noise"), "noise"),
        ("dropout", ("dropout", "params"), "dropout"),
        ("dropout", ("noise",), None),
    ],
)
def test_params_seeds_a_stream_that_is_not_stored(tag, names, expected):
    assert stream_for(tag, dict.fromkeys(names, KEY), is_stored=False) == expected


def test_a_stream_that_a_mapping_lists_or_finds_is_there():
    class Finds(dict):
        """Has a key that it does not list, as the keys of a ToNNX."""

        def __iter__(self):
            return iter(["listed"])

    rngs = Finds(found=KEY)
    assert stream_for("found", rngs) == "found"
    assert stream_for("listed", rngs) == "listed"


@pytest.mark.parametrize(
    ("address", "leaf", "expected"),
    [
        (("RngKey", ("dropout", "key")), KEY, "dropout"),
        (("RngKey", ("a", "rngs", 0, "key")), KEY, "0"),
        (("RngKey", ("key",)), KEY, None),
        (("RngCount", ("dropout", "key")), KEY, None),
        (("params", ("dropout", "key")), KEY, None),
        (("RngKey", ("rngs", "key")), bridge.NNXMeta(nnx.RngKey, KEY, {"tag": "noise"}), "noise"),
        (("RngKey", ("rngs", "key")), bridge.NNXMeta(nnx.RngKey, KEY, {}), "rngs"),
        (("RngKey", ("rngs", "key")), nn.Partitioned(KEY, ("a",)), "rngs"),
    ],
)
def test_a_stored_key_belongs_to_the_stream_of_its_tag_or_of_its_place(address, leaf, expected):
    assert stream_of(address, leaf) == expected


class Noise(nnx.Module):
    def __init__(self, *, rngs):
        self.rngs = rngs

    def __call__(self):
        return jax.random.normal(self.rngs.noise(), ())


def test_keys_are_in_the_collection_that_the_registry_gives_them():
    """Regression: without the stored definition, such a key was that of another stream."""
    with registry.use(registry.current().extend({"stored_keys": nnx.RngKey})):
        model = bridge.ToLinen(Noise)
        variables = model.init({"params": KEY, "noise": OTHER})
        assert "stored_keys" in variables
        del variables["nnx"]
        found, _ = model.apply(variables, mutable=["RngCount"])
    assert_identical(found, Noise(rngs=nnx.Rngs(KEY, noise=OTHER))())


def test_the_tag_of_an_object_that_is_no_box_says_nothing():
    class Like:
        metadata = {"tag": "noise"}  # noqa: RUF012

    assert stream_of(("RngKey", ("rngs", "key")), Like()) == "rngs"
