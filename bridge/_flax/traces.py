"""Programs of which only a part can be run: an axis is not bound, or an input is abstract."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import api_util
from jax.extend import linear_util
from jax.interpreters import partial_eval
from jax.tree_util import keystr

from bridge._errors import AbstractInputError

from .promises import required

_UNBOUND = re.compile(r"unbound axis name:? *'?([^\s'.]+)")


def unbound_axis(error: NameError) -> str | None:
    """The axis that JAX says is not bound, None for another error.

    JAX tells which axes are bound, and not which a program asks for before it runs. Its message is
    all that there is: the error has no field, and the name may be a literal in the model's code. If
    JAX words it otherwise, the caller passes JAX's own error on.
    """
    found = _UNBOUND.search(str(error))
    return found[1] if found else None


def _evaluates_partially() -> bool:
    """What no input reaches is computed; what one reaches is known by its aval."""
    abstract = jax.ShapeDtypeStruct((2,), np.float32)
    known, unknown = _evaluated(lambda x: [np.arange(1, 4), jax.lax.neg(x)], abstract)[0]
    return np.array_equal(known.get_known(), [1, 2, 3]) and not unknown.is_known()


def _evaluated(
    function: Callable[..., Any], *inputs: jax.ShapeDtypeStruct
) -> tuple[list[Any], Any]:
    """The leaves of the output as partial values, and their tree."""
    trees: list[Any] = []

    def run(*inputs: object) -> list[Any]:
        leaves, tree = jax.tree.flatten(function(*inputs))
        trees.append(tree)
        return leaves

    debug_info = api_util.debug_info("partially_evaluate", function, inputs, {})
    wrapped = linear_util.wrap_init(run, debug_info=debug_info)
    unknown = [
        partial_eval.PartialVal.unknown(api_util.shaped_abstractify(aval)) for aval in inputs
    ]
    _, values, _ = partial_eval.trace_to_jaxpr_nounits(wrapped, unknown)
    return values, trees[-1]


@required("jax.interpreters.partial_eval.trace_to_jaxpr_nounits", _evaluates_partially)
def partially_evaluate(function: Callable[..., Any], *inputs: jax.ShapeDtypeStruct) -> Any:
    """Runs only what does not depend on the abstract inputs.

    Linen's `lazy_init` did so too, up to Flax 0.12.8. Since then it runs everything, with zeros for
    the abstract inputs, also where a variable depends on their values.

    Raises:
      AbstractInputError: a part of the output depends on an input.
    """
    values, tree = _evaluated(function, *inputs)
    if all(value.is_known() for value in values):
        return tree.unflatten([value.get_known() for value in values])
    variables = jax.tree_util.tree_leaves_with_path(
        tree.unflatten(values),
        is_leaf=lambda x: isinstance(x, nnx.Variable | partial_eval.PartialVal),
    )
    raise AbstractInputError(
        keystr(path, simple=True, separator="/")
        for path, variable in variables
        if not all(value.is_known() for value in jax.tree.leaves(variable, is_leaf=_is_partial))
    )


def _is_partial(value: object) -> bool:
    return isinstance(value, partial_eval.PartialVal)
