"""Print what the documents tell of the benchmarks as Markdown, or write it into them.

``python scripts/cost_table.py`` prints it, ``python scripts/cost_table.py write`` puts it into the
guide on cost and into the README. It is made of the results of
``python -m benchmarks --output benchmarks/results/cpu`` and of all that ``--accelerator`` has left
in ``benchmarks/results/gpu``.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "migration_guides" / "07_cost.md"
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "cost.json"
ON_ACCELERATORS = ROOT / "benchmarks" / "results" / "gpu"
README = ROOT / "README.md"
# What stands between these in the guide is made here.
TABLE, WITHOUT, ACCELERATORS = "cost", "without", "accelerators"
# The README's sentence on dispatch by `nnx.jit`, and what it tells of.
DISPATCH = re.compile(r"dispatch takes (\d+) to (\d+) times .* on stacks of 8 to 128 blocks")
ROW, SUBJECT, SIZES = "call in a hot loop, dispatch", "nnx.jit", (8, 32, 128)


def table() -> str:
    """Return the table and what it was measured on."""
    from benchmarks import report, results

    environment, measured = results.from_json(RESULTS.read_text())
    versions = ", ".join(f"{name} {text}" for name, text in environment["versions"].items())
    note = (
        f"Measured with {versions}, Python {environment['python']}, on {environment['cores']} cores"
        f" of an {environment['processor']} ({environment['device']}), up to"
        f" {environment['rounds']} interleaved rounds over {environment['processes']} processes."
    )
    # What else is to be known of a run, which its figures do not tell.
    note = " ".join(filter(None, (note, environment.get("note"))))
    return f"{report.summary(measured)}\n\n{note}"


def without() -> str:
    """Return which rows no run has measured yet, nothing if all have figures."""
    from benchmarks import results
    from benchmarks.all_rows import ROWS

    measured = {one.row for one in results.from_json(RESULTS.read_text())[1]}
    left = [f"| {row.name} |" for row in ROWS if row.name not in measured]
    if not left:
        return ""
    head = (
        "### Rows without figures\n\n`python -m benchmarks --row NAME` measures any row alone. No"
        " run has these yet:\n\n| row |\n| --- |"
    )
    return "\n".join([head, *left])


def dispatch() -> tuple[str, str]:
    """Return the least and the largest ratio of dispatch by `nnx.jit`, as the README tells them."""
    from benchmarks import results

    medians = [
        ratio.found.median
        for one in results.from_json(RESULTS.read_text())[1]
        if one.row == ROW and one.size in SIZES
        for ratio in one.ratios
        if ratio.of == SUBJECT
    ]
    return str(round(min(medians))), str(round(max(medians)))


def accelerators() -> str:
    """Return the ratios that were measured on accelerators, and with what."""
    from benchmarks import results

    lines = ["| device | row | size | ratio | median (quartiles) |", "|---|---|---|---|---|"]
    versions = set[str]()
    for path in sorted(ON_ACCELERATORS.glob("*/cost.json")):
        environment, measured = results.from_json(path.read_text())
        device = environment["device"].removeprefix("1 x ")
        versions.add(f"{device}: jax {environment['versions']['jax']}")
        for one in measured:
            for ratio in one.ratios:
                found = ratio.found
                spread = f" ({found.low:.2f} to {found.high:.2f})" if one.unit == "s" else ""
                row = f"| {device} | {one.row} | {one.size} | {ratio.of} / {ratio.to}"
                lines.append(f"{row} | {found.median:.3f}{spread} |")
    return "\n".join([*lines, "", f"Measured on {'; '.join(sorted(versions))}."])


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->\n"


def standing(text: str, name: str = TABLE) -> str:
    """Return what stands in the guide between the marks of a name."""
    begin, end = _marks(name)
    return text.split(begin)[1].split(end)[0].strip("\n")


def replaced(text: str, new: str, name: str = TABLE) -> str:
    """Return the guide with something else there."""
    begin, end = _marks(name)
    before, rest = text.split(begin)
    middle = f"\n{new}\n" if new else ""
    return f"{before}{begin}{middle}\n{end}{rest.split(end)[1]}"


def told(text: str, least: str, most: str) -> str:
    """Return the README with other figures of dispatch."""
    found = DISPATCH.search(text)
    if found is None:
        raise SystemExit(f"{README.name} has no sentence like: {DISPATCH.pattern}")
    return f"{text[: found.start(1)]}{least} to {most}{text[found.end(2) :]}"


def main(arguments: list[str]) -> None:
    """Print all of it, or write it if there is an argument."""
    if not arguments:
        times = "dispatch takes {} to {} times".format(*dispatch())
        print(table(), without(), accelerators(), times, sep="\n\n")
        return
    text = replaced(replaced(GUIDE.read_text(), table()), without(), WITHOUT)
    GUIDE.write_text(replaced(text, accelerators(), ACCELERATORS))
    README.write_text(told(README.read_text(), *dispatch()))


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["write"]):
        raise SystemExit(__doc__)
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1:])
