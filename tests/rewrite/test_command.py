"""`python -m bridge rewrite`."""

import json
import pathlib
import re
import sys

import pytest

from bridge.__main__ import main

SOURCE = """from flax import linen as nn


class Part(nn.Module):
    width: int = 3

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)


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


def test_the_diff_levels_and_proof_are_shown_and_nothing_is_written(target, capsys, tmp_path):
    code, out, _ = run(capsys, target)
    assert code == 0
    assert "+class Net(nnx.Module):" in out
    assert "the program is proven, largest difference 0" in out
    assert len([each for each in tmp_path.iterdir() if each.is_file()]) == 1


def test_a_page_shows_old_and_new_lines_side_by_side(target, capsys, tmp_path):
    page = tmp_path / "pages" / "diff.html"
    page.parent.mkdir()
    assert run(capsys, target, "--html", str(page), "--no-diff")[0] == 0
    text = page.read_text().replace("&nbsp;", " ")
    assert text.count("<html") == text.count('<table class="diff"') == 1
    for row in (r"class Net\(nn\.Module\):", r"class Net\(nnx\.Module\):"):
        assert re.search(row, re.sub("<[^>]*>", "", text))


def test_the_report_says_how_a_model_with_annotations_is_made(tmp_path, capsys):
    name = f"annotated_{abs(hash(str(tmp_path))) % 10**8}"
    boxed = "nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.zeros, (None, 'x')))"
    (tmp_path / f"{name}.py").write_text(SOURCE.replace("nn.Dense(4)", boxed))
    code, out, _ = run(capsys, f"{tmp_path / name}.py:Net", "--no-diff", "--fast")
    assert code == 0
    assert out.count("make the model under its mesh") == 1
    # Linen's classes make no sharded arrays.
    _, out, _ = run(capsys, f"{tmp_path / name}.py:Net", "--no-diff", "--fast", "--as-linen")
    assert "mesh" not in out


def test_check_fails_until_the_files_are_written(target, capsys):
    assert run(capsys, target, "--check", "--no-diff")[0] == 1
    code, out, _ = run(capsys, target, "--write", "--no-diff")
    assert code == 0
    assert out.count("written: ") == 2
    assert "unchanged" not in out
    code, out, _ = run(capsys, target, "--write", "--no-diff")
    assert code == 0
    assert out.endswith("nothing was written: the files are unchanged\n")
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
    assert 0 < document["native_share"] < 1


def test_check_and_json_show_the_id_of_a_refusal_and_what_to_do(target, capsys):
    code, out, _ = run(capsys, target, "--check", "--no-diff", "--skip", "Part")
    assert code == 1
    assert "excluded by skip= [skipped]" in out
    assert "to rewrite more: [skipped] Remove its name from skip=." in out
    _, out, _ = run(capsys, target, "--json", "--skip", "Part")
    part, net = json.loads(out)["classes"]
    assert [each["id"] for each in part["refusals"]] == ["skipped"]
    assert [each["id"] for each in net["refusals"]] == ["class-left"]
    assert [each["line"] for each in net["refusals"]] == [15]


def test_fast_proves_the_given_fields_alone(target, capsys):
    levels = {}
    for options in ((), ("--fast",)):
        code, out, _ = run(capsys, target, "--json", *options)
        assert code == 0
        levels[options] = {each["level"] for each in json.loads(out)["classes"]}
    assert levels[()] == {"proven"}
    assert "proven for this configuration" in levels[("--fast",)]


TRAINING = """import jax
from flax.training import checkpoints, train_state
from {name} import Net

class TrainState(train_state.TrainState):
    batch_stats: dict

net = Net()

def make(key, x, tx):
    params = jax.jit(net.init)(key, x)["params"]
    first = net.init({{"params": key, "dropout": x}}, x)
    return TrainState.create(apply_fn=net.apply, params=params, tx=tx, batch_stats=first)

def step(state, x, key):
    def loss(params):
        y, updates = state.apply_fn({{"params": params}}, x, train=True, mutable=["batch_stats"])
        return Net().apply({{"params": params}}, x, rngs={{"dropout": key}}, method="encode")

    grads = jax.grad(loss)(state.params)
    return state.apply_gradients(grads=grads)

def others(state, given, folder, tx):
    given.inner.apply(state.params, folder, mutable=False)
    checkpoints.save_checkpoint(folder, state, 3)
    checkpoints.restore_checkpoint(folder, state)
    return tx.init(state.params), given.apply(tx)
