"""NNX transforms over stacked wrapped modules, against the jax transform of pure Linen."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import bridge
from tests.models import assert_identical
from tests.transforms.nnx_states import (
    KINDS,
    MAPPED,
    MAPPED_KINDS,
    SETTING,
    SETTINGS,
    Average,
    modules_are_pytrees,
    pure_params,
    pure_state,
    values,
    with_params,
)


def stacked(setting, kind, size):
    """A model whose leaves have a leading axis, one slice for each of some models."""
    models = [setting.model(kind, seed) for seed in range(size)]
    state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(nnx.state, models))
    return nnx.merge(nnx.graphdef(models[0]), state)


def inputs(kind, size):
    return jnp.stack([(i + 1) * kind.x for i in range(size)])


def share_streams(model, axis):
    """The streams of the first slice for all; the axes of the model and of its pure state."""
    state = jax.tree.map(lambda leaf: leaf[0], nnx.state(model, nnx.RngState))
    nnx.update(model, state)
    filters = {nnx.RngState: axis, ...: 0}
    axes = nnx.prefix(model, filters) if modules_are_pytrees() else nnx.StateAxes(filters)
    return axes, {**dict.fromkeys(pure_state(model), 0), "streams": axis}


def nnx_vmap(setting, kind):
    model = stacked(setting, kind, 3)
    pure, xs = pure_state(model), inputs(kind, 3)
    return model, nnx.vmap(kind.call)(model, xs), jax.vmap(kind.step)(pure, xs)


def nnx_vmap_shared(setting, kind):
    model = stacked(setting, kind, 3)
    axes, pure_axes = share_streams(model, None)
    pure, xs = pure_state(model), inputs(kind, 3)
    output = nnx.vmap(kind.call, in_axes=(axes, 0))(model, xs)
    step = jax.vmap(kind.step, in_axes=(pure_axes, 0), out_axes=(0, pure_axes))
    return model, output, step(pure, xs)


def nnx_vmap_of_inputs(setting, kind):
    """One model for all inputs."""
    model = setting.model(kind)
    pure, xs = pure_state(model), inputs(kind, 3)
    output = nnx.vmap(kind.call, in_axes=(None, 0))(model, xs)
    return model, output, jax.vmap(kind.step, in_axes=(None, 0), out_axes=(0, None))(pure, xs)


def nnx_pmap(setting, kind):
    model = stacked(setting, kind, 2)
    pure, xs = pure_state(model), inputs(kind, 2)
    return model, nnx.pmap(kind.call)(model, xs), jax.pmap(kind.step)(pure, xs)


def nnx_pmap_shared(setting, kind):
    model = stacked(setting, kind, 2)
    axes, pure_axes = share_streams(model, None)
    pure, xs = pure_state(model), inputs(kind, 2)
    output = nnx.pmap(kind.call, in_axes=(axes, 0))(model, xs)
    step = jax.pmap(kind.step, in_axes=(pure_axes, 0), out_axes=(0, pure_axes))
    return model, output, step(pure, xs)


def nnx_scan_of_layers(setting, kind):
    model = stacked(setting, kind, 3)
    pure = pure_state(model)

    def body(h, pure):
        (h, sown), pure = kind.step(pure, h)
        return h, (sown, pure)

    layers = nnx.scan(
        lambda h, layer: kind.call(layer, h), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0)
    )
    output = layers(kind.x, model)
    h, (sown, pure) = jax.lax.scan(body, kind.x, pure)
    return model, output, ((h, sown), pure)


def nnx_scan_of_layers_shared(setting, kind):
    """The layers draw from one stream, one after the other."""
    model = stacked(setting, kind, 3)
    axes, _ = share_streams(model, nnx.Carry)
    pure = pure_state(model)
    streams = pure.pop("streams")

    def body(carry, pure):
        h, streams = carry
        (h, sown), pure = kind.step({**pure, "streams": streams}, h)
        return (h, pure.pop("streams")), (sown, pure)

    (h, streams), (sown, pure) = jax.lax.scan(body, (kind.x, streams), pure)

    @nnx.scan(in_axes=(nnx.Carry, axes), out_axes=(nnx.Carry, 0))
    def layers(h, layer):
        return kind.call(layer, h)

    return model, layers(kind.x, model), ((h, sown), {**pure, "streams": streams})


def nnx_grad_of_scan_of_layers(setting, kind):
    """The gradient of stacked layers, which are updated in passing."""
    model = stacked(setting, kind, 2)
    pure = pure_state(model)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest):
        layers = nnx.scan(
            lambda h, layer: kind.call(layer, h), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0)
        )
        h, sown = layers(kind.x, nnx.merge(graphdef, params, rest))
        return (h**2).sum(), (h, sown)

    gradient, output = nnx.grad(loss, has_aux=True)(params, rest)

    def pure_loss(params, pure):
        def body(h, pure):
            (h, sown), pure = kind.step(pure, h)
            return h, (sown, pure)

        h, (sown, pure) = jax.lax.scan(body, kind.x, with_params(pure, params))
        return (h**2).sum(), ((h, sown), pure)

    expected, (pure_output, pure) = jax.grad(pure_loss, has_aux=True)(pure_params(pure), pure)
    return model, (values(gradient), output), ((values(expected), pure_output), pure)


SPECS = {
    "kv_cache": {lambda path, v: path[-1] == "seen": P("data")},
    "custom_variable": {Average: P("data")},
}


def nnx_shard_map(setting, kind):
    """The batch over two devices, and what depends on the batch with it."""
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    by_filter = next((s for name, s in SPECS.items() if KINDS[name] is kind), {})
    model = setting.model(kind)
    averages = nnx.state(model, Average)
    nnx.update(model, jax.tree.map(lambda leaf: jnp.repeat(leaf, 2, 0), averages))
    spec = nnx.StateSharding({**by_filter, ...: P()}) if by_filter else P()
    pure = pure_state(model)
    pure_spec = jax.tree_util.tree_map_with_path(
        lambda path, leaf: P("data") if sharded(path) else P(), pure
    )

    def call(m, x):
        return jax.tree.map(lambda leaf: leaf[None], kind.call(m, x))

    def step(pure, x):
        output, pure = kind.step(pure, x)
        return jax.tree.map(lambda leaf: leaf[None], output), pure

    ours = nnx.shard_map(call, mesh=mesh, in_specs=(spec, P("data")), out_specs=P("data"))
    reference = jax.shard_map(
        step, mesh=mesh, in_specs=(pure_spec, P("data")), out_specs=(P("data"), pure_spec)
    )
    # Compiled, as shard_map outside of a program makes a program of each operation.
    return model, nnx.jit(ours)(model, kind.x), jax.jit(reference)(pure, kind.x)


def sharded(path):
    return path[-1] in map(jax.tree_util.DictKey, ("seen", "average"))


TRANSFORMS = {
    "vmap": nnx_vmap,
    "vmap_of_inputs": nnx_vmap_of_inputs,
    "pmap": nnx_pmap,
    "scan_of_layers": nnx_scan_of_layers,
    "grad_of_scan_of_layers": nnx_grad_of_scan_of_layers,
    "shard_map": nnx_shard_map,
}
SHARED_KEYS = {
    "vmap": nnx_vmap_shared,
    "vmap_of_inputs": nnx_vmap_of_inputs,
    "pmap": nnx_pmap_shared,
    "scan_of_layers": nnx_scan_of_layers_shared,
    "shard_map": nnx_shard_map,
}


CELLS = [(t, s, setting) for (t, s), setting in SETTING.items() if t in MAPPED]


@pytest.mark.parametrize(("transform", "state", "setting"), CELLS)
def test_a_transform_of_slices_is_that_of_pure_linen(transform, state, setting):
    shares_keys = state == "dropout_shared_keys"
    run = SHARED_KEYS[transform] if shares_keys else TRANSFORMS[transform]
    kind = MAPPED_KINDS[state]
    with SETTINGS[setting].active():
        model, output, (expected, pure) = run(SETTINGS[setting], kind)
    assert_identical(output, expected)
    assert_identical(pure_state(model), pure)


@pytest.mark.parametrize(
    ("state", "setting"), [(state, SETTING["lazy_init_in_vmap", state]) for state in KINDS]
)
def test_models_are_made_under_vmap_as_linen_inits_them(state, setting):
    kind = KINDS[state]
    setting = SETTINGS[setting]
    with setting.active():
        keys = jax.random.split(jax.random.key(3), 3)

        @nnx.vmap
        def make(key):
            model = bridge.ToNNX(kind.module, key, mutable=kind.mutable_option)
            if kind.train is not None:
                model.train()
            return model.lazy_init(kind.x)

        model = make(keys)
    init = (kind.reference or kind.module).init
    expected = jax.vmap(lambda key: init(key, kind.x))(keys)
    expected.pop("intermediates", None)
    assert_identical(model.linen_variables(), expected)


def _metadata_calls():
    kind, setting = KINDS["metadata"], SETTINGS["alone"]
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": (P(), P("data"))}
    slices, xs = stacked(setting, kind, 2), inputs(kind, 2)
    model = setting.model(kind)
    step = jax.shard_map(kind.step, out_specs=(P("data"), P()), **specs)
    call = nnx.shard_map(kind.call, out_specs=P("data"), **specs)
    return {
        "linen in pmap": lambda: jax.pmap(kind.step)(pure_state(slices), xs),
        "nnx in pmap": lambda: nnx.pmap(kind.call)(slices, xs),
        "linen in shard_map": lambda: step(pure_state(model), kind.x),
        "nnx in shard_map": lambda: call(model, kind.x),
    }


def test_axis_names_that_the_mesh_lacks_are_refused_where_linen_does():
    """Inside of both transforms there is a mesh, and Linen constrains what it unboxes."""
    for call in _metadata_calls().values():
        with pytest.raises(ValueError, match="Resource axis: in of"):
            call()
