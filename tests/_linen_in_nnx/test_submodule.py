"""A submodule of a ToNNX is the dict that NNX has there, and the Linen submodule."""

import copy
import functools
import json
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

import bridge
from tests import models
from tests.models import assert_identical, snapshot

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
KEY = jax.random.key(7)


def wrapped(module, **options):
    return bridge.ToNNX(module, KEY, **options).lazy_init(X)


def plain(model, name):
    """The dict itself, as NNX sees it."""
    return vars(model)[name]


class Table(nn.Module):
    """Fields, a property, a constant, methods and submodules made in `setup`."""

    n_out: int = 3
    scale = 2.0

    def setup(self):
        self.inner = nn.Dense(self.n_out)
        self.pair = [nn.Dense(4), nn.Dense(4)]
        self.named = {"a": nn.Dense(4), "b": models.LinenActivation()}
        self.also_inner = self.inner
        self.offsets = jnp.arange(3.0)

    def __call__(self, x):
        for layer in self.pair:
            x = layer(x)
        return self.inner(self.named["b"](self.named["a"](x)))

    def twice(self, x):
        return 2 * self(x)

    @property
    def n_in(self):
        return self.n_out + 1

    @property
    def width(self):
        return self.inner.features

    @property
    def broken(self):
        return self.n_out.missing

    @staticmethod
    def helper(x):
        return x + 1


class Holds(nn.Module):
    """A `Table` made in `setup`, and others as fields."""

    fields: tuple[nn.Module, ...] = (nn.Dense(4), nn.Dense(4))
    field: nn.Module | None = None

    def setup(self):
        self.enc = Table()
        self.blocks = [nn.Dense(4) for _ in range(2)]

    def __call__(self, x):
        for layer in (*self.blocks, *self.fields):
            x = layer(x)
        return self.enc(x if self.field is None else self.field(x))


def bound(model):
    return model.to_nnx__module.bind(model.linen_variables())


def test_it_is_the_dict_that_nnx_has_there():
    model = wrapped(Holds())
    enc, native = model.enc, plain(model, "enc")
    assert isinstance(enc, dict)
    assert enc == native
    assert native == enc
    assert (enc != native) is (native != enc) is False
    assert enc != {}
    assert list(enc) == list(native)
    assert list(reversed(enc)) == list(reversed(native))
    assert enc.keys() == native.keys()
    assert list(enc.values()) == list(native.values())
    assert dict(enc) == native
    assert {**enc} == native
    assert dict(enc.items()) == native
    assert len(enc) == len(native)
    assert "inner" in enc
    assert "bogus" not in enc
    assert enc.get("bogus", 3) == 3
    assert flatten_dict(enc) == flatten_dict(native)
    assert unflatten_dict(flatten_dict(enc)) == native
    assert repr(enc) == repr(native)
    assert bool(enc) is True
    assert json.dumps(enc, default=str) == json.dumps(native, default=str)


def test_merging_with_other_dicts_gives_plain_dicts():
    model = wrapped(Holds())
    enc, native = model.enc, plain(model, "enc")
    for merged in (enc | {}, {} | enc, enc | enc):
        assert type(merged) is dict
        assert merged == native
    assert enc | {"more": 1} == native | {"more": 1}
    assert {"inner": 1} | enc == native
    into = {}
    into.update(enc)
    assert into == native
    with pytest.raises(TypeError):
        enc | 3


def test_copies_belong_to_no_model():
    model = wrapped(Holds())
    enc, native = model.enc, plain(model, "enc")
    for made in (enc.copy(), copy.copy(enc)):
        assert type(made) is dict
        assert made == native
        made["inner"].clear()
    before = snapshot(model)
    deep = copy.deepcopy(enc)
    assert type(deep) is dict
    assert deep["inner"]["kernel"] is not enc["inner"]["kernel"]
    assert_identical(nnx.to_pure_dict(nnx.state(deep)), nnx.to_pure_dict(nnx.state(native)))
    loaded = pickle.loads(pickle.dumps(enc))
    assert type(loaded) is dict
    assert_identical(nnx.to_pure_dict(nnx.state(loaded)), nnx.to_pure_dict(nnx.state(native)))
    assert snapshot(model) == before


