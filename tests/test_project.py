import re
import subprocess
import sys
import tomllib
from importlib.metadata import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CI = (ROOT / ".ci/run").read_text()


def script(name, *arguments):
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / name, *arguments],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.rstrip("\n")


def shipped_files():
    """The text files of a source distribution, which are those that git tracks."""
    listed = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    for entry in ["/pyproject.toml", "/README.md", "/.gitignore", *listed]:
        path = ROOT / entry.lstrip("/")
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                yield file


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("demo", "pip install -e '.[demo]' && python -m bridge demo"),
        ("docs", "pip install -e '.[docs]' && scripts/docs"),
        ("test", "pip install -e '.[test]' && pytest"),
    ],
)
def test_the_documents_have_one_command_for_each_extra(extra, command):
    assert script("readme_command.py", extra) == command
    assert extra in metadata("linen-nnx-bridge").get_all("Provides-Extra")


def test_ci_runs_the_documents_commands_and_none_of_its_own():
    assert "scripts/readme_command.py test" in CI
    assert "scripts/readme_command.py docs" in CI
    assert CI.count('bash -euo pipefail -c "$docs_command"') == 1
    # All tests on the newest and on the oldest dependencies, and those of the wrappers twice more.
    assert CI.count('bash -euo pipefail -c "$test_command"') == 4
    assert not re.search(r"pip install|-m pytest|^pytest", CI, re.MULTILINE)


def test_ci_runs_the_quick_start_with_the_wheel_on_three_pythons():
    assert "python -m build --outdir .ci/dist" in CI
    assert "python -m twine check --strict .ci/dist/*" in CI
    assert "python scripts/check_wheel.py .ci/dist" in CI
    # On the newest Python right away, on the two others once they are installed.
    assert CI.count("    python scripts/check_quick_start.py .ci/dist\n") == 1
    assert CI.count("    check_quick_start\n") == 2


def test_a_folder_bridge_of_the_users_own_hides_the_package_if_it_is_one(tmp_path):
    """A folder without `__init__.py` hides nothing, as Python looks for a package first."""
    (tmp_path / "bridge").mkdir()
    ask = [sys.executable, "-c", "import bridge; print(hasattr(bridge, 'ToNNX'))"]
    assert subprocess.check_output(ask, cwd=tmp_path, text=True) == "True\n"
    (tmp_path / "bridge" / "__init__.py").write_text("")
    assert subprocess.check_output(ask, cwd=tmp_path, text=True) == "False\n"


def test_the_oldest_requirements_are_the_lower_bounds_of_the_metadata():
    required = [r for r in metadata("linen-nnx-bridge").get_all("Requires-Dist") if ";" not in r]
    oldest = script("oldest_requirements.py").splitlines()
    assert sorted(oldest) == sorted(r.replace(">=", "==") for r in required)
    names = {line.split("==")[0] for line in oldest}
    assert names == {"flax", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "rich"}


def test_no_shipped_file_names_a_path_of_one_machine():
    machine_path = re.compile(r"(?<![\w.])/(?:root|home|tmp|opt|mnt|srv|work|farm|Users)/")
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in shipped_files()
        for line in file.read_text(errors="replace").splitlines()
        if machine_path.search(line)
    ]
    assert not found


def test_ci_names_no_host():
    scripts = [file for file in (ROOT / "scripts").iterdir() if file.is_file()]
    for file in [ROOT / ".ci/run", *scripts]:
        assert not re.search(r"://|index-url", file.read_text()), file.name


def test_there_are_eight_devices():
    assert jax.device_count() == 8


def test_comparing_arrays_of_different_rank_raises():
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.zeros((2, 3)) == jnp.zeros(3)  # noqa: B015 the comparison itself is what raises
