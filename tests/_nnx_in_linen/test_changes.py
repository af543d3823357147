"""Whatever a call changes in an NNX module, its Linen variables tell the next call."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import DenyList
from hypothesis import example, given

import bridge
import registry
from tests._nnx_in_linen import changing_models
from tests._nnx_in_linen.changing_models import Changing
from tests.drawing import drawing
from tests.models import assert_identical

pytestmark = pytest.mark.filterwarnings("ignore:Using .Module.sow:DeprecationWarning")

KEY = jax.random.key(0)
GENERATED = drawing(60)


def state(module):
    """The values of a native module by collection and path."""
    found = {}
    for path, item in nnx.to_flat_state(nnx.state(module)):
        is_variable = isinstance(item, nnx.Variable)
        name = registry.current().name_from_type(item.var_type) if is_variable else "nnx_arrays"
        value = item.get_value() if is_variable else item
        found[(name, *map(str, path))] = jax.tree.map(float, value)
    return found


def variables_of(module):
    """The Linen variables of a native module, without a definition."""
    variables = {}
    for (collection, *path), value in state(module).items():
        tree = variables.setdefault(collection, {})
        for key in path[:-1]:
            tree = tree.setdefault(key, {})
        tree[path[-1]] = jax.tree.map(jnp.float32, value)
    return variables


def leaves(variables):
    """The values of Linen variables by collection and path."""
    found = {}
    pending = [((c,), tree) for c, tree in variables.items() if c != "nnx"]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            pending += [((*path, str(key)), child) for key, child in value.items()]
        else:
            found[path] = jax.tree.map(float, value)
    return found


@given(children=changing_models.modules, changes=changing_models.changes())
@example(children=(("cache", 0), ("plain dict", ())), changes=(("remove", 1),))
@GENERATED
def test_generated_changes_come_back_and_next_calls_are_native_ones(children, changes):
    native = Changing(children, changes)
    model = bridge.ToLinen(Changing, (children, changes), strict=True)
    variables = variables_of(native)
    for x in (1.0, 2.0, 3.0):
        expected = native(jnp.float32(x))
        y, updates = model.apply(variables, jnp.float32(x), mutable=True)
        assert float(y) == float(expected)
        variables = {**variables, **updates}
        assert leaves(variables) == state(native)


# The second call puts another Variable in the place of one that only the first call created.
@example(children=(("cache", 0), ("cache", 0)), changes=(("share", 3), ("replace_variable", 1)))
@given(children=changing_models.modules, changes=changing_models.changes())
@GENERATED
def test_a_generated_change_beyond_leaves_is_never_lost_without_an_error(children, changes):
    native = Changing(children, changes)
    model = bridge.ToLinen(Changing, (children, changes), strict=True)
    variables = variables_of(native)
    for x in (1.0, 2.0, 3.0):
        try:
            y, updates = model.apply(variables, jnp.float32(x), mutable=DenyList("nnx"))
        except bridge.LostUpdateError:
            return
        assert float(y) == float(native(jnp.float32(x)))
        variables = {**variables, **updates}


@given(
    children=changing_models.modules,
    changes=changing_models.changes(changing_models.TOLD),
)
@GENERATED
def test_generated_changes_of_values_need_no_definition(children, changes):
    native = Changing(children, changes)
    model = bridge.ToLinen(Changing, (children, changes), strict=True)
    variables = variables_of(native)
    for x in (1.0, 2.0):
        expected = native(jnp.float32(x))
        y, updates = model.apply(variables, jnp.float32(x), mutable=DenyList("nnx"))
        assert float(y) == float(expected)
        variables = {**variables, **updates}
        assert leaves(variables) == state(native)


@given(children=changing_models.modules, changes=changing_models.changes())
@GENERATED
def test_generated_changes_leave_the_given_variables_alone(children, changes):
    native = Changing(children, changes)
    model = bridge.ToLinen(Changing, (children, changes))
    variables = variables_of(native)
    before = state(native)
    expected = native(jnp.float32(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Twice: nothing is left behind in the definition either.
        for _ in range(2):
            assert float(model.apply(variables, jnp.float32(1))) == float(expected)
    assert leaves(variables) == before


@given(
    children=changing_models.modules,
    changes=changing_models.changes(changing_models.UNMAKING),
)
@GENERATED
def test_generated_changes_do_not_get_into_what_init_stores(children, changes):
    model = bridge.ToLinen(Changing, (children, changes))
    variables = model.init(KEY, jnp.float32(1))
    untouched = Changing(children, changes)
    assert leaves(variables) == state(untouched)
    expected = untouched(jnp.float32(2))
    y, _ = model.apply(variables, jnp.float32(2), mutable=True)
    assert float(y) == float(expected)


class Counter(nnx.Module):
    """Counts by replacing its Variable."""

    def __init__(self):
        self.c = nnx.Cache(jnp.zeros(()))

    def __call__(self, x):
        self.c = nnx.Cache(self.c[...] + 1)
        return x + self.c[...]


class Swapping(nnx.Module):
    def __init__(self):
        self.a, self.b = nnx.Cache(jnp.float32(1)), nnx.Cache(jnp.float32(2))

    def __call__(self, x):
        self.a, self.b = self.b, self.a
        return x * self.a[...]


class Growing(nnx.Module):
    """Adds to every container, and fills what was None."""

    def __init__(self):
        self.items = nnx.List([nnx.Cache(jnp.float32(1))])
        self.named = nnx.Dict(a=nnx.Cache(jnp.float32(2)))
        self.plain = nnx.data({"b": nnx.Cache(jnp.float32(3))})
        self.empty = nnx.data(None)

    def __call__(self, x):
        self.items.append(nnx.Cache(x))
        self.named[f"n{len(self.items)}"] = nnx.Cache(2 * x)
        self.plain[f"n{len(self.items)}"] = nnx.Cache(3 * x)
        self.empty = nnx.Cache(x if self.empty is None else self.empty[...] + x)
        variables = [*self.items, *self.named.values(), *self.plain.values(), self.empty]
        return sum(variable[...] for variable in variables)


class Rebuilding(nnx.Module):
    """Replaces a submodule, and counts in a Python attribute how often."""

    def __init__(self):
        self.count = 0
        self.inner = Counter()

    def __call__(self, x):
        self.count += 1
        y = self.inner(x) * self.count
        self.inner = Swapping() if self.count == 1 else Counter()
        return y


MODELS = [Counter, Swapping, Growing, Rebuilding]
STATE = ["cache"]


def calls(apply, module, variables, mutable):
    """The outputs of three calls, and the variables after them."""
    outputs = []
    for x in (1.0, 2.0, 3.0):
        y, updates = apply(variables, jnp.float32(x), mutable=mutable)
        variables = {**variables, **updates}
        outputs.append(float(y))
    return outputs, leaves(variables)


def native_calls(module):
    return [float(module(jnp.float32(x))) for x in (1.0, 2.0, 3.0)], state(module)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("with_definition", [False, True])
def test_changes_are_threaded_through_calls(model, compiled, with_definition):
    module = bridge.ToLinen(model, strict=True)
    apply = jax.jit(module.apply, static_argnames="mutable") if compiled else module.apply
    variables = module.init(KEY, jnp.float32(1)) if with_definition else variables_of(model())
    # What no call creates, init stores as it was constructed.
    if model is not Growing:
        assert leaves(variables) == state(model())
    elif with_definition:
        variables = {**variables_of(model()), "nnx": bridge_graphdef(model)}
    assert calls(apply, module, variables, ("nnx", *STATE)) == native_calls(model())


def bridge_graphdef(model):
    return bridge.ToLinen.from_module(model())[1]["nnx"]


@pytest.mark.parametrize("model", [Counter, Swapping, Growing])
def test_state_needs_no_definition_to_be_threaded(model):
    module = bridge.ToLinen(model, strict=True)
    assert calls(module.apply, module, variables_of(model()), STATE) == native_calls(model())


@pytest.mark.parametrize("mutable", [True, DenyList(("params",)), ["cache"], "cache", ("cache",)])
def test_every_kind_of_mutable_keeps_a_replaced_variable(mutable):
    module = bridge.ToLinen(Counter, strict=True)
    variables = variables_of(Counter())
    assert calls(module.apply, module, variables, mutable) == native_calls(Counter())


@pytest.mark.parametrize("mutable", [False, [], ["params"], DenyList(("cache",))])
def test_a_replaced_variable_that_is_not_kept_is_said_once_or_raises(mutable):
    name = f"kept{mutable}"
    fresh = type(name, (Counter,), {})
    variables = variables_of(fresh())
    with pytest.warns(bridge.BridgeWarning, match="cache"):
        bridge.ToLinen(fresh).apply(variables, jnp.float32(1), mutable=mutable)
    bridge.ToLinen(fresh).apply(variables, jnp.float32(1), mutable=mutable)
    with pytest.raises(bridge.LostUpdateError, match="cache"):
        bridge.ToLinen(fresh, strict=True).apply(variables, jnp.float32(1), mutable=mutable)


def test_what_only_the_definition_tells_is_said_once_or_raises():
    variables = variables_of(Rebuilding())
    with pytest.warns(bridge.BridgeWarning, match=r"count.*mutable=\['nnx'"):
        bridge.ToLinen(Rebuilding).apply(variables, jnp.float32(1), mutable=STATE)
    with pytest.raises(bridge.LostUpdateError, match="count"):
        bridge.ToLinen(Rebuilding, strict=True).apply(variables, jnp.float32(1), mutable=STATE)


class Normed(nnx.Module):
    """Sets its mode in its methods, as NNX guides do."""

    def __init__(self):
        self.norm = nnx.BatchNorm(1, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x)

    def predict(self, x):
        self.eval()
        return self(self.dropout(x))

    def frozen(self, x):
        self.norm.use_running_average = True
        return self(x)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("method", ["predict", "frozen"])
def test_a_mode_that_a_call_sets_holds_for_that_call_and_is_no_lost_update(method, strict):
    module = bridge.ToLinen(Normed, strict=strict)
    x = jnp.array([[1.0], [3.0]])
    variables = module.init(KEY, x)
    assert_identical(module.apply(variables, x, nnx_method=method), getattr(Normed(), method)(x))
    _, updates = module.apply(variables, x, nnx_method=method, mutable=["batch_stats"])
    native = Normed()
    native(x)
    _, updates = module.apply({**variables, **updates}, x, mutable=["batch_stats"])
    assert_identical(updates["batch_stats"]["norm"]["mean"], native.norm.mean[...])


def test_a_mode_that_a_call_sets_is_kept_with_the_definition():
    module, native = bridge.ToLinen(Normed, strict=True), Normed()
    x = jnp.array([[1.0], [3.0]])
    variables = module.init(KEY, x)
    mutable = ["nnx", "batch_stats"]
    for method in ("__call__", "predict", "__call__"):
        y, updates = module.apply(variables, x, nnx_method=method, mutable=mutable)
        variables = {**variables, **updates}
        assert_identical(y, getattr(native, method)(x))
    assert_identical(variables["batch_stats"]["norm"]["mean"], native.norm.mean[...])


def test_replaced_variables_are_carried_by_a_scan():
    class Cell(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            swapped = bridge.ToLinen(Swapping, strict=True, name="cell")(x)
            return carry, (swapped, bridge.ToLinen(Counter, strict=True, name="count")(x))

    scanned = nn.scan(Cell, variable_carry="cache", variable_broadcast="nnx")
    xs = jnp.arange(4.0)
    model = scanned()
    trees = {"cell": variables_of(Swapping())["cache"], "count": variables_of(Counter())["cache"]}
    variables = {"cache": trees}
    (_, (swapped, counted)), updates = model.apply(variables, None, xs, mutable=["cache"])
    cell, count = Swapping(), Counter()
    expected = [[float(module(x)) for x in xs] for module in (cell, count)]
    assert [list(map(float, swapped)), list(map(float, counted))] == expected
    assert leaves({"cache": updates["cache"]["cell"]}) == state(cell)
    assert leaves({"cache": updates["cache"]["count"]}) == state(count)


def test_a_decode_cache_is_created_and_reset_by_a_method():
    options = {"num_heads": 2, "in_features": 4, "decode": True}
    native = nnx.MultiHeadAttention(**options, rngs=nnx.Rngs(0))
    module = bridge.ToLinen(nnx.MultiHeadAttention, kwargs=options, strict=True)
    variables = {"params": nnx.to_pure_dict(nnx.state(native, nnx.Param))}
    shape, x = (1, 3, 4), jnp.ones((1, 1, 4))

    def run(variables, *args, **kwargs):
        output, updates = module.apply(variables, *args, mutable=["cache"], **kwargs)
        return output, {**variables, **updates}

    _, variables = run(variables, shape, nnx_method="init_cache")
    native.init_cache(shape)
    for expected in (1, 2):
        y, variables = run(variables, x)
        assert_identical(y, native(x))
        assert int(variables["cache"]["cache_index"]) == expected
    _, variables = run(variables, shape, nnx_method="init_cache")
    native.init_cache(shape)
    assert_identical(variables["cache"], nnx.to_pure_dict(nnx.state(native, nnx.Cache)))


def test_init_by_the_method_that_creates_a_cache_creates_it():
    options = {"num_heads": 2, "in_features": 4, "decode": True}
    native = nnx.MultiHeadAttention(**options, rngs=nnx.Rngs(KEY))
    native.init_cache((1, 3, 4))
    module = bridge.ToLinen(nnx.MultiHeadAttention, kwargs=options)
    variables = module.init(KEY, (1, 3, 4), nnx_method="init_cache")
    for collection, kind in (("cache", nnx.Cache), ("params", nnx.Param)):
        expected = nnx.to_pure_dict(nnx.state(native, kind))
        assert_identical(variables[collection], expected)


def test_what_is_sown_two_modules_below_a_wrapped_module_comes_back():
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("intermediates", "hidden", x)
            return x * self.param("scale", nn.initializers.ones, ())

    class Middle(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Inner(name="inner")(x)

    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Middle(name="middle")(x)

    module = bridge.to_linen(bridge.ToNNX, Deep())
    variables = module.init(KEY, jnp.float32(1))
    params = {"params": variables["params"]}
    for sown in ({}, {}):
        _, updates = module.apply({**variables, **sown}, jnp.float32(2), mutable=["intermediates"])
        _, expected = Deep().apply(params, jnp.float32(2), mutable=["intermediates"])
        assert_identical(updates["intermediates"], expected["intermediates"])
    _, updates = module.apply({**variables, **updates}, jnp.float32(3), mutable=["intermediates"])
    _, expected = Deep().apply({**params, **expected}, jnp.float32(3), mutable=["intermediates"])
    assert_identical(updates["intermediates"], expected["intermediates"])


def test_a_list_that_a_call_writes_into_comes_back_and_the_given_one_stays():
    class Listing(nnx.Module):
        def __init__(self):
            self.items = nnx.Cache([jnp.float32(1)])

        def __call__(self, x):
            self.items.get_value().append(x)
            return sum(self.items.get_value())

    native = Listing()
    module = bridge.ToLinen(Listing, strict=True)
    variables = {"cache": {"items": [jnp.float32(1)]}}
    given = variables["cache"]["items"]
    for x in (1.0, 2.0):
        y, updates = module.apply(variables, jnp.float32(x), mutable=["cache"])
        assert float(y) == float(native(jnp.float32(x)))
        variables = {**variables, **updates}
    assert len(given) == 1


def test_a_static_list_that_a_call_writes_into_belongs_to_that_call():
    class Noting(nnx.Module):
        def __init__(self):
            self.seen = []

        def __call__(self, x):
            self.seen.append("call")
            return x + len(self.seen)

    module = bridge.ToLinen(Noting)
    with pytest.warns(bridge.BridgeWarning, match="seen"):
        assert [float(module.apply({}, jnp.float32(0))) for _ in range(3)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("options", [{"ref": True}, {"hijax": True}], ids=str)
def test_references_and_hijax_variables_come_out_of_a_call_as_plain_ones(options):
    class Held(nnx.Module):
        def __init__(self):
            self.held = nnx.BatchStat(jnp.float32(1), **options)

        def __call__(self, x):
            if not hasattr(self, "made"):
                self.made = nnx.data({"a": nnx.Cache(x)})
            self.made["a"][...] += self.held[...]
            return x + self.made["a"][...]

    native = Held()
    module, variables = bridge.ToLinen.from_module(native, strict=True)
    for x in (1.0, 2.0):
        y, updates = module.apply(variables, jnp.float32(x), mutable=["cache", "nnx"])
        assert float(y) == float(native(jnp.float32(x)))
        variables = {**variables, **updates}
    stored = variables["nnx"]["graphdef"]
    (held,) = (slot.metadata for slot in stored.slots if slot.path == ("held",))
    assert (held["ref"], held["hijax"]) == (False, False)


def test_a_parameter_of_another_shape_is_known_to_the_next_call():
    class Widening(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(2))

        def __call__(self, x):
            self.w.set_value(jnp.concatenate([self.w[...], x[None]]))
            return self.w[...].sum()

    native = Widening()
    module = bridge.ToLinen(Widening, strict=True)
    variables = {"params": {"w": jnp.ones(2)}}
    with pytest.raises(bridge.LostUpdateError, match="w"):
        module.apply(variables, jnp.float32(1), mutable=["params"])
    for x in (1.0, 2.0):
        y, updates = module.apply(variables, jnp.float32(x), mutable=["params", "nnx"])
        assert float(y) == float(native(jnp.float32(x)))
        variables = {**variables, **updates}


INPUT = jnp.arange(3.0)


class Clears(nnx.Module):
    """Removes a cache, replaces a leaf by a subtree, and a subtree by a leaf."""

    def __init__(self, *, rngs):
        self.kept = nnx.Cache(jnp.ones(()))
        self.cleared = nnx.Cache(jnp.ones(()))
        self.grown = nnx.Cache(jnp.ones(()))
        self.shrunk = nnx.Dict(a=nnx.Cache(jnp.ones(())))

    def __call__(self, x, change="none"):
        if change == "clear":
            del self.cleared
        elif change == "replace":
            self.grown = nnx.Dict(a=nnx.Cache(jnp.full((), 2.0)))
            self.shrunk = nnx.Cache(jnp.full((), 3.0))
        self.kept[...] += 1
        return x * sum(jax.tree.leaves(nnx.to_pure_dict(nnx.state(self))))


class Lifting(nn.Module):
    lift: str
    strict: bool | None = None

    @nn.compact
    def __call__(self, x, change="none"):
        # What is lost is said once for each place.
        part = bridge.ToLinen(Clears, strict=self.strict, name=self.lift)
        return LIFTS[self.lift](lambda module, x: module(x, change))(part, x)


LIFTS = {"jit": nn.jit, "remat": nn.remat}


@pytest.mark.parametrize("lift", ["jit", "remat"])
def test_state_that_a_lifted_transform_keeps_is_said_to_be_lost_or_raises(lift):
    model = Lifting(lift)
    variables = model.init(KEY, INPUT)
    with pytest.warns(bridge.BridgeWarning, match=r"removed cache/cleared in a lifted transform"):
        output, updates = model.apply(variables, INPUT, "clear", mutable=["cache", "nnx"])
    native = Clears(rngs=nnx.Rngs(KEY))
    assert (output == native(INPUT, "clear")).all()
    # The next call finds what was removed, and the definition that has it.
    native.cleared = nnx.Cache(jnp.ones(()))
    output, _ = model.apply({**variables, **updates}, INPUT, mutable=["cache", "nnx"])
    assert (output == native(INPUT)).all()
    with pytest.raises(bridge.LostUpdateError, match="cache/cleared"):
        model.clone(strict=True).apply(variables, INPUT, "clear", mutable=["cache", "nnx"])


@pytest.mark.parametrize("lift", ["jit", "remat"])
def test_state_that_takes_another_place_comes_out_of_a_lifted_transform(lift):
    model = Lifting(lift, strict=True)
    variables = model.init(KEY, INPUT)
    native = Clears(rngs=nnx.Rngs(KEY))
    for change in ("none", "replace", "none"):
        output, updates = model.apply(variables, INPUT, change, mutable=["cache", "nnx"])
        variables = {**variables, **updates}
        assert (output == native(INPUT, change)).all()
