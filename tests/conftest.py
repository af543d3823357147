import os

import jax
import pytest
from flax.nnx import variablelib


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Leaves out the search for docstring examples, a fifth of the time that collecting takes.

    The modules of tests have none.
    """
    found = yield
    return [each for each in found if type(each) is pytest.Module]


@pytest.fixture(autouse=True, scope="session")
def _options_of_this_run_alone():
    """Keeps this run's options from the pytest of a project that a test starts."""
    # Not while this file is imported: the processes of pytest-xdist read them as well.
    os.environ.pop("PYTEST_ADDOPTS", None)


# Of the module's scope, because hypothesis runs many examples under one fixture of a function's
# scope. Strict dtype promotion cannot be had likewise: optax.adam fails under it, because it mixes
# Python floats with an int32 count.
@pytest.fixture(autouse=True, scope="module")
def _no_silent_broadcasting():
    """Makes comparing arrays of different rank an error: a test must not pass by broadcasting."""
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True)
def _no_types_that_flax_made():
    """Forgets the types that `flax.nnx.bridge` made: a later test would be given them."""
    before = set(variablelib.VariableTypeCache)
    yield
    for name in set(variablelib.VariableTypeCache) - before:
        if variablelib.VariableTypeCache[name].__module__ == variablelib.__name__:
            del variablelib.VariableTypeCache[name]
