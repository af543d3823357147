"""`ToLinen`: variables that do not fit, and variables that come from a checkpoint."""

import copy
import warnings

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx, serialization

import bridge
from tests.models import NnxDropped, NnxNormed, NnxStack, assert_close, assert_identical

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(7), (4, 3))


class Counting(nnx.Module):
    def __init__(self, *, rngs):
        self.calls = nnx.BatchStat(jnp.zeros(()))
        self.cached = nnx.Cache(jnp.zeros(()))

    def __call__(self):
        self.calls[...] += 1
        self.cached[...] += 1


@pytest.fixture
def model():
    return bridge.to_linen(NnxNormed)


@pytest.fixture
def variables(model):
    return model.init(KEY, X)


def drop(variables, *path):
    """Variables without one path; the original is left alone."""
    variables = copy.copy(flax.core.unfreeze(variables))
    node = variables
    for key in path[:-1]:
        node[key] = dict(node[key])
        node = node[key]
    del node[path[-1]]
    return variables


def put(variables, value, *path):
    """Variables with another value at one path; the original is left alone."""
    variables = dict(variables)
    node = variables
    for key in path[:-1]:
        node[key] = dict(node.get(key, {}))
        node = node[key]
    node[path[-1]] = value
    return variables


def without_definition(variables):
    return {c: v for c, v in variables.items() if c != "nnx"}


definition = pytest.mark.parametrize(
    "prepare", [lambda v: v, without_definition], ids=["with nnx", "without nnx"]
)


@definition
def test_a_missing_parameter_is_an_error_with_path_and_expectation(model, variables, prepare):
    bad = prepare(drop(variables, "params", "linear", "kernel"))
    with pytest.raises(bridge.MismatchError) as caught:
        model.apply(bad, X, mutable=["batch_stats"])
    assert caught.value.missing == (("params/linear/kernel", "float32[3, 4]"),)
    assert caught.value.mis_shaped == ()
    assert caught.value.unknown == ()
    assert "ToLinen(NnxNormed)" in str(caught.value)
    assert "params/linear/kernel" in str(caught.value)


@definition
def test_a_parameter_of_a_wrong_shape_is_an_error_with_both_shapes(model, variables, prepare):
    bad = prepare(put(variables, jnp.ones((3, 5)), "params", "linear", "kernel"))
    with pytest.raises(bridge.MismatchError) as caught:
        model.apply(bad, X, mutable=["batch_stats"])
    assert caught.value.mis_shaped == (("params/linear/kernel", "float32[3, 4]", "float32[3, 5]"),)
    assert caught.value.missing == ()


@definition
def test_missing_mis_shaped_and_unknown_variables_come_in_one_error(model, variables, prepare):
    bad = drop(variables, "params", "linear", "kernel")
    bad = put(bad, jnp.ones(9), "params", "norm", "scale")
    bad = put(bad, jnp.ones(2), "params", "head", "kernel")
    bad = drop(bad, "batch_stats", "norm", "mean")
    with pytest.raises(bridge.MismatchError) as caught:
        model.apply(prepare(bad), X)
    error = caught.value
    assert {path for path, _ in error.missing} == {"params/linear/kernel", "batch_stats/norm/mean"}
    assert {path for path, *_ in error.mis_shaped} == {"params/norm/scale"}
    assert error.unknown == ("params/head/kernel",)
    for path in (
        "params/linear/kernel",
        "batch_stats/norm/mean",
        "params/norm/scale",
        "params/head",
    ):
        assert path in str(error)


def test_the_error_is_also_linen_s_for_missing_and_mis_shaped_parameters(model, variables):
    with pytest.raises(flax.errors.ScopeParamNotFoundError):
        model.apply(drop(variables, "params", "linear", "kernel"), X)
    with pytest.raises(flax.errors.ScopeParamShapeError):
        model.apply(put(variables, jnp.ones(2), "params", "linear", "bias"), X)
    with pytest.raises(ValueError, match="do not fit"):
        model.apply(put(variables, jnp.ones(2), "params", "linear", "bias"), X)


