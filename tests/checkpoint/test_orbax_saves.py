"""Threads save at once, to paths of their own and to one path."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

import bridge

THREADS = 8


def saved_by_threads(path_of):
    """What each thread saved, the path, and the errors that were raised."""
    trees = [
        {"params": {f"w{i}": jnp.full((16, 16), 10 * number + i) for i in range(4)}}
        for number in range(THREADS)
    ]
    errors = []
    barrier = threading.Barrier(THREADS)

    def save(number):
        barrier.wait()
        try:
            bridge.checkpoint.save(path_of(number), trees[number], overwrite=True)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return trees, errors


def same(a, b):
    return all(np.array_equal(a["params"][name], b["params"][name]) for name in a["params"])


@pytest.mark.parametrize("folder", ["", "new/folder"])
def test_threads_save_to_paths_of_their_own_at_once(tmp_path, folder):
    paths = [tmp_path / folder / f"model{number}" for number in range(THREADS)]

    trees, errors = saved_by_threads(paths.__getitem__)

    assert errors == []
    for tree, path in zip(trees, paths, strict=True):
        assert same(tree, bridge.checkpoint.restore(path, verify=True))
    assert sorted(p.name for p in paths[0].parent.iterdir()) == sorted(p.name for p in paths)


def test_threads_save_to_one_path_and_one_of_them_is_last(tmp_path):
    trees, errors = saved_by_threads(lambda number: tmp_path / "model")

    assert errors == []
    restored = bridge.checkpoint.restore(tmp_path / "model", verify=True)
    assert any(same(tree, restored) for tree in trees)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
