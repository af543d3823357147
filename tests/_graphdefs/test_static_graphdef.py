"""The GraphDef in Linen variables: static, hashed once, and carried by every serializer."""

import copy
import pickle
import threading

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx, serialization, traverse_util

import bridge
from bridge._graphdefs import static_graphdef
from tests.models import assert_identical

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(7), (4, 3))
# Orbax says so whenever it is not told the shardings.
unsharded = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")


class Normed(nnx.Module):
    def __init__(self, width, *, rngs):
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, width, rngs=rngs)])
        self.norm = nnx.BatchNorm(width, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@pytest.fixture
def model():
    return bridge.to_linen(Normed, 4)


@pytest.fixture
def variables(model):
    return model.init(KEY, X)


@pytest.fixture
def graphdef(variables):
    return variables["nnx"]["graphdef"]


def native():
    return Normed(4, rngs=nnx.Rngs(KEY))


def assert_applies(model, variables):
    y, _ = model.apply(variables, X, mutable=["batch_stats"])
    np.testing.assert_array_equal(y, native()(X))


def test_it_is_a_graphdef_that_merges_with_the_state(graphdef):
    assert isinstance(graphdef, nnx.GraphDef)
    module = nnx.merge(graphdef, nnx.state(native()))
    np.testing.assert_array_equal(module(X), native()(X))


def test_it_is_a_pytree_node_without_leaves(variables, graphdef):
    assert jax.tree.leaves(graphdef) == []
    assert jax.tree.leaves(variables["nnx"]) == []
    leaves = jax.tree.leaves(variables)
    assert len(leaves) == len(jax.tree.leaves(nnx.state(native())))
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)


@pytest.mark.parametrize("seed", [0, 1])
def test_two_inits_of_one_module_give_one_and_the_same_object(seed, graphdef):
    other = bridge.to_linen(Normed, 4).init(jax.random.key(seed), X)["nnx"]["graphdef"]
    assert other == graphdef
    assert hash(other) == hash(graphdef)
    assert other is graphdef


def test_eager_jitted_and_abstract_init_give_the_same_object(model, graphdef):
    assert jax.jit(model.init)(KEY, X)["nnx"]["graphdef"] is graphdef
    assert jax.eval_shape(model.init, KEY, X)["nnx"]["graphdef"] is graphdef


def test_definitions_of_different_modules_differ(graphdef):
    other = bridge.to_linen(Normed, 5).init(KEY, X)["nnx"]["graphdef"]
    assert other != graphdef


def test_it_equals_the_plain_graphdef_of_the_native_module(graphdef):
    assert graphdef == nnx.graphdef(native())


@pytest.mark.parametrize("other", [None, 3, "graphdef", object()])
def test_it_differs_from_everything_else(graphdef, other):
    assert graphdef != other


def test_its_hash_is_computed_once(monkeypatch):
    calls = []
    real = nnx.GraphDef.__hash__

    def counted(self):
        calls.append(1)
        return real(self)

    monkeypatch.setattr(nnx.GraphDef, "__hash__", counted)

    class Fresh(Normed):
        pass

    graphdef = bridge.to_linen(Fresh, 4).init(KEY, X)["nnx"]["graphdef"]
    calls.clear()
    assert len({hash(graphdef) for _ in range(10)}) == 1
    assert calls == []


def test_it_is_found_equal_by_identity_first(graphdef, monkeypatch):
    def forbidden(self):
        raise AssertionError("compared by content")

    monkeypatch.setattr(static_graphdef.StaticGraphDef, "look", property(forbidden))
    assert graphdef == graphdef


def test_its_repr_is_one_line(graphdef):
    assert "\n" not in repr(graphdef)
    assert "Normed" in repr(graphdef)
    assert len(repr(graphdef)) < 100


def test_a_plain_graphdef_in_its_place_is_taken_too(model, variables):
    assert_applies(model, {**variables, "nnx": {"graphdef": nnx.graphdef(native())}})


def test_it_is_freed_with_the_last_variables_that_hold_it():
    class Fresh(Normed):
        pass

    variables = bridge.to_linen(Fresh, 4).init(KEY, X)
    before = len(static_graphdef._known)
    assert before >= 1
    assert variables["nnx"]["graphdef"] in set(static_graphdef._known.values())


def test_threads_that_initialise_at_once_get_one_object():
    class Fresh(Normed):
        pass

    found = []
    threads = [
        threading.Thread(
            target=lambda: found.append(bridge.to_linen(Fresh, 4).init(KEY, X)["nnx"]["graphdef"])
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(graphdef) for graphdef in found}) == 1


def test_definitions_that_were_found_equal_are_compared_in_no_time(graphdef):
    other = pickle.loads(pickle.dumps(graphdef))
    assert other.look is not graphdef.look
    assert graphdef == other
    assert other.look is graphdef.look


class Rolled(nnx.Module):
    """Neither its constructor's arguments nor its leaves tell its definition."""

    def __init__(self, *, rngs):
        self.side = int(jax.random.randint(rngs.params(), (), 0, 1000))

    def __call__(self, x):
        return x * self.side


