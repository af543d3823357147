import errno
import json
import os
import pathlib
import pickle
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx, serialization

from bridge import NNXMeta, checkpoint
from bridge._cli._command import InputError
from bridge._cli.diff import _diff
from bridge.checkpoint import _notes
from bridge.parity._numbers import Tolerance
from tests.models import assert_identical

from . import mixed_models
from .command_line import run

ROOT = pathlib.Path(mixed_models.__file__).parents[2]
RULES = r"""
[rules]
'layers_(\d+)' = 'layers.\1'
"""
LINEN_MODEL = "tests._cli.mixed_models:make_linen_pair"
NNX_MODEL = "tests._cli.mixed_models:make_nnx_pair"


@pytest.fixture(scope="module")
def variables():
    """Distinct values in every leaf, so that none can stand for another."""
    module, x = mixed_models.make_linen_pair()
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)
    leaves, tree = jax.tree.flatten(shapes)
    values = [np.arange(leaf.size) + 100.0 * i for i, leaf in enumerate(leaves)]
    arrays = [
        jnp.asarray(v.reshape(leaf.shape), leaf.dtype)
        for v, leaf in zip(values, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, arrays)


@pytest.fixture(scope="module")
def state(variables):
    """The same values in the NNX model, put there by hand."""
    model = mixed_models.make_nnx_pair()
    for index, collections in ((0, ("params",)), (1, ("params", "batch_stats"))):
        for collection in collections:
            for name, value in variables[collection][f"layers_{index}"].items():
                getattr(model.layers[index], name).set_value(value)
    return nnx.state(model, nnx.Not(nnx.RngState))


@pytest.fixture(scope="module")
def made(tmp_path_factory, variables, state):
    """One checkpoint of each kind with the same values, and rules."""
    place = tmp_path_factory.mktemp("checkpoints")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        orbax.save(place / "linen", args=ocp.args.PyTreeSave(variables))
        orbax.save(place / "nnx", args=ocp.args.PyTreeSave(state))
        orbax.save(place / "inside", args=ocp.args.PyTreeSave({"model": variables, "step": 3}))
    (place / "linen.msgpack").write_bytes(serialization.to_bytes(variables))
    checkpoint.save(place / "bridged", variables)
    (place / "rules.toml").write_text(RULES)
    return place


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    ("name", "layout", "form", "written_by"),
    [
        ("linen", "linen", "orbax", None),
        ("linen.msgpack", "linen", "msgpack", None),
        ("nnx", "nnx", "orbax", None),
        ("bridged", "bridge", "orbax", "linen"),
    ],
)
def test_inspect_tells_layout_format_and_leaves(capsys, made, name, layout, form, written_by):
    document = run(capsys, "inspect", made / name, "--json").document
    assert (document["layout"], document["format"]) == (layout, form)
    assert document["written_by"] == written_by
    assert document["total"] == {"leaves": 6, "elements": 4 * 3 + 5 * 3, "bytes": 4 * 27}
    if layout == "nnx":
        assert [c["name"] for c in document["collections"]] == [None]
    else:
        found = {(leaf["collection"], leaf["path"]): leaf for leaf in document["leaves"]}
        assert found["params", "layers_0/kernel"] == {
            "collection": "params",
            "path": "layers_0/kernel",
            "shape": [4, 3],
            "dtype": "float32",
            "bytes": 48,
            "box": None,
        }
        assert {c["name"]: c["elements"] for c in document["collections"]} == {
            "params": 21,
            "batch_stats": 6,
        }


def test_inspect_shows_a_table_that_can_be_cut(capsys, made):
    outcome = run(capsys, "inspect", made / "linen.msgpack")
    assert outcome.code == 0
    heading, table, totals = outcome.out.split("\n\n")
    assert heading.endswith("linen.msgpack: layout linen, msgpack")
    rows = [line.split() for line in table.splitlines()]
    assert ["params", "layers_0/kernel", "4x3", "float32", "48", "B"] in rows
    assert totals.splitlines()[-1].split() == ["total", "6", "27", "108", "B"]


def test_inspect_finds_a_model_within_a_larger_checkpoint(capsys, made):
    document = run(capsys, "inspect", made / "inside", "--within", "model", "--json").document
    assert document["layout"] == "linen"
    assert document["total"]["leaves"] == 6
    assert document["extra"] == ["step"]


