"""Programs written for flax.nnx.bridge's ToNNX and lazy_init do the same with `import bridge`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import DenyList, meta

import bridge
from tests.bridge.peer import described, on_both
from tests.models import assert_identical

KEY = jax.random.key(0)
X = jnp.arange(12.0).reshape(4, 3)


class Block(nn.Module):
    """Nested modules, three collections."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        x = nn.Sequential([nn.Dense(5), nn.tanh, nn.Dense(3)])(x)
        self.sow("intermediates", "hidden", x)
        return nn.Dropout(0.5)(x, deterministic=not train)


class Methods(nn.Module):
    def setup(self):
        self.encoder = nn.Dense(2)
        self.decoder = nn.Dense(3)

    def __call__(self, x):
        return self.decode(self.encode(x))

    def encode(self, x):
        return self.encoder(x)

    def decode(self, x):
        return self.decoder(x)


class WithInit(nn.Module):
    @nn.compact
    def init(self, x):
        return nn.Dense(2)(x)


class Growing(nn.Module):
    """Makes a collection in a nested module during a call."""

    @nn.compact
    def __call__(self, x):
        return Remembering(name="inner")(nn.Dense(3, name="outer")(x))


class Remembering(nn.Module):
    @nn.compact
    def __call__(self, x):
        if not self.is_initializing():
            last = self.variable("cache", "last", jnp.zeros_like, x)
            last.value = x
        return nn.Dense(3)(x)


