"""Shows what the sharded initialisation of a decoder compiles to, without executing it."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from typing import Any

import jax

# Until there is a public way to lower an initialisation without running it.
from bridge._sharding.sharded_program import ShardedProgram

from .scale_models import FORMS, RULES, Shape

_WIDTHS = {"pred": 1, "bf16": 2, "f16": 2}
_ARRAY = re.compile(r"\b(pred|bf16|[fsu]\d+)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One initialisation. Bytes are those of one device, None where nothing was compiled.

    Attributes:
      form: the model's form.
      depth: its layers.
      parameters: the numbers in its weights.
      devices: the devices of the mesh.
      is_abstract: whether the mesh is abstract.
      largest_weight: bytes of the largest stacked weight, whole.
      lower_seconds: for shapes, shardings, trace and StableHLO.
      compile_seconds: from StableHLO to an executable.
      operations: operations of the StableHLO.
      instructions: instructions of the optimised HLO.
      arguments: bytes of the arguments.
      outputs: bytes of the results.
      temporaries: bytes of everything else that is alive at once.
      largest: bytes of the largest buffer in the optimised HLO.
      largest_shape: its shape.
    """

    form: str
    depth: int
    parameters: int
    devices: int
    is_abstract: bool
    largest_weight: int
    lower_seconds: float
    operations: int
    compile_seconds: float | None = None
    instructions: int | None = None
    arguments: int | None = None
    outputs: int | None = None
    temporaries: int | None = None
    largest: int | None = None
    largest_shape: str | None = None


def compiled(form: str, shape: Shape, mesh: Any) -> Compiled:
    """Lowers an initialisation for a mesh, and compiles it unless the mesh is abstract.

    Args:
      form: one of `FORMS`.
      shape: the decoder's sizes.
      mesh: a `Mesh` or `AbstractMesh` with the axes `AXES`.
    """
    build, inputs = FORMS[form](shape)
    key = jax.random.key(0)
    start = time.perf_counter()
    lowered = ShardedProgram(build, mesh, inputs, {}, RULES, key, None).lower()
    lower_seconds = time.perf_counter() - start
    is_abstract = isinstance(mesh, jax.sharding.AbstractMesh)
    weights = [rows * columns for rows, columns, _ in shape.weights.values()]
    found = Compiled(
        form,
        shape.depth,
        shape.parameters,
        mesh.size,
        is_abstract,
        4 * max(shape.depth * max(weights), shape.vocabulary * shape.width),
        lower_seconds,
        sum(" = " in line for line in lowered.as_text().splitlines()),
    )
    if is_abstract:
        return found
    start = time.perf_counter()
    executable = lowered.compile()
    compile_seconds = time.perf_counter() - start
    text = executable.as_text()
    memory = executable.memory_analysis()
    largest, largest_shape = largest_buffer(text)
    return dataclasses.replace(
        found,
        compile_seconds=compile_seconds,
        instructions=sum(" = " in line for line in text.splitlines()),
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        largest=largest,
        largest_shape=largest_shape,
    )


def largest_buffer(text: str) -> tuple[int, str]:
    """The bytes and the shape of the largest array that an optimised HLO module makes.

    What is inside a fusion has no buffer of its own.
    """
    fused = set(re.findall(r" fusion\(.*calls=%?([\w.-]+)", text))
    found = (0, "")
    inside = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            inside = header[1]
        elif " = " in line and inside not in fused:
            made = line.split(" = ", 1)[1]
            # A tuple's shapes are in parentheses, and the first word is a lone array's.
            shapes = made[: made.index(")")] if made.startswith("(") else made.split(" ", 1)[0]
            found = max(found, *map(_size, _ARRAY.findall(shapes)), (0, ""))
    return found


def _size(array: tuple[str, str]) -> tuple[int, str]:
    dtype, sizes = array
    width = _WIDTHS.get(dtype) or int(dtype[1:]) // 8
    return width * math.prod(int(size) for size in sizes.split(",") if size), f"{dtype}[{sizes}]"
