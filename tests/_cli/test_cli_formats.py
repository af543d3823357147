"""Checkpoints of other programs, and what diff, inspect and convert tell of them."""

import json
import pickle
import sys

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax import linen as nn
from flax import nnx, serialization
from flax.training import checkpoints
from flax.training.train_state import TrainState

from bridge import checkpoint
from tests.strategies import exact

from .command_line import run

MODELS = """\
import jax.numpy as jnp
from flax import linen as nn, nnx
class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        assert train is False
        return nn.Dense(3)(nn.relu(nn.Dense(3)(x)))
def make_linen():
    return Linen()
class Native(nnx.Module):
    def __init__(self, rngs):
        self.fc1, self.fc2 = (nnx.Linear(3, 3, rngs=rngs) for _ in range(2))
    def __call__(self, x):
        return self.fc2(nnx.relu(self.fc1(x)))
def make_nnx():
    return Native(nnx.Rngs(0)), jnp.ones((1, 3))
def make_lstm():
    return nnx.OptimizedLSTMCell(4, 3, rngs=nnx.Rngs(0))
def make_linen_lstm():
    zeros = jnp.zeros((1, 3))
    return nn.OptimizedLSTMCell(3), (zeros, zeros), jnp.ones((1, 4))
"""


def layers(seed=0):
    rng = np.random.default_rng(seed)
    sizes = {"kernel": (3, 3), "bias": (3,)}
    return {
        f"Dense_{n}": {k: rng.normal(size=s).astype(np.float32) for k, s in sizes.items()}
        for n in range(2)
    }


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "port_models.py").write_text(MODELS)
    yield tmp_path
    sys.modules.pop("port_models", None)


def train_state(params):
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def test_a_file_of_bare_params_is_read_as_linen_params(capsys, place):
    params = layers()
    (place / "params").write_bytes(serialization.to_bytes(params))
    (place / "state").write_bytes(serialization.to_bytes(train_state(params)))
    expected = exact({"params": params})
    for arguments in (["params"], ["state"], ["state", "--within", "params"]):
        document = run(capsys, "inspect", *arguments, "--json").document
        assert document["layout"] == "linen"
        assert {leaf["collection"] for leaf in document["leaves"]} == {"params"}
        assert document["total"]["leaves"] == 4
    assert exact(jax.tree.map(np.asarray, checkpoint.restore(place / "params"))) == expected
    assert run(capsys, "diff", "params", "state").code == 0
    # A state by path has statistics, and stays one.
    state = nnx.to_pure_dict(nnx.state(nnx.BatchNorm(2, rngs=nnx.Rngs(0))))
    (place / "nnx").write_bytes(serialization.to_bytes(state))
    assert run(capsys, "inspect", "nnx", "--json").document["layout"] == "nnx"


BLOCKS = """\
from flax import nnx
class Block(nnx.Module):
    def __init__(self, rngs):
        self.attn = nnx.Linear(2, 2, use_bias=False, rngs=rngs)
class Blocks(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
"""


def test_diff_and_convert_take_numbers_in_a_file_as_keys_of_linen(capsys, place):
    block = {"attn": {"kernel": np.ones((2, 2), np.float32)}}
    (place / "block_models.py").write_text(BLOCKS)
    (place / "hf.msgpack").write_bytes(serialization.to_bytes({"h": {"0": block, "1": block}}))
    state = nnx.State({"blocks": nnx.State({n: nnx.State(block) for n in (0, 1)})})
    (place / "nnx.msgpack").write_bytes(serialization.to_bytes(nnx.to_pure_dict(state)))
    (place / "rules.toml").write_text("[rules]\n" + r"'h/(\d+)' = 'blocks.\1'")
    rules = ("--rules", "rules.toml", "--model", "block_models.py:Blocks")

    ambiguous = run(capsys, "diff", "hf.msgpack", "nnx.msgpack", *rules)
    told = run(capsys, "diff", "hf.msgpack", "nnx.msgpack", *rules, "--b-layout", "nnx")
    converted = run(capsys, "convert", "hf.msgpack", "out", *rules)
    state = run(capsys, "inspect", "hf.msgpack", "--layout", "nnx", "--json").document

    assert ambiguous.code == 2
    assert "two checkpoints that are Linen's" in ambiguous.err
    assert "--b-layout nnx" in ambiguous.err
    assert told.code == 0
    assert converted.code == 0
    assert state["layout"] == "nnx"
    sys.modules.pop("block_models", None)


