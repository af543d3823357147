"""A body does the same on `bridge.Module` as on Linen's base class, errors included."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx, struct
from flax.traverse_util import flatten_dict

import bridge

pytestmark = pytest.mark.filterwarnings("ignore:'.value':DeprecationWarning")

X = np.array([[1.0, 2.0, 3.0]], np.float32)
KEY = jax.random.key(0)
INIT = nn.initializers.normal()
BASES = {"Linen": nn, "bridge": bridge}


def scale(self, name, x):
    return x * jnp.asarray(self.param(name, INIT, (1, 3)))


def sub(b):
    class Sub(b.Module):
        @b.compact
        def __call__(self, x):
            return scale(self, "w", x)

    return Sub


def a_parameter_named_as_a_field_and_as_a_method(b):
    class Model(b.Module):
        w: int = 3

        def encode(self, x):
            return x

        @b.compact
        def __call__(self, x):
            return scale(self, "w", scale(self, "encode", self.encode(x))) * self.w

    return Model()


def containers(b):
    class Model(b.Module):
        def setup(self):
            self.heads = {"a": sub(b)(), "b": [sub(b)(), sub(b)()]}
            self.pair = (sub(b)(), 3)

        def __call__(self, x):
            x = self.heads["a"](x) + self.heads["b"][1](self.heads["b"][0](x))
            return self.pair[0](x) * self.pair[1]

    return Model()


class Named(NamedTuple):
    one: Any
    two: Any
    three: int = 3


@struct.dataclass
class Structure:
    one: Any
    two: Any
    three: int = struct.field(pytree_node=False, default=3)


def named_tuples_and_dataclasses(b):
    class Model(b.Module):
        named: Named
        structure: Structure

        def setup(self):
            own = Named(sub(b)(), {"a": nn.Dense(3)})
            self.own = Structure([nn.Dense(3), own], sub(b)(), 4)

        def __call__(self, x):
            first, named = self.own.one
            x = self.own.two(named.two["a"](named.one(first(x)))) * self.own.three
            x = self.structure.two(self.structure.one(x)) * self.structure.three
            return self.named.two(self.named.one(x)) * self.named.three

    return Model(Named(nn.Dense(3), sub(b)(), 2), Structure(sub(b)(), nn.Dense(3), 5))


def wrapper(b):
    class Wrapper(b.Module):
        inner: object

        def __call__(self, x):
            return self.inner(x)

    return Wrapper


def a_submodule_that_two_others_have(b):
    class Model(b.Module):
        @b.compact
        def __call__(self, x):
            shared = sub(b)()
            return wrapper(b)(shared)(x) + wrapper(b)(wrapper(b)(shared))(x)

    return Model()


def a_submodule_of_setup_in_another_one(b):
    class Model(b.Module):
        def setup(self):
            self.zzz = sub(b)()
            self.aaa = wrapper(b)(self.zzz)
            self.again = self.zzz

        def __call__(self, x):
            return self.aaa(x) + self.zzz(x) + self.again(x)

    return Model()


def modules_made_outside(b):
    return wrapper(b)(wrapper(b)(sub(b)()))


def a_compact_method_of_a_base_class(b):
    class Model(sub(b)):
        @b.compact
        def __call__(self, x):
            return scale(self, "v", super().__call__(x))

    return Model()


def a_compact_submodule_called_twice(b):
    class Outer(b.Module):
        @b.compact
        def __call__(self, x):
            return sub(b)()(sub(b)()(x))

    class Model(b.Module):
        @b.compact
        def __call__(self, x):
            outer = Outer()
            return outer(outer(x))

    return Model()


def a_name_that_setup_gives(b):
    class Model(b.Module):
        def setup(self):
            self.a = sub(b)(name="b")

        def __call__(self, x):
            return self.a(x)

    return Model()


def fields_of_a_post_init(b):
    class Model(b.Module):
        n: int = 1

        def __post_init__(self):
            self.double = self.n * 2
            getattr(super(), "__post_init__", lambda: None)()

        @b.compact
        def __call__(self, x):
            return scale(self, "w", x) * self.double

    return Model(4)


def user(b):
    class User(b.Module):
        given: Any

        @b.compact
        def __call__(self, x):
            return scale(self, "s", x) * jnp.asarray(self.given)

    return User


def a_parameter_that_other_modules_are_given(b):
    class Model(b.Module):
        def setup(self):
            self.own = self.param("zzz", INIT, (1, 3))
            self.first = user(b)(self.own)
            self.all = [user(b)(self.own), user(b)(self.own)]

        @b.compact
        def __call__(self, x):
            w = self.param("w", INIT, (1, 3))
            x = user(b)(w)(user(b)(jnp.asarray(w) * 2)(x))
            return self.first(self.all[0](self.all[1](x)))

    return Model()


def a_parameter_of_a_submodule_that_another_one_is_given(b):
    class Owner(b.Module):
        def setup(self):
            self.w = self.param("w", INIT, (1, 3))

        def __call__(self, x):
            return x * jnp.asarray(self.w)

    class Model(b.Module):
        @b.compact
        def __call__(self, x):
            owner = Owner(name="zzz")
            x = owner(x)
            return user(b)(owner.w, name="aaa")(x)

    return Model()


SAME = [
    a_parameter_named_as_a_field_and_as_a_method,
    containers,
    named_tuples_and_dataclasses,
    a_submodule_that_two_others_have,
    a_submodule_of_setup_in_another_one,
    modules_made_outside,
    a_compact_method_of_a_base_class,
    a_compact_submodule_called_twice,
    a_name_that_setup_gives,
    fields_of_a_post_init,
    a_parameter_that_other_modules_are_given,
    a_parameter_of_a_submodule_that_another_one_is_given,
]


def shapes(variables):
    return {path: np.shape(np.asarray(x)) for path, x in flatten_dict(variables).items()}


@pytest.mark.parametrize("make", SAME)
def test_paths_and_outputs_are_linens(make):
    expected = make(nn).init(KEY, X)
    assert shapes(make(bridge).init(0, X)) == shapes(expected)
    y = make(nn).apply(expected, X)
    assert np.array_equal(make(bridge).apply(expected, X), y)
    kept = make(bridge).bind(expected)
    assert np.array_equal(kept(X), y)
    assert shapes(kept.variables) == shapes(expected)


def no_compact_method(b):
    class Model(b.Module):
        def __call__(self, x):
            return scale(self, "w", x)

    return Model().init


def a_submodule_without_a_compact_method(b):
    class Model(b.Module):
        def __call__(self, x):
            return sub(b)()(x)

    return Model().init


def a_submodule_in_no_attribute(b):
    class Model(b.Module):
        def setup(self):
            self.functions = [functools.partial(sub(b)())]

        def __call__(self, x):
            return self.functions[0](x)

    return Model().init


def a_parameter_twice(b):
    class Model(b.Module):
        @b.compact
        def __call__(self, x):
            return scale(self, "w", scale(self, "w", x))

    return Model().init


def a_submodule_twice(b):
    class Model(b.Module):
        @b.compact
        def __call__(self, x):
            return sub(b)(name="a")(sub(b)(name="a")(x))

    return Model().init


def a_submodule_named_as_a_parameter(b):
    class Model(b.Module):
        @b.compact
        def __call__(self, x):
            return sub(b)(name="a")(scale(self, "a", x))

    return Model().init


def another_shape(b):
    return lambda key, x: sub(b)().apply({"params": {"w": np.zeros((1, 4))}}, x)


def a_missing_parameter(b):
    return lambda key, x: sub(b)().apply({"params": {"v": x}}, x)


def no_variables(b):
    return lambda key, x: sub(b)().apply({}, x)


def an_update_of_a_fixed_collection(b):
    class Model(b.Module):
        @b.compact
        def __call__(self, x):
            count = self.variable("stats", "n", lambda: jnp.zeros(()))
            count.value = count.value + 1

    return lambda key, x: Model().apply({"stats": {"n": jnp.zeros(())}}, x)


def a_key_of_no_stream(b):
    class Model(b.Module):
        def __call__(self, x):
            return self.make_rng("noise")

    return lambda key, x: Model().apply({}, x)


FAILING = {
    no_compact_method: ValueError,
    a_submodule_without_a_compact_method: flax_errors.AssignSubModuleError,
    a_submodule_in_no_attribute: (
        flax_errors.CallCompactUnboundModuleError,
        flax_errors.AssignSubModuleError,
    ),
    a_parameter_twice: flax_errors.NameInUseError,
    a_submodule_twice: flax_errors.NameInUseError,
    a_submodule_named_as_a_parameter: flax_errors.NameInUseError,
    another_shape: flax_errors.ScopeParamShapeError,
    a_missing_parameter: flax_errors.ScopeParamNotFoundError,
    no_variables: flax_errors.ScopeCollectionNotFound,
    an_update_of_a_fixed_collection: flax_errors.ModifyScopeVariableError,
    a_key_of_no_stream: flax_errors.InvalidRngError,
}


@pytest.mark.parametrize("make", FAILING)
@pytest.mark.parametrize("base", BASES)
def test_mistakes_raise_linens_errors(base, make):
    call = make(BASES[base])
    with pytest.raises(FAILING[make]) as caught:
        call(KEY if base == "Linen" else 0, X)
    assert base == "Linen" or isinstance(caught.value, bridge.BridgeError)


def outputs(b):
    class Model(b.Module):
        @b.compact
        def __call__(self, x):
            self.sow("intermediates", "sum", x.sum())
            self.sow("intermediates", "sum", x.sum())
            if self.is_mutable_collection("cache"):
                self.put_variable("cache", "k", x)
            has = self.has_variable("cache", "k"), self.has_variable("params", "Sub_0")
            return sub(b)()(self.perturb("p", x)), has, self.get_variable("cache", "k", 7)

    return Model()


@pytest.mark.parametrize("value", [{}, {"a": 2.0}, {"b": {"d": 3.0}}, {"b": 4.0}, {"e": {}}, 5.0])
def test_a_dict_that_is_put_keeps_the_variables_that_it_lacks(value):
    def make(b):
        class Model(b.Module):
            @b.compact
            def __call__(self):
                self.variable("cache", "q", lambda: {"a": jnp.zeros(1), "b": {"c": jnp.ones(1)}})
                self.put_variable("cache", "q", jax.tree.map(jnp.asarray, value))

        return Model()

    variables = {"cache": {"q": {"a": jnp.zeros(1), "b": {"c": jnp.ones(1)}}}}
    _, expected = make(nn).apply(variables, mutable=["cache"])
    _, found = make(bridge).apply(variables, mutable=["cache"])
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))


@pytest.mark.parametrize(
    "options",
    [{}, {"mutable": ["intermediates"]}, {"mutable": ["cache"]}, {"capture_intermediates": True}],
)
def test_sown_perturbed_and_put_values_are_linens(options):
    variables = outputs(nn).init(KEY, X)
    assert shapes(outputs(bridge).init(0, X)) == shapes(variables)
    expected = outputs(nn).apply(variables, X, **options)
    found = outputs(bridge).apply(variables, X, **options)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("first", ["params", "stats", "submodule"])
def test_a_name_is_that_of_one_variable_or_submodule(first):
    class Model(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            if first == "submodule":
                x = sub(bridge)(name="w")(x)
            for collection in sorted(("params", "stats"), reverse=first == "stats"):
                if collection == "params" and first != "submodule":
                    x = scale(self, "w", x)
                elif collection == "stats":
                    x = x + self.variable("stats", "w", lambda: jnp.ones((1, 3)))[...]
            return x

    with pytest.raises(bridge.NameInUseError, match=r"'w' of a .* of Model"):
        Model().init(0, X)
    below = {"w": X} if first == "submodule" else X
    variables = {"params": {"w": below}, "stats": {"w": X}}
    for call in (lambda: Model().apply(variables, X), lambda: Model().bind(variables)):
        with pytest.raises(bridge.NameInUseError, match=r"'w' of a .* of Model"):
            call()


def test_what_is_sown_needs_a_name_of_its_own():
    class Model(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            self.sow("intermediates", "w", x)
            return scale(self, "w", x)

    variables = {"params": {"w": X}}
    assert np.array_equal(Model().apply(variables, X), X * X)
    with pytest.raises(bridge.NameInUseError, match="'w' of a variable of 'intermediates'"):
        Model().apply(variables, X, mutable=["intermediates"])


class OnlyCaptured(bridge.Module):
    @bridge.compact
    def __call__(self, x):
        self.sow("intermediates", "seen", x, capture_noop=True)
        return self.perturb("p", x, capture_noop=True)


def test_what_only_a_capture_may_ask_for_is_kept_in_no_collection():
    model = OnlyCaptured()
    variables = model.init(KEY, X)
    assert not variables
    every = ["intermediates", "perturbations"]
    assert model.apply(variables, X, mutable=every)[1] == {}
    _, captured = nnx.capture(bridge.lazy_init(model, X), nnx.Intermediate)(X)
    (seen,) = jax.tree.leaves(captured)
    assert np.array_equal(seen, X)


def methods(b):
    class Model(b.Module):
        def setup(self):
            self.inner = sub(b)()

        def encode(self, x):
            return self.inner(x)

        @nn.nowrap
        def factor(self):
            return 3

        def __call__(self, x):
            return self.encode(x) * self.factor()

    return Model


def test_a_method_is_called_by_name_or_as_a_function():
    variables = methods(nn)().init(KEY, X)
    linen, ours = methods(nn), methods(bridge)
    expected = linen().apply(variables, X, method=linen.encode)
    for method in ("encode", "inner", ours.encode, ours().encode, lambda self, x: self.inner(x)):
        assert np.array_equal(ours().apply(variables, X, method=method), expected)
    bound = ours().bind(variables)
    assert np.array_equal(bound.encode(X), expected)
    assert np.array_equal(bound.inner(X), expected)
    with pytest.raises(AttributeError, match="'encode'"):
        ours().apply(variables, X, method="decode")


def test_paths_and_names_are_linens():
    def make(b):
        class Inner(b.Module):
            def __call__(self):
                return self.path, self.name, self.scope is not None

        class Outer(b.Module):
            @b.compact
            def __call__(self):
                return Inner()(), Inner(name="q")(), Inner(name="r", parent=self)(), self.name

        return Outer()

    assert make(bridge).apply({}) == make(nn).apply({})
    assert make(bridge).scope is None


@pytest.mark.parametrize("name", ["items", "keys", "dicts"])
def test_a_parameter_may_have_the_name_of_a_dicts_method(name):
    def make(b):
        class Inner(b.Module):
            @b.compact
            def __call__(self, x):
                return x * self.param(name, INIT, (1, 3))

        class Outer(b.Module):
            @b.compact
            def __call__(self, x):
                return Inner(name=name)(x)

        return Outer()

    variables = make(nn).init(KEY, X)
    y = make(nn).apply(variables, X)
    assert np.array_equal(make(bridge).apply(variables, X), y)
    assert np.array_equal(make(bridge).bind(variables)(X), y)


@pytest.mark.parametrize("base", [nn, bridge])
def test_a_new_variable_is_refused_in_a_collection_that_is_not_mutable(base):
    class Model(base.Module):
        @base.compact
        def __call__(self, x):
            self.put_variable("stats", "last", x)

    with pytest.raises(flax_errors.ModifyScopeVariableError, match="stats"):
        Model().apply({}, X, mutable=["params"])
    assert "last" in Model().apply({}, X, mutable=["stats"])[1]["stats"]


def test_setup_runs_once():
    runs = []

    class Model(bridge.Module):
        def setup(self):
            runs.append(1)
            self.w = self.param("w", INIT, (1, 3))

        def __call__(self, x):
            return x * self.w

    model = bridge.lazy_init(Model(rngs=0), X)
    model(X), model(X)
    assert runs == [1]
    variables = Model().init(0, X)
    Model().apply(variables, X)
    assert runs == [1] * 3


@pytest.mark.parametrize("base", BASES)
def test_a_parameter_is_checked_against_what_its_initializer_makes_now(base):
    width = [3]

    def init(key, height):
        return jnp.ones((height, width[0]))

    class Model(BASES[base].Module):
        @BASES[base].compact
        def __call__(self, x):
            return x * jnp.asarray(self.param("w", init, 1))

    variables = Model().init(KEY, X)
    assert np.array_equal(Model().apply(variables, X), X)
    width[0] = 4
    with pytest.raises((flax_errors.ScopeParamShapeError, bridge.MismatchError)):
        Model().apply(variables, X)


def test_an_initializer_of_jax_is_traced_once_for_all_calls(monkeypatch):
    class Model(bridge.Module):
        @bridge.compact
        def __call__(self, x, width=3):
            return x * jnp.asarray(self.param("w", nn.initializers.normal(0.25), [1, width]))

    model = Model().bind(Model().init(0, X))
    model(X)
    traces = []
    eval_shape = jax.eval_shape
    monkeypatch.setattr(jax, "eval_shape", lambda *args: traces.append(1) or eval_shape(*args))
    model(X)
    assert not traces
    with pytest.raises(bridge.MismatchError):
        model(X, width=4)


@struct.dataclass
class Pair:
    a: Any
    b: Any


def _array(start):
    return jnp.arange(3.0).reshape(1, 3) + start


def _box(start):
    return nn.Partitioned(_array(start), (None, "x"))


VALUES = {
    "array": lambda: _array(1),
    "dict": lambda: {"a": _array(1), "b": {"c": _array(2), "d": _array(3)}},
    "tuples in a dict": lambda: {"a": (_array(1), {"b": _array(2)})},
    "an empty dict in a dict": lambda: {"a": {}, "b": (_array(1), {})},
    "boxes": lambda: {"a": _box(1), "b": (_box(2), _array(3))},
    "boxes in a tuple": lambda: (_box(1), {"a": _box(2)}),
    "list": lambda: [_array(1), _array(2)],
    "tuple": lambda: (_array(1), _array(2)),
    "dataclass": lambda: Pair(_array(1), _array(2)),
}


def of_value(value, b):
    class Inner(b.Module):
        @b.compact
        def __call__(self, x, update=False):
            p = self.param("p", lambda key: VALUES[value]())
            q = self.variable("stats", "q", VALUES[value])
            r = self.variable("stats", "r", VALUES[value])
            assert self.variable("stats", "nothing", dict).value == {}
            if update:
                q.value = jax.tree.map(lambda leaf: leaf + 1, q.value)
            p = p.get_value() if isinstance(p, nnx.Variable) else p
            for leaf in jax.tree.leaves((p, q.value, r.value)):
                x = x + leaf * 2
            return x

    class Model(b.Module):
        def setup(self):
            self.inner = [Inner()]

        def __call__(self, x, update=False):
            return self.inner[0](x, update)

    return Model()


@pytest.mark.parametrize("value", VALUES)
def test_a_variable_whose_value_is_a_pytree_is_linens(value):
    linen, model = of_value(value, nn), of_value(value, bridge)
    variables = linen.init(KEY, X)
    own = model.init(0, X)
    assert jax.tree.structure(own) == jax.tree.structure(variables)
    assert jax.tree.all(jax.tree.map(np.array_equal, own, variables))
    y = linen.apply(variables, X)
    for given in (own, variables):
        assert np.array_equal(model.apply(given, X), y)
    found = model.apply(variables, X, True, mutable=["stats"])
    expected = linen.apply(variables, X, True, mutable=["stats"])
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))
    kept = model.bind(variables)
    assert np.array_equal(kept(X, True), expected[0])
    assert jax.tree.all(
        jax.tree.map(np.array_equal, dict(kept.variables.unfreeze()), {**variables, **found[1]})
    )
    for each in (linen, model):
        with pytest.raises(flax_errors.ModifyScopeVariableError):
            each.apply(variables, X, True)


def with_layers_of_flax(b):
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.relu(nn.Dense(3)(x))

    class Model(b.Module):
        def setup(self):
            self.first = nn.Dense(3)
            self.rest = [Inner(), sub(b)()]

        def __call__(self, x):
            x = self.first(x)
            for layer in self.rest:
                x = layer(x)
            return x

    return Model()


@pytest.mark.parametrize(
    "capture",
    [True, lambda module, method: isinstance(module, nn.Dense), lambda module, method: False],
)
def test_layers_of_flax_are_captured(capture):
    variables = with_layers_of_flax(nn).init(KEY, X)
    expected = with_layers_of_flax(nn).apply(variables, X, capture_intermediates=capture)
    found = with_layers_of_flax(bridge).apply(variables, X, capture_intermediates=capture)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))


def streams(b):
    class Layer(nn.Module):
        def __call__(self):
            return tuple(self.has_rng(name) for name in ("params", "dropout", "default"))

    class Model(b.Module):
        def setup(self):
            self.layer = Layer()

        def __call__(self):
            own = tuple(self.has_rng(name) for name in ("params", "dropout", "default"))
            return own, self.layer()

    return Model()


@pytest.mark.parametrize(
    "rngs", [KEY, {"params": KEY}, {"dropout": KEY}, {"params": KEY, "dropout": KEY}]
)
def test_the_streams_that_there_are_are_linens(rngs):
    expected = streams(nn).apply({}, rngs=rngs)
    assert streams(bridge).apply({}, rngs=rngs) == expected
    given = dict(rngs) if isinstance(rngs, dict) else rngs
    assert streams(bridge).init_with_output(given)[0] == expected
    # An nnx.Rngs serves as in NNX.
    assert streams(bridge).apply({}, rngs=nnx.Rngs(0))[0] == (True, True, True)


def keyword_fields(b):
    class Base(b.Module):
        width: int = 3

    class Model(Base, kw_only=True):
        depth: int
        scale: float = 1.0

        def __post_init__(self):
            self.area = self.width * self.depth
            super().__post_init__()

        def other(self, x):
            return x

        def __call__(self, x):
            return x * self.area * self.scale

    return Model


def test_keyword_fields_and_post_init_are_linens():
    for b in BASES.values():
        kind = keyword_fields(b)
        assert np.array_equal(kind(2, depth=5).apply({}, X, method=None), X * 10)
        assert kind(depth=2).init_with_output(KEY, X, method=None)[1] == {}
        with pytest.raises(TypeError):
            kind(2, 5)


def test_unbind_is_the_inverse_of_bind():
    variables = with_layers_of_flax(nn).init(KEY, X)
    module, found = with_layers_of_flax(bridge).bind(variables).unbind()
    assert jax.tree.structure(found) == jax.tree.structure(variables)
    assert np.array_equal(module.apply(found, X), with_layers_of_flax(nn).apply(variables, X))
    with pytest.raises(bridge.NotInitializedError):
        module(X)
    part, found = with_layers_of_flax(bridge).bind(variables).rest[1].unbind()
    assert np.array_equal(part.apply(found, X), sub(nn)().apply(found, X))


@pytest.mark.parametrize("x", [X, jax.ShapeDtypeStruct(X.shape, X.dtype)])
def test_a_table_needs_no_variables(x):
    model = with_layers_of_flax(bridge)
    assert "rest_0" in model.tabulate(KEY, x, depth=1)
    with pytest.raises(bridge.NotInitializedError):
        model(X)


def a_linen_layer_in_a_compact_method():
    class Model(bridge.Module):
        @bridge.compact
        def __call__(self, x):
            return nn.Dense(3)(x)

    return Model()


def a_linen_module_with_setup():
    class Inner(nn.Module):
        def setup(self):
            self.dense = nn.Dense(3)

        def __call__(self, x):
            return self.dense(x)

    class Model(bridge.Module):
        def setup(self):
            self.second = sub(bridge)()

        def run(self, x):
            return Inner()(x)

        def __call__(self, x):
            return self.second(self.run(x))

    return Model()


@pytest.mark.parametrize("make", [a_linen_layer_in_a_compact_method, a_linen_module_with_setup])
def test_a_linen_module_that_is_no_submodule_says_what_to_write(make):
    for call in (lambda model: model.init(0, X), lambda model: bridge.lazy_init(model, X)):
        with pytest.raises(flax_errors.CallCompactUnboundModuleError) as caught:
            call(make())
        assert isinstance(caught.value, bridge.BridgeError)
        assert "bridge.linen_in_bridge_mdl" in str(caught.value)
        assert "Model" in str(caught.value)


def test_an_attribute_error_of_the_model_is_its_own():
    class Model(bridge.Module):
        def __call__(self, x):
            return self.absent

    class Configured(nn.Module):
        @nn.nowrap
        def width(self, x):
            return x.absent

    class Asking(bridge.Module):
        def __call__(self, x):
            return Configured().width(x)

    for model in (Model(), Asking()):
        with pytest.raises(AttributeError, match="'absent'") as caught:
            model.apply({}, X)
        assert not isinstance(caught.value, bridge.BridgeError)


@pytest.mark.parametrize("where", ["compact", "setup", "field"])
def test_a_bridge_module_in_a_linen_one_says_what_to_write(where):
    class Outer(nn.Module):
        inner: Any = None

        def setup(self):
            if where == "setup":
                self.layer = sub(bridge)()

        @nn.compact
        def __call__(self, x):
            inner = self.inner if where == "field" else sub(bridge)()
            return (self.layer if where == "setup" else inner)(x)

    model = Outer(sub(bridge)() if where == "field" else None)
    for call in (lambda: model.init(KEY, X), lambda: model.apply({"params": {}}, X)):
        with pytest.raises(bridge.NotInitializedError, match=r"bridge\.to_linen\(Sub, …\)"):
            call()
    # One that has its variables is a function like any other.
    kept = sub(bridge)().bind({"params": {"w": X}})
    assert np.array_equal(Outer(kept).apply({}, X) if where == "field" else kept(X), X * X)


@pytest.mark.parametrize("x", [X, jax.ShapeDtypeStruct(X.shape, X.dtype)])
def test_what_setup_leaves_out_is_none(x):
    class Model(bridge.Module):
        def setup(self):
            self.first = sub(bridge)()
            self.second = None

        def __call__(self, x):
            return self.first(x) if self.second is None else self.second(x)

    model = bridge.lazy_init(Model(rngs=0), x)
    assert np.array_equal(model(X), X * model.first.w[...])


def test_a_repr_shows_what_is_the_models():
    shown = repr(sub(bridge)().bind({"params": {"w": jnp.ones((1, 3))}}))
    assert "w=" in shown
    assert "bridge__" not in shown
