"""`ToLinen`: where the keys of a call come from."""

import copy
import functools

import flax
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from tests.models import assert_close, linen_key_at

KEY = jax.random.key(0)
X = jnp.ones((8, 16))


class Dropped(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, *, deterministic=False):
        return self.dropout(self.linear(x), deterministic=deterministic)


class TwoDropouts(nnx.Module):
    """Returns the masks of two layers."""

    def __init__(self, *, rngs):
        self.left = nnx.Dropout(0.5, rngs=rngs)
        self.right = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.left(x) != 0, self.right(x) != 0


class Noise(nnx.Module):
    """Draws from a stream that it keeps."""

    def __init__(self, stream="noise", *, rngs):
        self.rngs = rngs
        self.stream = stream

    def __call__(self, shape=(4,)):
        return jax.random.normal(self.rngs[self.stream](), shape)


def keys(**seeds):
    return {name: jax.random.key(seed) for name, seed in seeds.items()}


def same(a, b):
    return bool(jnp.array_equal(a, b))


def test_the_streams_are_kept_in_two_collections():
    variables = bridge.to_linen(nnx.Dropout, 0.5).init(KEY, X)
    assert set(variables) == {"nnx", "RngKey", "RngCount"}
    (count,) = jax.tree.leaves(variables["RngCount"])
    assert (count.dtype, int(count)) == (jnp.uint32, 0)


class MadeByTheCall(nnx.Module):
    """Its first call creates parameters."""

    def __init__(self, *, rngs):
        self.rngs = rngs

    def __call__(self, x):
        if not hasattr(self, "kernel"):
            self.kernel = nnx.Param(jax.random.normal(self.rngs.params(), x.shape))
        return jax.random.normal(self.rngs.noise(), x.shape)


@pytest.mark.parametrize("streams", [{}, {"noise": 1}])
def test_a_key_that_a_parameter_was_created_from_is_not_drawn_again(streams):
    model = bridge.to_linen(MadeByTheCall)
    given = keys(params=0, **streams)
    variables = model.init(given, X)
    native = MadeByTheCall(rngs=nnx.Rngs(default=given["params"], **streams))
    first = native(X)
    assert same(variables["params"]["kernel"], native.kernel[...])
    y, _ = model.apply(variables, X, mutable=["RngCount"])
    # A stream of its own is put back, as only the output of `init` was drawn from it.
    assert same(y, first if streams else native(X))
    assert not same(y, variables["params"]["kernel"])


def test_threading_the_count_gives_the_draws_of_the_native_module():
    model = bridge.to_linen(Dropped)
    variables = model.init(keys(params=0, dropout=1), X)
    native = Dropped(rngs=nnx.Rngs(default=jax.random.key(0), dropout=jax.random.key(1)))
    masks = []
    for step in range(3):
        y, updates = model.apply(variables, X, mutable=["RngCount"])
        assert same(y, native(X))
        (count,) = jax.tree.leaves(updates["RngCount"])
        assert int(nn.unbox(count)) == step + 1
        variables = {**variables, **updates}
        masks.append(y != 0)
    assert not same(masks[0], masks[1])
    assert not same(masks[1], masks[2])


def test_the_count_is_threaded_under_jit_without_retracing():
    traces = []
    model = bridge.to_linen(Dropped)
    variables = model.init(KEY, X)

    @jax.jit
    def step(variables):
        traces.append(1)
        y, updates = model.apply(variables, X, mutable=["RngCount"])
        return y, {**variables, **updates}

    native = Dropped(rngs=nnx.Rngs(KEY))
    for _ in range(3):
        y, variables = step(variables)
        assert_close(y, native(X))
    assert len(traces) == 1


@pytest.mark.parametrize("with_definition", [True, False])
def test_stored_streams_that_are_not_mutable_warn_once_of_the_same_key(
    with_definition,
):
    class Fresh(Dropped):
        """Another class, because the warning comes once for each."""

    model = bridge.to_linen(Fresh)
    variables = model.init(KEY, X)
    if not with_definition:
        del variables["nnx"]
    with pytest.warns(bridge.BridgeWarning, match="same key.*mutable=.'RngCount'.") as caught:
        first = model.apply(variables, X)
    assert len(caught) == 1
    assert same(model.apply(variables, X), first)


