"""Linen transforms over `ToLinen`: the state kinds, the reference models, and the table of cells.

Every NNX class here has a pure Linen twin with the same variables at the same paths and the same
operations in the same order, so that one program runs on either and the results are compared.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict, lift, meta
from flax.linen import transforms as linen_transforms

import bridge
import registry
from tests.models import assert_identical, linen_key_at

FEATURES = 4
TOKENS = 4
LAYERS = 2
BATCH = 2
LAYER_AXIS = {nn.PARTITION_NAME: "layers"}
STREAMS = ("RngKey", "RngCount")


# -- state kinds ---------------------------------------------------------------------------------


class Hits(nnx.Variable):
    """A Variable type that is registered under another name than its own."""


class Misses(nnx.Variable):
    """A Variable type that nobody registers: its collection is called after the class."""


registry.register_variable_name_type_pair("linen_transform_hits", Hits)


class Plain(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(FEATURES, FEATURES, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class LinenPlain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(FEATURES, name="linear")(x))


class Normed(nnx.Module):
    """Normalizes, and keeps running statistics."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(FEATURES))
        self.var = nnx.BatchStat(jnp.ones(FEATURES))

    def __call__(self, x):
        x = self.linear(x)
        mean, var = x.mean(0), x.var(0)
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * mean
        self.var[...] = 0.9 * self.var[...] + 0.1 * var
        return _normalized(x, mean, var)


class LinenNormed(nn.Module):
    @nn.compact
    def __call__(self, x):
        average = self.variable("batch_stats", "mean", jnp.zeros, FEATURES)
        variance = self.variable("batch_stats", "var", jnp.ones, FEATURES)
        x = nn.Dense(FEATURES, name="linear")(x)
        mean, var = x.mean(0), x.var(0)
        if not self.is_initializing():
            average.value = 0.9 * average.value + 0.1 * mean
            variance.value = 0.9 * variance.value + 0.1 * var
        return _normalized(x, mean, var)


def _normalized(x, mean, var):
    mean, var = (jnp.broadcast_to(of, x.shape) for of in (mean, var))
    return (x - mean) * jax.lax.rsqrt(var + 1e-5)


