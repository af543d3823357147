"""Reasons for which something stays Linen are given by models of the tests."""

import ast
import pathlib
import re

import bridge.rewrite

SOURCES = pathlib.Path(bridge.rewrite.__file__).parent
MODELS = pathlib.Path(__file__).parent
RAISED = ("LeftLinenError", "LayerStaysLinenError", "leave")
# Reasons that are no class's docstring, and the test that has them.
ELSEWHERE = {
    "it is not among those that were asked for": "test_writing.py",
    "it was to be left out": "test_writing.py",
    "the rewriter failed: {}: {}": "test_left_linen.py",
    "nnx.{} has no {}": "test_traps.py",
    "nothing tells its {}": "test_traps.py",
    "it is inside of {}, which stays Linen": "test_left_linen.py",
    "nnx.{} needs {}": "test_traps.py",
}


def template(node):
    """A text with `{}` for what is not fixed; None for one that was given as a reason before."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in values)
    return None


def is_in(template, text):
    return re.search(".*".join(map(re.escape, template.split("{}"))), text)


def raised():
    """The texts of all reasons."""
    found = set()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                found.add(template(node.args[0]) if name in RAISED else None)
    return found - {None}


def given():
    """The docstrings of the models."""
    return [
        ast.get_docstring(node) or ""
        for path in MODELS.glob("models_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]


def test_each_reason_is_given_by_a_model_or_tested_elsewhere():
    reasons, texts = raised(), given()
    untested = {each for each in reasons if not any(is_in(each, text) for text in texts)}
    assert len(reasons) > 90
    assert untested == set(ELSEWHERE), sorted(untested ^ set(ELSEWHERE))
