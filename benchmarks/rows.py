"""The rows of the table, as data: what is measured, at which sizes, and what it should cost."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge as flax_bridge

import bridge

from . import linen_style, programs
from .linen_style import StyleCase
from .models import VIT, Case

Size: TypeAlias = int | str
# For a timed row what makes the function to be timed, for a counted one what gives the figure.
Subject: TypeAlias = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A figure to be had: one subject over another.

    Attributes:
      of: the subject above the line.
      to: the subject below it.
      at_most: the target, None where there is none.
      since: the smallest size that the target is for.
      is_for_stacks: whether it is not for a named model, which computes for longer than it takes to
        be dispatched.
    """

    of: str
    to: str
    at_most: float | None = None
    since: int = 1
    is_for_stacks: bool = False

    def target(self, size: Size) -> float | None:
        """The target at a size, None if there is none."""
        is_meant = size >= self.since if isinstance(size, int) else not self.is_for_stacks
        return self.at_most if is_meant else None


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
      name: what is measured.
      unit: seconds are timed, equations, instructions and bytes are counted.
      sizes: blocks, leaves, or the name of a model; a quick run takes the first two.
      subjects: by name; each is given the case of a size.
      ratios: what the table shows.
      case: makes what the subjects are given, None for the model of that size.
      largest: the largest size of a subject that is left out at larger ones.
      is_dispatch: whether calls are timed until they return rather than until they are done.
      rounds: of a row whose calls take long: how often at most every subject has its turn, in the
        first process alone.
      accelerator: the sizes for an accelerator; none of such a row's other sizes is measured there.
    """

    name: str
    unit: Literal["s", "equations", "instructions", "bytes"]
    sizes: tuple[Size, ...]
    subjects: Mapping[str, Subject]
    ratios: tuple[Ratio, ...]
    case: Callable[[Any], Any] | None = None
    largest: Mapping[str, int] = dataclasses.field(default_factory=dict)
    is_dispatch: bool = False
    rounds: int | None = None
    accelerator: tuple[Size, ...] = ()

    def subjects_at(self, size: Size) -> dict[str, Subject]:
        """The subjects that are measured at a size."""
        if not isinstance(size, int):
            return dict(self.subjects)
        return {n: s for n, s in self.subjects.items() if size <= self.largest.get(n, size)}


# Every form of a model as a pure function and its arguments.


def _linen(case: Case) -> tuple[Any, ...]:
    return case.linen.apply, case.variables, case.x


def _to_linen(case: Case) -> tuple[Any, ...]:
    return case.to_linen.apply, case.to_linen_variables, case.x


def _flax_to_linen(case: Case) -> tuple[Any, ...]:
    return case.flax_to_linen.apply, case.flax_to_linen_variables, case.x


def _merging(graphdef: Any, state: Any, x: Any) -> tuple[Any, ...]:
    return (lambda state, x: nnx.merge(graphdef, state)(x)), state, x


def _nnx(case: Case) -> tuple[Any, ...]:
    return _merging(*case.nnx_split, case.x)


def _to_nnx(case: Case) -> tuple[Any, ...]:
    return _merging(*nnx.split(case.to_nnx), case.x)


def _flax_to_nnx(case: Case) -> tuple[Any, ...]:
    return _merging(*nnx.split(case.flax_to_nnx), case.x)


PURE: Mapping[str, Subject] = {
    "NNX": _nnx,
    "ToLinen": _to_linen,
    "flax ToLinen": _flax_to_linen,
    "Linen": _linen,
    "ToNNX": _to_nnx,
    "flax ToNNX": _flax_to_nnx,
}


def _each(measured: Callable[..., Any]) -> dict[str, Subject]:
    """`measured(function, *arguments)` of every form of the model."""
    return {name: lambda case, pure=pure: measured(*pure(case)) for name, pure in PURE.items()}


def _calling(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: function(*args)


def _lowering(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    # A new function each time, or JAX would remember the first trace.
    return lambda: jax.jit(functools.partial(function)).lower(*args)


def _dispatching(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return _calling(jax.jit(function), *args)


def _both(at_most: float | None, since: int = 1) -> tuple[Ratio, ...]:
    """Either wrapper over what it wraps, and Flax's own beside it."""
    return (
        Ratio("ToLinen", "NNX", at_most, since),
        Ratio("flax ToLinen", "NNX"),
        Ratio("ToNNX", "Linen", at_most, since),
        Ratio("flax ToNNX", "Linen"),
    )


# An eager call of the module itself, which need not be merged first.


