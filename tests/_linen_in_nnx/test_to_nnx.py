"""ToNNX: variables, calls, methods, attributes, updates, identity, errors."""

import copy
import functools
import inspect

import flax.nnx.bridge as peer
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx
from flax.core import DenyList, freeze, meta

import bridge
from tests import models
from tests.models import assert_close, assert_identical, leaf_paths, snapshot

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
KEY = jax.random.key(7)


def wrapped(module, *args, rngs=KEY, **options):
    """A wrapper, and the pure Linen variables that it should hold."""
    variables = module.init(KEY, *args)
    variables = {c: tree for c, tree in variables.items() if c != "intermediates"}
    return bridge.ToNNX(module, rngs, **options).lazy_init(*args), variables


ARCHITECTURES = {
    "flat": lambda: (nn.Dense(3), X),
    "one parameter": lambda: (models.LinenDot(), X),
    "nested compact": lambda: (models.LinenMLP(), X),
    "setup": lambda: (models.LinenAutoencoder(), X),
    "lists and dicts": lambda: (models.LinenListsAndDicts(nn.Dense(2)), X),
    "batch norm": lambda: (nn.BatchNorm(use_running_average=True), X),
    "several collections": lambda: (models.LinenClassifier(), X, False),
    "scan": lambda: (models.LinenScanned(train=False), X),
    "vmap": lambda: (models.LinenVmapped(train=False), X),
    "remat": lambda: (nn.remat(models.LinenMLP)(), X),
    "rnn": lambda: (models.LinenRecurrent(), X),
    "convolution": lambda: (nn.Conv(2, (3,)), X[..., None]),
    "embedding": lambda: (nn.Embed(5, 3), jnp.arange(4)),
    "decoding attention": lambda: (
        nn.MultiHeadDotProductAttention(2, qkv_features=4, decode=True),
        X[None],
    ),
    "auto collection": lambda: (models.LinenCounter(), X),
    "no variables": lambda: (models.LinenActivation(), X),
    "weight norm": lambda: (nn.WeightNorm(nn.Dense(3)), X),
}