def test_strict_makes_a_stream_that_cannot_advance_an_error():
    model = bridge.ToLinen(Dropped, strict=True)
    variables = model.init(KEY, X)
    with pytest.raises(bridge.LostUpdateError, match="RngCount"):
        model.apply(variables, X)
    model.apply(variables, X, mutable=["RngCount"])


def test_a_deterministic_call_draws_nothing_and_needs_nothing():
    model = bridge.ToLinen(Dropped, strict=True)
    variables = model.init(KEY, X)
    without = {"params": variables["params"]}
    native = Dropped(rngs=nnx.Rngs(KEY))
    assert same(model.apply(variables, X, deterministic=True), native(X, deterministic=True))
    assert same(model.apply(without, X, deterministic=True), native(X, deterministic=True))
    _, updates = model.apply(variables, X, deterministic=True, mutable=["RngCount"])
    assert jax.tree.map(int, jax.tree.leaves(updates)) == [0]


@pytest.mark.parametrize("with_state", [True, False])
def test_a_call_s_own_rngs_decide_its_draws(with_state):
    model = bridge.to_linen(Dropped)
    variables = model.init(keys(params=0, dropout=1), X)
    if not with_state:
        variables = {c: v for c, v in variables.items() if c not in ("RngKey", "RngCount")}
    first = model.apply(variables, X, rngs=keys(dropout=5))
    assert same(model.apply(variables, X, rngs=keys(dropout=5)), first)
    assert not same(model.apply(variables, X, rngs=keys(dropout=6)), first)


class CountOfItsOwn(nnx.RngCount):
    """A count of one's own."""


def test_a_count_of_a_subclass_starts_at_zero_for_the_rngs_of_a_call():
    class Counted(TwoDropouts):
        def __init__(self, *, rngs):
            super().__init__(rngs=rngs)
            for layer in (self.left, self.right):
                layer.rngs.count = CountOfItsOwn(layer.rngs.count[...], tag=layer.rngs.tag)

    call = {"rngs": keys(dropout=3)}
    masks = bridge.to_linen(Counted).apply({}, X, **call)
    expected = bridge.to_linen(TwoDropouts).apply({}, X, **call)
    assert all(map(same, masks, expected))


def test_a_call_s_own_rngs_leave_the_stored_count_alone():
    model = bridge.ToLinen(Dropped, strict=True)
    variables = model.init(KEY, X)
    model.apply(variables, X, rngs=keys(dropout=5))
    _, updates = model.apply(variables, X, rngs=keys(dropout=5), mutable=["RngCount"])
    assert all(int(nn.unbox(count)) == 0 for count in jax.tree.leaves(updates.get("RngCount", {})))


def test_a_call_s_key_is_another_at_every_path():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            left = bridge.to_linen(nnx.Dropout, 0.5, name="left")(x)
            right = bridge.to_linen(nnx.Dropout, 0.5, name="right")(x)
            return left != 0, right != 0

    variables = Two().init(keys(params=0, dropout=1), X)
    left, right = Two().apply(variables, X, rngs=keys(dropout=5))
    assert not same(left, right)


@pytest.mark.parametrize("init_keys", [KEY, keys(params=0, dropout=1)], ids=["one key", "two keys"])
@pytest.mark.parametrize("style", ["rngs", "count"])
def test_two_dropout_layers_never_share_a_mask(init_keys, style):
    """Regression: without an RNG every layer had the mask of key 0."""
    model = bridge.to_linen(TwoDropouts)
    (left, right), variables = model.init_with_output(init_keys, X)
    assert not same(left, right)
    if style == "rngs":
        left, right = model.apply(variables, X, rngs=keys(dropout=5))
    else:
        (left, right), _ = model.apply(variables, X, mutable=["RngCount"])
    assert not same(left, right)


@pytest.mark.parametrize("style", ["rngs", "count"])
def test_two_wrappers_never_share_a_mask(style):
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            left = bridge.to_linen(nnx.Dropout, 0.5)(x)
            right = bridge.to_linen(nnx.Dropout, 0.5)(x)
            return left != 0, right != 0

    (left, right), variables = Two().init_with_output(KEY, X)
    assert not same(left, right)
    if style == "rngs":
        left, right = Two().apply(variables, X, rngs=keys(dropout=5))
    else:
        (left, right), _ = Two().apply(variables, X, mutable=["RngCount"])
    assert not same(left, right)


