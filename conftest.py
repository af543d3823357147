"""The settings of all tests: those in `tests`, guides, the README and docstring examples."""

import functools
import gc
import os
import pathlib
import sys
import zlib
from importlib.metadata import version

# Before anything imports jax, which reads all of this when it starts its backend. Each can be set
# from outside: JAX_PLATFORMS to run on an accelerator, JAX_DISABLE_MOST_OPTIMIZATIONS=0 to compile
# as programs do by default.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] != "cpu":
    # An accelerator multiplies float32 in fewer bits by default, and not in the same ones in an
    # eager and in a mapped program.
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "float32")
# Most of the time goes into compiling small programs that run once. With this, LLVM optimises no
# machine code; XLA's own passes still run, so tests that read optimised HLO see what a user gets.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Recording the Python frames of each operation takes a tenth of the time of lowering.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Tests start a hundred processes, each of which would compile the sources of the package again.
# This one would rewrite the assertions of all tests again, half of the time that collecting takes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
FLAGS = {"--xla_force_host_platform_device_count": "8"}
# These halve what is left. An XLA flag that jaxlib does not know ends the process, so they are only
# for the releases that were tried.
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1" and version("jaxlib").startswith("0.10."):
    FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
    FLAGS["--xla_cpu_parallel_codegen_split_count"] = "1"
given_flags = os.environ.get("XLA_FLAGS", "")
added_flags = [f"{name}={value}" for name, value in FLAGS.items() if name not in given_flags]
os.environ["XLA_FLAGS"] = " ".join([given_flags, *added_flags]).strip()
# The workers compile the same small programs.
COMPILATIONS = pathlib.Path(__file__).parent / ".pytest_cache" / "compilations"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILATIONS))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax  # noqa: E402 the environment comes first
from hypothesis import HealthCheck, settings  # noqa: E402
from sybil import Sybil  # noqa: E402

from tests.markdown_examples import MarkdownExampleParser  # noqa: E402
from tests.stack_chunk import in_one_chunk  # noqa: E402

# No deadline and no complaint about slow generation: an example's first run compiles.
COMPILING = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("local", max_examples=25, **COMPILING)
settings.register_profile("ci", max_examples=50, derandomize=True, **COMPILING)
# For a further run of tests: `pytest --hypothesis-profile=few`. With `third` it also takes a third
# of the cases that each test is parametrized with.
for further in ("few", "third"):
    settings.register_profile(further, max_examples=10, derandomize=True, **COMPILING)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# These take long for one worker, so they are started first.
LONG_FILES = (
    "tests/test_guide_repository.py",
    "tests/rewrite/test_programs_as_text.py",
    "tests/rewrite/test_generated.py",
    "tests/rewrite/test_programs.py",
    "tests/rewrite/test_as_linen.py",
    "tests/rewrite/test_lifted.py",
    "tests/rewrite/test_functions.py",
    "tests/rewrite/test_other_fields.py",
    "tests/transforms/test_nnx_mapped.py",
    "tests/parity/test_fault_table.py",
    "tests/port/test_forms.py",
    "migration_guides/08_migrating_a_codebase.md",
    "migration_guides/12_rewriting.md",
    "migration_guides/12_rewriting_by_example.md",
    "tests/transforms/test_linen_functions.py",
    "tests/transforms/test_linen_classes.py",
    "tests/transforms/test_nnx_calls.py",
)
# New objects between two collections. A full one walks through all that JAX's caches hold; with
# Python's default of 700 the tests of transforms spend a twelfth of their time in the collector.
COLLECT_AFTER = 10_000
MAPPINGS = pathlib.Path("/proc/self/maps")


def pytest_collection_modifyitems(config, items):
    """Moves the long files to the front, and leaves the order as it is otherwise."""
    if config.getoption("hypothesis_profile", None) == "third":
        kept = a_third_of_each_test(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    items.sort(key=lambda item: item.nodeid.split("::")[0] not in LONG_FILES)
    for item in items:
        item.setup = functools.partial(in_one_chunk, item.setup)
        item.runtest = functools.partial(in_one_chunk, item.runtest)


def a_third_of_each_test(items):
    """A third of the cases that each test is parametrized with, the same ones in each run.

    A checksum of their names chooses them: every third case of a grid might have one value of a
    parameter alone.
    """
    cases = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = set()
    for own in cases.values():
        own.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        kept.update(own[: -(-len(own) // 3)])
    return kept


def pytest_collection_finish():
    """Leaves what was imported out of later garbage collections."""
    gc.set_threshold(COLLECT_AFTER, 10, 10)
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item, nextitem):
    """Frees compiled programs between files, if there are many.

    A compiled program has several memory mappings. Linux lets a process have 65,530 of them, and
    XLA crashes beyond that. The whole suite gets there in a single process.
    """
    if nextitem is not None and nextitem.path == item.path:
        return
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


pytest_collect_file = Sybil(
    parsers=[MarkdownExampleParser()],
    patterns=["README.md", "migration_guides/*.md"],
    # Linen looks up the module that a class was defined in.
    setup=lambda namespace: namespace.update(__name__="__main__"),
).pytest()
