"""The proof as a test that the user keeps: the new model still does what the Linen model did."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bridge._errors import shown
from bridge.rewrite._failures import RewriteError
from bridge.rewrite.observe._entries import Entry
from bridge.rewrite.plan._layers import layer_of
from bridge.rewrite.plan._plans import Program

_RANDOM = '''
def random(variables):
    """Other values than the initial ones, as zeros would hide faults."""
    numbers = np.random.default_rng(0)

    def value(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        return leaf + jnp.asarray(0.1 * numbers.normal(size=leaf.shape), leaf.dtype)

    sown = ("intermediates", "perturbations")
    return jax.tree.map(value, {k: v for k, v in variables.items() if k not in sown})

'''
_PLAIN = (bool, int, float, str, type(None))


class TestText:
    """The text of a test."""

    __test__ = False

    def __init__(self, program: Program, entry: Entry, rules: Mapping[str, str]) -> None:
        self.program, self.entry, self.rules = program, entry, rules
        self.root = program.records.instances[(0, ())]
        self.imports: set[str] = set()

    def text(self) -> str:
        """The text.

        Raises RewriteError if a field or an argument cannot be written out.
        """
        module, name = self.root.cls.__module__, self.root.cls.__name__
        plan = self.program.plans[self.root.cls]
        fields = [f for f in plan.fields if f.name in self.root.fields]
        old = [f"{f.name}={self._value(self.root.fields[f.name], new=False)}" for f in fields]
        new = [
            f"{f.name}={self._value(self.root.fields[f.name], new=True)}"
            for f in fields
            if f.name not in plan.mode_fields
        ]
        new += [f"{n}={s.values[(0, ())]!r}" for n, s in plan.sizes.items() if (0, ()) in s.values]
        name_of_new = self.program.new_modules[module]
        body = [
            f"linen = {module}.{name}({', '.join(old)})",
            f"model = {name_of_new}.{name}({', '.join([*new, 'rngs=nnx.Rngs(0)'])})",
            *self._compared(wraps=plan.wraps),
        ]
        if self.program.records.is_annotated:
            # Without a mesh NNX raises where it would shard an annotated value.
            body = ["with nnx.use_eager_sharding(False):", *(f"    {line}" for line in body)]
        return self._assembled(module, body)

    def _compared(self, *, wraps: bool) -> list[str]:
        """The lines that move weights and compare."""
        inputs = "".join(f"{self._input(value)}, " for value in self.entry.inputs).rstrip()
        given = {name: self._input(value) for name, value in self.entry.kwargs.items()}
        called = ", ".join(["*inputs", *(f"{name}={text}" for name, text in given.items())])
        pairs = ", ".join(f"{name!r}: {text}" for name, text in given.items())
        target = f"model.{self.entry.method}" if self.entry.method else "model"
        method = f", method={self.entry.method!r}" if self.entry.method else ""
        checked = f"*inputs, rules=RULES, kwargs={{{pairs}}}{method}"
        return [
            f"inputs = ({inputs})",
            "keys = {name: jax.random.key(0) for name in ('params', 'dropout')}",
            f"variables = random(linen.init(keys, {called}{method}))",
            *([f"bridge.lazy_init({target}, {called})"] if wraps else []),
            "port.plan(variables, model, RULES).apply()",
            f"report = parity.check((linen, variables), model, {checked})",
            "assert report.ok, str(report)",
        ]

    def _assembled(self, module: str, body: list[str]) -> str:
        self.imports |= {module, self.program.new_modules[module], "jax"}
        self.imports |= {"jax.numpy as jnp", "numpy as np"}
        if any("bridge." in line for line in body):
            self.imports.add("bridge")
        rules = "".join(f"    {json.dumps(k)}: {json.dumps(v)},\n" for k, v in self.rules.items())
        lines = [
            f'"""{module} and {self.program.new_modules[module]} do the same."""\n',
            *(f"import {name}" for name in sorted(self.imports)),
            "from flax import nnx\n",
            "from bridge import parity, port\n",
            f"RULES = {{\n{rules}}}\n" if rules else "RULES = {}\n",
            _RANDOM,
            "def test_the_new_model_does_what_the_linen_model_does():",
            *(f"    {line}" for line in body),
        ]
        return "\n".join(lines) + "\n"

    def _input(self, value: Any) -> str:
        if not isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            return self._value(value, new=False)
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return "jax.random.key(0)"
        shape, dtype = tuple(value.shape), jnp.dtype(value.dtype).name
        if jnp.issubdtype(value.dtype, jnp.floating):
            return f"jax.random.normal(jax.random.key(1), {shape!r}, {dtype!r})"
        return f"jnp.ones({shape!r}, {dtype!r})"

    def _value(self, value: Any, *, new: bool) -> str:
        """An expression for a value.

        Raises RewriteError if there is none.
        """

        def inner(each: Any) -> str:
            return self._value(each, new=new)

        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            items = "".join(f"{inner(each)}, " for each in value)
            return f"[{items.rstrip(', ')}]" if type(value) is list else f"({items.rstrip()})"
        if type(value) is dict:
            return "{" + ", ".join(f"{inner(k)}: {inner(v)}" for k, v in value.items()) + "}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            named = [
                f"{f.name}={inner(getattr(value, f.name))}"
                for f in dataclasses.fields(value)
                if f.init
            ]
            return f"{self._named(type(value), new=new)}({', '.join(named)})"
        return self._named(value, new=new)

    def _named(self, value: Any, *, new: bool) -> str:
        name = getattr(value, "__qualname__", getattr(value, "__name__", ""))
        if name and getattr(jnp, name, None) is value:
            return f"jnp.{name}"
        layer = layer_of(value) if isinstance(value, type) else None
        if layer is not None:
            return f"nnx.{layer.name}" if new else self._imported("flax.linen", value.__name__)
        module = getattr(value, "__module__", "") or ""
        if not name.isidentifier() or getattr(sys.modules.get(module), name, None) is not value:
            raise RewriteError(
                "the test cannot be written",
                [f"the model's fields hold {shown(value)}, which no name of a module stands for"],
                "Give it a name in a module, or write the test by hand.",
            )
        plan = self.program.plan_of(value) if isinstance(value, type) else None
        if new and plan is not None and plan.refusal is None:
            module = self.program.new_modules[module]
        return self._imported(module, name)

    def _imported(self, module: str, name: str) -> str:
        self.imports.add(module)
        return f"{module}.{name}"


def test_of(program: Program, entry: Entry, rules: Mapping[str, str]) -> Callable[[], str]:
    """What gives the text of the test when it is asked for."""
    return TestText(program, entry, rules).text
