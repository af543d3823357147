"""Generated trees: no key is drawn twice, and eager draws what jit draws."""

import hypothesis.strategies as st
import jax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import example, given

import bridge
from tests._randomness.random_models import LinenTree, NnxTree, drawn, shared
from tests.drawing import drawing
from tests.models import assert_identical

STREAMS = ("dropout", "noise")
# Joined, these can be taken for each other.
NAMES = ("a", "b", "ab", "ba", "aba")
# Each example compiles programs of its own.
EXAMPLES = drawing(6)


def leaves(*kinds):
    streams = st.lists(st.sampled_from(STREAMS), min_size=1, max_size=3).map(tuple)
    draws = st.sampled_from(kinds).flatmap(lambda kind: streams.map(lambda s: (kind, s)))
    return draws | st.sampled_from(STREAMS).map(lambda stream: ("drop", stream))


def nodes(children, *more):
    several = st.lists(children, min_size=1, max_size=3).map(tuple)
    named = st.lists(
        st.tuples(st.sampled_from(NAMES), children),
        min_size=1,
        max_size=3,
        unique_by=lambda n: n[0],
    ).map(tuple)
    return (
        several.map(lambda parts: ("seq", parts))
        | named.map(lambda parts: ("named", parts))
        | st.tuples(st.sampled_from(("twice", *more)), children)
    )


LINEN_TREES = st.recursive(
    leaves("draw"), lambda c: nodes(c, "remat", "jit", "vmap", "scan"), max_leaves=5
)
NNX_TREES = st.recursive(
    leaves("draw", "draw shared"),
    lambda c: nodes(c) | st.lists(c, min_size=1, max_size=3).map(lambda p: ("list", tuple(p))),
    max_leaves=6,
)
SETS = st.sets(st.sampled_from(STREAMS)).map(sorted)


@given(LINEN_TREES, SETS, st.sampled_from(("params", "default")))
@EXAMPLES
def test_a_wrapped_linen_tree_draws_the_keys_of_apply_once_each(spec, names, serving):
    seeds = {serving: 0} | {name: i for i, name in enumerate(names, 1)}
    module = LinenTree(spec)
    native = nnx.Rngs(**seeds).fork()
    eager = bridge.ToNNX(module, nnx.Rngs(**seeds))
    jitted = bridge.ToNNX(module, nnx.Rngs(**seeds))
    call = nnx.jit(lambda model: model())
    seen = set()
    for _ in range(2):
        keys = {name.replace("default", "params"): native[name]() for name in seeds}
        output = eager()
        assert_identical(output, module.apply({}, rngs=keys))
        assert_identical(call(jitted), output)
        assert not seen & set(drawn(output))
        seen.update(drawn(output))
    assert_identical(nnx.state(eager), nnx.state(jitted))


@given(LINEN_TREES, SETS)
@EXAMPLES
def test_a_tree_whose_missing_streams_default_serves_draws_no_key_again(spec, names):
    seeds = {"default": 0, "params": 7} | {name: i for i, name in enumerate(names, 1)}
    module = LinenTree(spec)
    eager = bridge.ToNNX(module, nnx.Rngs(**seeds))
    jitted = bridge.ToNNX(module, nnx.Rngs(**seeds))
    call = nnx.jit(lambda model: model())
    keys = {name: jax.random.key(i) for i, name in enumerate(("params", *STREAMS))}
    shared_in_linen = shared(drawn(module.apply({}, rngs=keys)))
    seen = set()
    for _ in range(2):
        output = eager()
        assert_identical(call(jitted), output)
        assert shared(drawn(output)) <= shared_in_linen
        assert not seen & set(drawn(output))
        seen.update(drawn(output))
    assert_identical(nnx.state(eager), nnx.state(jitted))


def streams_of(names):
    return {"params": jax.random.key(0)} | {n: jax.random.key(i) for i, n in enumerate(names, 1)}


def native_tree(spec, keys):
    streams = {name.replace("params", "default"): key for name, key in keys.items()}
    return NnxTree(spec, rngs=nnx.Rngs(**streams))


@given(NNX_TREES, SETS)
@EXAMPLES
def test_a_wrapped_nnx_tree_with_a_threaded_count_draws_as_natively(spec, names):
    keys = streams_of(names)
    native = native_tree(spec, keys)
    model = bridge.to_linen(NnxTree, spec)
    output, variables = model.init_with_output(keys)
    assert_identical(output, native_tree(spec, keys)())
    step = lambda v: model.apply(v, mutable=["RngCount"])  # noqa: E731
    compiled = jax.jit(step)
    seen = set()
    for _ in range(2):
        output, updates = step(variables)
        assert_identical(output, native())
        assert_identical(compiled(variables), (output, updates))
        assert not seen & set(drawn(output))
        seen.update(drawn(output))
        variables = variables | updates


