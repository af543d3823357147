"""Finds the inputs that the result of a program depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxprs_in_params

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def live_inputs(function: Callable[[dict[str, Any]], Any], inputs: Mapping[str, Any]) -> set[str]:
    """The names of the inputs that the result of a function depends on.

    The function is traced, and not computed. An input that only reaches values which nobody uses
    does not count. Where the result holds an object that JAX cannot look into, every input counts.

    Args:
      function: takes the inputs by name, and returns a tree of arrays and plain values.
      inputs: an array by name.
    """
    opaque: list[Any] = []

    def arrays(inputs: dict[str, Any]) -> list[jax.Array]:
        leaves = jax.tree.leaves(function(inputs))
        opaque.extend(leaf for leaf in leaves if not isinstance(leaf, (jax.Array, *_PLAIN)))
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    jaxpr = jax.make_jaxpr(arrays)(dict(inputs)).jaxpr
    names = sorted(inputs)
    if opaque:
        return set(names)
    live = _live(jaxpr)
    # JAX flattens a dict in the order of its keys.
    return {name for name, var in zip(names, jaxpr.invars, strict=True) if var in live}


def _live(jaxpr: Jaxpr) -> set[Var]:
    """The variables that the outputs and the effects of a program depend on."""
    live = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    for equation in reversed(jaxpr.eqns):
        if not equation.effects and live.isdisjoint(equation.outvars):
            continue
        live.update(atom for atom in _live_operands(equation) if isinstance(atom, Var))
    return live


def _live_operands(equation: JaxprEqn) -> list[Any]:
    """The operands that an equation's outputs may depend on."""
    operands = list(equation.invars)
    programs = list(jaxprs_in_params(equation.params))
    # The first operand of a `cond` is the branch. Other equations that hold one program, such as
    # `jit`, `remat` and `scan`, hand all operands on to it.
    own = operands[:1] if equation.primitive.name == "cond" else []
    handed = operands[len(own) :]
    if not programs or any(len(program.invars) != len(handed) for program in programs):
        return operands
    if len(programs) > 1 and not own:
        return operands
    for program in programs:
        below = _live(program)
        own += [atom for atom, var in zip(handed, program.invars, strict=True) if var in below]
    return own