def test_convert_says_what_it_leaves_out(capsys, place):
    (place / "state").write_bytes(serialization.to_bytes(train_state(layers())))
    outcome = run(capsys, "convert", "state", "out")
    assert outcome.code == 0
    assert "left out, as it is not a weight: opt_state, step" in outcome.out
    again = run(capsys, "convert", "state", "x", "--dry-run", "--json").document
    assert again["left_out"] == ["opt_state", "step"]
    (place / "params").write_bytes(serialization.to_bytes(layers()))
    assert "left out" not in run(capsys, "convert", "params", "o2").out


@pytest.mark.parametrize("name", ["program.py", "weights.pkl", "notes.txt", "empty", "archive.zip"])
def test_a_file_of_another_kind_is_not_a_checkpoint_and_not_damaged(capsys, place, name):
    content = {
        "program.py": b"import jax\n",
        "weights.pkl": pickle.dumps({"params": [1.0]}),
        "notes.txt": b"\xc3\x84",
        "empty": b"",
        "archive.zip": b"PK\x05\x06" + b"\0" * 18,
    }
    (place / name).write_bytes(content[name])
    outcome = run(capsys, "inspect", name)
    assert outcome.code == 2
    assert "not a checkpoint" in outcome.err
    assert "damaged" not in outcome.err


@pytest.mark.parametrize("is_ocdbt", [True, False])
def test_a_directory_of_orbax_without_its_index_is_told_what_is_missing(capsys, place, is_ocdbt):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=is_ocdbt)) as orbax:
        tree = {"params": {"w": jnp.ones(2)}}
        orbax.save(place / "tree", args=ocp.args.PyTreeSave(tree))
    (place / "tree" / "_METADATA").unlink()
    outcome = run(capsys, "inspect", "tree")
    assert outcome.code == 2
    assert "The file _METADATA, which says what the arrays are, is missing" in outcome.err
    assert f"at {place / 'tree'}. " in outcome.err
    assert "Copy the whole directory again" in outcome.err
    assert "give the path of one of these" not in outcome.err


@pytest.mark.parametrize("trees", [0, 1, 2])
def test_every_checkpoint_in_a_folder_is_named(capsys, place, trees):
    """Regression: only orbax trees were, and a single one was read for what lies beside it too."""
    variables = {"params": {"w": jnp.ones(2)}}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        for n in range(trees):
            orbax.save(place / "all" / f"tree{n}", args=ocp.args.PyTreeSave(variables))
    checkpoint.save(place / "all" / "bridged", variables)
    (place / "all" / "file.msgpack").write_bytes(serialization.to_bytes(variables))
    (place / "all" / "notes.txt").write_text("x")
    outcome = run(capsys, "inspect", "all")
    assert outcome.code == 2
    names = ["bridged", "file.msgpack", "notes.txt", *(f"tree{n}" for n in range(trees))]
    assert f"there is no checkpoint at {place / 'all'}" in outcome.err
    assert f"It holds {names}; give the path of one of these." in outcome.err


def test_a_tree_of_orbax_is_read_from_a_folder_of_other_files(capsys, place):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        orbax.save(place / "all" / "tree", args=ocp.args.PyTreeSave({"params": {"w": np.ones(2)}}))
    (place / "all" / "notes.txt").write_text("x")
    assert run(capsys, "inspect", "all", "--json").document["format"] == "orbax"
    # Regression: the file beside it was passed over.
    np.savez(place / "all" / "weights.npz", w=np.ones(2))
    outcome = run(capsys, "inspect", "all")
    assert outcome.code == 2
    assert "It holds ['notes.txt', 'tree', 'weights.npz']; give the path" in outcome.err


