"""The tests have the folders of the packages, and a file for every module of the core."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Each of them is a few public functions, or one class, over many files, and is tested by what those
# promise.
TOOLS = {"_cli", "_demo", "_linen_style_module", "checkpoint", "parity", "port", "rewrite"}
PROMISES = ("tests/_flax/test_linen_promises.py", "tests/_flax/test_nnx_promises.py")
RAISED = "tests/bridge/test_public_surface.py"
# Modules whose tests have another name, and why.
ELSEWHERE = {
    # The public names themselves, with the tests of the whole package.
    "bridge/interop.py": [RAISED],
    "bridge/module.py": [RAISED],
    "bridge/variables.py": ["tests/bridge/test_variables.py"],
    "bridge/wrappers.py": [RAISED],
    # A part of Flax is tested by what Flax promises of it, and by breaking it.
    **{
        f"bridge/_flax/{name}.py": PROMISES
        for name in (
            "graphdefs",
            "linen_modules",
            "objects",
            "promises",
            "tabulate",
            "variables",
        )
    },
    # An error is tested where it is raised, by its fields; what all have in common, there.
    "bridge/_errors/conversion_errors.py": [RAISED],
    "bridge/_errors/module_errors.py": [RAISED],
    "bridge/_errors/tool_errors.py": [RAISED],
    "bridge/_errors/wrapper_errors.py": [RAISED],
    # Two public functions share it, and it is tested through both.
    "bridge/_functions/bound_program.py": [
        "tests/_functions/test_functional.py",
        "tests/_functions/test_jit_partial.py",
    ],
    # What is known of a call of a `bridge.Module`, which only such a call can show.
    "bridge/_module_calls.py": [
        "tests/_linen_style_module/test_as_linen.py",
        "tests/_linen_style_module/test_mixtures.py",
    ],
    # The second half of an initialisation.
    "bridge/_initialization/adopted.py": ["tests/_initialization/test_lazy_init.py"],
    # The row of a layer, by the rows that there are.
    "bridge/_layers/layer.py": ["tests/_layers/test_flax_layers.py"],
    # The functions of the default registry.
    "registry/_default.py": ["tests/registry/test_registry.py"],
}


def modules():
    for package in ("bridge", "registry"):
        for path in sorted((ROOT / package).rglob("*.py")):
            own = path.relative_to(ROOT)
            if not path.name.startswith("__") and not TOOLS.intersection(own.parts):
                yield own


def own_test(module):
    """Where the tests of a module are: in the folder of its package, under its name."""
    folder = module.parts[1:-1] if module.parts[0] == "bridge" else module.parts[:-1]
    return Path("tests", *folder, f"test_{module.stem.lstrip('_')}.py")


@pytest.mark.parametrize("module", [m.as_posix() for m in modules()])
def test_a_module_has_a_test_file(module):
    has_own = (ROOT / own_test(Path(module))).is_file()
    assert has_own is (module not in ELSEWHERE), own_test(Path(module))
    assert all((ROOT / other).is_file() for other in ELSEWHERE.get(module, ()))


def test_no_exception_is_left_over():
    assert ELSEWHERE.keys() <= {m.as_posix() for m in modules()}


def test_every_folder_of_a_package_has_one_in_the_tests():
    folders = {p.parent.name for p in (ROOT / "bridge").glob("*/__init__.py")} | {"registry"}
    assert {folder for folder in folders if not (ROOT / "tests" / folder).is_dir()} == set()


def test_the_name_of_a_test_is_no_longer_than_70_characters():
    functions = [
        node
        for file in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert len(functions) > 1000
    assert [f.name for f in functions if len(f.name) > 70] == []
