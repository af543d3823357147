"""The table of transforms and states says nothing that is not tested."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.transforms import (
    test_nnx_calls,
    test_nnx_closures,
    test_nnx_copies,
    test_nnx_mapped,
    test_nnx_sown,
)
from tests.transforms.nnx_states import (
    CALLS,
    CELLS,
    CLOSURES,
    COPIES,
    KEEPS_SOWN,
    KINDS,
    MAPPED,
    SETTING,
    WITHOUT_GRAPH_UPDATES,
)

ROOT = Path(__file__).parents[2]


def test_every_cell_is_a_test_that_exists():
    files = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("tests/transforms/test_nnx_*.py"))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", *files]
    listed = subprocess.run(
        [*command, "-p", "no:cacheprovider"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(CELLS.values()) <= set(listed.stdout.splitlines())


def test_every_transform_of_a_file_is_in_the_table():
    assert tuple(test_nnx_calls.TRANSFORMS) == CALLS
    assert tuple(test_nnx_mapped.TRANSFORMS) == MAPPED
    assert tuple(test_nnx_copies.TRANSFORMS) == COPIES
    assert tuple(test_nnx_closures.TRANSFORMS) == CLOSURES
    assert tuple(test_nnx_sown.TRANSFORMS) == KEEPS_SOWN


@pytest.mark.parametrize(
    ("transforms", "states", "settings"),
    [
        (CALLS, KINDS, {"in_a_parent", "tree_mode", "alone", "no_graph_updates"}),
        # Not all of its states make sense under each transform.
        (MAPPED, (), {"in_a_parent", "tree_mode", "no_graph_updates"}),
        (COPIES, KINDS, {"in_a_parent", "tree_mode"}),
    ],
)
def test_each_setting_meets_every_transform_and_every_state(transforms, states, settings):
    for transform in transforms:
        refused = {"in_a_parent", "alone"} if transform in WITHOUT_GRAPH_UPDATES else set()
        assert {SETTING[at] for at in SETTING if at[0] == transform} == settings - refused
    for state in states:
        met = {SETTING[at] for at in SETTING if at[0] in transforms and at[1] == state}
        assert met == settings
