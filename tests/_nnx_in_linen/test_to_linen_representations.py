"""Variables that are references, or of JAX's own kind, give what plain ones give."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from tests.models import assert_identical

KEY = jax.random.key(0)
RNGS = {"dropout": jax.random.key(1)}
X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
PLAIN = {"ref": False, "hijax": False}
FORMS = {"ref": {"ref": True}, "hijax": {"hijax": True}, "both": {"hijax": True, "ref": True}}


class Model(nnx.Module):
    """Parameters, statistics, and a stream of keys."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(3, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(nnx.relu(self.norm(self.linear(x))))

    def project(self, x):
        return self.linear(x)


class Twice(nn.Module):
    """A Linen model around a wrapped one that is called two times."""

    @nn.compact
    def __call__(self, x):
        inner = bridge.ToLinen(Model, strict=True, name="inner")
        return inner.run_nnx_method("project", x) + inner.run_nnx_method("project", 2 * x)


def made(module, form):
    """The module's variables without boxes, which tell the form."""
    with nnx.var_defaults(**form):
        return nn.unbox(module.init(KEY, X))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    "module", [bridge.to_linen(Model), Twice()], ids=lambda module: type(module).__name__
)
def test_init_gives_the_same_state(module, form):
    plain, special = made(module, PLAIN), made(module, form)
    plain.pop("nnx")
    special.pop("nnx")
    assert_identical(special, plain)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    "module",
    [bridge.ToLinen(Model, strict=True), Twice()],
    ids=lambda module: type(module).__name__,
)
def test_what_a_call_does_not_keep_is_differentiated(module, form):
    def step(variables):
        rest = {name: tree for name, tree in variables.items() if name != "params"}

        def loss(params):
            y = module.apply({**rest, "params": params}, X, **options)
            return (y**2).mean(), y

        return jax.value_and_grad(loss, has_aux=True)(variables["params"])

    options = {"nnx_method": "project"} if isinstance(module, bridge.ToLinen) else {}
    plain, special = made(module, PLAIN), made(module, form)
    assert_identical(step(special), step(plain))
    assert_identical(jax.jit(step)(special), jax.jit(step)(plain))


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_updates_of_references_are_kept(run):
    module = bridge.to_linen(Model)
    plain, special = made(module, PLAIN), made(module, FORMS["ref"])

    def step(variables):
        rest = {name: tree for name, tree in variables.items() if name != "params"}

        def loss(params):
            variables = {**rest, "params": params}
            y, updates = module.apply(variables, X, rngs=RNGS, mutable=["batch_stats"])
            return (y**2).mean(), (y, updates)

        return jax.value_and_grad(loss, has_aux=True)(variables["params"])

    assert_identical(run(step)(special), run(step)(plain))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_updates_outside_of_a_trace_are_kept_in_every_form(form):
    module = bridge.to_linen(Model)
    plain, special = made(module, PLAIN), made(module, form)
    options = {"rngs": RNGS, "mutable": ["batch_stats"]}
    assert_identical(module.apply(special, X, **options), module.apply(plain, X, **options))


class Shared(nnx.Module):
    """Two Variables around one reference, of which a call changes one."""

    def __init__(self):
        self.a = nnx.BatchStat(jnp.zeros(()), ref=True)
        self.b = nnx.BatchStat(jnp.zeros(()), ref=True)
        self.b.set_raw_value(self.a.get_raw_value())

    def __call__(self, x):
        self.a[...] = self.a[...] + 1
        return x + self.b[...]


def test_a_reference_that_two_variables_hold_is_refused():
    with pytest.raises(bridge.InvalidModuleError, match="give them one Variable"):
        bridge.to_linen(Shared).init(KEY, X)


class FillsDicts(nnx.Module):
    def __init__(self, *, rngs):
        self.entries = nnx.Cache({})
        self.extra = nnx.Param({})
        self.nested = nnx.Cache({"a": {}, "b": []})
        self.kernel = nnx.Param(jnp.eye(3))

    def __call__(self, x, fill=0):
        held = dict(self.entries.get_value())
        for _ in range(fill):
            held[f"k{len(held)}"] = x.sum()
        if fill < 0:
            held = {}
        self.entries.set_value(held)
        return x @ self.kernel[...] * (1 + len(held)) + sum(held.values())


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: bridge.ToLinen(bridge.ToNNX, (m,))])
@pytest.mark.parametrize("collections", [("nnx", "cache", "params"), ("cache", "params")])
def test_an_empty_dict_in_a_variable_needs_no_leaf(collections, wrap):
    model = wrap(bridge.to_linen(FillsDicts))
    native = FillsDicts(rngs=nnx.Rngs(0))
    x = jnp.arange(6.0).reshape(2, 3)
    made = model.init(jax.random.key(0), x)
    variables = {name: made[name] for name in collections}
    for fill in (0, 0, 2, 1, -1, 0, 1):
        output, updates = model.apply(variables, x, fill, mutable=["cache", "nnx"])
        variables = {**variables, **updates}
        assert (output == native(x, fill)).all()
    loaded = flax.serialization.from_bytes(made, flax.serialization.to_bytes(made))
    assert (model.apply(loaded, x) == FillsDicts(rngs=nnx.Rngs(0))(x)).all()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_variables_without_a_definition_are_those_of_any_form(form):
    """Regression: AttributeError and ImmutableVariableError for hijax Variables."""
    module = bridge.to_linen(Model)
    variables = made(module, PLAIN)
    expected = module.apply(variables, X, mutable=["batch_stats"], rngs=RNGS)
    variables.pop("nnx")
    with nnx.var_defaults(**form):
        found = module.apply(variables, X, mutable=["batch_stats"], rngs=RNGS)
    assert_identical(found, expected)
