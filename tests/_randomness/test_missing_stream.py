"""The stream that a constructor lacks is found without Flax's words."""

import jax
import pytest
from flax import nnx

import bridge
from bridge._randomness.streams import missing_stream


class ByAttribute(nnx.Module):
    def __init__(self, *, rngs):
        self.key = rngs.noise()


class ByItem(nnx.Module):
    def __init__(self, *, rngs):
        self.key = rngs["noise"]()


class ByCall(nnx.Module):
    def __init__(self, *, rngs):
        self.key = rngs()


class OwnRngs(nnx.Rngs):
    """Says more of a stream that is not there."""

    def __getattr__(self, name):
        return super().__getattr__(name)


class Trying(nnx.Module):
    """Goes on without a stream, and fails for something else."""

    def __init__(self, *, rngs):
        assert not hasattr(rngs, "noise")
        self.size = {}["size"]


@pytest.mark.parametrize(
    ("module", "stream"), [(ByAttribute, "noise"), (ByItem, "noise"), (ByCall, "default")]
)
@pytest.mark.parametrize("rngs_type", [nnx.Rngs, OwnRngs])
def test_it_names_the_stream_however_it_is_asked_for(module, stream, rngs_type):
    with pytest.raises((AttributeError, KeyError)) as caught:
        module(rngs=rngs_type(params=0))
    assert missing_stream(caught.value) == stream


def test_a_constructor_that_fails_for_something_else_lacks_no_stream():
    with pytest.raises(KeyError) as caught:
        Trying(rngs=nnx.Rngs(params=0))
    assert missing_stream(caught.value) is None


def test_a_constructor_runs_once_to_tell_what_it_lacks():
    """Regression: it ran again, with all its effects."""
    runs = []

    class Counted(ByItem):
        def __init__(self, *, rngs):
            runs.append(rngs)
            super().__init__(rngs=rngs)

    with pytest.raises(bridge.MissingRngError, match="noise"):
        bridge.ToLinen(Counted).init({"dropout": jax.random.key(0)})
    assert len(runs) == 1