"""
PLACES = """training.py:5: class TrainState: \
the state is the model and the optimizer, with what else there is beside them
training.py:8: Net: Net(in_features=5, rngs=nnx.Rngs(key))
training.py:11: net.init: made with its values, model = \
nnx.jit(lambda: Net(in_features=5, rngs=nnx.Rngs(key)))()
training.py:12: net.init: made with its values, model = \
Net(in_features=5, rngs=nnx.Rngs(params=key, dropout=x))
training.py:13: TrainState.create: optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param); \
batch_stats: in the model, or beside it
training.py:17: state.apply_fn: model(x, train=True); batch_stats updated in the model
training.py:18: Net().apply: model.encode(x); before it nnx.reseed(model, dropout=key)
training.py:20: jax.grad: nnx.grad(loss)(model)
training.py:21: state.apply_gradients: optimizer.update(model, grads)
training.py:24: given.inner.apply: model(folder)
training.py:25: checkpoints.save_checkpoint: \
bridge.checkpoint.save(path, model, extra={"optimizer": optimizer})
training.py:26: checkpoints.restore_checkpoint: \
bridge.checkpoint.restore(path, model), with rules= for a Linen checkpoint
training.py:27: state.params: nnx.state(model, nnx.Param)"""


def test_training_code_beside_the_models_is_listed_and_stays(target, capsys, tmp_path):
    (old,) = tmp_path.glob("*.py")
    training = tmp_path / "training.py"
    training.write_text(TRAINING.format(name=old.stem))
    code, out, _ = run(capsys, target, "--json")
    assert code == 0
    assert "\n".join(json.loads(out)["places"]) == PLACES
    assert training.read_text() == TRAINING.format(name=old.stem)


AUTOENCODER = """from flax import linen as nn


class Side(nn.Module):
    size: int = 3

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.size)(x)


class Net(nn.Module):
    code: int = 4

    @nn.compact
    def __call__(self, x):
        return Side(5)(Side(self.code)(x))
"""
MAKING = """from {name} import Net, Side
from {other} import Net as Other, Side as OtherSide

first, second, third = Net(), Net(4), Net(code=9)
other = Other(4)

def make(key, x, size):
    Side(4).init(key, x), Side(5).init(key, x), Side(size).init(key, x), OtherSide(4).init(key, x)
"""


def test_sizes_and_classes_are_those_of_the_very_layer_and_file(capsys, tmp_path):
    name = f"command_{abs(hash(str(tmp_path))) % 10**8}"
    for each in (name, f"{name}_other"):
        (tmp_path / f"{each}.py").write_text(AUTOENCODER)
    (tmp_path / "making.py").write_text(MAKING.format(name=name, other=f"{name}_other"))
    code, out, _ = run(capsys, f"{tmp_path / name}.py:Net", "--json")
    assert code == 0
    made = [place.partition(": ")[2] for place in json.loads(out)["places"]]
    key = "rngs=nnx.Rngs(key))"
    assert made == [
        f"Net: Net(4, in_features=5, {key}",
        f"Net: Net(code=9, in_features=..., {key}",
        f"Net: Net(in_features=5, {key}",
        f"Side(4).init: made with its values, model = Side(4, in_features=5, {key}",
        f"Side(5).init: made with its values, model = Side(5, in_features=4, {key}",
        f"Side(size).init: made with its values, model = Side(size, in_features=..., {key}",
    ]


def test_names_can_stay_linens(target, capsys):
    code, out, _ = run(capsys, target, "--keep-names")
    assert code == 0
    assert "self.Dense_0 = nnx.Linear(in_features, 4, rngs=rngs)" in out


def test_the_page_has_both_files(target, capsys, tmp_path):
    for _ in range(2):
        assert run(capsys, target, "--html", str(tmp_path / "page.html"), "--no-diff")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert "nnx.Linear" in page.replace("&nbsp;", " ")
    assert "nn.compact" in page.replace("&nbsp;", " ")


def test_files_that_were_changed_and_classes_that_are_used_are_kept(target, capsys):
    source = pathlib.Path(target.partition(":")[0])
    run(capsys, target, "--write", "--no-diff")
    new = source.with_name(f"{source.stem}_nnx.py")
    new.write_text(new.read_text() + "# mine\n")
    code, _, err = run(capsys, target, "--write", "--no-diff")
    assert code == 2
    assert "Move them away, or pass overwrite=True.\n" in err
    making = source.with_name(f"{source.stem}_made.py")
    making.write_text(f"{SOURCE}\n\ndef make():\n    return Net()\n")
    code, _, err = run(capsys, f"{making}:make", "--in-place", "--no-diff")
    assert code == 2
    assert "name the files: by_hand=" in err
    assert run(capsys, f"{making}:make", "--in-place", "--by-hand", str(making))[0] == 0


def test_a_model_that_cannot_be_run_is_exit_code_2(target, capsys):
    code = main(["rewrite", target])
    assert code == 2
    assert "pass --input" in capsys.readouterr().err