class Twice(nn.Module):
    @nn.compact
    def __call__(self, x):
        drop = bridge.to_linen(nnx.Dropout, 0.5, name="drop")
        return drop(x) != 0, drop(x) != 0


def test_two_calls_of_one_wrapper_draw_two_masks_from_one_stored_stream():
    variables = Twice().init(KEY, X)
    (first, second), updates = Twice().apply(variables, X, mutable=["RngCount"])
    assert not same(first, second)
    (count,) = jax.tree.leaves(updates["RngCount"])
    assert int(nn.unbox(count)) == 2


def test_two_calls_of_one_wrapper_draw_two_masks_from_a_call_s_own_rngs():
    """As Linen's Dropout does, which draws with `make_rng`."""
    variables = Twice().init(KEY, X)
    first, second = Twice().apply(variables, X, rngs=keys(dropout=5))
    assert not same(first, second)


@pytest.mark.parametrize("with_definition", [True, False])
def test_a_call_s_rngs_seed_a_split_stream(with_definition):
    """A stream that was split has a key for every slice."""

    class Sliced(nnx.Module):
        def __init__(self, *, rngs):
            self.rngs = rngs.split(3)

        def __call__(self):
            return jax.vmap(jax.random.normal)(self.rngs.dropout.key.get_value())

    model = bridge.to_linen(Sliced)
    variables = model.init(keys(params=0, dropout=1))
    if not with_definition:
        variables = {c: v for c, v in variables.items() if c != "nnx"}
    y = model.apply(variables, rngs=keys(dropout=5))
    assert y.shape == (3,)
    assert len(set(y.tolist())) == 3
    assert not same(y, model.apply(variables, rngs=keys(dropout=6)))


@pytest.mark.parametrize("with_definition", [True, False])
def test_a_missing_rng_is_linen_s_error_and_names_the_stream(with_definition):
    """Regression: key 0 was drawn in every call and every layer."""
    model = bridge.to_linen(Dropped)
    variables = model.init(keys(params=0, dropout=1), X)
    wanted = ("params", "nnx") if with_definition else ("params",)
    variables = {c: variables[c] for c in wanted}
    with pytest.raises(bridge.MissingRngError) as caught:
        model.apply(variables, X)
    assert isinstance(caught.value, flax.errors.InvalidRngError)
    assert caught.value.streams == (("dropout",) if with_definition else ("default",))
    assert "rngs={'dropout': key}" in str(caught.value)


def test_a_missing_rng_error_names_the_keys_that_the_call_has():
    """Regression: it said that no stream exists."""

    class Noisy(nnx.Module):
        def __init__(self, *, rngs):
            self.rngs = rngs

        def __call__(self):
            return jax.random.uniform(self.rngs.noise()), self.rngs.dropout()

    model = bridge.ToLinen(Noisy, rng_state=False)
    variables = model.init(keys(params=0, noise=1, dropout=2))
    with pytest.raises(bridge.MissingRngError, match="keys only for 'noise'; pass") as caught:
        model.apply(variables, rngs={"noise": KEY})
    assert caught.value.streams == ("dropout",)


@pytest.mark.parametrize("is_partial", [True, False])
@pytest.mark.parametrize("with_definition", [True, False])
def test_streams_among_the_arguments_serve_the_constructor_alone(with_definition, is_partial):
    """Regression: the definition was derived with the caller's streams, which refused the trace."""

    def native():
        return nnx.Linear(3, 2, rngs=nnx.Rngs(3))

    streams = nnx.Rngs(3)
    if is_partial:
        model = bridge.to_linen(functools.partial(nnx.Linear, 3, rngs=streams), 2)
    else:
        model = bridge.to_linen(nnx.Linear, 3, 2, rngs=streams)
    variables = model.init(KEY, jnp.ones((1, 3)))
    assert same(variables["params"]["kernel"], native().kernel[...])
    count = int(streams.default.count[...])
    wanted = ("params", "nnx") if with_definition else ("params",)
    y = model.apply({c: variables[c] for c in wanted}, jnp.ones((1, 3)))
    assert same(y, native()(jnp.ones((1, 3))))
    assert int(streams.default.count[...]) == count


