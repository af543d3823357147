"""Training programs as people write them: each has `make()`, `INPUTS`, `KWARGS` and `sample()`."""

from __future__ import annotations

HEAD = '''"""A program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from flax.training import train_state

INPUTS = (jax.ShapeDtypeStruct((2, 6), "float32"),)
KWARGS = {}


def examples(count=3, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (rng.normal(size=(4, 6)).astype(np.float32), rng.integers(3, size=4))
        for _ in range(count)
    ]


def decayed(params):
    """Kernels, and no biases."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


'''

APART = '''class Net(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8)(x))
        return nn.Dense(3)(x)


def make():
    return Net()


def begin(rng, rate):
    """The first state."""
    net = Net()
    params = net.init(rng, jnp.ones([1, 6]))["params"]
    tx = optax.chain(optax.add_decayed_weights(0.1, mask=decayed), optax.sgd(rate, 0.9))
    return train_state.TrainState.create(apply_fn=net.apply, params=params, tx=tx)


@jax.jit
def gradients_of(state, x, labels):
    """Gradients, and how good the model is."""

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, x)  # a row for each example
        wanted = jax.nn.one_hot(labels, 3)
        return optax.softmax_cross_entropy(logits, wanted).mean(), logits

    both = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = both(state.params)
    return grads, loss, (logits.argmax(-1) == labels).mean()


@jax.jit
def updated(state, grads):
    return state.apply_gradients(grads=grads)


def epoch(state, batches):
    """Steps, without a word about what a state is."""
    losses = []
    for x, labels in batches:
        grads, loss, accuracy = gradients_of(state, x, labels)
        state = updated(state, grads)
        losses.append((loss, accuracy))
    return state, losses


def sample():
    def step(state, *batch):
        return epoch(state, [batch])

    return begin(jax.random.key(0), 0.1), step, examples()
'''

ENCODER = '''class Coder(nn.Module):
    width: int = 2

    def setup(self):
        self.down = nn.Dense(2 * self.width)
        self.up = nn.Dense(6)

    def __call__(self, x, key):
        mean, spread = jnp.split(self.down(x), 2, axis=-1)
        drawn = mean + jnp.exp(spread) * jax.random.normal(key, mean.shape)
        return self.up(drawn), mean, spread

    def decode(self, z):
        return self.up(z)


INPUTS = (*INPUTS, jax.random.key(0))


def make():
    return Coder()


def penalty(mean, spread):
    return (mean**2 + jnp.exp(spread) - spread).sum(-1).mean()


def step(state, x, key, weight):
    def loss_fn(params):
        again, mean, spread = Coder().apply({"params": params}, x, key)
        return ((again - x) ** 2).mean() + weight * penalty(mean, spread)

    grads = jax.grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads)


@jax.jit
def drawn(params, z):
    """What the model makes of points."""
    return Coder().apply({"params": params}, z, method="decode")


def run(state, x, labels, key):
    state = step(state, x, key, 0.1)
    return state, drawn(state.params, jnp.ones((3, 2)))


def sample():
    variables = Coder().init(jax.random.key(1), jnp.ones((1, 6)), jax.random.key(2))
    state = train_state.TrainState.create(
        apply_fn=Coder().apply, params=variables["params"], tx=optax.adam(0.01)
    )
    keys = jax.random.split(jax.random.key(3), 3)
    return state, run, [(*each, key) for each, key in zip(examples(), keys)]
'''

STATISTICS = '''class Net(nn.Module):
    features: int = 8

    @nn.compact
    def __call__(self, x, train: bool = True):
        x = nn.Dense(self.features, use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(3)(x)


def make():
    return Net()


class State(train_state.TrainState):
    batch_stats: object
    rate: float = struct.field(pytree_node=False, default=0.1)


def initialised(key, size, net):
    variables = net.init({"params": key}, jnp.ones((1, size)), train=False)
    return variables["params"], variables["batch_stats"]


def create(key) -> State:
    net = Net(features=8)
    variables = net.init(key, jnp.ones((1, 6)), train=False)
    params, batch_stats = variables["params"], variables["batch_stats"]
    tx = optax.sgd(optax.cosine_decay_schedule(0.1, 10), momentum=0.9, nesterov=True)
    return State.create(
        apply_fn=net.apply, params=params, tx=tx, batch_stats=batch_stats, rate=0.2
    )


def train_step(state, batch):
    """A step with a penalty for large weights."""

    def loss_fn(params):
        logits, updated = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["x"],
            mutable=["batch_stats"],
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        large = sum(jnp.sum(w**2) for w in jax.tree.leaves(params) if w.ndim > 1)
        return loss + 0.01 * large, (updated, logits)

    step = state.step
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    aux, grads = grad_fn(state.params)
    updated, logits = aux[1]
    metrics = {"loss": aux[0], "right": (logits.argmax(-1) == batch["label"]).mean()}
    metrics["step"] = step
    new_state = state.apply_gradients(grads=grads, batch_stats=updated["batch_stats"])
    return new_state, metrics


def eval_step(state, batch):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, batch["x"], train=False, mutable=False)
    return logits * state.rate


def sample():
    jitted = jax.jit(train_step)
    evaluated = jax.jit(eval_step)

    def step(state, batch):
        state, metrics = jitted(state, batch)
        return state, metrics, evaluated(state, batch)

    return create(jax.random.key(0)), step, [{"x": x, "label": n} for x, n in examples()]
'''

