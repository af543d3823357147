"""`NNXMeta`: the box that carries a Variable's metadata through Linen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax
from flax import nnx, serialization, struct
from flax.core import meta

from bridge._flax.variables import variable_from_metadata
from bridge._randomness import typed_keys

# The stubs of both lack types.
_struct: Any = struct
_serialization: Any = serialization

_NAMES: Any = (tuple, list, jax.sharding.PartitionSpec)

A = TypeVar("A")
B = TypeVar("B")


class NNXMeta(struct.PyTreeNode, meta.AxisMetadata[A], Generic[A]):
    """The box of an `nnx.Variable` inside Linen variables.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> import bridge
      >>> box = bridge.NNXMeta(nnx.Param, jnp.ones((2, 4)), {'out_sharding': ('in', 'out')})
      >>> box.get_partition_spec() == jax.sharding.PartitionSpec('in', 'out')
      True

    Attributes:
      var_type: the Variable type.
      value: the array, or any pytree.
      metadata: the Variable's metadata, such as `out_sharding`.
    """

    var_type: type[nnx.Variable[Any]] = _struct.field(pytree_node=False)
    value: Any = _struct.field(pytree_node=True)
    metadata: dict[str, Any] = _struct.field(pytree_node=False)

    def unbox(self) -> Any:
        """The value, without a sharding constraint: reading an NNX Variable applies none either."""
        return self.value

    def replace_boxed(self, val: B) -> NNXMeta[B]:
        """This box around another value."""
        return self.replace(value=val)  # type: ignore[return-value]

    def add_axis(self, index: int, params: Mapping[Any, Any]) -> NNXMeta[A]:
        """The box of the value with one more axis.

        Args:
          index: where the axis is inserted.
          params: the lifted transform's `metadata_params`. The axis is called
            `params[nn.PARTITION_NAME]`; without that entry it has no name.

        Returns:
          A new box with axis names for the new value; the Variable's `on_add_axis` hooks have run.
        """
        name = params.get(meta.PARTITION_NAME)
        names = self._axis_names()
        if names is not None:
            names += [None] * (index - len(names))
            names.insert(index if index >= 0 else len(names) + 1 + index, name)
        return self._renamed(names, "add_axis", index, name)

    def remove_axis(self, index: int, params: Mapping[Any, Any]) -> NNXMeta[A]:
        """The inverse of `add_axis`.

        Args:
          index: which axis is removed.
          params: the lifted transform's `metadata_params`.

        Returns:
          A new box with axis names for the new value; the Variable's `on_remove_axis` hooks have
          run.
        """
        name = params.get(meta.PARTITION_NAME)
        names = self._axis_names()
        if names is not None and -len(names) <= index < len(names):
            names.pop(index)
        return self._renamed(names, "remove_axis", index, name)

    def _axis_names(self) -> list[Any] | None:
        names: Any = self.metadata.get("out_sharding")
        return [*names] if isinstance(names, _NAMES) else None

    def _renamed(
        self, names: list[Any] | None, method: str, index: int, name: str | None
    ) -> NNXMeta[A]:
        metadata = dict(self.metadata)
        if names is not None:
            kind: Any = metadata["out_sharding"].__class__
            is_spec = kind is jax.sharding.PartitionSpec
            metadata["out_sharding"] = kind(*names) if is_spec else kind(names)
        variable = variable_from_metadata(self.var_type, self.value, metadata)
        implied = variable_from_metadata(self.var_type, self.value, {})
        is_own = getattr(self.var_type, method) is not getattr(nnx.Variable, method)
        if is_own or variable.get_metadata(f"on_{method}", None):
            # Hooks expect a Variable, so pass them one, and keep their changes to it.
            getattr(variable, method)(index, name)
            after = variable.get_metadata()
            new = after.keys() - implied.get_metadata().keys()
            metadata = {k: v for k, v in after.items() if k in metadata or k in new}
        return dataclasses.replace(self, metadata=metadata)

    def get_partition_spec(self) -> jax.sharding.PartitionSpec:
        """The partition spec from metadata alone: logical names stay, and no mesh is needed.

        The `sharding_rules` of the Variable or of a Linen box are not applied. Otherwise
        `nn.logical_to_mesh` would take the mesh axes for logical names without a rule, and drop
        them.
        """
        sharding = self.metadata.get("out_sharding")
        while not isinstance(sharding, tuple | list | jax.sharding.PartitionSpec | None):
            # A NamedSharding holds a spec; a Format holds a sharding.
            sharding = sharding.spec if hasattr(sharding, "spec") else sharding.sharding
        return jax.sharding.PartitionSpec(*(sharding or ()))

    def to_nnx_variable(self) -> nnx.Variable[Any]:
        """The Variable of this box; no hook runs and nothing is sharded."""
        return variable_from_metadata(self.var_type, self.value, self.metadata)


def with_partitioning(
    fn: Callable[..., Any],
    names: tuple[Any, ...],
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[..., Any]:
    """An initializer for a Variable that becomes an `nn.Partitioned` in Linen.

    Args:
      fn: an initializer, called with a key, a shape and a dtype.
      names: an axis name or None for each dimension.
      mesh: the mesh, None for the one in force.

    Returns:
      An initializer for `nnx.Param` and other Variables.

    Source: flax/nnx/bridge/variables.py:with_partitioning @ 0.12.8
    """
    return nnx.with_partitioning(fn, names, mesh, linen_meta_type=meta.Partitioned)


def _to_state(box: NNXMeta[Any]) -> dict[str, Any]:
    return {"value": _serialization.to_state_dict(jax.tree.map(typed_keys.to_bits, box.value))}


def _from_state(box: NNXMeta[Any], state: Mapping[str, Any]) -> NNXMeta[Any]:
    if set(state) != {"value"}:
        raise ValueError(f"the state of an NNXMeta has the key 'value', found {sorted(state)}")
    bare = jax.tree.map(typed_keys.to_bits, box.value)
    restored = _serialization.from_state_dict(bare, state["value"], name="value")
    return dataclasses.replace(box, value=jax.tree.map(typed_keys.from_bits, box.value, restored))


# `flax.serialization` cannot write typed keys, which the streams of a wrapped NNX module hold.
_serialization.register_serialization_state(NNXMeta, _to_state, _from_state, override=True)
