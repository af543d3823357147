"""The bridge's own leaves in Linen variables are known from those of the user's modules."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx, serialization

import bridge
import registry
from tests.models import assert_identical

KEY, X = jax.random.key(0), jnp.ones(3)


def is_graphdef(collection):
    return isinstance(collection.get("graphdef"), nnx.GraphDef)


class Bare(nnx.Module):
    """An NNX module with arrays that are in no Variable, one of which a call changes."""

    def __init__(self):
        self.scale = nnx.Param(jnp.full(3, 2.0))
        self.offset = jnp.arange(3.0)
        self.inner = nnx.List([Table()])

    def __call__(self, x):
        self.offset = self.offset + 1
        return x * self.scale[...] + self.offset + self.inner[0].table[0]


class Table(nnx.Module):
    def __init__(self):
        self.table = jnp.ones((2, 3))


class OwnCollections(nn.Module):
    """A Linen module whose collections have the names of the bridge's, one of them with a box."""

    @nn.compact
    def __call__(self, x):
        w = self.variable("nnx", "w", lambda: jnp.full(3, 2.0))
        graphdef = self.variable("nnx", "deep", lambda: {"graphdef": jnp.ones(3)})
        u = self.variable("nnx_arrays", "u", lambda: nn.Partitioned(jnp.ones(3), ("a",)))
        v = self.variable("nnx_arrays", "v", lambda: jnp.ones(3))
        if self.is_mutable_collection("nnx_arrays"):
            v.value = v.value + 1
        return nn.Dense(3, use_bias=False)(
            x * w.value + graphdef.value["graphdef"] + u.value + v.value
        )


def test_bare_arrays_of_an_nnx_module_are_kept_by_a_wrapper_around_it():
    module = bridge.to_linen(Bare)
    variables = module.init(KEY, X)
    given = {c: tree for c, tree in variables.items() if c != "nnx"}
    assert_identical(jax.tree.leaves(given["nnx_arrays"]), [jnp.ones((2, 3)), jnp.arange(3.0)])
    for model in (
        bridge.ToNNX.from_variables(module, variables),
        bridge.ToNNX.from_variables(module, given),
        bridge.lazy_init(bridge.ToNNX(module, KEY), X),
    ):
        assert_identical(model.linen_variables(), given)
        native = Bare()
        for _ in range(2):
            assert_identical(model(X, mutable=["nnx_arrays"]), native(X))
        assert_identical(model.linen_variables()["nnx_arrays"]["offset"], native.offset)


@pytest.mark.parametrize("graph", [True, False])
def test_bare_arrays_that_a_call_changes_reach_the_model_through_nnx_jit(graph):
    model = bridge.lazy_init(bridge.ToNNX(bridge.to_linen(Bare), KEY, mutable=["nnx_arrays"]), X)
    native = Bare()
    with nnx.set_graph_mode(graph):
        for _ in range(2):
            assert_identical(nnx.jit(lambda m, x: m(x))(model, X), native(X))
    assert_identical(model.offset[...], native.offset)


def test_a_module_with_nothing_but_bare_arrays_can_be_called_once_taken_in():
    module = bridge.to_linen(Table)
    variables = module.init(KEY, nnx_method=lambda m: m.table)
    model = bridge.ToNNX.from_variables(module, variables)
    assert_identical(model(nnx_method=lambda m: m.table), jnp.ones((2, 3)))


def test_bare_arrays_survive_three_levels():
    class Outer(nnx.Module):
        def __init__(self, rngs):
            self.inner = bridge.ToNNX(bridge.to_linen(Bare), rngs=rngs)

        def __call__(self, x):
            return self.inner(x)

    module = bridge.to_linen(Outer)
    variables = module.init(KEY, X)
    assert_identical(module.apply(variables, X, mutable=True)[0], Bare()(X))


