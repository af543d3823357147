"""The bridge between Flax's two module systems.

`ToNNX` makes a Linen module usable as an NNX module, `ToLinen` an NNX module as a Linen module.
What `flax.nnx.bridge` calls by a name has the same name here, so `import bridge` can stand in its
place.

`bridge.checkpoint`, `bridge.parity`, `bridge.port` and `bridge.rewrite` are imported when they are
first used, and with them orbax, optax and rich.
"""

import importlib as _importlib
import typing as _typing

import registry as _registry

if not isinstance(vars(_registry).get("BridgeError"), type):
    # Here, before any module of this package asks for what is not in it.
    raise ImportError(
        f"bridge needs its own package `registry`, and found another module of that name:"
        f" {_registry.__file__}. Rename that file, or take its folder off sys.path",
        name="registry",
        path=_registry.__file__,
    )

from flax.nnx.bridge import AttrPriority as AttrPriority
from flax.nnx.bridge import Scope as Scope
from flax.nnx.bridge import current_context as current_context
from flax.nnx.bridge import current_module as current_module
from flax.nnx.nn import initializers as initializers

from registry import register_variable_name as register_variable_name
from registry import register_variable_name_type_pair as register_variable_name_type_pair

from . import variables as variables
from . import wrappers as wrappers
from ._conversion import linen_to_nnx as linen_to_nnx
from ._conversion import nnx_to_linen as nnx_to_linen
from ._errors import BridgeError as BridgeError
from ._errors import BridgeWarning as BridgeWarning
from ._errors import CheckpointError as CheckpointError
from ._errors import CheckpointNotFoundError as CheckpointNotFoundError
from ._errors import ConversionError as ConversionError
from ._errors import ImmutableCollectionError as ImmutableCollectionError
from ._errors import InvalidFilterError as InvalidFilterError
from ._errors import InvalidMeshError as InvalidMeshError
from ._errors import InvalidMethodError as InvalidMethodError
from ._errors import InvalidModuleError as InvalidModuleError
from ._errors import InvalidRngsError as InvalidRngsError
from ._errors import InvalidSectionsError as InvalidSectionsError
from ._errors import LostUpdateError as LostUpdateError
from ._errors import MismatchError as MismatchError
from ._errors import MissingRngError as MissingRngError
from ._errors import NotInitializedError as NotInitializedError
from ._errors import ParityError as ParityError
from ._errors import PortError as PortError
from ._errors import ReservedNameError as ReservedNameError
from ._errors import ShardingError as ShardingError
from ._errors import UnboundAxisError as UnboundAxisError
from ._functional import Functional as Functional
from ._functional import functional as functional
from ._jit_partial import jit_partial as jit_partial
from ._lazy_init import lazy_init as lazy_init
from ._meta import NNXMeta as NNXMeta
from ._meta import with_partitioning as with_partitioning
from ._sharded import abstract as abstract
from ._sharded import init_sharded as init_sharded
from ._to_linen import ToLinen as ToLinen
from ._to_linen import to_linen as to_linen
from ._to_linen_class import to_linen_class as to_linen_class
from ._to_nnx import ToNNX as ToNNX

if _typing.TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import parity as parity
    from . import port as port
    from .rewrite import rewrite as rewrite

__all__ = [
    "AttrPriority",
    "BridgeError",
    "BridgeWarning",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ConversionError",
    "Functional",
    "ImmutableCollectionError",
    "InvalidFilterError",
    "InvalidMeshError",
    "InvalidMethodError",
    "InvalidModuleError",
    "InvalidRngsError",
    "InvalidSectionsError",
    "LostUpdateError",
    "MismatchError",
    "MissingRngError",
    "NNXMeta",
    "NotInitializedError",
    "ParityError",
    "PortError",
    "ReservedNameError",
    "Scope",
    "ShardingError",
    "ToLinen",
    "ToNNX",
    "UnboundAxisError",
    "abstract",
    "checkpoint",
    "current_context",
    "current_module",
    "functional",
    "init_sharded",
    "initializers",
    "jit_partial",
    "lazy_init",
    "linen_to_nnx",
    "nnx_to_linen",
    "parity",
    "port",
    "register_variable_name",
    "register_variable_name_type_pair",
    "rewrite",
    "to_linen",
    "to_linen_class",
    "variables",
    "with_partitioning",
    "wrappers",
]


def __getattr__(name: str) -> object:
    if name in ("checkpoint", "parity", "port", "rewrite"):
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
