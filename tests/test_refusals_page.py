"""The page of reasons is what the rewriter gives."""

import re
import runpy
from pathlib import Path

from bridge.rewrite.plan import _refusals

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "refusals_page.py"))


def test_the_page_is_what_the_script_makes():
    assert SCRIPT["PAGE"].read_text() == SCRIPT["page"](), (
        "run: python scripts/refusals_page.py write"
    )


def test_every_reason_is_on_the_page_under_a_heading():
    text = SCRIPT["PAGE"].read_text()
    assert re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE) == list(_refusals._TABLE)
    assert all("| id | reason |" in part for part in text.split("\n## ")[1:])
    # No placeholder of `str.format` is left, and no row has another number of cells.
    assert not re.search(r"\{\w+(!r)?\}", text)
    assert {
        len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line[:1] == "|"
    } == {4}
