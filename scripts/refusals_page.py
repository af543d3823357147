"""Print the page of all reasons for which `bridge.rewrite` leaves something as it is, or write it.

``python scripts/refusals_page.py`` prints the page, ``python scripts/refusals_page.py write``
writes it. It is made of the table in ``bridge/rewrite/plan/_refusals.py``, whose comments are its
headings.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "bridge" / "rewrite" / "plan" / "_refusals.py"
PAGE = ROOT / "migration_guides" / "12_rewriting_refusals.md"
HEAD = """# Why something is left as it is

[`bridge.rewrite`](12_rewriting.md) gives each reason an id, such as `[while-loop]`. This page has
all of them, with what you can do. Words in italics stand for names of your program. A layer or a
class that is refused stays Linen, inside `bridge.ToNNX`; a function of the training stays as it is.
The rest is rewritten."""


def page() -> str:
    """Return the page."""
    text = TABLE.read_text(encoding="utf-8")
    tables = [
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_TABLE"
    ]
    (table,) = (node for node in tables if isinstance(node, ast.Dict))
    headings = {
        number: line.strip("# .\n")
        for number, line in enumerate(text.splitlines(), 1)
        if line.startswith("    # ")
    }
    lines = [HEAD]
    above = table.lineno
    for key, value in zip(filter(None, table.keys), table.values, strict=True):
        for number in range(above, key.lineno):
            if number in headings:
                lines += [
                    f"\n## {headings[number]}\n",
                    "| id | reason | what you can do |",
                    "|---|---|---|",
                ]
        above = key.lineno
        reason, remedy = map(_cell, ast.literal_eval(value))
        lines.append(f"| `{ast.literal_eval(key)}` | {reason} | {remedy} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """A text of the table as Markdown; what stands in backquotes stays as it is."""
    outside = text.split("`")
    outside[::2] = [
        _NAME.sub(r"*\1*", re.sub(r"([|<>_*])", r"\\\1", each)) for each in outside[::2]
    ]
    return "`".join(outside).replace("{{", "{").replace("}}", "}")


# What `str.format` fills in; its underscore is escaped by then.
_NAME = re.compile(r"(?<!\{)\{([\w\\]+)(?:!r)?\}")


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["write"]):
        raise SystemExit(__doc__)
    if sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page())
