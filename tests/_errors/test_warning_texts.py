"""A warning points at the caller's own line, and its text says what to do."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import bridge
from bridge._errors import warning_texts


class Counting(nnx.Module):
    def __init__(self, *, rngs):
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return x


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
def test_it_points_at_the_line_that_made_the_call(transform):
    # Of its own, so that no test before this one has been told.
    model = bridge.to_linen(type("Counting", (Counting,), {}))
    variables = model.init(jax.random.key(0), jnp.ones(()))
    apply = transform(model.apply)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apply(variables, jnp.ones(()))
        line = inspect.currentframe().f_lineno - 1
    (warning,) = [w for w in caught if issubclass(w.category, bridge.BridgeWarning)]
    assert warning.filename == __file__
    assert warning.lineno == line


TEXTS = {
    "unknown": (warning_texts.unknown_paths_text("W", ["params/a"]), "params/a", "strict=True"),
    "unknown of a call": (
        warning_texts.unknown_paths_text("W", ["a/b"], warning_texts.kept_definition_text("a")),
        "a/b",
        "add 'nnx' to mutable beside 'a'",
    ),
    "lost": (
        warning_texts.lost_update_text("W", "batch_stats", False),
        "'batch_stats'",
        "mutable=['batch_stats'] to the outermost call",
    ),
    "lost key": (
        warning_texts.lost_update_text("W", "RngCount", True),
        "draws the same key",
        "mutable=['RngCount'] to the outermost call",
    ),
    "untold": (warning_texts.untold_change_text("W", ["a/b"]), "a/b", "mutable=['nnx'"),
    "removed": (warning_texts.lifted_removal_text("W", ["a/b"]), "a/b", "outside of the transform"),
    "hooks": (warning_texts.unread_hooks_text("W", ["on_get_value"]), "on_get_value", "put the"),
    "copy": (warning_texts.write_to_copy_text("W", "'a'"), "'a'", "nnx_method="),
}


@pytest.mark.parametrize(("text", "found", "remedy"), TEXTS.values(), ids=list(TEXTS))
def test_a_text_says_where_what_was_found_and_what_to_do(text, found, remedy):
    for part in ("W", found, remedy):
        assert part in text
