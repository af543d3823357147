"""The command line as a user runs it, in a process of its own."""

import contextlib
import io
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization

from bridge import __main__, checkpoint

from . import mixed_models
from .command_line import COMMANDS, run, start, start_new

ROOT = pathlib.Path(mixed_models.__file__).parents[2]
# As a user has it: no emulated devices.
QUIET = {**os.environ, "XLA_FLAGS": "", "COLUMNS": "40"}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A directory with everything that the examples in the help name."""
    place = tmp_path_factory.mktemp("workspace")
    module, x = mixed_models.make_linen_pair()
    variables = module.init(jax.random.key(0), x)
    changed = jax.tree.map(lambda leaf: leaf + 1e-3, variables)
    (place / "checkpoints" / "manager").mkdir(parents=True)
    checkpoint.save(place / "checkpoints" / "model", variables)
    checkpoint.save(place / "before", variables)
    checkpoint.save(place / "after", changed)
    (place / "model.msgpack").write_bytes(serialization.to_bytes(variables))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        step = {"model": variables, "step": np.int32(100)}
        orbax.save(place / "checkpoints" / "manager" / "100", args=ocp.args.PyTreeSave(step))
        orbax.save(place / "linen_checkpoint", args=ocp.args.PyTreeSave(variables))
    (place / "rules.toml").write_text("[rules]\n" + r"'layers_(\d+)' = 'layers.\1'")
    (place / "models.py").write_text(
        "import jax.numpy as jnp\n"
        "from flax import linen as nn, nnx\n"
        "def make_nnx():\n"
        "    rngs = nnx.Rngs(0)\n"
        "    return nnx.Sequential(nnx.Linear(4, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs))\n"
        "def make_linen():\n"
        "    layers = [nn.Dense(3), nn.BatchNorm(use_running_average=True)]\n"
        "    return nn.Sequential(layers), jnp.ones((1, 4))\n"
    )
    (place / "linen_models.py").write_text(
        "from flax import linen as nn\n"
        "class Net(nn.Module):\n"
        "    features: int = 3\n"
        "    @nn.compact\n"
        "    def __call__(self, x, train=False):\n"
        "        return nn.Dense(self.features)(x)\n"
        "def make_net():\n"
        "    return Net()\n"
        "def make_wide():\n"
        "    return Net(5)\n"
    )
    (place / "tests").mkdir()
    (place / "tests" / "test_models.py").write_text(
        "import jax\n"
        "from linen_models import make_net\n"
        "def test_it_runs():\n"
        "    make_net().init(jax.random.key(0), jax.numpy.ones((2, 4)))\n"
    )
    return place


def examples():
    """Every command in the help of every command but the demo, which takes long."""
    for command in COMMANDS:
        text = _help(command)
        joined = re.sub(r"\\\n\s*", "", text[text.index("examples:") :])
        yield from re.findall(r"^  (python -m bridge .*)$", joined, re.MULTILINE)


def _help(command):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        __main__.main([command, "--help"])
    return out.getvalue()


EXAMPLES = list(examples())


def test_every_command_has_examples():
    assert {example.split()[3] for example in EXAMPLES} == {*COMMANDS}


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_in_the_help_run(capsys, monkeypatch, workspace, tmp_path, example):
    for file in workspace.iterdir():
        if file.suffix == ".py":
            # --in-place changes it.
            shutil.copy(file, tmp_path)
        else:
            (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    # Another example's, in this process, is in another folder.
    monkeypatch.delitem(sys.modules, "linen_models", raising=False)
    if "convert nnx_checkpoint" in example or "diff linen_checkpoint nnx" in example:
        # What the example before it makes.
        made = ("convert", "linen_checkpoint", "nnx_checkpoint")
        assert run(capsys, *made, "--model", "models.py:make_nnx", "--format", "bridge").code == 0
        example = example.replace("1,28,28,1", "1,4")
    arguments = shlex.split(example.partition(" > ")[0])[3:]
    outcome = run(capsys, *arguments)
    # Those two have other running averages after a step of training.
    is_compared = "--suggest" not in arguments
    models_differ = is_compared and arguments[:2] == ["parity", "models.py:make_linen"]
    differs = models_differ or arguments[:3] == ["diff", "before", "after"]
    assert outcome.code == (1 if differs else 0), outcome
    assert outcome.out
    if "--json" in arguments:
        assert outcome.document["version"] == 1


def test_report_in_a_pipe_is_json_and_nothing_else(workspace):
    outcome = start_new(
        "report", "models.py:make_linen", "--json", "--html", "page.html", cwd=workspace, env=QUIET
    )
    assert outcome.code == 0, outcome.err
    assert outcome.document["migrated"]["parameters"] == {
        "native": 0,
        "total": 4 * 3 + 3 + 3 + 3,
        "share": 0.0,
        "native_bytes": 0,
        "total_bytes": 4 * 21,
    }
    assert outcome.document["modules"][0]["source"]["import_path"] == "flax.linen.Sequential"
    assert outcome.err == ""
    assert "flax.linen.Sequential" in (workspace / "page.html").read_text()


def test_a_failed_check_is_exit_code_one_and_plain_text(workspace):
    outcome = start(
        "report", "models:make_linen", "--min-migrated", "0.6", cwd=workspace, env=QUIET
    )
    assert outcome.code == 1, outcome.err
    assert "\x1b" not in outcome.out
    assert all(line == line.rstrip() for line in outcome.out.splitlines())
    # One line for a module, although the terminal's width is said to be 40.
    assert outcome.out.splitlines()[2].split()[-1] == "flax.nnx.Linear"
    assert outcome.out.splitlines()[-1].startswith("check FAILED: 0.0% of the parameters")
    assert outcome.err == ""


def test_input_that_cannot_be_used_is_one_message_on_stderr(workspace):
    outcome = start("report", "models:absent", cwd=workspace, env=QUIET)
    assert outcome.code == 2
    assert outcome.out == ""
    (line,) = outcome.err.splitlines()
    assert line.startswith("python -m bridge report: models:absent: found no name 'absent'")
    assert line.endswith("it has make_nnx, make_linen")


def test_a_checkpoint_is_converted_and_compared(workspace, tmp_path):
    out = tmp_path / "out"
    converted = start(
        "convert", "linen_checkpoint", out, "--model", "models.py:make_nnx",
        cwd=workspace, env=QUIET,
    )  # fmt: skip
    assert converted.code == 0, converted.err
    compared = start("diff", out, "after", "--json", cwd=workspace, env=QUIET)
    assert compared.code == 1, compared.err
    document = compared.document
    assert (document["a"]["layout"], document["b"]["layout"]) == ("nnx", "bridge")
    found = [entry["difference"] for entry in document["differences"]]
    assert sorted(found) == ["only in a"] * 6 + ["only in b"] * 6


def test_a_project_with_one_checkpoint_in_it_is_not_replaced(workspace, tmp_path):
    project = tmp_path / "project"
    shutil.copytree(workspace / "linen_checkpoint", project / "checkpoint")
    (project / "models.py").write_text("x")
    before = set(project.rglob("*"))
    outcome = start("convert", project / "checkpoint", project, "--overwrite", env=QUIET)
    assert outcome.code == 2, outcome
    (line,) = outcome.err.splitlines()
    assert f"at {project}. Only a checkpoint and nothing else is replaced." in line
    assert set(project.rglob("*")) == before


def test_a_damaged_file_is_found_by_inspect_and_named_without_a_traceback(workspace, tmp_path):
    shutil.copytree(workspace / "before", tmp_path / "damaged")
    # All of them: OCDBT leaves files of earlier writes behind, which nothing refers to.
    files = list((tmp_path / "damaged" / "variables").rglob("d/*"))
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    outcome = start_new("inspect", tmp_path / "damaged", "--verify", env=QUIET)
    assert outcome.code == 2, outcome
    assert "damage was found" in outcome.err
    for file in files:
        file.write_bytes(b"")
    outcome = start_new("diff", tmp_path / "damaged", tmp_path / "damaged", env=QUIET)
    assert outcome.code == 2, outcome
    # Regression: tensorstore found orbax's event loop closed, and each read had a traceback.
    assert "arrays cannot be read" in outcome.err.splitlines()[0]
    assert "Traceback" not in outcome.err
    # So had each read of an index that orbax wrote.
    shutil.copytree(workspace / "linen_checkpoint", tmp_path / "plain")
    for file in (tmp_path / "plain").rglob("d/*"):
        file.write_bytes(b"")
    outcome = start_new("inspect", tmp_path / "plain", env=QUIET)
    assert outcome.code == 2, outcome
    assert "cannot be read" in outcome.err.splitlines()[0]
    assert "Traceback" not in outcome.err


PROGRAMS = """\
import signal, sys, time
from flax import nnx
class Model(nnx.Module):
    def __init__(self, rngs):
        self.fc, self.out = (nnx.Linear(4, 4, rngs=rngs) for _ in range(2))
    def __call__(self, x):
        return self.out(nnx.relu(self.fc(x)))
