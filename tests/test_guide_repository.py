"""The guide on a whole repository: its commands run in order, and print what the text says."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests import processes
from tests.test_guide_projects import patched

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "migration_guides" / "14_a_repository_in_an_afternoon.md"
BY_HAND = ROOT / "migration_guides" / "08_migrating_a_codebase.md"
BLOCK = re.compile(r"(?:<!-- (file|change): (\S+) -->\n\n)?```(\w+)\n(.*?)\n?```\n", re.DOTALL)


@pytest.fixture
def shell(tmp_path):
    """Runs lines of a shell in a repository with the program, and gives what they print.

    Commands of Python run in forks, which need not import everything again.
    """
    shutil.copytree(
        ROOT / "migration_guides" / "projects" / "digits" / "step_0", tmp_path / "digits"
    )
    (tmp_path / ".gitignore").write_text("__pycache__\n.pytest_cache\nold\n")
    user = {
        f"GIT_{who}_{what}": "name@example"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    environment = {
        **os.environ,
        **user,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
        "COLUMNS": "120",
    }
    # Those of the tests of this project are not the program's.
    environment.pop("PYTEST_ADDOPTS", None)
    options = {"cwd": tmp_path, "env": environment, "timeout": 600}

    def run(lines):
        printed = ""
        for line in lines.strip().splitlines():
            match shlex.split(line):
                case ["python", "-m", module, *arguments] | ["pytest" as module, *arguments]:
                    done = processes.run_module(module, *arguments, **options)
                case command:
                    done = subprocess.run(
                        command, check=False, capture_output=True, text=True, **options
                    )
            printed += done.stdout + done.stderr
            assert done.returncode == 0, printed
        return printed

    def run_code(code):
        return processes.run_code(code, **options).stdout

    run("git init -q .\ngit add -A\ngit commit -qm Linen")
    return run, run_code


OLD = """import pathlib
from digits import checkpoint, config, data, evaluate, train

state = train.create(config.Config())
(images, labels), _ = data.load()
state, _ = train.train_step(state, images[:8], labels[:8])
checkpoint.save(pathlib.Path("old"), state)
print(float(abs(evaluate.logits(state, images[:8])).sum()))
"""
NEW = """import pathlib
from digits import checkpoint, config, data, evaluate, train

state = train.create(config.Config())
(images, labels), _ = data.load()
checkpoint.load_linen(pathlib.Path("old"), state)
assert state.optimizer.step[...] == 1
print(float(abs(evaluate.logits(state, images[:8])).sum()))
"""


def test_the_commands_of_the_guide_do_what_it_says(shell, tmp_path):
    run, run_code = shell
    count, printed = 0, ""
    before = run_code(OLD).split()[-1]
    for kind, path, language, text in BLOCK.findall(GUIDE.read_text()):
        if kind == "file":
            (tmp_path / path).write_text(text + "\n")
        elif kind == "change":
            file = tmp_path / path
            file.write_text(patched(file.read_text(), text))
        elif language == "sh":
            count, printed = count + 1, run(text)
        else:
            assert language == "text"
            pattern = re.escape(text).replace(re.escape("..."), ".*")
            assert re.search(pattern, printed, re.DOTALL), printed
    assert count == 7
    assert "flax import linen" not in (tmp_path / "digits" / "model.py").read_text()
    after = run_code(NEW).split()[-1]
    np.testing.assert_allclose(float(after), float(before), rtol=1e-5)


def test_the_commands_of_guide_08_do_what_it_says(shell, tmp_path):
    run, _ = shell
    section = BY_HAND.read_text().partition("## By command")[2].partition("## By hand")[0]
    blocks = [(language, text) for _, _, language, text in BLOCK.findall(section)]
    (tmp_path / "make.py").write_text(next(text for language, text in blocks if language == "py"))
    look, write = (text for language, text in blocks if language == "sh")
    looked = run(look)
    assert "native: 4 of 4 classes, 100 % of the parameters" in looked
    assert "to change by hand: train.py:81: state.apply_gradients" in looked
    # Guide 14 does that with `--discover`, and runs the old tests behind it.
    assert write.startswith(f"   {look.strip().removesuffix(' --fast')} --as-linen --write\n")
    assert (
        " ".join(re.findall(r"`(native: .*?)`", section, re.DOTALL)[0].split()) in GUIDE.read_text()
    )
