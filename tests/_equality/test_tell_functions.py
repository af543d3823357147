"""Functions, classes and modules have one key if and only if they do the same."""

import functools
import math
import types

import jax
import pytest

from bridge._equality.contents import contents

FACTOR = [2]


def key(value, **options):
    found = contents(value, **options)
    assert found.is_complete
    return found.key


def adding(n):
    return lambda x: x + n


def with_default(n):
    return lambda x, n=n: x + n


def with_keyword_default(n):
    return lambda x, *, n=n: x + n


def with_attribute(n):
    def function(x):
        return x

    function.note = n
    return function


def bound(n):
    return Number(n).plus


def bound_to_builtin(n):
    return [n].append


def partial(n):
    return functools.partial(pow, n)


def partial_keyword(n):
    return functools.partial(pow, exp=n)


def cell_of_a_cell(n):
    return types.CellType(n)


def property_of(n):
    return property(adding(n))


def static(n):
    return staticmethod(adding(n))


def method_of_class(n):
    return classmethod(adding(n))


def module_of(n):
    module = types.ModuleType("made_here")
    module.n = n
    return [vars(module)["n"], adding(n)]


class Number:
    def __init__(self, n):
        self.n = n

    def plus(self, x):
        return self.n + x


MAKERS = [
    adding,
    with_default,
    with_keyword_default,
    with_attribute,
    bound,
    bound_to_builtin,
    partial,
    partial_keyword,
    cell_of_a_cell,
    property_of,
    static,
    method_of_class,
    module_of,
]


@pytest.mark.parametrize("make", MAKERS)
def test_two_of_one_code_are_equal_if_what_they_hold_is(make):
    assert key(make(1)) == key(make(1))
    assert key(make(1)) != key(make(2))


def test_functions_of_another_code_are_others():
    assert key(lambda x: x + 1) != key(lambda x: x - 1)
    assert key(adding(1)) != key(with_default(1))


def test_a_cell_that_is_not_set_is_told_from_one_that_holds_none():
    def later():
        return value

    before = key(later)
    value = None
    assert key(later) != before


def test_the_globals_that_a_function_reads_count():
    def reads():
        return FACTOR[0]

    before = key(reads)
    FACTOR.append(3)
    try:
        assert key(reads) != before
    finally:
        FACTOR.pop()
    assert key(reads) == before


def test_names_of_a_module_of_the_user_that_code_uses_count():
    module = types.ModuleType("tests_used_module")
    module.rate, module.other = 1, 1
    namespace = {"settings": module, "__name__": "tests_using_module"}
    exec("def reads(): return settings.rate", namespace)
    before = key(namespace["reads"])
    module.other = 2
    assert key(namespace["reads"]) == before
    module.rate = 2
    assert key(namespace["reads"]) != before


@pytest.mark.parametrize("value", [math.sin, len, jax.nn.relu, dict.get, int.__add__, (3).__add__])
def test_what_is_python_s_or_jax_s_is_itself(value):
    assert key(value) == key(value)
    assert key(value) != key(math.cos)


def test_a_compiled_function_is_told_by_itself_and_by_what_it_runs():
    def run(x):
        return x

    one, other = jax.jit(run), jax.jit(run)
    assert key(one) == key(one)
    assert key(one) != key(other)


def test_a_class_holds_what_its_attributes_hold():
    made = type("Made", (), {"rate": 1, "__module__": __name__})
    before = key(made)
    made.rate = 2
    assert key(made) != before
    made.rate = 1
    assert key(made) == before


def test_two_classes_of_one_definition_are_two():
    assert key(type("Made", (), {})) != key(type("Made", (), {}))


def test_a_module_of_the_user_is_what_it_holds_now():
    module = types.ModuleType("tests_whole_module")
    module.rate = 1
    before = key(module)
    module.rate = 2
    assert key(module) != before
    assert key(math) == key(math) != key(types)