def test_a_damaged_index_is_told_by_inspect_too_and_its_reason_once(capsys, place):
    """Regression: inspect read the list of leaves alone, restore said why for each leaf."""
    checkpoint.save(place / "model", {"params": layers()})
    (place / "model" / "variables" / "_METADATA").write_text("garbage")
    outcome = run(capsys, "inspect", "model")
    assert (outcome.code, outcome.out) == (2, "")
    assert f"arrays cannot be read from {place / 'model' / 'variables'}" in outcome.err
    outcome = run(capsys, "inspect", "model", "--verify")
    assert (outcome.code, "  - 4 leaves (" in outcome.err) == (2, True)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.restore(place / "model")
    paths = [f"params/Dense_{n}/{name}" for n in range(2) for name in ("kernel", "bias")]
    assert sorted(path for path, _ in caught.value.unreadable) == sorted(paths)
    names = ", ".join(path for path, _ in caught.value.unreadable)
    reasons = {reason for _, reason in caught.value.unreadable}
    assert f"\n  - 4 leaves ({names}): {reasons.pop()}\n" in str(caught.value)
    assert not reasons


def test_a_file_of_arrays_without_any_is_read(capsys, place):
    """Regression: an empty npz was no checkpoint."""
    np.savez(place / "empty.npz")
    safetensors.numpy.save_file({}, place / "empty.safetensors")
    checkpoint.save(place / "source", {"params": {}})
    assert run(capsys, "convert", "source", "own", "--format", "safetensors").code == 0
    for name, form in (("empty.npz", "npz"), ("empty.safetensors", "safetensors"), ("own", None)):
        outcome = run(capsys, "inspect", name, "--json")
        assert outcome.code == 0, outcome.err
        assert outcome.document["layout"] == "linen"
        assert outcome.document["format"] == (form or "safetensors")
        assert outcome.document["leaves"] == []


