"""The functions that train a model are rewritten whole, and proven by three steps, or stay."""

import importlib
import itertools
import pathlib
import re
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from bridge import port, rewrite
from bridge.__main__ import main
from bridge.rewrite import RewriteError, Training

from .programs import APART, DROPOUT, ENCODER, HEAD, PROGRAMS, STATISTICS
from .programs_more import CONFIGURED, DEVICES, FUNCTIONS, MORE, WHOLE

_numbers = itertools.count()


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Makes packages of a file `train`, and gives that module."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(source, **files):
        name = f"training_{next(_numbers)}"
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        (folder / "train.py").write_text(HEAD + source)
        for other, text in files.items():
            path = folder / f"{other.replace('__', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return importlib.import_module(f"{name}.train")

    yield make
    for name in [name for name in sys.modules if name.startswith("training_")]:
        del sys.modules[name]


def rewritten(module, train=None):
    return rewrite(
        module.make,
        *module.INPUTS,
        kwargs=module.KWARGS,
        gradients=False,
        fast=True,
        train=train or module.sample,
    )


def training(result) -> Training:
    assert result.training is not None
    return result.training


def new_text(result):
    (text,) = result.sources.values()
    return text


def refusals(result):
    return {each.refusal.id for each in training(result).left if each.refusal is not None}


def replaced(source, old, new):
    assert source.count(old) == 1, old
    return source.replace(old, new)


@pytest.mark.parametrize("source", [*PROGRAMS.values(), *MORE.values()], ids=[*PROGRAMS, *MORE])
def test_the_training_is_proven(packages, source):
    module = packages(source)
    result = rewritten(module)
    assert training(result).is_proven, result
    assert training(result).difference == 0.0
    not_run = {"make", "initialised", "first_params"}
    left = training(result).left
    assert {e.name for e in left if "training-branch" not in repr(e.refusal)} <= not_run


@pytest.mark.parametrize(
    "source",
    [s for s in PROGRAMS.values() if s is not DROPOUT],
    ids=[n for n in PROGRAMS if "dropout" not in n],
)
def test_the_files_that_are_written_train_as_the_linen_program_does(packages, source):
    module = packages(source)
    result = rewritten(module)
    result.write()
    new = importlib.import_module(f"{module.__name__}_nnx")
    (state, step, batches), (new_state, new_step, _) = module.sample(), new.sample()
    stats = {"batch_stats": state.batch_stats} if hasattr(state, "batch_stats") else {}
    plan = port.plan({"params": state.params, **stats}, new_state.model, result.rules)
    plan.apply()
    for each in batches:
        batch = each if isinstance(each, tuple) else (each,)
        state, *returned = step(state, *batch)
        new_state, *new_returned = new_step(new_state, *batch)
        jax.tree.map(np.testing.assert_array_equal, returned, new_returned)
    assert new_state.optimizer.step[...] == state.step == 3
    moved = plan.convert({"params": state.params})
    leaves = dict(nnx.to_flat_state(nnx.state(new_state.model, nnx.Param)))
    for (_, path), value in moved.items():
        np.testing.assert_array_equal(leaves[path][...], value)


def test_functions_that_only_pass_a_state_on_stay(packages):
    text = new_text(rewritten(packages(APART)))
    start, end = APART.index("def epoch"), APART.index("def sample")
    assert APART[start:end] in text


def test_the_new_functions_read_as_written_by_hand(packages):
    text = new_text(rewritten(packages(APART)))
    assert (
        text[text.index("@nnx.jit") : text.index("def epoch")]
        == '''@nnx.jit
def gradients_of(state, x, labels):
    """Gradients, and how good the model is."""

    def loss_fn(model):
        logits = model(x)  # a row for each example
        wanted = jax.nn.one_hot(labels, 3)
        return optax.softmax_cross_entropy(logits, wanted).mean(), logits

    both = nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = both(state.model)
    return grads, loss, (logits.argmax(-1) == labels).mean()


@nnx.jit
def updated(state, grads):
    state.optimizer.update(state.model, grads)
    return state


'''
    )


