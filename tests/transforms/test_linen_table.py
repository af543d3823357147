"""The table of Linen transforms and state kinds that the guides show."""

import pytest

from tests.transforms import linen_states, test_linen_classes, test_linen_functions

FILES = {"test_linen_classes": test_linen_classes, "test_linen_functions": test_linen_functions}
ROWS = (
    "vmap",
    "scan",
    "jit",
    "remat",
    "checkpoint",
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