@functools.cache
def initialised(name):
    """A module, its arguments, and the variables that Linen makes."""
    module, *args = ARCHITECTURES[name]()
    variables = module.init(KEY, *args)
    return module, args, {c: tree for c, tree in variables.items() if c != "intermediates"}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_state_paths_are_those_of_flax_nnx_bridge(name):
    module, *args = ARCHITECTURES[name]()
    ours, theirs = (
        nnx.eval_shape(lambda made=made: made.lazy_init(made.ToNNX(module, nnx.Rngs(0)), *args))
        for made in (bridge, peer)
    )
    # The peer keeps what `init` sowed; Linen itself leaves it out of what it returns.
    their_paths = {p: t for p, t in leaf_paths(theirs).items() if t is not nnx.Intermediate}
    assert leaf_paths(ours).keys() == their_paths.keys()
    for path, var_type in leaf_paths(ours).items():
        # A collection that nobody registered gets a type of each bridge's own making.
        assert var_type.__name__ == their_paths[path].__name__
    ours_order = [p for p, _ in nnx.to_flat_state(nnx.state(ours))]
    theirs_order = [p for p, _ in nnx.to_flat_state(nnx.state(theirs))]
    assert ours_order == [p for p in theirs_order if p in set(ours_order)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_variables_and_outputs_are_those_of_pure_linen(name):
    module, args, variables = initialised(name)
    model = bridge.ToNNX(module, KEY).lazy_init(*args)
    assert_identical(model.linen_variables(), variables)
    mutable = ["cache"] if name == "decoding attention" else False
    inputs = [args[0][:, :1]] if mutable else args
    expected = module.apply(variables, *inputs, mutable=mutable)
    expected = expected[0] if mutable else expected
    assert_identical(model(*inputs, mutable=mutable), expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_from_variables_and_linen_variables_are_inverses(name):
    module, _, variables = initialised(name)
    for given in (variables, freeze(variables)):
        model = bridge.ToNNX.from_variables(module, given)
        assert_identical(model.linen_variables(), variables)
    assert not nnx.state(model, nnx.RngState)


def test_a_submodule_is_a_mapping_by_name():
    model, variables = wrapped(models.LinenMLP(), X)
    kernel = variables["params"]["Dense_0"]["kernel"]
    assert_identical(model.Dense_0["kernel"].get_value(), kernel)
    assert_identical(nnx.state(model)["Dense_0"]["kernel"].get_value(), kernel)
    assert sorted(model.Dense_0) == ["bias", "kernel"]
    assert "kernel" in model.Dense_0
    assert len(model.Dense_0) == 2
    assert dict(model.Dense_0.items())["bias"] is model.Dense_0["bias"]
    nested, _ = wrapped(models.LinenApplies(lambda _, x: models.LinenMLP(name="net")(x)), X)
    assert nested.net["Dense_0"]["kernel"].shape == (5, 3)
    assert jax.tree.structure(dict(model.Dense_0)) == jax.tree.structure(
        {"bias": model.Dense_0["bias"], "kernel": model.Dense_0["kernel"]}
    )


def test_writing_into_a_submodule_mapping_reaches_the_model():
    model, variables = wrapped(models.LinenMLP(), X)
    model.Dense_0["kernel"] = nnx.Param(jnp.ones((5, 3)))
    variables["params"]["Dense_0"]["kernel"] = jnp.ones((5, 3))
    assert_identical(model(X), models.LinenMLP().apply(variables, X))


def test_assigning_a_new_param_replaces_the_variable():
    model, _ = wrapped(models.LinenDot(), X)
    model.w = nnx.Param(jnp.ones((4, 3)))
    assert_identical(model(X), X @ jnp.ones((4, 3)))


def test_assigning_a_value_swaps_the_weights():
    model, _ = wrapped(models.LinenDot(), X)
    model.w.set_value(jnp.ones((4, 3)))
    assert_identical(model(X), X @ jnp.ones((4, 3)))
    model.w[...] = jnp.zeros((4, 3))
    assert_identical(model(X), jnp.zeros((2, 3)))


def test_variable_types_follow_the_collections():
    model, _ = wrapped(models.LinenClassifier(), X, False)
    assert type(model.Dense_0["kernel"]) is nnx.Param
    assert type(model.BatchNorm_0["mean"]) is nnx.BatchStat
    assert type(model.BatchNorm_0["scale"]) is nnx.Param


def test_from_variables_takes_and_gives_back_metadata_boxes():
    kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    bias_init = nn.with_logical_partitioning(nn.initializers.zeros, ("embed",))
    module = nn.Dense(3, kernel_init=kernel_init, bias_init=bias_init)
    variables = module.init(KEY, X)
    before = jax.tree.map(lambda x: x, variables)
    model = bridge.ToNNX.from_variables(module, variables)
    result = model.linen_variables()
    assert_identical(result, variables)
    assert isinstance(result["params"]["kernel"], nn.Partitioned)
    assert isinstance(result["params"]["bias"], nn.LogicallyPartitioned)
    assert result["params"]["kernel"].names == ("in", "out")
    assert_identical(model(X), module.apply(variables, X))
    assert_identical(variables, before)


def test_inside_the_linen_module_the_boxes_are_the_original_ones():
    seen = []

    def call(module, x):
        init = nn.with_partitioning(nn.initializers.ones, (None, "in"))
        w = module.param("w", init, (1, 4), unbox=False)
        seen.append(w)
        return x * w.unbox()

    model, _ = wrapped(models.LinenApplies(call), X)
    model(X)
    assert all(type(w) is nn.Partitioned and w.names == (None, "in") for w in seen)
    assert len(seen) == 3


def test_from_variables_leaves_the_given_variables_alone():
    module = models.LinenWriter()
    variables = module.init(KEY, X)
    before = copy.deepcopy(variables)
    model = bridge.ToNNX.from_variables(module, variables)
    model(X, mutable=True)
    assert_identical(variables, before)


def test_empty_collections_survive_the_round_trip():
    variables = {"params": {"w": jnp.ones((4, 3))}, "cache": {}, "batch_stats": {"a": {}}}
    model = bridge.ToNNX.from_variables(models.LinenDot(), variables)
    assert model.linen_variables() == variables
    assert_identical(model(X), X @ jnp.ones((4, 3)))


def test_a_name_in_two_collections_makes_an_exact_round_trip():
    module = models.LinenSameName()
    model, variables = wrapped(module, X)
    assert_identical(model.linen_variables(), variables)
    assert_identical(model(X), module.apply(variables, X))
    expected, updates = module.apply(variables, X, mutable=["batch_stats"])
    assert_identical(model(X, mutable=["batch_stats"]), expected)
    assert_identical(model.linen_variables(), {**variables, **updates})
    assert type(model.w) is nnx.Param
    assert type(model.batch_stats["w"]) is nnx.BatchStat
    assert type(model.cache["w"]["mean"] if "w" in model.cache else None) is not nnx.Param


def test_a_leaf_of_one_collection_above_a_subtree_of_another_keeps_both():
    """Defect 10: `mean` was lost."""
    variables = {"params": {"w": jnp.ones(2)}, "batch_stats": {"w": {"mean": jnp.zeros(3)}}}
    assert_identical(
        bridge.ToNNX.from_variables(models.LinenDot(), variables).linen_variables(), variables
    )


RESERVED = [
    *("module", "rngs", "train", "sow", "lazy_init", "eval", "set_attributes", "perturb"),
    *("iter_modules", "iter_children", "linen_variables", "from_variables", "view", "named"),
]


@pytest.mark.parametrize("as_param", [False, True])
@pytest.mark.parametrize("name", RESERVED)
def test_a_linen_name_may_be_an_attribute_of_the_wrapper(name, as_param):
    """Defect 11: such a name broke the wrapper."""
    module = models.LinenNamed(name, as_param=as_param)
    model, variables = wrapped(module, X)
    assert_identical(model.linen_variables(), variables)
    assert_identical(model(X), module.apply(variables, X))
    assert name in nnx.state(model)
    graphdef, state = nnx.split(model)
    assert_identical(nnx.merge(graphdef, state)(X), module.apply(variables, X))
    model.train()
    model.eval()
    assert_identical(model(X), module.apply(variables, X))
    assert_identical(model.lazy_init(X).linen_variables(), variables)


@pytest.mark.parametrize("as_param", [False, True])
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("to_nnx__x", "to_nnx__"),
        ("to_nnx__module", "to_nnx__"),
        ("to_nnx__rngs", "to_nnx__"),
        ("_pytree__state", "NNX keeps"),
        ("_pytree__nodes", "NNX keeps"),
        ("__captures__", "NNX keeps"),
        ("_object__state", "ToNNX has a property"),
    ],
)
def test_a_reserved_linen_name_raises_with_its_rule_and_changes_nothing(name, rule, as_param):
    model = bridge.ToNNX(models.LinenNamed(name, as_param=as_param), rngs=KEY)
    before = snapshot(model)
    with pytest.raises(bridge.ReservedNameError, match=f"{name}.*{rule}") as raised:
        model.lazy_init(X)
    assert "Rename" in str(raised.value)
    assert isinstance(raised.value, bridge.BridgeError)
    assert snapshot(model) == before


