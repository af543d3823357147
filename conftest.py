"""What every test runs under: tests, guides, the README and docstring examples alike."""

import os
import pathlib

# Before anything imports jax, which reads both when it starts its backend. JAX_PLATFORMS may be set
# from outside, to run the suite on an accelerator.
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
if DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICE_COUNT_FLAG}=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling is most of the suite's time, and the workers compile the same small programs.
COMPILATIONS = pathlib.Path(__file__).parent / ".pytest_cache" / "compilations"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILATIONS))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

from hypothesis import HealthCheck, settings  # noqa: E402 the environment comes first
from sybil import Sybil  # noqa: E402

from tests.markdown_examples import MarkdownExampleParser  # noqa: E402

# No deadline and no complaint about slow generation: an example's first run compiles.
COMPILING = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("local", max_examples=25, **COMPILING)
settings.register_profile("ci", max_examples=50, derandomize=True, **COMPILING)
settings.load_profile("ci" if os.environ.get("CI") else "local")

pytest_collect_file = Sybil(
    parsers=[MarkdownExampleParser()],
    patterns=["README.md", "migration_guides/*.md"],
    # Linen looks up the module that a class was defined in.
    setup=lambda namespace: namespace.update(__name__="__main__"),
).pytest()