class Dropped(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


class LinenDropped(nn.Module):
    """Draws, from the keys that Linen hands to the scope, what an NNX stream draws from its key."""

    @nn.compact
    def __call__(self, x):
        count = jnp.zeros((), jnp.uint32)
        key = linen_key_at(self.make_rng("dropout"), "dropout", "rngs")
        x = nn.Dense(FEATURES, name="linear")(x)
        return _drop(jax.random.fold_in(key, count), x)


class LinenStreams(nn.Module):
    """Keeps the key and the count of its stream in variables."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(FEATURES, name="linear")(x)
        return LinenStreamDropout(name="dropout")(x)


class LinenStreamDropout(nn.Module):
    @nn.compact
    def __call__(self, x):
        return _drop(LinenStream(name="rngs")(), x)


class LinenStream(nn.Module):
    @nn.compact
    def __call__(self):
        key = self.variable("RngKey", "key", lambda: self.make_rng("params"))
        count = self.variable("RngCount", "count", lambda: jnp.zeros((), jnp.uint32))
        drawn = jax.random.fold_in(key.value, count.value)
        if not self.is_initializing():
            count.value = count.value + 1
        return drawn


def _drop(key, x):
    mask = jax.random.bernoulli(key, p=0.5, shape=x.shape)
    return jax.lax.select(mask, x / 0.5, jnp.zeros_like(x))


class Sowing(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(FEATURES, FEATURES, rngs=rngs)

    def __call__(self, x):
        x = jnp.tanh(self.linear(x))
        self.sow(nnx.Intermediate, "features", x)
        self.sow(nnx.Intermediate, "features", 2 * x)
        return x


class LinenSowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Dense(FEATURES, name="linear")(x))
        if not self.is_initializing():
            self.sow("intermediates", "features", x)
            self.sow("intermediates", "features", 2 * x)
        return x


class Attending(nnx.Module):
    """Attends over the tokens that it has seen, one token in each call."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.seen = nnx.Cache(jnp.zeros((TOKENS, BATCH, FEATURES)))
        self.index = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        x = self.linear(x)
        self.seen[...] = _with_token(self.seen[...], self.index[...], x)
        y = _attended(self.seen[...], self.index[...], x)
        self.index[...] = self.index[...] + 1
        return y


class LinenAttending(nn.Module):
    @nn.compact
    def __call__(self, x):
        seen = self.variable("cache", "seen", jnp.zeros, (TOKENS, BATCH, FEATURES))
        index = self.variable("cache", "index", jnp.zeros, (), jnp.int32)
        x = nn.Dense(FEATURES, name="linear")(x)
        if self.is_initializing():
            return x
        seen.value = _with_token(seen.value, index.value, x)
        y = _attended(seen.value, index.value, x)
        index.value = index.value + 1
        return y


def _with_token(seen, index, x):
    return jax.lax.dynamic_update_index_in_dim(seen, x, index, 0)


def _attended(seen, index, x):
    weights = jnp.einsum("tbf,bf->tb", seen, x)
    is_seen = jnp.broadcast_to((jnp.arange(TOKENS) <= index)[:, None], weights.shape)
    weights = jax.nn.softmax(weights, axis=0, where=is_seen)
    return jnp.einsum("tb,tbf->bf", weights, seen)


class Counting(nnx.Module):
    """Adds the number of its calls to its output."""

    def __init__(self, var_type, *, rngs):
        self.linear = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
        self.calls = var_type(jnp.zeros(FEATURES))

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        return jnp.tanh(self.linear(x)) + jnp.broadcast_to(self.calls[...], x.shape)


class CountingHits(Counting):
    def __init__(self, *, rngs):
        super().__init__(Hits, rngs=rngs)


class CountingMisses(Counting):
    def __init__(self, *, rngs):
        super().__init__(Misses, rngs=rngs)


class LinenCounting(nn.Module):
    collection: str

    @nn.compact
    def __call__(self, x):
        calls = self.variable(self.collection, "calls", jnp.zeros, FEATURES)
        if not self.is_initializing():
            calls.value = calls.value + 1
        x = jnp.tanh(nn.Dense(FEATURES, name="linear")(x))
        return x + jnp.broadcast_to(calls.value, x.shape)


class Partitioned(nnx.Module):
    def __init__(self, *, rngs):
        normal = nnx.initializers.normal()
        self.linear = nnx.Linear(
            FEATURES,
            FEATURES,
            kernel_init=nnx.with_partitioning(normal, ("in", "out")),
            bias_init=nnx.with_partitioning(normal, ("out",)),
            rngs=rngs,
        )

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class LinenPartitioned(nn.Module):
    @nn.compact
    def __call__(self, x):
        normal = nn.initializers.normal()
        dense = nn.Dense(
            FEATURES,
            kernel_init=nn.with_partitioning(normal, ("in", "out")),
            bias_init=nn.with_partitioning(normal, ("out",)),
            name="linear",
        )
        return jnp.tanh(dense(x))


@dataclasses.dataclass(frozen=True)
class State:
    """A kind of state.

    Attributes:
      nnx_class: an NNX class that holds it.
      linen_class: the pure Linen twin.
      fields: the twin's fields.
      read: the collections beside `params` that exist before a call.
      updated: the collections that a call updates or creates.
      rngs: the streams that every `apply` is given keys for.
      split: whether a lifted transform splits those.
    """

    nnx_class: type[nnx.Module]
    linen_class: type[nn.Module]
    fields: Mapping[str, Any] = FrozenDict({})
    read: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    rngs: tuple[str, ...] = ()
    split: bool = True

    @property
    def collections(self) -> tuple[str, ...]:
        """All collections that hold variables, `params` first."""
        return tuple(dict.fromkeys(("params", *self.read, *self.updated)))


STATES = {
    "params": State(Plain, LinenPlain),
    "batch_stats": State(Normed, LinenNormed, read=("batch_stats",), updated=("batch_stats",)),
    "dropout_split": State(Dropped, LinenDropped, rngs=("dropout",)),
    "dropout_shared": State(Dropped, LinenDropped, rngs=("dropout",), split=False),
    "rng_streams": State(Dropped, LinenStreams, read=STREAMS, updated=("RngCount",)),
    "sown": State(Sowing, LinenSowing, updated=("intermediates",)),
    "kv_cache": State(Attending, LinenAttending, read=("cache",), updated=("cache",)),
    "registered_type": State(
        CountingHits,
        LinenCounting,
        FrozenDict(collection="linen_transform_hits"),
        read=("linen_transform_hits",),
        updated=("linen_transform_hits",),
    ),
    "unregistered_type": State(
        CountingMisses,
        LinenCounting,
        FrozenDict(collection="Misses"),
        read=("Misses",),
        updated=("Misses",),
    ),
    "partitioned": State(Partitioned, LinenPartitioned),
}


# -- modules -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Maker:
    """A Linen class and its fields: what a class transform and an instance are made from."""

    cls: type[nn.Module]
    fields: Mapping[str, Any] = FrozenDict({})

    def __call__(self, **fields: Any) -> nn.Module:
        return self.cls(**self.fields, **fields)


class Parent(nn.Module):
    """A Linen module that holds another one."""

    make: Callable[..., nn.Module]

    def setup(self):
        self.inner = self.make()

    def __call__(self, x):
        return self.inner(x)


@functools.cache
def stepping(cls: type) -> type:
    """The class with the signature of a scan body."""

    def step(self, x, _):
        return cls.__call__(self, x), None

    return type(f"{cls.__name__}Step", (cls,), {"__call__": step, "__module__": __name__})


def made_by(kind: str, state: State, *, steps: bool = False) -> Maker:
    """The maker of a module.

    Args:
      kind: `to_linen`, `to_linen_class` or `parent` for the bridged module, `twin` or `twin_parent`
        for the pure Linen one.
      state: its state.
      steps: whether it has the signature of a scan body.
    """
    as_is = stepping if steps else lambda cls: cls
    if kind == "to_linen":
        return Maker(bridge.ToLinen, FrozenDict(nnx_class=as_is(state.nnx_class)))
    if kind == "to_linen_class":
        return Maker(_to_linen_class(as_is(state.nnx_class)))
    if kind == "twin":
        return Maker(as_is(state.linen_class), state.fields)
    inner = functools.partial(bridge.to_linen, state.nnx_class)
    if kind == "twin_parent":
        inner = Maker(state.linen_class, state.fields)
    return Maker(as_is(Parent), FrozenDict(make=inner))


_to_linen_class = functools.cache(bridge.to_linen_class)


class Program(nn.Module):
    """Runs a function of itself."""

    body: Callable[..., Any]

    @nn.compact
    def __call__(self, x):
        return self.body(self, x)


# -- transforms ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """What a program is built from.

    Attributes:
      state: the state kind.
      way: `class` if the class is transformed, `function` if a function of the module.
      kind: see `made_by`.
      named: whether the collection `nnx` is named among those that are lifted.
    """

    state: State
    way: str
    kind: str
    named: bool

    @property
    def split_rngs(self) -> dict[str, bool]:
        return {"params": True, **dict.fromkeys(self.state.rngs, self.state.split)}

    def lifted(self, *leave_out: str) -> list[str]:
        """The collections to name."""
        names = [c for c in self.state.collections if c not in leave_out]
        return names + ["nnx"] * self.named

    def over(self, lifting: Callable[[Any], Any], *, steps: bool = False) -> Callable[..., Any]:
        """The transformed module, called `m`, as a function of the module's inputs."""
        if self.way == "class":
            maker = made_by(self.kind, self.state, steps=steps)
            return lifting(maker.cls)(**maker.fields, name="m")
        called = _call_step if steps else _call
        return functools.partial(lifting(called), self.module())

    def module(self) -> nn.Module:
        """The module itself, called `m`."""
        return made_by(self.kind, self.state)(name="m")


def _call(module, x):
    return module(x)


def _call_step(module, x, _):
    return module(x), None


def _loss(module, x):
    return jnp.sum(module(x) ** 2)


def transposed(fn, target="params", variables=True, rngs=True):
    """The transform of the guide on lifted transformations: `params` are seen transposed."""

    def wrapper(scope_fn, repack_fn, variable_groups, rng_groups, *args):
        target, rest = variable_groups
        target = jax.tree.map(lambda x: x.T if x.ndim == 2 else x, target)
        scope = scope_fn((target, rest), rng_groups)
        y = fn(scope, *args)
        return y, repack_fn(scope)

    return lift.pack(
        wrapper,
        in_variable_filters=(target, variables),
        out_variable_filters=(variables,),
        rng_filters=(rngs,),
    )


def _vmap(case, root, x):
    axes = dict.fromkeys(case.lifted("nnx"), 0) | ({"nnx": None} if case.named else {})
    mapped = case.over(
        lambda target: nn.vmap(
            target, variable_axes=axes, split_rngs=case.split_rngs, metadata_params=LAYER_AXIS
        )
    )
    return mapped(jnp.stack([x, 2 * x]))


def _vmap_shared(case, root, x):
    """Parameters (and keys) are broadcast; what a call updates is not."""
    updated = case.state.updated
    axes = {name: 0 if name in updated else None for name in case.lifted()}
    mapped = case.over(
        lambda target: nn.vmap(
            target,
            variable_axes=axes,
            split_rngs=case.split_rngs | {"params": False},
            metadata_params=LAYER_AXIS,
        )
    )
    return mapped(jnp.stack([x, 2 * x]))


def _scan(case, root, x):
    """Layers that are stacked."""
    axes = dict.fromkeys(c for c in case.lifted() if c != "nnx")
    scanned = case.over(
        lambda target: nn.scan(
            target,
            variable_axes=dict.fromkeys(axes, 0),
            variable_broadcast="nnx" if case.named else False,
            split_rngs=case.split_rngs,
            length=LAYERS,
            metadata_params=LAYER_AXIS,
        ),
        steps=True,
    )
    return scanned(x, None)[0]


def _scan_carry(case, root, x):
    """One layer, called again and again; what it updates is carried."""
    module = case.module()
    if root.is_initializing():
        return module(x)
    carried = [c for c in case.state.updated if c != "intermediates"]
    scanned = nn.scan(
        _call_step,
        variable_axes={"intermediates": 0},
        variable_broadcast=case.lifted(*carried, "intermediates"),
        variable_carry=carried,
        split_rngs=dict.fromkeys(case.state.rngs, case.state.split),
        length=LAYERS,
    )
    return scanned(module, x, None)[0]


def _remat_scan(case, root, x):
    axes = dict.fromkeys([True] if case.named else case.lifted(), 0)
    split = dict.fromkeys(case.split_rngs, True) | case.split_rngs
    return case.over(
        lambda target: nn.remat_scan(
            target, lengths=(LAYERS, 1), variable_axes=axes, split_rngs=split
        )
    )(x)


def _filtered(transform):
    def run(case, root, x):
        variables = True if case.named else case.lifted()
        return case.over(lambda target: transform(target, variables=variables))(x)

    return run


def _map_variables(case, root, x):
    return case.over(
        lambda target: nn.map_variables(
            target,
            "params",
            trans_in_fn=functools.partial(jax.tree.map, lambda p: 2 * p),
            init=root.is_initializing(),
            variables=True if case.named else case.lifted(),
        )
    )(x)


def _add_metadata_axis(case, root, x):
    axes = {"params": 0} | ({"nnx": 0} if case.named else {})
    return case.over(
        lambda target: nn.add_metadata_axis(target, variable_axes=axes, metadata_params=LAYER_AXIS)
    )(x)


def _pack(case, root, x):
    variables = True if case.named else case.lifted()
    return case.over(
        lambda target: linen_transforms.lift_transform(transposed, target, variables=variables)
    )(x)


def _jvp(case, root, x):
    module = case.module()
    tangents = {"params": jax.tree.map(jnp.ones_like, module.variables.get("params", {}))}
    return nn.jvp(
        _call,
        module,
        (x,),
        (jnp.ones_like(x),),
        variable_tangents=tangents,
        variables=True if case.named else case.lifted(),
    )


def _vjp(case, root, x):
    variables = True if case.named else case.lifted()
    y, backward = nn.vjp(_call, case.module(), x, variables=variables)
    return y, backward(jnp.ones_like(y))


def _grad(case, root, x):
    return nn.grad(_loss, case.module(), x, variables=True if case.named else case.lifted())


def _value_and_grad(case, root, x):
    variables = True if case.named else case.lifted()
    return nn.value_and_grad(_loss, case.module(), x, variables=variables)


def _custom_vjp(case, root, x):
    def backward(vjp, y_tangent):
        params_t, *inputs_t = vjp(y_tangent)
        return (jax.tree.map(jnp.sign, params_t), *inputs_t)

    def forward(module, x):
        return nn.vjp(_call, module, x)

    return nn.custom_vjp(_call, forward_fn=forward, backward_fn=backward)(case.module(), x)


def _while_loop(case, root, x):
    module = case.module()
    if root.is_initializing():
        return module(x)
    carried = [c for c in case.state.updated if c != "intermediates"]
    return nn.while_loop(
        lambda module, carry: carry[0] < LAYERS,
        lambda module, carry: (carry[0] + 1, module(carry[1])),
        module,
        (0, x),
        carry_variables=carried,
        broadcast_variables=True if case.named else case.lifted(*carried, "intermediates"),
        split_rngs=dict.fromkeys(case.state.rngs, case.state.split),
    )[1]


def _negated(module, x):
    return -module(x)


def _cond(case, root, x):
    variables = True if case.named else case.lifted()
    return nn.cond(jnp.sum(x) > 1e3, _call, _negated, case.module(), x, variables=variables)


def _switch(case, root, x):
    variables = True if case.named else case.lifted()
    branches = [_call, lambda module, x: 2 * module(x), _negated]
    return nn.switch(jnp.int32(1), branches, case.module(), x, variables=variables)


CLASS_FORMS = (
    ("class", "to_linen"),
    ("class", "to_linen_class"),
    ("class", "parent"),
    ("function", "to_linen"),
)
FUNCTION_FORMS = (
    ("function", "to_linen"),
    ("function", "to_linen_class"),
    ("function", "parent"),
)


@dataclasses.dataclass(frozen=True)
class Transform:
    """A lifted transform.

    Attributes:
      row: its row in the table.
      run: `(case, root module, x) -> output`.
      forms: `(way, kind)` of every form.
      leave_out: the states for which it has no meaning.
      reverse: whether it can be differentiated in reverse mode.
      filters: whether it can be told which collections to lift.
    """

    row: str
    run: Callable[..., Any]
    forms: tuple[tuple[str, str], ...] = FUNCTION_FORMS
    leave_out: tuple[str, ...] = ()
    reverse: bool = True
    filters: bool = True


TRANSFORMS = {
    "vmap": Transform("vmap", _vmap, CLASS_FORMS),
    "vmap_shared": Transform("vmap", _vmap_shared, CLASS_FORMS),
    "scan": Transform("scan", _scan, CLASS_FORMS),
    "scan_carry": Transform("scan", _scan_carry),
    "jit": Transform("jit", _filtered(nn.jit), CLASS_FORMS),
    "remat": Transform("remat", _filtered(nn.remat), CLASS_FORMS),
    "map_variables": Transform("map_variables", _map_variables, CLASS_FORMS),
    "jvp": Transform("jvp", _jvp),
    "vjp": Transform("vjp", _vjp),
    "grad": Transform("grad", _grad),
    "value_and_grad": Transform("value_and_grad", _value_and_grad),
    "custom_vjp": Transform("custom_vjp", _custom_vjp, filters=False),
    "cond": Transform("cond", _cond),
    "switch": Transform("switch", _switch),
    "add_metadata_axis": Transform("add_metadata_axis", _add_metadata_axis, CLASS_FORMS),
    "pack": Transform("pack", _pack, CLASS_FORMS),
    # These two are last, so that the others lack no turn in the column that they leave out.
    "while_loop": Transform("while_loop", _while_loop, reverse=False, leave_out=("sown",)),
    # It takes no metadata_params, without which pure Linen's box cannot name the new axis.
    "remat_scan": Transform("remat_scan", _remat_scan, CLASS_FORMS, leave_out=("partitioned",)),
}


# -- the table -----------------------------------------------------------------------------------


def _table() -> dict[str, tuple[str, str, str, str, bool]]:
    """The forms take turns, so that each meets every transform and every state."""
    cells = {}
    rows: dict[int, int] = {}
    for name, transform in TRANSFORMS.items():
        named_too = (True, False) if transform.filters else (True,)
        forms = [(*form, named) for form in transform.forms for named in named_too]
        row = rows[len(forms)] = rows.get(len(forms), -1) + 1
        states = [state for state in STATES if state not in transform.leave_out]
        for turn, state in enumerate(states, start=row):
            way, kind, named = forms[turn % len(forms)]
            nnx_collection = "named" if named else "forgotten"
            test_id = f"{name}-{state}-{way}-{kind}-{nnx_collection}"
            cells[test_id] = name, state, way, kind, named
    return cells


# `(transform, state, way, kind, named)` by test id.
TABLE = _table()
FILES = {"class": "test_linen_classes", "function": "test_linen_functions"}
# (row, column) -> the test that the guides link to.
CELLS: dict[tuple[str, str], str] = {}
for _id, (_transform, _state, _way, *_) in TABLE.items():
    CELLS.setdefault(
        (TRANSFORMS[_transform].row, _state),
        f"tests/transforms/{FILES[_way]}.py::"
        f"test_a_transformed_nnx_module_computes_what_its_linen_twin_computes[{_id}]",
    )


# -- the comparison ------------------------------------------------------------------------------

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(7), (BATCH, FEATURES))


