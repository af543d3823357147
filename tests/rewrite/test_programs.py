"""Whole programs are rewritten, and do the same as the Linen programs they come from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge import port
from bridge.rewrite._rewriter import Rewriter
from bridge.rewrite.observe._entries import Entry
from bridge.rewrite.prove._build import importable
from bridge.rewrite.prove._paths import rules_of
from bridge.rewrite.prove._weights import random_variables
from tests.rewrite import models_constructs as constructs
from tests.rewrite import models_sequences as sequences
from tests.rewrite import models_vision as vision
from tests.rewrite.weights import random_weights, without_weights


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


tokens = functools.partial(spec, dtype="int32")

# Name -> factory, inputs, keyword arguments, and the classes that stay Linen.
PROGRAMS = {
    "vit": (vision.ViT, (spec(2, 8, 8, 3),), {"train": False}, set()),
    "mixer": (vision.Mixer, (spec(2, 8, 8, 3),), {}, set()),
    "resnet": (vision.TinyResNet, (spec(2, 16, 16, 3),), {"train": False}, set()),
    "densenet": (vision.DenseNet, (spec(2, 8, 8, 3),), {}, set()),
    "convnext": (vision.ConvNext, (spec(2, 8, 8, 3),), {}, set()),
    "unet": (vision.UNet, (spec(2, 8, 8, 3), spec(2)), {}, set()),
    "translation": (
        lambda: sequences.EncoderDecoder(sequences.Config(num_layers=1)),
        (tokens(2, 5), tokens(2, 4)),
        {},
        set(),
    ),
    "tagger": (sequences.Tagger, (tokens(2, 5),), {}, {"Recurrent"}),
    "graph": (sequences.Graph, (spec(5, 3), spec(5, 2)), {}, set()),
    "actor critic": (sequences.ActorCritic, (spec(2, 8, 8, 4),), {}, set()),
    "agent": (sequences.Agent, (spec(2, 5),), {}, set()),
    "vae": (sequences.Vae, (spec(2, 12), jax.random.key(1)), {}, set()),
    "all constructs": (constructs.Zoo, (spec(2, 3),), {"train": False}, set()),
    "lifted transforms": (constructs.Lifted, (spec(2, 3),), {}, set()),
    "choosing": (constructs.Choosing, (spec(2, 3),), {}, set()),
    "partials": (constructs.Partials, (spec(2, 5, 3),), {}, set()),
    "annotated": (constructs.Annotated, (spec(2, 3),), {}, set()),
    "a module as a field": (constructs.make_outer, (spec(2, 3),), {}, set()),
    "a module made as a field": (constructs.MakesOuter, (spec(2, 3),), {}, set()),
}


@functools.cache
def rewritten(name):
    make, inputs, kwargs, _ = PROGRAMS[name]
    # Gradients take most of the time, and where outputs are equal to the bit they are so mostly.
    with_gradients = name in ("mixer", "agent", "annotated")
    return bridge.rewrite(make, *inputs, kwargs=kwargs, gradients=with_gradients, fast=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_rewritten_and_proven_as_a_whole(name):
    result = rewritten(name)
    left = {each.name for each in result.classes if each.level == "left Linen"}
    assert result.is_proven, str(result)
    assert left == PROGRAMS[name][3], str(result)
    assert result.max_difference == 0.0


def test_nine_classes_in_ten_are_rewritten():
    levels = [each.level for name in PROGRAMS for each in rewritten(name).classes]
    assert len({each.name for name in PROGRAMS for each in rewritten(name).classes}) >= 40
    assert sum(level != "left Linen" for level in levels) >= 0.9 * len(levels)


def imported(result):
    """The new modules of a result, by a part of their name."""
    texts = {
        f"rewritten_{path.rpartition('/')[2][:-3]}": (path, text)
        for path, text in result.sources.items()
    }
    with importable(texts):
        return [__import__(name) for name in texts]


def test_the_new_sources_compute_what_linen_does_without_the_rewriter():
    result = rewritten("mixer")
    (module,) = imported(result)
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    linen = vision.Mixer()
    variables = random_weights(linen, x)
    (sizes,) = result.sizes
    model = without_weights(lambda: module.Mixer(**sizes, rngs=nnx.Rngs(2)))
    port.plan(variables, model, result.rules).apply()
    np.testing.assert_array_equal(model(x), linen.apply(variables, x))


def rewriter_of(make, *inputs):
    return Rewriter(
        [Entry(make, inputs)],
        keep_names=False,
        only=None,
        skip=(),
        on_progress=lambda text: None,
    )


def test_another_configuration_of_the_new_class_is_right_too():
    """Sizes are expressions and not the numbers of the configuration that was traced."""
    (module,) = imported(rewritten("unet"))
    x, t = jax.random.normal(jax.random.key(0), (1, 8, 8, 1)), jnp.ones((1,))
    linen = vision.UNet(features=(3, 5, 7))
    variables = random_variables(jax.eval_shape(linen.init, jax.random.key(1), x, t))
    sizes = {"in_features": 1, "dense_0_in_features": 1}
    model = without_weights(lambda: module.UNet((3, 5, 7), **sizes, rngs=nnx.Rngs(2)))
    other = rewriter_of(lambda: linen, x, t)
    other.trace()
    other.write()
    port.plan(variables, model, rules_of(other.program, 0)).apply()
    np.testing.assert_allclose(model(x, t), linen.apply(variables, x, t), rtol=1e-5, atol=1e-5)


def test_random_weights_find_a_fault_that_initial_values_would_hide():
    variables = random_variables({"params": {"bias": jax.ShapeDtypeStruct((3,), "float32")}})
    assert (np.asarray(variables["params"]["bias"]) != 0).all()


def test_no_parameter_is_computed_while_a_large_model_is_traced():
    # 400 million parameters; the proof would give them values.
    model = sequences.GraphMlp(feature_sizes=[20_000, 2])
    rewriter = rewriter_of(lambda: model, spec(1, 20_000))
    rewriter.trace()
    assert rewriter.program.plans[sequences.GraphMlp].slots


def test_linen_is_left_as_it_was():
    code = nn.Module.__post_init__.__code__
    rewritten("actor critic")
    assert nn.Module.__post_init__.__code__ is code