def test_no_variables_at_all_list_everything_that_is_missing(model, variables):
    with pytest.raises(bridge.MismatchError) as caught:
        model.apply({}, X)
    assert {path for path, _ in caught.value.missing} == {
        "params/linear/kernel",
        "params/linear/bias",
        "params/norm/scale",
        "params/norm/bias",
        "batch_stats/norm/mean",
        "batch_stats/norm/var",
    }


class Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return bridge.to_linen(nnx.Linear, 3, 4, name="inner")(x)


def test_the_error_names_the_place_of_a_nested_wrapper(variables):
    nested = Outer().init(KEY, X)
    with pytest.raises(bridge.MismatchError, match=r"ToLinen\(Linear\) at inner"):
        Outer().apply(drop(nested, "params", "inner", "kernel"), X)


def test_the_mismatch_is_found_under_jit_and_eval_shape_too(model, variables):
    bad = drop(variables, "params", "linear", "kernel")
    with pytest.raises(bridge.MismatchError):
        jax.jit(model.apply)(bad, X)
    with pytest.raises(bridge.MismatchError):
        jax.eval_shape(model.apply, bad, X)


@pytest.mark.parametrize("strict", [None, False])
def test_a_missing_parameter_is_never_made_up(strict, variables):
    model = bridge.ToLinen(NnxNormed, strict=strict)
    with pytest.raises(bridge.MismatchError, match="missing"):
        model.apply(drop(variables, "params", "linear", "kernel"), X, mutable=["batch_stats"])


@definition
def test_unknown_variables_are_ignored_with_one_warning_that_lists_them(prepare):
    class Fresh(NnxNormed):
        """Another class, because the warning comes once for each."""

    model = bridge.to_linen(Fresh)
    variables = model.init(KEY, X)
    expected = model.apply(variables, X, mutable=["batch_stats"])
    extra = put(variables, jnp.ones(2), "params", "head", "kernel")
    extra = prepare(put(extra, jnp.ones(2), "batch_stats", "stray"))
    with pytest.warns(bridge.BridgeWarning) as caught:
        y, updates = model.apply(extra, X, mutable=["batch_stats"])
    assert len(caught) == 1
    assert "params/head/kernel" in str(caught[0].message)
    assert "batch_stats/stray" in str(caught[0].message)
    np.testing.assert_array_equal(y, expected[0])
    np.testing.assert_array_equal(
        updates["batch_stats"]["norm"]["mean"], expected[1]["batch_stats"]["norm"]["mean"]
    )
    model.apply(extra, X, mutable=["batch_stats"])


def test_a_whole_unknown_collection_is_an_unknown_path():
    class Fresh(NnxNormed):
        pass

    model = bridge.to_linen(Fresh)
    variables = put(model.init(KEY, X), jnp.ones(2), "other", "w")
    with pytest.warns(bridge.BridgeWarning, match="other/w"):
        model.apply(variables, X, mutable=["batch_stats"])


class Appending(nnx.Module):
    """Its call adds a Variable to a list."""

    def __init__(self):
        self.seen = nnx.List([])

    def __call__(self, x, *, adds=True):
        if adds:
            self.seen.append(nnx.Cache(x))
        return x


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("mutable", [["cache"], ["cache", "nnx"], []])
def test_of_variables_that_a_call_has_made_it_is_said_what_keeps_them(mutable, strict):
    """Regression: the advice was to remove them, or to make them an error."""
    model = bridge.ToLinen(type("Fresh", (Appending,), {}), strict=strict)
    variables = model.init(KEY, X, adds=False)
    kept = "nnx" if "nnx" in mutable else ()
    _, made = model.apply(variables, X, mutable=["cache", *([kept] if kept else [])])
    variables = {**variables, **made}
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _, updates = model.apply(variables, X, mutable=mutable, adds=bool(mutable))
        except bridge.MismatchError as error:
            texts.append(str(error))
        else:
            assert list(updates.get("cache", {}).get("seen", ())) == ([0, 1] if mutable else [])
    texts += [str(warning.message) for warning in caught]
    if kept:
        assert not texts
        return
    (text,) = texts
    assert "cache/seen/0" in text
    assert ("add 'nnx' to mutable beside 'cache'" in text) == bool(mutable)