def test_decoding_attention_token_by_token_equals_pure_linen():
    module = nn.MultiHeadDotProductAttention(2, qkv_features=4, decode=True)
    tokens = jax.random.normal(KEY, (1, 5, 4))
    by_call, variables = wrapped(module, tokens)
    by_construction, _ = wrapped(module, tokens, mutable="existing")
    by_train, _ = wrapped(module, tokens)
    by_train.train()
    for token in jnp.split(tokens, 5, axis=1):
        expected, updates = module.apply(variables, token, mutable=["cache"])
        variables = {**variables, **updates}
        assert_identical(by_call(token, mutable=["cache"]), expected)
        assert_identical(by_construction(token), expected)
        assert_identical(by_train(token), expected)
    for model in (by_call, by_construction, by_train):
        assert_identical(model.linen_variables(), variables)
    assert int(by_call.cache_index.get_value()) == 5


def test_dropout_inside_scan_draws_as_pure_linen_does():
    module = models.LinenScanned()
    variables = models.LinenScanned(train=False).init(KEY, X)
    model = bridge.ToNNX.from_variables(module, variables)
    rngs = {"dropout": jax.random.key(3)}
    expected, updates = module.apply(variables, X, rngs=rngs, mutable=["batch_stats"])
    assert_identical(model(X, rngs=rngs, mutable=["batch_stats"]), expected)
    assert_identical(model.linen_variables(), {**variables, **updates})


@pytest.mark.parametrize("how", ["name", "function", "attribute", "partial", "bound"])
def test_a_method_is_called_by_name_by_function_and_as_an_attribute(how):
    module = models.LinenAutoencoder()
    model, variables = wrapped(module, X)
    expected = module.apply(variables, X, method="encode")
    call = {
        "name": lambda: model(X, method="encode"),
        "function": lambda: model(X, method=models.LinenAutoencoder.encode),
        "attribute": lambda: model.encode(X),
        "partial": lambda: model(X, method=lambda m, x: m.encode(x)),
        "bound": lambda: model(X, method=module.encode),
    }[how]
    assert_identical(call(), expected)


def test_a_method_attribute_is_a_true_bound_method_and_takes_keywords():
    module = models.LinenAutoencoder()
    model, variables = wrapped(module, X)
    assert model.decode.__self__ is model
    z = model.encode(X)
    expected = module.apply(variables, z, scale=2.0, method="decode")
    assert_identical(model.decode(z, scale=2.0), expected)
    assert_close(nnx.jit(lambda m, z: m.decode(z))(model, z), model.decode(z))


def test_a_setup_submodule_and_its_methods_can_be_called():
    """Defect 16: a dict is not callable."""
    module = models.LinenAutoencoder()
    model, variables = wrapped(module, X)
    expected = module.apply(variables, X, method=lambda m, x: m.encoder(x))
    assert_identical(model.encoder(X), expected)
    assert_identical(model.activation(X), nn.relu(X))
    assert_identical(model.activation.twice(X), 2 * nn.relu(X))
    assert model.encoder["kernel"].shape == (4, 2)


def test_embed_attend_is_reached_through_a_setup_submodule():
    class Model(nn.Module):
        def setup(self):
            self.embed = nn.Embed(5, 4)

        def __call__(self, ids):
            return self.embed.attend(self.embed(ids))

    ids = jnp.arange(3)
    module = Model()
    model, variables = wrapped(module, ids)
    table = variables["params"]["embed"]["embedding"]
    assert_identical(model.embed(ids), table[ids])
    assert_identical(model.embed.attend(X), jnp.dot(X, table.T))