def test_statistics_leave_the_functions_and_fields_stay_in_the_state(packages):
    text = new_text(rewritten(packages(STATISTICS)))
    functions = text[text.index("class State") : text.index("def eval_step")]
    assert "batch_stats" not in re.sub(r"(?s)def initialised.*?\n\n\n", "", functions)
    assert "rate: float = 0.1" in functions
    assert "return loss + 0.01 * large, logits" in functions
    assert "for w in jax.tree.leaves(nnx.state(model, nnx.Param))" in functions


def test_dropout_draws_from_the_keys_of_the_step(packages):
    module = packages(DROPOUT)
    rewritten(module).write()
    new = importlib.import_module(f"{module.__name__}_nnx")
    x, labels, key = new.sample()[2][0]

    def loss(key):
        return float(new.train_step(new.create(jax.random.key(0)), x, labels, {"dropout": key})[1])

    assert loss(key) == loss(key) != loss(jax.random.key(8))


UPDATE = "    return state.apply_gradients(grads=grads)"
# The reason, the program, and the texts that are replaced in it.
LEFT = [
    (
        "old-state",
        APART,
        (
            UPDATE,
            "    new = state.apply_gradients(grads=grads)\n    return new.replace(step=state.step)",
        ),
    ),
    ("state-replace", APART, (UPDATE, f"{UPDATE}.replace(params=state.params)")),
    ("state-create", APART, ("params=params", "params=jax.tree.map(jnp.copy, params)")),
    ("state-apply", APART, ("apply_fn=net.apply", "apply_fn=lambda v, x: net.apply(v, x)")),
    ("state-use", STATISTICS, ('"step"] = step', '"step"] = state.opt_state')),
    ("state-field", STATISTICS, ("default=0.1", "default=0.1, metadata={}")),
    (
        "state-body",
        STATISTICS,
        ("    rate: float", "    def twice(self):\n        return 2\n\n    rate: float"),
    ),
    (
        "statistics-use",
        STATISTICS,
        ('"step"] = step', '"step"] = step + len(updated)'),
    ),
    (
        "argument-options",
        FUNCTIONS,
        ("static_argnums=(0, 4)", 'static_argnames=("apply_fn", "factor")'),
    ),
    (
        "variables-use",
        ENCODER,
        ("    keys = jax", "    assert len(variables) == 1\n    keys = jax"),
    ),
    (
        "params-keyword",
        DROPOUT,
        ("eval_step(state.params, x)", "eval_step(params=state.params, x=x)"),
    ),
    (
        "model-passed",
        APART,
        ("one_hot(labels, 3)", "one_hot(labels, 3) + 0 * len(repr(state.apply_fn))"),
    ),
    (
        "model-fields",
        CONFIGURED,
        ('rngs={"dropout": key})', 'rngs={"dropout": key}, mutable=["batch_stats"])[0]'),
    ),
    ("init-keys", APART, ("net.init(rng, ", "net.init(*[rng], ")),
    (
        "mutable-names",
        STATISTICS,
        ('mutable=["batch_stats"]', 'mutable=["batch_stats", "intermediates"]'),
    ),
    ("apply-method", ENCODER, ('method="decode"', 'method=getattr(Coder, "decode")')),
    ("gradient-option", APART, ("loss_fn, has_aux=True", "loss_fn, argnums=0, has_aux=True")),
    (
        "returns-differ",
        APART,
        (UPDATE, f"    if grads is None:\n        return grads\n{UPDATE}"),
        (
            "        state = updated(state, grads)",
            "        updated(state, None)\n        state = updated(state, grads)",
        ),
    ),
    (
        "return-annotation",
        STATISTICS,
        ("def loss_fn(params):", "def loss_fn(params) -> tuple[object]:"),
    ),
    (
        "training-decorator",
        STATISTICS,
        (
            "def train_step",
            "def registered(function):\n    return function\n\n\n@registered\ndef train_step",
        ),
    ),
    (
        "training-target",
        APART,
        ("    both = jax", '    held = {}\n    held["params"] = state.params\n    both = jax'),
    ),
    (
        "training-transform",
        STATISTICS,
        ("jitted = jax.jit(train_step)", "jitted = jax.tree_util.Partial(train_step)"),
    ),
    (
        "training-transform",
        STATISTICS,
        (
            "jitted = jax.jit(train_step)",
            "jitted = jax.tree_util.Partial(functools.partial(train_step))",
        ),
    ),
    (
        "training-line",
        APART,
        (UPDATE, "    return [state.apply_gradients(grads=grads) for _ in range(1)][0]"),
    ),
    (
        "training-fails",
        APART,
        ("one_hot(labels, 3)", 'one_hot(labels, 3) + params["Dense_0"]["bias"].sum()'),
    ),
    (
        "training-differs",
        DROPOUT,
        (
            "{name: jax.random.fold_in(key, state.step) for name, key in keys.items()}",
            '{"dropout": jax.random.key(3)}',
        ),
    ),
]

