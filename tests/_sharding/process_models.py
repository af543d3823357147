"""Models for `test_processes.py`: init in shards, train, save, restore, in one process or two."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import bridge
from bridge import checkpoint

WIDTH = 8
RULES = (("embed", "data"), ("mlp", "model"))
X = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


class NNXLayer(nnx.Module):
    """A native layer with dropout."""

    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        self.linear = nnx.Linear(WIDTH, WIDTH, use_bias=False, kernel_init=init, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


def linen_layer(name=None):
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    return nn.Dense(WIDTH, kernel_init=init, name=name)


class NNXModel(nnx.Module):
    """A Linen module behind a native layer, and the optimizer of both."""

    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.first = NNXLayer(rngs)
        self.second = bridge.ToNNX(linen_layer(), rngs=rngs)
        bridge.lazy_init(self, X)
        self.optimizer = nnx.Optimizer(self, OPTIMIZER, wrt=nnx.Param)

    def __call__(self, x):
        return self.second(self.first(x))


class LinenModel(nn.Module):
    """A native Linen layer behind an NNX module."""

    @nn.compact
    def __call__(self, x):
        return linen_layer("second")(bridge.to_linen(NNXLayer, name="first")(x))


class NNXRun:
    """What a program does with `NNXModel`."""

    def create(self, mesh):
        return bridge.init_sharded(NNXModel, mesh, rules=RULES)

    def trainer(self, model):
        graphdef, state = nnx.split(model)
        step = compiled(
            lambda state, x: nnx.state(self._step(nnx.merge(graphdef, state), x)), state
        )
        return lambda model, x: nnx.merge(graphdef, step(nnx.state(model), x))

    def save(self, path, model):
        checkpoint.save(path, model)

    def restore(self, path, mesh, like):
        return checkpoint.restore(path, bridge.abstract(NNXModel, mesh, rules=RULES))

    def _step(self, model, x):
        def loss(model):
            return jnp.mean((model(x) - x) ** 2)

        model.optimizer.update(model, nnx.grad(loss)(model))
        return model


class LinenRun:
    """What a program does with `LinenModel`: variables, and an optimizer's state beside them."""

    def create(self, mesh):
        rngs = jax.random.key(0)
        variables = bridge.init_sharded(LinenModel(), mesh, X, rules=RULES, rngs=rngs)
        replicated = NamedSharding(mesh, PartitionSpec())
        opt_state = jax.jit(OPTIMIZER.init, out_shardings=replicated)(variables["params"])
        return variables, opt_state

    def trainer(self, state):
        return compiled(self._step, state)

    def save(self, path, state):
        checkpoint.save(path, state[0], extra={"opt_state": state[1]})

    def restore(self, path, mesh, like):
        rngs = jax.random.key(0)
        target = bridge.abstract(LinenModel(), mesh, X, rules=RULES, rngs=rngs)
        variables, extra = checkpoint.restore(path, target, extra={"opt_state": like[1]})
        return variables, extra["opt_state"]

    def _step(self, state, x):
        variables, opt_state = state

        def loss(params):
            both = {**variables, "params": params}
            y, updates = LinenModel().apply(both, x, mutable=["RngCount"])
            return jnp.mean((y - x) ** 2), updates

        gradient, updates = jax.grad(loss, has_aux=True)(variables["params"])
        changes, opt_state = OPTIMIZER.update(gradient, opt_state)
        params = optax.apply_updates(variables["params"], changes)
        return {**variables, **updates, "params": params}, opt_state


RUNS = {"nnx": NNXRun(), "linen": LinenRun()}


def compiled(step, state):
    """The step in one program, whose result is sharded as the first state is."""
    shardings = jax.tree.map(lambda array: array.sharding, state)
    return jax.jit(step, out_shardings=shardings)


def live(name, mesh, folder):
    """A model at each stage of its life; its checkpoint stays in the folder."""
    run = RUNS[name]
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
    created = run.create(mesh)
    step = run.trainer(created)
    trained = step(step(created, x), x)
    run.save(folder / name, trained)
    restored = run.restore(folder / name, mesh, created)
    return {
        "created": created,
        "trained": trained,
        "restored": restored,
        "continued": step(restored, x),
    }


def shards(model):
    """The shards that this process has, by path and bounds, as NumPy arrays."""
    tree = nnx.state(model) if isinstance(model, nnx.Module) else model
    found = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = jax.random.key_data(leaf) if is_key else leaf
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        for shard in array.addressable_shards:
            bounds = [part.indices(n) for part, n in zip(shard.index, array.shape, strict=True)]
            text = ",".join(f"{start}:{stop}" for start, stop, _ in bounds)
            found[f"{path} {text}"] = np.asarray(shard.data)
    return found
