"""Print the tables of transforms and states as Markdown, or write them into their page.

``python scripts/transform_tables.py`` prints them, ``python scripts/transform_tables.py write``
puts them into the page beside the guide on transforms. They are made from ``CELLS`` in
``tests/transforms/linen_states.py`` and ``nnx_states.py``, so the page cannot claim a combination
that has no test.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "migration_guides" / "03_transforms_tested.md"
LAX = ("scan", "map", "cond", "while_loop", "fori_loop")
# Rows that are not named after a function of their library, or after two.
LINEN_ROWS = {"pack": "`flax.core.lift.pack`", "remat": "`nn.remat`, `nn.checkpoint`"}
NNX_ROWS = {"lazy_init": "`bridge.lazy_init`"}
WORDS = ("inputs", "layers", "of", "in")

Cells = Mapping[tuple[str, str], str]


def tables() -> dict[str, str]:
    """Return the Markdown of each table by its name."""
    from tests.transforms import linen_states, nnx_states

    def linen_row(name: str) -> str:
        return LINEN_ROWS.get(name, f"`nn.{name}`")

    def nnx_row(name: str) -> str:
        if name in nnx_states.COPIES:
            return _words(name)
        home = "jax" if name.startswith("jax_") else "nnx"
        return " ".join(
            _part(part, home) for part in re.split("_(of|in)_", name.removeprefix("jax_"))
        )

    sides = {"linen": (linen_states.CELLS, linen_row), "nnx": (nnx_states.CELLS, nnx_row)}
    return {side: grid(cells, row) for side, (cells, row) in sides.items()}


def grid(cells: Cells, row_name) -> str:
    """Return a grid with a link to the test in every cell."""
    states = _states(cells)
    lines = [["transform", *map(_words, states)], ["---"] + [":-:"] * len(states)]
    for transform in dict.fromkeys(transform for transform, _ in cells):
        ticks = [_tick(cells.get((transform, state))) for state in states]
        lines.append([row_name(transform), *ticks])
    return _markdown(lines)


def markers(name: str) -> tuple[str, str]:
    """Return the comments before and after a table."""
    return f"<!-- transforms:{name}:begin -->\n", f"<!-- transforms:{name}:end -->\n"


def standing(text: str, name: str) -> str:
    """Return the table that the page holds."""
    begin, end = markers(name)
    return text.split(begin)[1].split(end)[0].strip("\n")


def replaced(text: str, name: str, table: str) -> str:
    """Return the page with another table."""
    begin, end = markers(name)
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n\n{end}{rest.split(end)[1]}"


def _states(cells: Cells) -> list[str]:
    return list(dict.fromkeys(state for _, state in cells))


def _tick(test: str | None) -> str:
    if test is None:
        return ""
    file, name = test.split("::")
    return f'[✓](../{file} "{name}")'


def _part(part: str, home: str) -> str:
    if part in WORDS:
        return part
    lax = ".lax" if home == "jax" and part in LAX else ""
    return NNX_ROWS.get(part, f"`{home}{lax}.{part}`")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _markdown(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: list[str]) -> None:
    """Print the tables, or write them if there is an argument."""
    text = PAGE.read_text()
    for name, table in tables().items():
        text = replaced(text, name, table)
        if not arguments:
            print(f"{name}:\n\n{table}\n")
    if arguments:
        PAGE.write_text(text)


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["write"]):
        raise SystemExit(__doc__)
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1:])
