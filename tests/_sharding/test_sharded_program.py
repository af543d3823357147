"""One program makes a model in its shards; `init` under `jax.jit` is the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import bridge
from bridge._sharding.sharded_program import ShardedProgram
from tests._sharding.sharded_models import mesh
from tests.models import assert_identical

KEY = jax.random.key(0)
X = jnp.ones((2, 4))
INIT = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("rows", "columns"))
LINEN = nn.Dense(8, use_bias=False, kernel_init=INIT)
RULES = {"rows": "data", "columns": "model"}


def program(build=LINEN, inputs=(X,), rules=RULES, rngs=KEY, method=None, **kwargs):
    return ShardedProgram(build, mesh(), inputs, kwargs, rules, rngs, method)


def test_the_values_are_those_of_init_in_the_annotated_shards():
    kernel = program().run()["params"]["kernel"].unbox()
    assert kernel.sharding == NamedSharding(mesh(), P("data", "model"))
    expected = jax.jit(LINEN.init)(KEY, X)["params"]["kernel"].unbox()
    np.testing.assert_array_equal(kernel, expected)


def test_abstract_has_the_same_leaves_and_runs_nothing():
    made, abstract = program().run(), program().abstract()
    assert jax.tree.structure(made) == jax.tree.structure(abstract)
    of = lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding)  # noqa: E731
    assert [*map(of, jax.tree.leaves(made))] == [*map(of, jax.tree.leaves(abstract))]
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))


def test_abstract_inputs_are_enough_for_a_program_that_can_be_lowered():
    of_values = program().lower().as_text()
    abstract = jax.ShapeDtypeStruct(X.shape, X.dtype)
    lowered = program(inputs=(abstract,)).lower()
    assert "sharding" in of_values
    assert_identical(lowered.out_info, program().lower().out_info)


def test_rules_may_be_pairs_and_no_other_thing():
    assert_identical(program(rules=tuple(RULES.items())).run(), program().run())
    for rules in ("rows", 3, [("rows",)]):
        with pytest.raises(bridge.ConversionError, match="rules as"):
            program(rules=rules)


@pytest.mark.parametrize("build", [nn.Dense, 3])
def test_what_makes_no_model_is_refused(build):
    with pytest.raises(bridge.InvalidModuleError, match="init_sharded"):
        program(build)


@pytest.mark.parametrize("rngs", [None, {}, "key"])
def test_linen_needs_a_key(rngs):
    with pytest.raises(bridge.InvalidRngsError, match="init_sharded of Dense"):
        program(rngs=rngs)


class OfItsAxes(nnx.Module):
    """Works only in a mesh with Explicit axes."""

    def __init__(self, rngs):
        types = jax.sharding.get_abstract_mesh().axis_types
        if AxisType.Explicit not in types:
            raise ValueError("the axes are Auto")
        self.w = nnx.Param(jax.random.normal(rngs(), (4,)))


def test_a_model_that_speaks_of_explicit_axes_is_made_with_them():
    of = lambda kind: ShardedProgram(OfItsAxes, mesh(kind), (), {}, None, KEY, None)  # noqa: E731
    made = of("explicit").run()
    expected = jax.random.normal(nnx.Rngs(KEY)(), (4,))
    np.testing.assert_array_equal(made.w.get_value(), expected)
    with pytest.raises(ValueError, match="the axes are Auto"):
        of("auto").run()
