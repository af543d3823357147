"""Wrappers in wrappers, in every kind of parent, under Linen's lifted transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge as flax_bridge

import bridge
from tests.models import assert_identical

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(7), (4, 3))


def without_definition(variables):
    return {c: v for c, v in variables.items() if c != "nnx"}


definition = pytest.mark.parametrize(
    "prepare", [lambda v: v, without_definition], ids=["with nnx", "without nnx"]
)


def dense(params, x):
    """The reference of every layer here."""
    return x @ params["kernel"] + params["bias"][None]


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


class LinenLeaf(nn.Module):
    features: int = 3

    @nn.compact
    def __call__(self, x):
        count = self.variable("counts", "calls", lambda: jnp.array(0))
        if not self.is_initializing() and self.is_mutable_collection("counts"):
            count.value += 1
        return nn.Dense(self.features, name="dense")(x)


class NNXMiddle(nnx.Module):
    """NNX with a Linen module inside that nobody initialises."""

    def __init__(self, features=3, *, rngs):
        self.before = nnx.Linear(3, 3, rngs=rngs)
        self.leaf = bridge.ToNNX(LinenLeaf(features), rngs=rngs)

    def __call__(self, x):
        return self.leaf(self.before(x))


class LinenTop(nn.Module):
    features: int = 3

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3, name="first")(x)
        return bridge.to_linen(NNXMiddle, self.features, name="middle")(x)


class NNXTop(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.rest = bridge.ToNNX(LinenTop(), rngs=rngs)

    def __call__(self, x):
        return self.rest(self.first(x))


def test_nnx_with_linen_inside_is_initialised_by_init_alone():
    """Regression: Linen(NNX(Linen)) without a manual `lazy_init` raised ScopeCollectionNotFound."""
    variables = bridge.to_linen(NNXMiddle).init(KEY, X)
    assert set(variables) >= {"params", "counts", "nnx"}
    assert set(variables["params"]) == {"before", "leaf"}
    assert variables["params"]["leaf"]["dense"]["kernel"].shape == (3, 3)


@definition
def test_linen_nnx_linen_computes_what_its_layers_compute(prepare):
    y, variables = LinenTop().init_with_output(KEY, X)
    params = variables["params"]
    expected = dense(params["first"], X)
    expected = dense(params["middle"]["before"], expected)
    expected = dense(params["middle"]["leaf"]["dense"], expected)
    close(y, expected)
    np.testing.assert_array_equal(LinenTop().apply(prepare(variables), X), y)


@definition
def test_the_outer_mutable_rules_the_innermost_module(prepare):
    variables = LinenTop().init(KEY, X)
    y, updates = LinenTop().apply(prepare(variables), X, mutable=["counts"])
    assert list(updates) == ["counts"]
    assert int(jax.tree.leaves(updates)[0]) == 1
    np.testing.assert_array_equal(y, LinenTop().apply(variables, X))
    _, updates = LinenTop().apply({**prepare(variables), **updates}, X, mutable=["counts"])
    assert int(jax.tree.leaves(updates)[0]) == 2


@definition
def test_linen_nnx_linen_is_differentiated_and_compiled(prepare):
    variables = prepare(LinenTop().init(KEY, X))
    close(jax.jit(LinenTop().apply)(variables, X), LinenTop().apply(variables, X))

    def loss(params):
        return LinenTop().apply({**variables, "params": params}, X).sum()

    def reference(params):
        y = dense(params["middle"]["before"], dense(params["first"], X))
        return dense(params["middle"]["leaf"]["dense"], y).sum()

    found, expected = jax.grad(loss)(variables["params"]), jax.grad(reference)(variables["params"])
    jax.tree.map(close, found, expected)


def test_linen_nnx_linen_is_initialised_abstractly_and_under_jit():
    real = LinenTop().init(KEY, X)
    abstract = jax.eval_shape(LinenTop().init, KEY, X)
    assert jax.tree.structure(abstract) == jax.tree.structure(real)
    jitted = jax.jit(LinenTop().init)(KEY, X)
    assert jax.tree.structure(jitted) == jax.tree.structure(real)
    jax.tree.map(
        lambda a, b: close(a.astype(float), b.astype(float)), jitted["params"], real["params"]
    )


def test_without_the_definition_the_inputs_decide_the_innermost_shapes():
    class Middle(nnx.Module):
        def __init__(self, *, rngs):
            self.leaf = bridge.ToNNX(nn.Dense(2), rngs=rngs)

        def __call__(self, x):
            return self.leaf(x)

    model = bridge.to_linen(Middle)
    for width in (3, 5):
        x = jnp.ones((2, width))
        variables = without_definition(model.init(KEY, x))
        close(model.apply(variables, x), dense(variables["params"]["leaf"], x))
        with pytest.raises(bridge.MismatchError):
            model.apply(variables, jnp.ones((2, width + 1)))


def test_a_missing_parameter_of_the_innermost_module_is_found():
    variables = LinenTop().init(KEY, X)
    del variables["params"]["middle"]["leaf"]["dense"]["kernel"]
    with pytest.raises(bridge.MismatchError, match="leaf/dense/kernel"):
        LinenTop().apply(variables, X)


def test_nnx_linen_nnx_computes_what_its_layers_compute():
    class Middle(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = bridge.to_linen(nnx.Linear, 3, 3, name="inner")(x)
            return nn.Dense(2, name="head")(x)

    class Top(nnx.Module):
        def __init__(self, *, rngs):
            self.first = nnx.Linear(3, 3, rngs=rngs)
            self.rest = bridge.ToNNX(Middle(), rngs=rngs)

        def __call__(self, x):
            return self.rest(self.first(x))

    model = bridge.lazy_init(Top(rngs=nnx.Rngs(0)), X)
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert set(state["rest"]) == {"inner", "head"}
    expected = dense(state["first"], X)
    expected = dense(state["rest"]["inner"], expected)
    expected = dense(state["rest"]["head"], expected)
    close(model(X), expected)
    close(nnx.jit(lambda m, x: m(x))(model, X), expected)
    grads = nnx.grad(lambda m: m(X).sum())(model)
    assert float(grads["rest"]["head"]["bias"][...][0]) == 4.0


def test_four_levels_compute_what_their_layers_compute():
    model = bridge.lazy_init(NNXTop(rngs=nnx.Rngs(0)), X)
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    expected = dense(state["first"], X)
    expected = dense(state["rest"]["first"], expected)
    expected = dense(state["rest"]["middle"]["before"], expected)
    expected = dense(state["rest"]["middle"]["leaf"]["dense"], expected)
    close(model(X), expected)
    close(nnx.jit(lambda m, x: m(x))(model, X), expected)


def test_four_levels_update_the_innermost_state():
    model = bridge.lazy_init(NNXTop(rngs=nnx.Rngs(0)), X)
    for expected in (1, 2):
        model.rest(X, mutable=["counts"])
        (count,) = [v for p, v in nnx.to_flat_state(nnx.state(model)) if p[-1] == "calls"]
        assert int(count[...]) == expected


def test_five_levels_are_initialised_by_linen_s_init():
    class Top(nn.Module):
        @nn.compact
        def __call__(self, x):
            return bridge.to_linen(NNXTop, name="top")(x)

    variables = Top().init(KEY, X)
    params = variables["params"]["top"]
    expected = dense(params["first"], X)
    expected = dense(params["rest"]["first"], expected)
    expected = dense(params["rest"]["middle"]["before"], expected)
    expected = dense(params["rest"]["middle"]["leaf"]["dense"], expected)
    close(Top().apply(variables, X), expected)
    close(Top().apply(without_definition(variables), X), expected)


def linear(**options):
    return bridge.to_linen(nnx.Linear, 3, 3, **options)


class Compact(nn.Module):
    @nn.compact
    def __call__(self, x):
        return linear(name="b")(linear(name="a")(x))


class Setup(nn.Module):
    def setup(self):
        self.a = linear()
        self.b = linear()

    def __call__(self, x):
        return self.b(self.a(x))


class Fields(nn.Module):
    a: nn.Module
    b: nn.Module

    def __call__(self, x):
        return self.b(self.a(x))


class InList(nn.Module):
    def setup(self):
        self.layers = [linear(), linear()]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class InDict(nn.Module):
    def setup(self):
        self.layers = {"a": linear(), "b": linear()}

    def __call__(self, x):
        return self.layers["b"](self.layers["a"](x))


PARENTS = {
    "compact": (Compact, ("a", "b")),
    "setup": (Setup, ("a", "b")),
    "fields": (lambda: Fields(linear(), linear()), ("a", "b")),
    "a list": (InList, ("layers_0", "layers_1")),
    "a dict": (InDict, ("layers_a", "layers_b")),
    "nn.Sequential": (lambda: nn.Sequential([linear(), linear()]), ("layers_0", "layers_1")),
}


@definition
@pytest.mark.parametrize(("make", "names"), PARENTS.values(), ids=PARENTS)
def test_it_is_a_submodule_of_every_kind_of_parent(make, names, prepare):
    y, variables = make().init_with_output(KEY, X)
    assert set(variables["params"]) == set(names)
    assert set(variables["nnx"]) == set(names)
    first, second = (variables["params"][name] for name in names)
    close(y, dense(second, dense(first, X)))
    np.testing.assert_array_equal(make().apply(prepare(variables), X), y)


@definition
def test_submodules_are_initialised_differently(prepare):
    params = Compact().init(KEY, X)["params"]
    assert not np.array_equal(params["a"]["kernel"], params["b"]["kernel"])


@definition
def test_one_wrapper_shared_by_two_parents_has_one_set_of_variables(prepare):
    class Branch(nn.Module):
        shared: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, name="own")(self.shared(x))

    class Parent(nn.Module):
        def setup(self):
            self.shared = linear()
            self.left = Branch(self.shared)
            self.right = Branch(self.shared)

        def __call__(self, x):
            return self.left(x) + self.right(x)

    y, variables = Parent().init_with_output(KEY, X)
    params = variables["params"]
    assert {k: set(v) for k, v in params.items()} == {
        "shared": {"kernel", "bias"},
        "left": {"own"},
        "right": {"own"},
    }
    hidden = dense(params["shared"], X)
    close(y, dense(params["left"]["own"], hidden) + dense(params["right"]["own"], hidden))
    np.testing.assert_array_equal(Parent().apply(prepare(variables), X), y)


def test_two_references_to_one_wrapped_module_stay_one():
    class Tied(nnx.Module):
        def __init__(self, *, rngs):
            self.a = bridge.ToNNX(nn.Dense(3), rngs=rngs)
            self.b = self.a

        def __call__(self, x):
            return self.b(self.a(x))

    model = bridge.to_linen(Tied)
    variables = model.init(KEY, X)
    assert len(jax.tree.leaves(variables["params"])) == 2
    params = variables["params"]["a"]
    close(model.apply(variables, X), dense(params, dense(params, X)))
    close(model.apply(without_definition(variables), X), dense(params, dense(params, X)))


def test_a_wrapped_constructor_in_a_compact_call_leaves_the_parent_alone():
    """Linen modules that an NNX constructor makes belong to it, not to the Linen parent."""
    variables = LinenTop().init(KEY, X)
    assert set(variables["params"]) == {"first", "middle"}
    assert set(variables["params"]["middle"]) == {"before", "leaf"}


def test_init_of_a_parent_through_a_method():
    class Parent(nn.Module):
        def setup(self):
            self.layer = linear()

        def __call__(self, x):
            return x

        def run(self, x):
            return self.layer(x)

    variables = Parent().init(KEY, X, method="run")
    close(Parent().apply(variables, X, method="run"), dense(variables["params"]["layer"], X))


class Layer(nnx.Module):
    """One layer with state, in the form that nn.scan wants."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return jnp.tanh(self.linear(x))

    def step(self, x, _):
        return self(x), None