OF_TRAINING = {id for id, *_ in LEFT} | {
    "training-branch",
    "training-left",
    "training-not-run",
    "size-unknown",
}


@pytest.mark.parametrize(("id", "source", "pairs"), [(i, s, p) for i, s, *p in LEFT])
def test_what_cannot_be_rewritten_or_proven_is_not_written(packages, id, source, pairs):
    for old, new in pairs:
        source = replaced(source, old, new)
    result = rewritten(packages(source))
    assert not training(result).is_proven
    assert not result.ok
    assert not training(result).sources
    assert id in refusals(result), training(result).functions
    assert refusals(result) <= {id, "training-left"}
    assert "class TrainState" not in new_text(result)
    assert f"[{id}]" in str(result)


def test_a_size_that_differs_between_models_is_not_guessed(packages):
    module = packages(APART)
    result = rewrite(
        module.make,
        *module.INPUTS,
        also=[(module.make, jax.ShapeDtypeStruct((2, 5), "float32"))],
        gradients=False,
        fast=True,
        train=module.sample,
    )
    assert "size-unknown" in refusals(result)


def test_annotations_lose_what_the_model_has_now(packages):
    annotated = "def loss_fn(params: dict) -> tuple[jax.Array, tuple[dict, jax.Array]]:"
    result = rewritten(packages(replaced(STATISTICS, "def loss_fn(params):", annotated)))
    assert training(result).is_proven
    assert "def loss_fn(model: nnx.Module) -> tuple[jax.Array, jax.Array]:" in new_text(result)


def test_lines_that_did_not_run_stay_and_raise(packages):
    module = packages(DEVICES)
    result = rewritten(module)
    text = new_text(result)
    first = text.index("    if state.scale:\n        # As it was: nobody ran this.\n")
    raised = text.index("raise NotImplementedError", first)
    assert first < raised < text.index("grads = state.scale * jax.grad(loss_fn", first)
    assert text.count("raise NotImplementedError") == 2
    lines = DEVICES.count("\n", 0, DEVICES.index("        grads = state.scale"))
    left = [e for e in training(result).left if "training-branch" in repr(e.refusal)]
    assert [each.name for each in left] == ["train_step", "train_step"]
    assert left[0].line == HEAD.count("\n") + lines + 1
    assert f"train.py:{left[0].line}: train_step" in str(result)


def test_arguments_that_the_model_has_leave_functions_and_their_calls(packages):
    text = new_text(rewritten(packages(FUNCTIONS)))
    start, end = text.index("@functools.partial"), text.index("class State")
    assert (
        text[start:end]
        == '''@functools.partial(nnx.jit, static_argnums=(2,))
def logits_of(
    model,
    x,
    factor: int = 1,
):
    """What the model says."""
    return factor * model(x)


def loss_fn(model, x, labels):
    logits = logits_of(model, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


'''
    )
    assert "grad_fn(state.model, x, labels)" in text
    assert "logits_of(state.model, x, 2)" in text


