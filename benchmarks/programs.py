"""Counts a program instead of timing it: equations, instructions, calls, live bytes."""

from __future__ import annotations

import collections
import gc
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

# `  ROOT %add.3 = f32[4,64]{1,0} add(…)`, a tuple's shape being in parentheses.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (\([^=]*?\)|\S+) ([\w-]+)\(", re.MULTILINE)


def equations(function: Callable[..., Any], *args: Any) -> int:
    """The equations of a function's jaxpr, those of the jaxprs inside it included."""
    return sum(1 for _ in _equations(jax.make_jaxpr(function)(*args).jaxpr))


def primitives(function: Callable[..., Any], *args: Any) -> collections.Counter[str]:
    """How often each primitive is in a function's jaxpr."""
    found = _equations(jax.make_jaxpr(function)(*args).jaxpr)
    return collections.Counter(equation.primitive.name for equation in found)


def instructions(function: Callable[..., Any], *args: Any) -> collections.Counter[str]:
    """How often each instruction, with its shape, is in a function's optimised HLO."""
    return counted(jax.jit(function).lower(*args).compile().as_text() or "")


def counted(text: str) -> collections.Counter[str]:
    """How often each instruction, with its shape, is in an optimised HLO module."""
    return collections.Counter(f"{op} {shape}" for shape, op in _INSTRUCTION.findall(text))


def nameless(text: str) -> str:
    """An optimised HLO module without what tells where in the source its instructions are from."""
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    text = re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "\n", text)
    return re.sub(r"^HloModule [^,]*", "HloModule", text)


def entry_instructions(text: str) -> int:
    """How many instructions an optimised HLO module runs one after the other.

    Those of its entry computation, but for what only names a value; on a GPU these are the kernels.
    """
    entry = text[text.index("\nENTRY ") :]
    found = _INSTRUCTION.findall(entry[: entry.index("\n}")])
    return sum(1 for _, operation in found if operation not in _NAMES)


_NAMES = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast"})


def compiled_bytes(function: Callable[..., Any], *args: Any) -> int:
    """The most memory that the function holds once it is compiled, as `peak_bytes` says."""
    return peak_bytes(jax.jit(function).lower(*args).compile())


def peak_bytes(compiled: Any) -> int:
    """The most memory that a compiled program holds, by XLA's own analysis.

    On a GPU XLA gives no peak (JAX 0.11.2). There it is what the program is given, what it returns
    and what it needs in between, less what it returns in the place of an argument.
    """
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return memory.peak_memory_in_bytes or held - memory.alias_size_in_bytes


def python_calls(function: Callable[[], Any]) -> int:
    """How many functions of Python a call runs, the function itself included."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    _profiled(function, count)
    return calls


def peak_live_bytes(function: Callable[[], Any]) -> int:
    """The most bytes of arrays alive at any return of a Python function below this one.

    Independent of the allocator and of timing; what was alive before does not count.
    """
    gc.collect()
    before = _live_bytes()
    peak = before

    def look(frame: Any, event: str, argument: Any) -> None:
        nonlocal peak
        if event == "return":
            peak = max(peak, _live_bytes())

    result = _profiled(function, look)
    del result
    return peak - before


def _profiled(function: Callable[[], Any], look: Callable[[Any, str, Any], None]) -> Any:
    """What a function returns; `look` is shown every call and return of Python below it."""
    before = sys.getprofile()
    # A collection would free arrays, and JAX runs a function of Python at each.
    gc.disable()
    sys.setprofile(look)
    try:
        return function()
    finally:
        sys.setprofile(before)
        gc.enable()


def _live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        inner = jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: isinstance(p, _JAXPRS)
        )
        for parameter in inner:
            if isinstance(parameter, _JAXPRS):
                yield from _equations(getattr(parameter, "jaxpr", parameter))


_JAXPRS = (core.Jaxpr, core.ClosedJaxpr)
