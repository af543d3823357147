"""Measures the sharded initialisation of billions of parameters without executing it.

``python -m benchmarks.scale [--quick] [--output FOLDER]`` lowers and compiles the initialisation of
a decoder from abstract inputs, in Linen and NNX, native, wrapped and mixed, for meshes of 256 and
4096 emulated CPU devices. XLA compiles for at most 2048 CPU devices of one process, so two
processes share the larger mesh. For an abstract mesh, of up to 16,384 devices and 100 billion
parameters, JAX lowers, but does not compile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Column, Table

from . import processes, results
from .measure import Effort
from .scale_compiled import Compiled, compiled
from .scale_models import AXES, FORMS, NATIVE, SHAPES, Shape


@dataclasses.dataclass(frozen=True)
class Mesh:
    """A mesh to be compiled for.

    Attributes:
      sizes: of the axes `fsdp` and `tensor`.
      processes: how many processes have its devices; none for an abstract mesh.
      depths: the numbers of layers.
      rounds: how often each is timed.
      shape: the width of the layers, one of `SHAPES`.
    """

    sizes: tuple[int, int]
    processes: int
    depths: tuple[int, ...]
    rounds: int = 1
    shape: str = ""

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return math.prod(self.sizes)


FULL = (
    Mesh((32, 8), 1, (2, 8, 32, 128), rounds=3),
    Mesh((256, 16), 2, (32, 128), rounds=2),
    Mesh((256, 16), 0, (2, 8, 32, 128), rounds=3),
    Mesh((256, 64), 0, (26, 52, 104), rounds=3, shape="large"),
)
QUICK = (
    Mesh((32, 8), 1, (2, 8)),
    Mesh((256, 16), 0, (2, 8)),
    Mesh((256, 64), 0, (104,), shape="large"),
)


def measure(mesh: Mesh) -> Iterator[Compiled]:
    """Everything that is compiled for a mesh, the forms in turn."""
    names, axis_types = AXES, (jax.sharding.AxisType.Auto,) * 2
    if mesh.processes:
        devices: Any = jax.make_mesh(mesh.sizes, names, axis_types=axis_types)
    else:
        devices = jax.sharding.AbstractMesh(mesh.sizes, names, axis_types=axis_types)
    # What a process does once is nobody's figure.
    for form in FORMS:
        compiled(form, Shape(2, 64, 64, 1, 64), jax.sharding.AbstractMesh((1, 1), names))
    for depth in mesh.depths:
        for _ in range(mesh.rounds):
            for form in FORMS:
                shape = dataclasses.replace(SHAPES[mesh.shape], depth=depth)
                yield compiled(form, shape, devices)


def run(mesh: Mesh) -> Iterator[Compiled]:
    """What `measure` finds, in processes that have the mesh's devices.

    Raises:
      RuntimeError: such a process failed.
    """
    count = max(1, mesh.processes)
    # An abstract mesh has none, and a process cannot start the threads of 16,384.
    devices = mesh.devices // count if mesh.processes else 1
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        # A compilation that was looked up would be timed.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    text = json.dumps(dataclasses.astuple(mesh))
    children: list[subprocess.Popen[str]] = []
    with processes.reserved_port() as port:
        try:
            for index in range(count):
                command = [sys.executable, "-m", "benchmarks.scale", "--child", text]
                command += ["--process", str(index), "--port", str(port)]
                output = subprocess.PIPE if index == 0 else subprocess.DEVNULL
                child = subprocess.Popen(command, env=environment, stdout=output, text=True)
                children.append(child)
            for line in children[0].stdout or ():
                yield Compiled(**json.loads(line))
            if any(child.wait(60) for child in children):
                raise RuntimeError(f"a process failed, of those for {mesh}")
        finally:
            for child in children:
                child.kill()
                child.wait()


def _child(mesh: Mesh, process: int, port: int) -> None:
    """Prints what `measure` finds, a line each; a second process only lends its devices."""
    if mesh.processes == 2:
        processes.join(process, port, shutdown=1200)
        # Each waits here for the devices of the other one.
        jax.devices()
    if process == 0:
        for found in measure(mesh):
            print(json.dumps(dataclasses.asdict(found)), flush=True)


def summarised(found: Sequence[Compiled]) -> list[Compiled]:
    """One for each form, depth and mesh, with the least of the seconds: what was not disturbed."""
    least: dict[Any, Compiled] = {}
    for one in found:
        before = least.setdefault(_place(one, one.form), one)
        faster = {
            name: min(getattr(before, name), getattr(one, name))
            for name in ("lower_seconds", "compile_seconds")
            if getattr(one, name) is not None
        }
        least[_place(one, one.form)] = dataclasses.replace(before, **faster)
    return list(least.values())


def _place(one: Compiled, form: str | None) -> tuple[Any, ...]:
    """Where another form stands that was compiled for the same mesh and depth."""
    return one.devices, one.is_abstract, one.depth, form


def print_table(found: Sequence[Compiled]) -> None:
    """Prints every initialisation, and each wrapped form over the native one."""
    columns = (
        *("devices", "layers", "parameters", "form", "lower", "compile", "operations"),
        *("instructions", "results", "temporaries", "largest buffer", "of a weight"),
    )
    table = Table(*(Column(name, no_wrap=True) for name in columns))
    by_place = {_place(one, one.form): one for one in found}
    for one in found:
        native = by_place.get(_place(one, NATIVE.get(one.form)))
        table.add_row(*_cells(one, native), end_section=native is not None)
    console = Console()
    # A file or a pipe has no width of its own, and lines that are cut short say nothing.
    Console(width=None if console.is_terminal else 200).print(table)
    print(
        "Results, temporaries and buffers are those of one device. In parentheses: over the native"
        " form above. The last column: the largest buffer over the largest weight, whole."
    )


def _cells(one: Compiled, native: Compiled | None) -> Iterator[str]:
    yield f"{one.devices} abstract" if one.is_abstract else str(one.devices)
    yield from (str(one.depth), f"{one.parameters / 1e9:.2f} B", one.form)
    written = {
        "lower_seconds": "{:.2f} s",
        "compile_seconds": "{:.2f} s",
        "operations": "{:,}",
        "instructions": "{:,}",
        "outputs": "{:,}",
        "temporaries": "{:,}",
    }
    for name, text in written.items():
        figure = getattr(one, name)
        over = f" ({figure / getattr(native, name):.2f})" if native and figure else ""
        yield "" if figure is None else text.format(figure) + over
    if one.largest:
        yield f"{one.largest:,}"
        yield f"1/{one.largest_weight / one.largest:.0f}"


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few layers, once each, for a look")
    parser.add_argument("--output", type=Path, help="a folder for the JSON")
    # What the script gives the processes that it starts.
    for name, kind in (("--child", str), ("--process", int), ("--port", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.child:
        _child(Mesh(*map(_frozen, json.loads(chosen.child))), chosen.process, chosen.port)
        return
    measured: list[Compiled] = []
    start = time.perf_counter()
    for mesh in QUICK if chosen.quick else FULL:
        for one in run(mesh):
            measured.append(one)
            passed = time.perf_counter() - start
            at = f"{one.devices} devices, {one.depth} layers, {one.form}"
            print(f"{passed:6.0f} s  {at}", file=sys.stderr, flush=True)
    found = summarised(measured)
    print_table(found)
    if chosen.output:
        chosen.output.mkdir(parents=True, exist_ok=True)
        (chosen.output / "scale_cpu.json").write_text(_to_json(found))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _to_json(found: Sequence[Compiled]) -> str:
    environment = results.environment(Effort(rounds=FULL[0].rounds, turn=0.0))
    # Of this process, in which nothing was compiled.
    del environment["device"], environment["rounds"], environment["turn"]
    rows = ",\n".join(json.dumps(dataclasses.asdict(one)) for one in found)
    return f'{{"environment": {json.dumps(environment)},\n"rows": [\n{rows}\n]}}\n'


if __name__ == "__main__":
    main(sys.argv[1:])
