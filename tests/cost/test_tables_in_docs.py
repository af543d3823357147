"""The figures in the guide on cost and in the README are those of the results that are kept."""

import json
import re
import runpy
from pathlib import Path

from benchmarks.all_rows import ROWS

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "cost_table.py"))
TEXT = SCRIPT["GUIDE"].read_text()


def test_the_table_in_the_guide_is_what_the_script_makes():
    remedy = "run: python scripts/cost_table.py write"
    assert SCRIPT["standing"](TEXT) == SCRIPT["table"](), remedy
    assert SCRIPT["replaced"](TEXT, SCRIPT["table"]()) == TEXT


def test_the_guide_tells_every_ratio_that_was_measured():
    """Read from the JSON, without the benchmark."""
    lines = [line.split(" | ") for line in SCRIPT["standing"](TEXT).splitlines()]
    told = {(line[0].removeprefix("| "), line[1]): line[2] for line in lines if len(line) == 4}
    for row in json.loads(SCRIPT["RESULTS"].read_text())["rows"]:
        size = f"{row['size']:,}" if isinstance(row["size"], int) else row["size"]
        for ratio in row["ratios"]:
            medians = told[row["row"], f"{ratio['of']} / {ratio['to']}"].split(", ")
            found = next(m.split()[0] for m in medians if m.endswith(f"({size})"))
            assert abs(float(found) - ratio["found"]["median"]) <= max(0.005, float(found) * 0.05)


def test_a_row_has_results_at_every_size_or_the_guide_says_it_has_none():
    rows = json.loads(SCRIPT["RESULTS"].read_text())["rows"]
    measured = {row["row"] for row in rows}
    assert [(row["row"], row["size"]) for row in rows] == [
        (row.name, size) for row in ROWS if row.name in measured for size in row.sizes
    ]
    named = set(re.findall(r"^\| ([^|]+?) \|", SCRIPT["standing"](TEXT, "without"), re.MULTILINE))
    assert named - {"row", "---"} == {row.name for row in ROWS} - measured


def test_the_guide_shows_the_picture_that_is_kept():
    path = "../benchmarks/results/cpu/cost.png"
    assert f"]({path})" in TEXT
    assert (SCRIPT["GUIDE"].parent / path).is_file()


def test_the_readme_tells_how_long_dispatch_by_nnx_jit_takes():
    """Read from the JSON, without the benchmark."""
    medians = [
        ratio["found"]["median"]
        for row in json.loads(SCRIPT["RESULTS"].read_text())["rows"]
        if row["row"] == "call in a hot loop, dispatch" and row["size"] in (8, 32, 128)
        for ratio in row["ratios"]
        if ratio["of"] == "nnx.jit"
    ]
    text = (ROOT / "README.md").read_text()
    told = re.search(r"dispatch takes (\d+) to (\d+) times .* on stacks of 8 to 128 blocks", text)
    assert [int(figure) for figure in told.groups()] == [round(min(medians)), round(max(medians))]
    assert SCRIPT["told"](text, *SCRIPT["dispatch"]()) == text


def test_the_guide_tells_what_was_measured_on_accelerators():
    found = SCRIPT["standing"](TEXT, "accelerators")
    assert found == SCRIPT["accelerators"](), "run: python scripts/cost_table.py write"
    for path in SCRIPT["ON_ACCELERATORS"].glob("*/cost.json"):
        kept = json.loads(path.read_text())
        assert found.count(f"| {kept['environment']['device'].removeprefix('1 x ')} |") == sum(
            len(row["ratios"]) for row in kept["rows"]
        )


def test_a_section_is_replaced_between_its_marks_also_by_nothing():
    text = SCRIPT["replaced"](TEXT, "| a |", "without")
    assert SCRIPT["standing"](text, "without") == "| a |"
    empty = SCRIPT["replaced"](text, "", "without")
    assert SCRIPT["standing"](empty, "without") == ""
    assert SCRIPT["replaced"](empty, SCRIPT["standing"](TEXT, "without"), "without") == TEXT
