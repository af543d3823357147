"""The types that a checker infers for uses of the public functions; pyright reads this file."""

from collections.abc import Mapping
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

import bridge


def wrappers(x: jax.Array) -> None:
    model = bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0))
    assert_type(model, bridge.ToNNX)
    assert_type(model.lazy_init(x), bridge.ToNNX)
    assert_type(bridge.lazy_init(model, x), bridge.ToNNX)
    assert_type(bridge.ToNNX.from_variables(nn.Dense(3), {}), bridge.ToNNX)
    assert_type(bridge.to_linen(nnx.Linear, 2, 3), bridge.ToLinen)
    assert_type(bridge.to_linen_class(nnx.Linear, in_features=2), type[bridge.ToLinen])
    assert_type(bridge.set_module_paths(nnx.Linear(2, 3, rngs=nnx.Rngs(0))), nnx.Linear)


def sharded(mesh: jax.sharding.Mesh, x: jax.Array) -> None:
    key = jax.random.key(0)
    assert_type(bridge.init_sharded(nn.Dense(3), mesh, x, rngs=key), Mapping[str, Any])
    assert_type(bridge.init_sharded(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)), mesh), nnx.Linear)
    assert_type(bridge.abstract(bridge.ToNNX(nn.Dense(3)), mesh, x), bridge.ToNNX)


def tools(linen: nn.Module, variables: dict[str, Any], model: nnx.Linear, x: jax.Array) -> None:
    assert_type(bridge.checkpoint.restore("weights"), dict[str, Any])
    assert_type(bridge.checkpoint.restore("weights", model), nnx.Linear)
    restored = bridge.checkpoint.restore("weights", model, extra={"step": 0})
    assert_type(restored, tuple[nnx.Linear, dict[str, Any]])
    bridge.checkpoint.save("weights", variables)
    bridge.checkpoint.save("weights", nnx.state(model), layout="linen")
    plan = bridge.port.plan(variables, model)
    assert_type(plan.apply(), nnx.Linear)
    assert_type(bridge.port.plan(model, variables).apply(), dict[str, Any])
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    assert_type(plan.apply_optimizer(linen, optimizer), nnx.Optimizer[nnx.Linear])
    assert_type(bridge.port.suggest(variables, model, x, linen=linen), bridge.port.Suggestions)
    assert_type(bridge.parity.check((linen, variables), model, x), bridge.parity.Report)
    # A variables dict without its module is no model to compare.
    bridge.parity.check(variables, model, x)  # pyright: ignore[reportArgumentType]
    assert_type(bridge.jit_partial(lambda m, x: jnp.sum(m(x)), model)(x), jax.Array)