def test_a_tree_without_leaves_is_not_taken_for_an_nnx_state(capsys, place):
    """Regression: collections without leaves were not counted."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        orbax.save(place / "empty", args=ocp.args.PyTreeSave({"params": {}}))
        orbax.save(place / "states", args=ocp.args.PyTreeSave({"x": np.ones(2)}))
    assert run(capsys, "inspect", "empty", "--json").document["layout"] == "linen"
    document = run(capsys, "inspect", "states", "--within", "x", "--json").document
    assert (document["layout"], document["total"]["leaves"]) == ("nnx", 1)


def test_a_file_that_was_cut_off_is_damaged(capsys, place):
    (place / "params").write_bytes(serialization.to_bytes(layers())[:-5])
    outcome = run(capsys, "inspect", "params")
    assert outcome.code == 2
    assert "damaged or incomplete" in outcome.err


def test_a_file_with_pickled_objects_is_not_called_damaged(capsys, place):
    objects = np.array([{}, 1], dtype=object)
    np.savez(place / "objects.npz", **{"params/w": np.ones(3), "params/o": objects})
    outcome = run(capsys, "inspect", "objects.npz")
    assert outcome.code == 2
    assert "pickled objects are not read" in outcome.err
    assert "damaged" not in outcome.err


def test_an_index_without_its_entries_is_damaged_and_the_entry_is_named(capsys, place):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        orbax.save(place / "tree", args=ocp.args.PyTreeSave({"params": {"w": np.ones(2)}}))
    (place / "tree" / "_METADATA").write_text("{}")
    outcome = run(capsys, "inspect", "tree")
    assert (outcome.code, "there is no entry 'tree_metadata'" in outcome.err) == (2, True)


def test_latest_is_the_newest_step(capsys, place):
    manager = ocp.CheckpointManager(place / "manager")
    for step in (9, 10):
        params = {"params": {"w": np.full(2, step, np.float32)}}
        manager.save(step, args=ocp.args.StandardSave(params))
    manager.wait_until_finished()
    manager.close()
    for step in (9, 100):
        (place / "training").mkdir(exist_ok=True)
        state = {"params": {"w": np.full(2, step, np.float32)}}
        (place / "training" / f"checkpoint_{step}").write_bytes(serialization.to_bytes(state))
    assert run(capsys, "diff", "manager/latest", "manager/10").code == 0
    assert run(capsys, "diff", "training/latest", "training/checkpoint_100").code == 0
    assert run(capsys, "diff", "manager/latest/default", "manager/10/default").code == 0
    to_itself = ("convert", "manager/latest", "manager/10/default", "--overwrite")
    assert "the checkpoint that is read" in run(capsys, *to_itself).err
    assert checkpoints.latest_checkpoint(place / "training").endswith("checkpoint_100")
    (place / "nothing").mkdir()
    outcome = run(capsys, "inspect", "nothing/latest")
    assert (outcome.code, "there are no steps in" in outcome.err) == (2, True)


def test_arrays_by_name_go_out_and_come_in_bitwise(capsys, place):
    variables = {"params": layers(), "batch_stats": {"n": {"mean": np.arange(3, dtype=np.int32)}}}
    variables["params"]["half"] = jnp.linspace(0, 1, 4).astype(jnp.bfloat16)
    # NumPy's functions for contiguous arrays make vectors of scalars.
    variables["params"]["scale"] = jnp.float32(2)
    variables["params"]["swapped"] = jnp.arange(6.0).reshape(2, 3).T
    checkpoint.save(place / "source", variables)
    arguments = ("--format", "safetensors")
    assert run(capsys, "convert", "source", "file", *arguments).code == 0
    assert run(capsys, "inspect", "file", "--json").document["format"] == "safetensors"
    assert exact(jax.tree.map(np.asarray, checkpoint.restore(place / "file"))) == exact(
        jax.tree.map(np.asarray, variables)
    )
    # Another run replaces it, and nothing else.
    assert run(capsys, "convert", "source", "file", *arguments).code == 2
    assert run(capsys, "convert", "source", "file", *arguments, "--overwrite").code == 0
    with safetensors.safe_open(place / "file", framework="numpy") as file:
        assert "params.Dense_0.kernel" in set(file.keys())


def test_the_name_of_what_is_written_says_its_format(capsys, place):
    checkpoint.save(place / "source", {"params": layers()})
    outcome = run(capsys, "convert", "source", "model.safetensors")
    assert "written: model.safetensors (layout linen, safetensors)" in outcome.out
    assert (place / "model.safetensors").is_file()
    assert run(capsys, "convert", "source", "o.safetensors", "--format", "orbax").code == 0
    assert (place / "o.safetensors").is_dir()


def write_data_set(path, form):
    arrays = {"x_train": np.zeros((2, 3), np.float32), "y_train": np.arange(2)}
    if form == "npz":
        with path.open("wb") as file:
            np.savez(file, **arrays)
    elif form == "safetensors":
        safetensors.numpy.save_file(arrays, path, metadata={"format": "np"})
    else:
        # As other programs write msgpack: arrays as bytes, which flax.serialization writes never.
        packed = {k: {"shape": v.shape, "data": v.tobytes()} for k, v in arrays.items()}
        path.write_bytes(msgpack.packb(packed))


@pytest.mark.parametrize("form", ["orbax", "safetensors"])
@pytest.mark.parametrize("found", ["msgpack", "safetensors", "npz"])
def test_convert_replaces_no_file_of_another_program(capsys, place, form, found):
    checkpoint.save(place / "source", {"params": layers()})
    write_data_set(place / "file", found)
    before = (place / "file").read_bytes()
    arguments = ("source", "file", "--format", form, "--overwrite")
    outcome = run(capsys, "convert", *arguments)
    assert outcome.code == 2
    assert "not a checkpoint" in outcome.err or "the bridge did not write" in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert (place / "file").read_bytes() == before


def test_convert_replaces_a_file_by_one_of_the_same_format_only(capsys, place):
    checkpoint.save(place / "source", {"params": layers()})
    arguments = ("source", "file", "--format")
    assert run(capsys, "convert", *arguments, "safetensors").code == 0
    before = (place / "file").read_bytes()
    outcome = run(capsys, "convert", *arguments, "orbax", "--overwrite")
    assert (outcome.code, "a checkpoint that is a safetensors file" in outcome.err) == (2, True)
    assert (place / "file").read_bytes() == before


@pytest.mark.parametrize(
    ("form", "params"),
    [
        ("safetensors", {"a.b": np.ones(2)}),
        ("safetensors", {"w": jnp.ones(2, jnp.float8_e4m3fn)}),
        # Orbax joins keys by dots, and wrote one leaf over the other.
        ("orbax", {"a.b": np.ones(2), "a": {"b": np.zeros(2)}}),
    ],
)
def test_what_a_format_cannot_hold_is_refused_and_nothing_is_written(capsys, place, form, params):
    checkpoint.save(place / "source", {"params": params})
    outcome = run(capsys, "convert", "source", "file", "--format", form)
    assert outcome.code == 2
    assert "cannot hold these leaves" in outcome.err
    assert not (place / "file").exists()


def test_a_dot_in_a_name_that_no_other_leaf_has_too_goes_out_as_orbax(capsys, place):
    variables = {"params": {"a.b": np.ones(2), "a": {"c": np.zeros(2)}}}
    checkpoint.save(place / "source", variables)
    assert run(capsys, "convert", "source", "out").code == 0
    assert exact(checkpoint.restore(place / "out")) == exact(variables)


def test_a_missing_library_exits_with_three_and_the_command_to_install_it(
    capsys, place, monkeypatch
):
    checkpoint.save(place / "source", {"params": layers()})
    monkeypatch.setitem(sys.modules, "safetensors", None)
    arguments = ("--format", "safetensors")
    outcome = run(capsys, "convert", "source", "file", *arguments)
    assert outcome.code == 3
    assert "pip install 'linen-nnx-bridge[safetensors]'" in outcome.err


def test_diff_tells_relative_differences_and_nan_against_a_number(capsys, place):
    values = {"a": [1.0, 2.0, np.nan], "b": [1.0, 4.0, np.nan], "nan": [1.0, 2.0, 5.0]}
    for name, value in values.items():
        params = {"w": np.asarray(value, np.float32), "same": np.asarray([np.nan])}
        checkpoint.save(place / name, {"params": params})
    outcome = run(capsys, "diff", "a", "b", "--json")
    assert outcome.code == 1
    (changed,) = outcome.document["differences"]
    assert (changed["max_abs"], changed["max_rel"]) == (2.0, 1.0)
    outcome = run(capsys, "diff", "a", "nan", "--json")
    (changed,) = outcome.document["differences"]
    assert changed["difference"] == "1 non-finite on one side or otherwise"
    assert changed["max_abs"] is None
    assert "1 leaf is the same, 1 differs\n" in run(capsys, "diff", "a", "nan").out


def test_the_rules_of_parity_are_those_that_convert_and_diff_take(capsys, place):
    (place / "params").write_bytes(serialization.to_bytes(layers()))
    models = ("port_models.py:make_linen", "port_models.py:make_nnx")
    outcome = run(capsys, "parity", *models, "--suggest", "--kwarg", "train=False")
    assert outcome.code == 0, outcome.err
    assert '"Dense_1": "fc1"' in outcome.out
    (place / "rules.toml").write_text(outcome.out.partition("# for --rules:\n")[2])
    rules = ("--model", models[1], "--rules", "rules.toml")
    converted = run(capsys, "convert", "params", "out", *rules)
    assert converted.code == 0, converted.out + converted.err
    # They differ by their names, and not once the rules are known.
    assert run(capsys, "diff", "params", "out").code == 1
    assert run(capsys, "diff", "params", "out", *rules).code == 0
    assert run(capsys, "diff", "out", "params", *rules).code == 0
    assert run(capsys, "diff", "out", "out", *rules).code == 2
    assert "bridge.port.suggest" in run(capsys, "convert", "params", "x", *rules[:2]).out


CACHING = """
class Caching(Native):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.cache = nnx.Cache(jnp.zeros(3))
        self.seen = nnx.Intermediate((jnp.zeros(3),))
