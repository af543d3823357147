"""The kinds of state that a ToNNX holds, each with the pure Linen computation of it."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import bridge
import registry

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
# In tree mode the custom_vjp of Flax 0.12.7 refuses updates, for native modules too.
CUSTOM_VJP_TAKES_UPDATES = hasattr(nnx, "with_vars")
PARTITION = {nnx.PARTITION_NAME: "layers"}


class Average(nnx.Variable):
    """A Variable type of the user's own."""


registry.register_variable_name("transforms_average", Average)


class Plain(nn.Module):
    """Parameters only, at two depths."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.Sequential([nn.Dense(3), nn.tanh])(x))


class Normalized(nn.Module):
    """Running statistics."""

    use_running_average: bool | None = None
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        norm = nn.BatchNorm(self.use_running_average, momentum=0.9, axis_name=self.axis_name)
        return norm(x)


class Dropped(nn.Module):
    """Dropout after a Dense layer."""

    deterministic: bool = False

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=self.deterministic)(nn.Dense(4)(x))


class Sows(nn.Module):
    """Sows at two depths."""

    @nn.compact
    def __call__(self, x):
        x = SowsInside()(x)
        self.sow("intermediates", "sum", x.sum())
        return x


class SowsInside(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        self.sow("intermediates", "out", x)
        return x


class Averages(nn.Module):
    """Keeps a moving average in a collection of the user's own."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        average = self.variable("transforms_average", "average", jnp.zeros, (1, 4))
        if self.is_mutable_collection("transforms_average") and not self.is_initializing():
            average.value = 0.9 * average.value + 0.1 * x.mean(0, keepdims=True)
        return x - average.value


class Partitioned(nn.Module):
    """Annotated parameters."""

    @nn.compact
    def __call__(self, x):
        kernel = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
        bias = nn.with_partitioning(nn.initializers.ones, ("out",))
        return nn.Dense(4, kernel_init=kernel, bias_init=bias)(x)


class Attends(nn.Module):
    """Attends over what it was called with, as a layer that decodes token by token."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        seen = self.variable("cache", "seen", jnp.zeros, (len(x), 5, 4))
        index = self.variable("cache", "index", jnp.zeros, (), jnp.int32)
        if self.is_initializing():
            return x
        seen.value = jax.lax.dynamic_update_index_in_dim(seen.value, x, index.value, 1)
        index.value = index.value + 1
        return jnp.einsum("bf,btf,btg->bg", x, seen.value, seen.value)


class Parent(nnx.Module):
    """An NNX module with a parameter of its own that holds a wrapped module."""

    def __init__(self, inner):
        self.inner = inner
        self.scale = nnx.Param(jnp.array(1.5))

    def __call__(self, x, **kwargs):
        return self.inner(x, **kwargs) * self.scale.get_value()


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of state.

    Attributes:
      module: the Linen module.
      mutable: the collections that a pure call updates.
      call_mutable: what a call of the wrapped module passes as `mutable`.
      mutable_option: what the wrapper is constructed with.
      streams: the RNG streams that one call draws from.
      reference: the Linen module of the pure computation, if it is another one.
      train: whether `train()` or `eval()` is called first, None for neither.
      returns_sown: whether a call returns what it sows, next to its output.
    """

    module: nn.Module
    mutable: tuple[str, ...] = ()
    call_mutable: Any = None
    mutable_option: Any = False
    streams: tuple[str, ...] = ()
    reference: nn.Module | None = None
    train: bool | None = None
    returns_sown: bool = False

    # The input of a call; the output has its shape.
    x: ClassVar[jax.Array] = X

    def wrap(self, seed: int = 0) -> bridge.ToNNX:
        """A new wrapped module; it holds RNG streams even if no call needs them."""
        rngs = nnx.Rngs(seed, dropout=seed + 1)
        model = bridge.ToNNX(self.module, rngs, mutable=self.mutable_option)
        if self.train is not None:
            model.train() if self.train else model.eval()
        return model.lazy_init(X)

    def call(self, model: nnx.Module, x: Any) -> Any:
        """One call of a wrapped module or of a `Parent`: (output, what it sowed)."""
        options = {} if self.call_mutable is None else {"mutable": self.call_mutable}
        output = model(x, **options)
        sown = {}
        if self.returns_sown:
            sown = nnx.to_pure_dict(nnx.state(model, nnx.Intermediate))
            nnx.pop(model, nnx.Intermediate)
            sown = sown.get("inner", sown)
        return output, sown

    def step(self, pure: Mapping[str, Any], x: Any) -> tuple[Any, Any]:
        """The same call in pure Linen: ((output, what it sowed), the new pure state)."""
        streams = dict(pure["streams"])
        keys = {}
        for name in self.streams:
            stream = streams[name]
            keys[name] = jax.random.fold_in(stream["key"], stream["count"])
            streams[name] = {**stream, "count": stream["count"] + 1}
        output, updates = (self.reference or self.module).apply(
            pure["variables"], x, rngs=keys, mutable=list(self.mutable)
        )
        sown = updates.pop("intermediates", {})
        pure = {**pure, "variables": {**pure["variables"], **updates}, "streams": streams}
        if "scale" in pure:
            output = output * pure["scale"]
        return (output, sown), pure


