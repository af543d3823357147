"""One comparison of a Linen model and a new one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import linen as nn
from flax import nnx

from bridge import parity

from ._entries import Entry
from ._plans import Program
from ._same_program import is_same_program


@dataclasses.dataclass(frozen=True)
class Checker:
    """One pair of models under comparison."""

    linen: Any
    model: Any
    rules: Mapping[str, str]
    entry: Entry
    axes: Mapping[str, int]
    keys: Mapping[str, Any] | None

    def check(self, inputs: Any, kwargs: Mapping[str, Any], **options: Any) -> parity.Report:
        """A report; NNX models are compared without the shardings that a mesh would give."""
        with nnx.use_eager_sharding(False):
            return parity.check(
                self.linen,
                self.model,
                *inputs,
                rules=self.rules,
                kwargs=kwargs,
                method=self.entry.method,
                axis_sizes=self.axes,
                rngs=self.keys,
                **options,
            )

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

    def is_same(self, inputs: Any, kwargs: Mapping[str, Any], *, state: bool = False) -> bool:
        """Whether both models are one program, so that their numbers need no comparison."""
        if self.axes:
            return False
        with nnx.use_eager_sharding(False):
            return is_same_program(
                self.linen,
                self.model,
                inputs,
                kwargs,
                method=self.entry.method,
                keys=self.keys,
                state=state,
            )


def named_axes(program: Program) -> dict[str, int]:
    """The named axes that layers reduce over, each with a single member."""
    found = [m.made.get("axis_name") for m in program.records.makings if m.kind == "module"]
    return {name: 1 for name in found if isinstance(name, str)}


def draws(program: Program) -> bool:
    """Whether a model draws keys when it is in training."""
    for making in program.records.makings:
        if (
            making.kind == "make_rng"
            or (making.cls is nn.Dropout and making.made.get("rate"))
            or (
                making.cls is not None
                and making.kind == "module"
                and making.made.get("dropout_rate")
            )
        ):
            return True
    return False
