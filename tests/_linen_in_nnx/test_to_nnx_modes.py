"""ToNNX: which collections a call may update, and train(), eval() and set_attributes()."""

import jax
import jax.numpy as jnp
import pytest
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx

import bridge
from tests import models
from tests.models import NnxNoisyNorm, assert_identical, rng_counts, snapshot

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
KEY = jax.random.key(7)


def wrapped(module, *args, rngs=KEY, **options):
    return bridge.ToNNX(module, rngs, **options).lazy_init(*args)


MUTABLE = [
    False,
    True,
    [],
    (),
    "batch_stats",
    ["batch_stats"],
    ("params", "cache"),
    nn.DenyList("params"),
    nn.DenyList(["cache", "intermediates"]),
]


@pytest.mark.parametrize("mutable", MUTABLE, ids=str)
def test_the_module_sees_the_mutability_that_linen_would_show_it(mutable):
    module = models.LinenAsks()
    variables = module.init(KEY, X)
    expected = module.apply(variables, X, mutable=mutable)
    expected = expected if mutable is False else expected[0]
    assert wrapped(module, X)(X, mutable=mutable) == expected
    assert wrapped(module, X, mutable=mutable)(X) == expected


def test_no_collection_is_mutable_by_default():
    assert wrapped(models.LinenAsks(), X)(X) == (False, False, False, False)


def test_at_initialisation_the_module_sees_what_linen_shows_it_in_init():
    seen = []
    names = ("params", "cache", "intermediates")
    module = models.LinenApplies(
        lambda m, x: seen.append([m.is_mutable_collection(n) for n in names])
    )
    module.init(KEY, X)
    wrapped(module, X)
    assert seen[0] == seen[1] == [True, True, False]


def test_existing_opens_the_state_collections_that_exist():
    model = wrapped(models.LinenAsks(), X, mutable="existing")
    assert model(X) == (False, True, True, False)
    assert model(X, mutable=False) == (False, False, False, False)
    empty = wrapped(models.LinenApplies(lambda m, x: m.is_mutable_collection("cache")), X)
    assert empty(X) is False
    also_empty = models.LinenApplies(lambda m, x: m.is_mutable_collection("cache"))
    assert wrapped(also_empty, X, mutable="existing")(X) is False


def test_the_call_wins_over_construction_and_over_train():
    model = wrapped(models.LinenAsks(), X, mutable=["cache"])
    model.train()
    assert model(X, mutable=["params"]) == (True, False, False, False)
    assert model(X, mutable=False) == (False, False, False, False)


def test_train_opens_the_state_collections_until_eval():
    model = wrapped(models.LinenAsks(), X)
    model.train()
    assert model(X) == (False, True, True, False)
    model.eval()
    assert model(X) == (False, False, False, False)


def test_train_adds_to_the_collections_of_construction():
    model = wrapped(models.LinenAsks(), X, mutable=["intermediates"])
    model.train()
    assert model(X) == (False, True, True, True)
    model.eval()
    assert model(X) == (False, False, False, True)


@pytest.mark.parametrize("mutable", [False, ["cache"], nn.DenyList("counter"), "other"], ids=str)
def test_a_write_that_is_not_allowed_names_the_collection_and_every_remedy(mutable):
    model = wrapped(models.LinenWriter(), X)
    with pytest.raises(bridge.ImmutableCollectionError) as raised:
        model(X, mutable=mutable)
    text = str(raised.value)
    assert raised.value.collection == "counter"
    for part in ("'counter'", "LinenWriter", "mutable=['counter']", "ToNNX(", "model.train()"):
        assert part in text
    assert isinstance(raised.value, flax_errors.ModifyScopeVariableError)


def test_a_write_that_is_not_allowed_links_to_flax_s_own_page():
    """Regression: the link ended in a private class, which no page describes."""
    model = wrapped(models.LinenWriter(), X)
    with pytest.raises(bridge.ImmutableCollectionError) as raised:
        model(X, mutable=False)
    with pytest.raises(flax_errors.ModifyScopeVariableError) as native:
        models.LinenWriter().apply(model.linen_variables(), X)
    assert str(native.value) in str(raised.value)


