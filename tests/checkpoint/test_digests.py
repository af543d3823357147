"""Digests: they are those of the values, wherever these lie, and every flipped bit is found."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from bridge import checkpoint
from bridge.checkpoint import CheckpointError, _digests
from tests.checkpoint.migrating_models import mixed_model
from tests.models import snapshot
from tests.strategies import exact

# Orbax reads arrays side by side in an event loop, which it closes when the first one fails. What
# tensorstore reports of the others then finds no loop, and nobody waits for it any more.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

MASK = 2**64 - 1


def mixed(number):
    """Splitmix64, as its authors write it."""
    z = (number + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return (z ^ (z >> 31)) | 1


def weight(axis, index):
    block, within = divmod(index, 4096)
    return mixed((2 * axis << 40) + within) * mixed((2 * axis + 1 << 40) + block)


def digest_in_python(array):
    """The definition, one word after the other."""
    size = array.dtype.itemsize
    words = {1: "u1", 2: "u2", 4: "u4"}.get(size)
    if words is None:
        array, words = array.reshape(*array.shape, 1), "u4"
    array = np.ascontiguousarray(array).view(words) if array.ndim else array.reshape(1).view(words)
    total = 0
    for index, word in np.ndenumerate(array):
        factor = int(word)
        for axis, position in enumerate(index):
            factor *= weight(axis, position)
        total += factor
    return total & MASK


@pytest.mark.parametrize("dtype", [">f4", ">i2", ">c16", "<f8"])
def test_a_digest_is_that_of_the_values_in_either_byte_order(tmp_path, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    assert _digests.whole(array) == digest_in_python(array.astype(dtype[1:]))
    checkpoint.save(tmp_path / "checkpoint", {"params": {"w": array}})
    checkpoint.verify(tmp_path / "checkpoint")


@pytest.mark.parametrize("dtype", ["int8", "bool", "bfloat16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("shape", [(3,), (2, 3, 1), (4097,), (2, 9000), (1, 0)])
def test_a_digest_is_what_its_definition_says(dtype, shape):
    values = np.random.default_rng(0).integers(0, 2, shape) * 1.5
    array = values.astype(jnp.dtype(dtype))
    assert _digests.whole(array) == digest_in_python(array)


def test_a_digest_does_not_depend_on_memory_order():
    array = np.arange(24.0).reshape(4, 6)
    assert _digests.whole(np.asfortranarray(array)) == _digests.whole(array)
    assert _digests.whole(array[::2, ::-1]) == _digests.whole(array[::2, ::-1].copy())


@given(
    st.lists(st.integers(1, 9), min_size=0, max_size=3),
    st.sampled_from(["uint8", "bfloat16", "float32", "float64"]),
    st.lists(st.integers(0, 2**20), min_size=1, max_size=3, unique=True),
)
def test_flipped_bits_change_a_digest(shape, dtype, bits):
    array = np.random.default_rng(0).integers(0, 200, shape).astype(jnp.dtype(dtype))
    content = bytearray(array.tobytes())
    flipped = {bit % (8 * len(content)) for bit in bits}
    for bit in flipped:
        content[bit // 8] ^= 1 << bit % 8
    other = np.frombuffer(bytes(content), array.dtype).reshape(array.shape)
    assert _digests.whole(other) != _digests.whole(array)


def test_two_flipped_signs_and_two_exchanged_rows_change_a_digest():
    array = np.random.default_rng(0).standard_normal((50, 7))
    for i in range(1, 50):
        signs, rows = array.copy(), array.copy()
        signs[[0, i], 3] *= -1
        rows[[0, i]] = rows[[i, 0]]
        assert len({_digests.whole(a) for a in (array, signs, rows, array.T.copy())}) == 4


SPECS = [(), ("a",), (None, "b"), ("a", "b"), (("a", "b"),), (None, ("b", "a"))]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(8, 16), (16, 8200)])
def test_shards_add_up_to_the_digest_of_the_whole(spec, shape):
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    sharded = jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
    assert _digests.own_part(sharded) == digest_in_python(array)


def test_sums_of_several_processes_are_added_up_modulo_two_to_the_64(monkeypatch):
    own, other = (np.asarray(part, np.uint64) for part in ([2**63, 5], [2**63 + 7, 2**40]))
    gather = lambda words: np.stack([words, other.view(np.uint32)])  # noqa: E731
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_digests.multihost_utils, "process_allgather", gather)
    assert _digests.texts_of(own.tolist()) == [f"{total:016x}" for total in (7, 2**40 + 5)]


NOISE = jax.random.normal(jax.random.key(0), (40, 50))
VARIABLES = {
    "params": {"a": NOISE, "b": (NOISE[0], 3), "half": NOISE.astype(jnp.bfloat16), "t": "text"},
    "batch_stats": {"n": np.arange(1000), "none": jnp.zeros((0, 2))},
    "RngKey": {"key": jax.random.key(0)},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("digests") / "checkpoint"
    checkpoint.save(path, VARIABLES, extra={"step": jnp.asarray(3), "ema": [NOISE + 1]})
    return path


def test_a_sound_checkpoint_is_verified(path):
    assert checkpoint.verify(path) == 7
    assert exact(checkpoint.restore(path, verify=True)) == exact(VARIABLES)
    target = jax.tree.map(jnp.zeros_like, {"ema": [NOISE]})
    _, extra = checkpoint.restore(path, VARIABLES, extra=target, verify=True)
    assert exact(extra) == exact({"ema": [NOISE + 1]})


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("saved", [(), ("a", "b")])
def test_a_checkpoint_is_verified_on_any_mesh(tmp_path, spec, saved):
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    values = jnp.arange(8.0 * 16).reshape(8, 16)
    sharded = jax.device_put(values, NamedSharding(mesh, PartitionSpec(*saved)))
    checkpoint.save(tmp_path / "model", {"params": {"w": sharded}})
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    like = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=sharding)
    restored = checkpoint.restore(tmp_path / "model", {"params": {"w": like}}, verify=True)
    assert restored["params"]["w"].sharding == sharding
    np.testing.assert_array_equal(restored["params"]["w"], values)
    assert checkpoint.verify(tmp_path / "model") == 1


def flipped_files(path, tmp_path):
    """Copies of a checkpoint, each with one flipped bit in a file of arrays."""
    files = [p for p in path.rglob("d/*") if p.is_file() and "ocdbt.process" not in str(p)]
    files += [p for p in path.rglob("ocdbt.process_0/d/*") if p.is_file()]
    for number, file in enumerate(files):
        content = file.read_bytes()
        for part in range(6):
            place = len(content) * part // 6
            copy = tmp_path / f"{number}-{part}"
            shutil.copytree(path, copy)
            changed = bytearray(content)
            changed[place] ^= 0x10
            (copy / file.relative_to(path)).write_bytes(changed)
            yield copy


def result(act, *arguments, **options):
    """What a function returns, or its CheckpointError."""
    try:
        return act(*arguments, **options)
    except CheckpointError as error:
        return error


def test_wherever_a_bit_is_flipped_no_wrong_value_is_restored(path, tmp_path):
    expected = exact(VARIABLES)
    silent, found = 0, 0
    for copy in flipped_files(path, tmp_path):
        plain = result(checkpoint.restore, copy)
        verified = result(checkpoint.restore, copy, verify=True)
        if isinstance(verified, CheckpointError):
            assert verified.unreadable
            found += 1
            silent += not isinstance(plain, CheckpointError)
        else:
            assert exact(verified) == expected
        whole = result(checkpoint.verify, copy)
        assert whole.unreadable if isinstance(whole, CheckpointError) else whole == 7
        shutil.rmtree(copy)
    assert found
    # Without verification wrong values come back without a word.
    assert silent


def test_damage_is_named_and_the_model_stays_as_it_was(path, tmp_path, monkeypatch):
    model = mixed_model()
    checkpoint.save(tmp_path / "model", model)
    before = snapshot(model)
    own_part = _digests.own_part
    wrong = [np.full(9, 12345)]

    def damaged(value):
        # As if the first array that is read were another one.
        return own_part(wrong.pop() if wrong else value)

    monkeypatch.setattr(_digests, "own_part", damaged)
    with pytest.raises(CheckpointError, match="damage was found") as caught:
        checkpoint.restore(tmp_path / "model", model, verify=True)
    assert len(caught.value.unreadable) == 1
    assert "its digest is" in caught.value.unreadable[0][1]
    assert snapshot(model) == before


def test_only_what_is_restored_is_compared(tmp_path):
    checkpoint.save(tmp_path / "model", {"params": {"a": NOISE, "b": NOISE + 1}})
    break_digest(tmp_path / "model", ("params", "b"))
    target = {"params": {"a": jnp.zeros_like(NOISE)}}
    restored = checkpoint.restore(tmp_path / "model", target, allow_unexpected=True, verify=True)
    np.testing.assert_array_equal(restored["params"]["a"], NOISE)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path / "model", verify=True)
    assert [where for where, _ in caught.value.unreadable] == ["params/b"]


def break_digest(path, names):
    from bridge.checkpoint import _notes

    notes = path / "bridge" / "metadata"
    content = json.loads(notes.read_text())
    del content["digest"]
    (record,) = (r for r in content["items"]["variables"] if r["names"] == [list(names)])
    record["digests"] = ["0" * 16]
    notes.write_text(json.dumps({**content, "digest": _notes._digest(content)}))


def test_a_changed_list_of_leaves_is_found(path, tmp_path):
    shutil.copytree(path, tmp_path / "copy")
    notes = tmp_path / "copy" / "bridge" / "metadata"
    notes.write_text(notes.read_text().replace('"text"]', '"test"]'))
    assert checkpoint.restore(tmp_path / "copy")["params"]["t"] == "test"
    for act in (lambda p: checkpoint.restore(p, verify=True), checkpoint.verify):
        with pytest.raises(CheckpointError, match="the list of leaves"):
            act(tmp_path / "copy")


def test_without_digests_there_is_nothing_to_verify(tmp_path):
    checkpoint.save(tmp_path / "model", VARIABLES, digests=False)
    assert exact(checkpoint.restore(tmp_path / "model")) == exact(VARIABLES)
    for act in (lambda p: checkpoint.restore(p, verify=True), checkpoint.verify):
        with pytest.raises(CheckpointError, match="there are no digests"):
            act(tmp_path / "model")


def test_an_abstract_state_is_verified_too(tmp_path):
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    checkpoint.save(tmp_path / "model", state)
    restored = checkpoint.restore(tmp_path / "model", jax.eval_shape(lambda: state), verify=True)
    for found, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_arrays_that_are_gone_are_named_beside_those_that_are_damaged(tmp_path):
    checkpoint.save(tmp_path / "model", {"params": {"a": NOISE}}, extra={"ema": NOISE})
    break_digest(tmp_path / "model", ("params", "a"))
    shutil.rmtree(tmp_path / "model" / "ema")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.verify(tmp_path / "model")
    assert [where for where, _ in caught.value.unreadable] == ["params/a", "ema: %"]
    assert os.listdir(tmp_path) == ["model"]