def test_collections_of_a_linen_module_may_have_the_names_of_the_bridges():
    module = OwnCollections()
    variables = module.init(KEY, X)
    for model in (
        bridge.ToNNX.from_variables(module, variables),
        bridge.lazy_init(bridge.ToNNX(module, KEY), X),
    ):
        assert_identical(model.linen_variables(), variables)
        assert_identical(model(X), module.apply(variables, X))
        expected, updates = module.apply(variables, X, mutable=["nnx_arrays"])
        assert_identical(model(X, mutable=["nnx_arrays"]), expected)
        assert_identical(model.linen_variables(), {**variables, **updates})


def test_such_collections_pass_through_an_nnx_module_in_a_linen_program():
    module = OwnCollections()
    expected = module.init(KEY, X)
    wrapped = bridge.ToLinen(bridge.ToNNX, args=(module,), rng_state=False)
    variables = wrapped.init(KEY, X)
    own = {k: v for k, v in variables["nnx"].items() if k != "graphdef"}
    assert_identical({**own}, expected["nnx"])
    assert_identical(nn.unbox(variables["nnx_arrays"]), nn.unbox(expected["nnx_arrays"]))
    assert_identical(
        wrapped.apply(variables, X), module.apply({**expected, "params": variables["params"]}, X)
    )
    # Without the GraphDef, and after a file that holds none.
    restored = serialization.msgpack_restore(serialization.to_bytes(nn.unbox(variables)))
    assert not restored["nnx"]["graphdef"]
    assert_identical(wrapped.apply(restored, X), wrapped.apply(variables, X))
    _, updates = wrapped.apply(variables, X, mutable=["nnx_arrays"])
    assert_identical(updates["nnx_arrays"]["v"], jnp.full(3, 3.0))


def test_conversion_keeps_such_collections_and_leaves_out_what_is_static():
    variables = OwnCollections().init(KEY, X)
    assert_identical(bridge.nnx_to_linen(bridge.linen_to_nnx(variables)), variables)
    graphdef = bridge.to_linen(Bare).init(KEY, X)["nnx"]["graphdef"]
    with_graphdef = {**variables, "nnx": {**variables["nnx"], "ToLinen_0": {"graphdef": graphdef}}}
    assert_identical(bridge.nnx_to_linen(bridge.linen_to_nnx(with_graphdef)), variables)


@pytest.mark.parametrize("module", [OwnCollections(), bridge.to_linen(Bare)], ids=["linen", "nnx"])
def test_a_wrappers_state_makes_the_round_trip_with_variables_as_variables(module):
    model = bridge.lazy_init(bridge.ToNNX(module, KEY), X)
    state = nnx.state(model)
    back = bridge.linen_to_nnx(bridge.nnx_to_linen(state))
    kinds = lambda s: [(p, v.var_type, v.get_metadata()) for p, v in nnx.to_flat_state(s)]  # noqa: E731
    assert kinds(back) == kinds(state)
    assert_identical(back, state)


@pytest.mark.parametrize("module", [OwnCollections(), bridge.to_linen(Bare)], ids=["linen", "nnx"])
def test_checkpoints_hold_what_is_the_users(module, tmp_path):
    variables = module.init(KEY, X)
    bridge.checkpoint.save(tmp_path / "linen", variables)
    zeros = jax.tree.map(jnp.zeros_like, variables)
    assert_identical(bridge.checkpoint.restore(tmp_path / "linen", zeros), variables)
    model = bridge.ToNNX.from_variables(module, zeros)
    bridge.checkpoint.restore(tmp_path / "linen", model)
    assert_identical(
        model.linen_variables(), {k: v for k, v in variables.items() if not is_graphdef(v)}
    )


def test_a_variable_in_the_place_of_the_graphdef_is_an_error_that_says_so():
    class Static(nnx.Variable): ...

    class Model(nnx.Module):
        def __init__(self):
            self.graphdef = Static(jnp.ones(3))

        def __call__(self, x):
            return x

    names = registry.current().extend({"nnx": Static})
    with registry.use(names), pytest.raises(bridge.ReservedNameError, match="nnx/graphdef"):
        bridge.to_linen(Model).init(KEY, X)
