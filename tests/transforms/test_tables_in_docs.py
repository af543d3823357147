"""The tables of the README and of the guide are those that the script makes of `CELLS`."""

import re
import runpy
from pathlib import Path

import pytest

from tests.transforms import linen_states, nnx_states

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "transform_tables.py"))
CELLS = {"linen": linen_states.CELLS, "nnx": nnx_states.CELLS}


@pytest.fixture(scope="module")
def tables():
    return SCRIPT["tables"]()


@pytest.mark.parametrize("side", CELLS)
@pytest.mark.parametrize("document", [SCRIPT["GUIDE"], SCRIPT["README"]])
def test_the_table_in_a_document_is_what_the_script_makes(tables, document, side):
    text = (ROOT / document).read_text()
    remedy = "run: python scripts/transform_tables.py write"
    assert SCRIPT["standing"](text, side) == tables[document][side], remedy
    assert SCRIPT["replaced"](text, side, tables[document][side]) == text


@pytest.mark.parametrize("side", CELLS)
def test_the_guide_links_each_cell_to_its_test_and_claims_no_other(side):
    """Read from the document, without the script."""
    text = (ROOT / SCRIPT["GUIDE"]).read_text()
    begin, end = (text.index(f"<!-- transforms:{side}:{mark} -->") for mark in ("begin", "end"))
    links = re.findall(r'\[✓\]\(\.\./(\S+) "(\S+)"\)', text[begin:end])
    assert text[begin:end].count("✓") == len(links) == len(CELLS[side])
    assert sorted("::".join(link) for link in links) == sorted(CELLS[side].values())


@pytest.mark.parametrize("side", CELLS)
def test_the_readme_links_files_that_exist_and_leaves_no_cell_out(side):
    text = SCRIPT["standing"]((ROOT / SCRIPT["README"]).read_text(), side)
    assert all((ROOT / file).is_file() for file in re.findall(r"\]\((\S+?)\)", text))
    claimed = 0
    for line in text.splitlines()[2:]:
        _, transforms, states, _, _ = line.split("|")
        claimed += len(transforms.split(",")) * len(states.split(","))
    assert claimed == len(CELLS[side])