"""


def test_what_a_checkpoint_has_no_values_of_is_not_written(capsys, place):
    (place / "port_models.py").write_text(MODELS + CACHING)
    linen = {f"fc{n + 1}": layer for n, layer in enumerate(layers().values())}
    checkpoint.save(place / "linen", {"params": linen})
    model = ("--model", "port_models.py:Caching")
    outcome = run(capsys, "convert", "linen", "native", *model)
    assert outcome.code == 0, outcome.err
    assert run(capsys, "diff", "linen", "native", *model).code == 0


STACKED = """\
import jax.numpy as jnp
from flax import linen as nn
class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(3)(x), None
class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(Layer, {"params": 0}, split_rngs={"params": True}, length=2)
        return scan(name="layers")(x, None)[0]
def make():
    return Stack(), jnp.ones((1, 3))
"""


@pytest.mark.parametrize("rules", [None, "'layers' = 'layers.*'"])
def test_the_list_of_a_state_becomes_a_stack_of_linen(capsys, place, rules):
    (place / "stacked.py").write_text(STACKED)
    one_by_one = list(layers().values())
    with ocp.StandardCheckpointer() as saver:
        own = {str(n): {"Dense_0": layer} for n, layer in enumerate(one_by_one)}
        saver.save(place / "state", {"layers": own})
    options = ["--model", "stacked.py:make"]
    if rules is not None:
        (place / "rules.toml").write_text(f"[rules]\n{rules}")
        options += ["--rules", "rules.toml"]
    assert run(capsys, "convert", "state", "linen.safetensors", *options).code == 0
    found = checkpoint.restore(place / "linen.safetensors")["params"]["layers"]["Dense_0"]
    expected = {k: np.stack([layer[k] for layer in one_by_one]) for k in ("kernel", "bias")}
    assert exact(jax.tree.map(np.asarray, found)) == exact(expected)
    sys.modules.pop("stacked", None)


@pytest.mark.parametrize("layer", ["Dense_0", "dense"])
@pytest.mark.parametrize("form", ["orbax", "msgpack"])
@pytest.mark.parametrize("around", [(), ("run",)])
def test_variables_beside_an_optimizer_are_told_the_option_for_them(
    capsys, place, layer, form, around
):
    variables = {"params": {layer: {"kernel": np.ones((2, 3), np.float32)}}}
    tree = {"model": variables, "ema": variables, "opt": {"mu": np.zeros(2, np.float32)}}
    for key in around:
        tree = {key: tree, "step": np.int32(3)}
    if form == "orbax":
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
            orbax.save(place / "deep", args=ocp.args.PyTreeSave(tree))
    else:
        (place / "deep").write_bytes(serialization.to_bytes(tree))
    (place / "rules.toml").write_text(f"[rules]\n'{layer}' = 'fc'")
    (place / "fc_models.py").write_text(FC)
    options = ("--rules", "rules.toml", "--model", "fc_models.py:Model", "--within")
    outcome = run(capsys, "convert", "deep", "out", *options, "/".join(around))
    assert outcome.code == 2
    assert "or --within KEYS if the variables lie deeper" in outcome.err

    model = "/".join((*around, "model"))
    assert run(capsys, "convert", "deep", "out", *options, model).code == 0
    found = checkpoint.restore("out", {"params": {"fc": variables["params"][layer]}}, layout="nnx")
    np.testing.assert_array_equal(found["params"]["fc"]["kernel"], np.ones((2, 3)))
    sys.modules.pop("fc_models", None)


FC = """\
from flax import nnx
class Model(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(2, 3, use_bias=False, rngs=rngs)
"""


def test_a_plain_state_goes_to_linen_by_structure_and_by_the_same_rules(capsys, place):
    state = nnx.to_pure_dict(nnx.state(nnx.BatchNorm(3, rngs=nnx.Rngs(0))))
    fc = {"kernel": np.arange(9, dtype=np.float32).reshape(3, 3), "bias": np.ones(3, np.float32)}
    tree = {"norm": state, "fc1": fc, "fc2": {name: x + 1 for name, x in fc.items()}}
    (place / "plain.msgpack").write_bytes(serialization.to_bytes(tree))
    (place / "norm_models.py").write_text(
        "from flax import linen as nn\n"
        "class Norm(nn.Module):\n"
        "    @nn.compact\n"
        "    def __call__(self, x, train):\n"
        "        x = nn.BatchNorm(use_running_average=not train)(x)\n"
        "        return nn.Dense(3)(nn.Dense(3)(x))\n"
    )
    # As suggested from Linen to NNX.
    (place / "rules.toml").write_text("[rules]\n'Dense_0' = 'fc1'\n'Dense_1' = 'fc2'\n")
    command = ("convert", "plain.msgpack", "out", "--model", "norm_models.py:Norm")
    call = ("--input", "1,3", "--kwarg", "train=False", "--rules", "rules.toml")
    assert run(capsys, *command, *call).code == 0
    params = {"BatchNorm_0": {k: state[k] for k in ("scale", "bias")}, "Dense_0": fc}
    params["Dense_1"] = tree["fc2"]
    statistics = {"BatchNorm_0": {k: state[k] for k in ("mean", "var")}}
    found = jax.tree.map(np.asarray, checkpoint.restore(place / "out"))
    assert exact(found) == exact(
        jax.tree.map(np.asarray, {"params": params, "batch_stats": statistics})
    )


def test_diff_against_a_model_sees_through_fused_gates(capsys, place):
    cell = nn.OptimizedLSTMCell(3)
    carry = (jnp.zeros((1, 3)), jnp.zeros((1, 3)))
    variables = cell.init(jax.random.key(0), carry, jnp.ones((1, 4)))
    checkpoint.save(place / "linen", variables)
    model = ("--model", "port_models.py:make_lstm")
    assert run(capsys, "convert", "linen", "native", *model).code == 0
    outcome = run(capsys, "diff", "linen", "native", *model, "--json")
    assert (outcome.code, outcome.document["equal"]) == (0, 3)
    assert run(capsys, "diff", "linen", "native").code == 1
    back = (
        "convert",
        "native",
        "back",
        "--model",
        "port_models.py:make_linen_lstm",
    )
    assert run(capsys, *back).code == 1
    gates = {side: ",".join(f"{side}{gate}" for gate in "ifgo") for side in "ih"}
    rules = [f"'{{{names}}}' = 'dense_{side}'" for side, names in gates.items()]
    (place / "gates.toml").write_text("\n".join(["[rules]", *rules]))
    outcome = run(capsys, *back, "--rules", "gates.toml")
    assert outcome.code == 0, outcome.out + outcome.err
    assert run(capsys, "diff", "linen", "back").code == 0


def test_keyword_arguments_of_the_call_can_be_given(capsys, place):
    target = ("report", "port_models.py:make_linen", "--input", "1,3")
    assert run(capsys, *target).code == 2
    outcome = run(capsys, *target, "--kwarg", "train=False", "--json")
    assert outcome.document["migrated"]["parameters"]["total"] == 24
    assert run(capsys, *target, "--kwarg", "train").code == 2
    assert json.loads(outcome.out)


@pytest.mark.parametrize("name", ["a/b", "a/b/value"])
def test_a_leaf_with_a_slash_in_its_name_is_not_the_leaf_of_that_path(capsys, place, name):
    for directory, value in (("one", 1), ("two", 5)):
        params = {name: np.full(2, value), "a": {"b": np.zeros(2)}}
        checkpoint.save(place / directory, {"params": params})
    difference = run(capsys, "diff", "one", "two", "--json")
    assert difference.code == 1
    (changed,) = difference.document["differences"]
    assert (changed["path"], changed["max_abs"]) == (f"params/{name}", 4.0)
    assert difference.document["equal"] == 1
    # Two leaves of one text are not each other.
    checkpoint.save(place / "flat", {"params": {"c/d": np.ones(2)}})
    checkpoint.save(place / "deep", {"params": {"c": {"d": np.ones(2)}}})
    document = run(capsys, "diff", "flat", "deep", "--json").document
    found = [(each["path"], each["difference"]) for each in document["differences"]]
    assert sorted(found) == [("params/c/d", "only in a"), ("params/c/d", "only in b")]


@pytest.mark.parametrize("form", ["safetensors", "bridge"])
@pytest.mark.parametrize("name", ["fc1", "params"])
def test_the_layout_survives_the_round_trip(capsys, place, form, name):
    """Regression: inspect called an NNX state in a file "linen", by the names of its leaves."""
    kernel = {"kernel": np.ones((2, 2), np.float32)}
    checkpoint.save(place / "nnx", nnx.State({name: nnx.State(jax.tree.map(nnx.Param, kernel))}))
    checkpoint.save(place / "linen", {"params": {name: kernel}})
    for layout in ("nnx", "linen"):
        assert run(capsys, "convert", layout, f"to_{layout}", "--format", form).code == 0
        found = run(capsys, "inspect", f"to_{layout}", "--json").document
        assert layout == (found["written_by"] if form == "bridge" else found["layout"])
    within = ("to_linen", "--within", "params")
    if form != "bridge":
        assert run(capsys, "inspect", *within, "--json").document["layout"] == "linen"
        assert run(capsys, "inspect", "to_nnx", "--layout", "linen").code == 0
        assert run(capsys, "diff", "to_nnx", "to_linen").code == 0


def test_texts_in_a_file_are_compared_as_they_are(capsys, place):
    # Regression: NumPy's error about a number was shown with a traceback.
    for name, texts in (("a", ["x", "y"]), ("b", ["x", "z"])):
        np.savez(f"{name}.npz", **{"params/names": np.array(texts), "params/w": np.ones(2)})
    assert run(capsys, "diff", "a.npz", "a.npz").code == 0
    outcome = run(capsys, "diff", "a.npz", "b.npz", "--json")
    assert (outcome.code, outcome.err) == (1, "")
    (changed,) = outcome.document["differences"]
    assert (changed["path"], changed["difference"]) == ("params/names", "values")


def test_a_checkpoint_without_leaves_has_none(capsys, place):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        orbax.save(place / "empty", args=ocp.args.PyTreeSave({"params": {}}))
        orbax.save(place / "full", args=ocp.args.PyTreeSave({"params": {"w": np.ones(2)}}))
    assert run(capsys, "inspect", "empty", "--json").document["total"]["leaves"] == 0
    # Regression: there was one, without a path.
    assert run(capsys, "diff", "empty", "empty", "--json").document["equal"] == 0
    (only,) = run(capsys, "diff", "empty", "full", "--json").document["differences"]
    assert (only["path"], only["difference"]) == ("params/w", "only in b")
    # Regression: the error was about its collections.
    outcome = run(capsys, "convert", "empty", "out.safetensors")
    assert (outcome.code, outcome.err) == (0, "")


def test_a_format_that_cannot_hold_a_leaf_is_told_for_the_named_file(capsys, place):
    np.savez("a.npz", **{"params/b.c/w": np.ones(2)})
    outcome = run(capsys, "convert", "a.npz", "out.safetensors")
    assert outcome.code == 2
    # Regression: the file was a temporary one beside it.
    assert outcome.err.splitlines()[0].endswith("out.safetensors:")
    assert "bridge-save" not in outcome.err