KINDS = {
    "parameters": Kind(Plain()),
    "batch_stats_by_train": Kind(
        Normalized(), reference=Normalized(False), mutable=("batch_stats",), train=True
    ),
    "batch_stats_by_mutable": Kind(
        Normalized(False), mutable=("batch_stats",), call_mutable=["batch_stats"]
    ),
    "dropout": Kind(Dropped(), streams=("dropout",)),
    "sown": Kind(
        Sows(), mutable=("intermediates",), call_mutable=["intermediates"], returns_sown=True
    ),
    "kv_cache": Kind(Attends(), mutable=("cache",), call_mutable=["cache"]),
    "custom_variable": Kind(Averages(), mutable=("transforms_average",), mutable_option="existing"),
    "metadata": Kind(Partitioned()),
}

# What a model holds in evaluation: nothing changes, so plain jax transforms can close over it.
CLOSED = {
    "parameters": KINDS["parameters"],
    "batch_stats": Kind(Normalized(True)),
    "batch_stats_by_eval": Kind(Normalized(), reference=Normalized(True), train=False),
    "dropout": Kind(Dropped(deterministic=True)),
    "sown": Kind(Sows()),
    "custom_variable": Kind(Averages()),
    "metadata": KINDS["metadata"],
}

# Where calls run side by side, keys may be split or shared, and statistics may have to be
# synchronised.
MAPPED_KINDS = {
    **{name: kind for name, kind in KINDS.items() if name != "dropout"},
    "dropout_split_keys": KINDS["dropout"],
    "dropout_shared_keys": KINDS["dropout"],
    "batch_stats_synchronised": Kind(
        Normalized(False, axis_name="data"), mutable=("batch_stats",), call_mutable=["batch_stats"]
    ),
}
STATELESS = ("parameters", "metadata", "sown", "dropout_shared_keys")


def mapped_states(transform: str) -> tuple[str, ...]:
    """The states that make sense under a transform over slices, named as in `MAPPED_KINDS`."""
    if transform == "vmap_of_inputs":
        # All inputs would write to the same Variables, which native modules refuse too.
        return STATELESS
    if transform == "shard_map":
        # Linen refuses axis names that the mesh lacks.
        others = ("batch_stats_synchronised", "kv_cache", "custom_variable")
        return tuple(s for s in STATELESS if s != "metadata") + others
    left_out = {
        "pmap": ("metadata", "batch_stats_synchronised"),
        "grad_of_scan_of_layers": ("dropout_shared_keys", "batch_stats_synchronised"),
    }.get(transform, ("batch_stats_synchronised",))
    return tuple(state for state in MAPPED_KINDS if state not in left_out)


def wrapper_in(model: nnx.Module) -> Any:
    """The module in a `Parent`, or the model itself."""
    return model.inner if isinstance(model, Parent) else model


