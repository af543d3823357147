"""Streams, exit codes and messages that all commands have in common."""

import os
import sys

import numpy as np
import pytest

from bridge import checkpoint

from .command_line import run, start

NOISY = """\
import sys
import jax, jax.numpy as jnp
from flax import linen as nn
print("imported")
class Loud(nn.Module):
    @nn.compact
    def __call__(self, x):
        print("called")
        sys.stdout.write("written")
        return nn.Dense(3)(x)
def make():
    return Loud(), jnp.ones((1, 2))
"""

EXITING = """\
import sys
import jax.numpy as jnp
from flax import linen as nn
def make():
    sys.exit(3)
class Exits(nn.Module):
    def __call__(self, x):
        sys.exit(0)
def late():
    return Exits(), jnp.ones(2)
class Fails(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x) + jnp.ones(5)
def wrong():
    return Fails(), jnp.ones((1, 2))
def interrupted():
    raise KeyboardInterrupt
def odd():
    return {"model": Fails(), "inputs": jnp.ones(2), "kwargs": 3, "method": 4, "input": ()}
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    (tmp_path / "noisy_program.py").write_text(NOISY)
    (tmp_path / "exiting_program.py").write_text(EXITING)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("noisy_program", "exiting_program"):
        sys.modules.pop(name, None)


def test_json_is_one_document_on_stdout_whatever_the_program_prints(programs):
    outcome = start(
        "report",
        "noisy_program.py:make",
        "--json",
        cwd=programs,
        env={**os.environ, "XLA_FLAGS": ""},
    )
    assert outcome.code == 0, outcome.err
    assert outcome.document["schema"] == "linen-nnx-bridge/report"
    for text in ("imported", "called", "written"):
        assert text in outcome.err


def test_json_is_one_document_where_stdout_is_an_object(capsys, programs):
    outcome = run(capsys, "report", "noisy_program.py:make", "--json")
    assert outcome.document["schema"] == "linen-nnx-bridge/report"
    assert "called" in outcome.err


@pytest.mark.parametrize(("name", "code"), [("make", 3), ("late", 0)])
def test_a_program_that_calls_exit_does_not_choose_our_exit_code(capsys, programs, name, code):
    outcome = run(capsys, "report", f"exiting_program.py:{name}")
    assert outcome.code == 2
    line = EXITING.splitlines().index(f"    {'    ' * (name == 'late')}sys.exit({code})") + 1
    assert outcome.err.endswith(f"exiting_program.py, line {line} called sys.exit({code})\n")


def test_a_message_points_at_the_line_of_the_program_and_not_at_flax(capsys, programs):
    outcome = run(capsys, "report", "exiting_program.py:wrong")
    assert outcome.code == 2
    line = EXITING.splitlines().index("        return nn.Dense(3)(x) + jnp.ones(5)") + 1
    assert f"exiting_program.py, line {line};" in outcome.err
    assert "site-packages" not in outcome.err


def test_what_a_dict_has_in_the_wrong_form_is_told_all_at_once(capsys, programs):
    outcome = run(capsys, "report", "exiting_program.py:odd")
    assert outcome.code == 2
    wrong = ("as 'input'", "as 'inputs'", "3 of type int as 'kwargs'", "4 of type int as 'method'")
    assert [text for text in wrong if text not in outcome.err] == []


def test_an_error_that_no_command_expects_is_not_a_failed_check(capsys, programs, monkeypatch):
    monkeypatch.setattr("bridge.checkpoint.layout", lambda *args, **kwargs: 1 / 0)
    outcome = run(capsys, "inspect", "model")
    assert (outcome.code, "ZeroDivisionError" in outcome.err) == (2, True)


def test_an_interrupted_command_ends_with_one_line_and_130(capsys, programs):
    outcome = run(capsys, "report", "exiting_program.py:interrupted")
    assert (outcome.code, outcome.err) == (130, "python -m bridge: interrupted\n")


@pytest.mark.parametrize("name", ["model.py", "__init__.py"])
def test_a_file_of_a_package_is_imported_as_a_part_of_it(capsys, tmp_path, monkeypatch, name):
    package = tmp_path / f"outer_{name[0]}" / "inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package.parent / "sizes.py").write_text("WIDTH = 3\n")
    (package / "__init__.py").write_text("from .model import make\n")
    (package / "model.py").write_text(
        "from flax import linen as nn\nfrom ..sizes import WIDTH\n\n"
        "def make():\n    return nn.Dense(WIDTH)\n"
    )
    monkeypatch.chdir(package)
    outcome = run(capsys, "report", f"{name}:make", "--input", "1,2", "--json")
    assert outcome.code == 0, outcome.err
    assert f"outer_{name[0]}.inner.model" in sys.modules
    assert "model" not in sys.modules


def test_versions_are_shown(capsys):
    outcome = run(capsys, "--version")
    assert outcome.code == 0
    assert {word for word in ("linen-nnx-bridge", "flax", "jax") if word in outcome.out}
    assert len(outcome.out.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("inspect", "modle"), "Did you mean model?"),
        (("report", "models:maker"), "it has make"),
    ],
)
def test_a_misspelled_word_is_answered_with_those_that_there_are(
    capsys, tmp_path, monkeypatch, arguments, meant
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "models.py").write_text("def make(): pass")
    monkeypatch.delitem(sys.modules, "models", raising=False)

    outcome = run(capsys, *arguments)

    assert outcome.code == 2
    assert meant in outcome.err
    monkeypatch.delitem(sys.modules, "models", raising=False)


def test_a_page_without_its_folder_is_refused_before_the_model_is_made(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "failing_model.py").write_text("raise RuntimeError('imported')")

    outcome = run(capsys, "report", "failing_model.py:make", "--html", "rports/page.html")

    assert outcome.code == 2
    assert "--html: there is no directory rports" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["inspect", ""], ["expected a path, found ''"]),
        (["inspect", "empty"], ["It is empty."]),
        (["inspect", "dangling"], ["It is a link to what is not there."]),
        (["inspect", "full"], ["'19'] and 8 more; give the path"]),
        (["diff", "no", "nothing"], ["at {}/no. In"]),
        (["inspect", "model", "--layout", "nnx"], ["Leave out layout="]),
        (["inspect", "undigested", "--verify"], ["Read it without verify=True."]),
        (["convert", "model", "full"], ["Pass overwrite=True"]),
        (["convert", "model", ""], ["found '', expected a path of this machine"]),
        (["convert", "model", "gs://a/b"], ["found 'gs://a/b', expected a path"]),
    ],
)
def test_a_path_that_leads_to_nothing_of_use_is_told(
    capsys, tmp_path, monkeypatch, arguments, told
):
    monkeypatch.chdir(tmp_path)
    checkpoint.save("model", {"params": {"w": np.ones(2)}})
    checkpoint.save("undigested", {"params": {"w": np.ones(2)}}, digests=False)
    for name in ("empty", *(f"full/{n}" for n in range(20))):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "dangling").symlink_to("nowhere")
    outcome = run(capsys, *arguments)
    assert outcome.code == 2
    assert [text for text in told if text.format(tmp_path) not in outcome.err] == []


def test_a_missing_file_is_named_without_an_error_number(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint.save("model", {"params": {"w": np.ones(2)}})

    outcome = run(capsys, "diff", "model", "model", "--rules", "no.toml")

    assert outcome.code == 2
    assert "diff: no.toml: No such file or directory" in outcome.err