LISTS_IN_A_LIST = (
    "list",
    tuple(
        ("list", (("draw", ("dropout",)),) * 3) if i == 1 else ("draw", ("dropout",))
        for i in range(13)
    ),
)
LOOKALIKES = (
    "named",
    (
        ("a", ("named", (("ba", ("draw", ("noise",))),))),
        ("ab", ("named", (("a", ("draw", ("noise",))),))),
    ),
)


@given(NNX_TREES, SETS, st.booleans())
@example(LISTS_IN_A_LIST, ["dropout"], True)
@example(LOOKALIKES, ["noise"], True)
@EXAMPLES
def test_a_wrapped_nnx_tree_with_call_keys_shares_no_more_than_natively(spec, names, with_state):
    model = bridge.to_linen(NnxTree, spec)
    variables = model.init(streams_of(names))
    if not with_state:
        variables = {"nnx": variables["nnx"]}
    call = lambda v, keys: model.apply(v, rngs=keys)  # noqa: E731
    compiled = jax.jit(lambda keys: call(variables, keys))
    seen = set()
    for seed in (10, 20):
        keys = {name: jax.random.key(seed + i) for i, name in enumerate(STREAMS)}
        output = call(variables, keys)
        assert_identical(compiled(keys), output)
        native = native_tree(spec, keys | {"params": jax.random.key(seed + 5)})
        assert shared(drawn(output)) <= shared(drawn(native()))
        assert not seen & set(drawn(output))
        seen.update(drawn(output))


@pytest.mark.parametrize("spec", [LISTS_IN_A_LIST, LOOKALIKES], ids=["lists", "names"])
def test_streams_whose_joined_paths_read_alike_draw_different_keys(spec):
    """Regression: `layers[1][0]` and `layers[10]`, or `a.ba` and `ab.a`, had one key."""
    model = bridge.to_linen(NnxTree, spec)
    variables = model.init(jax.random.key(0))
    output = model.apply(variables, rngs={name: jax.random.key(1) for name in STREAMS})
    assert shared(drawn(output)) == set()


PART = ("seq", (("draw", ("dropout", "noise")), ("twice", ("draw", ("dropout",)))))


@given(st.lists(st.tuples(st.booleans(), SETS), min_size=2, max_size=4))
@EXAMPLES
def test_native_and_wrapped_parts_of_one_nnx_model_share_no_key(parts):
    class Mixed(nnx.Module):
        def __init__(self, rngs):
            self.parts = nnx.List(
                [
                    bridge.ToNNX(LinenTree(PART), rngs) if wrap else NnxTree(PART, rngs=rngs)
                    for wrap, _ in parts
                ]
            )

        def __call__(self):
            return [part() for part in self.parts]

    seeds = {name: i for i, name in enumerate(STREAMS) if any(name in names for _, names in parts)}
    model = Mixed(nnx.Rngs(100, **seeds))
    keys = drawn([model(), nnx.jit(lambda m: m())(model), model()])
    assert shared(keys) == set()


@given(st.lists(st.booleans(), min_size=2, max_size=4), SETS, st.booleans())
@EXAMPLES
def test_native_and_wrapped_parts_of_one_linen_model_share_no_key(parts, names, threaded):
    class Mixed(nn.Module):
        @nn.compact
        def __call__(self):
            return [
                bridge.to_linen(NnxTree, PART)() if wrap else LinenTree(PART)() for wrap in parts
            ]

    variables = Mixed().init(streams_of(names))
    keys = {name: jax.random.key(i) for i, name in enumerate(STREAMS, 10)}
    if threaded:
        first, updates = Mixed().apply(
            variables, mutable=["RngCount"], rngs={"params": jax.random.key(9)}
        )
        variables = variables | updates
        keys = {"params": jax.random.key(8)}
    else:
        first = Mixed().apply(variables, rngs=keys)
        keys = {name: jax.random.fold_in(key, 1) for name, key in keys.items()}
    second, _ = jax.jit(lambda v: Mixed().apply(v, mutable=["RngCount"], rngs=keys))(variables)
    assert shared(drawn([first, second])) == set()