def _call_module(form: str) -> Subject:
    return lambda case: _calling(getattr(case, form), case.x)


# Dispatch alone: the compiled program hands back one of its arguments.


def _first_bias(variables: Any) -> Any:
    return variables["params"]["block_0"]["up"]["bias"]


def _dispatch_variables(form: str) -> Subject:
    return lambda case: _dispatching(_first_bias, getattr(case, form))


def _without_nnx(case: Case) -> Callable[[], Any]:
    variables = {k: v for k, v in case.to_linen_variables.items() if k != "nnx"}
    return _dispatching(_first_bias, variables)


# Initialisation.


def _native_init(case: Case) -> Callable[[], Any]:
    def init(key: Any) -> Any:
        model = case.construct(nnx.Rngs(key))
        model(case.x)
        return nnx.state(model)

    return lambda: init(case.key)


def _init(form: str) -> Subject:
    return lambda case: lambda: getattr(case, form).init(case.key, case.x)


def _to_nnx_init(wrapper: Any, lazy_init: Any) -> Subject:
    return lambda case: lambda: lazy_init(wrapper(case.linen, rngs=nnx.Rngs(0)), case.x)


INITS: Mapping[str, Subject] = {
    "NNX": _native_init,
    "ToLinen": _init("to_linen"),
    "flax ToLinen": _init("flax_to_linen"),
    "Linen": _init("linen"),
    "ToNNX": _to_nnx_init(bridge.ToNNX, bridge.lazy_init),
    "flax ToNNX": _to_nnx_init(flax_bridge.ToNNX, flax_bridge.lazy_init),
}
INITS_TO_LINEN = {name: INITS[name] for name in ("NNX", "ToLinen", "flax ToLinen")}


def _peak_live(init: Subject) -> Subject:
    return lambda case: programs.peak_live_bytes(init(case))


def _compiled_peak(init: Subject) -> Subject:
    return lambda case: programs.compiled_bytes(_of_key(init, case), case.key, case.x)


# Initialisation in shards: every call traces and compiles.


def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((jax.device_count(),), ("data",))


def _jitted_in_shards(init: Subject) -> Subject:
    def prepared(case: Case) -> Callable[[], Any]:
        mesh = _mesh()

        def call() -> Any:
            run = _of_key(init, case)
            shapes = jax.eval_shape(run, case.key, case.x)
            return jax.jit(run, out_shardings=nn.get_sharding(shapes, mesh))(case.key, case.x)

        return call

    return prepared


def _of_key(init: Subject, case: Case) -> Callable[..., Any]:
    """An initialisation as a function of the key and the input."""

    def run(key: Any, x: Any) -> Any:
        inner = dataclasses.replace(case)
        vars(inner).update(key=key, x=x)
        return init(inner)()

    return run


def _to_linen_in_shards(case: Case) -> Callable[[], Any]:
    mesh = _mesh()
    return lambda: bridge.init_sharded(case.to_linen, mesh, case.x, rngs=case.key)


def _to_nnx_in_shards(case: Case) -> Callable[[], Any]:
    mesh = _mesh()
    return lambda: bridge.init_sharded(lambda: bridge.ToNNX(case.linen, case.key), mesh, case.x)


# A compiled call of a module that keeps its state.


def _forward(model: Any, x: Any) -> Any:
    return model(x)


def _own(case: Case, form: str) -> Any:
    # A copy: `nnx.jit` rebuilds the modules it is given, and a step trains them.
    return nnx.clone(getattr(case, form))


def _nnx_jit(function: Callable[..., Any], form: str) -> Subject:
    return lambda case: _calling(nnx.jit(function), _own(case, form), case.x)


def _cached_partial(case: Case) -> Callable[[], Any]:
    return _calling(nnx.cached_partial(nnx.jit(_forward), _own(case, "to_nnx")), case.x)


def _jit_partial(function: Callable[..., Any]) -> Subject:
    return lambda case: _calling(bridge.jit_partial(function, _own(case, "to_nnx")), case.x)


def _flax_jit_partial(case: Case) -> Callable[[], Any]:
    own = _own(case, "to_nnx")
    jitted = nnx.jit_partial(_forward, own, graph=True, graph_updates=False)
    return _calling(jitted, case.x)


HOT_LOOPS: Mapping[str, Subject] = {
    "jax.jit of Linen": lambda case: _dispatching(*_linen(case)),
    "bridge.jit_partial": _jit_partial(_forward),
    "nnx.jit_partial": _flax_jit_partial,
    "nnx.cached_partial": _cached_partial,
    "nnx.jit": _nnx_jit(_forward, "to_nnx"),
}


