"""A Linen program whose classes run NNX classes trains and is tested as it is."""

import functools
import importlib
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bridge
from bridge import rewrite
from bridge.__main__ import main
from bridge.rewrite.prove._weights import random_inputs
from tests import processes

MODELS = '''"""Models."""

import dataclasses

from flax import linen as nn


@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 8
    depth: int = 3


class Block(nn.Module):
    """A residual block."""

    width: int  # hidden
    rate: float = 0.2

    @nn.compact
    def __call__(self, x, train: bool):
        h = nn.Dense(self.width)(x)
        h = nn.BatchNorm(use_running_average=not train)(h)
        h = nn.Dropout(self.rate, deterministic=not train)(nn.relu(h))
        self.sow("intermediates", "hidden", h)
        return x + nn.Dense(x.shape[-1])(h)


class CNN(nn.Module):
    features: int = 4
    depth: int = 2

    @nn.compact
    def __call__(self, x, train: bool = False):
        """Logits."""
        x = nn.Conv(self.features, (3, 3))(x)
        for _ in range(self.depth):
            x = Block(2 * self.features)(x, train)
        return nn.Dense(3, name="head")(x.mean((1, 2)))


class Layer(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, train):
        y = nn.LayerNorm()(x)
        attention = nn.MultiHeadDotProductAttention(2, dropout_rate=0.1)
        x = x + attention(y, y, deterministic=not train)
        axes = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        y = nn.Dense(self.width, kernel_init=axes)(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(y)), None


class Transformer(nn.Module):
    config: Config = Config()

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dense(self.config.width)(x)
        layers = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=self.config.depth,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = layers(2 * self.config.width, name="layers")(x, train)
        return nn.Dense(3)(x.mean(1))


class MLP(nn.Module):
    sizes: tuple[int, ...] = (5, 3)

    def setup(self):
        self.layers = [nn.Dense(size) for size in self.sizes]
        self.head = nn.Dense(3)

    def encode(self, x):
        for layer in self.layers:
            x = nn.tanh(layer(x))
        return x

    def __call__(self, x, train: bool = False):
        return self.head(self.encode(x))
'''
TRAINING = '''"""Training, which knows nothing of the bridge."""

import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from . import models


class State(train_state.TrainState):
    statistics: dict


def create(model, x, key):
    variables = jax.jit(model.init)({"params": key, "dropout": key}, x)
    mask = jax.tree_util.tree_map_with_path(
        lambda path, leaf: "kernel" in jax.tree_util.keystr(path), variables["params"]
    )
    return State.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optax.chain(
            optax.masked(optax.add_decayed_weights(1e-4), mask), optax.sgd(0.05, momentum=0.9)
        ),
        statistics=variables.get("batch_stats", {}),
    )


@jax.jit
def step(state, x, key):
    def loss_of(params):
        variables = {"params": params, "batch_stats": state.statistics}
        y, updates = state.apply_fn(
            variables, x, train=True, rngs={"dropout": key}, mutable=["batch_stats"]
        )
        return (y**2).mean(), updates.get("batch_stats", {})

    (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients, statistics=statistics), loss


def evaluate(state, x):
    return jax.jit(state.apply_fn)({"params": state.params, "batch_stats": state.statistics}, x)
'''
INPUTS = {"CNN": (2, 6, 6, 2), "Transformer": (2, 5, 4), "MLP": (2, 6)}
EXPORTED = {"CNN": ("Block", "CNN"), "Transformer": ("Layer", "Transformer"), "MLP": ("MLP",)}


