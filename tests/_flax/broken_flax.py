"""Runs the README's quick start on Flax with one part renamed or changed, in a process for each.

A part is broken in Flax's own source, while it is imported, so Flax itself goes on working: as a
newer version of it would. Prints a line of JSON for each case.
"""

import gc
import importlib.machinery
import io
import json
import os
import pathlib
import re
import sys
import warnings
from contextlib import redirect_stdout

# What Flax imports is shared by all processes; JAX starts its threads when it is used first.
import jax  # noqa: F401
import optax  # noqa: F401
import orbax.checkpoint  # noqa: F401
import treescope  # noqa: F401

README = pathlib.Path(__file__).parents[2] / "README.md"


class Rewriting(importlib.machinery.SourceFileLoader):
    """Imports a file of Flax with other text in it."""

    pattern = re.compile("")
    replacement = ""

    def get_code(self, fullname):
        source = self.get_data(self.path).decode()
        if not self.pattern.search(source):
            return super().get_code(fullname)
        source = self.pattern.sub(self.replacement, source)
        return compile(source, self.path, "exec", dont_inherit=True)


class Finder(importlib.machinery.PathFinder):
    """Finds Flax's files for `Rewriting`."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.split(".")[0] != "flax":
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Rewriting(spec.loader.name, spec.loader.path)
        return spec


def quick_start():
    """Runs the first three blocks of the quick start; returns what they print."""
    text = README.read_text()
    text = text[text.index("## Quick start") :]
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:3]
    namespace = {"__name__": "quick_start"}
    printed = io.StringIO()
    with redirect_stdout(printed):
        for block in blocks:
            exec(block, namespace)
    return printed.getvalue()


def run(pattern, replacement):
    """What happens on a Flax in whose source a pattern is replaced."""
    Rewriting.pattern, Rewriting.replacement = re.compile(pattern), replacement
    sys.meta_path.insert(0, Finder)
    found = {"imported": False, "warnings": [], "printed": None, "errors": [], "text": ""}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            import bridge

            found["imported"] = True
            found["printed"] = quick_start()
        except Exception as error:
            found["errors"] = [base.__name__ for base in type(error).__mro__]
            found["text"] = str(error)
    if found["imported"]:
        found["warnings"] = [
            str(w.message) for w in caught if issubclass(w.category, bridge.BridgeWarning)
        ]
    return found


def main():
    # The processes end before there is much to collect.
    gc.disable()
    for name, pattern, replacement in json.load(sys.stdin):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            sys.stdout.write(json.dumps([name, run(pattern, replacement)]) + "\n")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
