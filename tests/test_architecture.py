"""ARCHITECTURE.md names files, functions and routes: all of them are there, and are passed."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh

import bridge
from bridge import checkpoint

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
X = jnp.ones((1, 2))
# `place/file.py: function` in a row of a route's table; `init` and `back` are other ways.
STEP = re.compile(r"^\| \d+ \| `([\w/]+\.py): ([\w.]+)`", re.MULTILINE)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(2, rngs=rngs)

    def __call__(self, x):
        return self.norm(x)


def convert(path):
    variables = LinenNet().init(jax.random.key(0), X)
    return lambda: bridge.linen_to_nnx(variables)


def to_nnx(path):
    model = bridge.ToNNX(LinenNet(), rngs=nnx.Rngs(0)).lazy_init(X)
    return lambda: model(X, mutable=["params"])


def to_linen(path):
    model = bridge.to_linen(NNXNet)
    variables = model.init(jax.random.key(0), X)
    return lambda: model.apply(variables, X, mutable=["batch_stats"])


class Scaled(bridge.Module):
    def setup(self):
        self.inner = Inner()

    def __call__(self, x):
        return self.inner(x)


class Inner(bridge.Module):
    @bridge.compact
    def __call__(self, x):
        return x * self.param("scale", nn.initializers.ones, (1, x.shape[-1]))


def apply(path):
    variables = Scaled().init(0, X)
    return lambda: Scaled().apply(variables, X, mutable=["batch_stats"])


def init_sharded(path):
    mesh = Mesh(jax.devices()[:2], "data")
    return lambda: bridge.init_sharded(LinenNet(), mesh, X, rngs=jax.random.key(0))


def save(path):
    variables = LinenNet().init(jax.random.key(0), X)
    return lambda: checkpoint.save(path / "model", variables)


ROUTES = {
    "Variables through `linen_to_nnx` and back": convert,
    "A call of a ToNNX": to_nnx,
    "`init` and `apply` of a ToLinen": to_linen,
    "`apply` of a `bridge.Module`": apply,
    "`init_sharded`": init_sharded,
    "`checkpoint.save`": save,
}


def steps(title):
    section = TEXT.split(f"### {title}\n")[1].split("\n#")[0]
    return [(file, name.split(".")[-1]) for file, name in STEP.findall(section)]


def calls_of(function):
    """The functions of the package in the order in which they are first called."""
    home = str(ROOT / "bridge") + "/"
    found = {}

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(home):
            place = code.co_filename.removeprefix(home)
            found.setdefault((place, code.co_name))
            # A class is passed when one of it is made.
            if code.co_name == "__init__":
                found.setdefault((place, code.co_qualname.split(".")[0]))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return list(found)


def test_there_are_six_routes():
    section = TEXT.split("## The routes\n")[1].split("\n## ")[0]
    assert [line[4:] for line in section.splitlines() if line.startswith("### ")] == list(ROUTES)


@pytest.mark.parametrize("title", ROUTES)
def test_a_route_passes_its_functions_in_their_order(title, tmp_path):
    wanted = steps(title)
    found = calls_of(ROUTES[title](tmp_path))

    assert len(wanted) >= 3
    assert [step for step in wanted if step not in found] == []
    # `publishing` surrounds what it publishes, and so on: only the first call of each counts.
    assert sorted(wanted, key=found.index) == wanted


def test_every_file_that_is_named_exists():
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)\b", TEXT))
    places = [ROOT, ROOT / "bridge", *(ROOT / "bridge").iterdir()]
    assert len(named) > 20
    assert [n for n in named if not any((place / n).is_file() for place in places)] == []


def test_everything_in_a_file_that_is_named_exists():
    for file, name in re.findall(r"`([\w/]+\.py): ([\w.]+)`", TEXT):
        source = next(p for p in (ROOT / "bridge" / file, ROOT / file) if p.is_file()).read_text()
        last = name.split(".")[-1]
        made = rf"^\s*(?:def|class) {last}\b|^{last}\b.* ="
        assert re.search(made, source, re.MULTILINE), (file, name)


def test_every_package_is_in_the_picture():
    picture = TEXT.split("```mermaid")[1].split("```")[0]
    packages = {p.name for p in (ROOT / "bridge").iterdir() if (p / "__init__.py").is_file()}
    assert {package for package in packages if package not in picture} == set()
