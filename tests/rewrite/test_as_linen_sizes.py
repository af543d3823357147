"""Sizes that a model computes on its way are found when a Linen class runs its NNX class."""

import functools
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bridge

MODELS = '''"""A model whose layers take their sizes from what the layers before them return."""

import dataclasses
from typing import Any

from flax import linen as nn


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.Conv(self.width, (3, 3), (2, 2))(x))


class Pyramid(nn.Module):
    block: Any = Block
    widths: tuple[int, ...] = (4, 4, 6)

    @nn.compact
    def __call__(self, x):
        for width in self.widths:
            x = self.block(width)(x)
        return nn.Dense(3, name="head")(x.reshape((x.shape[0], -1)))


class Joined(nn.Module):
    project: bool = False

    @nn.compact
    def __call__(self, x, skip):
        if self.project:
            skip = nn.Dense(x.shape[-1])(skip)
        return x + skip


class Repeated(nn.Module):
    is_short: bool = False

    @nn.compact
    def __call__(self, x):
        for turn in range(2):
            if self.is_short and turn == 1:
                return x
            x = nn.Dense(3)(x)
        return x


class Repeats(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(Repeated()(x))


class Joins(nn.Module):
    @nn.compact
    def __call__(self, x, skip):
        return Joined()(Joined(project=True)(x, skip), x)


@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 4
    decode: bool = False


class Layer(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        attention = nn.MultiHeadDotProductAttention(
            2, decode=self.config.decode, deterministic=True, name="attention"
        )
        return x + attention(x)


class Language(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(7, self.config.width)(tokens)
        return Layer(self.config)(x)


def decoding():
    return Language(Config(decode=True))
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    name = f"as_linen_sizes_{abs(hash(str(tmp_path))) % 10**8}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / name / "models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    forget(name)


def forget(name):
    for each in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[each]
    importlib.invalidate_caches()


def test_a_size_that_only_the_call_of_a_part_tells_is_found_for_any_fields(package):
    linen = importlib.import_module(f"{package}.models")
    x = jax.ShapeDtypeStruct((2, 16, 16, 3), "float32")
    result = bridge.rewrite(linen.Pyramid, x, gradients=False, fast=True, as_linen=True)
    assert result.exported == ("Block", "Pyramid")
    result.write()
    forget(package)
    exported = importlib.import_module(f"{package}.models")
    for widths, size in (((4, 4, 6), 16), ((5, 7), 8)):
        old, new = (each.Pyramid(widths=widths) for each in (linen, exported))
        x = jax.random.normal(jax.random.key(1), (2, size, size, 2))
        variables = old.init(jax.random.key(0), x)
        made = new.init(jax.random.key(0), x)
        assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, variables)
        found = jax.jit(new.apply)(variables, x)
        np.testing.assert_allclose(found, old.apply(variables, x), rtol=1e-5, atol=1e-6)


def test_a_size_that_some_fields_leave_out_is_found_from_the_other_calls(package):
    linen = importlib.import_module(f"{package}.models")
    shapes = [jax.ShapeDtypeStruct((2, size), "float32") for size in (5, 3)]
    result = bridge.rewrite(linen.Joins, *shapes, gradients=False, fast=True, as_linen=True)
    assert result.exported == ("Joined", "Joins")
    result.write()
    forget(package)
    exported = importlib.import_module(f"{package}.models")
    for project, size in ((True, 4), (False, 5)):
        old, new = (each.Joined(project=project) for each in (linen, exported))
        x = jax.random.normal(jax.random.key(1), (2, 5))
        skip = jax.random.normal(jax.random.key(2), (2, size))
        variables = old.init(jax.random.key(0), x, skip)
        made = new.init(jax.random.key(0), x, skip)
        assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, variables)
        np.testing.assert_array_equal(new.apply(variables, x, skip), old.apply(variables, x, skip))


def test_a_class_that_other_fields_break_stays_linen_with_the_value(package):
    linen = importlib.import_module(f"{package}.models")
    x = jax.ShapeDtypeStruct((2, 3), "float32")
    result = bridge.rewrite(linen.Repeats, x, gradients=False, as_linen=True)
    assert result.exported == ("Repeats",)
    (note,) = [each for each in result.notes if each.startswith("Repeated stays Linen: ")]
    assert "with is_short=True params/Dense_1/bias is absent in Linen" in note


def test_the_shape_of_a_cache_is_that_of_the_first_call(package):
    linen = importlib.import_module(f"{package}.models")
    tokens = jnp.arange(6).reshape(2, 3)
    result = bridge.rewrite(linen.decoding, tokens, gradients=False, fast=True, as_linen=True)
    assert result.exported == ("Layer", "Language")
    result.write()
    forget(package)
    exported = importlib.import_module(f"{package}.models")
    old, new = linen.decoding(), exported.decoding()
    # In `init`, attention makes its cache and sees the whole sequence.
    given, made = (
        jax.eval_shape(model.init_with_output, jax.random.key(0), tokens) for model in (old, new)
    )
    assert made == given
    variables = old.init(jax.random.key(0), tokens)
    for step in range(2):
        outputs = [
            jax.jit(functools.partial(model.apply, mutable=["cache"]))(
                variables, tokens[:, step : step + 1]
            )
            for model in (old, new)
        ]
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), *outputs)
        variables = {**variables, **outputs[0][1]}
