"""Which stream a constructor lacks is found without Flax's words."""

import pytest
from flax import nnx

from bridge._randomness.missing_stream import missing_stream


class ByAttribute(nnx.Module):
    def __init__(self, *, rngs):
        self.key = rngs.noise()


class ByItem(nnx.Module):
    def __init__(self, *, rngs):
        self.key = rngs["noise"]()


class ByCall(nnx.Module):
    def __init__(self, *, rngs):
        self.key = rngs()


class Trying(nnx.Module):
    """Goes on without a stream, and fails for something else."""

    def __init__(self, *, rngs):
        assert not hasattr(rngs, "noise")
        self.size = {}["size"]


@pytest.mark.parametrize(
    ("module", "stream"), [(ByAttribute, "noise"), (ByItem, "noise"), (ByCall, "default")]
)
def test_it_names_the_stream_however_it_is_asked_for(module, stream):
    with pytest.raises((AttributeError, KeyError)):
        module(rngs=nnx.Rngs(params=0))
    assert missing_stream(lambda rngs: module(rngs=rngs(params=0))) == stream


def test_a_constructor_that_fails_for_something_else_lacks_no_stream():
    assert missing_stream(lambda rngs: Trying(rngs=rngs(params=0))) is None
    assert missing_stream(lambda rngs: ByItem(rngs=rngs(noise=0))) is None