def pure_state(model: nnx.Module) -> dict[str, Any]:
    """All that a model holds as the pure computation has it."""
    wrapper = wrapper_in(model)
    if isinstance(wrapper, bridge.ToNNX):
        streams = {
            name: {"key": stream.key.get_value(), "count": stream.count.get_value()}
            for name, stream in wrapper.to_nnx__rngs.items()
        }
        pure = {"variables": wrapper.linen_variables(), "streams": streams}
    else:
        pure = {"variables": bridge.nnx_to_linen(nnx.state(wrapper)), "streams": {}}
    return pure if wrapper is model else {**pure, "scale": model.scale.get_value()}


# Initialising takes longer than most calls. The kind is kept, so that its id stays its own.
_initialized: dict[tuple[int, int, Any], tuple[Kind, Any]] = {}


@dataclasses.dataclass(frozen=True)
class Setting:
    """How NNX holds and traverses a wrapped module.

    Attributes:
      parent: whether an NNX module holds it.
      graph: graph mode rather than tree mode.
      graph_updates: whether a transform may change the structure of its arguments.
    """

    parent: bool = False
    graph: bool = True
    graph_updates: bool = True

    @contextlib.contextmanager
    def active(self):
        with (
            nnx.set_graph_mode(self.graph),
            nnx.set_graph_updates(self.graph_updates),
        ):
            yield

    def model(self, kind: Kind, seed: int = 0) -> Any:
        """A new model; one in a parent is a copy of what was initialised once for the setting."""
        if not self.parent:
            return kind.wrap(seed)
        key = id(kind), seed, self
        if key not in _initialized:
            _initialized[key] = kind, kind.wrap(seed)
        return Parent(nnx.clone(_initialized[key][1]))


def pure_params(pure: Mapping[str, Any]) -> dict[str, Any]:
    """What gradients are taken of, at its NNX path."""
    params = pure["variables"]["params"]
    return {"inner": params, "scale": pure["scale"]} if "scale" in pure else params


def with_params(pure: Mapping[str, Any], params: Any) -> dict[str, Any]:
    """The inverse of `pure_params`."""
    scale = {"scale": params["scale"]} if "scale" in pure else {}
    inner = params["inner"] if "scale" in pure else params
    return {**pure, **scale, "variables": {**pure["variables"], "params": inner}}


def values(tree: Any) -> Any:
    """A State, or Linen variables, as nested dicts of plain values."""
    if isinstance(tree, nnx.State):
        return nnx.to_pure_dict(tree)
    return nn.meta.unbox(tree)


SETTINGS = {
    "alone": Setting(),
    "in_a_parent": Setting(parent=True),
    "tree_mode": Setting(parent=True, graph=False),
    "no_graph_updates": Setting(graph_updates=False),
}


def modules_are_pytrees() -> bool:
    """Whether transforms take modules as pytrees, so that neither StateAxes nor DiffState work."""
    return not (nnx.set_graph_mode.current_value() and nnx.set_graph_updates.current_value())


# Transforms by test file

CALLS = (
    "jit",
    "remat",
    "cond",
    "switch",
    "while_loop",
    "fori_loop",
    "scan_of_inputs",
    "grad",
    "value_and_grad",
    "grad_of_remat",
    "jit_of_grad",
    "vjp",
    "jvp",
    "eval_shape",
)
# Native modules refuse these two in graph mode with graph updates.
WITHOUT_GRAPH_UPDATES = ("vjp", "jvp")
MAPPED = (
    "vmap",
    "vmap_of_inputs",
    "pmap",
    "scan_of_layers",
    "grad_of_scan_of_layers",
    "shard_map",
)
COPIES = (
    "split_and_merge",
    "split_by_type_and_merge",
    "flatten_and_unflatten",
    "clone",
    "state_and_update",
    "states_by_type_and_update",
    "flat_state",
    "pure_dict",
    "update_by_pure_dict",
    "iter_graph",
    "pickle",
    "cloudpickle",
    "tree_map",
)
CLOSURES = (
    "jax_jit",
    "jax_vmap",
    "jax_checkpoint",
    "jax_grad",
    "jax_value_and_grad",
    "jax_jacfwd",
    "jax_jvp",
    "jax_vjp",
    "jax_scan",
    "jax_map",
    "jax_cond",
    "jax_while_loop",
    "jax_fori_loop",
    "jax_jit_of_vmap_of_grad",
)
AXIS_NAMES = ("vmap", "scan", "scan_in_jit")
KEEPS_SOWN = ("jit", "remat", "cond", "vmap", "grad")