def test_fields_are_those_of_the_linen_module():
    model, _ = wrapped(models.LinenAutoencoder(5), X)
    assert model.features == 5
    assert model.name_of_owner == "nobody"
    dense = bridge.ToNNX(nn.Dense(4, use_bias=False))
    assert (dense.features, dense.use_bias, dense.dtype) == (4, False, None)


def test_setting_a_field_changes_the_linen_module_of_this_wrapper_only():
    module = models.LinenWriter()
    model, _ = wrapped(module, X)
    model.collections = ()
    assert model.collections == ()
    assert module.collections == ("counter",)
    assert_identical(model(X), X)


def test_attributes_before_lazy_init():
    model = bridge.ToNNX(nn.Dense(3))
    assert not hasattr(model, "kernel")
    assert not hasattr(model, "nonsense")
    with pytest.raises(AttributeError, match=r"Dense.*nonsense.*lazy_init"):
        _ = model.nonsense
    assert hasattr(model, "features")


def test_a_missing_attribute_after_lazy_init_is_named():
    model, _ = wrapped(nn.Dense(3), X)
    assert hasattr(model, "kernel")
    with pytest.raises(AttributeError, match=r"ToNNX\(Dense\).*'nonsense'"):
        _ = model.nonsense


@pytest.mark.parametrize("value", ["x", 3, None, (1, 2), len])
def test_a_plain_attribute_is_no_variable_and_disturbs_nothing(value):
    """Defect 22: a plain attribute broke the next call."""
    module = models.LinenAutoencoder()
    model, variables = wrapped(module, X)
    model.label = value
    model._private = value
    assert model.label is value
    assert model._private is value
    assert_identical(model(X), module.apply(variables, X))
    assert_identical(model.linen_variables(), variables)
    assert nnx.merge(*nnx.split(model)).label == value
    model.lazy_init(X)
    del model.label
    assert not hasattr(model, "label")


def test_an_array_and_a_native_module_as_attributes_are_no_linen_variables():
    module = nn.Dense(3)
    model, variables = wrapped(module, X)
    model.offset = jnp.ones(2)
    model.head = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    assert_identical(model(X), module.apply(variables, X))
    assert_identical(model.linen_variables(), variables)


def test_the_deprecated_names_still_answer():
    module = nn.Dense(3)
    model = bridge.ToNNX(module, rngs=nnx.Rngs(0))
    with pytest.warns(DeprecationWarning, match="to_nnx__module"):
        assert model.module is module
    with pytest.warns(DeprecationWarning, match="to_nnx__rngs"):
        assert model.rngs is model.to_nnx__rngs
    assert model.to_nnx__module is module


@pytest.mark.parametrize(
    "mutable",
    [False, True, ["counter"], ("counter",), {"counter"}, [], "counter", nn.DenyList("params")],
    ids=str,
)
def test_a_call_returns_just_the_output(mutable):
    model, variables = wrapped(models.LinenCounter(), X)
    expected = models.LinenCounter().apply(variables, X)
    assert_identical(model(X, mutable=mutable), expected)


def test_a_pytree_and_an_empty_output_come_back_as_they_are():
    module = models.LinenApplies(lambda _, x: {"a": (x, [x]), "b": None})
    model = bridge.ToNNX(module).lazy_init(X)
    assert_identical(model(X), {"a": (X, [X]), "b": None})
    assert bridge.ToNNX(models.LinenApplies(lambda _: None))() is None


def test_an_update_keeps_the_identity_of_variables_and_aliases_stay_valid():
    """Defect 13: a Variable was replaced at update."""
    module = nn.BatchNorm(use_running_average=False)
    model, variables = wrapped(module, X)
    mean, scale = model.mean, model.scale

    class Holder(nnx.Module):
        def __init__(self):
            self.model, self.alias = model, mean

    holder = Holder()
    expected, updates = module.apply(variables, X, mutable=["batch_stats"])
    assert_identical(model(X, mutable=["batch_stats"]), expected)
    assert model.mean is mean
    assert model.scale is scale
    assert holder.alias is holder.model.mean
    assert_identical(mean.get_value(), updates["batch_stats"]["mean"])


def test_only_leaves_that_changed_are_written():
    model, _ = wrapped(models.LinenClassifier(), X, False)
    before = {p: v.get_raw_value() for p, v in nnx.to_flat_state(nnx.state(model))}
    mean, kernel = model.BatchNorm_0["mean"], model.Dense_0["kernel"]
    kernel_value = kernel.get_raw_value()
    model(X, train=True, mutable=True)
    assert model.Dense_0["kernel"] is kernel
    assert kernel.get_raw_value() is kernel_value
    assert model.BatchNorm_0["mean"] is mean
    assert mean.get_raw_value() is not before["BatchNorm_0", "mean"]


@pytest.mark.parametrize("graph", [True, False])
def test_updates_reach_the_model_through_nnx_jit(graph):
    module = nn.BatchNorm(use_running_average=False)
    with nnx.set_graph_mode(graph):
        model, variables = wrapped(module, X, mutable=["batch_stats"])
        mean = model.mean
        step = nnx.jit(lambda m, x: m(x))
        for _ in range(2):
            expected, updates = module.apply(variables, X, mutable=["batch_stats"])
            variables = {**variables, **updates}
            assert_close(step(model, X), expected)
    assert model.mean is mean
    assert_close(mean.get_value(), updates["batch_stats"]["mean"])