def test_jax_and_nnx_see_the_tree_of_the_dict():
    model = wrapped(Holds())
    enc, native = model.enc, plain(model, "enc")
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    assert jax.tree.leaves(enc, is_leaf=is_variable) == jax.tree.leaves(native, is_leaf=is_variable)
    paths = jax.tree_util.tree_leaves_with_path
    assert [p for p, _ in paths(enc)] == [p for p, _ in paths(native)]
    assert type(jax.tree.map(lambda x: x, enc)) is dict
    assert_identical(nnx.state(enc), nnx.state(native))


def test_writes_by_item_and_by_attribute_reach_the_model():
    module = nn.Sequential([nn.Dense(4), nn.Dense(3)])
    model = wrapped(module)
    variables = model.linen_variables()
    kernel, bias = jnp.ones((4, 4)), jnp.full((4,), 2.0)
    model.layers_0.kernel = nnx.Param(kernel)
    model.layers_0["bias"] = nnx.Param(bias)
    changed = {**variables["params"], "layers_0": {"kernel": kernel, "bias": bias}}
    assert_identical(model.linen_variables(), {"params": changed})
    assert_identical(model(X), module.apply({"params": changed}, X))
    assert model.layers_0.kernel is plain(model, "layers_0")["kernel"]
    model.layers_0.update({"bias": nnx.Param(bias)}, kernel=nnx.Param(kernel))
    model.layers_0 |= {"kernel": nnx.Param(kernel * 2)}
    assert_identical(model.layers_0["kernel"][...], kernel * 2)
    del model.layers_0.bias
    assert "bias" not in plain(model, "layers_0")
    assert model.layers_0.pop("kernel")[...].shape == (4, 4)
    assert model.layers_0 == {}
    with pytest.raises(AttributeError, match="kernel"):
        del model.layers_0.kernel


@pytest.mark.parametrize("value", [jnp.ones((4, 4)), "text", {"deep": 3}])
def test_what_is_no_variable_is_refused(value):
    model = wrapped(nn.Sequential([nn.Dense(4), nn.Dense(3)]))
    before = snapshot(model)
    with pytest.raises(bridge.InvalidModuleError, match=r"(?s)layers_0.*nnx\.Param"):
        model.layers_0.kernel = value
    with pytest.raises(bridge.InvalidModuleError, match=r"(?s)layers_0.*nnx\.Param"):
        model.layers_0["kernel"] = value
    with pytest.raises(AttributeError, match="keys"):
        model.layers_0.keys = nnx.Param(1)
    assert snapshot(model) == before


def test_its_attributes_are_those_that_the_model_has_now():
    class Grows(nn.Module):
        @nn.compact
        def __call__(self, x):
            return models.LinenCounter(name="part")(x)

    model = wrapped(Grows())
    part = model.part
    assert not hasattr(part, "seen")
    model(X, mutable=["intermediates", "counter"])
    assert part.seen is plain(model, "part")["seen"]
    model.part = {"Dense_0": part["Dense_0"]}
    assert not hasattr(part, "seen")
    assert set(model.part) == {"Dense_0"}
    first, second = model.part, model.part
    first["more"] = nnx.Param(jnp.ones(()))
    assert second.more is first.more is model.part["more"]
    del model.part
    assert not hasattr(first, "more")


def test_a_write_where_there_are_no_variables_yet_makes_them():
    model = bridge.ToNNX(Holds())
    model.enc["inner"] = {"kernel": nnx.Param(jnp.ones((4, 3)))}
    model.enc.inner.bias = nnx.Param(jnp.zeros(3))
    assert_identical(model.enc.inner(X), X @ jnp.ones((4, 3)))
    assert nnx.to_pure_dict(nnx.state(model)).keys() == {"enc"}


