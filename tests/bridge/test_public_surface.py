"""The two packages show only their public names, and importing them changes nothing."""

import builtins
import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import flax.nnx.bridge
import pytest
from flax import errors as flax_errors

import bridge
import registry

ROOT = Path(__file__).parents[2]


def public_names(module):
    return {name for name in vars(module) if not name.startswith("_")}


def run(code, *options):
    ran = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize("package", [bridge, registry])
def test_all_is_the_public_namespace(package):
    # Some modules are imported when they are asked for.
    assert [name for name in package.__all__ if not hasattr(package, name)] == []
    assert set(package.__all__) == public_names(package)


@pytest.mark.parametrize("package", [bridge, registry])
def test_all_is_sorted_as_names_are_listed_and_names_each_once(package):
    assert package.__all__ == sorted(set(package.__all__))


@pytest.mark.parametrize(
    "module", [bridge.interop, bridge.module, bridge.variables, bridge.wrappers]
)
def test_a_thin_module_exports_only_what_it_has(module):
    assert module.__all__ == sorted(set(module.__all__))
    assert set(module.__all__) <= public_names(module)


def test_everything_that_flaxs_bridge_exports_is_here():
    exported = {
        name
        for name in public_names(flax.nnx.bridge)
        if not isinstance(getattr(flax.nnx.bridge, name), ModuleType)
    }
    assert exported - set(bridge.__all__) == set()


@pytest.mark.parametrize("module", ["initializers", "interop", "module", "variables", "wrappers"])
def test_the_modules_that_programs_import_from_flaxs_bridge_are_here(module):
    assert isinstance(getattr(flax.nnx.bridge, module), ModuleType)
    assert isinstance(getattr(bridge, module), ModuleType)


@pytest.mark.parametrize("module", ["interop", "module", "variables", "wrappers"])
def test_the_thin_modules_can_be_imported_by_path(module):
    assert importlib.import_module(f"bridge.{module}") is getattr(bridge, module)


@pytest.mark.parametrize("name", ["register_variable_name", "register_variable_name_type_pair"])
def test_bridge_exports_the_register_functions(name):
    assert getattr(bridge, name) is getattr(registry, name)


def test_what_has_one_meaning_in_flax_is_flaxs_own():
    assert bridge.initializers is flax.nnx.bridge.initializers


