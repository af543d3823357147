"""A bounded, thread-safe memory of results."""

import threading

import pytest

from bridge._bounded_cache import BoundedCache


def test_a_result_is_computed_once():
    calls = []
    memory = BoundedCache(maxsize=4)
    results = [memory.get("a", lambda: calls.append(1) or "result") for _ in range(3)]
    assert results == ["result"] * 3
    assert len(calls) == 1


def test_every_key_has_its_own_result():
    memory = BoundedCache(maxsize=4)
    assert [memory.get(key, lambda: key * 2) for key in (1, 2, 1)] == [2, 4, 2]  # noqa: B023


def test_none_is_a_result_too():
    calls = []
    memory = BoundedCache(maxsize=4)
    for _ in range(2):
        assert memory.get("a", lambda: calls.append(1)) is None
    assert len(calls) == 1


def test_an_unhashable_key_is_always_computed():
    calls = []
    memory = BoundedCache(maxsize=4)
    for _ in range(2):
        assert memory.get([], lambda: calls.append(1) or "result") == "result"
    assert len(calls) == 2


def test_the_least_recently_used_result_is_forgotten_first():
    calls = []
    memory = BoundedCache(maxsize=2)

    def get(key):
        return memory.get(key, lambda: calls.append(key) or key)

    for key in ("a", "b", "a", "c"):
        get(key)
    assert calls == ["a", "b", "c"]
    get("a")
    assert calls == ["a", "b", "c"]
    get("b")
    assert calls == ["a", "b", "c", "b"]


def test_an_error_is_not_remembered():
    memory = BoundedCache(maxsize=2)
    with pytest.raises(ZeroDivisionError):
        memory.get("a", lambda: 1 / 0)
    assert memory.get("a", lambda: "result") == "result"


def test_computing_may_ask_for_another_key():
    memory = BoundedCache(maxsize=4)
    assert memory.get("a", lambda: memory.get("b", lambda: 1) + 1) == 2
    assert memory.get("b", lambda: 0) == 1


def test_a_key_is_new_once():
    memory = BoundedCache(maxsize=4)
    assert [memory.is_new(key) for key in ("a", "b", "a", "b", "c")] == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_threads_that_compute_at_once_get_one_result():
    memory = BoundedCache(maxsize=4)
    both = threading.Barrier(2, timeout=10)
    found = []

    def compute():
        both.wait()
        return object()

    threads = [
        threading.Thread(target=lambda: found.append(memory.get("a", compute))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert memory.get("a", object) is found[0]
    assert found[0] is found[1]


def test_many_threads_do_not_disturb_each_other():
    memory = BoundedCache(maxsize=8)
    errors = []

    def work(offset):
        try:
            for i in range(300):
                key = (i + offset) % 20
                assert memory.get(key, lambda: key * key) == key * key  # noqa: B023
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