def program(transform: str, state: str, way: str, kind: str, named: bool) -> Program:
    """The Linen program of a cell."""
    case = Case(STATES[state], way, kind, named)
    return Program(functools.partial(TRANSFORMS[transform].run, case))


def keys(state: State, *names: str, call: int = 0) -> dict[str, Any]:
    """A key for each name and for each stream of the state, other ones in every call."""
    return {n: jax.random.fold_in(KEY, 10 * call + i) for i, n in enumerate((*names, *state.rngs))}


def without(variables: Mapping[str, Any], *collections: str) -> dict[str, Any]:
    return {name: tree for name, tree in variables.items() if name not in collections}


def specs(tree: Any) -> dict[str, Any]:
    """The partition spec of every leaf by path."""
    found = jax.tree_util.tree_leaves_with_path(
        nn.get_partition_spec(tree), is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec)
    )
    return {jax.tree_util.keystr(path): spec for path, spec in found}


def some_values(abstract: Any) -> Any:
    """Values for abstract variables, the same for the same shapes."""
    generator = np.random.default_rng(0)

    def value(leaf):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(KEY, leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.zeros(leaf.shape, leaf.dtype)
        # Positive, as a variance has to be.
        return jnp.asarray(generator.uniform(0.1, 1.0, leaf.shape), leaf.dtype)

    return jax.tree.map(value, abstract)


class TwoCalls:
    """What two calls return: output, gradient of the parameters, and updates.

    Args:
      module: a program.
      variables: its variables, with anything for values.
      values: the values, unboxed, without collection `nnx`.
      state: the state kind.
      transform: the transform.

    Attributes:
      text: the program that both calls run, with its constants and without names.
      form: the structure of what a call returns, with partition specs.
    """

    def __init__(
        self, module: nn.Module, variables: Any, values: Any, state: State, transform: Transform
    ) -> None:
        traced = []

        def loss(params, variables, rngs):
            y, updates = module.apply(
                variables | {"params": params}, X, rngs=rngs, mutable=list(state.updated)
            )
            return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(y)), (y, updates)

        def step(leaves, rngs):
            full = dict(variables)
            for name, tree in jax.tree.unflatten(treedef, leaves).items():
                full[name] = meta.replace_boxed(variables[name], tree)
            differentiate = jax.grad if transform.reverse else _forward_gradient
            gradient, (y, updates) = differentiate(loss, has_aux=True)(full["params"], full, rngs)
            out = {"y": y, "gradient": gradient, "updates": updates}
            plain = nn.unbox(out)
            kept = without(plain["updates"], "intermediates")
            traced.append((jax.tree.structure(plain), specs(out), jax.tree.structure(kept)))
            return jax.tree.leaves(plain), jax.tree.leaves(kept)

        # Flat arguments, so that programs that differ in names only have one text.
        leaves, treedef = jax.tree.flatten(values)
        self._lowered = jax.jit(step).lower(leaves, keys(state))
        self._values, self._state = values, state
        structure, out_specs, self._updated = traced[-1]
        self.text, self.form = self._lowered.as_text(), (structure, out_specs)

    @functools.cached_property
    def leaves(self) -> Any:
        """The arrays that both calls return."""
        run = self._lowered.compile()
        first, updates = run(jax.tree.leaves(self._values), keys(self._state))
        updated = jax.tree.unflatten(self._updated, updates)
        second, _ = run(jax.tree.leaves(self._values | updated), keys(self._state, call=1))
        return first, second


