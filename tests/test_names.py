"""A name that modules export stands for one thing in the whole core, and in the tools."""

import ast
import collections
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What uses the core has words of its own, and the core does not know them.
TOOLS = {"_cli", "_demo", "checkpoint", "parity", "port", "rewrite"}
# The classes and constants of tools are told apart too, but for those of `rewrite`, which are about
# source code.
SOURCE_CODE = {"rewrite"}
# Names that are to be read as one: the inverse pairs of both sides, and the variables of type
# checkers.
ALIKE = {"to_leaf", "from_leaf", "T", "F", "M"}


def names(source):
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def names_by_module(left_out):
    """The modules that define each name."""
    places = collections.defaultdict(set)
    modules = [*(ROOT / "bridge").rglob("*.py"), *(ROOT / "registry").rglob("*.py")]
    for module in modules:
        if not left_out.intersection(module.relative_to(ROOT).parts):
            for name in names(module.read_text()):
                places[name].add(module.relative_to(ROOT).as_posix())
    return places


def defined_twice(places):
    return {n: sorted(p) for n, p in places.items() if len(p) > 1 and not n.startswith("_")}


def test_a_name_of_the_core_is_defined_in_one_module():
    places = names_by_module(TOOLS)
    twice = defined_twice(places)
    assert len(places) > 500
    assert {n: p for n, p in twice.items() if n not in ALIKE} == {}
    assert twice.keys() == ALIKE


def test_a_class_or_constant_of_the_tools_is_defined_in_one_module():
    twice = defined_twice(names_by_module(SOURCE_CODE))
    twice = {n: p for n, p in twice.items() if n[0].isupper() and n not in ALIKE}
    assert twice == {}
