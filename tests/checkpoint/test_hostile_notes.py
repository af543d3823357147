"""The JSON beside a checkpoint is not trusted: whatever it says, nothing but an error happens."""

import copy
import json
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bridge
from bridge import checkpoint
from bridge.checkpoint import CheckpointError, _arrays

VARIABLES = {
    "params": {
        "a": nn.Partitioned(jnp.ones((2, 3)), names=("x", None)),
        "b": {"deep": (jnp.ones(2), [3, 0.5, "text", True])},
        "c": bridge.NNXMeta(nnx.Param, jnp.ones(2), {"sharding_names": ("x",), "note": {1: 2}}),
    },
    "batch_stats": {10: {(1, "t"): jnp.zeros((0, 4))}},
    "RngKey": {"key": jax.random.key(0)},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "checkpoint"
    checkpoint.save(path, VARIABLES, extra={"step": 3, "ema": [jnp.ones(2)]})
    return path


@pytest.fixture(scope="module")
def document(path):
    return json.loads((path / "bridge" / "metadata").read_text())


@pytest.fixture(scope="module")
def changing_path(path, tmp_path_factory):
    """A copy whose notes each example writes anew."""
    return shutil.copytree(path, tmp_path_factory.mktemp("changing") / "checkpoint")


def with_notes(path, tmp_path, content):
    """A copy of the checkpoint with other notes."""
    other = tmp_path / "copy"
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(path, other)
    text = content if isinstance(content, str) else json.dumps(content)
    (other / "bridge" / "metadata").write_text(text)
    return other


def changed(document, where, new):
    """A document with another value at a place."""
    made = copy.deepcopy(document)
    node = made
    for key in where[:-1]:
        node = node[key]
    key = where[-1]
    node[key] = new(node[key]) if callable(new) else new
    return made


FIRST = ("items", "variables", 0)
HOSTILE = [
    (("version",), "1"),
    (("version",), True),
    (("written_by",), "os.system"),
    (("items",), []),
    (("items", "variables"), {}),
    (("items",), lambda items: {**items, "../../etc": items["ema"]}),
    (("items",), lambda items: {**items, "/etc": items["ema"]}),
    (("items",), lambda items: {**items, "..": items["ema"]}),
    (("items",), lambda items: {**items, "bridge": items["ema"]}),
    (("items",), lambda items: {"ema": items["ema"]}),
    ((*FIRST, "path"), {"list": ["params", "a"]}),
    ((*FIRST, "path"), {"tuple": []}),
    ((*FIRST, "path"), {"tuple": [3, "a"]}),
    ((*FIRST, "path"), {"tuple": ["params", {"spec": []}]}),
    ((*FIRST, "path"), {"eval": "1"}),
    ((*FIRST, "path"), {"tuple": ["params"], "list": []}),
    ((*FIRST, "names"), [["..", "..", "secret"]]),
    ((*FIRST, "names"), [["params", "../../secret"]]),
    ((*FIRST, "names"), [["params", "b", "deep"]]),
    ((*FIRST, "names"), [["params"]]),
    ((*FIRST, "names"), []),
    ((*FIRST, "names"), [[["params"], "a"]]),
    ((*FIRST, "leaves", 0, 0), "pickle"),
    ((*FIRST, "leaves", 0, 0), ["jax"]),
    ((*FIRST, "leaves", 0, 1), [-1]),
    ((*FIRST, "leaves", 0, 1), ["2", "3"]),
    ((*FIRST, "leaves", 0, 1), [10**30]),
    ((*FIRST, "leaves", 0, 2), "object"),
    ((*FIRST, "leaves", 0, 2), "no such dtype"),
    ((*FIRST, "leaves", 0, 3), "content"),
    ((*FIRST, "leaves", 0), ["int", [], "int", "3"]),
    ((*FIRST, "leaves", 0), ["float", [], "float", "one"]),
    ((*FIRST, "leaves", 0), ["bool", [], "bool", 1]),
    ((*FIRST, "leaves", 0), ["key", [], "key<fry>", "no such prng"]),
    ((*FIRST, "leaves", 0), ["key", [], "key<fry>", None]),
    ((*FIRST, "form"), 1),
    ((*FIRST, "form"), {"list": [0, 0]}),
    ((*FIRST, "form"), {"dict": [[0, 1, 2]]}),
    ((*FIRST, "form"), {"dict": [[{"list": []}, 0]]}),
    ((*FIRST, "form"), "0"),
    ((*FIRST, "form"), {"module": "os"}),
    ((*FIRST, "digests"), [3]),
    ((*FIRST, "digests"), ["x" * 16]),
    ((*FIRST, "box"), 3),
    ((*FIRST, "box"), "os:system"),
    ((*FIRST, "box"), "flax.nnx:Param"),
    ((*FIRST, "fields"), [1]),
    ((*FIRST, "fields", "value"), 3),
    ((*FIRST, "fields", "out_sharding"), {"spec": [3]}),
    ((*FIRST, "fields", "out_sharding"), {"unknown": [3]}),
    ((*FIRST, "fields", "out_sharding"), {"hook": "__class__"}),
    ((*FIRST, "fields", "__class__"), {"hook": "__class__"}),
    ((*FIRST, "fields", "out_sharding"), {"type": "os:system"}),
    ((*FIRST, "left_out"), "x"),
    ((*FIRST, "left_out"), [3]),
    ((*FIRST, "more"), 3),
    (("more",), 3),
    (("items", "variables"), lambda records: [*records, records[0]]),
    (("items", "variables"), lambda records: [*records, 3]),
]


@pytest.mark.parametrize(("where", "new"), HOSTILE)
def test_a_hostile_document_is_an_error_of_few_lines(path, tmp_path, document, where, new):
    other = with_notes(path, tmp_path, changed(document, where, new))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(other)
    assert len(str(caught.value).splitlines()) < 15


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "[" * 10**5, '{"version": 1' + "0" * 5000 + "}"]
)
def test_what_is_no_document_is_an_error(path, tmp_path, text):
    with pytest.raises(CheckpointError):
        checkpoint.restore(with_notes(path, tmp_path, text))