def test_sown_values_go_nowhere_and_keys_may_be_none(packages):
    text = new_text(rewritten(packages(WHOLE)))
    start, end = text.index("def logits_of"), text.index("@nnx.jit")
    assert (
        text[start:end]
        == """def logits_of(state, x, train, rngs):
    nnx.reseed(state.model, **(rngs or {}))
    logits = nnx.capture(state.model, nnx.Intermediate)(x, train=train)[0]
    return logits


"""
    )
    assert "current = TrainState(model, state.optimizer)" in text


def test_a_model_with_other_fields_has_the_variables_of_the_model(packages):
    text = new_text(rewritten(packages(CONFIGURED)))
    start, end = text.index("    def loss_fn"), text.index("        return optax")
    assert (
        text[start:end]
        == """    def loss_fn(model):
        configured = nnx.eval_shape(lambda: Net(config, in_features=6, rngs=nnx.Rngs(0, dropout=0)))
        nnx.update(configured, nnx.state(model))
        nnx.reseed(configured, dropout=key)
        logits = configured(x)
"""
    )
    assert "return state.model(x)" in text


def test_a_module_that_may_be_imported_by_one_name_is_proven(packages):
    register = """import sys

names = vars(sys.modules["jax"]).setdefault("_names_in_tests", {})
if names.setdefault(__name__.split(".")[0], __name__) != __name__:
    raise ValueError("the flag is defined twice")


"""
    assert training(rewritten(packages(register + APART))).is_proven


def test_a_function_that_did_not_run_is_listed_and_stays(packages):
    more = """

def norm(state):
    return optax.global_norm(state.params)


def doubled(state):
    return 2 * norm(state)
"""
    result = rewritten(packages(APART + more))
    assert more in new_text(result)
    (left,) = [each for each in training(result).left if each.name == "norm"]
    assert left.refusal is not None
    assert left.refusal.id == "training-not-run"


def test_a_sample_has_a_state_a_step_and_batches(packages):
    module = packages(APART)
    with pytest.raises(RewriteError, match="not enough values"):
        rewritten(module, train=lambda: module.sample()[:2])
    with pytest.raises(RewriteError, match="0 batches"):
        rewritten(module, train=lambda: (*module.sample()[:2], []))


def test_a_sample_that_does_not_run_is_an_error_of_the_user(packages):
    module = packages(replaced(APART, "(0), 0.1), step", "(0), 0.1), jax.grad"))
    with pytest.raises(RewriteError, match="the sample of the training cannot be run"):
        rewritten(module)


def test_a_model_in_another_file_is_imported_from_its_new_file(packages):
    start, end = APART.index("class Net"), APART.index("def begin")
    models = HEAD + APART[start:end]
    source = APART[:start] + "from .models import Net, make\n\n\n" + APART[end:]
    module = packages(source, models=models)
    result = rewritten(module)
    assert training(result).is_proven, result
    texts = {pathlib.Path(path).name: text for path, text in result.sources.items()}
    assert [*texts] == ["train_nnx.py", "models_nnx.py"]
    assert "from .models_nnx import Net\n" in texts["train_nnx.py"]
    assert not any("train.py" in place for place in result.places)


def test_a_model_of_an_imported_module_is_made_by_a_function_of_it(packages):
    start, end = APART.index("class Net"), APART.index("def begin")
    models = f"{HEAD}{APART[start:end]}WIDTH = 6\n"
    source = replaced(APART[:start] + APART[end:], "    net = Net()\n", "")
    source = replaced(
        source,
        "net.init(rng, jnp.ones([1, 6])",
        "models.make().init(rng, jnp.ones([1, models.WIDTH])",
    )
    source = "from . import models\n\n\n" + replaced(source, "net.apply", "models.make().apply")
    module = packages(source, models=models)
    result = rewrite(module.models.make, *module.INPUTS, gradients=False, train=module.sample)
    assert training(result).is_proven, result
    texts = {pathlib.Path(path).name: text for path, text in result.sources.items()}
    assert "from . import models_nnx as models\n" in texts["train_nnx.py"]
    assert "model = models.make()(in_features=6, rngs=nnx.Rngs(rng))" in texts["train_nnx.py"]
    assert "    return Net\n" in texts["models_nnx.py"]


