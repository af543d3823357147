"""`init_sharded` and `abstract` refuse what does not fit, with errors that say why."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx

import bridge
from tests._sharding.sharded_models import AXIS_TYPES, KEY, mesh
from tests.models import snapshot

X = jnp.ones((2, 4))
PARAMETERS = {
    "good": ((4, 4), ("data", "model")),
    "logical": ((4, 4), ("embed", "mlp")),
    "long": ((4, 4), ("data", None, "model")),
    "odd": ((3, 4), ("data", None)),
    "product": ((4, 4), (("data", "model"), None)),
    "twice": ((8, 8), ("data", "data")),
    "unknown": ((4, 6), ("nope", "model")),
}
PROBLEMS = (
    ("logical", "(4, 4) as P('embed', 'mlp')", "the mesh has no axis 'embed', 'mlp'"),
    (
        "long",
        "(4, 4) as P('data', None, 'model')",
        "the spec has 3 entries and the array 2 dimensions",
    ),
    (
        "odd",
        "(3, 4) as P('data', None)",
        "dimension 0 of size 3 cannot be divided into 2 parts",
    ),
    (
        "product",
        "(4, 4) as P(('data', 'model'), None)",
        "dimension 0 of size 4 cannot be divided into 8 parts",
    ),
    ("twice", "(8, 8) as P('data', 'data')", "axis 'data' is there more than once"),
    ("unknown", "(4, 6) as P('nope', 'model')", "the mesh has no axis 'nope'"),
    (
        "unknown",
        "(4, 6) as P('nope', 'model')",
        "dimension 1 of size 6 cannot be divided into 4 parts",
    ),
)


class LinenMisfits(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name, (shape, names) in PARAMETERS.items():
            is_logical = name == "logical"
            annotate = nn.with_logical_partitioning if is_logical else nn.with_partitioning
            self.param(name, annotate(nn.initializers.ones, names), shape)
        return x


class NNXMisfits(nnx.Module):
    def __init__(self):
        for name, (shape, names) in PARAMETERS.items():
            setattr(self, name, nnx.Param(jnp.ones(shape), out_sharding=names))

    def __call__(self, x):
        return x


class Holder(nnx.Module):
    def __init__(self):
        self.inner = bridge.ToNNX(LinenMisfits(), KEY)

    def __call__(self, x):
        return self.inner(x)


class LinenHolder(nn.Module):
    @nn.compact
    def __call__(self, x):
        return bridge.to_linen(NNXMisfits, name="inner")(x)


BUILDS = {
    "Linen": (LinenMisfits(), KEY, "params/"),
    "ToNNX": (lambda: bridge.ToNNX(LinenMisfits(), KEY), None, ""),
    "NNX holding ToNNX": (Holder, None, "inner/"),
    "NNX": (NNXMisfits, None, ""),
    "ToLinen": (bridge.to_linen(NNXMisfits), KEY, "params/"),
    "Linen holding ToLinen": (LinenHolder(), KEY, "params/inner/"),
    "ToLinen of NNX holding ToNNX": (bridge.to_linen(Holder), KEY, "params/inner/"),
}


@pytest.mark.parametrize("function", [bridge.init_sharded, bridge.abstract])
@pytest.mark.parametrize("kind", AXIS_TYPES)
@pytest.mark.parametrize("name", BUILDS)
def test_one_error_lists_every_leaf_that_does_not_fit(name, kind, function):
    build, rngs, prefix = BUILDS[name]
    with pytest.raises(bridge.ShardingError) as raised:
        function(build, mesh(kind), X, rngs=rngs)
    expected = sorted((prefix + path, *rest) for path, *rest in PROBLEMS)
    assert sorted(raised.value.problems) == expected
    assert raised.value.mesh == {"data": 2, "model": 4}
    for problem in expected:
        assert "{} {}: {}".format(*problem) in str(raised.value)
    assert not any("good" in path for path, *_ in raised.value.problems)


def test_the_error_names_the_model_the_mesh_and_the_remedy():
    with pytest.raises(ValueError, match="NNXMisfits cannot be sharded over the mesh") as raised:
        bridge.init_sharded(NNXMisfits, mesh())
    assert isinstance(raised.value, bridge.BridgeError)
    assert "{'data': 2, 'model': 4}" in str(raised.value)
    assert "rules=" in str(raised.value)


def test_the_error_can_be_pickled():
    with pytest.raises(bridge.ShardingError) as raised:
        bridge.init_sharded(NNXMisfits, mesh())
    again = pickle.loads(pickle.dumps(raised.value))
    assert type(again) is bridge.ShardingError
    assert (str(again), again.problems, again.mesh) == (
        str(raised.value),
        raised.value.problems,
        raised.value.mesh,
    )


def test_an_instance_is_as_before_when_its_variables_do_not_fit():
    model = bridge.ToNNX(LinenMisfits(), nnx.Rngs(0))
    before = snapshot(model)
    with pytest.raises(bridge.ShardingError):
        bridge.init_sharded(model, mesh(), X)
    assert snapshot(model) == before


def test_nothing_of_the_mesh_or_the_rules_stays_behind():
    rules = nn.get_logical_axis_rules()
    with pytest.raises(bridge.ShardingError):
        bridge.init_sharded(NNXMisfits, mesh(), rules=(("a", "data"),))
    assert jax.sharding.get_abstract_mesh().empty
    assert nn.get_logical_axis_rules() == rules
    assert nnx.using_eager_sharding()


@pytest.mark.parametrize("function", [bridge.init_sharded, bridge.abstract])
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (nn.Dense, ["the class Dense", "as an instance", "lambda: Model"]),
        (None, ["None", "a function that returns an NNX module"]),
        (3, ["3 of type int"]),
        (lambda: nn.Dense(3), ["Dense", "to return an NNX module"]),
        (lambda: None, ["None", "to return an NNX module"]),
    ],
    ids=["a Linen class", "nothing", "a number", "returns Linen", "returns nothing"],
)
def test_what_makes_no_model_is_refused(build, words, function):
    with pytest.raises(bridge.InvalidModuleError) as raised:
        function(build, mesh(), X)
    assert isinstance(raised.value, TypeError)
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize("function", [bridge.init_sharded, bridge.abstract])
def test_keys_for_an_instance_are_refused(function):
    with pytest.raises(bridge.InvalidModuleError, match="its own streams"):
        function(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), mesh(), X, rngs=jax.random.key(0))


@pytest.mark.parametrize("function", [bridge.init_sharded, bridge.abstract])
@pytest.mark.parametrize(
    "rngs",
    [0, "key", {}, {"params": 0}, np.zeros(2, np.uint32), nnx.Rngs(0)],
    ids=["int", "str", "empty", "dict of int", "numpy", "Rngs"],
)
def test_rngs_that_are_no_keys_are_refused(rngs, function):
    for build in (nn.Dense(3), lambda rngs: nnx.Linear(4, 4, rngs=rngs)):
        with pytest.raises(bridge.InvalidRngsError) as raised:
            function(build, mesh(), X, rngs=rngs)
        assert isinstance(raised.value, TypeError)
        assert isinstance(raised.value, flax_errors.InvalidRngError)
        assert "expected rngs as a key, or a dict of keys" in str(raised.value)


@pytest.mark.parametrize("function", [bridge.init_sharded, bridge.abstract])
def test_what_needs_a_key_says_so(function):
    words = rf"{function.__name__} of .* found None .* pass rngs=jax.random.key\(0\)"
    for build in (nn.Dense(3), lambda rngs: nnx.Linear(4, 4, rngs=rngs)):
        with pytest.raises(bridge.InvalidRngsError, match=words):
            function(build, mesh(), X)


def test_an_error_of_the_model_itself_comes_through():
    class Failing(nnx.Module):
        def __init__(self):
            raise ValueError("the model's own")

    for kind in AXIS_TYPES:
        with pytest.raises(ValueError, match="the model's own"):
            bridge.init_sharded(Failing, mesh(kind))


@pytest.mark.parametrize("rules", ["data", 3, [("embed",)], {"embed"}, ["ab"]], ids=str)
def test_what_are_no_rules_is_refused(rules):
    with pytest.raises(bridge.ConversionError, match="expected rules as"):
        bridge.init_sharded(nn.Dense(3), mesh(), jnp.ones((1, 2)), rngs=KEY, rules=rules)


@pytest.mark.parametrize("rngs", [jax.random.split(KEY), {"params": jax.random.split(KEY, 3)}])
def test_several_keys_for_one_are_refused(rngs):
    with pytest.raises(bridge.InvalidRngsError, match="init_sharded of Dense expected rngs"):
        bridge.init_sharded(nn.Dense(3), mesh(), jnp.ones((1, 2)), rngs=rngs)
