"""Differences of Linen and NNX are acted on in the new source, and proven."""

import importlib
import re

import jax
import pytest

import bridge

INPUT = jax.ShapeDtypeStruct((2, 6, 4), "float32")
# What must stand in the new class, by program and class.
ACTED_ON = {
    "layers": {
        "DensePositional": "use_bias=False, dtype=jnp.float32",
        "DenseGeneralDefault": "nnx.Linear(in_features, 4, rngs=rngs)",
        "DenseGeneralAxes": "nnx.LinearGeneral((2, 3), 4, axis=(-2, -1), rngs=rngs)",
        "Einsums": 'nnx.Einsum("bthd,hdo->bto", (2, 3, 4), rngs=rngs)',
        "ConvForms": "nnx.Conv(4, 4, (3,), 1, padding=",
        "NormConstant": "self.batch_norm(x, use_running_average=True)",
        "NormTrains": "self.batch_norm(x, use_running_average=False)",
        "NormPositional": "nnx.LayerNorm(in_features, epsilon=1e-3, rngs=rngs)",
        "DropPositional": "self.dropout(x, deterministic=not train)",
        "DropConstant": "self.dropout(x, deterministic=True)",
        "DropConstantRandom": "self.dropout(x, deterministic=False)",
        "DropOwnKey": "rngs=jax.random.key(0))",
        "PReLUs": "nnx.PReLU(0.2, param_dtype=jnp.float32)",
        "SeqCompCompact": "*[nnx.Linear(",
        "SeqExtend": "layers += [nnx.Linear(features_in, 6, rngs=rngs), nnx.relu]",
        "SeqLoop": "layers.append(nnx.relu)",
        "SeqSetupLoop": "self.net = nnx.Sequential(*layers)",
        "SeqStar": "nnx.Sequential(*layers, nnx.Linear(5, 3, rngs=rngs))",
    },
    "names": {
        "NoneThenLayer": "self.head = nnx.data(None)",
        "AppendedLayers": "self.layers = nnx.List(layers)",
        "NestedLists": "nnx.List([nnx.Linear(",
        "LoopIndexed": "y = self.norm[i](y)",
        "ClashingNames": "self.sow_layer = nnx.Linear(",
        "LocalClash": "self.net_0 = nnx.Linear(",
        "ParamLax": "jax.lax.dot_general(x, self.w[...]",
        "StateAugmented": "        mean[...] += 0.1",
        "StateMutable": "        if train:\n",
        "StateOwnCollection": "count[...] = count[...] + 1",
        "SowClash": 'self.sow(nnx.Intermediate, "h_out", y)',
        "HasAttr": "self.head = nnx.Linear(4, self.classes, rngs=rngs)",
        "EqualByChance": "in_features: int, length: int",
        "ModePartial": "use_running_average=not train",
    },
    "children": {
        "Part": "if in_features != self.n:",
        "SharedField": "self.two = ModuleField(self.a, in_features=4, rngs=rngs)",
        "ScanMeta": '{nnx.PARTITION_NAME: "layers"}',
        "RematStatic": "static_argnums=(2,)",
        "CallsMethodOfChild": "self.ae.decode(nnx.relu(self.ae.encode(x)))",
        "Logical": "nn.with_logical_constraint(x",
    },
    "kept": {
        "ScanStatic": "lambda layer, x: layer(x, train)",
        "DenseGeneralBatch": "# Stays Linen: nnx.LinearGeneral has no batch_dims.",
        "EinsumCall": "# Stays Linen: nnx.Einsum needs einsum_str.",
        "NormForced": "self.batch_norm(x, use_running_average=not train)",
        "NormFeatureAxes": "# Stays Linen: nothing tells its num_features.",
        "AttentionSoftmax": "# Stays Linen: nnx.MultiHeadAttention has no force_fp32_for_softmax.",
        "AttentionOtherKeys": "in_kv_features=6",
        "AttentionKeywords": "inputs_q=x, inputs_k=x, inputs_v=x",
        "CellSimple": "cell.initialize_carry(x[:, 0].shape, nnx.Rngs(",
    },
}


@pytest.fixture(scope="module", params=ACTED_ON)
def rewritten(request):
    """The name of a program, and its result."""
    models = importlib.import_module(f"tests.rewrite.models_trap_{request.param}")
    return request.param, bridge.rewrite(
        models.Root, INPUT, kwargs={"train": False}, gradients=False, fast=True
    )


def test_the_program_is_proven(rewritten):
    name, result = rewritten
    assert result.is_proven, str(result)
    # What stays Linen is another program, and attention multiplies in another order.
    assert result.max_difference <= (1e-5 if name == "kept" else 0)


def test_no_class_stays_linen(rewritten):
    _, result = rewritten
    levels = {each.name: each.level for each in result.classes}
    reviewed = {each for each, level in levels.items() if level == "needs review"}
    assert reviewed == set()
    assert "left Linen" not in levels.values(), str(result)


def test_the_difference_is_acted_on(rewritten):
    name, result = rewritten
    (text,) = result.sources.values()
    classes = dict(re.findall(r"^class (\w+)(.*?)(?=^class |\Z)", text, flags=re.M | re.S))
    lacking = {
        cls: classes[cls] for cls, text in ACTED_ON[name].items() if text not in classes[cls]
    }
    assert not lacking


def test_what_is_wrapped_is_told_with_its_reason():
    models = importlib.import_module("tests.rewrite.models_trap_kept")
    (found,) = bridge.rewrite(models.NormFeatureAxes, INPUT, gradients=False).classes
    assert found.level == "proven"
    assert "layer_norm stays Linen: nothing tells its num_features" in found.notes[0]


def test_a_norm_over_a_named_axis_is_compared_under_that_axis():
    models = importlib.import_module("tests.rewrite.models_trap_kept")
    result = bridge.rewrite(models.NormOverDevices, INPUT, kwargs={"train": False}, gradients=False)
    assert result.is_proven, str(result)
    assert "entry, in training" in result.reports
    (text,) = result.sources.values()
    assert 'nnx.BatchNorm(in_features, axis_name="devices", rngs=rngs)' in text
