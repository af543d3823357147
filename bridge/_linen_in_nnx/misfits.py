"""Where inputs do not fit the variables of a Linen module, or its annotations the mesh."""

# The annotations of Flax and JAX are partial.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn

from bridge._conversion import linen_leaves
from bridge._conversion.arrays import Arrays
from bridge._conversion.linen_attributes import HeldVariable
from bridge._conversion.matching import compare, inputs_text
from bridge._conversion.neutral import Address
from bridge._errors import MismatchError
from bridge._sharding import explicit_axes


def shapes(
    module: nn.Module,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """The abstract variables that these inputs would create, None if they do not fit."""
    given = Arrays((args, kwargs))

    def run(*values: object) -> Any:
        args, kwargs = given.tree(list(values))

        def bound(module: nn.Module) -> Any:
            return function(module, *args, **kwargs)

        # Passed on by Linen's `init`, an argument could not be called `rngs` or `self`.
        return module.init(jax.random.key(0), method=bound)

    try:
        with jax.sharding.use_abstract_mesh(explicit_axes.NO_MESH):
            return jax.eval_shape(run, *given.avals)
    except Exception:
        # The inputs do not fit the module; Flax's own error says why.
        return None


def mismatch(
    module: nn.Module,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    held: Mapping[Address, HeldVariable],
    where: str,
) -> MismatchError | None:
    """Every difference between the variables and what these inputs would create."""
    wanted = shapes(module, function, args, kwargs)
    if wanted is None:
        return None
    expected = {a: leaf.value for a, leaf in linen_leaves.from_variables(wanted).items()}
    comparison = compare(expected, {a: entry.leaf.value for a, entry in held.items()})
    if comparison.fits:
        return None
    return comparison.error(f"{where} called with {inputs_text(args)}")
