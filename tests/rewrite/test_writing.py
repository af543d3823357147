"""Files are written whole, only new ones, and never over somebody's work."""

import json
import pathlib
import tomllib

import jax
import pytest

import bridge
from bridge import rewrite
from bridge.rewrite.publish._writing import write_files

INPUT = jax.ShapeDtypeStruct((2, 4), "float32")
SOURCE = '''"""A model."""

from flax import linen as nn


class Net(nn.Module):
    size: int = 3

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.size)(x)


def make():
    return Net()
'''


@pytest.fixture
def model(tmp_path, monkeypatch):
    name = f"written_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return __import__(name)


@pytest.fixture
def result(model):
    return bridge.rewrite(model.make, INPUT, gradients=False)


def names(folder):
    return sorted(each.name for each in folder.iterdir() if each.is_file())


def test_nothing_is_written_before_write(result, tmp_path):
    assert len(names(tmp_path)) == 1
    assert result.diff.startswith("--- ")


def test_write_makes_file_and_rules_and_a_second_one_finds_nothing_to_do(result, tmp_path):
    assert len(result.pending()) == 2
    written = result.write()
    assert [pathlib.Path(path).suffixes for path in written] == [[".py"], [".rules", ".toml"]]
    assert len(names(tmp_path)) == 3
    assert result.write() == ()
    assert result.pending() == ()


def test_a_file_of_the_same_name_that_it_did_not_write_is_kept(result, tmp_path):
    (path,) = result.sources
    pathlib.Path(path).write_text("mine = 1\n")
    with pytest.raises(rewrite.RewriteError, match=r"not written by bridge\.rewrite") as raised:
        result.write()
    assert raised.value.problems == (path,)
    assert pathlib.Path(path).read_text() == "mine = 1\n"
    assert len(names(tmp_path)) == 2
    result.write(overwrite=True)
    assert "nnx.Linear" in pathlib.Path(path).read_text()


def test_a_file_that_was_changed_since_is_kept(result):
    result.write()
    path = pathlib.Path(next(iter(result.sources)))
    path.write_text(path.read_text().replace("size: int = 3", "size: int = 5"))
    with pytest.raises(rewrite.RewriteError):
        result.write()


def test_a_file_is_not_replaced_by_one_that_lacks_its_classes(tmp_path):
    path = str(tmp_path / "models_nnx.py")
    write_files({path: "class A:\n    pass\n\n\nclass B:\n    pass\n"}, overwrite=False)
    with pytest.raises(rewrite.RewriteError, match="hold classes that the new ones lack") as raised:
        write_files({path: "class B:\n    pass\n"}, overwrite=False)
    assert raised.value.problems == (f"{path}: A",)
    write_files({path: "class B:\n    pass\n"}, overwrite=True)


def test_nothing_is_left_behind_if_writing_fails(tmp_path):
    files = {str(tmp_path / "a.py"): "a = 1\n", str(tmp_path / "missing" / "b.py"): "b = 1\n"}
    with pytest.raises(FileNotFoundError):
        write_files(files, overwrite=False)
    assert names(tmp_path) == []


def test_the_rules_are_what_convert_reads(result):
    assert tomllib.loads(result.rules_text) == {"rules": dict(result.rules)}


def test_the_json_document_has_every_class_with_its_level(result):
    document = json.loads(result.to_json())
    assert document["ok"]
    assert [(c["name"], c["level"]) for c in document["classes"]] == [("Net", "proven")]


def test_skip_leaves_a_class_linen(model):
    (skipped,) = bridge.rewrite(model.make, INPUT, skip=["Net"]).classes
    assert (skipped.level, skipped.notes) == ("left Linen", ("excluded by skip= [skipped]",))


def test_names_of_classes_that_the_model_does_not_make_are_told_at_once(model):
    with pytest.raises(rewrite.RewriteError, match="The classes that it makes are 'Net'") as raised:
        bridge.rewrite(model.make, INPUT, only=["Nett"], skip=["Other", "Net"])
    assert raised.value.problems == (
        "only names 'Nett'. Did you mean Net?",
        "skip names 'Other'",
    )