@pytest.mark.parametrize("graph", [True, False])
def test_updates_reach_the_model_through_nnx_loops(graph):
    """Defect 21: nnx.while_loop failed, and in tree mode updates were lost."""
    with nnx.set_graph_mode(graph):
        model, _ = wrapped(models.LinenWriter(), X, mutable=["counter"], rngs={"params": KEY})

        def body(_, carry):
            m, x = carry
            return m, m(x)

        nnx.fori_loop(0, 3, body, (model, X))
        assert float(model.count_counter.get_value()) == 3

        def cond(carry):
            return carry[0].count_counter.get_value() < 5

        nnx.while_loop(cond, lambda carry: body(0, carry), (model, X))
        assert float(model.count_counter.get_value()) == 5


@pytest.mark.parametrize("graph", [True, False])
def test_updates_reach_the_model_through_nnx_cond_and_scan(graph):
    with nnx.set_graph_mode(graph):
        model, _ = wrapped(models.LinenWriter(), X, mutable=["counter"], rngs={"params": KEY})
        nnx.cond(True, lambda m, x: m(x), lambda m, x: x, model, X)
        assert float(model.count_counter.get_value()) == 1
        nnx.cond(False, lambda m, x: m(x), lambda m, x: x, model, X)
        assert float(model.count_counter.get_value()) == 1

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def scan(m, x):
            return m, m(x)

        scan(model, jnp.stack([X] * 3))
        assert float(model.count_counter.get_value()) == 4


def test_an_update_under_nnx_jit_with_a_partial_reaches_the_model():
    """Defect 21: nnx.jit with Partial failed."""
    model, _ = wrapped(models.LinenWriter(), X, mutable=["counter"], rngs={"params": KEY})
    step = nnx.jit_partial(lambda m, x: m(x), model, graph=False)
    step(X)
    step(X)
    assert float(model.count_counter.get_value()) == 2


@pytest.mark.parametrize("opened", [False, True])
def test_batch_norm_in_evaluation_can_be_closed_over(opened):
    module = nn.BatchNorm(use_running_average=True)
    model, variables = wrapped(module, X, mutable=["batch_stats"] if opened else False)
    apply = lambda x: module.apply(variables, x)  # noqa: E731
    assert_identical(jax.jit(model)(X), jax.jit(apply)(X))
    assert_identical(jax.vmap(model)(X), jax.vmap(apply)(X))
    scan = lambda f: jax.lax.scan(lambda _, x: (None, f(x)), None, X)[1]  # noqa: E731
    assert_identical(scan(model), scan(apply))
    assert_identical(jax.grad(lambda x: model(x).sum())(X), jax.grad(lambda x: apply(x).sum())(X))


def test_a_new_collection_may_appear_in_nested_mappings_during_a_call():
    def call(module, x):
        inner = nn.Dense(2, name="inner")
        y = inner(x)
        if not module.is_initializing():
            inner.put_variable("cache", "last", y)
        return y

    module = models.LinenApplies(call)
    for transform in (lambda f: f, nnx.jit):
        model, variables = wrapped(module, X)
        expected, updates = module.apply(variables, X, mutable=["cache"])
        kernel = model.inner["kernel"]
        output = transform(lambda m, x: m(x, mutable=["cache"]))(model, X)
        assert_close(output, expected)
        assert type(model.inner["last"]) is nnx.Cache
        assert_close(model.inner["last"].get_value(), updates["cache"]["inner"]["last"])
        assert model.inner["kernel"] is kernel


def failing_calls():
    def writer(**options):
        module = models.LinenWriter(("batch_stats", "counter"))
        rngs = nnx.Rngs(params=0, dropout=1)
        return bridge.ToNNX(module, rngs, **options).lazy_init(X)

    def mlp():
        return bridge.ToNNX(models.LinenMLP(), nnx.Rngs(0)).lazy_init(X)

    def noisy():
        return bridge.ToNNX(models.LinenNoises(), nnx.Rngs(params=0, noise=1)).lazy_init(X)

    return {
        "immutable": (writer, lambda m: m(X), flax_errors.ModifyScopeVariableError),
        "partly mutable": (
            writer,
            lambda m: m(X, mutable=["batch_stats"]),
            bridge.ImmutableCollectionError,
        ),
        "the module raises": (
            writer,
            lambda m: m(X, fail=True, mutable=True),
            ZeroDivisionError,
        ),
        "not initialised": (
            lambda: bridge.ToNNX(nn.Dense(3), nnx.Rngs(0)),
            lambda m: m(X),
            bridge.NotInitializedError,
        ),
        "wrong shape": (mlp, lambda m: m(jnp.ones((2, 7))), bridge.MismatchError),
        "wrong arguments": (mlp, lambda m: m(X, X, X), TypeError),
        "wrong method": (mlp, lambda m: m(X, method="nope"), bridge.InvalidMethodError),
        "wrong rngs": (mlp, lambda m: m(X, rngs="nope"), bridge.InvalidRngsError),
        "jit": (
            writer,
            lambda m: nnx.jit(lambda m, x: m(x, fail=True, mutable=True))(m, X),
            ZeroDivisionError,
        ),
        "another trace": (
            writer,
            lambda m: jax.jit(lambda x: m(x, mutable=True))(X),
            flax_errors.TraceContextError,
        ),
        "counter of another trace": (
            noisy,
            lambda m: jax.jit(m)(X),
            flax_errors.TraceContextError,
        ),
    }


