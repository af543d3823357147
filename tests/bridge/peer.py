"""Runs programs with flax.nnx.bridge and with this package, to compare what they do."""

import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from flax.core import meta
from flax.nnx import bridge as peer
from flax.nnx import variablelib

import bridge
from tests import processes

ROOT = Path(__file__).parents[2]


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


def assert_fails_on_peer(check, *, apart=False):
    """Asserts that a check fails on flax.nnx.bridge.

    Args:
      check: a function of a test module that takes the bridge module.
      apart: runs it in a process of its own, because the failure leaves Flax itself patched.
    """
    if apart:
        code = (
            f"from flax.nnx import bridge; from {check.__module__} import {check.__name__} as check"
        )
        run = processes.run_code(f"{code}; print('called'); check(bridge)", cwd=ROOT)
        assert run.stdout == "called\n", run.stderr
        assert run.returncode == 1
        return
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # The peer registers what it meets for good, and a warning is not the defect.
        patch.setattr(variablelib, "VariableTypeCache", dict(variablelib.VariableTypeCache))
        warnings.simplefilter("ignore")
        with pytest.raises((Exception, AssertionError)):
            check(peer)


def two_tests(defects, apart=None):
    """The two tests of a file of defects: this package is free of them, flax.nnx.bridge has each.

    Args:
      defects: functions of the test module by what they check; each takes the bridge module.
      apart: likewise those that need a process of their own to fail in.
    """
    apart = apart or {}
    every = {**defects, **apart}

    @pytest.mark.parametrize("check", every.values(), ids=every)
    def is_free(check):
        check(bridge)

    @pytest.mark.parametrize(
        ("check", "apart"), [(check, name in apart) for name, check in every.items()], ids=every
    )
    def is_found(check, apart):
        assert_fails_on_peer(check, apart=apart)

    return is_free, is_found


def on_both(program):
    """What a program returns with flax.nnx.bridge and with this package, in this order."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(variablelib, "VariableTypeCache", dict(variablelib.VariableTypeCache))
        warnings.simplefilter("ignore")
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