DROPOUT = """TrainState = train_state.TrainState


class Net(nn.Module):
    rate: float = 0.5

    @nn.compact
    def __call__(self, x, *, deterministic: bool):
        x = nn.Dense(16)(x)
        x = nn.Dropout(self.rate, deterministic=deterministic)(x)
        return nn.Dense(3)(x)


KWARGS = {"deterministic": True}


def make():
    return Net()


def first_params(key, net):
    variables = net.init(key, jnp.ones((1, 6)), deterministic=True)
    return variables["params"]


def create(key) -> TrainState:
    net = Net()
    params = net.init(key, jnp.ones((1, 6)), deterministic=True)["params"]
    return TrainState.create(apply_fn=net.apply, params=params, tx=optax.adamw(0.01))


@functools.partial(jax.jit, static_argnames="smooth")
def train_step(state: TrainState, x, labels, keys, smooth=False) -> tuple[TrainState, jax.Array]:
    keys = {name: jax.random.fold_in(key, state.step) for name, key in keys.items()}

    def loss_fn(params):
        variables = {"params": params}
        logits = state.apply_fn(variables, x, deterministic=False, rngs=keys)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    grads = jax.tree.map(lambda g: g / 2 if smooth else g, grads)
    state = state.apply_gradients(grads=grads)
    return state, loss


@jax.jit
def eval_step(params, x):
    return Net().apply({"params": params}, x, deterministic=True)


def step(state, x, labels, key):
    state, loss = train_step(state, x, labels, {"dropout": key}, smooth=True)
    return state, loss, eval_step(state.params, x)


def sample():
    key = jax.random.key(7)
    return create(jax.random.key(0)), step, [(*each, key) for each in examples()]
"""

PASSED = '''class Net(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Dense(self.width)(x)))


def net_of(config):
    """The network of a configuration."""
    net = Net(width=config["width"])
    return net


def make():
    return net_of({"width": 8})


def first_params(key, net):
    variables = jax.jit(net.init)(key, jnp.ones((1, 6)))
    params = variables["params"]
    del variables
    return params


def create(key, config, net) -> train_state.TrainState:
    params = first_params(key, net)
    state = train_state.TrainState.create(
        apply_fn=net.apply, params=params, tx=optax.rmsprop(config["rate"])
    )
    return state


@functools.partial(jax.jit, static_argnums=(0, 1))
def train_step(net, scale, state, x, labels):
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss_of(params):
        logits = net.apply({"params": params}, x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return scale * loss, logits

    (loss, logits), grads = loss_of(state.params)
    return state.apply_gradients(grads=grads), loss, logits


def sample():
    config = {"width": 8, "rate": 0.01}
    net = net_of(config)
    step = functools.partial(train_step, net, 0.5)
    return create(jax.random.key(0), config, net), step, examples()
'''

GLOBAL = """class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


net = Net()


def make():
    return Net()


def loss_fn(params, x, labels):
    return ((net.apply({"params": params}, x) - jax.nn.one_hot(labels, 3)) ** 2).mean()


@jax.jit
def train_step(state, x, labels):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, x, labels)
    return state.apply_gradients(grads=grads), loss


def sample():
    init = net.init
    variables = init({"params": jax.random.key(0)}, jnp.ones((1, 6)))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01))
    state = train_state.TrainState.create(
        apply_fn=net.apply, params=variables["params"], tx=tx
    )
    return state, train_step, examples()
"""

PROGRAMS = {
    "gradients and their update apart": APART,
    "an encoder made anew in each step": ENCODER,
    "statistics and fields of the state": STATISTICS,
    "dropout with keys by name": DROPOUT,
    "a module that is passed from function to function": PASSED,
    "a module at the top of the file": GLOBAL,
}