@pytest.mark.parametrize("initialised", [False, True])
def test_a_submodule_of_one_model_is_assigned_to_another(initialised):
    module = nn.Sequential([nn.Dense(4), nn.Dense(3)])
    a = wrapped(module)
    b = bridge.ToNNX(module, jax.random.key(8))
    if initialised:
        b.lazy_init(X)
    b.layers_0 = a.layers_0
    b.layers_1 = a.layers_1 if not initialised else b.layers_1
    params = {"layers_0": a.linen_variables()["params"]["layers_0"]}
    params["layers_1"] = (b if initialised else a).linen_variables()["params"]["layers_1"]
    assert_identical(b(X), module.apply({"params": params}, X))
    assert b.layers_0["kernel"] is a.layers_0["kernel"]
    assert type(plain(b, "layers_0")) is dict
    assert_identical(nnx.merge(*nnx.split(b))(X), b(X))


class Parts(nn.Module):
    """Submodules in a list, a dict and a nested tuple, here and one level below."""

    depth: int = 1

    def setup(self):
        self.blocks = [nn.Dense(4), nn.Dense(4)]
        self.heads = {"a": nn.Dense(4), "b": (nn.Dense(4), nn.relu)}
        self.below = Parts(self.depth - 1) if self.depth else None

    def __call__(self, x):
        for layer in (*self.blocks, self.heads["a"], *self.heads["b"]):
            x = layer(x)
        return self.below(x) if self.below else x


REORDERED = {
    "blocks": lambda m: m.blocks[::-1],
    "heads": lambda m: {"a": m.heads["b"][0], "b": (m.heads["a"], nn.relu)},
    "others": lambda m: m.blocks,
}


# A mapped tree has plain dicts in it, which nothing tells from others where Linen has no such list.
TOGETHER = [*((name, False) for name in REORDERED), ("blocks", True), ("heads", True)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("name", "as_dicts"), TOGETHER)
def test_submodules_in_a_list_or_dict_are_not_assigned_together(depth, name, as_dicts):
    a, b = wrapped(Parts()), wrapped(Parts())
    source, target = (a.below, b.below) if depth else (a, b)
    before = snapshot(b)
    value = REORDERED[name](source)
    if as_dicts:
        value = jax.tree.map(lambda x: x, value)
    with pytest.raises(bridge.InvalidModuleError, match=rf"(?s){name}.*by its own name"):
        setattr(target, name, value)
    assert snapshot(b) == before


@pytest.mark.parametrize("depth", [0, 1])
def test_submodules_in_a_list_are_assigned_one_by_one(depth):
    module = Parts()
    model = wrapped(module)
    params = model.linen_variables()["params"]
    target, own = (model.below, params["below"]) if depth else (model, params)
    first = target.blocks_0.copy()
    target.blocks_0 = target.blocks_1.copy()
    target.blocks_1 = first
    own = {**own, "blocks_0": own["blocks_1"], "blocks_1": own["blocks_0"]}
    changed = {**params, "below": own} if depth else own
    assert_identical(model(X), module.apply({"params": changed}, X))


CALLS: dict[str, Any] = {
    "enc": lambda m: m.enc(X),
    "enc.twice": lambda m: m.enc.twice(X),
    "enc.inner": lambda m: m.enc.inner(X),
    "enc.also_inner": lambda m: m.enc.also_inner(X),
    "enc.pair": lambda m: m.enc.pair[1](m.enc.pair[0](X)),
    "enc.named": lambda m: m.enc.named["b"](m.enc.named["a"](X)),
    "enc.named.method": lambda m: m.enc.named["b"].twice(X),
    "blocks": lambda m: m.blocks[0](X),
    "blocks[-1]": lambda m: m.blocks[-1](X),
    "each": lambda m: [block(X) for block in m.blocks],
    "fields": lambda m: m.fields[1](X),
    "field": lambda m: m.field(X),
}


@pytest.mark.parametrize("name", CALLS)
def test_submodules_are_called_as_those_of_a_bound_linen_module(name):
    model = wrapped(Holds(field=nn.Dense(4)))
    assert_identical(CALLS[name](model), CALLS[name](bound(model)))


