"""The table of Linen transforms and state kinds that the guides show."""

import pytest
from flax import linen as nn

from tests.transforms import linen_states, test_linen_classes, test_linen_functions

FILES = {"test_linen_classes": test_linen_classes, "test_linen_functions": test_linen_functions}
ROWS = (
    "vmap",
    "scan",
    "jit",
    "remat",
    "remat_scan",
    "map_variables",
    "jvp",
    "vjp",
    "grad",
    "value_and_grad",
    "custom_vjp",
    "while_loop",
    "cond",
    "switch",
    "add_metadata_axis",
    "pack",
)


@pytest.mark.parametrize("row", ROWS)
def test_every_cell_of_a_row_names_a_test_that_exists(row):
    cells = {column: test for (name, column), test in linen_states.CELLS.items() if name == row}
    # Loops cannot carry what grows, and remat_scan cannot name the axes that it adds.
    absent = {"while_loop": {"sown"}, "remat_scan": {"partitioned"}}.get(row, set())
    assert set(cells) == set(linen_states.STATES) - absent
    for test in cells.values():
        path, function, case = test.replace("[", "::").rstrip("]").split("::")
        module = FILES[path.removeprefix("tests/transforms/").removesuffix(".py")]
        assert case in module.CASES
        assert callable(getattr(module, function))


def test_the_table_has_no_other_rows():
    assert {row for row, _ in linen_states.CELLS} == set(ROWS)


def test_the_row_of_remat_is_that_of_checkpoint_too():
    assert nn.checkpoint is nn.remat


def test_each_form_meets_every_transform_and_every_state():
    cases = linen_states.TABLE.values()
    for name, transform in linen_states.TRANSFORMS.items():
        named_too = (True, False) if transform.filters else (True,)
        forms = {(*form, named) for form in transform.forms for named in named_too}
        assert {case[2:] for case in cases if case[0] == name} == forms
    every = {case[2:] for case in cases}
    for state in linen_states.STATES:
        assert {case[2:] for case in cases if case[1] == state} == every