@pytest.mark.parametrize("name", failing_calls())
def test_nothing_changes_in_the_model_when_a_call_raises(name):
    make, call, error = failing_calls()[name]
    model = make()
    before = snapshot(model)
    for _ in range(2):
        with pytest.raises(error):
            call(model)
        assert snapshot(model) == before
    if name != "not initialised":
        assert_identical(model.linen_variables(), make().linen_variables())


def test_a_call_that_adds_a_reserved_name_changes_nothing():
    def call(module, x):
        count = module.variable("cache", "count", lambda: jnp.zeros(()))
        if not module.is_initializing():
            count.value = count.value + 1
            module.put_variable("cache", "to_nnx__late", x)
        return x

    model, _ = wrapped(models.LinenApplies(call), X)
    before = snapshot(model)
    with pytest.raises(bridge.ReservedNameError):
        model(X, mutable=True)
    assert snapshot(model) == before


def test_a_call_before_lazy_init_names_the_remedy():
    model = bridge.ToNNX(nn.Dense(3))
    with pytest.raises(bridge.NotInitializedError, match=r"ToNNX\(Dense\).*lazy_init") as raised:
        model(X)
    assert isinstance(raised.value, (ValueError, flax_errors.ScopeCollectionNotFound))
    with pytest.raises(bridge.NotInitializedError, match="from_variables"):
        bridge.ToNNX(models.LinenAutoencoder()).encode(X)


def test_a_wrong_input_shape_is_one_error_that_lists_every_mismatch():
    module = models.LinenApplies(lambda _, x: nn.Dense(3)(x) + nn.Dense(3)(x))
    model, _ = wrapped(module, X)
    with pytest.raises(bridge.MismatchError) as raised:
        model(jnp.ones((2, 7)))
    error = raised.value
    assert [path for path, *_ in error.mis_shaped] == [
        "params/Dense_0/kernel",
        "params/Dense_1/kernel",
    ]
    text = str(error)
    for part in ("float32[7, 3]", "float32[4, 3]", "float32[2, 7]", "ToNNX(LinenApplies)"):
        assert part in text
    assert isinstance(error, (ValueError, flax_errors.ScopeParamShapeError))


def test_what_a_call_captures_is_no_variable_that_is_missing():
    model = wrapped(nn.Dense(3), X)[0]
    with pytest.raises(bridge.MismatchError) as raised:
        model(jnp.ones((2, 7)), capture_intermediates=True)
    assert raised.value.missing == ()


def test_missing_and_mis_shaped_and_unknown_variables_are_one_error():
    variables = {
        "params": {
            "layers_0": {"kernel": jnp.ones((4, 9)), "bias": jnp.ones(4)},
            "Dense_9": {"kernel": jnp.ones((1, 1))},
        }
    }
    model = bridge.ToNNX.from_variables(nn.Sequential([nn.Dense(4), nn.Dense(3)]), variables)
    with pytest.raises(bridge.MismatchError) as raised:
        model(X)
    assert {path for path, *_ in raised.value.missing} == {
        "params/layers_1/kernel",
        "params/layers_1/bias",
    }
    assert [path for path, *_ in raised.value.mis_shaped] == ["params/layers_0/kernel"]
    assert raised.value.unknown == ("params/Dense_9/kernel",)


class NativeModule(nnx.Module):
    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (nn.Dense, r"Dense.*make an instance"),
        (NativeModule(), r"NativeModule.*NNX already"),
        (NativeModule, r"NativeModule.*NNX already"),
        (lambda x: x, r"function.*pass an instance"),
        (None, "NoneType"),
        ({"params": {}}, "dict"),
    ],
    ids=["class", "NNX module", "NNX class", "function", "None", "variables"],
)
def test_what_is_no_linen_module_instance_is_refused(given, hint):
    """Defect 26: it was accepted."""
    with pytest.raises(bridge.InvalidModuleError, match=hint) as raised:
        bridge.ToNNX(given)
    assert isinstance(raised.value, TypeError)
    assert raised.value.found is given


def test_a_wrapped_module_given_again_is_refused():
    model = bridge.ToNNX(nn.Dense(3))
    with pytest.raises(bridge.InvalidModuleError, match="NNX already"):
        bridge.ToNNX(model)


