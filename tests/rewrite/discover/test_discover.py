"""`python -m bridge rewrite --discover -- COMMAND`: the models that a command calls."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import pytest

import bridge
from bridge import rewrite
from tests._cli.command_line import run

PARTS = """from flax import linen as nn


class Part(nn.Module):
    width: int = 3

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)
"""
MODELS = """from flax import linen as nn

from {name}.parts import Part


class Net(nn.Module):
    features: int
    act: object = nn.relu

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dropout(0.5, deterministic=not train)(Part()(x))
        return self.act(nn.Dense(self.features)(x))


class Loop(nn.Module):
    @nn.compact
    def __call__(self, x):
        n = 0
        while n < 2:
            x = nn.Dense(64)(x)
            n += 1
        return x
"""
OTHER = """from flax import linen as nn


class Pair(nn.Module):
    def setup(self):
        self.first = nn.Dense(2)
        self.second = nn.Dense(2)

    def encode(self, x, name):
        return self.first(x)

    def __call__(self, x):
        return self.second(self.encode(x, "here"))
"""
TESTS = """import jax
import jax.numpy as jnp
from flax import linen as nn
from {name}.models import Loop, Net
from {name}.other import Pair
from {name}.parts import Part

KEY = jax.random.key(0)


class Own(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Part(5)(x)


def test_models():
    x = jnp.ones((2, 7))
    for size in (2, 3):
        variables = Net(4).init(KEY, jnp.ones((size, 7)), False)
        Net(4).apply(variables, x, True, rngs={{"dropout": KEY}})
    Net(2, act=lambda x: x + 1).init(KEY, x, train=False)
    variables = Pair().init(KEY, x)
    Pair().apply(variables, x, "there", method=Pair.encode)
    Pair().apply(variables, x, method=lambda pair, x: pair.encode(x, "by a function"))
    Own().init(KEY, x)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a package and a test, as the current directory; gives the package's name."""
    name = f"found_{abs(hash(str(tmp_path))) % 10**8}"
    (tmp_path / name).mkdir()
    (tmp_path / "tests").mkdir()
    files = {"__init__": "", "parts": PARTS, "models": MODELS, "other": OTHER}
    for file, text in files.items():
        (tmp_path / name / f"{file}.py").write_text(text.replace("{name}", name))
    (tmp_path / "tests" / "test_models.py").write_text(TESTS.format(name=name))
    monkeypatch.chdir(tmp_path)
    return name


def discover(capsys, *options, command=("python", "-m", "pytest", "-q", "tests")):
    fast = ("--discover", "--no-diff", "--fast", "--no-gradients")
    return run(capsys, "rewrite", *fast, *options, "--", *command)


def files():
    found = (each for each in pathlib.Path().rglob("*") if each.suffix in (".py", ".toml"))
    return {each.as_posix(): each.read_text() for each in found}


def script(name, *lines):
    """A command that calls a model of the package, and does what the lines say."""
    head = "import jax", f"from {name}.parts import Part"
    call = "Part().init(jax.random.key(0), jax.numpy.ones((1, 2)))"
    pathlib.Path("run.py").write_text("\n".join([*head, call, *lines, ""]))
    return "python", "run.py"


def test_the_models_that_tests_call_are_rewritten_in_one_run(project, capsys):
    outcome = discover(capsys, "--json", "--as-linen", "--write")
    assert outcome.code == 0, outcome.err
    found = outcome.document["discovered"]
    calls = {
        (each["class"].split(":")[1], each["call"], each["fields"]) for each in found["entries"]
    }
    assert calls == {
        # Sizes and modes of one model are one entry point; a part of a test's own model is one too.
        ("Net", "(float32[2,7], train=False)", "features=4"),
        (
            "Net",
            "(float32[2,7], train=False)",
            "features=2, act=<function test_models.<locals>.<lambda>>",
        ),
        ("Pair", "(float32[2,7])", ""),
        ("Part", "(float32[2,7])", "width=5"),
    }
    (net,) = [each for each in found["entries"] if each["fields"] == "features=4"]
    assert net["rngs"] == ["dropout", "params"]
    assert found["left"] == [
        "models of the tests themselves stay as they are: Own",
        "Pair.encode: it makes some of the variables that __call__ makes",
    ]
    levels = {each["name"]: each["level"] for each in outcome.document["classes"]}
    assert levels.keys() == {"Net", "Pair", "Part"}
    written = {pathlib.Path(each).name for each in outcome.document["written"]}
    assert {"models.py", "parts.py", "other.py", "models_nnx.py", "parts_nnx.py"} < written
    # The tests hold for the Linen classes that run NNX classes, and nothing is left to do.
    for name in [name for name in sys.modules if name.startswith(project)]:
        del sys.modules[name]
    outcome = discover(capsys, "--as-linen", "--check")
    assert outcome.code == 0, outcome.err
    assert "runs an NNX class already: Net, Pair, Part" in outcome.out
    # The training is rewritten from the Linen classes, which are gone.
    outcome = discover(capsys, "--train", "sample.py:sample")
    assert outcome.code == 2
    assert "its model runs NNX classes" in outcome.err


def test_what_stays_linen_is_listed_by_its_share_of_the_parameters(project, capsys):
    command = script(
        project,
        f"from {project}.models import Loop",
        "Loop().init(jax.random.key(0), jax.numpy.ones((1, 2)))",
    )
    outcome = discover(capsys, "--check", "--skip", "Part", command=command)
    assert outcome.code == 1
    shares = [line for line in outcome.out.splitlines() if "% of the parameters stay" in line]
    assert [line.rpartition(" ")[2] for line in shares] == ["Loop", "Part"]


def test_a_command_that_fails_changes_nothing(project, capsys):
    command = script(project, "raise SystemExit('the last line')")
    before = files()
    outcome = discover(capsys, "--write", command=command)
    assert outcome.code == 2
    assert "the command failed with exit code 1, so nothing is rewritten" in outcome.err
    assert "the last line" in outcome.err
    assert files() == before
    outcome = discover(capsys, "--write", "--allow-failure", command=command)
    assert outcome.code == 0, outcome.err
    assert f"{project}/parts_nnx.py" in files()


def test_an_interrupted_command_changes_nothing(project, capsys):
    lines = "import os, signal, sys", "signal.signal(signal.SIGINT, signal.SIG_DFL)"
    command = script(project, *lines, "os.kill(os.getpid(), signal.SIGINT)")
    before = files()
    outcome = discover(capsys, "--write", command=command)
    assert outcome.code == 2
    assert "the command was ended by SIGINT, so nothing is rewritten" in outcome.err
    assert files() == before


@pytest.fixture
def heard_interrupts():
    """Processes inherit an ignored signal, as that of a test run in the background is."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_interrupts")
def test_control_c_ends_the_command_too(tmp_path):
    text = "import os, time\nprint(os.getpid(), file=open('pid', 'w'), flush=True)\ntime.sleep(60)"
    (tmp_path / "run.py").write_text(text)
    command = [sys.executable, "-m", "bridge", "rewrite", "--discover", "--", "python", "run.py"]
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(bridge.__file__).parents[1])}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "python -m bridge: interrupted\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["pid", "run.py"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", "no process of it called a Linen module"),
        ("from bridge._demo import _models", "a model of"),
    ],
)
def test_a_command_that_calls_no_model_of_the_folder_says_so(
    tmp_path, monkeypatch, capsys, code, expected
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(bridge.__file__).parents[1]))
    if code != "pass":
        code += "; import jax; x = jax.ShapeDtypeStruct((1, 8, 8, 1), 'float32')"
        code += "; init = lambda x: _models.DigitsCNN().init(jax.random.key(0), x, train=False)"
        code += "; jax.eval_shape(init, x)"
    outcome = discover(capsys, command=("python", "-c", code))
    assert outcome.code == 2
    assert f"called no Linen model of {tmp_path}" in outcome.err
    assert expected in outcome.err
    assert "Looked for were calls of classes" in outcome.err


def test_a_command_that_cannot_be_started_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    outcome = discover(capsys, command=("no-such-program", "tests"))
    assert outcome.code == 2
    assert "the command cannot be started" in outcome.err


def test_modules_that_cannot_be_imported_here_are_told(project, capsys):
    parts = pathlib.Path(project, "parts.py")
    parts.write_text(parts.read_text() + "import os\nos.environ['ONLY_IN_THE_COMMAND']\n")
    before = files()
    outcome = discover(
        capsys, "--write", command=("env", "ONLY_IN_THE_COMMAND=1", *script(project))
    )
    assert outcome.code == 2
    assert f"{project}.parts ({project}/parts.py): KeyError: 'ONLY_IN_THE_COMMAND'" in outcome.err
    assert files() == {**before, "run.py": pathlib.Path("run.py").read_text()}


def test_a_file_that_changes_meanwhile_stops_the_rewriting(project, capsys):
    command = script(project, f"open('{project}/parts.py', 'a').write('# more')")
    outcome = discover(capsys, "--write", command=command)
    assert outcome.code == 2
    assert f"files were changed while the command ran:\n  - {project}/parts.py" in outcome.err
    assert not list(pathlib.Path(project).glob("*_nnx*"))


def test_new_files_are_not_written_for_a_source_that_has_changed(project, monkeypatch):
    monkeypatch.syspath_prepend(".")
    parts = pathlib.Path(project, "parts.py")
    namespace = {}
    exec(f"from {project}.parts import Part", namespace)
    x = jax.ShapeDtypeStruct((2, 4), "float32")
    result = bridge.rewrite(namespace["Part"], x, gradients=False, fast=True)
    text = parts.read_text()
    parts.write_text(text + "# more\n")
    with pytest.raises(rewrite.RewriteError, match="changed since they were read"):
        result.write()
    parts.write_text(text)
    assert len(result.write()) == 2


def test_fields_that_cannot_be_written_down_are_told(project, capsys):
    command = script(
        project,
        "import threading",
        f"from {project}.models import Net",
        "class Act:",
        "    lock = None",
        "    def __init__(self): self.lock = threading.Lock()",
        "    def __call__(self, x): return x",
        "Net(2, Act()).init(jax.random.key(0), jax.numpy.ones((1, 2)), False)",
    )
    outcome = discover(capsys, command=command)
    assert outcome.code == 0, outcome.err
    assert "not an entry point: Net: field act cannot be written down (" in outcome.out


def test_each_model_has_rules_of_its_own(tmp_path, monkeypatch):
    name = f"rules_{abs(hash(str(tmp_path))) % 10**8}"
    (tmp_path / f"{name}.py").write_text(
        "from flax import linen as nn\n\n\n"
        "class One(nn.Module):\n    @nn.compact\n    def __call__(self, x):\n"
        "        first = nn.Dense(3)\n        return first(x)\n\n\n"
        "class Two(nn.Module):\n    @nn.compact\n    def __call__(self, x):\n"
        "        last = nn.Dense(3)\n        return last(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__(name)
    x = jax.ShapeDtypeStruct((2, 4), "float32")
    result = bridge.rewrite(module.One, x, also=[(module.Two, x)], gradients=False, fast=True)
    assert dict(result.rules) == {"Dense_0": "first"}
    assert {k: dict(v) for k, v in result.further_rules.items()} == {"Two": {"Dense_0": "last"}}
    assert json.loads(result.to_json())["further_rules"] == {"Two": {"Dense_0": "last"}}
    written = [pathlib.Path(each).name for each in result.write()]
    assert written == [f"{name}_nnx.py", f"{name}_nnx.rules.toml", f"{name}_nnx.Two.rules.toml"]


@pytest.mark.parametrize(
    ("options", "command", "expected"),
    [
        ((), (), "--discover: found no command"),
        (("--input", "1,2"), ("python",), "--discover: found --input or --kwarg too"),
    ],
)
def test_wrong_usage_says_what_to_change(capsys, options, command, expected):
    outcome = discover(capsys, *options, command=command)
    assert outcome.code == 2
    assert expected in outcome.err
