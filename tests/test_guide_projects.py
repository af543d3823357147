"""A guide shows diffs of its project as they are, and the page beside it shows all of them."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "project_diffs.py"))
GUIDES = SCRIPT["GUIDES"]
WITH_ALL_DIFFS = [guide for guide in GUIDES if guide.endswith("_diffs.md")]
REMEDY = "run: python scripts/project_diffs.py write"


def patched(text, diff):
    """What a unified diff makes of a text, read by hand: no patch program is needed."""
    old, new, at = text.splitlines(), [], 0
    for line in diff.splitlines()[2:]:
        if header := re.fullmatch(r"@@ -(\d+)(?:,(\d+))? \+\S+ @@", line):
            # Where nothing is taken away, the number is that of the line before.
            begin = int(header[1]) - (header[2] != "0")
            new += old[at:begin]
            at = begin
        elif line[0] == "+":
            new.append(line[1:])
        else:
            assert line[1:] == old[at], line
            new += [line[1:]] * (line[0] == " ")
            at += 1
    return "\n".join([*new, *old[at:]]) + "\n"


def shown_diffs(guide):
    text = (ROOT / "migration_guides" / guide).read_text()
    return re.findall(r"<!-- diff: (\S+) -->\n\n```diff\n(.*?)\n```\n", text, re.DOTALL)


@pytest.mark.parametrize("guide", WITH_ALL_DIFFS)
def test_the_diffs_make_each_step_out_of_the_one_before(guide):
    project = ROOT / "migration_guides" / "projects" / GUIDES[guide]
    base, *later = sorted(project.glob("step_?"))
    files = {path.name: path.read_text() for path in base.glob("*.py")}
    diffs = dict(shown_diffs(guide))
    assert len(diffs) == len(shown_diffs(guide))
    for step in later:
        for path in sorted(step.glob("*.py")):
            diff = diffs.pop(f"{step.name}/{path.name}")
            files[path.name] = patched(files.get(path.name, ""), diff)
            assert files[path.name] == path.read_text(), REMEDY
    assert not diffs


@pytest.mark.parametrize("guide", GUIDES)
def test_a_step_holds_only_what_it_changes(guide):
    diffs = dict(shown_diffs(guide))
    assert diffs
    assert all(re.search(r"^[+-](?![+-]{2} )", diff, re.MULTILINE) for diff in diffs.values())


@pytest.mark.parametrize("guide", GUIDES)
def test_the_script_that_writes_the_diffs_has_nothing_to_write(guide):
    text = (ROOT / "migration_guides" / guide).read_text()
    found = SCRIPT["diffs"](SCRIPT["PROJECTS"] / GUIDES[guide])
    assert SCRIPT["renewed"](text, found) == text, REMEDY


def test_the_script_fills_in_a_marker_and_replaces_an_old_diff():
    renewed = SCRIPT["renewed"]
    empty = "Before.\n\n<!-- diff: step_1/a.py -->\n\nAfter.\n"
    filled = renewed(empty, {"step_1/a.py": "-1\n+2"})
    assert filled == "Before.\n\n<!-- diff: step_1/a.py -->\n\n```diff\n-1\n+2\n```\n\nAfter.\n"
    assert renewed(filled, {"step_1/a.py": "-1\n+3"}) == filled.replace("+2", "+3")