@pytest.mark.parametrize("package", [bridge, registry])
def test_both_packages_are_typed(package):
    assert (Path(package.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("package", [bridge, registry])
def test_every_public_function_and_class_has_a_docstring(package):
    own = [getattr(package, name) for name in package.__all__]
    own = [
        thing for thing in own if getattr(thing, "__module__", "").startswith(("bridge", "regis"))
    ]
    assert own
    assert [thing for thing in own if not thing.__doc__] == []


def error_tree(module):
    """(error, its bases) as the docstring draws them; `a(b, c)` derives from b and c too."""
    drawn = re.findall(r"^[ │├└─]*(\w+(?:Error|Warning))(?:\(([^)]*)\))?", module.__doc__, re.M)
    return [
        (name, [base.split()[-1] for base in bases.split(", ") if base]) for name, bases in drawn
    ]


@pytest.mark.parametrize("package", [bridge, registry])
def test_the_errors_are_the_tree_that_the_docstring_draws(package):
    module = importlib.import_module(f"{package.__name__}._errors")
    drawn = error_tree(module)
    defined = {
        name
        for name, thing in vars(module).items()
        if isinstance(thing, type) and issubclass(thing, Exception)
    }
    assert {name for name, _ in drawn} == defined
    assert defined <= set(package.__all__)
    for name, bases in drawn:
        for base in bases:
            found = getattr(builtins, base, None) or getattr(flax_errors, base, None)
            assert issubclass(getattr(module, name), found or getattr(module, base)), (name, base)


# What importing a package does, observed in a process of its own.
OBSERVING = """
    import copy, json, logging, os, sys, warnings
    import flax, flax.linen as nn, flax.nnx as nnx, jax
    from flax.core import meta, scope
    from flax.nnx import bridge as peer
    from jax._src import xla_bridge

    owners = [
        nn, nnx, meta, scope, nn.Module, nnx.Module, nnx.Pytree, nnx.Variable, nnx.Param,
        scope.Scope, meta.Partitioned, peer, peer.wrappers, peer.variables, peer.ToNNX,
    ]

    def observed():
        return copy.deepcopy((
            dict(jax.config.values),
            dict(flax.config._values),
            sorted(nnx.variablelib.VariableTypeCache),
            (nnx.using_eager_sharding(), dict(nnx.var_defaults())),
            dict(os.environ),
            warnings.filters,
            (logging.root.level, logging.root.handlers),
        ))

    modules, before, attributes = set(sys.modules), observed(), [dict(vars(o)) for o in owners]
    import PACKAGE
    print(json.dumps({
        "imported": sorted({name.split(".")[0] for name in set(sys.modules) - modules}),
        "backends": sorted(xla_bridge._backends),
        "is_as_before": observed() == before,
        "replaced": sorted(
            f"{owner}.{name}"
            for owner, old in zip(owners, attributes, strict=True)
            for name in vars(owner).keys() | old.keys()
            if vars(owner).get(name) is not old.get(name)
            # Python fills these caches by itself.
            and name not in ("__warningregistry__", "__abstractmethods__", "_abc_impl")
        ),
    }))
"""


@pytest.fixture(scope="module", params=["bridge", "registry"])
def importing(request):
    """The package, and what importing it did; a warning or a text of its own is an error."""
    return request.param, json.loads(
        run(OBSERVING.replace("PACKAGE", request.param), "-W", "error")
    )


def test_importing_a_package_imports_nothing_besides_flax_and_these_two(importing):
    package, found = importing
    assert found["imported"] == (["registry"] if package == "registry" else ["bridge", "registry"])


def test_importing_starts_no_backend_and_changes_no_configuration(importing):
    _, found = importing
    assert found["backends"] == []
    assert found["is_as_before"]


def test_importing_replaces_nothing_in_flax(importing):
    _, found = importing
    assert found["replaced"] == []


def test_the_tools_are_imported_when_they_are_asked_for():
    code = """
        import bridge, sys
        tools = ("checkpoint", "parity", "port")
        print([name for name in tools if f"bridge.{name}" in sys.modules])
        print(bridge.checkpoint.__name__, bridge.parity.__name__, bridge.port.__name__)
    """
    assert run(code).splitlines() == ["[]", "bridge.checkpoint bridge.parity bridge.port"]


def test_the_help_of_a_command_imports_nothing_but_the_command_line():
    code = """
        import contextlib, io, sys
        import bridge
        before = set(sys.modules)
        from bridge import __main__, _cli
        for add_command in _cli.COMMANDS:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                __main__.main([add_command.__module__.split(".")[2], "--help"])
        made = [name for name in set(sys.modules) - before if not name.startswith("bridge._cli")]
        print(sorted(n for n in made if n.split(".")[0] not in sys.stdlib_module_names))
    """
    assert run(code).splitlines() == ["['bridge.__main__', 'bridge._demo']"]


def test_importing_bridge_takes_little_longer_than_importing_flax():
    code = """
        import time
        start = time.perf_counter()
        import flax.linen, flax.nnx, flax.nnx.bridge
        flax_ready = time.perf_counter()
        import bridge
        bridge_ready = time.perf_counter()
        print((bridge_ready - flax_ready) / (flax_ready - start))
    """
    # What else runs on the machine only makes it slower.
    assert any(float(run(code)) < 0.3 for _ in range(3))


def test_a_user_s_own_registry_module_is_named(tmp_path):
    """Regression: an error far away said what the user's file does not have."""
    (tmp_path / "registry.py").write_text("MODELS = {}\n")
    ran = subprocess.run(
        [sys.executable, "-c", "import bridge"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: bridge needs its own package `registry`")
    assert str(tmp_path / "registry.py") in last
