import numpy as np

from . import checkpoint, evaluate, train
from .config import Config

CONFIG = Config(dropout=0.5)
IMAGES = np.random.default_rng(0).uniform(size=(8, 8, 8, 1)).astype(np.float32)
LABELS = np.arange(8, dtype=np.int32)
BATCH = (IMAGES, LABELS)


def logits(state):
    return np.asarray(evaluate.logits(state, IMAGES))


def test_training_makes_the_loss_smaller():
    _, losses = train.fit(train.create(CONFIG), [BATCH] * 30)
    assert losses[-1] < losses[0] / 2


def test_dropout_is_on_in_training_and_differs_from_step_to_step():
    # The warm-up begins at zero, so both steps have the same parameters.
    _, (first, second) = train.fit(train.create(CONFIG), [BATCH] * 2)
    assert first != second


def test_training_moves_the_running_averages_and_evaluation_uses_them():
    state = train.create(CONFIG)
    before = logits(state)
    state, _ = train.fit(state, [BATCH])
    assert not np.allclose(logits(state), before, atol=1e-3)
    rolled = evaluate.logits(state, np.concatenate([IMAGES[:1], 1 - IMAGES[1:]]))
    np.testing.assert_allclose(rolled[0], logits(state)[0], rtol=1e-5, atol=1e-5)


def test_evaluation_changes_nothing():
    state, _ = train.fit(train.create(CONFIG), [BATCH])
    np.testing.assert_array_equal(logits(state), logits(state))
    _, losses = train.fit(state, [BATCH] * 2)
    _, expected = train.fit(train.create(CONFIG), [BATCH] * 3)
    assert losses == expected[1:]


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path):
    state, _ = train.fit(train.create(CONFIG), [BATCH] * 3)
    checkpoint.save(tmp_path / "checkpoint", state)
    at_checkpoint = logits(state)
    state, losses = train.fit(state, [BATCH] * 2)

    other = train.fit(train.create(CONFIG), [BATCH])[0]
    restored = checkpoint.load(tmp_path / "checkpoint", other)
    np.testing.assert_array_equal(logits(restored), at_checkpoint)
    restored, again = train.fit(restored, [BATCH] * 2)
    assert again == losses
    np.testing.assert_array_equal(logits(restored), logits(state))


def test_accuracy_is_the_share_of_correct_answers():
    state = train.create(CONFIG)
    right = logits(state).argmax(axis=-1)
    labels = np.where(np.arange(8) < 2, right, (right + 1) % CONFIG.classes)
    assert evaluate.accuracy(state, IMAGES, labels) == 0.25


def test_hidden_layers_are_split_over_the_model_axis():
    specs = train.partition_specs(CONFIG)
    assert "model" in {axis for spec in specs for axis in spec}