class Wrong(Model):
    def __call__(self, x):
        return self.out(nnx.gelu(self.fc(x)))
def leaves():
    sys.exit(3)
def waits():
    # A shell's background jobs ignore Ctrl-C, and what they start inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("waiting", file=sys.stderr, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def programs(tmp_path):
    (tmp_path / "programs.py").write_text(PROGRAMS)
    return tmp_path


def test_parity_names_the_first_layer_that_differs(programs):
    targets = ("programs.py:Model", "programs.py:Wrong", "--input", "2,4")
    outcome = start("parity", *targets, "--sections", "layers", cwd=programs, env=QUIET)
    assert outcome.code == 1, outcome
    assert "they DIFFER in layers" in outcome.out
    assert "between fc and out" in outcome.out


def test_the_exit_code_of_a_program_is_not_that_of_the_command(programs):
    outcome = start("report", "programs.py:leaves", cwd=programs, env=QUIET)
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert line.endswith("called sys.exit(3)")


def test_control_c_ends_a_command_with_one_line_and_130(programs):
    command = [sys.executable, "-m", "bridge", "report", "programs.py:waits"]
    with subprocess.Popen(command, cwd=programs, env=QUIET, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b"python -m bridge: interrupted\n"
        assert process.wait(60) == 130


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["inspect", "0.msgpack"], 0), (["diff", "0.msgpack", "1.msgpack"], 1)],
)
def test_a_reader_that_stops_early_changes_no_exit_code(workspace, arguments, code):
    for value in (0, 1):
        # More than a buffer holds.
        many = {"params": {f"parameter_{i}": np.full(1, value) for i in range(1000)}}
        (workspace / f"{value}.msgpack").write_bytes(serialization.to_bytes(many))
    command = [sys.executable, "-m", "bridge", *arguments]
    with subprocess.Popen(
        command, cwd=workspace, env=QUIET, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        message = process.stderr.read()
        # Regression: it was 0 whatever differed.
        assert process.wait(60) == code
    assert message == b""


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        *(
            (["report", "models.py:make_nnx", *option], where)
            for option in ([], ["--json"])
            for where in ("&-", "/dev/full")
        ),
        (["--help"], "/dev/full"),
        (["--version"], "/dev/full"),
    ],
)
def test_a_stdout_that_takes_nothing_is_one_line_on_stderr(workspace, arguments, where):
    # Regression: --version ended with a traceback, and --help with 120.
    shell = ["sh", "-c", f'exec "$0" "$@" >{where}', sys.executable, "-m", "bridge"]
    done = subprocess.run(
        [*shell, *arguments],
        cwd=workspace,
        # Unbuffered, argparse itself discards help that cannot be written.
        env={**QUIET, "PYTHONUNBUFFERED": ""},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("python -m bridge")
    assert "stdout" in line


@pytest.mark.parametrize(
    ("where", "buffering"), [("&-", "1"), ("/dev/full", ""), ("/dev/full", "1")]
)
def test_a_stderr_that_takes_nothing_does_not_change_the_exit_code(workspace, where, buffering):
    shell = ["sh", "-c", f'exec "$0" "$@" 2>{where}', sys.executable, "-m", "bridge"]
    env = {**QUIET, "PYTHONUNBUFFERED": buffering}
    done = subprocess.run([*shell, "inspect", "absent"], cwd=workspace, env=env, check=False)
    # Regression: it was 1, which says that a check failed, or 120.
    assert done.returncode == 2