def test_a_missing_rng_is_found_under_jit():
    model = bridge.to_linen(Dropped)
    variables = {"params": model.init(KEY, X)["params"]}
    with pytest.raises(flax.errors.InvalidRngError):
        jax.jit(model.apply)(variables, X)


def test_init_without_any_key_is_linen_s_error():
    with pytest.raises(flax.errors.InvalidRngError):
        bridge.to_linen(nnx.Linear, 3, 2).init({}, jnp.ones((1, 3)))


def test_a_constructor_that_wants_a_missing_stream_gets_linen_s_error():
    class Wanting(nnx.Module):
        def __init__(self, *, rngs):
            self.w = nnx.Param(jax.random.normal(rngs.special(), (2,)))

        def __call__(self):
            return self.w[...]

    with pytest.raises(bridge.MissingRngError) as caught:
        bridge.to_linen(Wanting).init({"other": KEY})
    assert caught.value.streams == ("special",)


def test_a_constructor_that_only_speaks_of_a_stream_keeps_its_own_error():
    """Regression: Flax's words were looked for in the message of any error."""

    class Speaking(nnx.Module):
        def __init__(self, *, rngs):
            raise KeyError("No RngStream named 'special' is what Flax would say")

    with pytest.raises(KeyError) as caught:
        bridge.to_linen(Speaking).init({"params": KEY})
    assert not isinstance(caught.value, bridge.BridgeError)


@pytest.mark.parametrize("cls", [Dropped, TwoDropouts])
def test_init_needs_only_a_params_key(cls):
    """Regression: init of a Dropout raised without a key of its own."""
    y, variables = bridge.to_linen(cls).init_with_output({"params": KEY}, X)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, y, cls(rngs=nnx.Rngs(KEY))(X)))
    assert "RngKey" in variables


@pytest.mark.parametrize(
    "key",
    [
        jax.random.key(3),
        jax.random.key(3, impl="rbg"),
        jax.random.key(3, impl="unsafe_rbg"),
        jax.random.PRNGKey(3),
    ],
    ids=["threefry2x32", "rbg", "unsafe_rbg", "legacy uint32"],
)
def test_init_equals_native_construction_for_every_kind_of_key(key):
    y, variables = bridge.to_linen(Dropped).init_with_output(key, X)
    native = Dropped(rngs=nnx.Rngs(key))
    assert same(variables["params"]["linear"]["kernel"], native.linear.kernel.get_value())
    assert same(y, native(X))


@pytest.mark.parametrize("key", [jax.random.key(3, impl="rbg"), jax.random.PRNGKey(3)])
@pytest.mark.parametrize("with_state", [True, False])
def test_apply_takes_every_kind_of_key(key, with_state):
    model = bridge.to_linen(Dropped)
    variables = model.init(KEY, X)
    if not with_state:
        variables = {"params": variables["params"]}
    y = model.apply(variables, X, rngs={"dropout": key})
    assert same(y, jax.jit(lambda v, k: model.apply(v, X, rngs={"dropout": k}))(variables, key))


def test_every_named_key_of_init_is_the_stream_of_that_name():
    model = bridge.to_linen(Noise, "noise")
    y, _ = model.init_with_output(keys(params=0, noise=7))
    native = Noise("noise", rngs=nnx.Rngs(default=jax.random.key(0), noise=jax.random.key(7)))
    assert same(y, native())


def test_init_leaves_the_counts_as_construction_left_them():
    variables = bridge.to_linen(Dropped).init(KEY, X)
    native = Dropped(rngs=nnx.Rngs(KEY))
    found = [int(nn.unbox(c)) for c in jax.tree.leaves(variables["RngCount"])]
    assert found == [int(native.dropout.rngs.count[...])]


def test_rng_state_can_be_kept_out_of_the_variables():
    model = bridge.ToLinen(Dropped, rng_state=False)
    y, variables = model.init_with_output(KEY, X)
    assert set(variables) == {"params", "nnx"}
    assert same(y, Dropped(rngs=nnx.Rngs(KEY))(X))