def test_inspect_shows_boxes_and_keys(capsys, tmp_path):
    boxed = {
        "params": {
            "w": nn.Partitioned(jnp.ones((2, 3), jnp.bfloat16), names=("a", None)),
            "v": NNXMeta(nnx.Param, jnp.ones(2), {"out_sharding": ("a",)}),
        },
        "RngKey": {"key": jax.random.key(0)},
    }
    checkpoint.save(tmp_path / "boxed", boxed)
    leaves = run(capsys, "inspect", tmp_path / "boxed", "--json").document["leaves"]
    by_path = {leaf["path"]: leaf for leaf in leaves}
    assert by_path["w"]["box"] == "flax.core.meta.Partitioned"
    assert by_path["v"]["box"] == "bridge.NNXMeta"
    assert by_path["w"]["bytes"] == 2 * 3 * 2
    assert by_path["key"]["bytes"] is None


@pytest.mark.parametrize(
    ("a", "b"),
    [("linen", "linen.msgpack"), ("linen.msgpack", "bridged"), ("bridged", "linen")],
)
def test_the_same_values_in_other_formats_do_not_differ(capsys, made, a, b):
    outcome = run(capsys, "diff", made / a, made / b, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["same"]
    assert outcome.document["equal"] == 6


def test_diff_lists_every_difference_and_exits_with_one(capsys, made, tmp_path, variables):
    changed = jax.tree.map(lambda leaf: leaf, variables)
    changed["params"]["layers_0"]["kernel"] = variables["params"]["layers_0"]["kernel"] + 0.25
    changed["params"]["layers_0"]["bias"] = jnp.zeros((4,))
    changed["params"]["layers_1"]["bias"] = variables["params"]["layers_1"]["bias"].astype(
        jnp.bfloat16
    )
    changed["params"]["new"] = jnp.zeros(())
    del changed["batch_stats"]["layers_1"]["mean"]
    checkpoint.save(tmp_path / "changed", changed)
    outcome = run(capsys, "diff", made / "linen", tmp_path / "changed", "--json")
    assert outcome.code == 1
    document = outcome.document
    assert not document["same"]
    found = {entry["path"]: entry for entry in document["differences"]}
    assert {path: entry["difference"] for path, entry in found.items()} == {
        "batch_stats/layers_1/mean": "only in a",
        "params/new": "only in b",
        "params/layers_0/kernel": "values",
        "params/layers_0/bias": "another shape",
        "params/layers_1/bias": "another dtype",
    }
    assert found["params/layers_0/kernel"]["max_abs"] == 0.25
    assert found["params/layers_0/bias"]["shapes"] == [[3], [4]]
    assert found["params/layers_0/bias"]["max_abs"] is None
    assert found["params/layers_1/bias"]["dtypes"] == ["float32", "bfloat16"]
    assert found["params/new"]["shapes"] == [None, []]
    assert document["equal"] == 2
    text = run(capsys, "diff", made / "linen", tmp_path / "changed").out
    assert "values" in text
    assert "2 leaves are the same, 5 differ" in text


def test_diff_counts_numbers_in_paths_and_a_single_leaf_in_words(capsys, tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        layers = {str(i): {"w": np.full(1, value)} for i in range(11)}
        tree = {"params": {"h": layers, "layer_10": {"w": value}, "layer_9": {"w": value}}}
        (tmp_path / name).write_bytes(serialization.to_bytes(tree))
        one = {"params": {"w": np.full(1, value)}}
        (tmp_path / f"one_{name}").write_bytes(serialization.to_bytes(one))
    document = run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--json").document
    paths = [f"params/{path}/w" for path in (*(f"h/{i}" for i in range(11)), "layer_9", "layer_10")]
    assert [entry["path"] for entry in document["differences"]] == paths

    one = run(capsys, "diff", tmp_path / "one_a", tmp_path / "one_b")
    assert "0 leaves are the same, 1 differs\n" in one.out
    one = run(capsys, "diff", tmp_path / "one_a", tmp_path / "one_a")
    assert "1 leaf is the same, 0 differ\n" in one.out


def test_values_within_the_tolerance_do_not_differ(capsys, tmp_path):
    for name, value in (("a", 1.0), ("b", 1.001)):
        checkpoint.save(tmp_path / name, {"params": {"w": jnp.full((2,), value)}})
    paths = tmp_path / "a", tmp_path / "b"
    codes = [
        run(capsys, "diff", *paths, *options).code
        for options in ((), ("--atol", "1e-4"), ("--atol", "2e-3"), ("--rtol", "2e-3"))
    ]
    assert codes == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("a", "b", "options", "difference", "max_abs"),
    [
        (np.nan, np.nan, {}, None, None),
        (np.nan, 1.0, {}, "1 non-finite on one side or otherwise", np.inf),
        (np.inf, np.inf, {}, None, None),
        (np.inf, -np.inf, {}, "1 non-finite on one side or otherwise", np.inf),
        (np.int64(2**60), np.int64(2**60 + 1), {}, "", 1.0),
        (np.uint8(0), np.uint8(255), {}, "", 255.0),
        (np.float32(1), np.float16(1), {}, "another dtype", 0.0),
        (np.float32(1), np.float16(1), {"dtypes": False}, None, None),
        (np.float32(1), np.float16(2), {"dtypes": False}, "", 1.0),
        (np.bool_(True), np.bool_(False), {}, "", 1.0),
        (1 + 1j, 1 - 1j, {}, "", 2.0),
        ("x", "y", {}, "", None),
        ("x", "x", {}, None, None),
        (np.zeros((0, 2)), np.zeros((0, 2)), {}, None, None),
        (1.0, 1.5, {"atol": 1.0}, None, None),
        (np.int32(5), np.int32(6), {"atol": 1.0}, None, None),
    ],
)
def test_values_of_every_sort_are_compared(a, b, options, difference, max_abs):
    tolerance = Tolerance(0.0, options.get("atol", 0.0))
    dtypes = options.get("dtypes", True)
    found = _diff._compared(("w",), {("w",): a}, {("w",): b}, tolerance, dtypes=dtypes)
    assert found.ok == (difference is None)
    if not found.ok:
        assert (found.note, found.max_abs) == (difference, max_abs)


def test_the_values_of_a_tuple_are_compared_each_by_itself(capsys, tmp_path):
    for name, count in (("a", 2), ("b", 1)):
        sown = {"intermediates": {"x": tuple(np.ones(n) for n in range(count))}}
        checkpoint.save(tmp_path / name, {"params": {}, **sown})
    document = run(capsys, "diff", tmp_path / "a", tmp_path / "b", "--json").document
    (only,) = document["differences"]
    assert (document["equal"], only["path"]) == (1, "intermediates/x/1")
    assert only["difference"] == "only in a"


def test_a_box_that_msgpack_wrote_as_a_mapping_is_the_same_leaf(capsys, tmp_path):
    boxed = {"params": {"w": nn.Partitioned(jnp.ones((2, 3)), names=("a", None))}}
    checkpoint.save(tmp_path / "boxed", boxed)
    (tmp_path / "boxed.msgpack").write_bytes(serialization.to_bytes(boxed))
    for pair in (("boxed", "boxed.msgpack"), ("boxed.msgpack", "boxed")):
        outcome = run(capsys, "diff", *(tmp_path / name for name in pair), "--json")
        assert (outcome.code, outcome.document["equal"]) == (0, 1)


def test_what_lies_beside_the_model_is_named_and_not_compared(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    params, opt_state = {"w": np.ones(2)}, {"0": {"mu": np.ones(2)}}
    state = {"params": params, "opt_state": opt_state, "step": np.int32(3)}
    pathlib.Path("state.msgpack").write_bytes(serialization.to_bytes(state))
    checkpoint.save("saved", {"params": params}, extra={"opt_state": opt_state})
    compared = run(capsys, "diff", "state.msgpack", "saved")
    assert compared.code == 0
    assert "not compared: a has opt_state, step; b has opt_state" in compared.out


def test_a_typed_key_is_the_same_as_the_bits_that_flax_stores(capsys, tmp_path):
    def variables(key):
        return {"params": {"w": np.ones(2)}, "RngKey": {"stream": {"key": key}}}

    bits = np.asarray(jax.random.key_data(jax.random.key(3)))
    (tmp_path / "bits").write_bytes(serialization.to_bytes(variables(bits)))
    for seed, code in ((3, 0), (4, 1)):
        checkpoint.save(tmp_path / f"{seed}", variables(jax.random.key(seed)))
        pair = tmp_path / f"{seed}", tmp_path / "bits"
        outcome = run(capsys, "diff", *pair, "--rngs", "--json")
        assert (outcome.code, outcome.document["equal"]) == (code, 2 - code)


def test_diff_finds_models_within_larger_checkpoints(capsys, made, tmp_path, variables):
    inside = made / "inside"
    changed = jax.tree.map(lambda x: x + 1, variables)
    (tmp_path / "other").write_bytes(serialization.to_bytes({"model": changed, "step": 3}))
    for pair in (
        [made / "linen", inside, "--b-within", "model"],
        [inside, made / "bridged", "--a-within", "model"],
        [inside, inside, "--within", "model"],
    ):
        outcome = run(capsys, "diff", *pair, "--json")
        assert (outcome.code, outcome.document["equal"]) == (0, 6)
    both = run(capsys, "diff", inside, tmp_path / "other", "--within", "model", "--json").document
    assert [entry["max_abs"] for entry in both["differences"]] == [1] * 6


def test_a_checkpoint_of_the_bridge_has_nothing_within(capsys, made):
    outcome = run(capsys, "diff", made / "bridged", made / "inside", "--within", "model")
    assert outcome.code == 2
    assert "has one model" in outcome.err
    assert "Leave out layout= and within=" in outcome.err


def test_an_nnx_state_is_compared_by_path_and_rng_state_only_if_asked_for(capsys, tmp_path):
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    model.linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    plain = nnx.state(model, nnx.Param)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        orbax.save(tmp_path / "plain", args=ocp.args.PyTreeSave(plain))
        orbax.save(tmp_path / "whole", args=ocp.args.PyTreeSave(nnx.state(model)))
    checkpoint.save(tmp_path / "bridged", model)
    paths = tmp_path / "plain", tmp_path / "bridged"
    for other in paths[1], tmp_path / "whole":
        same = run(capsys, "diff", paths[0], other, "--json")
        assert (same.code, same.document["equal"]) == (0, 2)
    document = run(capsys, "diff", *paths, "--json", "--rngs").document
    only = [(entry["path"], entry["difference"]) for entry in document["differences"]]
    assert only == [("rngs/count", "only in b"), ("rngs/key", "only in b")]


@pytest.mark.parametrize("source", ["linen", "linen.msgpack", "bridged"])
def test_paths_are_renamed_by_rules(capsys, made, tmp_path, source, state):
    out = tmp_path / "out"
    rules = ("--rules", made / "rules.toml", "--model", NNX_MODEL)
    arguments = ("convert", made / source, out, *rules)
    dry = run(capsys, *arguments, "--dry-run", "--json")
    assert dry.code == 0, dry.err
    assert dry.document["ok"]
    assert not dry.document["written"]
    assert not out.exists()
    outcome = run(capsys, *arguments)
    assert outcome.code == 0, outcome.err
    assert f"written: {out} (layout nnx, orbax)" in outcome.out
    assert_identical(_restored_natively(out, state), state)


def test_a_conversion_against_a_model_is_what_that_model_restores(capsys, made, tmp_path, state):
    out = tmp_path / "out"
    arguments = ("convert", made / "linen.msgpack", out, "--model", NNX_MODEL)
    dry = run(capsys, *arguments, "--dry-run")
    assert dry.code == 0, dry.err
    assert "Linen -> NNX: 6 matched" in dry.out
    assert "nothing was written (--dry-run)" in dry.out
    assert not out.exists()
    assert run(capsys, *arguments).code == 0
    assert_identical(_restored_natively(out, state), state)


@pytest.mark.parametrize("rules", [["rules.toml"], []])
def test_an_nnx_state_becomes_linen_variables(capsys, made, tmp_path, variables, rules):
    out = tmp_path / "out"
    options = [text for name in rules for text in ("--rules", made / name)]
    outcome = run(capsys, "convert", made / "nnx", out, "--model", LINEN_MODEL, *options)
    assert outcome.code == 0, outcome.err
    assert f"written: {out} (layout linen, orbax)" in outcome.out
    with ocp.StandardCheckpointer() as orbax:
        restored = orbax.restore(out, jax.tree.map(jnp.zeros_like, variables))
    assert_identical(restored, variables)


def test_there_and_back_again_loses_nothing(capsys, made, tmp_path):
    there, back = tmp_path / "there", tmp_path / "back"
    rules = ("--rules", made / "rules.toml", "--model")
    first = ("convert", made / "linen", there, "--format", "bridge", *rules, NNX_MODEL)
    assert run(capsys, *first).code == 0
    assert run(capsys, "convert", there, back, *rules, LINEN_MODEL).code == 0
    assert run(capsys, "inspect", back, "--json").document["layout"] == "linen"
    assert run(capsys, "diff", made / "linen", back).code == 0


def test_rng_state_is_left_out(capsys, tmp_path):
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    model.linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    checkpoint.save(tmp_path / "model", model)
    outcome = run(capsys, "convert", tmp_path / "model", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    leaves = run(capsys, "inspect", tmp_path / "out", "--json").document["leaves"]
    assert [leaf["path"] for leaf in leaves] == ["linear/bias", "linear/kernel"]


@pytest.mark.parametrize("name", ["linen", "linen.msgpack", "nnx", "bridged"])
def test_without_a_model_and_rules_the_format_changes_alone(capsys, made, tmp_path, name):
    arguments = ("convert", made / name, tmp_path / "out.safetensors")
    outcome = run(capsys, *arguments, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["layout"] == ("nnx" if name == "nnx" else "linen")
    again = run(capsys, "convert", arguments[2], tmp_path / "out")
    assert again.code == 0, again.err
    assert run(capsys, "diff", made / name, tmp_path / "out").code == 0


def test_rules_need_the_model_that_they_lead_to(capsys, made, tmp_path):
    arguments = ("convert", made / "linen", tmp_path / "out", "--rules", made / "rules.toml")
    outcome = run(capsys, *arguments)
    assert outcome.code == 2
    assert "--rules: found no --model" in outcome.err


def test_a_state_does_not_tell_its_collections_to_an_nnx_model(capsys, made, tmp_path):
    outcome = run(capsys, "convert", made / "nnx", tmp_path / "out", "--model", NNX_MODEL)
    assert outcome.code == 2
    assert "give a Linen --model" in outcome.err


def test_the_bridge_format_keeps_boxes(capsys, tmp_path):
    boxed = {"params": {"a": nn.Partitioned(jnp.ones((2, 3)), names=("x", None))}}
    checkpoint.save(tmp_path / "boxed", boxed)
    outcome = run(capsys, "convert", tmp_path / "boxed", tmp_path / "out", "--format", "bridge")
    assert outcome.code == 0, outcome.err
    restored = checkpoint.restore(tmp_path / "out")["params"]["a"]
    assert restored.names == ("x", None)
    np.testing.assert_array_equal(restored.value, np.ones((2, 3)))


def test_what_does_not_fit_the_model_is_told_and_nothing_is_written(capsys, made, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "wrong.toml").write_text('[rules]\n"layers_0" = "nowhere"')
    outcome = run(
        capsys, "convert", made / "linen", out, "--model", NNX_MODEL,
        "--rules", tmp_path / "wrong.toml",
    )  # fmt: skip
    assert outcome.code == 1
    assert "nowhere" in outcome.out
    assert "nothing was written: the checkpoint does not fit the model" in outcome.out
    assert list(tmp_path.iterdir()) == [tmp_path / "wrong.toml"]


def test_what_is_there_is_replaced_only_if_that_is_asked_for(capsys, made, tmp_path):
    out = tmp_path / "out"
    checkpoint.save(out, {"params": {"other": jnp.zeros(1)}})
    arguments = ("convert", made / "linen", out, "--model", NNX_MODEL)
    refused = run(capsys, *arguments)
    assert refused.code == 2
    assert "Pass overwrite=True" in refused.err
    assert run(capsys, "inspect", out, "--json").document["total"]["leaves"] == 1
    assert run(capsys, *arguments, "--overwrite").code == 0
    assert run(capsys, "diff", out, made / "nnx").code == 0
    assert list(tmp_path.iterdir()) == [out]


def test_a_directory_of_other_things_is_never_replaced(capsys, made, tmp_path):
    (tmp_path / "thesis.txt").write_text("x")
    outcome = run(capsys, "convert", made / "linen", tmp_path, "--overwrite")
    assert outcome.code == 2
    assert "a directory that is not a checkpoint" in outcome.err
    assert (tmp_path / "thesis.txt").exists()


@pytest.fixture
def project(tmp_path, made, monkeypatch):
    """A project with its sources, in which two checkpoints lie."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("x")
    (tmp_path / "models.py").write_text("x")
    shutil.copytree(made / "linen", tmp_path / "linen")
    shutil.copy(made / "linen.msgpack", tmp_path / "x.msgpack")
    shutil.copytree(made / "nnx", tmp_path / "step" / "nnx")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("source", "out", "options", "found"),
    [
        # One checkpoint in a directory does not make the directory one.
        ("linen", ".", (), "the current directory"),
        ("linen", "../{name}", (), "the current directory"),
        ("linen", "{tmp}", (), "the current directory"),
        ("linen", "..", (), "the current directory"),
        ("linen", "/", (), "no checkpoint could be saved at /"),
        ("linen", "src", (), "it holds 'train.py'"),
        ("linen", "step", (), "it holds 'nnx'"),
        ("linen", "models.py", (), "not a checkpoint"),
        ("linen", "models.py", ("--format", "safetensors"), "not a checkpoint"),
        (
            "linen",
            "x.msgpack",
            ("--format", "orbax"),
            "a msgpack file that the bridge did not write",
        ),
        ("linen", "step/nnx", ("--format", "safetensors"), "a checkpoint directory"),
        ("linen", "linen", (), "the checkpoint that is read"),
        ("step/nnx", "step", (), "the checkpoint that is read"),
        ("x.msgpack", "x.msgpack", ("--format", "safetensors"), "the checkpoint that is read"),
        ("linen", "linked", (), "a symbolic link to"),
        ("linen", "broken", (), "a symbolic link to"),
    ],
)
def test_convert_replaces_nothing_but_a_checkpoint(capsys, project, source, out, options, found):
    (project / "linked").symlink_to(project / "step" / "nnx")
    (project / "broken").symlink_to(project / "nowhere")
    before = _files(project)
    out = out.format(tmp=project, name=project.name)
    outcome = run(
        capsys, "convert", source, out, "--overwrite", *options
    )  # fmt: skip
    assert outcome.code == 2
    assert found in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert _files(project) == before


def test_a_checkpoint_into_which_something_was_put_is_not_replaced(capsys, project):
    (project / "step" / "nnx" / "notes.txt").write_text("x")
    before = _files(project)
    arguments = ("convert", "linen", "step/nnx", "--overwrite")
    outcome = run(capsys, *arguments)
    assert outcome.code == 2
    assert "it holds 'notes.txt'" in outcome.err
    assert _files(project) == before
    (project / "step" / "nnx" / "notes.txt").unlink()
    assert run(capsys, *arguments).code == 0
    assert run(capsys, "diff", "linen", "step/nnx").code == 0


@pytest.mark.parametrize("form", ["orbax", "safetensors", "bridge"])
def test_a_conversion_that_cannot_be_put_in_place_loses_neither_checkpoint(
    capsys, project, monkeypatch, form
):
    arguments = ("convert", "linen", "out", "--format", form)
    assert run(capsys, *arguments).code == 0
    before = _files(project)

    rename = os.rename

    def refuse(a, b):
        if os.path.basename(a) == "new" and os.path.basename(b) == "out":
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(a), None, str(b))
        rename(a, b)

    monkeypatch.setattr(os, "rename", refuse)
    outcome = run(capsys, *arguments, "--overwrite")
    assert outcome.code == 2
    assert "Operation not permitted" in outcome.err
    assert _files(project) == before


def _files(folder):
    """Every file and link by path, with its content."""
    return {
        path.relative_to(folder): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_inspect_verifies_every_array(capsys, made, tmp_path):
    path = tmp_path / "bridged"
    shutil.copytree(made / "bridged", path)
    text = run(capsys, "inspect", path, "--verify").out
    assert "verified: all 6 arrays" in text
    document = run(capsys, "inspect", path, "--verify", "--json").document
    assert document["verified"] == 6
    notes = path / "bridge" / "metadata"
    content = json.loads(notes.read_text())
    # As if the file of one array had changed.
    record = next(r for r in content["items"]["variables"] if r["names"][0][-1] == "kernel")
    record["digests"] = ["0" * 16]
    del content["digest"]
    content["digest"] = _notes._digest(content)
    notes.write_text(json.dumps(content))
    outcome = run(capsys, "inspect", path, "--verify", "--json")
    assert (outcome.code, outcome.out) == (2, "")
    assert "  - params/layers_0/kernel: its digest is" in outcome.err
    assert run(capsys, "inspect", path).code == 0


@pytest.mark.parametrize("name", ["linen", "linen.msgpack"])
def test_what_has_no_digests_cannot_be_verified(capsys, made, name):
    outcome = run(capsys, "inspect", made / name, "--verify")
    assert outcome.code == 2
    assert "there are no digests" in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_a_conversion_that_fails_while_it_writes_leaves_what_was_there(
    capsys, made, tmp_path, monkeypatch
):
    out = tmp_path / "out.safetensors"
    assert run(capsys, "convert", made / "linen", out).code == 0
    before = out.read_bytes()

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("safetensors.numpy.save_file", fail)
    outcome = run(capsys, "convert", made / "linen", out, "--overwrite")
    assert outcome.code == 2
    assert "No space left on device" in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]


def test_a_diff_under_a_plan_that_is_not_clean_speaks_of_no_writing(capsys, made, tmp_path):
    """Regression: it said that nothing was written, and diff never writes."""
    (tmp_path / "wrong.toml").write_text('[rules]\n"layers_0" = "nowhere"')
    options = ("--model", NNX_MODEL, "--rules", tmp_path / "wrong.toml")
    outcome = run(capsys, "diff", made / "linen", made / "nnx", *options)
    assert (outcome.code, outcome.out) == (1, "")
    assert "the plan is not clean" in outcome.err
    assert "written" not in outcome.err


def test_an_error_can_be_pickled():
    error = InputError("--rules", "found", "expected", "remedy")
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is type(error)
    assert str(copied) == str(error)
    assert vars(copied) == vars(error)


@pytest.mark.parametrize(
    ("name", "options", "table", "message"),
    [
        ("absent", (), None, "there is no checkpoint at"),
        ("linen", ("--rules", "absent.toml"), None, "absent.toml"),
        ("linen", (), "x = [", "expected a TOML file"),
        ("linen", (), "x = 'a'", "found the entries 'x', expected one table [rules]"),
        ("linen", (), "[rules]\nx = 1", "expected one table [rules] of texts"),
        ("linen", (), "[rules]\n[more]", "found the entries 'rules', 'more'"),
    ],
)
def test_what_cannot_be_converted_is_a_short_message(
    capsys, made, tmp_path, name, options, table, message
):
    if table is not None:
        (tmp_path / "table.toml").write_text(table)
        options = ("--rules", tmp_path / "table.toml", "--model", NNX_MODEL)
    outcome = run(capsys, "convert", made / name, tmp_path / "out", *options)
    assert outcome.code == 2, outcome
    assert message in outcome.err
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "out").exists()


def test_two_formats_of_a_checkpoint_list_alike(capsys, tmp_path):
    rows = {f"layer_{n}": {"w": np.zeros(2, np.float32)} for n in (10, 2)}
    variables = {"params": rows, "batch_stats": {"b": {"mean": np.ones(3, np.float32)}}}
    checkpoint.save(tmp_path / "bridged", variables)
    (tmp_path / "v.msgpack").write_bytes(serialization.to_bytes(variables))
    state = nnx.State(jax.tree.map(nnx.Param, rows))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        orbax.save(tmp_path / "orbax", args=ocp.args.PyTreeSave(variables))
        orbax.save(tmp_path / "state", args=ocp.args.PyTreeSave(state))
        orbax.save(tmp_path / "plain", args=ocp.args.PyTreeSave(rows))
    outcomes = {
        path.name: run(capsys, "inspect", path, "--json").document for path in tmp_path.iterdir()
    }
    listed = {
        name: [(leaf["collection"], leaf["path"], leaf["shape"]) for leaf in outcome["leaves"]]
        for name, outcome in outcomes.items()
    }
    # Regression: each was listed in the order of its file.
    assert listed["bridged"] == listed["v.msgpack"] == listed["orbax"]
    assert [path for _, path, _ in listed["orbax"]] == ["b/mean", "layer_2/w", "layer_10/w"]
    # Regression: the key that orbax writes for each Variable of a State was shown.
    assert [each[1:] for each in listed["state"]] == [each[1:] for each in listed["orbax"][1:]]
    assert outcomes["state"]["layout"] == "nnx"


def _restored_natively(path, like):
    """The State as a program without the bridge restores it."""
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), like)
    with ocp.StandardCheckpointer() as orbax:
        return orbax.restore(path.absolute(), abstract)
