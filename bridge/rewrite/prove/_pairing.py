"""A Linen model and the new one, with the same random weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.linen import partitioning

from bridge import port, wrappers
from bridge._conversion.collections import OUTPUTS
from bridge._conversion.neutral import nest, walk
from bridge.rewrite.observe._entries import Entry
from bridge.rewrite.observe._records import Instance
from bridge.rewrite.observe._steps import step
from bridge.rewrite.plan._plans import Program

from ._build import Maker
from ._compare import Checker, named_axes, tolerances
from ._draws import draws, streams, with_same_keys
from ._paths import rules_of
from ._proven import ProofError
from ._weights import random_variables


class NoNumbersError(Exception):
    """The Linen model returns NaN or infinity, whatever it is given."""


def pair(program: Program, maker: Maker, run: int, entry: Entry, inputs: Any) -> Checker:
    """Both models of a run.

    Raises ProofError if the weights do not fit.
    """
    root = program.records.instances[(run, ())]
    model = made(maker, root)
    rules = rules_of(program, run, model)
    variables = with_axes(without_sown(random_variables(program.records.variables[run])))
    if is_mixed(model):
        cut = program.records.steps.get(run)
        # NNX's attention has its cache by then, and takes single steps.
        given = (inputs, entry.kwargs) if cut is None else step(inputs, entry.kwargs, cut)
        try:
            _create(model, entry.method, *given)
        except jax.errors.UnexpectedTracerError:
            # What the constructor computed is in a layer that stays Linen, as in its initializer.
            with nnx.use_eager_sharding(False):
                model = maker.make(root, nnx.Rngs(0))
            _create(model, entry.method, *given)
    plan = port.plan(variables, model, rules)
    if not plan.ok:
        first, more = plan.problems[0], len(plan.problems) - 1
        text = f"the weights do not fit the new model: {first}"
        raise ProofError(f"{text} (and {more} more)" if more else text, _linen_paths(plan))
    plan.apply()
    with_same_keys(model)
    linen = (entry.make(), variables)
    keys = streams(program) if draws(program) else None
    return Checker(linen, model, rules, entry, named_axes(program), keys, tolerances(program, run))


def _create(model: Any, method: str | None, inputs: Any, kwargs: Mapping[str, Any]) -> None:
    """Creates the variables of what stays Linen in a model."""
    with warnings.catch_warnings():
        # What is sown while variables are created is thrown away.
        warnings.simplefilter("ignore", DeprecationWarning)
        wrappers.lazy_init(getattr(model, method) if method else model, *inputs, **kwargs)
    nnx.pop(model, nnx.Intermediate)


def made(maker: Maker, root: Instance) -> Any:
    """The new model, with zeros for the values that the Linen model's will replace.

    No initialiser runs, of which each shape would be compiled, unless the model holds arrays
    that are no Variables: their values are the program's, and nothing replaces them.
    """
    # Without a mesh NNX raises where it would shard an annotated value eagerly.
    with nnx.use_eager_sharding(False):
        model = nnx.eval_shape(lambda: maker.make(root, nnx.Rngs(0)))
        graphdef, variables, arrays = nnx.split(model, nnx.Variable, ...)
        if jax.tree.leaves(arrays) or maker.program.records.arrays:
            model = maker.make(root, nnx.Rngs(0))
            graphdef, variables, arrays = nnx.split(model, nnx.Variable, ...)

    def value(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), leaf.shape)
        return jax.device_put(np.zeros(leaf.shape, leaf.dtype))

    return nnx.merge(graphdef, jax.tree.map(value, variables), arrays)


def _linen_paths(plan: port.Plan) -> list[tuple[str, ...]]:
    """The Linen sides of a plan's problems; a rule's is a regular expression without groups."""
    found = []
    for entry in plan.problems:
        for text in (*entry.source, *entry.target):
            parts = [part for part in text.split("/") if not any(c in part for c in "(\\.")]
            found.append(tuple(parts[1:] if parts[:1] in (["params"], ["batch_stats"]) else parts))
    return sorted(found, key=len, reverse=True)


def is_mixed(model: Any) -> bool:
    """Whether something in a model stays Linen."""
    return any(isinstance(node, wrappers.ToNNX) for _, node in nnx.iter_graph(model))


def without_sown(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Variables without what a call leaves in them."""
    return {k: v for k, v in variables.items() if k not in OUTPUTS}


def with_axes(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Variables whose parameters have the names of their axes in boxes.

    `param_with_axes` puts the names into a collection of their own, which is `params_axes`.
    """
    flat = dict(walk(variables))
    for (collection, *path), leaf in walk(variables):
        if isinstance(leaf, partitioning.AxisMetadata):
            names: Any = leaf.names
            place = (collection.removesuffix("_axes"), *path[:-1], path[-1].removesuffix("_axes"))
            del flat[(collection, *path)]
            flat[place] = nn.Partitioned(flat[place], tuple(names))
    return nest(flat)
