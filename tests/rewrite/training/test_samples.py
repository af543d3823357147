"""A sample may lie outside of the program, and import from it in any way."""

import importlib
import sys

import pytest

import bridge

from .programs import HEAD, STATISTICS

OUTSIDE = """
import jax

import {name}.train as module
from {name} import train
from {name}.train import create, examples, train_step as step_of

CREATE = create


def batches(examples):
    return [{{"x": x, "label": label}} for x, label in examples()]


def helper(state, batch):
    return step_of(state, batch)


def by_names():
    return create(jax.random.key(0)), helper, batches(examples)


def by_module():
    return train.create(jax.random.key(0)), module.train_step, batches(train.examples)


def by_constant():
    return CREATE(jax.random.key(0)), step_of, batches(examples)


def closed_over():
    make, step = create, step_of

    def sample():
        return make(jax.random.key(0)), step, batches(examples)

    return sample


by_closure = closed_over()
"""


@pytest.mark.parametrize("name", ["by_names", "by_module", "by_constant", "by_closure"])
def test_a_sample_outside_of_the_program_is_proven(tmp_path, monkeypatch, name):
    monkeypatch.syspath_prepend(str(tmp_path))
    package, outside = f"sampled_{name}", f"samples_{name}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / package / "train.py").write_text(HEAD + STATISTICS)
    (tmp_path / f"{outside}.py").write_text(OUTSIDE.format(name=package))
    module = importlib.import_module(f"{package}.train")
    samples = importlib.import_module(outside)
    before = dict(vars(samples))
    try:
        result = bridge.rewrite(
            module.make,
            *module.INPUTS,
            kwargs=module.KWARGS,
            gradients=False,
            fast=True,
            train=getattr(samples, name),
        )
    finally:
        for each in (f"{package}.train", package, outside):
            sys.modules.pop(each, None)
    assert result.training is not None
    assert result.training.is_proven, result
    assert result.training.difference == 0.0
    # The sample has the program's own functions again.
    assert dict(vars(samples)) == before
    assert samples.by_closure.__closure__[0].cell_contents is module.create