def test_without_rng_state_keys_come_from_rngs_and_nothing_is_returned():
    model = bridge.ToLinen(Dropped, rng_state=False, strict=True)
    variables = model.init(KEY, X)
    y, updates = model.apply(variables, X, rngs=keys(dropout=5), mutable=True)
    assert not {"RngKey", "RngCount"} & set(updates)
    assert not same(y, model.apply(variables, X, rngs=keys(dropout=6)))
    with pytest.raises(bridge.MissingRngError):
        model.apply(variables, X)


def test_a_dropout_trains_as_in_linen_with_a_key_for_every_step():
    model = bridge.ToLinen(Dropped, rng_state=False)
    variables = model.init(KEY, X)

    @jax.jit
    def step(variables, key):
        def loss(variables):
            return (model.apply(variables, X, rngs={"dropout": key}) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(variables)
        return value, jax.tree.map(lambda v, g: v - 0.1 * g, variables, grads)

    values = []
    for key in jax.random.split(KEY, 4):
        value, variables = step(variables, key)
        values.append(float(value))
    assert len(set(values)) == 4
    assert values[-1] < values[0]


def test_a_stored_stream_is_split_by_a_mapped_init():
    """Members of an ensemble draw different masks."""
    model = bridge.to_linen(nnx.Dropout, 0.5)
    variables = jax.vmap(model.init, in_axes=(0, None))(jax.random.split(KEY, 3), X)
    y, _ = jax.vmap(lambda v: model.apply(v, X, mutable=["RngCount"]))(variables)
    assert not same(y[0], y[1])
    assert not same(y[1], y[2])


def test_tree_mode_draws_what_graph_mode_draws():
    model = bridge.to_linen(Dropped)
    expected = model.init_with_output(KEY, X)
    applied = model.apply(expected[1], X, mutable=["RngCount"])
    seeded = model.apply(expected[1], X, rngs=keys(dropout=5))
    with nnx.set_graph_mode(False):
        y, variables = model.init_with_output(KEY, X)
        assert same(y, expected[0])
        assert same(model.apply(variables, X, mutable=["RngCount"])[0], applied[0])
        assert same(model.apply(variables, X, rngs=keys(dropout=5)), seeded)


@pytest.mark.parametrize("boxed", [True, False])
def test_named_streams_are_found_without_the_definition(boxed):
    options = {} if boxed else {"metadata_fn": None}
    model = bridge.to_linen(Noise, **options)
    variables = model.init(keys(params=0, noise=7))
    expected, _ = model.apply(variables, mutable=["RngCount"])
    del variables["nnx"]
    found, _ = model.apply(variables, mutable=["RngCount"])
    assert same(found, expected)


class MaskOf(nnx.Module):
    """The mask of a Linen layer in an NNX module."""

    def __init__(self, *, rngs):
        self.inner = bridge.ToNNX(nn.Dropout(0.5, deterministic=False), rngs=rngs)

    def __call__(self, x=X):
        return self.inner(x)


class KeyOf(nn.Module):
    """The key that Linen gives to a module at the root."""

    stream: str

    def __call__(self):
        return self.make_rng(self.stream)


def stream_of_call(name, key, *path):
    """The native stream that a call's key is at a path in an NNX module at the root."""
    drawn = KeyOf(name).apply({}, rngs={name: key})
    return nnx.Rngs(**{name: linen_key_at(drawn, *path, name)})


def forms_of(model, *inputs):
    """Variables of one model that differ in the streams and in the definition that they hold."""
    for init_keys in (KEY, keys(params=3), keys(params=0, dropout=1), keys(params=0, noise=1)):
        variables = model.init(init_keys, *inputs)
        yield variables
        yield copy.deepcopy(variables)
        yield jax.tree.map(lambda leaf: leaf, variables)
        yield {name: tree for name, tree in variables.items() if name != "nnx"}
    yield {}


@pytest.mark.parametrize("jit", [False, True])
def test_a_stream_of_a_call_is_the_same_whatever_streams_init_has_stored(jit):
    model = bridge.to_linen(Noise, "noise")
    native = Noise("noise", rngs=stream_of_call("noise", jax.random.key(5), "rngs"))()

    def apply(variables):
        return model.apply(variables, rngs=keys(aside=4, noise=5))

    for variables in forms_of(model):
        assert same((jax.jit(apply) if jit else apply)(variables), native)


def test_a_wrapped_linen_layer_draws_from_a_call_s_key_not_a_stored_one():
    model = bridge.to_linen(MaskOf)
    rngs = stream_of_call("dropout", jax.random.key(5), "inner", "to_nnx__rngs")
    native = nn.Dropout(0.5, deterministic=False).apply({}, X, rngs={"dropout": rngs.dropout()})
    for variables in forms_of(model, X):
        assert same(model.apply(variables, X, rngs=keys(aside=4, dropout=5)), native)
        y, updates = model.apply(variables, X, rngs=keys(aside=4, dropout=5), mutable=True)
        assert same(y, native)
        if "nnx" in variables:
            assert jax.tree.structure(updates["RngKey"]) == jax.tree.structure(variables["RngKey"])


def test_a_wrapper_around_a_mixture_draws_from_a_call_s_key_as_linen_does():
    model = bridge.to_linen(MaskOf)
    expected = model.apply({}, X, rngs=keys(dropout=5))
    for rngs in (KEY, nnx.Rngs(0), nnx.Rngs(params=0, dropout=4)):
        wrapped = bridge.ToNNX(model, rngs=rngs).lazy_init(X)
        assert same(wrapped(X, rngs=keys(dropout=5)), expected)


def test_only_the_streams_that_a_call_draws_from_move_on_in_a_wrapper():
    for drawn, counts in ((True, 1), (False, 0)):

        class Sometimes(MaskOf):
            def __call__(self, x=X, drawn=drawn):
                return self.inner(x) if drawn else x

        wrapped = bridge.ToNNX(
            bridge.ToLinen(Sometimes, rng_state=False), rngs=nnx.Rngs(params=0, dropout=1, noise=2)
        ).lazy_init(X)
        wrapped(X)
        assert int(wrapped.to_nnx__rngs.dropout.count[...]) == counts
        assert int(wrapped.to_nnx__rngs.noise.count[...]) == 0


class DropoutInLinen(nn.Module):
    """An NNX layer in a Linen module, or Linen's own layer."""

    is_native: bool = False

    @nn.compact
    def __call__(self, x):
        if self.is_native:
            return nn.Dropout(0.5, deterministic=False)(x)
        return bridge.ToLinen(nnx.Dropout, args=(0.5,), rng_state=False)(x)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("stream", ["params", "dropout"])
def test_params_serves_a_module_without_rng_state_as_it_serves_linen_s_own(is_native, stream):
    model = DropoutInLinen(is_native)
    variables = model.init(KEY, X)
    first, second = (model.apply(variables, X, rngs=keys(**{stream: seed})) for seed in (1, 2))
    assert not same(first, second)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize(
    ("seeds", "drawn"),
    [
        ({"default": 0}, "default"),
        ({"default": 0, "params": 1}, "default"),
        ({"params": 1}, "params"),
        ({"params": 1, "dropout": 2}, "dropout"),
    ],
)
def test_streams_of_a_wrapper_serve_a_module_without_rng_state(is_native, seeds, drawn):
    model = bridge.ToNNX(DropoutInLinen(is_native), rngs=nnx.Rngs(**seeds)).lazy_init(X)
    before = {name: int(model.to_nnx__rngs[name].count[...]) for name in seeds}
    assert not same(model(X), model(X))
    after = {name: int(model.to_nnx__rngs[name].count[...]) for name in seeds}
    assert after == {**before, drawn: before[drawn] + 2}


@pytest.mark.parametrize("init_keys", [KEY, {"params": KEY}, {"params": KEY, "carry": KEY}])
@pytest.mark.parametrize("others", [("attention",), ("a", "noise", "params"), ("default_noise",)])
def test_a_dropout_without_a_stream_of_its_own_gets_the_key_called_dropout(init_keys, others):
    class Drops(nnx.Module):
        def __init__(self, *, rngs):
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(x)

    model = bridge.to_linen(Drops)
    x = jnp.ones((8, 8))
    variables = model.init(init_keys, x)
    dropout = jax.random.key(11)
    wanted = model.apply(variables, x, rngs={"dropout": dropout})
    for seed in range(3):
        keys = {name: jax.random.key(seed) for name in others}
        output = model.apply(variables, x, rngs={**keys, "dropout": dropout})
        assert (output == wanted).all()
