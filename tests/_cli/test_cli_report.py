import contextlib
import inspect
import io
import json
import math
import pathlib
import re
import sys
import time

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge import __main__
from bridge._cli import _command
from bridge._cli.report import _document, _tree
from bridge._cli.report._observed import observing

from . import mixed_models
from .command_line import run
from .mixed_models import DENSE, WIDTH

TARGETS = "tests._cli.mixed_models"
ROOT = pathlib.Path(mixed_models.__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def report(capsys):
    def make(name, *options):
        outcome = run(capsys, "report", f"{TARGETS}:{name}", "--json", *options)
        assert outcome.code == 0, outcome.err
        return outcome.document

    return make


def by_path(document):
    return {module["path"]: module for module in document["modules"]}


LAYER = {
    "": ("LinenBlock", "wrapped-linen", 0, 2 * DENSE + WIDTH * WIDTH),
    "/Dense_0": ("Dense", "linen", DENSE, DENSE),
    "/inner": ("NnxInner", "wrapped-nnx", 0, DENSE + WIDTH * WIDTH),
    "/inner/linear": ("Linear", "nnx", WIDTH * WIDTH, WIDTH * WIDTH),
    "/inner/old": ("Dense", "wrapped-linen", DENSE, DENSE),
}
MIXED = {
    "": ("Mixed", "nnx", WIDTH, 7 * WIDTH * WIDTH + 8 * WIDTH),
    **{f"layers/{i}{path}": row for i in (0, 1) for path, row in LAYER.items()},
    "norm": ("BatchNorm", "wrapped-linen", 2 * WIDTH, 2 * WIDTH),
    "again": ("Linear", "nnx", DENSE, DENSE),
}


@pytest.mark.parametrize("name", ["make_mixed", "make_with_inputs"])
def test_the_tree_crosses_every_boundary_and_counts_what_each_module_owns(report, name):
    found = {
        path: (m["class"], m["kind"], m["own"]["parameters"], m["total"]["parameters"])
        for path, m in by_path(report(name)).items()
    }
    assert found == MIXED


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ("jnp.ones((30, 4))", "… of type ArrayImpl as 'model', expected"),
        ("np.ones((30, 4))", "… of type ndarray as 'model', expected"),
        ("{'x': np.ones((30, 4))}", "… of type dict as 'model', expected"),
    ],
)
def test_what_is_no_model_is_named_in_one_line(capsys, tmp_path, made, text):
    """Regression: the repr of an array went over several lines."""
    (tmp_path / "arrays.py").write_text(f"import jax.numpy as jnp, numpy as np\nx = {made}\n")
    outcome = run(capsys, "report", f"{tmp_path / 'arrays.py'}:x")
    sys.modules.pop("arrays", None)
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
    assert text in outcome.err


def test_parents_come_before_their_submodules_with_their_depth(report):
    modules = report("make_mixed")["modules"]
    seen = []
    for module in modules:
        above = [p for p in seen if not p or module["path"].startswith(f"{p}/")]
        assert module["depth"] == len(above)
        seen.append(module["path"])
    assert [m["name"] for m in modules[:4]] == ["", "again", "layers/0", "Dense_0"]


def test_totals_are_those_of_the_state_and_a_shared_module_counts_once(report):
    state = nnx.state(mixed_models.make_mixed(), nnx.Param)
    arrays = jax.tree.leaves(state)
    whole = by_path(report("make_mixed"))[""]["total"]
    assert whole["parameters"] == sum(array.size for array in arrays)
    assert whole["bytes"] == sum(array.nbytes for array in arrays)


def test_the_migrated_share_is_what_nnx_modules_own(report):
    migrated = report("make_mixed")["migrated"]
    native = WIDTH + DENSE + 2 * WIDTH * WIDTH
    total = 7 * WIDTH * WIDTH + 8 * WIDTH
    assert migrated["parameters"] == {
        "native": native,
        "total": total,
        "share": native / total,
        # The scale is bfloat16.
        "native_bytes": 4 * native - 2 * WIDTH,
        "total_bytes": 4 * total - 2 * WIDTH,
    }
    assert migrated["modules"] == {"native": 6, "total": 13, "share": 6 / 13}


