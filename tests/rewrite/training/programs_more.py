"""Training programs with what larger projects have: devices, whole variables, passed functions."""

from __future__ import annotations

DEVICES = """from flax import jax_utils


class Net(nn.Module):
    features: int
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x, train: bool = True):
        x = nn.Dense(self.features, dtype=self.dtype)(x)
        x = nn.BatchNorm(use_running_average=not train, axis_name=None)(x)
        return nn.Dropout(0.5, deterministic=not train)(x)


SMALL = functools.partial(Net, features=3)


def network_of(*, cls, **fields):
    return cls(dtype=jnp.float32, **fields)


def make():
    return network_of(cls=SMALL)


class State(train_state.TrainState):
    batch_stats: object
    scale: object


def first(key, net):
    @jax.jit
    def init(*args):
        return net.init(*args)

    variables = init({"params": key, "dropout": key}, jnp.ones((1, 6), net.dtype))
    return variables["params"], variables["batch_stats"]


def create(key, net, scale=None):
    params, batch_stats = first(key, net)
    return State.create(
        apply_fn=net.apply,
        params=params,
        tx=optax.adam(0.01),
        batch_stats=batch_stats,
        scale=scale,
    )


def train_step(state, x, labels, rate_of, key):
    def loss_fn(params):
        logits, updated = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            x,
            mutable=["batch_stats"],
            rngs={"dropout": key},
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, updated

    if state.scale:
        # As it was: nobody ran this.
        grads = state.scale * jax.grad(loss_fn, has_aux=True)(state.params)[0]
    else:
        (loss, updated), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        grads = jax.lax.pmean(grads, "batch")
    new_state = state.apply_gradients(grads=grads, batch_stats=updated["batch_stats"])
    if state.scale:
        new_state = new_state.replace(params=state.params)
    return new_state, {"loss": jax.lax.pmean(loss, "batch"), "rate": rate_of(new_state.step)}


average = jax.pmap(lambda tree: jax.lax.pmean(tree, "x"), "x")


def synchronized(state):
    return state.replace(batch_stats=average(state.batch_stats))


def spread(batch_stats):
    return jax.tree.leaves(jax.tree.map(jnp.std, batch_stats))


def eval_step(state, x):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return state.apply_fn(variables, x, train=False, mutable=False)


def sample():
    state = jax_utils.replicate(create(jax.random.key(0), network_of(cls=SMALL)), DEVICES)
    p_step = jax.pmap(
        functools.partial(train_step, rate_of=lambda step: step * 0.1),
        axis_name="batch",
        donate_argnums=(0,),
        devices=DEVICES,
    )
    p_eval = jax.pmap(eval_step, axis_name="batch", devices=DEVICES)

    def step(state, x, labels, keys):
        state, metrics = p_step(state, x, labels, key=keys)
        before = spread(state.batch_stats)
        state = synchronized(state)
        return state, metrics, before, p_eval(state, x)

    keys = jax.random.split(jax.random.key(1))
    return state, step, [(x.reshape(2, 2, 6), n.reshape(2, 2), keys) for x, n in examples()]


DEVICES = jax.devices()[:2]
"""

WHOLE = '''from typing import NamedTuple


class Batch(NamedTuple):
    x: np.ndarray
    labels: np.ndarray


def typed(batch: Batch) -> Batch:
    return batch


assert typed.__annotations__["batch"] is Batch


class Net(nn.Module):
    rate: float = 0.5

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dense(4)(x)
        self.sow("intermediates", "hidden", x)
        return nn.Dense(3)(nn.Dropout(self.rate, deterministic=not train)(x))


def make():
    return Net()


def logits_of(state, x, train, rngs):
    logits = state.apply_fn(state.params, x, train=train, rngs=rngs)
    return logits


@jax.jit
def train_step(state, batch, rngs):
    def loss_fn(params, batch):
        current = state.replace(params=params)
        logits = logits_of(current, batch.x, True, rngs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads=grads), loss


def several(state, batches, rngs):
    """All batches in one program."""
    return jax.lax.scan(lambda state, batch: train_step(state, batch, rngs), state, batches)


@jax.jit
def evaluate(state, batch):
    return logits_of(state, batch.x, False, rngs=None)


def sample():
    net = Net()
    params = jax.jit(net.init)(jax.random.key(0), jnp.ones((1, 6)))
    state = train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optax.sgd(0.1))

    def step(state, batch, rngs):
        batches = jax.tree.map(lambda x: jnp.stack([x, x]), batch)
        state, losses = several(state, batches, rngs)
        return state, losses, evaluate(state, batch)

    return state, step, [(Batch(*each), {"dropout": jax.random.key(1)}) for each in examples()]
'''

FUNCTIONS = '''class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        return nn.Dense(3)(nn.BatchNorm(use_running_average=True)(x))


def make():
    return Net()


@functools.partial(jax.jit, static_argnums=(0, 4))
def logits_of(
    apply_fn,
    params,
    batch_stats,
    x,
    factor: int = 1,
):
    """What the model says."""
    return factor * apply_fn({"params": params, "batch_stats": batch_stats}, x)


def loss_fn(params, x, labels, apply_fn, batch_stats):
    logits = logits_of(apply_fn, params, batch_stats, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class State(train_state.TrainState):
    batch_stats: object


@jax.jit
def train_step(state, x, labels):
    grad_fn = jax.value_and_grad(loss_fn)
    loss, grads = grad_fn(state.params, x, labels, state.apply_fn, state.batch_stats)
    return state.apply_gradients(grads=grads), loss


def sample():
    net = Net()
    variables = net.init({"params": jax.random.key(0)}, jnp.ones((1, 6)))
    state = State.create(
        apply_fn=net.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.adam(0.01),
    )

    def step(state, x, labels):
        before = logits_of(state.apply_fn, state.params, state.batch_stats, x, 2)
        state, loss = train_step(state, x, labels)
        return state, loss, before

    return state, step, examples()
'''

CONFIGURED = """@struct.dataclass
class Config:
    width: int = 4
    quiet: bool = True


class Net(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.config.width)(x)
        x = nn.BatchNorm(use_running_average=True)(x)
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=self.config.quiet)(x))


def make():
    return Net(Config())


class State(train_state.TrainState):
    batch_stats: object


@functools.partial(jax.jit, static_argnums=1)
def train_step(state, config, x, labels, key):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits = Net(config).apply(variables, x, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def evaluate(state, x):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return Net(Config()).apply(variables, x)


def sample():
    net = Net(Config())
    variables = net.init(jax.random.key(0), jnp.ones((1, 6)))
    state = State.create(
        apply_fn=net.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.sgd(0.1),
    )

    def step(state, x, labels, key):
        state, loss = train_step(state, Config(quiet=False), x, labels, key)
        return state, loss, evaluate(state, x)

    return state, step, [(*each, jax.random.key(1)) for each in examples()]
"""

MORE = {
    "a state on each of two devices": DEVICES,
    "all variables in the place of the parameters": WHOLE,
    "functions that are given apply and statistics": FUNCTIONS,
    "a model with other fields in each step": CONFIGURED,
}