@pytest.fixture
def package(tmp_path, monkeypatch):
    name = f"as_linen_{abs(hash(str(tmp_path))) % 10**8}"
    (tmp_path / name).mkdir()
    for file, text in {"__init__": "", "models": MODELS, "training": TRAINING}.items():
        (tmp_path / name / f"{file}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / name
    forget(name)


def forget(name):
    for each in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[each]
    importlib.invalidate_caches()


def rewritten(package, name, **options):
    models = importlib.import_module(f"{package.name}.models")
    x = jax.ShapeDtypeStruct(INPUTS[name], "float32")
    options = {"gradients": False, "as_linen": True, "kwargs": {"train": False}, **options}
    return bridge.rewrite(getattr(models, name), x, **options)


def trained(package, name, *, is_abstract=False):
    """Everything that a program sees of a model; with `is_abstract`, a state of shapes."""
    training = importlib.import_module(f"{package.name}.training")
    model = getattr(training.models, name)()
    x = random_inputs(jax.ShapeDtypeStruct(INPUTS[name], "float32"))
    create = functools.partial(training.create, model)
    create = functools.partial(jax.eval_shape, create) if is_abstract else create
    return training, model, create(x, jax.random.key(0)), x


@pytest.mark.parametrize("name", INPUTS)
def test_an_unchanged_training_step_runs_with_the_same_variables(package, name):
    training, linen, before, x = trained(package, name)
    result = rewritten(package, name, fast=True)
    assert result.exported == EXPORTED[name]
    outputs = training.evaluate(before, x)
    written = {each.rpartition("/")[2] for each in result.write()}
    assert written == {"models.py", "models_nnx.py", "models_nnx.rules.toml"}
    forget(package.name)
    # Of the new model's `init`, shapes are enough: it goes on from the values of the old one.
    training, model, state, _ = trained(package, name, is_abstract=True)
    assert type(model) is not type(linen)
    assert model.clone() == model
    assert jax.tree.structure(state.params) == jax.tree.structure(before.params)
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(before.opt_state)
    assert jax.tree.map(jnp.shape, state.params) == jax.tree.map(jnp.shape, before.params)
    values = {name: getattr(before, name) for name in ("step", "params", "opt_state", "statistics")}
    state = state.replace(**values)
    np.testing.assert_allclose(training.evaluate(state, x), outputs, rtol=1e-5, atol=1e-6)
    losses = []
    for number in range(5):
        state, loss = training.step(state, x, jax.random.key(number))
        losses.append(float(loss))
    assert losses[-1] < losses[0]


def test_the_other_parts_of_the_interface_are_as_before(package):
    linen = importlib.import_module(f"{package.name}.models")
    x = jnp.ones((2, 6))
    variables = linen.MLP((7,)).init(jax.random.key(0), x)
    encoded = linen.MLP((7,)).apply(variables, x, method="encode")
    rewritten(package, "MLP", fast=True).write()
    forget(package.name)
    model = importlib.import_module(f"{package.name}.models").MLP((7,), name="mlp")
    assert (model.sizes, model.name) == ((7,), "mlp")
    np.testing.assert_allclose(model.apply(variables, x, method="encode"), encoded, rtol=1e-6)
    assert model.clone(sizes=(2,)).apply.__self__.sizes == (2,)
    assert "MLP" in model.tabulate(jax.random.key(0), x)


def test_what_is_sown_and_dropped_is_as_before(package):
    linen = importlib.import_module(f"{package.name}.models").CNN()
    x = jax.random.normal(jax.random.key(1), INPUTS["CNN"])
    variables = linen.init(jax.random.key(0), x)
    _, before = linen.apply(variables, x, mutable=["intermediates"])
    rewritten(package, "CNN", fast=True).write()
    forget(package.name)
    model = importlib.import_module(f"{package.name}.models").CNN()
    _, sown = model.apply(variables, x, mutable=["intermediates"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), sown, before)

    def hidden(key):
        options = {"train": True, "rngs": {"dropout": key}, "mutable": True}
        found = model.apply(variables, x, **options)[1]["intermediates"]
        return found["Block_0"]["hidden"][0], found["Block_1"]["hidden"][0]

    first, second = (hidden(jax.random.key(n)) for n in (0, 1))
    again = hidden(jax.random.key(0))
    assert (first[0] == again[0]).all()
    assert not (first[0] == second[0]).all()
    assert not ((first[0] == 0) == (first[1] == 0)).all()


def test_a_class_that_draws_keys_of_its_own_draws_them_from_rngs(package):
    noisy = "        h = h + jax.random.normal(self.make_rng('noise'), h.shape)\n"
    text = MODELS.replace("        self.sow(", f"{noisy}        self.sow(", 1)
    text = text.replace("import dataclasses", "import dataclasses\n\nimport jax")
    (package / "models.py").write_text(text)
    result = rewritten(package, "CNN", fast=True)
    assert result.exported == ("Block", "CNN")
    result.write()
    forget(package.name)
    model = importlib.import_module(f"{package.name}.models").CNN()
    x = jnp.ones(INPUTS["CNN"])
    variables = model.init({"params": jax.random.key(0), "noise": jax.random.key(1)}, x)
    first, again, other = (
        model.apply(variables, x, rngs={"noise": jax.random.key(n)}) for n in (2, 2, 3)
    )
    assert (first == again).all()
    assert not (first == other).all()


def test_a_branch_that_no_run_took_keeps_its_class_linen(package):
    line = "        x = nn.Conv(self.features, (3, 3))(x)\n"
    more = "        if x.ndim == 3:\n            x = nn.Conv(2, (1, 1))(x[None])\n"
    (package / "models.py").write_text(MODELS.replace(line, line + more, 1))
    result = rewritten(package, "CNN", fast=True)
    assert result.exported == ("Block",)
    assert any("NotImplementedError" in each for each in result.notes)


def test_a_linen_parent_that_stays_names_and_transforms_it(package):
    result = rewritten(package, "CNN", skip=["CNN"], fast=True)
    assert result.exported == ("Block",)
    linen = importlib.import_module(f"{package.name}.models").CNN()
    x = jnp.ones(INPUTS["CNN"])
    expected = jax.eval_shape(linen.init, jax.random.key(0), x)
    result.write()
    forget(package.name)
    models = importlib.import_module(f"{package.name}.models")
    found = jax.eval_shape(models.CNN().init, jax.random.key(0), x)
    assert jax.tree.structure(found) == jax.tree.structure(expected)


def test_a_class_whose_size_no_argument_tells_stays_linen_with_the_reason(package):
    scale = 'x * self.param("scale", nn.initializers.ones, (x.shape[1] // 2,)).sum()'
    loop = "        for _ in range(self.depth)"
    text = MODELS.replace(loop, f"        x = {scale}\n{loop}", 1)
    text = text.replace("(self.features, (3, 3))", "(self.features, (3, 3), (2, 2))")
    (package / "models.py").write_text(text)
    result = rewritten(package, "CNN", fast=True)
    assert "CNN" not in result.exported
    assert any(each.startswith("CNN stays Linen: no argument of a call") for each in result.notes)
    assert "self.features, (3, 3), (2, 2)" in result.linen_texts[str(package / "models.py")]


def test_a_second_time_there_is_nothing_to_rewrite(package):
    rewritten(package, "MLP", fast=True).write()
    forget(package.name)
    with pytest.raises(rewrite.RewriteError, match="MLP runs an NNX class already"):
        rewritten(package, "MLP", fast=True)


def test_a_file_that_was_changed_meanwhile_is_kept(package):
    result = rewritten(package, "MLP", fast=True)
    (package / "models.py").write_text(MODELS + "# more\n")
    with pytest.raises(rewrite.RewriteError, match="changed since they were read"):
        result.write()
    assert (package / "models.py").read_text() == MODELS + "# more\n"
    assert not (package / "models_nnx.py").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupt_leaves_nothing_half_written(package, monkeypatch, error):
    result = rewritten(package, "MLP", fast=True)
    replace, calls = os.replace, []

    def failing(source, target):
        calls.append(target)
        replace(source, target)
        if len(calls) == 2:
            raise error

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(error):
        result.write()
    assert (package / "models.py").read_text() == MODELS
    assert sorted(each.name for each in package.glob("*models*")) == ["models.py"]


def test_either_file_may_be_imported_first(package):
    rewritten(package, "MLP", fast=True).write()
    for first in ("models", "models_nnx"):
        code = f"import {package.name}.{first}, {package.name}.models as m, jax\n"
        code += "jax.eval_shape(m.MLP().init, jax.random.key(0), jax.numpy.ones((2, 6)))"
        done = processes.run_code(code, cwd=package.parent)
        assert done.returncode == 0, done.stderr


def test_the_command_shows_both_files_and_writes_them(package, capsys):
    arguments = ["rewrite", f"{package.name}.models:MLP", "--input", "2,6", "--fast", "--as-linen"]
    assert main([*arguments, "--no-gradients"]) == 0
    out = capsys.readouterr().out
    assert "+@bridge.implemented_by(" in out
    assert "+class MLP(nnx.Module):" in out
    assert (package / "models.py").read_text() == MODELS
    assert main([*arguments, "--no-gradients", "--no-diff", "--write"]) == 0
    assert capsys.readouterr().out.count("written: ") == 3
    # A new process imports the new files.
    checked = processes.run_module("bridge", *arguments, "--check", cwd=package.parent)
    assert (checked.returncode, checked.stdout.strip()) == (
        0,
        "every model of these TARGETs runs an NNX class already",
    )
