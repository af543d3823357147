"""Print the table of costs as Markdown, or write it into the guide on cost.

``python scripts/cost_table.py`` prints it, ``python scripts/cost_table.py write`` puts it into the
guide. It is made of the results of ``python -m benchmarks --output benchmarks/results/cpu``.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "migration_guides" / "07_cost.md"
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "cost.json"
BEGIN, END = "<!-- cost:begin -->\n", "<!-- cost:end -->\n"


def table() -> str:
    """Return the table and what it was measured on."""
    from benchmarks import report, results

    environment, measured = results.from_json(RESULTS.read_text())
    versions = ", ".join(f"{name} {text}" for name, text in environment["versions"].items())
    note = (
        f"Measured with {versions}, Python {environment['python']}, on {environment['cores']} cores"
        f" of an {environment['processor']} ({environment['device']}), {environment['rounds']}"
        f" interleaved rounds over {environment['processes']} processes."
    )
    return f"{report.summary(measured)}\n\n{note}"


def standing(text: str) -> str:
    """Return the table that stands in the guide."""
    return text.split(BEGIN)[1].split(END)[0].strip("\n")


def replaced(text: str, new: str) -> str:
    """Return the guide with another table."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{new}\n\n{END}{rest.split(END)[1]}"


def main(arguments: list[str]) -> None:
    """Print the table, or write it if there is an argument."""
    if arguments:
        GUIDE.write_text(replaced(GUIDE.read_text(), table()))
    else:
        print(table())


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["write"]):
        raise SystemExit(__doc__)
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1:])