@pytest.mark.parametrize("path", [("params", "head", "kernel"), ("other", "w")])
def test_strict_makes_unknown_variables_an_error(path, variables):
    model = bridge.ToLinen(NnxNormed, strict=True)
    with pytest.raises(bridge.MismatchError) as caught:
        model.apply(put(variables, jnp.ones(2), *path), X, mutable=["batch_stats"])
    assert caught.value.unknown == ("/".join(path),)


def test_strict_finds_unknown_variables_before_it_calls_the_module():
    called = []

    class Noting(nnx.Module):
        def __init__(self, *, rngs):
            self.w = nnx.Param(jnp.ones(2))

        def __call__(self):
            called.append(1)

    model = bridge.ToLinen(Noting, strict=True)
    variables = model.init(KEY)
    called.clear()
    with pytest.raises(bridge.MismatchError):
        model.apply(put(variables, jnp.ones(2), "params", "v"))
    assert called == []


def test_strict_accepts_what_fits_and_state_that_a_call_created(variables):
    model = bridge.ToLinen(NnxNormed, strict=True)
    y, _ = model.apply(variables, X, mutable=["batch_stats"])
    np.testing.assert_array_equal(y, NnxNormed(rngs=nnx.Rngs(KEY))(X))


def test_the_lenient_mode_takes_what_fits_without_a_warning(variables):
    model = bridge.ToLinen(NnxNormed, strict=False)
    expected, _ = model.apply(variables, X, mutable=["batch_stats"])
    extra = put(variables, jnp.ones(2), "params", "head", "kernel")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, _ = model.apply(extra, X, mutable=["batch_stats"])
    np.testing.assert_array_equal(y, expected)


def test_a_parameter_of_another_dtype_is_accepted_as_linen_accepts_it(model, variables):
    half = dict(
        variables, params=jax.tree.map(lambda a: a.astype(jnp.bfloat16), variables["params"])
    )
    native = NnxNormed(rngs=nnx.Rngs(KEY))
    nnx.update(native, half["params"])
    y, _ = model.apply(half, X, mutable=["batch_stats"])
    np.testing.assert_array_equal(y, native(X))


def test_init_with_a_given_parameter_of_a_wrong_shape_is_an_error():
    scope = flax.core.Scope(
        {"params": {"inner": {"kernel": jnp.ones((2, 2))}}},
        rngs={"params": flax.core.scope.LazyRng.create(KEY)},
        mutable=True,
        flags={"initializing": True},
    )
    with pytest.raises(bridge.MismatchError) as caught:
        Outer(parent=scope)(X)
    assert caught.value.mis_shaped == (("params/kernel", "float32[3, 4]", "float32[2, 2]"),)


def test_a_dropped_update_is_warned_about_once_by_module_and_collection():
    class Fresh(Counting):
        """Another class, because the warning comes once for each."""

    model = bridge.to_linen(Fresh)
    variables = model.init(KEY)
    with pytest.warns(bridge.BridgeWarning) as caught:
        model.apply(variables)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2
    for collection in ("batch_stats", "cache"):
        assert sum(f"mutable=[{collection!r}]" in text for text in texts) == 1
    model.apply(variables)
    jax.jit(model.apply)(variables)


def test_a_dropped_update_is_warned_about_at_each_place_of_a_module():
    class Fresh(Counting):
        pass

    class Two(nn.Module):
        @nn.compact
        def __call__(self):
            bridge.to_linen(Fresh, name="left")()
            bridge.to_linen(Fresh, name="right")()

    variables = Two().init(KEY)
    with pytest.warns(bridge.BridgeWarning) as caught:
        Two().apply(variables, mutable=["cache"])
    texts = [str(warning.message) for warning in caught]
    assert ["at left" in text for text in texts] == [True, False]
    assert ["at right" in text for text in texts] == [False, True]


