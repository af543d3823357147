"""Models at size cost the same wrapped and native, where it can be counted; here they are tiny."""

import json
import types

import jax
import jax.numpy as jnp
import pytest
from flax import errors, nnx
from jax.core import Tracer

from benchmarks import decoding, first_calls, programs, size_rows, training
from benchmarks.__main__ import main
from benchmarks.gpt import GPTShape, gpt
from benchmarks.models import ViTShape, stack, vit

VIT = vit(ViTShape(layers=1, width=8, heads=2, patch=2, image=4, classes=3))
GPT = gpt(GPTShape(1, 8, 2, 8, 4, jnp.bfloat16))
DECODER = gpt(GPTShape(1, 8, 2, 8, 4, decode=True))
PAIRS = [("ToLinen", "NNX"), ("ToNNX", "Linen")]


@pytest.mark.parametrize("case", [VIT, GPT], ids=["ViT", "GPT"])
@pytest.mark.parametrize(("wrapped", "native"), PAIRS)
def test_a_training_step_has_the_program_and_the_memory_of_what_is_wrapped(case, wrapped, native):
    ours, theirs = (training.compiled_step(form, case) for form in (wrapped, native))
    assert programs.nameless(ours.as_text()) == programs.nameless(theirs.as_text())
    assert programs.peak_bytes(ours) == programs.peak_bytes(theirs) > 0
    memory = [compiled.memory_analysis() for compiled in (ours, theirs)]
    # The state is donated.
    assert memory[0].alias_size_in_bytes == memory[1].alias_size_in_bytes > 0


def test_memory_without_a_peak_is_the_sum_of_what_is_held():
    analysis = types.SimpleNamespace(
        peak_memory_in_bytes=0,
        argument_size_in_bytes=100,
        output_size_in_bytes=60,
        temp_size_in_bytes=30,
        alias_size_in_bytes=50,
    )
    assert programs.peak_bytes(types.SimpleNamespace(memory_analysis=lambda: analysis)) == 140


@pytest.mark.parametrize(("wrapped", "native"), PAIRS)
def test_decoding_has_the_equations_of_what_is_wrapped(wrapped, native):
    found = programs.primitives(*decoding.decoding(wrapped, DECODER))
    assert found == programs.primitives(*decoding.decoding(native, DECODER))
    assert found["while"] == 1


def test_every_form_decodes_the_same_tokens():
    found = set()
    for form in ("NNX", "ToLinen", "Linen", "ToNNX"):
        run, *arguments = decoding.decoding(form, DECODER)
        found.add(int(jax.jit(run)(*arguments)[0, 0]))
    assert len(found) == 1


def test_the_command_takes_the_sizes_of_an_accelerator(tmp_path, monkeypatch):
    monkeypatch.setitem(size_rows.MODELS, size_rows.VIT_LARGE, lambda: VIT)
    monkeypatch.setitem(size_rows.MODELS, size_rows.GPT_LARGE, lambda: GPT)
    row = "training step, launched instructions"
    options = ["--quick", "--accelerator", "--size", size_rows.GPT_LARGE]
    assert main([*options, "--row", row, "--output", str(tmp_path)]) == 0
    (found,) = json.loads((tmp_path / "cost.json").read_text())["rows"]
    assert (found["row"], found["size"]) == (row, size_rows.GPT_LARGE)
    assert found["subjects"]["ToLinen"] == found["subjects"]["NNX"]


def test_the_entry_of_a_program_is_what_it_runs_one_after_the_other():
    text = jax.jit(lambda x: (x @ x, x)).lower(jnp.ones((3, 3))).compile().as_text()
    assert 1 <= programs.entry_instructions(text) < sum(programs.counted(text).values())


@pytest.fixture
def cheap_sharding(monkeypatch):
    """`Tracer.sharding` as it is after JAX 0.10.2: its message does not look for the origin."""

    def sharding(self):
        raise AttributeError("sharding")

    monkeypatch.setattr(Tracer, "sharding", property(sharding))


def growth(measured):
    """By how much more the second four blocks add than the first four."""
    few, some, many = (measured(stack(blocks)) for blocks in (2, 6, 10))
    return (many - some) / (some - few)


def calls(make):
    def measured(case):
        make(case)
        return programs.python_calls(lambda: make(case))

    return measured


MAKERS = first_calls.construct_abstractly, first_calls.abstract, first_calls.init_abstractly


@pytest.mark.usefixtures("cheap_sharding")
@pytest.mark.parametrize("make", MAKERS)
def test_only_a_tracer_s_message_makes_a_traced_constructor_quadratic(make):
    assert growth(calls(make)) <= 1.02


def test_the_bridge_adds_the_same_to_a_traced_constructor_for_each_block():
    native, *ours = map(calls, MAKERS)
    for measured in ours:
        assert growth(lambda case, ours=measured: ours(case) - native(case)) <= 1.05


def test_a_stream_that_is_made_before_the_trace_cannot_be_drawn_from_in_it():
    rngs = nnx.Rngs(0)
    with pytest.raises(errors.TraceContextError):
        nnx.eval_shape(lambda: stack(1).construct(rngs))


def test_a_count_that_is_made_as_a_number_is_traced_from_the_first_draw_on():
    traced = []

    def construct():
        with jax.ensure_compile_time_eval():
            rngs = nnx.Rngs(0)
        for draw in (lambda: None, rngs.params):
            draw()
            traced.append(isinstance(rngs.default.count.get_raw_value(), Tracer))

    nnx.eval_shape(construct)
    assert traced == [False, True]