@pytest.mark.parametrize("mutable", [False, ["params"], ["batch_stats"]], ids=str)
@pytest.mark.parametrize(
    "lifted",
    [
        lambda axes: nn.vmap(models.LinenWriter, variable_axes=axes, split_rngs={"params": True}),
        lambda axes: nn.remat(models.LinenWriter),
        lambda axes: nn.jit(models.LinenWriter),
    ],
    ids=["vmap", "remat", "jit"],
)
def test_a_write_in_a_lifted_transform_names_the_collection(lifted, mutable):
    writer = lifted({"params": 0, "batch_stats": 0, "counter": 0})
    model = wrapped(writer(("batch_stats", "counter")), X)
    with pytest.raises(bridge.ImmutableCollectionError) as raised:
        model(X, mutable=mutable)
    expected = "counter" if mutable == ["batch_stats"] else "batch_stats"
    assert raised.value.collection == expected
    assert f"mutable=['{expected}']" in str(raised.value)


@pytest.mark.parametrize(
    "mutable",
    [True, ["counter"], ("counter",), {"counter"}, "counter", nn.DenyList("params"), "existing"],
    ids=str,
)
@pytest.mark.parametrize("at_call", [True, False])
def test_an_update_that_is_allowed_is_applied(mutable, at_call):
    module = models.LinenWriter()
    variables = module.init(KEY, X)
    expected, updates = module.apply(variables, X, mutable=["counter"])
    model = wrapped(module, X, mutable=False if at_call else mutable)
    output = model(X, mutable=mutable) if at_call else model(X)
    assert_identical(output, expected)
    assert_identical(model.linen_variables(), {**variables, **updates})


def test_mutable_in_a_call_of_a_method_or_submodule():
    class Model(nn.Module):
        def setup(self):
            self.norm = nn.BatchNorm(use_running_average=False)

        def __call__(self, x):
            return self.norm(x)

        def normalize(self, x):
            return self.norm(x)

    module = Model()
    variables = module.init(KEY, X)
    expected, updates = module.apply(variables, X, mutable=["batch_stats"])
    for call in ("normalize", "norm"):
        model = wrapped(module, X)
        assert_identical(getattr(model, call)(X, mutable=["batch_stats"]), expected)
        assert_identical(model.linen_variables(), {**variables, **updates})


def test_params_may_be_updated_only_when_asked_for():
    module = models.LinenWriter(("params",))
    model = wrapped(module, X)
    model.train()
    with pytest.raises(bridge.ImmutableCollectionError, match="'params'"):
        model(X)
    model(X, mutable=["params"])
    assert float(model.count_params.get_value()) == 1


@pytest.mark.parametrize("mutable", [False, True, ["batch_stats"], nn.DenyList("cache")], ids=str)
@pytest.mark.parametrize("inner_mutable", [False, ["params"], True], ids=str)
def test_inside_an_outer_linen_apply_the_outer_rules_hold(mutable, inner_mutable):
    module = models.LinenAsks()
    inner = wrapped(module, X, mutable=inner_mutable)
    outer = models.LinenApplies(lambda _, x: inner(x))
    expected = module.apply(module.init(KEY, X), X, mutable=mutable)
    result = outer.apply({}, X, mutable=mutable)
    assert result == expected if mutable is False else result[0] == expected[0]


class NativeAround(nnx.Module):
    """NNX around ToNNX, to be wrapped by ToLinen."""

    def __init__(self, module, rngs):
        self.inner = bridge.ToNNX(module, rngs)

    def __call__(self, x):
        return self.inner(x)


@pytest.mark.parametrize("mutable", [["batch_stats"], True, nn.DenyList("params")], ids=str)
def test_the_outer_mutable_reaches_a_linen_module_inside_nnx_inside_linen(mutable):
    module = nn.BatchNorm(use_running_average=False)
    outer = bridge.to_linen(NativeAround, module)
    variables = outer.init(KEY, X)
    assert_identical(variables["batch_stats"]["inner"], module.init(KEY, X)["batch_stats"])
    output, updates = outer.apply(variables, X, mutable=mutable)
    inner = {c: variables[c]["inner"] for c in ("params", "batch_stats")}
    expected, inner_updates = module.apply(inner, X, mutable=["batch_stats"])
    assert_identical(output, expected)
    assert_identical(updates["batch_stats"]["inner"], inner_updates["batch_stats"])


def test_an_outer_apply_without_mutable_forbids_the_write_inside():
    outer = bridge.to_linen(NativeAround, nn.BatchNorm(use_running_average=False))
    variables = outer.init(KEY, X)
    with pytest.raises(flax_errors.ModifyScopeVariableError, match="batch_stats"):
        outer.apply(variables, X)