@pytest.mark.parametrize("method", ["nope", "features", 3, "name"])
def test_a_bad_method_names_the_methods_there_are(method):
    model, _ = wrapped(models.LinenAutoencoder(), X)
    with pytest.raises(
        bridge.InvalidMethodError, match=r"'__call__', 'decode', 'encode'"
    ) as raised:
        model(X, method=method)
    assert isinstance(raised.value, (TypeError, AttributeError))
    assert raised.value.method == method


@pytest.mark.parametrize("variables", [3, [1], {"params": jnp.ones(3)}, {1: {"a": 2}}, None])
def test_from_variables_refuses_what_are_no_variables(variables):
    with pytest.raises(bridge.ConversionError, match="expected Linen variables"):
        bridge.ToNNX.from_variables(nn.Dense(3), variables)


def test_the_metadata_of_a_box_that_a_call_replaces_is_updated():
    def call(module, x):
        box = nn.Partitioned(jnp.zeros(3), names=("a",))
        state = module.variable("cache", "state", lambda: box)
        if not module.is_initializing():
            module.put_variable("cache", "state", nn.Partitioned(jnp.ones(3), names=("b",)))
        del state
        return x

    module = models.LinenApplies(call)
    model, variables = wrapped(module, X)
    variable = model.state
    _, updates = module.apply(variables, X, mutable=["cache"])
    model(X, mutable=["cache"])
    assert model.state is variable
    result = model.linen_variables()["cache"]["state"]
    assert isinstance(result, meta.AxisMetadata)
    assert_identical(result, updates["cache"]["state"])
    assert result.names == ("b",)


@pytest.mark.parametrize("mutable", [3, [3], 1.5, ["params", None], DenyList(3)], ids=str)
def test_what_names_no_collections_is_refused_as_mutable(mutable):
    with pytest.raises(bridge.InvalidFilterError, match=r"ToNNX\(LinenDot\) expected mutable"):
        bridge.ToNNX(models.LinenDot(), mutable=mutable)
    model = bridge.ToNNX(models.LinenDot(), KEY).lazy_init(X)
    with pytest.raises(
        flax_errors.InvalidFilterError, match=r"call of ToNNX\(LinenDot\)"
    ) as raised:
        model(X, mutable=mutable)
    assert isinstance(raised.value, bridge.BridgeError | TypeError)
    assert raised.value.found is mutable


class Autoencoder(nn.Module):
    def setup(self):
        self.encoder = nn.Dense(2)
        self.norm = nn.BatchNorm(use_running_average=False)
        self.dropout = nn.Dropout(0.5, deterministic=False)

    def __call__(self, x):
        return self.norm(self.dropout(self.encoder(x)))


def test_parameters_alone_are_guessed_from_what_is_missing():
    module = Autoencoder()
    params = module.init(KEY, X)["params"]
    model = bridge.ToNNX.from_variables(module, params, KEY)
    with pytest.raises(bridge.MismatchError, match=r"pass them as \{'params': …\}"):
        model(X)


def test_a_bound_module_brings_its_variables_and_no_keys():
    module = Autoencoder()
    variables = module.init(KEY, X)
    bound = module.bind(variables, rngs={"dropout": jax.random.key(3)})
    model = bridge.ToNNX(bound)
    assert_identical(model.linen_variables(), variables)
    assert_identical(
        model(X, rngs={"dropout": jax.random.key(3)}, mutable=["batch_stats"]),
        module.apply(variables, X, rngs={"dropout": jax.random.key(3)}, mutable=["batch_stats"])[0],
    )
    with pytest.raises(bridge.MissingRngError, match="'dropout'"):
        model(X, mutable=["batch_stats"])
    # The model owns its state.
    assert_identical(bound.variables, variables)


def test_a_submodule_of_a_bound_module_brings_its_own_variables():
    variables = Autoencoder().init(KEY, X)
    encoder = bridge.ToNNX(Autoencoder().bind(variables).encoder)
    assert_identical(encoder.linen_variables(), {"params": variables["params"]["encoder"]})
    assert_identical(encoder(X), nn.Dense(2).apply(encoder.linen_variables(), X))


def test_a_module_made_in_a_call_does_not_take_the_keys_of_the_call():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            made.append(bridge.ToNNX(nn.Dropout(0.5, deterministic=False)))
            return x

    made = []
    Outer().apply({}, X, rngs={"dropout": KEY})
    assert made[0].to_nnx__rngs is None


def test_given_variables_win_over_those_that_a_module_is_bound_to():
    module = nn.Dense(2)
    first, second = (module.init(jax.random.key(i), X) for i in range(2))
    model = bridge.ToNNX.from_variables(module.bind(first), second)
    assert_identical(model.linen_variables(), second)