def test_the_command_writes_the_training_too(packages, capsys):
    module = packages(APART)
    name = module.__name__
    code = main(
        [
            "rewrite",
            f"{name}:make",
            "--input",
            "2,6",
            "--train",
            f"{name}:sample",
            "--write",
            "--no-diff",
        ]
    )
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert "3 functions of the training are rewritten; three steps are proven" in shown
    text = pathlib.Path(module.__file__).with_name("train_nnx.py").read_text()
    assert "state.optimizer.update(state.model, grads)" in text


def test_the_command_writes_the_training_in_place(packages, capsys):
    module = packages(APART)
    name, path = module.__name__, pathlib.Path(module.__file__)
    command = ["rewrite", f"{name}:make", "--input", "2,6", "--train", f"{name}:sample"]
    assert main([*command, "--in-place", "--no-diff"]) == 2
    assert "make: no step of the sample ran it" in capsys.readouterr().err
    assert path.read_text() == HEAD + APART
    code = main([*command, "--in-place", "--no-diff", "--by-hand", str(path)])
    out, err = capsys.readouterr()
    assert code == 0, err
    # `make` did not run. The line is that of the file as it was.
    left = "to change by hand: train.py:40: Net: Net(in_features=6, rngs=nnx.Rngs(key))"
    assert [line for line in out.splitlines() if "to change by hand" in line] == [left]
    text = path.read_text()
    assert "class Net(nnx.Module)" in text
    assert "state.optimizer.update(state.model, grads)" in text
    assert "_nnx" not in text
    del sys.modules[name]
    new = importlib.import_module(name)
    state, step, batches = new.sample()
    assert np.isfinite(step(state, *batches[0])[1][0][0])


def test_in_place_nothing_is_written_while_the_training_stays(packages):
    partial = "jitted = jax.tree_util.Partial(train_step)"
    module = packages(replaced(STATISTICS, "jitted = jax.jit(train_step)", partial))
    before = pathlib.Path(module.__file__).read_text()
    result = rewritten(module)
    assert not training(result).is_proven
    with pytest.raises(RewriteError, match="training-transform"):
        result.write(in_place=True, by_hand=[module.__file__])
    assert pathlib.Path(module.__file__).read_text() == before


def test_in_place_the_model_and_its_training_may_be_in_two_files(packages):
    start, end = APART.index("class Net"), APART.index("def begin")
    source = APART[:start] + "from .models import Net, make\n\n\n" + APART[end:]
    module = packages(source, models=HEAD + APART[start:end])
    models = pathlib.Path(module.__file__).with_name("models.py")
    texts = rewritten(module).in_place(by_hand=[str(models)])
    assert [pathlib.Path(path).name for path in texts] == ["train.py", "models.py"]
    assert "from .models import Net" in texts[module.__file__]


KEEPING = """import json


class Log:
    def line(self, train_state):
        return json.dumps({"step": int(train_state.step), "rate": self.rate.step})


def save(state, path):
    path.write_bytes(
        bytes(state.params["Dense_0"]["bias"])
    )
    state.step(path)
"""


def test_reads_of_a_state_that_no_step_reaches_are_listed(packages):
    head = "from .folder import keeping\n\n\n"
    module = packages(f"{head}{APART}", folder__keeping=KEEPING)
    result = rewritten(module)
    assert training(result).is_proven
    assert [each for each in result.places if "keeping" in each] == [
        "folder/keeping.py:6: train_state.step: optimizer.step[...]",
        "folder/keeping.py:11: state.params: nnx.state(model, nnx.Param)",
    ]