def test_a_batch_norm_trains_without_mutable_at_each_call():
    """Defect 6: there was no way to say it once."""
    module = nn.BatchNorm(momentum=0.9)
    model = bridge.ToNNX(module, KEY)
    model.lazy_init(X, use_running_average=False)
    variables = model.linen_variables()
    model.train()
    for _ in range(2):
        expected, updates = module.apply(
            variables, X, use_running_average=False, mutable=["batch_stats"]
        )
        variables = {**variables, **updates}
        assert_identical(model(X), expected)
    assert_identical(model.linen_variables(), variables)
    model.eval()
    assert_identical(model(X), module.apply(variables, X, use_running_average=True))
    assert_identical(model.linen_variables(), variables)


@pytest.mark.parametrize("name", ["train", "training", "is_training"])
def test_train_and_eval_fill_an_argument_that_the_caller_leaves_out(name):
    namespace = {"seen": []}
    exec(f"def call(self, x, {name}):\n  seen.append({name})\n  return x", namespace)
    namespace["call"].__module__ = __name__
    cls = type("Model", (nn.Module,), {"__call__": namespace["call"], "__module__": __name__})
    model = bridge.ToNNX(cls())
    with pytest.raises(TypeError, match=name):
        model(X)
    model.train()
    model(X)
    model.eval()
    model(X)
    model(X, True)
    model(X, **{name: "mine"})
    assert namespace["seen"] == [True, False, True, "mine"]


def classifier_reference(module, variables, train):
    rngs = {"dropout": jax.random.key(9)}
    output = module.apply(
        variables, X, train, rngs=rngs, mutable=["batch_stats"] if train else False
    )
    return output if train else (output, {})


def test_train_and_eval_reach_dropout_and_batch_norm_through_one_argument():
    module = models.LinenClassifier()
    model = bridge.ToNNX(module, nnx.Rngs(0)).lazy_init(X, train=False)
    variables = model.linen_variables()
    rngs = {"dropout": jax.random.key(9)}
    model.train()
    expected, updates = classifier_reference(module, variables, train=True)
    assert_identical(model(X, rngs=rngs), expected)
    variables = {**variables, **updates}
    assert_identical(model.linen_variables(), variables)
    model.eval()
    assert_identical(model(X), classifier_reference(module, variables, train=False)[0])
    assert_identical(model.linen_variables(), variables)


def test_eval_reaches_a_wrapped_dropout():
    """Defect 16: it did not."""
    model = bridge.ToNNX(nn.Dropout(0.5), nnx.Rngs(dropout=0))
    model.eval()
    assert_identical(model(X), X)
    assert model.deterministic is True
    model.train()
    assert model.deterministic is False
    assert not jnp.array_equal(model(X), X)


class LinenAroundNnx(nn.Module):
    """An NNX module in a Linen module; at `depth` 2 there is another pair of both inside."""

    depth: int = 1

    @nn.compact
    def __call__(self, x):
        if self.depth == 1:
            return bridge.to_linen(NnxNoisyNorm, name="inner")(x)
        return bridge.to_linen(NnxAroundLinen, self.depth - 1, name="inner")(x)


class NnxAroundLinen(nnx.Module):
    def __init__(self, depth, *, rngs):
        self.wrapped = bridge.ToNNX(LinenAroundNnx(depth), rngs)

    def __call__(self, x):
        return self.wrapped(x)


@pytest.mark.parametrize("depth", [1, 2])
def test_modes_reach_nnx_modules_that_the_wrapped_module_wraps(depth):
    model = bridge.ToNNX(LinenAroundNnx(depth), nnx.Rngs(0)).lazy_init(X)
    native = NnxNoisyNorm(rngs=nnx.Rngs(0))
    for _ in range(2):
        model.eval()
        native.eval()
        assert_identical(model(X), native(X))
        call = nnx.jit(lambda m, x: m(x))
        assert_identical(call(model, X), call(native, X))
        model.train()
        native.train()
        assert not jnp.array_equal(model(X) == 0, model(X) == 0)
        native.dropout.eval()
        native(X)
        native(X)
        means = jax.tree.leaves(model.linen_variables()["batch_stats"])
        assert_identical(means, jax.tree.leaves(nnx.state(native, nnx.BatchStat)))