def _turns(transforms, states, settings):
    """A setting for each combination: they take turns, so that each meets every other value."""
    return {
        (transform, state): own[(row + column) % len(own)]
        for row, transform in enumerate(transforms)
        for column, state in enumerate(states(transform))
        for own in [settings(transform, state)]
    }


def _settings_of_calls(transform, state):
    if transform in WITHOUT_GRAPH_UPDATES:
        return ("no_graph_updates", "tree_mode")
    return ("in_a_parent", "tree_mode", "alone", "no_graph_updates")


def _settings_of_slices(transform, state):
    needs_sharding = transform == "shard_map" and state in ("kv_cache", "custom_variable")
    is_carried = (transform, state) == ("scan_of_layers", "dropout_shared_keys")
    if needs_sharding or is_carried:
        return ("in_a_parent",)
    return ("in_a_parent", "tree_mode", "no_graph_updates")


# How NNX holds and traverses the model in the test of each combination of transform and state.
SETTING: dict[tuple[str, str], str] = {
    **_turns(CALLS, lambda transform: KINDS, _settings_of_calls),
    **_turns(MAPPED, mapped_states, _settings_of_slices),
    **_turns(("lazy_init_in_vmap",), lambda transform: KINDS, lambda *_: ("alone", "tree_mode")),
    **_turns(COPIES, lambda transform: KINDS, lambda *_: ("in_a_parent", "tree_mode")),
}


CUSTOM_VJP = "calls.py::test_custom_vjp_gives_the_rule_s_gradient_and_the_call_s_updates"
CLOSURE = "closures.py::test_a_closure_over_a_deterministic_module_is_one_over_pure_linen"
NAMES_INSIDE = "metadata.py::test_names_go_inside_a_transform_and_come_back_as_natively"
NAMES_MADE = "metadata.py::test_layers_made_by_vmap_have_the_names_that_pure_linen_gives"


def _table() -> dict[tuple[str, str], str]:
    rows = [
        (CALLS, KINDS, "calls.py::test_a_transform_of_calls_is_that_of_pure_linen[{t}-{s}-{g}]"),
        (
            ("custom_vjp",),
            KINDS,
            CUSTOM_VJP + "[{s}-{g}]",
        ),
        (
            MAPPED,
            mapped_states,
            "mapped.py::test_a_transform_of_slices_is_that_of_pure_linen[{t}-{s}-{g}]",
        ),
        (
            ("lazy_init_in_vmap",),
            KINDS,
            "mapped.py::test_models_are_made_under_vmap_as_linen_inits_them[{s}-{g}]",
        ),
        (COPIES, KINDS, "copies.py::test_a_copy_goes_on_as_the_pure_computation[{t}-{s}-{g}]"),
        (
            CLOSURES,
            CLOSED,
            CLOSURE + "[{t}-{s}]",
        ),
        (
            AXIS_NAMES,
            ("axis_names",),
            NAMES_INSIDE + "[{t}-0-make_wrapped-no_mesh]",
        ),
        (
            ("lazy_init_in_vmap",),
            ("axis_names",),
            NAMES_MADE + "[make_wrapped-0-no_mesh]",
        ),
        (
            KEEPS_SOWN,
            ("sown_and_kept",),
            "sown.py::test_a_transform_keeps_what_was_sown_as_pure_linen_does[{t}-alone]",
        ),
        (
            KEEPS_SOWN,
            ("captured",),
            "sown.py::test_capture_collects_through_a_transform_as_natively[{t}]",
        ),
    ]
    return {
        (transform, state): "tests/transforms/test_nnx_"
        + name.format(t=transform, s=state, g=SETTING.get((transform, state), "in_a_parent"))
        for transforms, states, name in rows
        for transform in transforms
        for state in (states(transform) if callable(states) else states)
    }


# Where each combination of transform and state is tested.
CELLS: dict[tuple[str, str], str] = _table()