def _forward_gradient(loss, has_aux):
    def run(params, *rest):
        ones = jax.tree.map(jnp.ones_like, params)
        _, gradient, aux = jax.jvp(lambda p: loss(p, *rest), (params,), (ones,), has_aux=has_aux)
        return gradient, aux

    return run


@functools.cache
def twin_calls(transform: str, state: str, way: str, kind: str) -> tuple[Any, Any, TwoCalls]:
    """The pure Linen program's abstract variables, their values, and its calls."""
    module = program(transform, state, way, kind, named=False)
    variables = jax.eval_shape(module.init, keys(STATES[state], "params"), X)
    values = some_values(nn.unbox(variables))
    found = TwoCalls(module, variables, values, STATES[state], TRANSFORMS[transform])
    return variables, values, found


def compare_with_twin(transform: str, state: str, way: str, kind: str, named: bool) -> None:
    """Asserts that the bridged program is what the pure Linen program is, bit for bit."""
    column = STATES[state]
    with nnx.use_eager_sharding(False):
        expected, values, twin = twin_calls(
            transform, state, way, "twin_parent" if kind == "parent" else "twin"
        )
        module = program(transform, state, way, kind, named)
        variables = jax.eval_shape(module.init, keys(column, "params"), X)
        # A program that names no collection of RNG state has its keys from rngs= alone.
        own = without(variables, "nnx", *(() if column.read == STREAMS else STREAMS))
        assert jax.tree.map(_aval, nn.unbox(own)) == jax.tree.map(_aval, nn.unbox(expected))
        assert specs(own) == specs(expected)
        # A program that forgets the collection loads checkpoints without it, too.
        given = own | ({"nnx": variables["nnx"]} if named and "nnx" in variables else {})
        calls = TwoCalls(module, given, values, column, TRANSFORMS[transform])
        assert calls.form == twin.form
        # One program returns the same for the same values; compiling it takes half of the time.
        if calls.text == twin.text:
            return
        assert_identical(calls.leaves, twin.leaves)


def _aval(leaf: Any) -> Any:
    return leaf.shape, leaf.dtype
