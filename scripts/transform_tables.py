"""Print the tables of transforms and states as Markdown, or write them into the documents.

``python scripts/transform_tables.py`` prints them, ``python scripts/transform_tables.py write``
puts them into the README and the guide on transforms. They are made of ``CELLS`` in
``tests/transforms/linen_states.py`` and ``nnx_states.py``, so a cell that has no test cannot be
claimed.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDE = "migration_guides/03_transforms.md"
README = "README.md"
LAX = ("scan", "map", "cond", "while_loop", "fori_loop")
# What the rows are called that are not named after a function of their library.
ROW_NAMES = {"pack": "`flax.core.lift.pack`", "lazy_init": "`bridge.lazy_init`"}
WORDS = ("inputs", "layers", "of", "in")

Cells = Mapping[tuple[str, str], str]


def tables() -> dict[str, dict[str, str]]:
    """Return the tables of each document: ``{document: {name: Markdown}}``."""
    from tests.transforms import linen_states, nnx_states

    def linen_row(name: str) -> str:
        return ROW_NAMES.get(name, f"`nn.{name}`")

    def nnx_row(name: str) -> str:
        if name in nnx_states.COPIES:
            return _words(name)
        home = "jax" if name.startswith("jax_") else "nnx"
        return " ".join(
            _part(part, home) for part in re.split("_(of|in)_", name.removeprefix("jax_"))
        )

    sides = {"linen": (linen_states.CELLS, linen_row), "nnx": (nnx_states.CELLS, nnx_row)}
    return {
        GUIDE: {side: full_table(cells, row) for side, (cells, row) in sides.items()},
        README: {side: compact_table(cells, row) for side, (cells, row) in sides.items()},
    }


def full_table(cells: Cells, row_name) -> str:
    """Return a grid with a link to the test in every cell, for a document one folder down."""
    states = _states(cells)
    lines = [["transform", *map(_words, states)], ["---"] + [":-:"] * len(states)]
    for transform in dict.fromkeys(transform for transform, _ in cells):
        ticks = [_tick(cells.get((transform, state))) for state in states]
        lines.append([row_name(transform), *ticks])
    return _markdown(lines)


def compact_table(cells: Cells, row_name) -> str:
    """Return one line for all transforms with the same states and test files."""
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for transform in dict.fromkeys(transform for transform, _ in cells):
        states = tuple(state for state in _states(cells) if (transform, state) in cells)
        files = dict.fromkeys(cells[transform, state].split("::")[0] for state in states)
        groups.setdefault((states, tuple(files)), []).append(row_name(transform))
    lines = [["transforms", "states", "tests"], ["---"] * 3]
    for (states, files), transforms in groups.items():
        links = [f"[{Path(file).stem.removeprefix('test_')}]({file})" for file in files]
        lines.append([", ".join(transforms), ", ".join(map(_words, states)), ", ".join(links)])
    return _markdown(lines)


def markers(name: str) -> tuple[str, str]:
    """Return the comments before and behind a table."""
    return f"<!-- transforms:{name}:begin -->\n", f"<!-- transforms:{name}:end -->\n"


def standing(text: str, name: str) -> str:
    """Return the table that stands in a document."""
    begin, end = markers(name)
    return text.split(begin)[1].split(end)[0].strip("\n")


def replaced(text: str, name: str, table: str) -> str:
    """Return the document with another table."""
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
    return ROW_NAMES.get(part, f"`{home}{lax}.{part}`")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _markdown(lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: list[str]) -> None:
    """Print the tables, or write them if there is an argument."""
    for document, named in tables().items():
        text = (ROOT / document).read_text() if arguments else ""
        for name, table in named.items():
            if arguments:
                text = replaced(text, name, table)
            else:
                print(f"{document}, {name}:\n\n{table}\n")
        if arguments:
            (ROOT / document).write_text(text)


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["write"]):
        raise SystemExit(__doc__)
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1:])