NAMED: dict[str, Any] = {
    "blocks_0": (lambda m: m.blocks_0(X), lambda m: m.blocks[0](X)),
    "fields_1": (lambda m: m.fields_1(X), lambda m: m.fields[1](X)),
    "enc.pair_1": (lambda m: m.enc.pair_1(X), lambda m: m.enc.pair[1](X)),
    "enc.named_a": (lambda m: m.enc.named_a(X), lambda m: m.enc.named["a"](X)),
    "enc.named_b": (lambda m: m.enc.named_b(X), lambda m: m.enc.named["b"](X)),
}


@pytest.mark.parametrize("name", NAMED)
def test_submodules_are_called_by_the_names_of_their_variables(name):
    model = wrapped(Holds())
    by_name, in_linen = NAMED[name]
    assert_identical(by_name(model), in_linen(bound(model)))


READS: dict[str, Any] = {
    "enc.n_out": lambda m: m.enc.n_out,
    "enc.scale": lambda m: m.enc.scale,
    "enc.n_in": lambda m: m.enc.n_in,
    "enc.width": lambda m: m.enc.width,
    "enc.offsets": lambda m: m.enc.offsets,
    "enc.inner.features": lambda m: m.enc.inner.features,
    "enc.pair[0].features": lambda m: m.enc.pair[0].features,
    "enc.helper": lambda m: m.enc.helper(1),
    "blocks": lambda m: len(m.blocks),
    "fields": lambda m: m.fields[0].features,
    "field": lambda m: m.field,
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("initialised", [False, True])
def test_attributes_are_those_of_a_bound_linen_module(name, initialised):
    model = wrapped(Holds())
    expected = READS[name](bound(model))
    found = READS[name](model if initialised else bridge.ToNNX(Holds()))
    assert_identical(found, expected) if isinstance(expected, jax.Array) else None
    assert isinstance(expected, jax.Array) or found == expected


def test_what_is_not_there_raises():
    for model in (wrapped(Holds()), bridge.ToNNX(Holds())):
        for part in (model, model.enc, model.enc.inner, model.blocks[0]):
            assert not hasattr(part, "bogus")
        with pytest.raises(AttributeError, match=r"ToNNX\(Holds\)\.enc has no .*'bogus'"):
            _ = model.enc.bogus
        with pytest.raises(KeyError):
            model.enc["bogus"]


def test_a_submodule_of_a_compact_module_says_why_it_cannot_be_called():
    model = wrapped(models.LinenMLP())
    assert model.Dense_0.kernel.shape == (5, 3)
    assert not hasattr(model.Dense_0, "features")
    with pytest.raises(bridge.InvalidMethodError) as raised:
        model.Dense_0(X)
    for part in ("Dense_0", "LinenMLP", "compact", "setup", "capture_intermediates"):
        assert part in str(raised.value)
    assert "scope" not in str(raised.value)
    model.eval()
    with pytest.raises(bridge.InvalidMethodError, match="compact"):
        model.Dense_0(X)


def test_a_name_is_found_anew_when_a_field_was_changed_in_place():
    class Config:
        names = ("a",)

    class Makes(nn.Module):
        config: Any

        def setup(self):
            for name in self.config.names:
                setattr(self, name, models.LinenActivation())

        def __call__(self, x):
            return x

    config = Config()
    model = wrapped(Makes(config))
    assert hasattr(model, "a")
    assert not hasattr(model, "b")
    config.names = ("b",)
    assert hasattr(model, "b")
    assert not hasattr(model, "a")
    model.config = Config()
    assert hasattr(model, "a")


def test_an_error_inside_of_a_property_is_reported_as_it_is():
    model = wrapped(Holds())
    table = wrapped(Table())
    for read in (lambda: model.enc.broken, lambda: table.broken):
        with pytest.raises(AttributeError, match="'int' object has no attribute 'missing'"):
            read()

    class Mine(bridge.ToNNX):
        @property
        def wrong(self):
            return self.to_nnx__module.no_such_thing

    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = Mine(nn.Dense(2)).wrong


def test_setup_that_reads_variables_is_known_before_there_are_any():
    class Reads(nn.Module):
        def setup(self):
            self.table = self.param("table", nn.initializers.ones, (4,))
            self.part = nn.Dense(self.table.shape[0])

        def __call__(self, x):
            return self.part(x) * self.table[None]

    model = bridge.ToNNX(Reads(), KEY)
    assert model.part.features == 4
    assert not hasattr(model, "bogus")
    assert not hasattr(model, "table")
    model.lazy_init(X)
    assert_identical(model.part(X), bound(model).part(X))
    assert isinstance(model.table, nnx.Param)


def test_a_submodule_is_initialised_by_its_own_call():
    class Parent(nnx.Module):
        def __init__(self):
            self.linen = bridge.ToNNX(Holds(), KEY)

        def __call__(self, x):
            return self.linen.enc.inner(x)

    model = bridge.lazy_init(Parent(), X)
    expected = Holds().init(KEY, X, method=lambda m, x: m.enc.inner(x))
    assert_identical(model.linen.linen_variables(), expected)


def test_a_submodule_can_be_given_to_another_wrapper():
    model = wrapped(Holds())
    inner = bridge.ToNNX.from_variables(Table(), {"params": nnx.to_pure_dict(nnx.state(model.enc))})
    assert_identical(inner(X), model.enc(X))
    direct = bridge.ToNNX(Table())
    for name, value in model.enc.items():
        setattr(direct, name, value)
    assert_identical(direct(X), model.enc(X))


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
def test_jax_transforms_take_a_submodule_as_a_function(transform):
    class Adds(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            # Small integers, so that the sums are exact.
            return (-x if train else x) + self.param("bias", nn.initializers.ones, (1, 4))

    class Above(nn.Module):
        def setup(self):
            self.part = Adds()

        def __call__(self, x):
            return self.part(x)

    x = jnp.arange(8.0).reshape(2, 4)
    model = bridge.ToNNX(Above(), KEY).lazy_init(x)
    kept = []
    for train in (False, True):
        (model.train if train else model.eval)()
        model.part.bias[...] = jnp.full((1, 4), 2.0 + train)
        variables = {"params": model.linen_variables()["params"]["part"]}
        kept.append(transform(model.part))
        assert_identical(kept[-1](x), Adds().apply(variables, x, train=train))


@pytest.mark.parametrize("path", ["kernel", "Dense_0.kernel"])
@pytest.mark.parametrize("hook", ["on_get_value", "on_set_value"])
def test_a_variable_with_hooks_that_linen_does_not_run_is_said(hook, path):
    class Compact(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x)

    inner = nn.Dense(3) if path == "kernel" else Compact()
    model = bridge.ToNNX(inner, rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 3)))
    with pytest.warns(UserWarning, match="hooks are deprecated"):
        hooked = nnx.Param(jnp.ones((3, 3)), **{hook: lambda variable, value: 2 * value})
    owner = model if path == "kernel" else model.Dense_0
    with pytest.warns(bridge.BridgeWarning, match=f"{hook} was put into ToNNX"):
        owner.kernel = hooked
    owner.kernel = nnx.Param(jnp.ones((3, 3)))
    assert (model(jnp.ones((1, 3))) == 3.0).all()


