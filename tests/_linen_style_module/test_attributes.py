"""A read returns what was assigned, and a part lives at its Linen name, whatever the class has."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge as peer

import bridge
from tests.models import assert_close

X = np.array([[1.0, 2.0, 3.0]], np.float32)
KEY = jax.random.key(0)
INIT = nn.initializers.normal(1.0)
# All that Linen, NNX and the peer know of a module by a name.
NAMES = sorted(
    {n for kind in (nn.Module, peer.Module, bridge.Module) for n in dir(kind) if n[0] != "_"}
    - {n for n in dir(bridge.Module) if n.startswith("bridge__")}
)
PROPERTIES = [n for n in NAMES if isinstance(getattr(bridge.Module, n, None), property)]


def shapes(variables):
    return jax.tree.map(np.shape, nn.unbox(variables))


def scale_class(b):
    class Scale(b.Module):
        factor: float = 2.0

        @b.compact
        def __call__(self, x):
            return x * self.factor * jnp.asarray(self.param("s", INIT, (1, 3)))

    return Scale


SCALES = {b: scale_class(b) for b in (nn, bridge)}


def a_list_for_a_field_with_a_default(b):
    class Model(b.Module):
        layers: tuple = ()

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    return Model([SCALES[b](), SCALES[b]()])


def a_tied_submodule_for_a_field_with_a_default(b):
    class Model(b.Module):
        encoder: object = None
        decoder: object = None

        def __call__(self, x):
            return self.encoder(x) if self.decoder is None else self.decoder(self.encoder(x))

    shared = SCALES[b]()
    return Model(shared, shared)


def a_list_for_a_name_of_the_class(b):
    class Model(b.Module):
        blocks = None

        def setup(self):
            self.blocks = [SCALES[b](), {"a": SCALES[b](1.0)}]

        def __call__(self, x):
            return x if self.blocks is None else self.blocks[1]["a"](self.blocks[0](x))

    return Model()


def a_parameter_for_a_name_of_the_class(b):
    class Model(b.Module):
        gain = other = None

        def setup(self):
            self.gain = self.param("gain", INIT, (1, 3))
            self.other = self.param("another", INIT, (1, 3))

        def __call__(self, x):
            return x * jnp.asarray(self.gain) * jnp.asarray(self.other)

    return Model()


def an_alias_for_a_name_of_the_class(b):
    class Model(b.Module):
        again = None

        def setup(self):
            self.first = SCALES[b]()
            self.again = self.first

        def __call__(self, x):
            return self.first(x) if self.again is None else self.again(self.first(x))

    return Model()


def parts_named_as_fields_and_methods(b):
    class Model(b.Module):
        features: int = 3
        w: int = 5

        def head(self):
            return self.features + 1

        @b.compact
        def __call__(self, x):
            x = SCALES[b](name="features")(x) * self.features * self.w * self.head()
            x = SCALES[b](name="head")(x) * jnp.asarray(self.param("w", INIT, (1, 3)))
            return SCALES[b](name="name")(x) * (1 if self.name is None else 2)

    return Model()


def a_field_that_is_a_method_of_nnx(b):
    class Model(b.Module):
        train: bool
        sow: int

        @b.compact
        def __call__(self, x):
            return SCALES[b](name="eval")(x) * (self.sow if self.train else 0)

    return Model(True, sow=3)


def names_of_all_kinds(b):
    class Model(b.Module):
        layers: tuple = ()
        decoder = None
        blocks = None
        features: int = 3
        train: bool = True

        def setup(self):
            self.blocks = [SCALES[b](), {"a": SCALES[b](1.0)}]
            self.decoder = self.blocks[0]
            self.gain = self.param("w2", INIT, (1, 3))
            self.eval = self.param("eval", INIT, (1, 3))

        @b.compact
        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            x = self.decoder(self.blocks[1]["a"](self.blocks[0](x))) * self.features
            for name in ("features", "apply", "sow", "name"):
                x = SCALES[b](name=name)(x)
            assert self.train is True
            x = x * jnp.asarray(self.gain) * jnp.asarray(self.eval)
            return x * jnp.asarray(self.param("variable", INIT, (1, 3)))

    return Model(layers=[SCALES[b](), SCALES[b]()])


SAME = [
    a_list_for_a_field_with_a_default,
    a_tied_submodule_for_a_field_with_a_default,
    a_list_for_a_name_of_the_class,
    a_parameter_for_a_name_of_the_class,
    an_alias_for_a_name_of_the_class,
    parts_named_as_fields_and_methods,
    a_field_that_is_a_method_of_nnx,
    names_of_all_kinds,
]


@pytest.mark.parametrize("make", SAME)
def test_what_is_assigned_is_read_whatever_the_class_has(make):
    variables = make(nn).init(KEY, X)
    y = make(nn).apply(variables, X)
    assert shapes(make(bridge).init(0, X)) == shapes(variables)
    assert np.array_equal(make(bridge).apply(variables, X), y)
    kept = make(bridge).bind(variables)
    for _ in range(2):
        assert np.array_equal(kept(X), y)
    assert shapes(kept.variables.unfreeze()) == shapes(variables)


def submodule_of_name(name, b):
    class Model(b.Module):
        @b.compact
        def __call__(self, x):
            return SCALES[b](name=name)(x) + SCALES[b](name=f"{name}_0")(x)

    return Model()


@pytest.mark.parametrize("name", [*PROPERTIES, "width"])
def test_a_part_may_not_have_the_name_of_a_property(name):
    class Model(bridge.Module):
        @property
        def width(self):
            return 3

        @bridge.compact
        def __call__(self, x, is_parameter):
            if is_parameter:
                return x * self.param(name, INIT, (1, 3))
            return SCALES[bridge](name=name)(x)

    for is_parameter in (True, False):
        with pytest.raises(bridge.NameInUseError, match=f"'{name}'"):
            Model().init(0, X, is_parameter)
    variables = {"params": {name: {"s": X}}}
    with pytest.raises(bridge.NameInUseError, match=f"'{name}'"):
        Model().apply(variables, X, False)


@pytest.mark.parametrize("name", sorted({*NAMES} - {*PROPERTIES}))
def test_a_submodule_of_a_compact_method_has_any_name(name):
    variables = submodule_of_name(name, nn).init(KEY, X)
    y = submodule_of_name(name, nn).apply(variables, X)
    model = submodule_of_name(name, bridge)
    assert shapes(model.init(0, X)) == shapes(variables)
    assert np.array_equal(model.apply(variables, X), y)
    kept = model.bind(variables)
    assert np.array_equal(kept(X), y)
    # The module's own method is still there, and the path is Linen's.
    assert shapes(kept.apply(variables, X, mutable=["params"])[1]) == shapes(variables)
    assert (name, "s") in nnx.to_flat_state(nnx.state(kept, nnx.Param)).paths


@pytest.mark.parametrize(
    "name", [n for n in NAMES if not (hasattr(nn.Module, n) or n in ("scope", "attr_priorities"))]
)
def test_a_field_without_a_default_has_none_from_nnx(name):
    space = {"__annotations__": {name: int}, "__call__": lambda self: getattr(self, name)}
    kind = type("Model", (bridge.Module,), {**space, "__module__": __name__})
    assert kind(3).apply({}) == 3
    with pytest.raises(TypeError, match=name):
        kind()


def made():
    variables = names_of_all_kinds(nn).init(KEY, X)
    model = names_of_all_kinds(bridge).bind(variables)
    model(X)
    return variables, model


def updated(model):
    other = nnx.clone(model)
    nnx.update(other, jax.tree.map(jnp.zeros_like, nnx.state(other, nnx.Param)))
    nnx.update(other, nnx.state(model))
    return other


def popped(model):
    other = nnx.clone(model)
    nnx.update(other, nnx.pop(other, nnx.Param))
    return other


def initialised_from_shapes(model):
    other = names_of_all_kinds(bridge)
    other.bridge__rngs = nnx.Rngs(0)
    bridge.lazy_init(other, jax.ShapeDtypeStruct(X.shape, X.dtype))
    nnx.update(other, nnx.state(model))
    return other


def jitted(model):
    nnx.jit(lambda model: model(X))(model)
    return model


COPIES = {
    "clone": nnx.clone,
    "merge": lambda model: nnx.merge(*nnx.split(model)),
    "deepcopy": copy.deepcopy,
    "tree": functools.partial(jax.tree.map, lambda leaf: leaf),
    "update": updated,
    "pop": popped,
    "shapes": initialised_from_shapes,
    "jit": jitted,
}


@pytest.mark.parametrize("kind", COPIES)
def test_names_are_the_same_in_every_copy(kind):
    variables, model = made()
    y = names_of_all_kinds(nn).apply(variables, X)
    other = COPIES[kind](model)
    assert np.array_equal(other(X), y)
    assert other.train is True
    assert other.features == 3
    assert other.decoder is other.blocks[0]
    assert shapes(other.variables.unfreeze()) == shapes(variables)


def test_names_are_the_same_in_tree_mode_and_below_grad_of_scan():
    variables, model = made()
    with nnx.set_graph_mode(False):
        tree = names_of_all_kinds(bridge).bind(variables)
        assert_close(nnx.jit(lambda model: model(X))(tree), model(X))

    def loss(model, x):
        run = lambda model, x: model(x) * 0.1  # noqa: E731
        scan = nnx.scan(run, in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=2)
        return scan(model, x).sum()

    def linen_loss(variables):
        apply = names_of_all_kinds(nn).apply
        return jax.lax.scan(lambda x, _: (apply(variables, x) * 0.1, None), X, length=2)[0].sum()

    found = nnx.jit(nnx.grad(loss))(model, jnp.asarray(X))
    expected = jax.jit(jax.grad(linen_loss))(variables)["params"]
    jax.tree.map(assert_close, nnx.to_pure_dict(found), expected)


def test_names_are_the_same_inside_of_a_linen_model():
    variables, model = made()
    wrapped, own = bridge.ToLinen.from_module(model)
    y = names_of_all_kinds(nn).apply(variables, X)
    assert np.array_equal(wrapped.apply(own, X), y)
    layers = [SCALES[bridge](), SCALES[bridge]()]
    created = bridge.to_linen(type(model), layers=layers).init(KEY, X)
    assert shapes(created["params"]) == shapes(variables["params"])


def test_a_module_with_any_names_is_pickled():
    model = Pickled(layers=[PickledScale(3.0)])
    assert pickle.loads(pickle.dumps(model)).layers[0].factor == 3.0


class PickledScale(bridge.Module):
    factor: float = 2.0


class Pickled(bridge.Module):
    layers: tuple = ()


def test_other_fields_of_modules_in_a_container_are_used_at_a_later_call():
    def make(b):
        class Sequence(b.Module):
            layers: object = ()

            def __call__(self, x):
                for layer in (*self.layers[0], self.layers[1]["a"]):
                    x = layer(x)
                return x

        class Model(b.Module):
            @b.compact
            def __call__(self, x, factor=1.0):
                scale = SCALES[b]
                return Sequence(((scale(factor), scale()), {"a": scale(factor)}))(x)

        return Model()

    variables = make(nn).init(KEY, X)
    kept = make(bridge).bind(variables)
    for factor in (1.0, 3.0, 1.0):
        y = make(nn).apply(variables, X, factor)
        assert np.array_equal(kept(X, factor), y)
        assert np.array_equal(make(bridge).apply(variables, X, factor), y)
    assert shapes(kept.variables.unfreeze()) == shapes(variables)
    assert kept.Sequence_0.layers[0][0].factor == 1.0


def test_a_class_that_is_made_in_a_call_is_set_up_in_it():
    def make(b):
        class Model(b.Module):
            @b.compact
            def __call__(self, x, factor=1.0):
                class Scale(b.Module):
                    def setup(self):
                        self.factor = factor
                        self.s = self.param("s", INIT, (1, 3))

                    def __call__(self, x):
                        return x * self.factor * jnp.asarray(self.s)

                return Scale()(x)

        return Model()

    variables = make(nn).init(KEY, X)
    kept = make(bridge).bind(variables)
    for factor in (1.0, 3.0, 1.0):
        assert np.array_equal(kept(X, factor), make(nn).apply(variables, X, factor))


def test_what_post_init_computes_of_other_fields_is_that_of_the_call():
    def make(b):
        class Scale(b.Module):
            factor: float

            def __post_init__(self):
                self.double = self.factor * 2
                super().__post_init__()

            @b.compact
            def __call__(self, x):
                return x * self.double * jnp.asarray(self.param("s", INIT, (1, 3)))

        class Model(b.Module):
            @b.compact
            def __call__(self, x, factor=1.0):
                return Scale(factor)(x)

        return Model()

    variables = make(nn).init(KEY, X)
    kept = make(bridge).bind(variables)
    for factor in (1.0, 3.0, 1.0):
        assert np.array_equal(kept(X, factor), make(nn).apply(variables, X, factor))


@pytest.mark.parametrize("b", [nn, bridge], ids=["Linen", "bridge"])
@pytest.mark.parametrize("name", ["inner", "others_0"])
def test_a_name_of_a_submodule_in_a_field_is_taken(b, name):
    class Model(b.Module):
        inner: object
        others: tuple

        @b.compact
        def __call__(self, x):
            return SCALES[b](name=name)(self.others[0](self.inner(x)))

    with pytest.raises(flax_errors.NameInUseError):
        Model(SCALES[b](), (SCALES[b](),)).init(KEY, X)


def test_a_replaced_part_is_read_by_all_its_names():
    class Double(nnx.Module):
        def __init__(self, inner):
            self.inner = inner

        def __call__(self, x):
            return self.inner(x) * 2

    _, model = made()
    y = model(X)
    model.layers_0 = Double(model.layers_0)
    assert isinstance(model.layers[0], Double)
    assert np.array_equal(model(X), y * 2)
    # What is assigned takes the place of a name of the class.
    model.train = False
    assert model.train is False
    model.decoder = SCALES[bridge](5.0)
    assert model.decoder.factor == 5.0
    assert model.blocks[0].factor == 2.0
    del model.decoder
    assert model.decoder is None


def test_an_error_of_a_property_is_its_own():
    class Model(bridge.Module):
        @property
        def width(self):
            return self.absent

    with pytest.raises(AttributeError, match="'absent'"):
        _ = Model().width


def test_a_tied_layer_of_flax_has_one_place():
    def make(b):
        class Model(b.Module):
            encoder: object
            decoder: object = None
            layers: tuple = ()

            def __call__(self, x):
                for layer in (self.encoder, self.decoder, *self.layers):
                    x = layer(x)
                return x

        dense = nn.Dense(3)
        return Model(dense, dense, [dense, nn.Dense(3)])

    variables = make(nn).init(KEY, X)
    assert shapes(make(bridge).init(0, X)) == shapes(variables)
    y = make(nn).apply(variables, X)
    assert np.array_equal(make(bridge).apply(variables, X), y)
    assert np.array_equal(make(bridge).bind(variables)(X), y)


def test_layers_of_flax_in_fields_are_initialised_from_shapes():
    class Model(bridge.Module):
        zero: object
        one: object

        def __call__(self, x):
            return self.one(self.zero(x))

    def made(x):
        model = Model(nn.Dense(3), nn.Dense(3), rngs=nnx.Rngs(0))
        return bridge.lazy_init(model, x).variables.unfreeze()

    expected = made(X)
    found = made(jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))


@pytest.mark.parametrize("x", [X, jax.ShapeDtypeStruct(X.shape, X.dtype)], ids=["array", "shape"])
def test_a_new_submodule_that_refers_to_a_field_leaves_its_variables_there(x):
    def make(b):
        class Model(b.Module):
            field: object

            @b.compact
            def __call__(self, x):
                return WRAPPERS[b](self.field)(x)

        return Model(SCALES[b]())

    expected = make(nn).init(KEY, X)
    model = make(bridge)
    model.bridge__rngs = nnx.Rngs(0)
    field = model.field
    bridge.lazy_init(model, x)
    assert shapes(model.variables.unfreeze()) == shapes(expected)
    assert model.Around_0.inner is field
    assert np.array_equal(model(X), make(nn).apply(model.variables, X))


@pytest.mark.parametrize("b", [nn, bridge], ids=["Linen", "bridge"])
def test_an_array_and_a_list_may_have_the_name_of_a_submodule(b):
    class Model(b.Module):
        table: object

        def setup(self):
            self.gain = jnp.full((1, 3), 2.0)
            self.parts = [SCALES[b]()]

        @b.compact
        def __call__(self, x):
            x = self.parts[0](x) * self.gain * self.table
            for name in ("gain", "table", "parts"):
                x = SCALES[b](name=name)(x)
            return x

    names = ("gain", "table", "parts", "parts_0")
    variables = {"params": {name: {"s": jnp.full((1, 3), i + 1.0)} for i, name in enumerate(names)}}
    model = Model(jnp.full((1, 3), 3.0))
    assert shapes(model.init(KEY, X)) == shapes(variables)
    assert np.array_equal(model.apply(variables, X), X * 2 * 3 * 24 * 2**4)
    if b is bridge:
        kept = nnx.clone(model.bind(variables))
        assert np.array_equal(kept(X), X * 2 * 3 * 24 * 2**4)
        assert np.array_equal(nnx.clone(kept)(X), kept(X))


def wrapper_class(b):
    class Around(b.Module):
        inner: object

        def __call__(self, x):
            return self.inner(x) * 2

    return Around


WRAPPERS = {b: wrapper_class(b) for b in (nn, bridge)}


def shared_by_wrappers_of_setup(b, make):
    class Model(b.Module):
        def setup(self):
            shared = make(b)
            self.second = WRAPPERS[b](shared)
            self.first = WRAPPERS[b](WRAPPERS[b](shared))

        def __call__(self, x):
            return self.first(self.second(x))

    return Model()


def assigned_and_shared(b, make):
    class Model(b.Module):
        def setup(self):
            self.zero = make(b)
            self.first = WRAPPERS[b](self.zero)

        def __call__(self, x):
            return self.first(self.zero(x))

    return Model()


def shared_and_assigned(b, make):
    class Model(b.Module):
        def setup(self):
            shared = make(b)
            self.zero = WRAPPERS[b](WRAPPERS[b](shared))
            self.first = shared

        def __call__(self, x):
            return self.first(self.zero(x))

    return Model()


def shared_in_a_container(b, make):
    class Model(b.Module):
        def setup(self):
            shared = make(b)
            self.all = {"a": WRAPPERS[b](shared), "b": (shared, make(b))}

        def __call__(self, x):
            return self.all["b"][0](self.all["b"][1](self.all["a"](x)))

    return Model()


def shared_in_a_compact_method(b, make):
    class Model(b.Module):
        @b.compact
        def __call__(self, x):
            shared = make(b)
            if b is bridge and isinstance(shared, nn.Module):
                shared = bridge.linen_in_bridge_mdl(shared)
            return WRAPPERS[b](WRAPPERS[b](shared))(shared(x))

    return Model()


def shared_from_outside(b, make):
    shared = make(b)
    return WRAPPERS[b](Pair(b)(WRAPPERS[b](shared), WRAPPERS[b](shared)))


def Pair(b):  # noqa: N802 - a class
    class Pair(b.Module):
        two: object
        one: object

        def __call__(self, x):
            return self.one(self.two(x))

    return Pair


@pytest.mark.parametrize("make", [lambda b: SCALES[b](), lambda b: nn.Dense(3)])
@pytest.mark.parametrize(
    "model",
    [
        shared_by_wrappers_of_setup,
        assigned_and_shared,
        shared_and_assigned,
        shared_in_a_container,
        shared_in_a_compact_method,
        shared_from_outside,
    ],
)
def test_a_module_that_several_others_have_is_that_of_the_first(model, make):
    variables = model(nn, make).init(KEY, X)
    y = model(nn, make).apply(variables, X)
    assert shapes(model(bridge, make).init(0, X)) == shapes(variables)
    assert np.array_equal(model(bridge, make).apply(variables, X), y)
    kept = model(bridge, make).bind(variables)
    for _ in range(2):
        assert np.array_equal(kept(X), y)
        assert shapes(kept.variables.unfreeze()) == shapes(variables)
        kept = nnx.clone(kept)
    fresh = model(bridge, make)
    fresh.bridge__rngs = nnx.Rngs(0)
    assert shapes(bridge.lazy_init(fresh, X).variables.unfreeze()) == shapes(variables)


def test_a_layer_of_flax_keeps_the_name_that_setup_gives_it():
    def make(b):
        class Model(b.Module):
            outside: object

            def setup(self):
                self.layer = nn.Dense(3, name="named")
                self.rest = [nn.Dense(3, name="more"), nn.Dense(3)]

            def __call__(self, x):
                return self.rest[1](self.rest[0](self.layer(self.outside(x))))

        return Model(nn.Dense(3, name="ignored"))

    variables = make(nn).init(KEY, X)
    assert shapes(make(bridge).init(0, X)) == shapes(variables)
    y = make(nn).apply(variables, X)
    assert np.array_equal(make(bridge).apply(variables, X), y)
    assert np.array_equal(make(bridge).bind(variables)(X), y)


@pytest.mark.parametrize("value", [2, jnp.full((1, 3), 2.0), ("a", "b"), "list"])
def test_what_setup_assigns_leaves_a_variable_of_that_name(value):
    def make(b):
        class Model(b.Module):
            def setup(self):
                self.gain = [SCALES[b]()] if isinstance(value, str) else value

            @b.compact
            def __call__(self, x):
                x = (
                    self.gain[0](x)
                    if isinstance(value, str)
                    else x * len(jax.tree.leaves(self.gain))
                )
                return x * jnp.asarray(self.param("gain", INIT, (1, 3)))

        return Model()

    variables = make(nn).init(KEY, X)
    assert shapes(make(bridge).init(0, X)) == shapes(variables)
    y = make(nn).apply(variables, X)
    assert np.array_equal(make(bridge).apply(variables, X), y)
    kept = make(bridge).bind(variables)
    assert np.array_equal(kept(X), y)
    assert np.array_equal(nnx.clone(kept)(X), y)
