"""What a piece of code uses from outside."""

import gc
import weakref

import pytest

from bridge._equality.code_names import IS_FOUNDATION, uses

FACTOR = 2
SEEN = []
TABLE = {}


def scaled(x):
    return x * FACTOR


def noting(x):
    SEEN.append(x)
    return x


def reading(x):
    return x + len(SEEN)


def importing():
    import json
    from xml.etree import ElementTree

    return json, ElementTree


def nested():
    def inner(x):
        return x * FACTOR

    return inner


def attribute(x):
    return x.FACTOR


def of(function):
    return uses(function.__code__)


def test_globals_are_named():
    assert of(scaled).global_names == ("FACTOR",)
    assert "FACTOR" in of(scaled).names


def test_code_inside_of_code_counts():
    assert of(nested).global_names == ("FACTOR",)


def test_an_attribute_is_a_name_and_no_global():
    assert of(attribute).global_names == ()
    assert "FACTOR" in of(attribute).names


def test_modules_that_are_imported_when_the_code_runs_are_named():
    assert of(importing).imports == ("json", "xml.etree")
    assert of(scaled).imports == ()


def test_a_list_that_is_only_appended_to_is_not_read():
    assert not of(noting).reads("SEEN", SEEN)
    assert of(reading).reads("SEEN", SEEN)
    # Another type may do anything in a method of this name.
    assert of(noting).reads("SEEN", object())
    assert of(noting).reads("SEEN", TABLE)


def test_a_cell_that_is_only_appended_to_is_not_read():
    seen = []

    def notes(x):
        seen.append(x)

    def looks():
        return seen[0]

    assert not of(notes).reads("seen", seen)
    assert of(looks).reads("seen", seen)


def test_what_was_found_is_kept_while_the_code_exists_and_does_not_keep_it():
    namespace = {}
    exec("def made(): return FACTOR", namespace)
    code = namespace["made"].__code__
    assert uses(code) is uses(code)
    ref = weakref.ref(code)
    del code, namespace
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("jax.numpy", True),
        ("flax", True),
        ("bridge._equality", True),
        ("registry", True),
        ("json.decoder", True),
        ("hypothesis", True),
        ("__main__", False),
        ("tests.models", False),
        ("no_such_module", False),
        (None, False),
    ],
)
def test_python_and_installed_packages_are_taken_as_they_are(module, expected):
    assert IS_FOUNDATION[module] is expected