NO_ARGUMENTS = ("keys", "values", "items", "copy", "clear", "popitem")
DICT_METHODS = (*NO_ARGUMENTS, "get", "pop", "setdefault", "update")


class LinenDictNames(nn.Module):
    """Has submodules, or methods, that are called like the methods of a dict."""

    is_deep: bool = False

    def setup(self):
        for name in DICT_METHODS:
            setattr(self, name, LinenDictNames() if self.is_deep else nn.Dense(4))

    def __call__(self, x):
        for name in DICT_METHODS:
            x = getattr(self, name)(x)
        return x


class LinenDictMethods(nn.Module):
    def setup(self):
        self.dense = nn.Dense(4)

    def __call__(self, x):
        return self.dense(x)


for _name in DICT_METHODS:
    setattr(LinenDictMethods, _name, lambda self, x, scale=2: self.dense(x) * scale)


class LinenOuter(nn.Module):
    inner: nn.Module

    def __call__(self, x):
        return self.inner(x)


@functools.cache
def held(inner):
    """A model that holds a module, and the Linen model bound to the same variables."""
    model = wrapped(LinenOuter(inner))
    return model, LinenOuter(inner).bind(model.linen_variables())


@pytest.mark.parametrize("name", DICT_METHODS)
@pytest.mark.parametrize(
    "inner", [LinenDictNames(), LinenDictNames(is_deep=True), LinenDictMethods()]
)
def test_a_part_with_the_name_of_a_dict_method_is_called(name, inner):
    model, bound = held(inner)
    # Linen runs `setup` at the first name that its class does not have, as it has `copy`.
    assert hasattr(bound.inner, "keys")
    before = snapshot(model)
    assert_identical(getattr(model.inner, name)(X), getattr(bound.inner, name)(X))
    keyword = "x" if isinstance(inner, LinenDictMethods) else "inputs"
    if not isinstance(inner, LinenDictNames) or not inner.is_deep:
        assert_identical(getattr(model.inner, name)(**{keyword: X}), getattr(bound.inner, name)(X))
    else:
        deep, bound_deep = getattr(getattr(model.inner, name), name), getattr(bound.inner, name)
        assert hasattr(bound_deep, "keys")
        assert_identical(deep(X), getattr(bound_deep, name)(X))
        assert deep.kernel is deep["kernel"]
        assert getattr(model.inner, name)[name].kernel is deep.kernel
    assert snapshot(model) == before