def test_a_name_of_a_type_imports_nothing_and_asks_no_module(path, tmp_path, document, monkeypatch):
    asked = []
    lazy = types.ModuleType("lazy_package")
    lazy.__getattr__ = asked.append
    monkeypatch.setitem(sys.modules, "lazy_package", lazy)
    for name in ("lazy_package:Box", "lazy_package:a.b", "bridge:parity", "bridge.parity:Report"):
        for where in ((*FIRST, "box"), (*FIRST, "fields", "out_sharding")):
            new = name if where[-1] == "box" else {"type": name}
            other = with_notes(path, tmp_path, changed(document, where, new))
            modules = set(sys.modules)
            with pytest.raises(CheckpointError, match="has not imported"):
                checkpoint.restore(other)
            assert set(sys.modules) == modules
            # With a target its boxes count.
            checkpoint.restore(other, jax.tree.map(lambda leaf: leaf, VARIABLES))
    assert not asked


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.sampled_from(["", "params", "..", "/etc/passwd", "0x1p0", "jax", "float32", "os:system"]),
)
TAGS = st.sampled_from(["tuple", "list", "dict", "FrozenDict", "float", "spec", "type", "hook"])
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TAGS | st.just("x"), inner, max_size=2)
    ),
    max_leaves=4,
)


def places(node, above=()):
    """Every place in a document."""
    yield above
    if isinstance(node, dict | list):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from places(child, (*above, key))


@st.composite
def mutations(draw, document):
    """A document with some changes: other values, what is gone, doubled, or in another place."""
    made = {"": copy.deepcopy(document)}
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(made))[1:]
        *above, key = draw(st.sampled_from(found))
        node = made
        for step in above:
            node = node[step]
        kind = draw(st.sampled_from(["replace", "delete", "copy", "double"]))
        if kind == "replace" or not above:
            node[key] = draw(JSON)
        elif kind == "delete":
            del node[key]
        elif kind == "copy":
            other = made
            for step in draw(st.sampled_from(found)):
                other = other[step]
            node[key] = copy.deepcopy(other)
        elif isinstance(node, list):
            node.insert(draw(st.integers(0, len(node))), copy.deepcopy(node[key]))
        else:
            node[draw(TAGS)] = copy.deepcopy(node[key])
    return made[""]


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_mutated_documents_give_checkpoint_errors(changing_path, document, monkeypatch, data):
    path = changing_path
    made = data.draw(mutations(document))
    (path / "bridge" / "metadata").write_text(json.dumps(made))
    read = []

    def zeros(directory, tree, wanted):
        read.append(directory)
        leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: hasattr(leaf, "location"))
        found = {leaf.location: leaf for leaf in leaves}
        return {place: np.zeros(found[place].shape, np.uint32) for place in wanted}

    # Reading the arrays takes a hundred times as long as the rest, and does not read the document.
    monkeypatch.setattr(_arrays, "_read", zeros)
    modules = set(sys.modules)
    target = {"params": {"a": jnp.zeros((2, 3)), "b": {"deep": (jnp.ones(2), [1, 0.5, "", False])}}}
    for act in (
        lambda: checkpoint.restore(path),
        lambda: checkpoint.restore(path, target, extra={"step": 0}, allow_unexpected=True),
        lambda: checkpoint.restore(path, verify=True),
        lambda: checkpoint.layout(path),
    ):
        try:
            act()
        except CheckpointError as error:
            assert len(str(error).splitlines()) < 40  # noqa: PT017 whether one comes is not known
    assert set(sys.modules) == modules
    assert {directory.parent for directory in read} <= {path}


def test_a_name_that_orbax_would_look_for_elsewhere_is_refused(tmp_path):
    """Without a database orbax has a directory for each array, which it finds by its name."""
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    checkpoint.save(tmp_path / "model", {"params": {"w": jnp.ones(2)}})
    shutil.rmtree(tmp_path / "model" / "variables")
    for name in ("secret", "model/variables"):
        with ocp.Checkpointer(handler) as orbax:
            orbax.save(tmp_path / name, args=ocp.args.PyTreeSave({"params": {"w": jnp.ones(2)}}))
    notes = tmp_path / "model" / "bridge" / "metadata"
    document = json.loads(notes.read_text())
    (record,) = document["items"]["variables"]
    record["names"] = [["..", "..", "secret", "params.w"]]
    for form in (0, {"not carried": "a Box"}):
        notes.write_text(
            json.dumps({**document, "items": {"variables": [{**record, "form": form}]}})
        )
        with pytest.raises(CheckpointError, match="name"):
            checkpoint.restore(tmp_path / "model", {"params": {"w": jnp.zeros(2)}})