@pytest.mark.parametrize("collection", ["batch_stats", "cache"])
def test_strict_makes_a_dropped_update_an_error_every_time(collection):
    model = bridge.ToLinen(Counting, strict=True)
    variables = model.init(KEY)
    others = [c for c in ("batch_stats", "cache") if c != collection]
    for _ in range(2):
        with pytest.raises(bridge.LostUpdateError, match=collection):
            model.apply(variables, mutable=others)
    _, updates = model.apply(variables, mutable=["batch_stats", "cache"])
    assert float(updates[collection][{"batch_stats": "calls", "cache": "cached"}[collection]]) == 1


def test_the_warning_points_to_the_line_that_calls_the_model():
    class Fresh(Counting):
        pass

    model = bridge.to_linen(Fresh)
    variables = model.init(KEY)
    with pytest.warns(bridge.BridgeWarning) as caught:
        model.apply(variables)
    assert {warning.filename for warning in caught} == {__file__}


def test_an_evaluation_mode_batchnorm_updates_nothing_and_says_nothing():
    class Evaluating(nnx.Module):
        def __init__(self, *, rngs):
            self.norm = nnx.BatchNorm(3, use_running_average=True, rngs=rngs)

        def __call__(self, x):
            return self.norm(x)

    model = bridge.ToLinen(Evaluating, strict=True)
    variables = model.init(KEY, X)
    np.testing.assert_array_equal(model.apply(variables, X), Evaluating(rngs=nnx.Rngs(KEY))(X))


def test_a_nested_parent_works_without_the_definition():
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(bridge.to_linen(NnxNormed, name="normed")(x))

    class Outer(nn.Module):
        def setup(self):
            self.inner = Inner()
            self.stack = bridge.to_linen(NnxStack, 2)

        def __call__(self, x):
            return self.inner(self.stack(x))

    variables = Outer().init(KEY, X)
    expected = Outer().apply(variables, X, mutable=["batch_stats"])
    found = Outer().apply(without_definition(variables), X, mutable=["batch_stats"])
    assert_identical(found, expected)


class Lazy(nnx.Module):
    """Creates its weight when it sees an input."""

    def __call__(self, x):
        if not hasattr(self, "weight"):
            self.weight = nnx.Param(jnp.ones(x.shape))
        return x * self.weight


class LazyLayer(nnx.Module):
    """Creates a layer, and with its method `count` some state too."""

    def __init__(self):
        self.layer = nnx.data(None)
        self.weight = nnx.data(None)

    def __call__(self, x):
        if self.layer is None:
            self.layer = nnx.Linear(x.shape[-1], 1, rngs=nnx.Rngs(0))
        return self.layer(x)

    def count(self, x):
        if self.weight is None:
            self.weight = nnx.Param(jnp.ones(x.shape))
            self.calls = nnx.BatchStat(jnp.zeros(()))
        self.calls[...] += 1
        return x * self.weight + self.calls


@pytest.mark.filterwarnings("error")
def test_a_parameter_that_only_the_call_creates_has_the_given_value():
    x = jnp.ones(2)
    native = Lazy()
    native.weight = nnx.Param(jnp.full(2, 10.0))
    module = bridge.ToLinen(Lazy, strict=True)
    params = {"weight": jnp.full(2, 10.0)}
    assert_identical(module.apply({"params": params}, x), native(x))
    assert_identical(module.apply({"params": params}, x, mutable=True)[0], native(x))
    gradient = jax.grad(lambda p: module.apply({"params": p}, x).sum())(params)
    wanted = nnx.grad(lambda module: module(x).sum())(native)
    assert_identical(gradient["weight"], wanted.weight[...])


@pytest.mark.filterwarnings("error")
def test_a_layer_that_only_the_call_creates_has_the_given_parameters():
    x = jnp.ones((1, 2))
    native = LazyLayer()
    native(x)
    native.layer.kernel[...] = jnp.array([[2.0], [3.0]])
    params = {"layer": {"kernel": native.layer.kernel[...], "bias": native.layer.bias[...]}}
    module = bridge.ToLinen(LazyLayer, strict=True)
    assert_identical(module.apply({"params": params}, x), native(x))
    del params["layer"]["bias"]
    with pytest.raises(bridge.MismatchError, match="layer/bias"):
        module.apply({"params": params}, x)


