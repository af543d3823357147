"""Old files get NNX classes only if nothing is left that expects Linen's, all files or none."""

import importlib
import os
import pathlib
import sys

import jax
import pytest
from flax import nnx

import bridge
from bridge import rewrite
from bridge.__main__ import main

INPUT = jax.ShapeDtypeStruct((2, 4), "float32")
LAYERS = '''"""Layers."""

from functools import partial

from flax import linen as nn

WIDTH = 3
dense = partial(nn.Dense, use_bias=False)


class Layer(nn.Module):
    # How wide it is.
    size: int = WIDTH

    @nn.compact
    def __call__(self, x):
        return nn.relu(dense(self.size)(x))  # no bias


def area(a, b):
    """It stays."""
    return a * b
'''
MODEL = """from flax import linen as nn

from .layers import Layer


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(Layer(5)(Layer()(x)))
"""
INIT = "from .model import Net\n"
OTHERS = {
    "training.py": """import jax
from . import Net
from . import layers as own

net = Net()


def check(given: Net):
    return isinstance(given, Net) and Net().init(jax.random.key(0), 1)


def make():
    return [own.Layer]
""",
    "derived.py": """from .model import Net
from flax import linen as nn


class Wide(Net):
    pass


class Holder(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Net(name="net")(x)
""",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    name = f"package_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / name
    folder.mkdir()
    for file, text in {"__init__.py": INIT, "layers.py": LAYERS, "model.py": MODEL}.items():
        (folder / file).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for each in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[each]


def rewritten(folder, **options):
    module = importlib.import_module(f"{folder.name}.model")
    return bridge.rewrite(module.Net, INPUT, gradients=False, fast=True, **options)


def texts(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_the_old_files_get_the_new_classes_and_the_rest_of_them_stays(package):
    result = rewritten(package)
    linen = importlib.import_module(f"{package.name}.model").Net
    written = result.write(in_place=True)
    assert {pathlib.Path(p).name for p in written} == {"layers.py", "model.py", "model.rules.toml"}
    text = (package / "layers.py").read_text()
    assert "from flax import nnx\n" in text
    assert "linen" not in text
    assert "dense = partial(nnx.Linear, use_bias=False)\n" in text
    assert text.startswith(LAYERS[: LAYERS.index("from flax")])
    assert text.endswith(LAYERS[LAYERS.index("\n\n\ndef area") :])
    assert (package / "__init__.py").read_text() == INIT
    assert importlib.import_module(f"{package.name}.model").Net is linen
    for name in [m for m in sys.modules if m.startswith(package.name)]:
        del sys.modules[name]
    importlib.invalidate_caches()
    model = importlib.import_module(package.name).Net(**result.sizes[0], rngs=nnx.Rngs(0))
    assert model(jax.numpy.ones((2, 4))).shape == (2, 2)


def test_a_second_time_there_is_nothing_to_do(package):
    result = rewritten(package)
    assert len(result.write(in_place=True)) == 3
    assert result.write(in_place=True) == ()


def test_everything_that_stands_in_the_way_is_told_and_nothing_is_written(package):
    for name, text in OTHERS.items():
        (package / name).write_text(text)
    layers = package / "layers.py"
    layers.write_text(LAYERS + "\n\nclass Unused(nn.Module):\n    pass\n")
    before = texts(package)
    result = rewritten(package, skip=["Layer"])
    with pytest.raises(rewrite.RewriteError, match="cannot be rewritten in place") as raised:
        result.write(in_place=True)
    assert texts(package) == before
    told = "\n".join(each.rpartition("/")[2] for each in raised.value.problems)
    assert (
        told
        == """derived.py:5: Wide derives from Net
derived.py:12: Holder makes a Net
training.py:5: makes a Net
training.py:9: calls Net(...).init"""
    )
    with pytest.raises(rewrite.RewriteError) as raised:
        rewritten(package).write(in_place=True, by_hand=[str(package / "training.py")])
    told = "\n".join(each.rpartition("/")[2] for each in raised.value.problems)
    assert (
        told
        == """layers.py:25: Unused stays Linen: it was never called [not-called]
derived.py:5: Wide derives from Net
derived.py:12: Holder makes a Net"""
    )
    assert "derived.py" in raised.value.remedy


def test_files_that_are_changed_by_hand_are_accepted_and_kept(package):
    (package / "training.py").write_text(OTHERS["training.py"])
    result = rewritten(package)
    with pytest.raises(rewrite.RewriteError) as raised:
        result.write(in_place=True)
    assert [each.rpartition(":")[2] for each in raised.value.problems] == [
        " makes a Net",
        " calls Net(...).init",
        " uses Layer",
    ]
    assert len(result.write(in_place=True, by_hand=[str(package / "training.py")])) == 3
    assert (package / "training.py").read_text() == OTHERS["training.py"]


def test_a_class_of_another_file_may_stay_linen(package):
    result = rewritten(package, skip=["Layer"])
    assert {pathlib.Path(p).name for p in result.write(in_place=True)} == {
        "model.py",
        "model.rules.toml",
    }
    assert "bridge.ToNNX(Layer(5), rngs=rngs)" in (package / "model.py").read_text()
    assert (package / "layers.py").read_text() == LAYERS


def test_a_file_that_was_changed_since_it_was_read_is_kept(package):
    result = rewritten(package)
    (package / "layers.py").write_text(LAYERS + "# more\n")
    with pytest.raises(rewrite.RewriteError, match="changed since it was read"):
        result.write(in_place=True)
    assert (package / "model.py").read_text() == MODEL


def test_all_files_or_none_are_written(package, monkeypatch):
    before = texts(package)
    result = rewritten(package)
    calls = []
    replace = os.replace

    def failing(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError("no space")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="no space"):
        result.write(in_place=True)
    assert len(calls) == 2
    assert texts(package) == before


def test_a_program_that_is_not_proven_is_not_written(package):
    result = rewritten(package, only=["Layer"])
    notes = {each.name: each.notes for each in result.classes}
    assert notes["Net"] == ("it is not named in only= [not-asked-for]",)
    with pytest.raises(rewrite.RewriteError, match="the program as a whole is not proven"):
        result.write(in_place=True)
    with pytest.raises(rewrite.RewriteError, match="would be gone"):
        result.write(in_place=True, test=True)


def test_the_command_writes_in_place(package, capsys, monkeypatch):
    monkeypatch.chdir(package.parent)
    arguments = ["rewrite", f"{package.name}.model:Net", "--input", "2,4", "--in-place"]
    assert main([*arguments, "--no-gradients"]) == 0
    assert "+class Net(nnx.Module):" in capsys.readouterr().out
