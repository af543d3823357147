"""Measures how `bridge.abstract` and a restore's plan grow with leaves and devices.

``python -m benchmarks.scale_growth [--quick]`` prints CPU seconds, and the exponents of the growth:
1 is linear, 0 none at all. The plan of a restore is what is known before a byte is read: which leaf
is which array, and which part of it each device of this process gets. It is computed by the package
and by `jax.sharding`; both are in the figures. No array is made.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import bridge

# The part of a restore that comes before the arrays; it has no public name.
from bridge.checkpoint import _targets

from .scale_models import AXES

WIDTH = 4096
_ZEROS = nn.initializers.zeros
X = jax.ShapeDtypeStruct((1, WIDTH), jnp.float32)


class LinenWeights(nn.Module):
    """As many matrices as it is told."""

    count: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Makes the matrices."""
        init = nn.with_partitioning(_ZEROS, AXES)
        for i in range(self.count):
            self.param(f"w_{i}", init, (WIDTH, WIDTH))
        return x


class Mixed(nnx.Module):
    """Half of the matrices in Linen, the others in NNX.

    They need no keys: what a key costs in a trace is measured by "constructor in a trace".
    """

    def __init__(self, count: int):
        self.linen = bridge.ToNNX(LinenWeights(count // 2), rngs=nnx.Rngs(0))
        self.nnx = nnx.List(
            nnx.Param(jnp.zeros((WIDTH, WIDTH)), out_sharding=AXES, eager_sharding=False)
            for _ in range(count - count // 2)
        )

    def __call__(self, x: Any) -> Any:
        """What the Linen half returns."""
        return self.linen(x)


def abstract(count: int, mesh: Any) -> Any:
    """The model's shapes and shardings."""
    return bridge.abstract(lambda: Mixed(count), mesh, X)


def planned(target: Any) -> dict[Any, Any]:
    """For each leaf of a target its place in a checkpoint, and what each device gets of it."""
    return {
        path: leaf.value.sharding.addressable_devices_indices_map(leaf.value.shape)
        for path, leaf in _targets.tree_of(target).leaves.items()
        if hasattr(leaf.value, "sharding")
    }


def abstract_mesh(devices: int) -> Any:
    """A mesh without devices."""
    return jax.sharding.AbstractMesh(_sizes(devices), AXES)


def _sizes(devices: int) -> tuple[int, int]:
    return devices // 8, 8


def _seconds(function: Callable[[], Any]) -> float:
    """CPU seconds, the least of three."""
    found: list[float] = []
    for _ in range(3):
        jax.clear_caches()
        start = time.process_time()
        function()
        found.append(time.process_time() - start)
    return min(found)


def measured(leaves: int, devices: int) -> tuple[float, float]:
    """Seconds of `bridge.abstract` for an abstract mesh, and of the plan in a process of its own.

    That process has all of the devices.
    """
    seconds = _seconds(lambda: abstract(leaves, abstract_mesh(devices)))
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, "-m", "benchmarks.scale_growth", "--plan", f"{leaves},{devices}"]
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return seconds, json.loads(ran.stdout)


def _plan(leaves: int, devices: int) -> float:
    mesh = jax.make_mesh(_sizes(devices), AXES)
    target = abstract(leaves, mesh)
    return _seconds(lambda: planned(target))


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The exponent of the growth."""
    return statistics.linear_regression(*([math.log(x) for x in xs] for xs in (sizes, seconds)))[0]


FULL = ((500, 1000, 2000, 4000), (256, 1024, 2048, 4096))
QUICK = ((100, 200), (64, 128))


def main(arguments: Sequence[str]) -> None:
    """Prints the seconds and how they grow."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="few leaves and devices, for a look")
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.plan:
        print(_plan(*map(int, chosen.plan.split(","))))
        return
    leaves, devices = QUICK if chosen.quick else FULL
    abstract(2, abstract_mesh(8))
    for name, sizes, pairs in (
        ("leaves", leaves, [(count, devices[0]) for count in leaves]),
        ("devices", devices, [(leaves[0], count) for count in devices]),
    ):
        found = [measured(*pair) for pair in pairs]
        for (of_leaves, on_devices), (shapes, plan) in zip(pairs, found, strict=True):
            print(
                f"{of_leaves:,} leaves, {on_devices:,} devices:"
                f" bridge.abstract {shapes:.2f} s, plan {plan:.3f} s"
            )
        for what, seconds in zip(
            ("bridge.abstract", "plan"), zip(*found, strict=True), strict=True
        ):
            print(f"{what} grows with {name} to the power of {exponent(sizes, seconds):.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