def test_each_module_says_how_much_of_it_is_migrated(report):
    found = by_path(report("make_mixed"))
    inner = WIDTH * WIDTH
    assert found["layers/0"]["migrated"] == inner / (2 * DENSE + inner)
    assert found["again"]["migrated"] == 1.0
    assert found["norm"]["migrated"] == 0.0


def test_stacked_layers_are_counted_whole_under_their_own_class(report):
    document = report("make_scanned")
    found = {
        p: (m["class"], m["kind"], m["own"]["parameters"]) for p, m in by_path(document).items()
    }
    assert found == {
        "": ("Scanned", "linen", 0),
        "layers": ("ScannedLayer", "linen", 0),
        "layers/linear": ("Linear", "wrapped-nnx", 3 * DENSE),
        "CheckpointDense_0": ("Dense", "linen", DENSE),
    }


def test_a_mapping_as_a_parameter_is_no_module(report):
    found = by_path(report("make_unusual"))
    sizes = {path: module["own"]["parameters"] for path, module in found.items()}
    kernel = jax.eval_shape(nn.ConvLocal(2, (1,)).init, jax.random.key(0), jnp.ones((2, WIDTH, 1)))
    local = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(kernel["params"]))
    assert sizes == {"": 3 + 5, "ConvLocal_0": local}


def test_a_module_that_equals_one_that_ran_has_the_same_classes(report):
    document = report("make_half_restored")
    found = by_path(document)
    classes = [found[f"layers/{i}/Dense_0"]["class"] for i in (0, 1)]
    assert classes == ["Dense", "Dense"]
    assert document["notes"] == []


def test_a_model_of_a_lifted_class_is_shown_by_its_own_class(report):
    (module,) = report("make_transformed")["modules"]
    assert (module["class"], module["kind"]) == ("Dense", "linen")
    assert module["counterpart"]["name"] == "flax.nnx.Linear"


def test_blocks_that_share_one_trace_both_have_their_tree(report):
    found = by_path(report("make_jitted"))
    assert [found[f"blocks/{i}/Dense_0"]["class"] for i in (0, 1)] == ["Dense", "Dense"]
    assert found["blocks/1/Dense_0"]["own"]["parameters"] == DENSE


def test_the_wrappers_of_flax_are_seen_through_too(report):
    found = {p: (m["class"], m["kind"]) for p, m in by_path(report("make_with_peer")).items()}
    assert found == {
        "": ("PeerMixed", "nnx"),
        "old": ("PeerBlock", "wrapped-linen"),
        "old/Dense_0": ("Dense", "linen"),
        "old/inner": ("Linear", "wrapped-nnx"),
        "new": ("Linear", "nnx"),
    }
    document = report("make_with_peer")
    assert document["migrated"]["parameters"]["native"] == 2 * DENSE
    assert document["migrated"]["parameters"]["total"] == 3 * DENSE


def test_an_nnx_module_that_is_wrapped_twice_is_known_without_inputs(report):
    document = report("make_wrapped_wrapper")
    (module,) = document["modules"]
    assert (module["class"], module["kind"]) == ("Linear", "wrapped-nnx")
    assert module["own"]["parameters"] == DENSE
    assert document["notes"] == []


def test_a_model_that_was_not_seen_running_has_its_paths_and_a_note(report):
    document = report("make_restored")
    found = by_path(document)
    assert found["Dense_0"]["class"] is None
    assert found["Dense_0"]["own"]["parameters"] == DENSE
    assert found["inner/linear"]["class"] == "Linear"
    assert "the classes of 1 Linen modules are not known" in document["notes"][0]


def test_the_source_is_the_line_of_the_class_or_the_import_path(report):
    found = by_path(report("make_mixed"))
    lines = pathlib.Path(mixed_models.__file__).read_text().splitlines()
    assert found["layers/0"]["source"] == {
        "import_path": f"{TARGETS}.LinenBlock",
        "file": "tests/_cli/mixed_models.py",
        "line": lines.index("class LinenBlock(nn.Module):") + 1,
    }
    assert found["norm"]["source"] == {
        "import_path": "flax.linen.BatchNorm",
        "file": None,
        "line": None,
    }


