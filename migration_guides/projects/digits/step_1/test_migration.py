"""This program against the Linen program, from a checkpoint that the Linen program wrote."""

import jax
import numpy as np
import pytest
import step_0.checkpoint
import step_0.evaluate
import step_0.train
from flax import linen as nn
from step_0.model import Classifier

from bridge import parity

from . import checkpoint, data, evaluate, train
from .config import Config
from .renames import FROM_LINEN

# Dropout draws other keys in NNX than in Linen, so training is the same only without it.
CONFIG = Config(dropout=0.0)
# Layers that are called one by one may round otherwise than those that are scanned.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
TRAINING, (IMAGES, LABELS) = data.load()


def batches(count, seed):
    return list(data.batches(*TRAINING, size=32, count=count, seed=seed))


@pytest.fixture(scope="module")
def linen(tmp_path_factory):
    """The Linen program's checkpoint in the middle of training, and its state."""
    path = tmp_path_factory.mktemp("linen") / "checkpoint.msgpack"
    state, _ = step_0.train.fit(step_0.train.create(CONFIG), batches(200, seed=0))
    step_0.checkpoint.save(path, state)
    return path, state


def test_training_goes_on_where_the_linen_program_stopped(linen):
    path, expected = linen
    state = checkpoint.load_linen(path, train.create(CONFIG))

    def assert_close_logits():
        ours = evaluate.logits(state, IMAGES)
        np.testing.assert_allclose(ours, step_0.evaluate.logits(expected, IMAGES), **CLOSE)

    assert_close_logits()
    assert evaluate.accuracy(state, IMAGES, LABELS) > 0.8

    expected, losses = step_0.train.fit(expected, batches(10, seed=1))
    state, ours = train.fit(state, batches(10, seed=1))
    np.testing.assert_allclose(ours, losses, **CLOSE)
    assert_close_logits()


def test_every_layer_and_gradient_is_that_of_the_linen_model(linen):
    path, expected = linen
    values = {"params": expected.params, "batch_stats": expected.batch_stats}
    boxes = jax.eval_shape(lambda: step_0.train.init(CONFIG))
    linen_model = Classifier(CONFIG), nn.meta.replace_boxed(boxes, values)

    model = checkpoint.load_linen(path, train.create(CONFIG)).model
    print(parity.assert_same(linen_model, model, IMAGES[:4], rules=FROM_LINEN))