def test_different_modules_of_one_constructor_have_their_own_definitions():
    model = bridge.to_linen(Rolled)
    made = [model.init(jax.random.key(seed), X)["nnx"]["graphdef"] for seed in (0, 1, 0, 1)]
    assert made[0].origin == made[1].origin
    assert made[0] != made[1]
    assert made[0] is made[2]
    assert made[1] is made[3]


class Flat(nnx.Param):
    def get_value(self, **options):
        return super().get_value(**options).reshape(-1)


@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated:UserWarning")
def test_the_shape_of_a_leaf_is_that_which_a_reader_gets():
    ones = jnp.ones((2, 3))
    with_hook = nnx.Param(ones, on_get_value=lambda variable, value: value.reshape(-1))
    pair, reference = nnx.Variable((jnp.ones(4), jnp.ones(5))), nnx.Variable(ones, ref=True)
    model = nnx.List([nnx.Param(ones), with_hook, Flat(ones), pair, reference])
    graphdef, _ = static_graphdef.split(model)
    shapes = jax.tree.map(jnp.shape, list(graphdef.avals))
    assert shapes == [(2, 3), (6,), (6,), ((4,), (5,)), (2, 3)]


def test_jit_traces_once_for_variables_of_equal_definitions(model):
    traces = []

    @jax.jit
    def run(variables):
        traces.append(1)
        return model.apply(variables, X, mutable=["batch_stats"])

    variables = model.init(KEY, X)
    for _ in range(3):
        _, updates = run(variables)
        variables = {**variables, **updates}
    run(bridge.to_linen(Normed, 4).init(jax.random.key(1), X))
    run(pickle.loads(pickle.dumps(variables)))
    run(jax.tree.map(lambda a: a + 0, variables))
    assert len(traces) == 1


def test_jit_traces_again_for_another_definition(variables):
    class Renamed(Normed):
        pass

    traces = []

    @jax.jit
    def run(variables):
        traces.append(1)
        return jax.tree.leaves(variables)[0]

    run(variables)
    run(bridge.to_linen(Renamed, 4).init(KEY, X))
    run({**variables, "nnx": {}})
    assert len(traces) == 3


def test_jax_tree_functions_keep_it(variables, graphdef):
    doubled = jax.tree.map(lambda a: a * 2, variables)
    assert doubled["nnx"]["graphdef"] is graphdef
    leaves, structure = jax.tree.flatten(variables)
    assert structure.unflatten(leaves)["nnx"]["graphdef"] is graphdef
    assert structure == jax.tree.structure(doubled)
    assert hash(structure) == hash(jax.tree.structure(doubled))
    summed = jax.tree.map(jnp.add, variables, doubled)
    assert summed["nnx"]["graphdef"] is graphdef
    assert [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(variables["nnx"])] == []


def test_it_passes_every_jax_transform(model, variables, graphdef):
    assert jax.jit(lambda v: v)(variables)["nnx"]["graphdef"] is graphdef
    assert jax.eval_shape(lambda v: v, variables)["nnx"]["graphdef"] is graphdef
    grads = jax.grad(lambda v: model.apply(v, X, mutable=["batch_stats"])[0].sum())(variables)
    assert grads["nnx"]["graphdef"] is graphdef
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), variables)
    assert jax.vmap(lambda v: v)(stacked)["nnx"]["graphdef"] is graphdef
    final, _ = jax.lax.scan(lambda v, _: (v, None), variables, length=2)
    assert final["nnx"]["graphdef"] is graphdef


@pytest.mark.parametrize("library", [pickle, cloudpickle])
def test_pickle_brings_back_an_equal_definition(library, model, variables, graphdef):
    restored = library.loads(library.dumps(variables))
    assert restored["nnx"]["graphdef"] == graphdef
    assert_applies(model, restored)


def test_cloudpickle_carries_the_definition_of_a_local_class():
    class Local(Normed):
        pass

    variables = bridge.to_linen(Local, 4).init(KEY, X)
    restored = cloudpickle.loads(cloudpickle.dumps(variables))
    assert isinstance(restored["nnx"]["graphdef"], nnx.GraphDef)


@pytest.mark.parametrize("library", [pickle, cloudpickle])
def test_the_wrapper_itself_is_pickled(library, model, variables):
    restored = library.loads(library.dumps(model))
    assert restored == model
    assert_applies(restored, variables)


def test_flax_serialization_restores_into_variables(model, variables, graphdef):
    blank = jax.tree.map(jnp.zeros_like, variables)
    restored = serialization.from_bytes(blank, serialization.to_bytes(variables))
    assert restored["nnx"]["graphdef"] is graphdef
    assert_identical(restored, variables)
    assert_applies(model, restored)


def test_flax_serialization_restores_without_a_target(model, variables):
    restored = serialization.msgpack_restore(serialization.to_bytes(variables))
    assert set(restored) == {"params", "batch_stats", "nnx"}
    assert_applies(model, restored)


