"""One comparison of a Linen model and a new one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bridge import parity
from bridge.rewrite.observe._entries import Entry
from bridge.rewrite.observe._records import Shape
from bridge.rewrite.plan._plans import Program

from ._same_program import Found, compare_programs
from ._weights import inexact

_BITS = 32
# Of the largest magnitude; each layer of a deep model adds a rounding.
_LOW = 0.1


@dataclasses.dataclass(frozen=True)
class Checker:
    """One pair of models under comparison."""

    linen: Any
    model: Any
    rules: Mapping[str, str]
    entry: Entry
    axes: Mapping[str, int]
    keys: Mapping[str, Any] | None
    tolerances: Mapping[str, float]

    def check(
        self, inputs: Any, kwargs: Mapping[str, Any], *, jit: bool = False, **arguments: Any
    ) -> parity.Report:
        """A report; NNX models are compared without the shardings that a mesh would give."""
        options = parity.Options(axis_sizes=self.axes, tolerances=self.tolerances, jit=jit)
        with nnx.use_eager_sharding(False):
            return parity.check(
                self.linen,
                self.model,
                *inputs,
                rules=self.rules,
                kwargs=kwargs,
                method=self.entry.method,
                rngs=self.keys,
                options=options,
                **arguments,
            )

    def is_finite(self, inputs: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether the Linen model returns numbers alone."""
        module, variables = self.linen
        method = getattr(type(module), self.entry.method) if self.entry.method else None
        options = {"method": method, "rngs": self.keys, "mutable": list(variables)}
        output, _ = module.apply(variables, *inputs, **options, **kwargs)
        return all(np.isfinite(np.asarray(leaf)).all() for leaf in inexact(output))

    def advanced(self, inputs: Any, kwargs: Mapping[str, Any]) -> Checker:
        """The same behind one more call, which changes the state of both models."""
        module, variables = self.linen
        mutable = [name for name in variables if name != "params"]
        method = getattr(type(module), self.entry.method) if self.entry.method else None
        options = {"method": method, "rngs": self.keys, "mutable": mutable}
        _, updates = module.apply(variables, *inputs, **options, **kwargs)
        called = getattr(self.model, self.entry.method) if self.entry.method else self.model
        called(*inputs, **kwargs)
        return dataclasses.replace(self, linen=(module, {**variables, **updates}))

    def is_refused(self, inputs: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether the Linen model itself cannot be called so."""
        if self.axes:
            return False
        module, variables = self.linen
        method = getattr(type(module), self.entry.method) if self.entry.method else None
        options = {"method": method, "rngs": self.keys, "mutable": list(variables)}
        try:
            jax.eval_shape(
                lambda given: module.apply(variables, *given, **options, **kwargs), inputs
            )
        except Exception:
            return True
        return False

    def compared(self, inputs: Any, kwargs: Mapping[str, Any], *, state: bool = False) -> Found:
        """Whether both models are one program, so that their numbers need no comparison."""
        if self.axes:
            return Found(False)
        compare = functools.partial(
            compare_programs,
            self.linen,
            self.model,
            inputs,
            kwargs,
            method=self.entry.method,
            keys=self.keys,
        )
        with nnx.use_eager_sharding(False):
            found = compare(state=state)
            # A model that always updates its state cannot be called without.
            return compare(state=True) if found.same is None and not state else found


def named_axes(program: Program) -> dict[str, int]:
    """The named axes that layers reduce over, each with a single member."""
    found = [m.made.get("axis_name") for m in program.records.makings if m.kind == "module"]
    return {name: 1 for name in found if isinstance(name, str)}


def tolerances(program: Program, run: int) -> dict[str, float]:
    """Those of a run in which layers return a precision that NNX rounds to at other places."""
    outputs = [
        leaf
        for instance in program.records.instances.values()
        if instance.run == run
        for call in instance.calls
        for leaf in jax.tree.leaves(call.output)
        if isinstance(leaf, Shape) and jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    is_low = any(jnp.finfo(leaf.dtype).bits < _BITS for leaf in outputs)
    return dict.fromkeys(("float32", "bfloat16", "float16"), _LOW) if is_low else {}
