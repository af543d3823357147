"""Registrations are checked; errors have fields; two classes of one name may be the same."""

import pytest
from flax import nnx
from flax.core import meta

import registry
from registry import _registry


class Own(nnx.Variable):
    pass


def defined_again():
    class Local(nnx.Variable):
        pass

    return Local


@pytest.mark.parametrize(
    ("check", "found", "expected"),
    [
        (_registry.check_name, "", "a collection name, that is a non-empty string"),
        (_registry.check_name, 3, "a collection name, that is a non-empty string"),
        (
            _registry.check_type,
            meta.Partitioned,
            "a Variable type, that is a subclass of flax.nnx.Variable",
        ),
        (_registry.check_box_type, Own, "a subclass of flax.core.meta.AxisMetadata"),
        (_registry.check_box_type, "box", "a subclass of flax.core.meta.AxisMetadata"),
    ],
)
def test_a_refusal_holds_what_was_found_and_what_was_expected(check, found, expected):
    with pytest.raises(registry.InvalidRegistrationError) as caught:
        check(found)
    assert caught.value.found is found
    assert caught.value.expected == expected
    kind = type(found)
    assert f"found {found!r} of type {kind.__module__}.{kind.__qualname__}" in str(caught.value)


def test_a_type_that_is_taken_says_by_which_collection_and_what_to_do():
    error = _registry.type_is_taken("mine", Own, "theirs")
    assert (error.name, error.typ, error.found) == ("mine", Own, "theirs")
    assert str(error) == (
        f"cannot pair collection 'mine' with Variable type {__name__}.Own: the type already belongs"
        " to collection 'theirs'; register a subclass of it, or pass overwrite=True to replace that"
        " pair"
    )


def test_a_definition_that_ran_twice_is_one():
    assert defined_again() is not defined_again()
    assert _registry.same_definition(defined_again(), defined_again())
    assert not _registry.same_definition(defined_again(), Own)


@pytest.mark.parametrize("name", ["params", "batch_stats", "intermediates", "no such collection"])
def test_flax_s_table_is_read_as_flax_has_it(name):
    typ = _registry.flax_type(name)
    try:
        expected = nnx.variable_type_from_name(name)
    except ValueError:
        expected = None
    assert typ is expected
    assert typ is None or _registry.flax_name(typ) == name


def test_a_class_of_flax_s_own_is_found_by_its_name():
    assert _registry.flax_class("RngKey") is nnx.RngKey
    assert _registry.flax_class("Linear") is None
    # Another name for a class is no class of its own.
    assert _registry.flax_class("VariableState") is not nnx.Variable
