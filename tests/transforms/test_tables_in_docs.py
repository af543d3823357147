"""The tables in the page on transforms are those that the script makes from `CELLS`."""

import re
import runpy
from pathlib import Path

import pytest

from tests.transforms import linen_states, nnx_states

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "transform_tables.py"))
TEXT = SCRIPT["PAGE"].read_text()
CELLS = {"linen": linen_states.CELLS, "nnx": nnx_states.CELLS}


@pytest.mark.parametrize("side", CELLS)
def test_the_table_in_the_page_is_what_the_script_makes(side):
    table = SCRIPT["tables"]()[side]
    remedy = "run: python scripts/transform_tables.py write"
    assert SCRIPT["standing"](TEXT, side) == table, remedy
    assert SCRIPT["replaced"](TEXT, side, table) == TEXT


@pytest.mark.parametrize("side", CELLS)
def test_the_page_links_each_cell_to_its_test_and_claims_no_other(side):
    """Read from the document, without the script."""
    begin, end = (TEXT.index(f"<!-- transforms:{side}:{mark} -->") for mark in ("begin", "end"))
    links = re.findall(r'\[✓\]\(\.\./(\S+) "(\S+)"\)', TEXT[begin:end])
    assert TEXT[begin:end].count("✓") == len(links) == len(CELLS[side])
    assert sorted("::".join(link) for link in links) == sorted(CELLS[side].values())
    assert all((ROOT / file).is_file() for file, _ in links)


def test_the_guide_on_transforms_leads_to_the_page_and_has_no_table():
    guide = (SCRIPT["PAGE"].parent / "03_transforms.md").read_text()
    assert f"({SCRIPT['PAGE'].name})" in guide
    assert "✓" not in guide
    assert len(guide) < 40_000