def test_a_state_dict_round_trips(model, variables, graphdef):
    state = serialization.to_state_dict(variables)
    restored = serialization.from_state_dict(variables, state)
    assert restored["nnx"]["graphdef"] is graphdef
    assert_applies(model, restored)
    assert_applies(model, state)


def test_a_checkpoint_without_the_definition_restores_where_there_is_one(model, variables):
    data = serialization.to_bytes({c: v for c, v in variables.items() if c != "nnx"})
    restored = serialization.msgpack_restore(data)
    assert_applies(model, restored)
    assert_applies(model, {**restored, "nnx": variables["nnx"]})


@pytest.fixture
def checkpointer():
    with ocp.PyTreeCheckpointer() as checkpointer:
        yield checkpointer


@unsharded
def test_orbax_restores_into_a_target(tmp_path, checkpointer, model, variables, graphdef):
    checkpointer.save(tmp_path / "checkpoint", variables)
    restored = checkpointer.restore(tmp_path / "checkpoint", item=variables)
    assert restored["nnx"]["graphdef"] is graphdef
    assert_applies(model, restored)


def test_orbax_restores_into_an_abstract_target(tmp_path, model, variables, graphdef):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", variables)
        checkpointer.wait_until_finished()
        target = jax.eval_shape(model.init, KEY, X)
        restored = checkpointer.restore(tmp_path / "checkpoint", target)
    assert restored["nnx"]["graphdef"] is graphdef
    assert_applies(model, restored)


@unsharded
def test_orbax_restores_without_a_target(tmp_path, checkpointer, model, variables):
    """Regression: integer keys come back as strings, and failed."""
    checkpointer.save(tmp_path / "checkpoint", variables)
    restored = checkpointer.restore(tmp_path / "checkpoint")
    assert_applies(model, restored)


def test_flattening_by_path_and_back_keeps_it(model, variables, graphdef):
    flat = traverse_util.flatten_dict(variables)
    assert flat["nnx", "graphdef"] is graphdef
    assert_applies(model, traverse_util.unflatten_dict(flat))


def test_linen_s_own_tools_take_variables_that_hold_it(model, variables):
    assert nn.unbox(variables)["nnx"]["graphdef"] is variables["nnx"]["graphdef"]
    specs = nn.get_partition_spec(variables)
    assert jax.tree.leaves(specs["nnx"]) == []
    assert "ToLinen" in nn.tabulate(model, KEY)(X)


def test_slots_tell_where_every_leaf_comes_from_in_the_order_of_the_state(graphdef):
    flat = nnx.to_flat_state(nnx.state(native()))
    assert [slot.path for slot in graphdef.slots] == [path for path, _ in flat]
    assert [slot.var_type for slot in graphdef.slots] == [type(v) for _, v in flat]
    assert [slot.address[0] for slot in graphdef.slots] == [
        {nnx.Param: "params", nnx.BatchStat: "batch_stats"}[type(v)] for _, v in flat
    ]
    assert [aval.shape for aval in graphdef.avals] == [v.get_value().shape for _, v in flat]


class Keeping(Normed):
    def __init__(self, width, *, rngs):
        super().__init__(width, rngs=rngs)
        self.activation = lambda x: x
        self.lock = threading.Lock()


@pytest.mark.parametrize("library", [pickle, cloudpickle])
def test_a_definition_that_cannot_be_pickled_is_left_out_and_rebuilt(library):
    model = bridge.to_linen(Keeping, 4)
    variables = model.init(KEY, X)
    restored = library.loads(library.dumps(variables))
    assert restored["nnx"]["graphdef"] == {}
    assert_identical(restored["params"], variables["params"])
    assert_applies(model, restored)
    _, updates = model.apply(restored, X, mutable=True)
    assert_applies(model, {**restored, **updates})


def test_an_existing_module_that_cannot_be_pickled_says_so():
    linen, variables = bridge.ToLinen.from_module(Keeping(4, rngs=nnx.Rngs(0)))
    assert pickle.loads(pickle.dumps(variables))["nnx"]["graphdef"] == {}
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        pickle.dumps(linen)
    assert copy.copy(linen) == linen
    linen, variables = bridge.ToLinen.from_module(native())
    assert pickle.loads(pickle.dumps(linen)) == linen
    assert copy.deepcopy(linen) == linen


def test_a_pickle_is_read_where_the_code_of_its_definition_is_gone(monkeypatch, model, variables):
    written = pickle.dumps(variables)
    monkeypatch.delitem(globals(), "Normed")
    restored = pickle.loads(written)
    assert restored["nnx"]["graphdef"] == {}
    assert_identical(restored["params"], variables["params"])


def test_a_copy_of_variables_keeps_the_definition(variables, graphdef):
    assert copy.copy(graphdef) is graphdef
    assert copy.deepcopy(variables)["nnx"]["graphdef"] is graphdef


def test_tabulate_shows_it_in_one_line(model):
    table = nn.tabulate(model, KEY, console_kwargs={"width": 200})(X)
    assert sum("graphdef" in line for line in table.splitlines()) == 1
    assert "kernel_init" not in table
    assert len(table.splitlines()) < 40
