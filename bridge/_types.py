"""The types of the nouns that all packages use.

`Key`, `Path` and `Address` say where a leaf is. `Variables` are Linen's; `Variable`,
`VariableType`, `State` and `GraphDef` are NNX's without their type parameters. `ModelTree` is what
the tools take from either side: Linen variables, an NNX State or an NNX module. `Rngs`,
`CollectionFilter` and `Method` are what users give as `rngs`, `mutable` and `method`. `is_shaped`
narrows a leaf to `Shaped`, which is an array: concrete, traced or abstract.

What may be anything at all, such as the value of a leaf or an argument of a user's model, is an
`object`: look at what it is before you use it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, TypeAlias, TypeGuard

import jax
from flax import nnx
from flax.core import DenyList
from jax.typing import DTypeLike

from registry._registry import VariableType as VariableType

# A str or an int nearly always. Flax takes whatever can be hashed and compared.
Key: TypeAlias = Any
Path: TypeAlias = tuple[Key, ...]
Address: TypeAlias = tuple[str, Path]

Variables: TypeAlias = Mapping[str, Any]
Variable: TypeAlias = nnx.Variable[Any]
State: TypeAlias = nnx.State[Any, Any]
GraphDef: TypeAlias = nnx.GraphDef[Any]
ModelTree: TypeAlias = Mapping[Any, Any] | nnx.Pytree

# For `isinstance` and `issubclass`, which otherwise narrow to classes of unknown type parameters.
DICT: Any = dict
VARIABLE: Any = nnx.Variable

# Functions whose stubs lack types.
flatten_tree: Callable[[Any], tuple[list[Any], Any]] = jax.tree.flatten
unflatten_tree: Callable[[Any, Iterable[Any]], Any] = jax.tree.unflatten
state_of: Callable[..., State] = nnx.state

Rngs: TypeAlias = nnx.Rngs | nnx.RngStream | jax.Array | Mapping[str, Any] | None
CollectionFilter: TypeAlias = bool | str | Collection[str] | DenyList
Method: TypeAlias = str | Callable[..., Any] | None


class Shaped(Protocol):
    """A leaf with a shape and a dtype: an array, or a `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> DTypeLike: ...


def is_shaped(leaf: object) -> TypeGuard[Shaped]:
    """Whether a leaf is an array, concrete, traced or abstract.

    `isinstance` with a Protocol would take ten times as long.
    """
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")