def test_a_file_outside_of_the_directory_is_shown_by_its_import_path(tmp_path):
    source = _document.source_of(mixed_models.Mixed, tmp_path)
    assert (source["import_path"], source["file"]) == (f"{TARGETS}.Mixed", None)


def test_an_installed_package_is_shown_by_its_import_path_wherever_it_lies():
    directory = pathlib.Path(flax.__file__).parents[2]
    place = {"import_path": "flax.linen.Dense", "file": None, "line": None}
    assert _document.source_of(nn.Dense, directory) == place


def test_counterparts_are_told_for_the_layers_of_flax(report):
    found = by_path(report("make_mixed")) | {"x": by_path(report("make_unusual"))["ConvLocal_0"]}
    told = {path: found[path]["counterpart"] for path in ("norm", "layers/0", "again", "x")}
    assert told == {
        "norm": {"exists": True, "name": "flax.nnx.BatchNorm"},
        "layers/0": {"exists": None, "name": None},
        "again": {"exists": None, "name": None},
        "x": {"exists": False, "name": None},
    }


def test_the_parts_of_a_layer_have_the_counterpart_of_the_layer(report):
    found = by_path(report("make_lstm"))
    assert found["cell/hi"]["class"] == "DenseParams"
    assert {found[path]["counterpart"]["name"] for path in ("cell", "cell/hi", "cell/io")} == {
        "flax.nnx.OptimizedLSTMCell"
    }
    # A layer that has none of its own still has none inside of one that has.
    normed = by_path(report("make_normed_local"))
    assert normed["layer_instance"]["counterpart"] == {"exists": False, "name": None}


def test_the_time_of_a_report_does_not_grow_with_the_square_of_the_model(capsys):
    # On JAX 0.10 the constructor alone takes the square, in a trace.
    start = time.process_time()
    jax.eval_shape(lambda: (mixed_models.make_nnx_tower(), None)[1])
    native = time.process_time() - start
    start = time.process_time()
    for maker in ("make_linen_tower", "make_nnx_tower"):
        assert run(capsys, "report", f"{TARGETS}:{maker}").code == 0
    # About 3 s beside the constructor; before, more than 30.
    taken = time.process_time() - start
    assert taken < 2 * native + 12


def test_every_layer_of_linen_has_a_counterpart_or_is_known_to_have_none():
    layers = {
        cls
        for name, cls in vars(nn).items()
        if inspect.isclass(cls) and issubclass(cls, nn.Module) and cls is not nn.Module
    } - {nn.RNNCellBase}
    found = {cls.__name__: _document.counterpart_of(cls) for cls in layers}
    without = {name for name, other in found.items() if other is False and "Fp8" not in name}
    assert without == {"ConvLocal", "MGUCell", "ConvLSTMCell"}
    assert all(not other or issubclass(other, nnx.Module) for other in found.values())
    assert None not in found.values()


def test_nothing_is_allocated(report):
    document = report("make_huge")
    assert document["migrated"]["parameters"]["total"] == 2 * 10**12


def test_the_tree_is_a_pure_function_of_a_concrete_model_too():
    model = bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0))
    with observing() as observed:
        model.lazy_init(jnp.ones((1, 2)))
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    (found,) = _tree.modules_of(model, observed)
    assert (found.cls, found.kind, found.own) == (nn.Dense, "wrapped-linen", _tree.Size(9, 36))
    after = nnx.state(model, nnx.Param)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))


@pytest.mark.parametrize(
    ("minimum", "code"), [(56 / 144, 0), (np.nextafter(56 / 144, 1), 1), (1.0, 1)]
)
def test_the_check_fails_below_the_share_that_is_asked_for(capsys, minimum, code):
    outcome = run(
        capsys, "report", f"{TARGETS}:make_mixed", "--json", "--min-migrated", repr(float(minimum))
    )
    assert outcome.code == code
    assert outcome.document["check"] == {"min_migrated": minimum, "passed": code == 0}