def test_a_part_with_the_name_of_a_dict_method_leaves_the_dict_as_it_is():
    model = wrapped(LinenOuter(LinenDictNames()))
    own, held = model.inner, plain(model, "inner")
    assert list(own.keys()) == list(held) == list(dict(own)) == [*{**own}]
    assert [id(v) for v in own["get"].values()] == [id(v) for v in held["get"].values()]
    assert dict(own.items()) == held == own.copy()
    assert flatten_dict(own) == flatten_dict(held)
    assert own.get("nothing", 3) == 3
    assert own.get("keys") == held["keys"]
    assert_identical(jax.tree.leaves(own.keys), jax.tree.leaves(held["keys"]))
    taken = own.pop("update")
    assert "update" not in own
    assert sorted(taken) == ["bias", "kernel"]
    own.update({"update": taken})
    assert own.setdefault("update") == taken == held["update"]
    assert_identical(model(X), LinenOuter(LinenDictNames()).apply(model.linen_variables(), X))
    name, last = own.popitem()
    assert sorted(last) == ["bias", "kernel"]
    assert name not in own
    own.clear()
    assert own == {}


class LinenMemory(nn.Module):
    """Has variables that are called like the methods of a dict."""

    def setup(self):
        for name in DICT_METHODS:
            setattr(self, name, self.param(name, nn.initializers.normal(), (1, 4)))

    def __call__(self, x):
        for name in DICT_METHODS:
            x = x + getattr(self, name)
        return x


@pytest.mark.parametrize("name", sorted({*DICT_METHODS} - {"items"}))
def test_a_variable_with_the_name_of_a_dict_method_is_read(name):
    model = wrapped(LinenOuter(LinenMemory()))
    variables = LinenOuter(LinenMemory()).init(KEY, X)
    variable = getattr(model.inner, name)
    assert variable is plain(model, "inner")[name]
    assert_identical(variable[...], variables["params"]["inner"][name])
    assert flatten_dict(model.inner) == flatten_dict(plain(model, "inner"))
    assert model.inner | {} == {**model.inner} == plain(model, "inner")
    model.inner = model.inner | {}
    assert_identical(model(X), LinenOuter(LinenMemory()).apply(variables, X))
    zero = jnp.zeros((1, 4))
    setattr(model.inner, name, nnx.Param(zero))
    variables["params"]["inner"][name] = zero
    assert_identical(getattr(model.inner, name)[...], zero)
    assert_identical(model(X), LinenOuter(LinenMemory()).apply(variables, X))


def test_a_part_that_is_made_in_a_call_says_so_whatever_its_name_is():
    class Compact(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, name="keys")(x)

    model = wrapped(LinenOuter(Compact()))
    with pytest.raises(bridge.InvalidMethodError, match="keys"):
        model.inner.keys(X)
