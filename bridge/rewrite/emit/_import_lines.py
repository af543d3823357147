"""Imports of a new file as text, in the order and the groups that people give them."""

from __future__ import annotations

import ast
import sys


def import_line(place: str, aliases: list[str]) -> str:
    """An import of names, on several lines if it is long."""
    line = f"from {place} import {', '.join(aliases)}"
    if len(line) <= 100:
        return line
    return "\n".join([f"from {place} import (", *(f"    {alias}," for alias in aliases), ")"])


def alias_text(alias: ast.alias) -> str:
    """A name in an import."""
    return alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"


def sorted_imports(imports: list[str], added: list[str]) -> list[str]:
    """The old order, with what is new behind the imports of other packages."""
    relative = [each for each in imports if each.startswith("from .")]
    others = [each for each in imports if each not in relative]
    flax = [i for i, each in enumerate(others) if each.startswith(("from flax", "import flax"))]
    new_flax = [each for each in added if "flax" in each]
    rest = [each for each in added if each not in new_flax]
    position = flax[-1] + 1 if flax else len(others)
    others[position:position] = new_flax
    return [
        *others,
        *[each for each in rest if "_linen" not in each],
        *relative,
        *[each for each in rest if "_linen" in each],
    ]


def grouped(imports: list[str]) -> str:
    """Imports with a blank line between Python's own, those of packages and relative ones."""
    found, before = "", None
    for each in imports:
        name = each.split()[1]
        kind = 2 if name.startswith(".") else name.split(".")[0] not in sys.stdlib_module_names
        found += ("\n" if before is not None and kind != before else "") + each + "\n"
        before = kind
    return found.rstrip("\n")