def test_state_that_the_call_creates_beside_a_parameter_is_missed_by_name():
    x = jnp.ones(2)
    native = LazyLayer()
    native.count(x)
    native.weight[...] = jnp.full(2, 10.0)
    module = bridge.ToLinen(LazyLayer)
    variables = {"params": {"weight": native.weight[...]}}
    with pytest.raises(bridge.MismatchError, match="batch_stats/calls"):
        module.apply(variables, x, nnx_method="count", mutable=True)
    variables["batch_stats"] = {"calls": native.calls[...]}
    y, updates = module.apply(variables, x, nnx_method="count", mutable=True)
    assert_identical(y, native.count(x))
    assert_identical(updates["batch_stats"]["calls"], native.calls[...])


def test_a_parameter_that_no_call_creates_gives_no_bias_to_a_layer():
    x = jnp.ones((1, 2))
    module = bridge.to_linen(nnx.Linear, 2, 1, use_bias=False)
    native = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    params = {"kernel": native.kernel[...], "bias": jnp.ones(1)}
    with pytest.warns(bridge.BridgeWarning, match="params/bias"):
        assert_identical(module.apply({"params": params}, x), native(x))


def test_a_given_parameter_that_the_call_makes_anew_is_not_dropped():
    class OfValues(nnx.Module):
        def __call__(self, x):
            if x[0] > 0:
                self.weight = nnx.Param(jnp.ones(x.shape))
            return x

    with pytest.warns(bridge.BridgeWarning, match="params/weight"):
        bridge.ToLinen(OfValues).apply(
            {"params": {"weight": jnp.ones(2)}}, jnp.ones(2), mutable=True
        )


def test_the_definition_is_rebuilt_under_jit_grad_and_vmap():
    model = bridge.to_linen(nnx.Linear, 3, 2)
    variables = without_definition(model.init(KEY, X))
    expected = model.apply(variables, X)
    assert_close(jax.jit(model.apply)(variables, X), expected)
    rows = jax.vmap(lambda x: model.apply(variables, x))(X)
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)
    grads = jax.grad(lambda v: model.apply(v, X).sum())(variables)
    np.testing.assert_allclose(grads["params"]["bias"], [4.0, 4.0])


def test_the_rebuilt_definition_knows_the_arguments_of_its_own_wrapper():
    kernels = {}
    for width in (2, 5):
        model = bridge.to_linen(nnx.Linear, 3, width)
        variables = without_definition(model.init(KEY, X))
        assert model.apply(variables, X).shape == (4, width)
        kernels[width] = variables
    with pytest.raises(bridge.MismatchError):
        bridge.to_linen(nnx.Linear, 3, 2).apply(kernels[5], X)


@pytest.mark.parametrize("streams", [{}, {"params": 1, "dropout": 2}, {"params": 1, "noise": 2}])
def test_it_is_rebuilt_with_the_streams_that_were_used_at_init(streams):
    keys = {name: jax.random.key(seed) for name, seed in streams.items()} or KEY
    model = bridge.to_linen(NnxDropped)
    variables = model.init(keys, X)
    expected = model.apply(variables, X, mutable=["RngCount"])
    found = model.apply(without_definition(variables), X, mutable=["RngCount"])
    assert_identical(found, expected)


def test_integer_keys_stay_integers_and_ten_follows_nine():
    variables = bridge.to_linen(NnxStack, 12).init(KEY, X)
    assert list(variables["params"]["layers"]) == list(range(12))
    assert [p[1].key for p, _ in jax.tree.leaves_with_path(variables["params"])[::2]] == list(
        range(12)
    )


def test_string_keys_are_written_on_request():
    model = bridge.ToLinen(NnxStack, args=(3,), string_keys=True)
    variables = model.init(KEY, X)
    assert list(variables["params"]["layers"]) == ["0", "1", "2"]
    expected = NnxStack(3, rngs=nnx.Rngs(KEY))(X)
    np.testing.assert_array_equal(model.apply(variables, X), expected)
    np.testing.assert_array_equal(bridge.to_linen(NnxStack, 3).apply(variables, X), expected)