def test_modes_that_were_not_set_leave_nnx_modules_within_as_made():
    made = bridge.to_linen(nnx.Dropout, 0.5, deterministic=True, name="inner")
    model = bridge.ToNNX(models.LinenApplies(lambda m, x: made.clone(parent=m)(x)), nnx.Rngs(0))
    model.lazy_init(X)
    assert_identical(model(X), X)
    model.train()
    assert not jnp.array_equal(model(X), X)


@pytest.mark.parametrize("train", [True, False])
def test_modes_reach_fields_of_modules_further_down(train):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm()(nn.Dense(4)(x))
            return nn.Dropout(0.5)(nn.Sequential([nn.Dense(3), nn.Dropout(0.3)])(x))

    class Explicit(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.BatchNorm()(nn.Dense(4)(x), use_running_average=not train)
            x = nn.Dropout(0.3)(nn.Dense(3)(x), deterministic=not train)
            return nn.Dropout(0.5)(x, deterministic=not train)

    class Same(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm()(nn.Dense(4)(x))
            x = nn.Dropout(0.3)(nn.Dense(3)(x))
            return nn.Dropout(0.5)(x)

    variables = Explicit().init(KEY, X, train=False)
    rngs = {"dropout": jax.random.key(9)}
    expected = Explicit().apply(
        variables, X, train, rngs=rngs, mutable=["batch_stats"] if train else False
    )
    model = bridge.ToNNX.from_variables(Same(), variables, rngs)
    model.set_attributes(deterministic=not train, use_running_average=not train)
    output = model(X, rngs=rngs)
    assert_identical(output, expected[0] if train else expected)
    deep = bridge.ToNNX(Model(), nnx.Rngs(0))
    deep.train() if train else deep.eval()
    assert deep.lazy_init(X)(X).shape == (2, 3)


def test_an_argument_that_the_linen_parent_passes_wins_over_the_mode():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dropout(0.5, name="fixed")(x, deterministic=True)

    model = bridge.ToNNX(Model())
    model.train()
    assert_identical(model(X), X)


def test_a_field_that_is_set_already_is_set_by_the_mode_as_in_nnx():
    model = bridge.ToNNX(nn.Dropout(0.5, deterministic=False), nnx.Rngs(dropout=0))
    native = nnx.Dropout(0.5, deterministic=False, rngs=nnx.Rngs(dropout=0))
    for each in (model, native):
        each.eval()
        assert_identical(each(X), X)


@pytest.mark.parametrize("submodule", ["scan", "vmap", "remat", "jit"])
def test_modes_pass_through_lifted_transforms(submodule):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            x = nn.Dropout(0.5)(nn.Dense(4)(x))
            return x, None

    split = {"params": True, "dropout": True}
    mapped = {"variable_axes": {"params": 0}, "split_rngs": split}
    lifted = {
        "scan": nn.scan(Layer, length=2, **mapped),
        "vmap": nn.vmap(Layer, **mapped),
        "remat": nn.remat(Layer),
        "jit": nn.jit(Layer),
    }[submodule]
    module = models.LinenApplies(lambda _, x: lifted()(x, None if submodule != "vmap" else x)[0])
    model = bridge.ToNNX(module, nnx.Rngs(0))
    model.eval()
    model.lazy_init(X)
    counts = rng_counts(model)
    first = model(X)
    assert_identical(first, model(X))
    # Linen's jit forks every stream, used or not.
    assert rng_counts(model) == counts or submodule == "jit"
    model.train()
    assert not jnp.array_equal(model(X), model(X))


def test_the_modes_of_a_parent_reach_the_wrapped_module():
    class Parent(nnx.Module):
        def __init__(self, rngs):
            self.linen = bridge.ToNNX(models.LinenDropout(), rngs)
            self.native = nnx.Dropout(0.5, rngs=rngs)
            self.deep = nnx.List([bridge.ToNNX(nn.Dropout(0.5), rngs)])

        def __call__(self, x):
            return self.deep[0](self.native(self.linen(x)))

    model = Parent(nnx.Rngs(0))
    model.eval()
    bridge.lazy_init(model, X)
    assert_identical(model(X), model(X))
    model.train()
    assert not jnp.array_equal(model(X), model(X))
    model.set_attributes(deterministic=True, raise_if_not_found=True)
    assert_identical(model(X), model(X))
    with pytest.raises(ValueError, match="nonsense"):
        model.set_attributes(nonsense=True, raise_if_not_found=True)


def test_set_attributes_reaches_a_linen_field_and_view_leaves_the_original():
    model = wrapped(models.LinenAutoencoder(), X)
    model.set_attributes(name_of_owner="somebody")
    assert model.name_of_owner == "somebody"
    dropout = bridge.ToNNX(nn.Dropout(0.5), nnx.Rngs(dropout=0))
    dropout.set_attributes(rate=1.0, deterministic=False)
    assert_identical(dropout(X), jnp.zeros_like(X))


def test_a_mode_belongs_to_the_graphdef_so_nnx_jit_traces_again():
    model = bridge.ToNNX(nn.Dropout(0.5), nnx.Rngs(dropout=0))
    step = nnx.jit(lambda m, x: m(x))
    model.train()
    assert not jnp.array_equal(step(model, X), X)
    model.eval()
    assert_identical(step(model, X), X)
    copy = nnx.merge(*nnx.split(model))
    assert_identical(copy(X), X)


def test_a_failing_write_in_evaluation_changes_nothing():
    model = wrapped(models.LinenWriter(("counter", "batch_stats")), X, mutable=["counter"])
    model.eval()
    before = snapshot(model)
    with pytest.raises(bridge.ImmutableCollectionError, match="'batch_stats'"):
        model(X)
    assert snapshot(model) == before


@pytest.mark.parametrize("name", ["deterministic", "use_running_average"])
def test_a_submodule_or_parameter_with_the_name_of_a_mode_stays(name):
    class Part(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name=name)(x)

    class Whole(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            scale = self.param(name, nn.initializers.ones, (1, 4))
            x = Part(name="part")(x) * scale
            return -x if train else x

    for module in (Part(), Whole()):
        variables = module.init(KEY, X)
        model = wrapped(module, X)
        trains = {"train": True} if isinstance(module, Whole) else {}
        for set_mode, arguments in ((model.eval, {}), (model.train, trains)):
            set_mode()
            assert_identical(model.linen_variables(), variables)
            assert_identical(model(X), module.apply(variables, X, **arguments))
        view = nnx.view(model, deterministic=True, use_running_average=True)
        assert_identical(view(X), module.apply(variables, X))


@pytest.mark.parametrize("name", ["deterministic", "use_running_average"])
def test_variables_are_put_at_the_name_of_a_mode(name):
    class Part(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name=name)(x)

    model = bridge.ToNNX(Part())
    model.train()
    params = nn.Dense(4).init(KEY, X)["params"]
    setattr(model, name, {key: nnx.Param(value) for key, value in params.items()})
    assert_identical(model(X), nn.Dense(4).apply({"params": params}, X))


class Learns(nn.Module):
    """Creates and negates in training only; the mode is open."""

    deterministic: bool | None = None

    @nn.compact
    def __call__(self, x):
        deterministic = nn.merge_param("deterministic", self.deterministic, None)
        return x if deterministic else nn.Dense(4, use_bias=False, name="dense")(x)


class HoldsLinen(nnx.Module):
    def __init__(self, rngs):
        self.learns = bridge.ToNNX(Learns(), rngs=rngs)

    def __call__(self, x):
        return self.learns(x)


class LinenAboveNNX(nn.Module):
    @nn.compact
    def __call__(self, x):
        return bridge.ToLinen(HoldsLinen, name="middle")(x)


@pytest.mark.parametrize("train", [False, True])
def test_modes_reach_linen_in_nnx_in_linen_at_initialisation(train):
    model = bridge.ToNNX(LinenAboveNNX(), KEY)
    (model.train if train else model.eval)()
    model.lazy_init(X)
    variables = model.linen_variables()
    params = variables.get("params", {}).get("middle", {}).get("learns", {})
    shapes = jax.eval_shape(Learns(deterministic=not train).init, KEY, X).get("params", {})
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
    for now in (train, False):
        (model.train if now else model.eval)()
        expected = Learns(deterministic=not now).apply({"params": params}, X)
        assert_identical(model(X), expected)


def test_modes_reach_linen_in_nnx_in_linen_whose_definition_is_not_there():
    params = Learns(deterministic=False).init(KEY, X)["params"]
    variables = {"params": {"middle": {"learns": params}}}
    for train in (False, True):
        model = bridge.ToNNX.from_variables(LinenAboveNNX(), variables if train else {})
        # What was in force in another call is no part of the model.
        with pytest.raises(ValueError, match="deterministic"):
            model(X)
        (model.train if train else model.eval)()
        expected = Learns(deterministic=not train).apply({"params": params}, X)
        assert_identical(model(X), expected)
