"""The errors of a registry: what they are, what they say, and what a program can read from them."""

import copy
import pickle

import pytest
from flax import nnx
from flax.core import meta

import bridge
import registry


class Twin(nnx.Variable):
    pass


CASES = (
    (registry.RegistrationConflictError("twins", Twin, nnx.Param, "do this"), ValueError),
    (registry.InvalidRegistrationError(3, "a collection name"), TypeError),
    (registry.UnknownNameError("parms", "register it"), KeyError),
    (registry.UnsupportedBoxError(meta.Partitioned, "it is too heavy"), TypeError),
)
KINDS = [type(error).__name__ for error, _ in CASES]


@pytest.mark.parametrize(("error", "builtin"), CASES, ids=KINDS)
def test_an_error_is_a_bridge_error_and_what_a_user_would_catch(error, builtin):
    assert isinstance(error, builtin)
    assert isinstance(error, ValueError)
    assert isinstance(error, registry.RegistryError)
    assert isinstance(error, registry.BridgeError)


def test_both_packages_have_one_root():
    assert bridge.BridgeError is registry.BridgeError
    assert issubclass(registry.RegistryError, bridge.BridgeError)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CASES[0][0], ["'twins'", f"{__name__}.Twin", "do this"]),
        (CASES[1][0], ["a collection name", "3", "int"]),
        (CASES[2][0], ["'parms'", "register it"]),
        (registry.UnknownNameError(Twin, "register it"), [f"{__name__}.Twin", "register it"]),
        (CASES[3][0], ["Partitioned", "it is too heavy", "register_box(Partitioned"]),
    ],
)
def test_a_message_says_what_was_found_and_what_to_do(error, said):
    for part in said:
        assert part in str(error)


@pytest.mark.parametrize(("error", "builtin"), CASES, ids=KINDS)
def test_a_message_is_printed_as_it_is(error, builtin):
    # A KeyError prints the repr of its argument unless told otherwise.
    assert str(error) == error.args[0]


def test_fields_can_be_read_from_an_error():
    conflict, invalid, unknown, unsupported = (error for error, _ in CASES)
    assert (conflict.name, conflict.typ, conflict.found) == ("twins", Twin, nnx.Param)
    assert (invalid.found, invalid.expected) == (3, "a collection name")
    assert unknown.wanted == "parms"
    assert unsupported.box_type is meta.Partitioned


@pytest.mark.parametrize("copied", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
@pytest.mark.parametrize(("error", "builtin"), CASES, ids=KINDS)
def test_an_error_can_cross_to_another_process(error, builtin, copied):
    # multiprocessing and concurrent.futures pickle what a worker raises.
    again = copied(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_what_was_expected_can_be_read_from_an_error():
    error = registry.InvalidRegistrationError(3, "a collection name")
    assert (error.found, error.expected) == (3, "a collection name")
