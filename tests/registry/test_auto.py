"""Variable types made on demand: one object each, which a fresh process can find again."""

import copy
import importlib
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import bridge
import registry
from registry import auto
from tests.strategies import exact

ROOT = Path(__file__).parents[2]
# What is no Python identifier, what pickle or a quoting might take apart, and what the module has.
NAMES = (
    "tests_counter",
    "a.b",
    ".",
    "a/b",
    "two words",
    "per%cent",
    "%2E",
    "größe",
    "class",
    "None",
    "3",
    "",
    "<locals>",
    "~-_",
    "nnx",
    "Any",
    "threading",
    "for_collection",
    "collection_of",
    "_types",
    "_lock",
    "__init__",
    "__doc__",
    "__private__",
    "pytest_plugins",
    "pytestmark",
)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@pytest.mark.parametrize("name", NAMES)
def test_an_unregistered_collection_gets_one_type_of_its_own_name(name):
    typ = registry.variable_type_from_name(name, create=True)
    assert typ is registry.variable_type_from_name(name, create=True)
    assert typ is auto.for_collection(name)
    assert typ.__name__ == name
    assert typ.__bases__ == (nnx.Variable,)
    assert registry.variable_name_from_type(typ, create=True) == name


def test_an_automatic_type_is_an_attribute_of_the_module():
    assert auto.tests_attribute is registry.variable_type_from_name("tests_attribute", create=True)
    assert registry.auto.tests_attribute is auto.tests_attribute
    assert importlib.import_module("registry.auto").tests_attribute is auto.tests_attribute


def test_different_collections_have_different_types():
    assert len({auto.for_collection(name) for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize(
    "probe", ["__path__", "__wrapped__", "__all__", "__file_not__", "pytest_plugins", "pytestmark"]
)
def test_names_that_the_import_system_and_pytest_probe_make_no_type(probe):
    with pytest.raises(AttributeError, match=f"'registry.auto' has no attribute '{probe}'"):
        getattr(auto, probe)


def test_a_type_of_another_module_is_not_automatic():
    impostor = type("tests_counter", (nnx.Variable,), {})
    assert auto.collection_of(auto.tests_counter) == "tests_counter"
    assert auto.collection_of(impostor) is None
    assert auto.collection_of(nnx.Param) is None


@given(texts)
def test_an_automatic_type_pickles_whatever_its_name(name):
    typ = auto.for_collection(name)
    assert pickle.loads(pickle.dumps(typ)) is typ


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
@pytest.mark.parametrize("name", NAMES)
def test_an_automatic_type_pickles_as_itself(name, pickler):
    typ = auto.for_collection(name)
    assert pickle.loads(pickler.dumps(typ)) is typ
    assert copy.deepcopy(typ) is typ


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_automatic_type_pickles_in_every_protocol(protocol):
    typ = auto.for_collection("a.b/c d")
    assert pickle.loads(pickle.dumps(typ, protocol)) is typ


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("tests_counter", "tests_counter"),
        ("a.b", "a%2Eb"),
        ("a/b", "a%2Fb"),
        ("größe", "gr%C3%B6%C3%9Fe"),
        ("Any", "%41ny"),
        ("__init__", "%5F_init__"),
        ("pytestmark", "%70ytestmark"),
    ],
)
def test_a_type_has_the_name_that_it_has_in_pickles_of_earlier_versions(name, written):
    assert auto.for_collection(name).__qualname__ == written
    assert getattr(auto, written) is auto.for_collection(name)


IN_A_FRESH_PROCESS = """
import pickle, sys
with open(sys.argv[1], 'rb') as file:
  names, types, state = pickle.load(file)
import bridge, registry
from flax import nnx
assert [typ.__name__ for typ in types] == names, types
assert all(issubclass(typ, nnx.Variable) for typ in types)
assert [registry.variable_name_from_type(typ, create=True) for typ in types] == names
assert [registry.variable_type_from_name(name, create=True) for name in names] == types
variables = bridge.nnx_to_linen(state)
assert sorted(variables) == sorted(names), variables
assert [variables[name]['w'][str(i)].tolist() for i, name in enumerate(names)] == [
  [i, i] for i in range(len(names))
]
assert set(names) <= set(nnx.variablelib.VariableTypeCache)
print('unpickled')
"""


def test_a_state_with_automatic_types_unpickles_in_a_fresh_process(tmp_path):
    # The collection `nnx` is static and does not cross.
    names = [name for name in NAMES if name not in ("", "nnx")]
    variables = {name: {"w": {str(i): np.full(2, i, np.float32)}} for i, name in enumerate(names)}
    state = bridge.linen_to_nnx(variables)
    file = tmp_path / "state.pkl"
    file.write_bytes(pickle.dumps((names, [auto.for_collection(n) for n in names], state)))
    ran = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS, str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == "unpickled\n", ran.stderr


def test_a_state_with_automatic_types_pickles_without_loss():
    state = bridge.linen_to_nnx({"tests_counter": {"n": np.arange(3)}, "a.b/c d": {"x": (1, 2)}})
    assert exact(pickle.loads(pickle.dumps(state))) == exact(state)


def test_threads_get_one_type_for_one_name():
    with ThreadPoolExecutor(16) as pool:
        types = list(pool.map(auto.for_collection, ["tests_threads"] * 256))
    assert len(set(types)) == 1
