"""Count the files and functions of the project that a warm call enters.

``python scripts/routes.py`` prints the table, and ``write`` puts it into ARCHITECTURE.md, where a
test lets the counts only fall. Any other argument is a part of a route's name: the script then
lists what such routes enter.
"""

import dataclasses
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import bridge
from bridge import checkpoint, parity, port

ROOT = Path(__file__).parents[1]
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
COMPREHENSIONS = {"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"}
HEADER = "| a warm call on two layers | files | functions | calls from file to file |"
OURS = (str(ROOT / "bridge"), str(ROOT / "registry"))


class Linen(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Call them."""
        x = nn.relu(nn.Dense(4)(x))
        return nn.Dense(3)(x)


class NNX(nnx.Module):
    """The same."""

    def __init__(self, rngs: nnx.Rngs):
        self.Dense_0 = nnx.Linear(2, 4, rngs=rngs)
        self.Dense_1 = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Call them."""
        return self.Dense_1(nnx.relu(self.Dense_0(x)))


@dataclasses.dataclass(frozen=True)
class Route:
    """What a call enters.

    Attributes:
        functions: The names of the functions by file.
        crossings: How many calls go from one file of the project to another.
    """

    functions: dict[str, list[str]]
    crossings: int

    def counts(self) -> tuple[int, int, int]:
        """Return the number of files, of functions, and of calls from file to file."""
        return len(self.functions), sum(map(len, self.functions.values())), self.crossings


def entered(function: Callable[[], Any]) -> Route:
    """Return what a function enters when it runs for the third time."""
    function()
    function()
    codes: set[Any] = set()
    crossings = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal crossings
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(OURS):
            return
        if frame.f_code.co_name in COMPREHENSIONS:
            # A function of its own, or none: that depends on the version of Python.
            return
        codes.add(frame.f_code)
        outer = frame.f_back
        caller = outer.f_code.co_filename if outer else ""
        crossings += caller.startswith(OURS) and caller != name

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    functions: dict[str, list[str]] = {}
    for code in codes:
        file = str(Path(code.co_filename).relative_to(ROOT))
        functions.setdefault(file, []).append(code.co_qualname)
    return Route({file: sorted(functions[file]) for file in sorted(functions)}, crossings)


def routes(folder: Path) -> dict[str, Callable[[], Any]]:
    """Return the routes by name.

    Args:
        folder: An empty folder for the checkpoint.
    """
    key, x = jax.random.key(0), jnp.ones((1, 2))
    linen, variables = Linen(), Linen().init(key, x)
    model = bridge.lazy_init(bridge.ToNNX(linen, rngs=nnx.Rngs(0)), x)
    wrapper = bridge.to_linen(NNX)
    wrapped = wrapper.init(key, x)
    native = NNX(nnx.Rngs(0))
    return {
        "a call of a ToNNX": lambda: model(x),
        "lazy_init of a ToNNX": lambda: bridge.lazy_init(bridge.ToNNX(linen, rngs=nnx.Rngs(0)), x),
        "apply of a ToLinen": lambda: wrapper.apply(wrapped, x),
        "init of a ToLinen": lambda: wrapper.init(key, x),
        "checkpoint.save": lambda: checkpoint.save(folder / "saved", variables, overwrite=True),
        "port.plan": lambda: port.plan(variables, native),
        "parity.check": lambda: parity.check((linen, variables), native, x),
    }


def table(found: dict[str, Route]) -> str:
    """Return the table of ARCHITECTURE.md."""
    rows = [f"| {name} | " + " | ".join(map(str, r.counts())) + " |" for name, r in found.items()]
    return "\n".join([HEADER, "|---|---|---|---|", *rows])


def written() -> dict[str, tuple[int, ...]]:
    """Return the counts in ARCHITECTURE.md by route."""
    _, _, rest = ARCHITECTURE.read_text().partition(HEADER)
    lines = [line.split("|")[1:-1] for line in rest.partition("\n\n")[0].splitlines()[2:]]
    return {name.strip(): tuple(map(int, counts)) for name, *counts in lines}


def main() -> None:
    """Print the table, write it, or print what some routes enter."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as folder:
        found = {name: entered(function) for name, function in routes(Path(folder)).items()}
    if wanted is None:
        print(table(found))
    elif wanted == "write":
        before, _, rest = ARCHITECTURE.read_text().partition(HEADER)
        _, _, after = rest.partition("\n\n")
        ARCHITECTURE.write_text(f"{before}{table(found)}\n\n{after.lstrip()}")
    for name, route in found.items():
        if wanted and wanted in name:
            print(name)
            for file, functions in route.functions.items():
                print(f"  {file}: {', '.join(functions)}")


if __name__ == "__main__":
    main()