@pytest.mark.parametrize("depth", [3, 12])
@definition
def test_strings_that_spell_integers_are_accepted(depth, prepare):
    """Regression: variables from msgpack and untargeted restores failed."""
    model = bridge.to_linen(NnxStack, depth)
    variables = model.init(KEY, X)
    strings = serialization.msgpack_restore(serialization.to_bytes(without_definition(variables)))
    assert set(strings["params"]["layers"]) == {str(i) for i in range(depth)}
    if prepare is not without_definition:
        strings["nnx"] = variables["nnx"]
    np.testing.assert_array_equal(model.apply(strings, X), model.apply(variables, X))


def test_updates_come_back_under_the_keys_that_came_in():
    class Norms(nnx.Module):
        def __init__(self, *, rngs):
            self.norms = nnx.List([nnx.BatchNorm(3, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            for norm in self.norms:
                x = norm(x)
            return x

    model = bridge.to_linen(Norms)
    variables = model.init(KEY, X)
    _, integers = model.apply(variables, X, mutable=["batch_stats"])
    assert set(integers["batch_stats"]["norms"]) == {0, 1}
    restored = serialization.msgpack_restore(serialization.to_bytes(variables))
    _, strings = model.apply(restored, X, mutable=["batch_stats"])
    assert set(strings["batch_stats"]["norms"]) == {"0", "1"}
    np.testing.assert_array_equal(
        strings["batch_stats"]["norms"]["1"]["mean"], integers["batch_stats"]["norms"][1]["mean"]
    )


def test_numpy_leaves_of_a_checkpoint_compute_the_same_and_stay_unwritten(model, variables):
    on_host = jax.tree.map(np.asarray, without_definition(variables))
    kept = jax.tree.map(np.copy, on_host)
    y, updates = model.apply(on_host, X, mutable=["batch_stats"])
    expected, expected_updates = model.apply(variables, X, mutable=["batch_stats"])
    np.testing.assert_array_equal(y, expected)
    assert_identical(dict(updates), dict(expected_updates))
    assert_identical(on_host, kept)


def test_a_module_that_writes_into_its_value_spares_the_checkpoint():
    class Writing(nnx.Module):
        def __init__(self, *, rngs):
            self.total = nnx.BatchStat(jnp.zeros(2))

        def __call__(self, x):
            self.total[...] += x
            self.total[0] = 5.0
            return self.total[...]

    model = bridge.to_linen(Writing)
    checkpoint = {"batch_stats": {"total": np.zeros(2, np.float32)}}
    y, _ = model.apply(checkpoint, jnp.ones(2), mutable=["batch_stats"])
    np.testing.assert_array_equal(y, [5.0, 1.0])
    np.testing.assert_array_equal(checkpoint["batch_stats"]["total"], [0.0, 0.0])


def test_shape_dtype_structs_stand_for_variables_under_eval_shape(model, variables):
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), variables)
    y = jax.eval_shape(lambda v: model.apply(v, X, mutable=["batch_stats"])[0], abstract)
    assert y.shape == (4, 4)


@pytest.mark.parametrize("zero", [np.float32(0), np.zeros(())])
def test_a_scalar_of_any_kind_stands_for_an_array(zero):
    """A checkpoint brings NumPy's scalars."""
    model = bridge.to_linen(Counting)
    stored = {"batch_stats": {"calls": zero}, "cache": {"cached": zero}}
    _, updates = model.apply(stored, mutable=["batch_stats", "cache"])
    assert float(updates["batch_stats"]["calls"]) == 1.0


class Adapted(nn.Module):
    """Shares the scope of a wrapped module, and has a parameter of its own."""

    base: nn.Module
    own_first: bool

    def setup(self):
        nn.share_scope(self, self.base)

    @nn.compact
    def __call__(self, x):
        if not self.own_first:
            y = self.base(x)
        a = self.param("A", nn.initializers.ones, (3, 4))
        return x @ a + (self.base(x) if self.own_first else y)


class Sharing(nn.Module):
    """Makes the wrapped module itself, so that it has a scope before it is shared."""

    own_first: bool

    @nn.compact
    def __call__(self, x):
        base = bridge.ToLinen(nnx.Linear, (3, 4), strict=True, name="base")
        return Adapted(base, self.own_first, name="adapted")(x)


@pytest.mark.parametrize("own_first", [True, False])
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("strict", [True, None])
def test_a_parameter_of_another_module_in_the_scope_is_left_alone(outer, own_first, strict):
    base = bridge.ToLinen(nnx.Linear, (3, 4), strict=strict)
    model = Sharing(own_first) if outer else Adapted(base, own_first)
    variables = model.init(KEY, X)
    params = variables["params"]["base"] if outer else variables["params"]
    assert set(params) == {"A", "kernel", "bias"}
    expected = X @ params["A"] + nn.Dense(4).apply(
        {"params": {"kernel": params["kernel"], "bias": params["bias"]}}, X
    )
    assert_close(model.apply(variables, X), expected)
    unknown = {**variables["params"], "other": jnp.ones(3)}
    if not outer and strict:
        with pytest.raises(bridge.MismatchError, match="other"):
            base.apply({"params": {**unknown, "A": params["A"]}}, X)


class Mapped(nnx.Module):
    """Its Variables hold dicts."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.scales = nnx.Param({"a": jnp.ones(3), "b": {0: jnp.full(3, 2.0)}})
        self.value = nnx.Param({"value": jnp.full(3, 3.0)})
        self.empty = nnx.Param({})
        self.seen = nnx.BatchStat({"count": jnp.zeros(())})

    def __call__(self, x):
        self.seen.set_value({"count": self.seen.get_value()["count"] + 1})
        held = self.scales.get_value()
        shift = held["b"][0] * self.value.get_value()["value"]
        return self.linear(x) * held["a"][None] + shift[None]


def without_boxes(variables):
    return {c: tree for c, tree in nn.unbox(variables).items() if c != "nnx"}


@pytest.mark.parametrize(
    "change",
    [
        nn.unbox,
        without_boxes,
        lambda v: flax.core.freeze(nn.unbox(v)),
        lambda v: serialization.msgpack_restore(serialization.to_bytes(without_boxes(v))),
        lambda v: serialization.msgpack_restore(serialization.to_bytes(v)),
    ],
)
@pytest.mark.parametrize("strict", [None, True])
def test_a_dict_in_a_variable_loads_without_its_box(change, strict):
    model = bridge.ToLinen(Mapped, strict=strict)
    variables = model.init(KEY, X)
    native = Mapped(rngs=nnx.Rngs(KEY))
    changed = change(variables)
    for apply in (model.apply, jax.jit(model.apply, static_argnames="mutable")):
        y, updates = apply(changed, X, mutable=("batch_stats",))
        np.testing.assert_array_equal(y, native(X))
        # An update has the form that was given.
        assert nn.unbox(updates)["batch_stats"]["seen"]["count"] == 1
        apply({**changed, **updates}, X, mutable=("batch_stats",))


def test_what_a_file_holds_of_boxes_loads_without_a_target():
    """Regression: the keys were said to be missing, and so was a parameter with axis names."""

    class Boxed(nnx.Module):
        def __init__(self, *, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("in", "out"))
            self.layers = nnx.List([nnx.Linear(3, 3, kernel_init=init, rngs=rngs)])
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.layers[0](x))

    with nnx.use_eager_sharding(False):
        model = bridge.to_linen(Boxed)
        native = Boxed(rngs=nnx.Rngs(KEY))
        variables = model.init(KEY, X)
        restored = serialization.msgpack_restore(serialization.to_bytes(variables))
        for _ in range(2):
            y, updates = model.apply(restored, X, mutable=["RngCount"])
            np.testing.assert_array_equal(y, native(X))
            restored = {**restored, **updates}


def test_a_dict_that_lacks_an_entry_is_listed_as_missing():
    model = bridge.to_linen(Mapped)
    variables = without_boxes(model.init(KEY, X))
    del variables["params"]["scales"]["b"]
    with pytest.raises(bridge.MismatchError, match="params/scales"):
        model.apply(variables, X, mutable=["batch_stats"])