class LinenLayer(nn.Module):
    """The same in pure Linen."""

    @nn.compact
    def __call__(self, x):
        calls = self.variable("batch_stats", "calls", lambda: jnp.array(0))
        if not self.is_initializing():
            calls.value += 1
        return jnp.tanh(nn.Dense(3, name="linear")(x))

    def step(self, x, _):
        return self(x), None


names_nnx = pytest.mark.parametrize(
    "names_nnx", [True, False], ids=["naming nnx", "not naming nnx"]
)


def axes(names_nnx, **others):
    return {**others, **({"nnx": None} if names_nnx else {})}


@definition
@names_nnx
def test_vmap_over_the_wrapper_equals_vmap_over_linen(names_nnx, prepare):
    def mapped(cls, **variable_axes):
        return nn.vmap(cls, variable_axes=variable_axes, split_rngs={"params": True}, axis_size=2)

    x = jnp.stack([X, X])
    model = mapped(bridge.ToLinen, **axes(names_nnx, params=0, batch_stats=0))(Layer)
    linen = mapped(LinenLayer, params=0, batch_stats=0)()
    variables = model.init(KEY, x)
    assert ("nnx" in variables) is names_nnx
    reference = linen.init(KEY, x)
    shapes = jax.tree.map(jnp.shape, reference)
    assert jax.tree.map(jnp.shape, dict(without_definition(variables))) == shapes
    kernels = variables["params"]["linear"]["kernel"]
    assert not np.array_equal(kernels[0], kernels[1])
    y, updates = model.apply(prepare(variables), x, mutable=["batch_stats"])
    expected = linen.apply(without_definition(variables), x, mutable=["batch_stats"])
    close(y, expected[0])
    np.testing.assert_array_equal(
        updates["batch_stats"]["calls"], expected[1]["batch_stats"]["calls"]
    )


