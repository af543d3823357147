"""Runs programs with flax.nnx.bridge and with this package, to compare what they do."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx
from flax.core import meta
from flax.nnx import bridge as peer
from flax.nnx import variablelib

import bridge


def rejects(call, *words):
    """Asserts that a call raises an error whose text has all these words."""
    text = None
    try:
        call()
    except Exception as error:
        text = str(error)
    assert text is not None, "nothing was raised"
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in the error: {text}"


class Defect(NamedTuple):
    """What flax.nnx.bridge does wrong; `scripts/peer_defects.py` says whether it still does.

    Attributes:
      check: a function of the bridge module that raises if it has the defect.
      raises: what is raised with flax.nnx.bridge.
      says: words of that error.
      apart: whether the failure leaves Flax itself patched, so that nothing can run after it.
    """

    check: Callable[[Any], None]
    raises: type[Exception]
    says: str = ""
    apart: bool = False


def free_of(defects):
    """The test of a file of defects: this package has none of them."""

    @pytest.mark.parametrize("defect", defects.values(), ids=defects)
    def is_free(defect):
        defect.check(bridge)

    return is_free


@contextlib.contextmanager
def without_traces():
    """Keeps what flax.nnx.bridge does to Flax, and warns of, out of what runs afterwards."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # It registers what it meets for good.
        patch.setattr(variablelib, "VariableTypeCache", dict(variablelib.VariableTypeCache))
        warnings.simplefilter("ignore")
        yield


def on_both(program):
    """What a program returns with flax.nnx.bridge and with this package, in this order."""
    with without_traces():
        theirs = program(peer)
    with warnings.catch_warnings():
        # That an update is dropped goes without saying in flax.nnx.bridge.
        warnings.simplefilter("ignore", bridge.BridgeWarning)
        return theirs, program(bridge)


def described(tree):
    """A State, a module or Linen variables as ordered [(path, type name, metadata, leaf)].

    RNG counters are left out: flax.nnx.bridge advances them in calls that draw nothing.
    """
    if isinstance(tree, nnx.Pytree):
        tree = nnx.state(tree)
    if isinstance(tree, nnx.State):
        leaves = nnx.to_flat_state(tree)
    else:
        leaves = [
            (tuple(key.key for key in path), leaf)
            for path, leaf in jax.tree_util.tree_flatten_with_path(
                {c: v for c, v in tree.items() if c not in ("nnx", "RngKey", "RngCount")},
                is_leaf=lambda leaf: isinstance(leaf, meta.AxisMetadata),
            )[0]
        ]
    return [
        (path, type(leaf).__name__, _metadata(leaf), _value(leaf))
        for path, leaf in leaves
        if not isinstance(leaf, nnx.RngCount)
    ]


def _metadata(leaf):
    """Metadata in plain values, without what says only how a Variable was made."""
    if isinstance(leaf, nnx.Variable):
        found = leaf.get_metadata()
    elif isinstance(leaf, meta.AxisMetadata):
        found = {k: v for k, v in vars(leaf).items() if k not in ("value", "metadata")}
        found.update(getattr(leaf, "metadata", {}))
    else:
        return ""
    plain = {k: v for k, v in found.items() if k not in nnx.Variable.required_metadata}
    return str(sorted((k, getattr(v, "__name__", v)) for k, v in plain.items()))


def _value(leaf):
    if isinstance(leaf, nnx.Variable):
        leaf = leaf.get_value()
    elif isinstance(leaf, meta.AxisMetadata):
        leaf = leaf.unbox()
    return jax.tree.map(_data, leaf)


def _data(array):
    if isinstance(array, jax.ShapeDtypeStruct):
        return str(array)
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)
