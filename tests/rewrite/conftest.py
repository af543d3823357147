import importlib
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import jax
import pytest

from tests.rewrite.programs import HEAD

NUMBERS = itertools.count()


@pytest.fixture(autouse=True, scope="module")
def _models_may_broadcast():
    """The models are programs as users write them, which add `(4,)` to `(2, 4)`."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def imported_program(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ModuleType]]:
    """Puts a program into a file of its own, and imports it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def imports(source: str, files: Mapping[str, str] = {}, newline: str = "\n") -> Any:
        name = f"program_{next(NUMBERS)}"
        text = HEAD + source.strip("\n") + "\n"
        (tmp_path / f"{name}.py").write_bytes(text.replace("\n", newline).encode())
        for file, more in files.items():
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(HEAD + more.strip("\n") + "\n")
        return importlib.import_module(name)

    yield imports
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