class Annotated(nn.Module):
    """Keeps the boxes it finds among its own parameters."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.ones, (None, None))
        self.param("w", init, (3, 2))
        box = self.scope.get_variable("params", "w")
        return type(box).__name__, getattr(box, "names", None), x @ box.unbox()


class Holder(nnx.Module):
    def __init__(self, wrapped):
        self.head = nnx.Linear(3, 2, rngs=nnx.Rngs(3))
        self.wrapped = wrapped

    def __call__(self, x):
        return self.head(self.wrapped(x))


def made(bridge, module, rngs=None, x=X):
    return bridge.lazy_init(bridge.ToNNX(module, rngs=rngs or nnx.Rngs(0, dropout=1)), x)


def state_of_a_block(bridge):
    return described(made(bridge, Block()))


def state_of_a_tree(bridge):
    return described(bridge.lazy_init(Holder(bridge.ToNNX(Block(), rngs=nnx.Rngs(0))), X))


def calls(bridge):
    model = made(bridge, Methods())
    return {
        "call": model(X),
        "method by name": model(X, method="encode"),
        "method of the class": model(X, method=Methods.encode),
        "method as attribute": model.encode(X),
        "chain": model.decode(model.encode(X)),
    }


def call_with_keys(bridge):
    model = made(bridge, Block())
    train = functools.partial(model, train=True, mutable=["batch_stats"])
    return {
        "rngs": train(X, rngs=nnx.Rngs(dropout=5)),
        "again": train(X, rngs=nnx.Rngs(dropout=5)),
        "default": train(X, rngs=nnx.Rngs(5)),
    }


def set_rngs(bridge):
    model = made(bridge, nn.Dropout(0.5, deterministic=False))
    model.to_nnx__rngs = nnx.Rngs(dropout=7)
    return model(X), model(X)


def set_module(bridge):
    model = made(bridge, nn.Dense(3, use_bias=False))
    model.to_nnx__module = nn.Dense(3, use_bias=False, dtype=jnp.bfloat16)
    return model.to_nnx__module.dtype is jnp.bfloat16, model(X)


def lazily(bridge, init, module=None, rngs=True):
    model = bridge.ToNNX(module or Methods(), rngs=nnx.Rngs(0) if rngs else None)
    target = init(bridge, model)
    assert target is not None
    return described(model)


LAZY_INITS = {
    "of the module": lambda bridge, model: bridge.lazy_init(model, X),
    "chained": lambda bridge, model: model.lazy_init(X),
    "of a bound method": lambda bridge, model: bridge.lazy_init(model.encode, X),
    "with a method's name": lambda bridge, model: bridge.lazy_init(model, X, method="encode"),
    "chained with a method": lambda bridge, model: model.lazy_init(X, method=Methods.encode),
    "with rngs": lambda bridge, model: bridge.lazy_init(model, X, rngs=nnx.Rngs(4)),
    "with a key": lambda bridge, model: bridge.lazy_init(model, X, rngs=jax.random.key(4)),
}


def abstract_state(bridge):
    model = nnx.eval_shape(lambda: made(bridge, Methods()))
    return described(model)


def jitted_init(bridge):
    return described(nnx.jit(lambda: made(bridge, Methods()))())


def mapped_init(bridge):
    @nnx.vmap(in_axes=0, out_axes=0)
    def init(key):
        return bridge.ToNNX(Methods(), rngs=nnx.Rngs(key)).lazy_init(X)

    return described(init(jax.random.split(KEY, 3)))


def outputs_by_mutable(mutable, bridge):
    model = made(bridge, Block())
    return model(X, mutable=mutable)


def updates_by_mutable(mutable, bridge):
    model = made(bridge, Block())
    model(X, train=True, mutable=mutable, rngs=nnx.Rngs(dropout=1))
    return described(model)


def new_collections(bridge):
    model = made(bridge, Growing())
    y = model(X, mutable=["cache"])
    return y, described(model)


def new_collections_under_jit(bridge):
    model = made(bridge, Growing())
    y = nnx.jit(lambda model, x: model(x, mutable=["cache"]))(model, X)
    return y, described(model)


def new_collections_under_scan(bridge):
    model = made(bridge, Growing())
    model(X, mutable=["cache"])

    @nnx.scan(in_axes=(nnx.Carry, None), out_axes=(nnx.Carry, 0), length=2)
    def step(carry, model):
        y = model(carry, mutable=["cache"])
        return y, y

    return step(X, model), described(model)


def made_inside_scan(bridge):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def step(carry, key):
        model = bridge.ToNNX(Growing(), rngs=nnx.Rngs(key)).lazy_init(carry)
        return model(carry, mutable=["cache"]), described_values(model)

    return step(X, jax.random.split(KEY, 2))


def described_values(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param, nnx.Cache)[1])


def popped(bridge):
    model = made(bridge, Block())
    model(X, mutable=["intermediates"])
    sown = nnx.pop(model, nnx.Intermediate)
    return described(sown), described(model), nnx.to_pure_dict(sown)


def sown_twice(bridge):
    model = made(bridge, Block())
    model(X, mutable=["intermediates"])
    model(X, mutable=["intermediates"])
    return described(nnx.state(model, nnx.Intermediate))


def updated_by_arrays(bridge):
    model = made(bridge, Methods())
    nnx.update(model, {"encoder": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}})
    return model(X), described(model)


def new_parameter(bridge):
    model = made(bridge, nn.Dense(2))
    model.kernel = nnx.Param(jnp.full((3, 2), 2.0))
    return model(X), described(model)


def new_nested_parameter(bridge):
    model = made(bridge, Methods())
    model.encoder["kernel"] = nnx.Param(jnp.full((3, 2), 2.0))
    return model(X), described(model)


def boxes_inside(bridge):
    # Without a mesh flax.nnx.bridge cannot wrap an annotated module at all.
    with jax.set_mesh(jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,))):
        model = made(bridge, Annotated(), nnx.Rngs(0))
        return model(X), described(model)


def split_and_merged(bridge):
    model = made(bridge, Block())
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    merged = nnx.merge(graphdef, jax.tree.map(lambda p: p + 1, params), rest)
    return merged(X), nnx.clone(model)(X)


def inside_linen(bridge):
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return bridge.to_linen(Middle)(nn.Dense(3)(x))

    class Middle(nnx.Module):
        def __init__(self, *, rngs):
            self.dense = bridge.ToNNX(nn.Dense(3), rngs=rngs).lazy_init(X)

        def __call__(self, x):
            return self.dense(x)

    variables = Outer().init(KEY, X)
    return described({"params": {"Dense_0": variables["params"]["Dense_0"]}}), jax.tree.map(
        jnp.shape, variables["params"]
    )


MUTABLES = {
    "False": False,
    "True": True,
    "a list": ["batch_stats"],
    "a tuple": ("batch_stats", "intermediates"),
    "an empty list": [],
    "a DenyList": DenyList(["params"]),
}
PROGRAMS = {
    "the state of a wrapped module": state_of_a_block,
    "the state of a tree": state_of_a_tree,
    "the forms of a call": calls,
    "keys given to a call": call_with_keys,
    "to_nnx__rngs set": set_rngs,
    "to_nnx__module set": set_module,
    **{f"lazy_init {n}": functools.partial(lazily, init=f) for n, f in LAZY_INITS.items()},
    "lazy_init of a method called init": functools.partial(
        lazily, init=lambda bridge, model: model.lazy_init(X, method="init"), module=WithInit()
    ),
    "lazy_init with rngs and none kept": functools.partial(
        lazily, init=LAZY_INITS["with rngs"], rngs=False
    ),
    "lazy_init under eval_shape": abstract_state,
    "lazy_init under jit": jitted_init,
    "lazy_init under vmap": mapped_init,
    **{
        f"the output, mutable={n}": functools.partial(outputs_by_mutable, m)
        for n, m in MUTABLES.items()
    },
    **{
        f"the updates, mutable={n}": functools.partial(updates_by_mutable, m)
        for n, m in MUTABLES.items()
        if m
    },
    "new collections in nested modules": new_collections,
    "new collections under jit": new_collections_under_jit,
    "new collections under scan": new_collections_under_scan,
    "made inside scan": made_inside_scan,
    "nnx.pop": popped,
    "sown twice": sown_twice,
    "nnx.update with arrays": updated_by_arrays,
    "a new nnx.Param": new_parameter,
    "a new nnx.Param in a nested module": new_nested_parameter,
    "boxes in the Linen module": boxes_inside,
    "split and merge": split_and_merged,
    "inside a Linen module": inside_linen,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_the_program_does_what_it_does_with_flax_nnx_bridge(program):
    theirs, ours = on_both(program)
    assert_identical(ours, theirs)


def test_initial_values_are_those_of_linen_with_the_keys_of_the_fork():
    rngs = nnx.Rngs(0, dropout=1, other=2)
    streams = rngs.fork()
    keys = {name if name != "default" else "params": streams[name]() for name in streams}
    expected = Block().init(keys, X)
    model = bridge.lazy_init(bridge.ToNNX(Block(), rngs=nnx.Rngs(0, dropout=1, other=2)), X)
    found = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert_identical(found, expected["params"])


def test_a_wrapper_without_rngs_has_no_rng_state():
    model = bridge.lazy_init(bridge.ToNNX(nn.Dense(2)), X, rngs=KEY)
    assert not nnx.to_flat_state(nnx.state(model, nnx.RngState))
    assert model.to_nnx__rngs is None


def test_the_rngs_given_are_forked():
    rngs = nnx.Rngs(0)
    model = bridge.lazy_init(bridge.ToNNX(nn.Dense(2), rngs=rngs), X)
    assert model.to_nnx__rngs is not rngs
    assert rngs.default.count[...] == 1


def test_there_are_no_variables_before_lazy_init():
    model = bridge.ToNNX(nn.Dense(2), rngs=nnx.Rngs(0))
    assert not hasattr(model, "kernel")
    assert hasattr(bridge.lazy_init(model, X), "kernel")


def test_lazy_init_returns_its_argument():
    model = bridge.ToNNX(Methods(), rngs=nnx.Rngs(0))
    method = model.encode
    assert bridge.lazy_init(model, X) is model
    assert bridge.lazy_init(method, X) is method
    assert model.lazy_init(X) is model


@pytest.mark.parametrize("name", ["module", "rngs"])
def test_the_old_attribute_names_answer_with_a_deprecation(name):
    model = bridge.ToNNX(nn.Dense(2), rngs=nnx.Rngs(0))
    with pytest.warns(DeprecationWarning, match=f"to_nnx__{name}"):
        assert getattr(model, name) is getattr(model, f"to_nnx__{name}")


def test_a_sown_tuple_is_one_variable():
    model = made(bridge, Block())
    model(X, mutable=["intermediates"])
    assert type(model.hidden) is nnx.Intermediate
    assert type(model.hidden.get_value()) is tuple


def test_a_submodule_of_state_is_a_mapping_by_key():
    model = made(bridge, Methods())
    assert set(model.encoder) == {"kernel", "bias"}
    assert model.encoder["kernel"] is dict(model.encoder)["kernel"]
    assert nnx.state(model)["encoder"]["kernel"].shape == (3, 2)


def test_boxes_in_the_linen_module_are_the_linen_boxes():
    name, names, _ = made(bridge, Annotated(), nnx.Rngs(0))(X)
    assert (name, names) == ("Partitioned", (None, None))


@pytest.mark.parametrize("box", [nn.Partitioned, nn.LogicallyPartitioned])
def test_converting_leaves_the_callers_boxes_alone(box):
    boxed = box(jnp.ones((3, 2)), names=("in", "out"))
    fields = dict(vars(boxed))
    variables = {"params": {"w": boxed}}
    bridge.variables.nnx_attrs_to_linen_vars(bridge.variables.linen_vars_to_nnx_attrs(variables))
    model = bridge.ToNNX.from_variables(Annotated(), variables)
    model.w.set_metadata(out_sharding=(None, None))
    model.w[...] = jnp.zeros((3, 2))
    assert variables == {"params": {"w": boxed}}
    assert vars(boxed) == fields
    np.testing.assert_array_equal(boxed.value, np.ones((3, 2)))


def test_metadata_that_says_nothing_makes_no_box():
    variable = nnx.Param(jnp.ones(2), out_sharding=None)
    assert isinstance(bridge.variables.to_linen_var(variable), jax.Array)
    told = nnx.Param(jnp.ones(2), note="kept")
    assert isinstance(bridge.variables.to_linen_var(told), bridge.NNXMeta)
    assert isinstance(bridge.variables.to_linen_var(told), meta.AxisMetadata)
