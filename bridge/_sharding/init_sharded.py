"""`init_sharded`: creates a mixed model directly in its shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import jax
from flax import linen as nn
from flax import nnx

from bridge._errors import InvalidMeshError

from .sharded_program import ShardedProgram
from .specs import AxisRules, Mesh

M = TypeVar("M", bound=nnx.Module)


@overload
def init_sharded(
    build: nn.Module,
    mesh: jax.sharding.Mesh,
    *inputs: object,
    rules: AxisRules | Mapping[str, Any] = None,
    rngs: object = None,
    method: object = None,
    **kwargs: object,
) -> Mapping[str, Any]: ...
@overload
def init_sharded(
    build: M | Callable[..., M],
    mesh: jax.sharding.Mesh,
    *inputs: object,
    rules: AxisRules | Mapping[str, Any] = None,
    rngs: object = None,
    method: object = None,
    **kwargs: object,
) -> M: ...
def init_sharded(
    build: nn.Module | nnx.Module | Callable[..., nnx.Module],
    mesh: jax.sharding.Mesh,
    *inputs: object,
    rules: AxisRules | Mapping[str, Any] = None,
    rngs: object = None,
    method: object = None,
    **kwargs: object,
) -> Any:
    """A model with every array created in its shards, by one program under `jax.jit`.

    An abstract run finds shapes and partition specs first. Then one jitted program with
    `out_shardings` computes the values, so no device ever holds more than its shards.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> import bridge
      >>> kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "model"))
      >>> module = nn.Dense(16, kernel_init=kernel_init)
      >>> mesh = jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
      >>> model = bridge.init_sharded(
      ...     lambda: bridge.ToNNX(module, jax.random.key(0)), mesh, jnp.ones((1, 8))
      ... )
      >>> model.kernel.sharding.spec == jax.sharding.PartitionSpec("data", "model")
      True

    Args:
      build: one of three. For a Linen module, such as a `ToLinen`, its variables are returned. A
        function or class has to return an NNX module; it is called with `rngs=` if `rngs` are
        given, and without arguments otherwise. An NNX module that is cheap by itself, such as a
        `ToNNX` without variables, stays as it is.
      mesh: the mesh, its axes Auto or Explicit.
      *inputs: sample inputs: arrays, or `jax.ShapeDtypeStruct`s, with which no forward pass is
        traced. A native NNX model needs none.
      rules: (logical name, mesh axis) pairs, as for `nn.logical_axis_rules`, or a dict of them; by
        default those in force.
      rngs: a key, or a dict of keys by stream. A Linen module needs it. A large NNX model is traced
        in much less time with it than if `build` makes an `nnx.Rngs` of its own.
      method: the method of the Linen module that is initialised, or the name of a method of the NNX
        model; `__call__` by default.
      **kwargs: keyword inputs.

    Returns:
      The Linen variables, or the NNX module. Values are those of an initialisation without a mesh.

    Raises:
      ShardingError: the mesh lacks an axis that a leaf names, or a dimension cannot be divided.
      InvalidModuleError: `build` is not one of the forms listed above, or returns something else.
      InvalidRngsError: `rngs` is not one of the forms listed above.
      InvalidMeshError: `mesh` is not a mesh, or has no devices.
      ConversionError: `rules` are not rules of a mesh.
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        raise InvalidMeshError("init_sharded", mesh, "a jax.sharding.Mesh with devices")
    return ShardedProgram(build, mesh, inputs, kwargs, rules, rngs, method).run()


@overload
def abstract(
    build: nn.Module,
    mesh: Mesh,
    *inputs: object,
    rules: AxisRules | Mapping[str, Any] = None,
    rngs: object = None,
    method: object = None,
    **kwargs: object,
) -> Mapping[str, Any]: ...
@overload
def abstract(
    build: M | Callable[..., M],
    mesh: Mesh,
    *inputs: object,
    rules: AxisRules | Mapping[str, Any] = None,
    rngs: object = None,
    method: object = None,
    **kwargs: object,
) -> M: ...
def abstract(
    build: nn.Module | nnx.Module | Callable[..., nnx.Module],
    mesh: Mesh,
    *inputs: object,
    rules: AxisRules | Mapping[str, Any] = None,
    rngs: object = None,
    method: object = None,
    **kwargs: object,
) -> Any:
    """The result of `init_sharded` with `jax.ShapeDtypeStruct`s in place of arrays.

    Use it as the target of a restore into shards. No array is made, so `mesh` may be a
    `jax.sharding.AbstractMesh`.

    Example::

      >>> import jax
      >>> from flax import nnx
      >>> import bridge
      >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
      >>> model = bridge.abstract(lambda: nnx.Linear(8, 16, rngs=nnx.Rngs(0)), mesh)
      >>> model.kernel.shape, model.kernel.sharding.spec == jax.sharding.PartitionSpec()
      ((8, 16), True)

    Args:
      build: as for `init_sharded`, like the other arguments.
      mesh: the mesh, abstract or not.
      *inputs: sample inputs.
      rules: logical axis rules.
      rngs: a key, or a dict of keys by stream. A Linen module needs it, and so does a function that
        takes `rngs`. Any key gives the same result.
      method: as for `init_sharded`.
      **kwargs: keyword inputs.

    Returns:
      Linen variables or an NNX module; each leaf has a shape, a dtype and a sharding.

    Raises:
      ShardingError: as `init_sharded`.
      InvalidModuleError: as `init_sharded`.
      InvalidRngsError: as `init_sharded`.
      InvalidMeshError: `mesh` is not a mesh.
    """
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise InvalidMeshError("abstract", mesh, "a jax.sharding.Mesh or AbstractMesh")
    return ShardedProgram(build, mesh, inputs, kwargs, rules, rngs, method, "abstract").abstract()
