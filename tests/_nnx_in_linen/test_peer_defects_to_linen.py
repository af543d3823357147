"""Defects of flax.nnx.bridge in ToLinen and to_linen_class, by their numbers in the design."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors, nnx, serialization
from flax import linen as nn

from tests.bridge.peer import Defect, free_of, rejects
from tests.models import NnxStack

KEY = jax.random.key(0)
X = jnp.arange(12.0).reshape(4, 3)


class Coder(nnx.Module):
    def __init__(self, features, *, rngs):
        self.features = features
        self.encoder = nnx.Linear(3, features, rngs=rngs)
        self.decoder = nnx.Linear(features, 3, rngs=rngs)

    def encode(self, x):
        return self.encoder(x)

    def __call__(self, x):
        return self.decoder(self.encode(x))


class Noisy(nn.Module):
    bridge: object

    @nn.compact
    def __call__(self, x):
        return [self.bridge.to_linen(nnx.Dropout, 0.5)(x) for _ in range(2)]


class Sowing(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        with warnings.catch_warnings():
            # Flax would have it inside nnx.capture, which a Linen program has no place for.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.sow(nnx.Intermediate, "input", x)
        return self.linear(x)


def without(variables, *path):
    """Nested dicts without the entry at a path."""
    name, *rest = path
    if rest:
        return {**variables, name: without(variables[name], *rest)}
    return {key: value for key, value in variables.items() if key != name}


def check_07_missing_parameters(bridge):
    model = bridge.ToLinen(Coder, args=(2,))
    variables = without(model.init(KEY, X), "params", "encoder", "kernel")
    variables = without(variables, "params", "decoder", "bias")
    rejects(lambda: model.apply(variables, X), "params/encoder/kernel", "params/decoder/bias")


def check_07_wrong_shapes(bridge):
    model = bridge.ToLinen(Coder, args=(1,))
    other = bridge.ToLinen(Coder, args=(2,)).init(KEY, X)
    variables = {**model.init(KEY, X), "params": other["params"]}
    rejects(
        lambda: model.apply(variables, X),
        "params/encoder/kernel",
        "[3, 2]",
        "[3, 1]",
        "params/decoder",
    )


def check_08_no_key(bridge):
    model = bridge.ToLinen(nnx.Dropout, args=(0.5,))
    rejects(lambda: model.apply({}, X), "rngs")


def check_08_init_with_a_params_key(bridge):
    variables = bridge.ToLinen(nnx.Dropout, args=(0.5,)).init({"params": KEY}, X)
    assert not variables.get("params")


def check_08_stored_streams_differ_by_layer(bridge):
    model = Noisy(bridge)
    variables = model.init({"params": KEY, "dropout": KEY}, X)
    (first, second), _ = model.apply(variables, X + 1, mutable=["RngCount"])
    assert not np.array_equal(first, second)


def check_08_stored_streams_advance(bridge):
    model = Noisy(bridge)
    variables = model.init({"params": KEY, "dropout": KEY}, X)
    (first, _), updates = model.apply(variables, X + 1, mutable=["RngCount"])
    (second, _), _ = model.apply({**variables, **updates}, X + 1, mutable=["RngCount"])
    assert not np.array_equal(first, second)


def check_09_apply_computes_what_the_native_call_computes(bridge):
    native = nnx.split(NnxStack(3, rngs=nnx.Rngs(0)))
    model = bridge.ToLinen(NnxStack, args=(3,))
    variables = model.init(KEY, X)
    ours = jax.make_jaxpr(lambda params, x: model.apply({**variables, "params": params}, x))
    theirs = jax.make_jaxpr(lambda state, x: nnx.merge(native[0], state)(x))
    assert [str(e.primitive) for e in ours(variables["params"], X).eqns] == [
        str(e.primitive) for e in theirs(native[1], X).eqns
    ]


RUNS = []


def counted(key, shape, dtype=jnp.float32, out_sharding=None):
    RUNS.append(shape)
    return jnp.ones(shape, dtype)


def check_09_apply_runs_no_initialiser(bridge):
    model = bridge.ToLinen(nnx.Linear, args=(3, 2), kwargs=nn.FrozenDict(kernel_init=counted))
    variables = model.init(KEY, X)
    RUNS.clear()
    model.apply(variables, X)
    assert not RUNS


def check_15_no_lazy_init_needed(bridge):
    class Middle(nnx.Module):
        def __init__(self, *, rngs):
            self.dense = bridge.ToNNX(nn.Dense(2), rngs=rngs)

        def __call__(self, x):
            return self.dense(x)

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return bridge.to_linen(Middle)(x)

    y, variables = Outer().init_with_output(KEY, X)
    inner = {"params": variables["params"]["ToLinen_0"]["dense"]}
    np.testing.assert_array_equal(y, nn.Dense(2).apply(inner, X))
    np.testing.assert_array_equal(Outer().apply(variables, X), y)


def check_17_to_linen_class_is_exported(bridge):
    assert bridge.to_linen_class is bridge.wrappers.to_linen_class


def check_17_to_linen_class_makes_a_class_to_instantiate(bridge):
    linear = bridge.wrappers.to_linen_class(nnx.Linear, use_bias=False)
    variables = linear(in_features=3, out_features=2).init(KEY, X)
    assert list(variables["params"]) == ["kernel"]


class Configured(nnx.Module):
    def __init__(self, widths, options, *, rngs):
        assert type(widths) is list
        assert type(options["inner"]) is dict
        self.linear = nnx.Linear(*widths, use_bias=options["inner"]["use_bias"], rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


def check_17_dict_and_list_arguments(make, bridge):
    construct = make(bridge, {"inner": {"use_bias": False}})
    module, again = construct(), construct()
    assert module == again
    assert hash(module) == hash(again)
    for each in (module, module.clone()):
        assert list(each.init(KEY, X)["params"]["linear"]) == ["kernel"]


def from_to_linen(bridge, options):
    return lambda: bridge.to_linen(Configured, [3, 2], options=options)


def from_a_field(bridge, options):
    kwargs = {"widths": [3, 2], "options": options}
    return lambda: bridge.ToLinen(Configured, kwargs=kwargs)


def from_a_class(bridge, options):
    made = bridge.wrappers.to_linen_class(Configured)
    return lambda: made(widths=[3, 2], options=options)


def from_defaults_of_a_class(bridge, options):
    return bridge.wrappers.to_linen_class(Configured, widths=[3, 2], options=options)


CONSTRUCTIONS = {
    "to_linen": (from_to_linen, "Failed to hash Flax Module"),
    "a field of ToLinen": (from_a_field, "Failed to hash Flax Module"),
    "to_linen_class": (from_a_class, "unexpected keyword argument 'widths'"),
    "defaults of to_linen_class": (from_defaults_of_a_class, "missing 1 required positional"),
}


def check_17_method_by_name(bridge):
    model = bridge.ToLinen(Coder, args=(2,))
    variables = model.init(KEY, X)
    native = Coder(2, rngs=nnx.Rngs(0))
    nnx.update(native, nnx.State(variables["params"]))
    np.testing.assert_array_equal(model.apply(variables, X, method="encode"), native.encode(X))


def check_18_string_keys(bridge):
    model = bridge.ToLinen(NnxStack, args=(11,))
    variables = model.init(KEY, X)
    restored = serialization.msgpack_restore(serialization.to_bytes(variables["params"]))
    assert set(restored["layers"]) == set(map(str, range(11)))
    y = model.apply({**variables, "params": restored}, X)
    np.testing.assert_array_equal(y, model.apply(variables, X))


def check_12_sown_values_passed_back(bridge):
    model = bridge.ToLinen(Sowing)
    variables = without(model.init(KEY, X), "intermediates")
    y, sown = model.apply(variables, X, mutable=["intermediates"])
    again, _ = model.apply({**variables, **sown}, X, mutable=["intermediates"])
    np.testing.assert_array_equal(again, y)


def check_23_shared_submodule(bridge):
    class Twice(nn.Module):
        def setup(self):
            self.inner = bridge.to_linen(nnx.Linear, 3, 3)

        def __call__(self, x):
            return self.inner(self.inner(x))

    y, variables = Twice().init_with_output({"params": KEY}, X)
    np.testing.assert_array_equal(y, Twice().apply(variables, X))


def check_24_variables_created_in_the_call(bridge):
    class Counting(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(3, 2, rngs=rngs)

        def __call__(self, x):
            if not hasattr(self, "seen"):
                self.seen = nnx.BatchStat(jnp.zeros(()))
            self.seen[...] += x.shape[0]
            return self.linear(x)

    model = bridge.ToLinen(Counting)
    variables = model.init(KEY, X)
    start = variables["batch_stats"]["seen"]
    _, updates = model.apply(variables, X, mutable=["batch_stats"])
    assert updates["batch_stats"]["seen"] - start == 4


def check_24_bare_arrays(bridge):
    class Scaled(nnx.Module):
        def __init__(self):
            self.scale = jnp.full((), 2.0)

        def __call__(self, x):
            return self.scale * x

    model = bridge.ToLinen(Scaled, skip_rng=True)
    eager, jitted = model.init(KEY, X), jax.jit(model.init)(KEY, X)
    assert jax.tree.structure(eager) == jax.tree.structure(jitted)
    np.testing.assert_array_equal(model.apply(jitted, X), 2 * X)


DEFECTS = {
    "07 missing parameters are an error that lists them": Defect(
        check_07_missing_parameters, AssertionError, "nothing was raised"
    ),
    "07 wrong shapes are an error that lists them": Defect(
        check_07_wrong_shapes, AssertionError, "nothing was raised"
    ),
    "08 without a key there is no dropout": Defect(
        check_08_no_key, AssertionError, "nothing was raised"
    ),
    "08 init takes a params key alone": Defect(
        check_08_init_with_a_params_key, KeyError, "No RngStream named 'dropout'"
    ),
    "08 each layer draws a mask of its own": Defect(
        check_08_stored_streams_differ_by_layer, AssertionError
    ),
    "08 each call draws a mask of its own": Defect(check_08_stored_streams_advance, AssertionError),
    "09 apply computes what the native call computes": Defect(
        check_09_apply_computes_what_the_native_call_computes, AssertionError
    ),
    "09 apply runs no initialiser": Defect(check_09_apply_runs_no_initialiser, AssertionError),
    "12 sown values can be passed back": Defect(
        check_12_sown_values_passed_back, ValueError, "assigned to static attribute"
    ),
    "15 a ToNNX inside a ToLinen needs no lazy_init": Defect(
        check_15_no_lazy_init_needed, KeyError, "'params'"
    ),
    "17 to_linen_class is exported": Defect(
        check_17_to_linen_class_is_exported, AttributeError, "no attribute 'to_linen_class'"
    ),
    "17 a class of to_linen_class can be instantiated": Defect(
        check_17_to_linen_class_makes_a_class_to_instantiate,
        TypeError,
        "unexpected keyword argument 'in_features'",
    ),
    **{
        f"17 dicts and lists reach a constructor through {name}": Defect(
            functools.partial(check_17_dict_and_list_arguments, make), TypeError, says
        )
        for name, (make, says) in CONSTRUCTIONS.items()
    },
    "17 a method can be named": Defect(
        check_17_method_by_name, errors.CallCompactUnboundModuleError, "unbound modules"
    ),
    "18 integer keys may come back as strings": Defect(
        check_18_string_keys, KeyError, "Invalid key: 0"
    ),
    "23 a shared submodule is initialised once": Defect(
        check_23_shared_submodule, AssertionError, "Arrays are not equal"
    ),
    "24 a Variable made in the call is kept at init": Defect(
        check_24_variables_created_in_the_call, KeyError, "'batch_stats'"
    ),
    "24 bare arrays have one collection": Defect(check_24_bare_arrays, AssertionError),
}

test_the_bridge_is_free_of_the_defect = free_of(DEFECTS)
