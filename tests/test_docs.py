"""The reference names the whole public surface, and the pictures show what they are made from."""

import importlib
import json
import re
import runpy
from pathlib import Path
from types import ModuleType

import jax
import pytest
from PIL import Image

import bridge

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PICTURES = runpy.run_path(str(ROOT / "scripts" / "pictures.py"))
PUBLIC = [
    "bridge",
    "bridge.checkpoint",
    "bridge.parity",
    "bridge.port",
    "bridge.rewrite",
    "bridge.variables",
    "bridge.wrappers",
    "registry",
]
DIRECTIVE = re.compile(r"\.\. (currentmodule|auto\w+):: ([\w.]+)")


def described():
    """Everything that the pages have a directive for."""
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        module = None
        for directive, name in DIRECTIVE.findall(page.read_text()):
            if directive in ("currentmodule", "automodule"):
                module = importlib.import_module(name)
            if directive != "currentmodule":
                yield module if directive == "automodule" else getattr(module, name)


def is_flax_s_own(thing):
    home = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", "")
    return home.startswith("flax.")


@pytest.mark.parametrize("module", PUBLIC)
def test_the_reference_describes_every_public_name(module):
    known = list(described())
    public = vars(importlib.import_module(module))
    missing = [
        name
        for name in public["__all__"]
        if not is_flax_s_own(public[name]) and not any(public[name] is one for one in known)
    ]
    assert missing == []


def test_the_reference_lists_the_names_that_are_flax_s_own():
    page = (ROOT / "docs" / "reference" / "1_bridge.md").read_text()
    own = [name for name in bridge.__all__ if is_flax_s_own(getattr(bridge, name))]
    assert "initializers" in own
    assert [name for name in own if f"`bridge.{name}`" not in page] == []


def test_the_readme_shows_both_pictures():
    for picture in (PICTURES["MODEL"], PICTURES["COST"]):
        assert f"]({picture.relative_to(ROOT)})" in README


def test_the_picture_of_the_cost_shows_the_results_that_are_kept():
    shown = json.loads(Image.open(PICTURES["COST"]).text["Description"])
    assert shown == [list(line) for line in PICTURES["ratios"]()], (
        "run: python scripts/pictures.py write"
    )


def test_the_picture_of_the_model_shows_the_variables_of_the_quick_start():
    namespace = {"__name__": "__main__"}
    for block in re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE):
        exec(block, namespace)
    params = {"params": namespace["variables"]["params"]}
    paths = {"/".join(key.key for key in path) for path, _ in jax.tree.leaves_with_path(params)}
    assert paths == {path for _, _, path in PICTURES["VARIABLES"]}
