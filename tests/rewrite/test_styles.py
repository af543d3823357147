"""Styles of public programs are rewritten, and keep what they say of other configurations."""

import jax
import numpy as np
import pytest
from flax import nnx

import bridge
from bridge import port
from tests.rewrite import models_styles as models
from tests.rewrite.test_programs import imported, spec


@pytest.fixture(scope="module")
def result():
    options = {"kwargs": {"train": False}, "gradients": False, "fast": True}
    return bridge.rewrite(models.Root, spec(2, 4, 3), **options)


def test_the_program_is_proven_and_nothing_stays_linen(result):
    assert result.is_proven, str(result)
    assert result.max_difference == 0
    assert "left Linen" not in {each.level for each in result.classes}, str(result)
    assert "ToNNX" not in "".join(result.sources.values())


def test_a_field_that_is_no_argument_is_none_of_the_new_constructor(result):
    (text,) = result.sources.values()
    header = text[text.index("class Embedding") :].split("def __call__")[0]
    assert "self.table = nnx.Param(" in header
    assert "table:" not in header


def test_a_parameter_whose_name_is_an_argument_keeps_its_path_in_linen(result):
    assert result.rules["Positions_1/learned_table"] == "positions_1.add_positions.learned_table"


def test_what_is_in_a_list_with_names_of_its_own_is_found_by_its_place(result):
    rules = result.rules
    assert rules["Named_0/first"] == "named.pair.0"
    assert rules["Named_0/second"] == "named.pair.1"
    assert rules[r"Named_0/late(\d+)"] == r"named.late.\1"


@pytest.mark.parametrize("fields", [{}, {"width": 7}, {"factor": 3}, {"width": 7, "factor": 3}])
def test_an_open_size_follows_from_the_input_in_the_new_class_too(result, fields):
    (module,) = imported(result)
    linen = models.Wide(**fields)
    x = jax.random.normal(jax.random.key(0), (2, 4))
    variables = linen.init(jax.random.key(1), x)
    model = module.Wide(**fields, in_features=4, rngs=nnx.Rngs(0))
    rules = {f"Dense_{i}": f"dense_{i}" for i in range(3)}
    port.plan(variables, model, rules).apply()
    np.testing.assert_array_equal(model(x), linen.apply(variables, x))


def test_a_variable_that_no_run_made_is_to_be_reviewed(result):
    (attention,) = (each for each in result.classes if each.name == "Attention")
    assert attention.level == "needs review"
    assert any("no run made this variable" in note for note in attention.notes)
    assert any("self.variables is read in a branch" in note for note in attention.notes)
    (text,) = result.sources.values()
    own = text[text.index("class Attention") :]
    assert "if init_cache:" in own
    assert "has_variable" not in own


def test_names_are_those_of_a_person():
    inputs = spec(2, 6, 5, 3), spec(2, 7, 4), spec(2, 9, 1, 1, 1)
    result = bridge.rewrite(models.Words, *inputs, gradients=False, fast=True)
    (text,) = result.sources.values()
    assert result.is_proven, str(result)
    assert "height: int,\n        width: int,\n        tokens_length: int," in text
    assert "(height, width, 1)" in text
    assert "pairs_dim1: int," in text
    assert "mask_dim1: int," in text
    assert "self.block1d = Block1D(" in text
    assert "nnx.initializers.zeros" in text
    assert "nnx.initializers.ones" in text
    assert "nn.zeros" not in text


def test_what_is_said_of_a_field_is_said_of_the_argument():
    result = bridge.rewrite(models.Told, spec(2, 3), gradients=False, fast=True)
    (text,) = result.sources.values()
    own = text[text.index("class Told") :].split("*,")[0]
    assert own == (
        "class Told(nnx.Module):\n"
        '    """Fields that are told of."""\n'
        "\n"
        "    def __init__(\n"
        "        self,\n"
        "        # How wide\n"
        "        # the layers are.\n"
        "        width: int = 4,\n"
        "        # All of them.\n"
        "        #\n"
        "        # None is one that only multiplies.\n"
        "        depth: int = 2,  # how many\n"
        "        "
    )


def test_a_layer_that_no_call_needs_is_not_made_and_its_branch_raises():
    result = bridge.rewrite(models.Shifted, spec(2, 3), gradients=False)
    (module,) = imported(result)
    model = module.Shifted(in_features=3, rngs=nnx.Rngs(0))
    assert result.is_proven, str(result)
    assert [str(path[0]) for path, _ in nnx.to_flat_state(nnx.state(model))] == ["dense"] * 2
    with pytest.raises(NotImplementedError, match="did not run when Shifted was rewritten"):
        model(np.ones((2, 3)), np.ones((2, 5)))
    (note,) = result.classes[0].notes
    assert note.endswith("a branch that did not run raises NotImplementedError")


def test_a_layer_that_only_some_calls_need_stays_linen():
    also = [(models.Shifted, spec(2, 3), spec(2, 5))]
    result = bridge.rewrite(models.Shifted, spec(2, 3), gradients=False, also=also)
    (refusal,) = result.classes[0].refusals
    assert refusal.id == "applied-on-call"


def test_sizes_that_are_equal_in_a_square_image_are_told_apart():
    result = bridge.rewrite(models.Square, spec(2, 8, 8, 3), gradients=False)
    (module,) = imported(result)
    assert {each.level for each in result.classes} == {"proven"}
    x = jax.random.normal(jax.random.key(0), (2, 8, 6, 3))
    variables = models.Square().init(jax.random.key(1), x)
    model = module.Square(in_features=3, height=4, width=3, rngs=nnx.Rngs(0))
    port.plan(variables, model, result.rules).apply()
    np.testing.assert_array_equal(model(x), models.Square().apply(variables, x))