def test_a_module_that_is_bound_to_nothing_has_no_variables_to_bring():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            made.append(bridge.ToNNX(nn.Dense(2), KEY).lazy_init(x))
            return made[-1](x)

    made = []
    assert_identical(Outer().init_with_output(KEY, X)[0], nn.Dense(2).init_with_output(KEY, X)[0])
    assert not bridge.ToNNX(nn.Dense(2).bind({})).linen_variables()


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.float64, np.int32, np.float32])
def test_numpy_arrays_keep_their_dtype_and_values(dtype):
    class Reads(nn.Module):
        @nn.compact
        def __call__(self):
            return self.variable("counter", "n", lambda: 0).value

    limit = np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else np.finfo(dtype).max
    for value in (np.array([limit, 5], dtype), dtype(limit)):
        variables = {"counter": {"n": value}}
        model = bridge.ToNNX.from_variables(Reads(), variables)
        for found in (model(), model.linen_variables()["counter"]["n"], model.n[...]):
            assert found.dtype == dtype
            np.testing.assert_array_equal(np.asarray(found), value)
        np.testing.assert_array_equal(Reads().apply(variables), model())
        # The model owns its state.
        model.n[...] = np.zeros_like(value)
        np.testing.assert_array_equal(model(), np.zeros_like(value))
        np.testing.assert_array_equal(variables["counter"]["n"].ravel()[0], dtype(limit))


def test_all_reserved_names_of_a_model_are_in_one_error():
    class Reserved(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + sum(self.param(n, nn.initializers.ones, ()) for n in ("to_nnx__x", "own"))

    class Owner(bridge.ToNNX):
        @property
        def own(self):
            return 1

    with pytest.raises(bridge.ReservedNameError) as raised:
        Owner(Reserved(), rngs=KEY).lazy_init(X)
    assert "'to_nnx__x': names that start with" in str(raised.value)
    assert "'own': Owner has a property of this name" in str(raised.value)


class Frozen(nnx.Param):
    """A type of its own, and so a collection of its own."""


class LinenNested(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=True, name="norm")(nn.Dense(4, name="dense")(x))


@pytest.mark.parametrize(
    ("path", "wanted"), [(("dense", "kernel"), "params"), (("norm", "mean"), "batch_stats")]
)
def test_a_variable_of_another_type_is_said_to_decide_its_collection(path, wanted):
    model = bridge.ToNNX(LinenNested(), rngs=KEY).lazy_init(X)
    part, name = path
    getattr(model, part)[name] = Frozen(getattr(model, part)[name][...])
    text = rf"{wanted}/{part}/{name} and Frozen/{part}/{name}[^.]*type decides its\s+collection"
    with pytest.raises(bridge.MismatchError, match=text) as raised:
        model(X)
    assert f"type of {wanted}" in str(raised.value)


class LinenListed(nn.Module):
    """Has every kind of attribute."""

    features: int = 4
    constant = 3

    def setup(self):
        self.encoder = nn.Dense(self.features)
        self.blocks = [nn.Dense(4), nn.Dense(4)]

    def __call__(self, x):
        return self.encode(x)

    def encode(self, x):
        return self.encoder(self.blocks[1](self.blocks[0](x)))

    @property
    def double(self):
        return 2 * self.features


@pytest.mark.parametrize("is_initialized", [True, False])
def test_dir_lists_what_a_wrapper_answers_for(is_initialized):
    model = bridge.ToNNX(LinenListed(), rngs=KEY)
    if is_initialized:
        model.lazy_init(X)
    listed = dir(model)
    assert {"features", "constant", "encoder", "blocks", "encode", "double"} <= set(listed)
    assert not {"parent", "name", "scope"} & set(listed)
    for name in set(listed) - set(dir(nnx.Module)):
        assert hasattr(model, name), name
    native = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    assert set(dir(nnx.Module)) <= set(dir(native)) & set(listed)


def test_dir_of_a_module_that_is_made_in_a_call_lists_its_class():
    class Compact(nn.Module):
        features: int = 3

        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.features)(x)

        def decode(self, x):
            return x

    listed = dir(bridge.ToNNX(Compact(), rngs=KEY).lazy_init(X))
    assert {"features", "decode", "Dense_0"} <= set(listed)


def test_a_sequential_hands_a_keyword_to_the_layers_that_take_it():
    """Since Flax 0.12.9 `nnx.Sequential` asks the signature of each layer."""

    def native(rngs):
        return nnx.Sequential(nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs))

    def wrapped(rngs):
        return nnx.Sequential(
            bridge.ToNNX(nn.BatchNorm(), rngs=rngs), bridge.ToNNX(nn.Dense(3), rngs=rngs)
        )

    reference, model = native(nnx.Rngs(0)), wrapped(nnx.Rngs(0))
    bridge.lazy_init(model, X, use_running_average=True)
    model.layers[1].kernel[...] = reference.layers[1].kernel[...]
    for mode in (True, False):
        expected = reference(X, use_running_average=mode)
        model.layers[0].train()
        assert_close(model(X, use_running_average=mode), expected)
    assert_close(model.layers[0].mean[...], reference.layers[0].mean[...])


def test_the_signature_has_arguments_of_the_linen_method_and_the_wrapper():
    signature = inspect.signature(bridge.ToNNX(models.LinenClassifier()))
    assert list(signature.parameters)[:2] == ["x", "train"]
    assert {"rngs", "method", "mutable"} <= set(signature.parameters)
    assert "self" not in signature.parameters
