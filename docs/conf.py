"""Configures Sphinx, which makes pages of the README, guides and docstrings; see `scripts/docs`.

The source folder is the project's root, so that a link from one Markdown file to another works here
as it does in an editor.
"""

import inspect
import pathlib
import re
import tomllib

from sphinx.application import Sphinx
from sphinx.util.inspect import stringify_signature

project = "linen-nnx-bridge"
author = "The linen-nnx-bridge authors"
# Read here, so that the pages are built from a checkout that is only on the path, too.
PYPROJECT = pathlib.Path(__file__).parents[1] / "pyproject.toml"
version = release = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinxcontrib.mermaid",
]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "migration_guides/*.md", "benchmarks/README.md"]

html_theme = "furo"
html_title = project
# The first page is the README.
html_additional_pages = {"index": "index.html"}
templates_path = ["_templates"]
html_copy_source = False
html_show_copyright = False

# `[text](guide.md#a-heading)`: an anchor that is not a heading is an error.
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

# Backticks in a docstring link to what they name, where that is documented.
default_role = "py:obj"
autodoc_member_order = "bysource"
# The short names that a reader writes: `Array`, not `jax._src.basearray.Array`.
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_custom_sections = ["Source"]
# Else a dataclass field that its class describes appears twice.
napoleon_use_ivar = True

CODE_SPAN = re.compile(r"(?<!`)`([^`]+)`(?=(\w?))(?!`)")

# What the README's readers on the web do not need: where the other pages are.
CONTENTS = """
```{toctree}
:caption: Guides
:glob:
:hidden:

migration_guides/*
```

```{toctree}
:caption: Reference
:glob:
:hidden:

docs/reference/*
```

```{toctree}
:caption: Project
:glob:
:hidden:

[AC]*
benchmarks/README
```
"""


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Append the table of contents to the README."""
    if name == "README":
        source[0] += CONTENTS


def add_signature(
    app: Sphinx,
    kind: str,
    name: str,
    obj: object,
    options: object,
    signature: str | None,
    returned: str | None,
) -> tuple | None:
    """Show what a class's constructor takes where its metaclass takes anything.

    Programs catch exceptions and do not make them, so these are shown without arguments.
    """
    if kind == "exception" and signature:
        return "", None
    if kind != "class" or not isinstance(obj, type) or obj.__init__ is object.__init__:
        return None
    given = inspect.signature(obj.__init__)
    text = stringify_signature(
        given.replace(parameters=list(given.parameters.values())[1:]), show_annotation=False
    )
    # A default without a value to write down, such as a function.
    return re.sub("=<[^>]*>", "=...", text.removesuffix(" -> None")), None


def to_rst(
    app: Sphinx, kind: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Turn the Markdown code spans of a docstring into what Sphinx reads.

    A name becomes a link to what is documented under it, unless a parameter has that name.
    Everything else becomes literal text.
    """
    # A cached property counts as a routine, and has no signature.
    is_function = inspect.isroutine(obj) and callable(obj)
    parameters = inspect.signature(obj).parameters if is_function else ()

    def role(span: re.Match[str]) -> str:
        code = " ".join(span[1].split())
        is_name = re.fullmatch(r"[A-Za-z_][\w.]*", code) and code not in parameters
        # Markdown lets a letter follow: `Functional`s.
        return (f"`{code}`" if is_name else f"``{code}``") + ("\\ " if span[2] else "")

    lines[:] = CODE_SPAN.sub(role, "\n".join(lines)).split("\n")


def setup(app: Sphinx) -> None:
    """Register what this file adds to Sphinx."""
    app.connect("autodoc-process-signature", add_signature)
    # Before napoleon, which splits a section's first line at a colon outside of literal text.
    app.connect("autodoc-process-docstring", to_rst, priority=400)
    app.connect("source-read", add_contents)