class Wrapped(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return bridge.to_linen(Layer, name="layer")(x), None


@definition
@names_nnx
def test_scan_over_layers_equals_scan_over_linen(names_nnx, prepare):
    class Pure(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return LinenLayer(name="layer")(x), None

    def stacked(cls, **options):
        variable_axes = {"params": 0, "batch_stats": 0}
        return nn.scan(
            cls, variable_axes=variable_axes, split_rngs={"params": True}, length=3, **options
        )()

    model = stacked(Wrapped, variable_broadcast="nnx" if names_nnx else False)
    linen = stacked(Pure)
    variables = model.init(KEY, X, None)
    kernels = variables["params"]["layer"]["linear"]["kernel"]
    assert kernels.shape == (3, 3, 3)
    assert not np.array_equal(kernels[0], kernels[1])
    (y, _), updates = model.apply(prepare(variables), X, None, mutable=["batch_stats"])
    expected = linen.apply(without_definition(variables), X, None, mutable=["batch_stats"])
    close(y, expected[0][0])
    assert_identical(updates["batch_stats"], expected[1]["batch_stats"])


@definition
@names_nnx
def test_scan_with_shared_and_carried_state_equals_native_repetition(names_nnx, prepare):
    model = nn.scan(
        Wrapped,
        variable_broadcast=["params", "nnx"] if names_nnx else "params",
        variable_carry="batch_stats",
        split_rngs={"params": False},
        length=3,
    )()
    # As in pure Linen, what is carried has to be there before the scan.
    variables = prepare(Wrapped().init(KEY, X, None))
    (y, _), updates = model.apply(variables, X, None, mutable=["batch_stats"])
    expected = X
    for _ in range(3):
        expected = jnp.tanh(dense(variables["params"]["layer"]["linear"], expected))
    close(y, expected)
    assert int(updates["batch_stats"]["layer"]["calls"]) == 3


@definition
@pytest.mark.parametrize("transform", [nn.remat, nn.jit])
def test_a_transform_that_only_changes_how_it_runs_changes_no_result(transform, prepare):
    model = transform(bridge.ToLinen)(Layer)
    plain = bridge.ToLinen(Layer)
    variables = model.init(KEY, X)
    assert jax.tree.structure(variables) == jax.tree.structure(plain.init(KEY, X))
    y, updates = model.apply(prepare(variables), X, mutable=["batch_stats"])
    expected, expected_updates = plain.apply(variables, X, mutable=["batch_stats"])
    close(y, expected)
    assert (
        int(updates["batch_stats"]["calls"]) == int(expected_updates["batch_stats"]["calls"]) == 1
    )

    def loss(module):
        def of(params):
            y, _ = module.apply({**variables, "params": params}, X, mutable=["batch_stats"])
            return y.sum()

        return of

    grads = jax.grad(loss(model))(variables["params"])
    jax.tree.map(close, grads, jax.grad(loss(plain))(variables["params"]))


@pytest.mark.parametrize("transform", [nn.remat, nn.jit])
def test_transforms_work_in_a_compact_parent(transform):
    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x):
            return transform(bridge.ToLinen)(nnx.Linear, args=(3, 2), name="layer")(x)

    y, variables = Parent().init_with_output(KEY, X)
    close(y, dense(variables["params"]["layer"], X))
    close(Parent().apply(variables, X), dense(variables["params"]["layer"], X))


def test_vmap_gives_every_member_its_own_stored_stream():
    mapped = nn.vmap(
        bridge.ToLinen,
        variable_axes={"nnx": None, "RngKey": 0, "RngCount": 0},
        split_rngs={"params": True},
        axis_size=2,
    )
    model = mapped(nnx.Dropout, args=(0.5,))
    x = jnp.ones((2, 40))
    y, variables = model.init_with_output(KEY, x)
    assert not np.array_equal(y[0], y[1])
    y, updates = model.apply(variables, x, mutable=["RngCount"])
    assert not np.array_equal(y[0], y[1])
    np.testing.assert_array_equal(nn.unbox(jax.tree.leaves(updates)[0]), [1, 1])


def test_vmap_splits_a_call_s_own_rngs():
    mapped = nn.vmap(
        bridge.ToLinen,
        variable_axes={"nnx": None},
        split_rngs={"params": True, "dropout": True},
        axis_size=2,
    )
    model = mapped(nnx.Dropout, args=(0.5,), kwargs={}, rng_state=False)
    x = jnp.ones((2, 40))
    variables = model.init(KEY, x)
    y = model.apply(variables, x, rngs={"dropout": jax.random.key(3)})
    assert not np.array_equal(y[0], y[1])


def test_cond_and_while_loops_of_linen_take_it():
    class Branching(nn.Module):
        @nn.compact
        def __call__(self, x, flag):
            layer = linear(name="layer")
            if self.is_initializing():
                return layer(x)
            return nn.cond(flag, lambda m, x: m(x), lambda m, x: x, layer, x)

    variables = Branching().init(KEY, X, True)
    close(Branching().apply(variables, X, True), dense(variables["params"]["layer"], X))
    close(Branching().apply(variables, X, False), X)


def test_nnx_transforms_take_a_model_that_holds_one():
    model = bridge.lazy_init(NNXTop(rngs=nnx.Rngs(0)), X)

    @nnx.jit
    def step(model, x):
        grads = nnx.grad(lambda m: (m(x) ** 2).mean())(model)
        nnx.update(
            model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads)
        )
        return (model(x) ** 2).mean()

    first, second = step(model, X), step(model, X)
    assert second < first


