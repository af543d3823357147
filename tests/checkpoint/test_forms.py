"""Restoring under rules that reshape, transpose, split and join."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bridge import checkpoint
from tests.port.cases import random_values
from tests.port.forms import CASES, List, Stacked, X
from tests.port.models import shapes_of
from tests.strategies import exact


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_either_layout_goes_into_the_other(tmp_path, case):
    linen, native, rules, by_hand = CASES[case]
    # A checkpoint is not read by structure.
    rules = {**rules, "norm": "norms.{q,k,v}"} if "norm" in rules else rules
    variables = random_values(shapes_of(linen, X))
    checkpoint.save(tmp_path / "linen", variables)
    model = checkpoint.restore(tmp_path / "linen", native(nnx.Rngs(0)), rules=rules, verify=True)
    expected = by_hand(jax.tree.map(np.asarray, variables["params"]))
    for name, (kernel, bias) in expected.items():
        np.testing.assert_array_equal(getattr(model, name).kernel[...], kernel)
        np.testing.assert_array_equal(getattr(model, name).bias[...], bias)
    np.testing.assert_allclose(model(X), linen.apply(variables, X), rtol=1e-5, atol=1e-5)
    checkpoint.save(tmp_path / "nnx", model)
    back = checkpoint.restore(tmp_path / "nnx", shapes_of(linen, X), rules=rules, verify=True)
    assert exact(back) == exact(variables)


def test_the_layers_of_a_stack_are_split_as_they_are_read(tmp_path):
    layer, native, rules, _ = CASES["fused to separate"]
    linen = Stacked(type(layer), 1)
    stacked = {f"layers/attn/{a}": f"layers.*@1.{b}" for a, b in {**rules, "out": "out"}.items()}
    variables = random_values(shapes_of(linen, X))
    checkpoint.save(tmp_path / "linen", variables)
    model = List(nnx.Rngs(0), native)
    model = checkpoint.restore(tmp_path / "linen", model, rules=stacked)
    np.testing.assert_allclose(model(X), linen.apply(variables, X), rtol=1e-4, atol=1e-4)
    checkpoint.save(tmp_path / "nnx", model)
    back = checkpoint.restore(tmp_path / "nnx", shapes_of(linen, X), rules=stacked)
    assert exact(back) == exact(variables)


@pytest.mark.parametrize("case", ["heads to features", "fused to separate", "separate to fused"])
def test_values_arrive_in_the_shards_of_the_target(tmp_path, case):
    linen, native, rules, _ = CASES[case]
    variables = random_values(shapes_of(linen, X))
    checkpoint.save(tmp_path / "linen", variables)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Auto))
    plain = checkpoint.restore(tmp_path / "linen", native(nnx.Rngs(0)), rules=rules)

    def placed(leaf):
        spec = PartitionSpec("x", "y") if leaf.ndim > 1 else PartitionSpec("y")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    graphdef, state = nnx.split(plain)
    target = nnx.merge(graphdef, jax.tree.map(placed, state))
    model = checkpoint.restore(tmp_path / "linen", target, rules=rules)
    found, expected = nnx.state(model), nnx.state(plain)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    kernels = [leaf for leaf in jax.tree.leaves(found) if leaf.ndim > 1]
    assert {leaf.sharding.spec for leaf in kernels} == {PartitionSpec("x", "y")}


def test_arrays_of_several_dtypes_are_not_joined(tmp_path):
    linen, native, rules, _ = CASES["separate to fused"]
    variables = random_values(shapes_of(linen, X))
    variables["params"]["key"]["kernel"] = variables["params"]["key"]["kernel"].astype(jnp.float16)
    checkpoint.save(tmp_path / "linen", variables)
    with pytest.raises(checkpoint.RulesError, match="float16 and float32"):
        checkpoint.restore(tmp_path / "linen", native(nnx.Rngs(0)), rules=rules)
