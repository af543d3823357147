"""`python -m bridge rewrite`."""

import json
import sys

import pytest

from bridge.__main__ import main

SOURCE = """from flax import linen as nn


class Part(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Part(name="part")(nn.relu(nn.Dense(4)(x)))
"""


@pytest.fixture
def target(tmp_path):
    name = f"command_{abs(hash(str(tmp_path))) % 10**8}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    return f"{tmp_path / name}.py:Net"


def run(capsys, *arguments):
    code = main(["rewrite", *arguments, "--input", "2,5", "--no-gradients"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_diff_the_levels_and_the_proof_are_shown_and_nothing_is_written(
    target, capsys, tmp_path
):
    code, out, _ = run(capsys, target)
    assert code == 0
    assert "+class Net(nnx.Module):" in out
    assert "the program is proven, largest difference 0" in out
    assert len([each for each in tmp_path.iterdir() if each.is_file()]) == 1


def test_check_fails_until_the_files_are_written(target, capsys):
    assert run(capsys, target, "--check", "--no-diff")[0] == 1
    code, out, _ = run(capsys, target, "--write", "--no-diff")
    assert code == 0
    assert out.count("written: ") == 2
    assert run(capsys, target, "--check", "--no-diff")[0] == 0


def test_the_test_that_is_written_passes_and_fails_for_another_model(target, capsys, tmp_path):
    assert run(capsys, target, "--write", "--write-test", "--no-diff")[0] == 0
    (test,) = tmp_path.glob("test_*.py")
    text = test.read_text()
    space = {}
    sys.path.insert(0, str(tmp_path))
    try:
        exec(compile(text, str(test), "exec"), space)
        run_test = space["test_the_new_model_does_what_the_linen_model_does"]
        run_test()
        new = next(m for name, m in space.items() if name.endswith("_nnx"))
        call = new.Net.__call__
        new.Net.__call__ = lambda self, x: call(self, x) + 1
        with pytest.raises(AssertionError, match="DIFFER"):
            run_test()
    finally:
        sys.path.remove(str(tmp_path))


def test_a_class_that_stays_linen_is_exit_code_1_with_its_reason(target, capsys):
    code, out, _ = run(capsys, target, "--skip", "Part", "--json")
    document = json.loads(out)
    assert code == 1
    assert document["schema"] == "linen-nnx-bridge/rewrite"
    assert document["is_proven"]
    levels = {each["name"]: each["level"] for each in document["classes"]}
    assert levels == {"Part": "left Linen", "Net": "proven"}


TRAINING = """import jax
from flax.training.train_state import TrainState
from {name} import Net

model = Net()


def make(key, x, tx):
    params = model.init(key, x)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def loss(state, x):
    y, updates = state.apply_fn({{"params": state.params}}, x, mutable=["batch_stats"])
    return Net().apply({{"params": state.params}}, x, rngs={{"dropout": 0}}, method="encode")
"""


def test_training_code_beside_the_models_is_listed_and_stays(target, capsys, tmp_path):
    (old,) = tmp_path.glob("*.py")
    training = tmp_path / "training.py"
    training.write_text(TRAINING.format(name=old.stem))
    code, out, _ = run(capsys, target, "--json")
    places = json.loads(out)["places"]
    assert code == 0
    lines = sorted(each.split(": ")[0] for each in places)
    assert lines == [f"training.py:{line:d}" for line in (10, 14, 15, 9)]
    told = "\n".join(places)
    assert "nnx.Optimizer(model, tx, wrt=nnx.Param)" in told
    assert "what ['batch_stats'] named is updated" in told
    assert "model.encode(x)" in told
    assert training.read_text() == TRAINING.format(name=old.stem)


def test_names_can_stay_linens(target, capsys):
    code, out, _ = run(capsys, target, "--keep-names")
    assert code == 0
    assert "self.Dense_0 = nnx.Linear(in_features, 4, rngs=rngs)" in out


def test_the_page_has_both_files(target, capsys, tmp_path):
    assert run(capsys, target, "--html", str(tmp_path / "page.html"), "--no-diff")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert "nnx.Linear" in page.replace("&nbsp;", " ")
    assert "nn.compact" in page.replace("&nbsp;", " ")


def test_a_model_that_cannot_be_run_is_exit_code_2(target, capsys):
    code = main(["rewrite", target])
    assert code == 2
    assert "pass --input" in capsys.readouterr().err