class OfBothInNNX(nnx.Module):
    def __init__(self, *, rngs):
        self.theirs = flax_bridge.ToNNX(nn.Dense(3), rngs=rngs)
        self.ours = bridge.ToNNX(nn.Dense(3), rngs=rngs)

    def __call__(self, x):
        return self.ours(self.theirs(x))


class OfBothInLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = flax_bridge.ToLinen(nnx.Linear, args=(3, 3), name="theirs")(x)
        return bridge.ToLinen(nnx.Linear, args=(3, 3), name="ours")(x)


@pytest.mark.parametrize("lazy_init", [bridge.lazy_init, flax_bridge.lazy_init])
@pytest.mark.parametrize(
    "make",
    [
        OfBothInNNX,
        lambda rngs: bridge.ToNNX(OfBothInLinen(), rngs=rngs),
        lambda rngs: flax_bridge.ToNNX(OfBothInLinen(), rngs=rngs),
    ],
    ids=["in NNX", "in Linen", "in Linen in theirs"],
)
def test_wrappers_of_both_bridges_work_in_one_model(make, lazy_init):
    model = lazy_init(make(rngs=nnx.Rngs(0)), X)
    params = nn.unbox(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    np.testing.assert_array_equal(model(X), dense(params["ours"], dense(params["theirs"], X)))
