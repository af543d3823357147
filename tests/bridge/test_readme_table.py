"""README's table "Coming from flax.nnx.bridge": this package does what each line says."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx, serialization
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import bridge

README = pathlib.Path(bridge.__file__).parents[1] / "README.md"
KEY, X = jax.random.key(0), jnp.ones((4, 8))
ANNOTATED = nn.Dense(16, kernel_init=nn.with_partitioning(nn.initializers.ones, ("data", "model")))


def made(lib, module, *args, rngs=None):
    return lib.lazy_init(lib.ToNNX(module, nnx.Rngs(0, dropout=1) if rngs is None else rngs), *args)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(3)(x))


class Counting(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.variable("cache", "c", lambda: jnp.zeros(())).value += 1
        return x


class WithSetup(nn.Module):
    features: int = 3

    def setup(self):
        self.encoder = nn.Dense(self.features)

    def __call__(self, x):
        return self.encoder(x)


class Sows(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("intermediates", "h", x)
        return nn.Dense(3)(x)


class Called(nn.Module):
    called: str

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name=self.called)(x)


class TwoCollections(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.ones, ())
        return x * w + self.variable("batch_stats", "w", lambda: jnp.ones(())).value


class Drops(nnx.Module):
    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x)


class DrawsAtInit(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(rngs.params.uniform((8,)) + rngs.dropout.uniform((8,)))

    def __call__(self, x):
        return x * self.w[None]


class NoRngs(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return x * self.w


class Listed(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs)])

    def __call__(self, x):
        return self.layers[0](x)


def train(lib):
    model = made(lib, Normed(), X)
    model.train()
    return model(X).shape


def evaluate(lib):
    model = lib.ToNNX(nn.Dropout(0.5), nnx.Rngs(dropout=1))
    model.eval()
    return bool((model(X) == X).all())


def closed_over(lib):
    model = made(lib, nn.Dense(3), X)
    return jax.jit(lambda x: model(x) + 0)(X).shape


def in_place(lib):
    model = made(lib, Counting(), X)
    before = model.c
    model(X, mutable=["cache"])
    return model.c is before


def repeated(lib):
    model = made(lib, nn.Dense(3), X)
    before = model.kernel[...]
    lib.lazy_init(model, X)
    return bool((model.kernel[...] == before).all())


def from_a_key(lib):
    expected = nn.Dense(3).init(KEY, X)["params"]["kernel"]
    return bool((made(lib, nn.Dense(3), X, rngs=KEY).kernel[...] == expected).all())


def taken_in(lib):
    return list(lib.ToNNX.from_variables(nn.Dense(3), nn.Dense(3).init(KEY, X)).linen_variables())


def captured(lib):
    return nnx.capture(lambda m: m(X).shape, nnx.Intermediate)(made(lib, Sows(), X))[0]


def with_a_mesh(lib):
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)):
        return made(lib, ANNOTATED, X).kernel[...].sharding.spec


def with_params(change):
    def run(lib):
        model = lib.to_linen(nnx.Linear, 8, 3)
        variables = model.init(KEY, X)
        return model.apply({**variables, "params": change(variables["params"])}, X).shape

    return run


def without_a_key(lib):
    model = lib.ToLinen(Drops)
    variables = model.init({"params": KEY, "dropout": KEY}, X)
    variables = {c: tree for c, tree in variables.items() if c not in ("RngKey", "RngCount")}
    return bool((model.apply(variables, X) == model.apply(variables, X)).all())


def evaluated_below(lib):
    class Middle(nn.Module):
        @nn.compact
        def __call__(self, x):
            return lib.to_linen(Drops)(x)

    model = made(lib, Middle(), X)
    model.eval()
    return bool((model(X) == X).all())


def restored_list(lib):
    model = lib.to_linen(Listed)
    params = serialization.to_state_dict(model.init(KEY, X)["params"])
    restored = serialization.msgpack_restore(serialization.msgpack_serialize(params))
    return model.apply({"params": restored}, X).shape


def initialised_below(lib):
    class Outer(nnx.Module):
        def __init__(self, rngs):
            self.inner = lib.ToNNX(nn.Dense(3), rngs=rngs)

        def __call__(self, x):
            return self.inner(x)

    model = lib.to_linen(Outer)
    return model.apply(model.init(KEY, X), X).shape


def equations(lib):
    model = lib.to_linen(nnx.Linear, 8, 3)
    return len(jax.make_jaxpr(model.apply)(model.init(KEY, X), X).eqns)


def named(name):
    return lambda lib: made(lib, Called(name), X)(X).shape


APPLY = "`apply` of `ToLinen`"
# (line of the table, what is run, what Flax's package does, what this one does); a type is raised.
# `python scripts/peer_defects.py` runs the lines with Flax's package too.
LINES = [
    ("train a wrapped `BatchNorm`", train, flax_errors.ModifyScopeVariableError, (4, 3)),
    ("`model.eval()` on a wrapped `nn.Dropout`", evaluate, ValueError, True),
    ("a deterministic call", closed_over, flax_errors.TraceContextError, (4, 3)),
    ("an update during a call", in_place, False, True),
    ("`lazy_init`", repeated, False, True),
    (
        "`lazy_init`",
        lambda lib: made(lib, nn.Dense(3), jax.ShapeDtypeStruct((4, 8), jnp.float32)).kernel.shape,
        TypeError,
        (8, 3),
    ),
    ("`rngs=key` for `ToNNX`", from_a_key, False, True),
    ("put in existing Linen variables", taken_in, AttributeError, ["params"]),
    (
        "`model.encoder(x)`",
        lambda lib: made(lib, WithSetup(), X).encoder(X).shape,
        TypeError,
        (4, 3),
    ),
    ("`model.features`", lambda lib: made(lib, WithSetup(), X).features, AttributeError, 3),
    *(
        ("a Linen name such as", named(name), AssertionError, (4, 3))
        for name in ("module", "rngs", "train", "sow")
    ),
    (
        "one name in two collections",
        lambda lib: made(lib, TwoCollections(), X)(X).shape,
        ValueError,
        (4, 8),
    ),
    ("what a wrapped module sows", captured, ValueError, (4, 3)),
    (
        "an annotated Linen module",
        lambda lib: made(lib, ANNOTATED, X)(X).shape,
        ValueError,
        (4, 16),
    ),
    ("an annotated Linen module", with_a_mesh, P("data", "model"), P("data", "model")),
    (
        "variables for `ToLinen` that lack a parameter",
        with_params(lambda params: {"kernel": params["kernel"]}),
        (4, 3),
        bridge.MismatchError,
    ),
    (
        "parameters of another shape",
        with_params(lambda params: {**params, "bias": jnp.ones(1)}),
        (4, 3),
        bridge.MismatchError,
    ),
    (APPLY, equations, 13, 3),
    ("`ToLinen` without any key", without_a_key, True, flax_errors.InvalidRngError),
    (
        "a constructor without `rngs`",
        lambda lib: lib.to_linen(NoRngs).init_with_output(KEY, X)[0].shape,
        TypeError,
        (4, 8),
    ),
    (
        "`init` with one key",
        lambda lib: lib.to_linen(DrawsAtInit).init_with_output({"params": KEY}, X)[0].shape,
        AttributeError,
        (4, 8),
    ),
    ("`model.eval()` on an NNX module inside", evaluated_below, False, True),
    (
        "an instance for `ToLinen`",
        lambda lib: lib.ToLinen(nnx.Linear(8, 3, rngs=nnx.Rngs(0))).init(KEY, X),
        TypeError,
        bridge.InvalidModuleError,
    ),
    ("integer keys of `nnx.List`", restored_list, KeyError, (4, 8)),
    ("a `ToNNX` below a `ToLinen`", initialised_below, flax_errors.ScopeCollectionNotFound, (4, 3)),
]


@pytest.mark.parametrize("index", range(len(LINES)), ids=[name for name, *_ in LINES])
def test_a_line_of_the_table_is_what_this_package_does(index):
    _, run, _, expected = LINES[index]
    if isinstance(expected, type):
        with pytest.raises(expected):
            run(bridge)
    else:
        assert run(bridge) == expected


def test_the_table_has_the_equations_that_are_counted():
    counted = next(expected for name, _, *expected in LINES if name == APPLY)
    line = next(line for line in table() if line.startswith(f"| {APPLY}"))
    assert [int(n) for n in re.findall(r"(\d+) equations", line)] == counted


def test_every_line_of_the_table_is_run():
    run = [name for name, *_ in LINES]
    # Measured by the benchmarks, whose numbers have a test of their own.
    elsewhere = ["a compiled step"]
    jobs = [line.split("|")[1].strip() for line in table()]
    assert [job for job in jobs if not any(name in job for name in [*run, *elsewhere])] == []
    assert [name for name in run if not any(name in job for job in jobs)] == []


def table():
    text = README.read_text()
    section = text.partition("## Coming from flax.nnx.bridge")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [line for line in lines if not line.startswith("| job")]