def test_parameters_that_are_not_known_cannot_pass_a_check(capsys):
    target = f"{TARGETS}:make_uninitialised"
    outcome = run(capsys, "report", target, "--min-migrated", "0")
    assert outcome.code == 2
    assert "no variables yet" in outcome.err
    shown = run(capsys, "report", target)
    assert shown.code == 0
    assert "note: no variables yet in the ToNNX at the model" in shown.out
    complete = run(capsys, "report", target, "--input", "2,5", "--json").document
    assert complete["notes"] == []
    assert complete["migrated"]["parameters"]["total"] == 5 * 3 + 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_colon"], "put the name behind a colon"),
        (["no.such.module:make"], "no module 'no'"),
        (["tests/_cli/absent.py:make"], "tests/_cli/absent.py, expected"),
        ([f"{TARGETS}:absent"], "no name 'absent'"),
        ([f"{TARGETS}:make_nothing"], "3 of type int"),
        ([f"{TARGETS}:make_error"], "ZeroDivisionError: asked to fail"),
        ([f"{TARGETS}:make_unknown_key"], "as 'inputz', JitTracer"),
        ([f"{TARGETS}:Scanned"], "pass --input 1,28,28,1"),
        ([f"{TARGETS}:Scanned", "--input", "2,4", "--kwarg", "y=1"], "1 sample inputs and y (got"),
        ([f"{TARGETS}:Scanned", "--input", "2,x"], "x is not a whole number from 0 on"),
        ([f"{TARGETS}:Scanned", "--input", "2,-1"], "such as 8,28,28,1 or 8,16:int32"),
        ([f"{TARGETS}:Scanned", "--input", "2:float33"], "float33 is not a dtype"),
        ([f"{TARGETS}:make_with_inputs", "--input", "2,5"], "Error: "),
        (["tests.port.models:LinenNet", "--input", "2,5"], "--input 2,5:int32)"),
        ([f"{TARGETS}:make_mixed", "--min-migrated", "60"], "between 0 and 1"),
        ([f"{TARGETS}:make_mixed", "--html", "no/such/directory.html"], "no directory no"),
    ],
)
def test_what_cannot_be_used_is_a_short_message_and_exit_code_two(capsys, arguments, message):
    outcome = run(capsys, "report", *arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""


def test_a_file_or_module_that_fails_to_import_is_named(capsys, monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    for target in ("broken.py:make", "broken:make"):
        outcome = run(capsys, "report", target)
        assert outcome.code == 2
        assert "ModuleNotFoundError: No module named 'no_such_package'\n" in outcome.err
        assert f"({tmp_path / 'broken.py'}, line 1; " in outcome.err
    assert "broken" not in sys.modules


def test_a_file_is_not_mistaken_for_a_module_of_its_name(capsys, tmp_path):
    (tmp_path / "json.py").write_text("from flax import linen\nmake = linen.Dense(2)\n")
    target = f"{tmp_path}/json.py:make"
    outcomes = [run(capsys, "report", target, "--input", "1,3", "--json") for _ in range(2)]
    assert [o.document["migrated"]["parameters"]["total"] for o in outcomes] == [8, 8]
    assert sys.modules["json"] is json


def test_modules_with_arrays_in_their_fields_are_told_apart(report):
    found = by_path(report("make_with_arrays"))
    sizes = {path: m["own"]["parameters"] for path, m in found.items() if m["kind"] != "nnx"}
    assert sizes == {"layers/0": 0, "layers/0/Dense_0": 20, "layers/1": 0, "layers/1/Dense_0": 20}


def test_traceback_shows_where_the_program_failed(capsys):
    outcome = run(capsys, "report", f"{TARGETS}:make_error", "--traceback")
    assert outcome.code == 2
    assert 'raise ZeroDivisionError("asked to fail")' in outcome.err


def test_a_model_that_needs_values_runs_with_real_arrays(report):
    assert by_path(report("make_one_of_values"))[""]["own"]["parameters"] == DENSE


def test_a_class_and_a_model_can_be_named_instead_of_a_function(report):
    assert by_path(report("Mixed", "--input", f"2,{WIDTH}"))["again"]["kind"] == "nnx"
    for name in ("MODEL", "NNX_MODEL"):
        document = report(name, "--input", f"2,{WIDTH}")
        assert document["migrated"]["parameters"]["total"] == DENSE
    # The report is made of a copy.
    assert not mixed_models.NNX_MODEL.linen_variables()


def test_a_method_and_keyword_inputs_can_be_given(report):
    found = by_path(report("make_by_method"))
    assert {path: m["own"]["parameters"] for path, m in found.items()} == {"": 0, "encoder": DENSE}


def test_a_file_can_import_what_is_beside_it(capsys, tmp_path):
    (tmp_path / "beside_it.py").write_text("WIDTH = 6\n")
    (tmp_path / "a_file.py").write_text(
        "from flax import nnx\n"
        "def make():\n"
        "    from beside_it import WIDTH\n"
        "    return nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(0))\n"
    )
    before = list(sys.path)
    outcome = run(capsys, "report", f"{tmp_path}/a_file.py:make", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["migrated"]["parameters"]["total"] == 6 * 2 + 2
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("8,28,28,1", (8, 28, 28, 1), jnp.float32),
        ("8, 16:int32", (8, 16), jnp.int32),
        ("3,:bfloat16", (3,), jnp.bfloat16),
        (":uint8", (), jnp.uint8),
    ],
)
def test_inputs_are_written_as_shapes(text, shape, dtype):
    assert _command._shape(text) == jax.ShapeDtypeStruct(shape, dtype)


def test_the_text_has_one_line_for_each_module_and_the_shares(capsys):
    shown = run(capsys, "report", f"{TARGETS}:make_mixed").out
    rows = shown.split("\n\n")[0].splitlines()
    assert len(rows) == 1 + len(MIXED)
    assert rows[2].startswith("  again ")
    assert rows[3].startswith("  layers/0 ")
    assert rows[6].startswith("      linear ")
    assert rows[-1].startswith("  norm ")
    assert "38.9%  56 of 144, 216 B of 568 B" in shown
    assert "46.2%  6 of 13" in shown


def test_the_page_is_one_file_that_loads_nothing_and_escapes_names(capsys, tmp_path):
    (tmp_path / "hostile.py").write_text(
        "from flax import nnx\n"
        "def make():\n"
        "    return nnx.Dict({'<img src=x>': nnx.Linear(2, 3, rngs=nnx.Rngs(0))})\n"
    )
    page = tmp_path / "page.html"
    for target in (f"{TARGETS}:make_mixed", f"{tmp_path / 'hostile.py'}:make"):
        assert run(capsys, "report", target, "--html", page).code == 0
        text = page.read_text()
        assert "src=" not in text.replace("&lt;img src=x&gt;", "")
        assert not [word for word in ("href", "<script", "url(", "@import") if word in text]
        assert '<div class="wide"><pre>' in text
    assert "&lt;img src=x&gt;" in text
    sys.modules.pop("hostile", None)


@pytest.mark.parametrize("width", [140, 110, 84, 60])
def test_a_narrow_terminal_gets_every_column_folded(capsys, monkeypatch, width):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    for name, value in (("COLUMNS", str(width)), ("TERM", "xterm"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    with contextlib.redirect_stdout(stream):
        assert __main__.main(["report", f"{TARGETS}:make_mixed"]) == 0
    written = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    table = written.partition("\nmigrated to NNX")[0]
    assert max(len(line.rstrip()) for line in table.splitlines()) <= width
    # Nothing is cut.
    whole = run(capsys, "report", f"{TARGETS}:make_mixed").out.partition("\nmigrated to NNX")[0]
    assert sorted(table.replace("\n", "").replace(" ", "")) == sorted(
        whole.replace("\n", "").replace(" ", "")
    )