def _hot_loop(at_most: float | None = None, since: int = 1) -> tuple[Ratio, ...]:
    base, ours, *others = HOT_LOOPS
    return Ratio(ours, base, at_most, since), *(Ratio(other, base) for other in others)


# One step of gradient descent.

RATE = 1e-3


def _pure_step(function: Callable[..., Any], variables: Any, x: Any) -> Callable[[], Any]:
    rest = {name: tree for name, tree in variables.items() if name != "params"}

    def step(params: Any, rest: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean(function({**rest, "params": params}, x) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - RATE * g, params, gradient)

    jitted = jax.jit(step)
    held = [variables["params"]]

    def call() -> Any:
        value, held[0] = jitted(held[0], rest, x)
        return value

    return call


def _nnx_step(model: Any, x: Any) -> Any:
    def loss(model: Any) -> Any:
        return jnp.mean(model(x) ** 2)

    value, gradient = nnx.value_and_grad(loss)(model)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - RATE * g, params, gradient))
    return value


# Conversion of a variables tree.


def variables_tree(leaves: int) -> dict[str, Any]:
    """Linen variables with this many leaves, all of them one small array."""
    array = jnp.ones((2,))
    layers = {f"layer_{i}": {"kernel": array, "bias": array} for i in range(leaves // 2)}
    return {"params": layers}


def _rebuilding(tree: Any) -> Callable[[], Any]:
    def call() -> Any:
        leaves, treedef = jax.tree_util.tree_flatten(tree)
        return jax.tree_util.tree_unflatten(treedef, leaves)

    return call


def _flax_attributes(variables: Any) -> Any:
    return flax_bridge.variables.linen_vars_to_nnx_attrs(variables)


CONVERSIONS: Mapping[str, Subject] = {
    "tree of arrays": _rebuilding,
    "State": lambda tree: _rebuilding(bridge.linen_to_nnx(tree)),
    "linen_to_nnx": lambda tree: _calling(bridge.linen_to_nnx, tree),
    "nnx_to_linen": lambda tree: _calling(bridge.nnx_to_linen, bridge.linen_to_nnx(tree)),
    "flax to NNX": lambda tree: _calling(_flax_attributes, tree),
    "flax to Linen": lambda tree: _calling(
        flax_bridge.variables.nnx_attrs_to_linen_vars, _flax_attributes(tree)
    ),
}

# A Linen class on another base class: `apply` on variables, and the module that keeps them.


def _applied(library: Any, measured: Callable[..., Any]) -> Subject:
    return lambda case: measured(*case.applying(library))


def _each_applied(measured: Callable[..., Any]) -> dict[str, Subject]:
    return {n: _applied(library, measured) for n, library in linen_style.APPLIED.items()}


ROWS: tuple[Row, ...] = (
    Row(
        "jaxpr equations",
        "equations",
        (1, 8, 32, 128, 1024, VIT),
        _each(programs.equations),
        _both(1.0),
        # It runs the constructor in the trace, and that time grows with the square of the size.
        largest={"flax ToLinen": 32},
    ),
    Row(
        "optimised HLO instructions",
        "instructions",
        (1, 8, 32, 128, VIT),
        _each(lambda *program: programs.instructions(*program).total()),
        _both(1.0),
        largest={"flax ToLinen": 32},
    ),
    Row(
        "eager call",
        "s",
        (1, 8, 32, VIT),
        {
            **_each(_calling),
            # A native model is called as it is.
            "NNX": _call_module("nnx"),
            "ToNNX": _call_module("to_nnx"),
            "flax ToNNX": _call_module("flax_to_nnx"),
        },
        (
            Ratio("ToLinen", "NNX", 1.25, 8),
            Ratio("flax ToLinen", "NNX"),
            Ratio("ToNNX", "Linen", 1.10, 8),
            Ratio("flax ToNNX", "Linen"),
        ),
    ),
    Row("trace and lower", "s", (1, 8, 32, VIT), _each(_lowering), _both(1.15)),
    Row(
        "jit dispatch, variables as argument",
        "s",
        (1, 8, 32, 256, 1024),
        {
            "without nnx": _without_nnx,
            "ToLinen": _dispatch_variables("to_linen_variables"),
            "flax ToLinen": _dispatch_variables("flax_to_linen_variables"),
        },
        (Ratio("ToLinen", "without nnx", 1.05, 256), Ratio("flax ToLinen", "without nnx")),
    ),
    Row(
        "init",
        "s",
        (1, 8, 32),
        INITS,
        (
            Ratio("ToLinen", "NNX", 1.15, 8),
            Ratio("flax ToLinen", "NNX"),
            Ratio("ToNNX", "Linen"),
            Ratio("flax ToNNX", "Linen"),
        ),
    ),
    Row(
        "init, peak of live arrays",
        "bytes",
        (1, 2),
        {name: _peak_live(init) for name, init in INITS_TO_LINEN.items()},
        (Ratio("ToLinen", "NNX", 1.02), Ratio("flax ToLinen", "NNX")),
    ),
    Row(
        "init under jit, peak memory",
        "bytes",
        (1, 8),
        {name: _compiled_peak(init) for name, init in INITS_TO_LINEN.items()},
        (Ratio("ToLinen", "NNX", 1.02), Ratio("flax ToLinen", "NNX")),
    ),
    Row(
        "init in shards",
        "s",
        (2,),
        {
            "NNX": _jitted_in_shards(INITS["NNX"]),
            "ToLinen": _to_linen_in_shards,
            "flax ToLinen": _jitted_in_shards(INITS["flax ToLinen"]),
            "Linen": _jitted_in_shards(INITS["Linen"]),
            "ToNNX": _to_nnx_in_shards,
        },
        (
            Ratio("ToLinen", "NNX"),
            Ratio("flax ToLinen", "NNX"),
            Ratio("ToNNX", "Linen"),
        ),
    ),
    Row(
        "nnx.jit call",
        "s",
        (1, 8, 32, 128, VIT),
        {
            "NNX": _nnx_jit(_forward, "nnx"),
            "ToNNX": _nnx_jit(_forward, "to_nnx"),
            "flax ToNNX": _nnx_jit(_forward, "flax_to_nnx"),
        },
        (Ratio("ToNNX", "NNX", 0.57, 8, is_for_stacks=True), Ratio("flax ToNNX", "NNX")),
    ),
    Row(
        "call in a hot loop, dispatch",
        "s",
        (1, 8, 32, 128, VIT),
        HOT_LOOPS,
        _hot_loop(1.10, 8),
        is_dispatch=True,
    ),
    Row("call in a hot loop, throughput", "s", (1, 8, 32, 128, VIT), HOT_LOOPS, _hot_loop()),
    Row(
        "gradient step",
        "s",
        (1, 8, 32),
        {
            "Linen": lambda case: _pure_step(*_linen(case)),
            "ToLinen": lambda case: _pure_step(*_to_linen(case)),
            "flax ToLinen": lambda case: _pure_step(*_flax_to_linen(case)),
            "NNX": _nnx_jit(_nnx_step, "nnx"),
            "ToNNX": _nnx_jit(_nnx_step, "to_nnx"),
            "flax ToNNX": _nnx_jit(_nnx_step, "flax_to_nnx"),
            "ToNNX, bridge.jit_partial": _jit_partial(_nnx_step),
        },
        (
            Ratio("ToLinen", "Linen"),
            Ratio("flax ToLinen", "Linen"),
            Ratio("ToNNX", "NNX"),
            Ratio("flax ToNNX", "NNX"),
            Ratio("ToNNX, bridge.jit_partial", "Linen"),
        ),
    ),
    Row(
        "conversion of a variables tree",
        "s",
        (1_000, 10_000, 30_000),
        CONVERSIONS,
        (
            Ratio("linen_to_nnx", "State", 3.0, 10_000),
            Ratio("nnx_to_linen", "State", 3.0, 10_000),
            Ratio("flax to NNX", "State"),
            Ratio("flax to Linen", "State"),
        ),
        case=variables_tree,
    ),
    Row(
        "a Linen class on bridge.Module: jaxpr equations",
        "equations",
        (1, 8, 32),
        _each_applied(programs.equations),
        (Ratio("bridge.Module", "Linen", 1.0), Ratio("flax bridge.Module", "Linen")),
        case=StyleCase,
    ),
    Row(
        "a Linen class on bridge.Module: eager call",
        "s",
        (1, 8, 32),
        {
            **_each_applied(_calling),
            "kept": lambda case: _calling(*case.kept()),
            "NNX": lambda case: _calling(*case.native()),
        },
        (
            Ratio("bridge.Module", "Linen", 1.15, 8),
            Ratio("kept", "Linen", 1.15, 8),
            Ratio("kept", "NNX"),
            Ratio("flax bridge.Module", "Linen"),
        ),
        case=StyleCase,
    ),
)
