"""The bridge between Flax's two module systems.

`ToNNX` wraps a Linen module as an NNX module, and `ToLinen` an NNX module as a Linen module.
Every name of `flax.nnx.bridge` has the same meaning here, so `import bridge` can replace it.

`bridge.checkpoint`, `bridge.parity`, `bridge.port` and `bridge.rewrite` are imported on first use,
together with orbax, optax and rich.
"""

import importlib as _importlib
import typing as _typing

import registry as _registry

if not isinstance(vars(_registry).get("BridgeError"), type):
    # Check first: the modules of this package import names from `registry`.
    raise ImportError(
        f"bridge needs its own package `registry`, and found another module of that name:"
        f" {_registry.__file__}. Rename that file, or take its folder off sys.path",
        name="registry",
        path=_registry.__file__,
    )

from flax.nnx.nn import initializers as initializers

from registry import register_variable_name as register_variable_name
from registry import register_variable_name_type_pair as register_variable_name_type_pair

from . import interop as interop
from . import module as module
from . import variables as variables
from . import wrappers as wrappers
from ._conversion.convert import linen_to_nnx as linen_to_nnx
from ._conversion.convert import nnx_to_linen as nnx_to_linen
from ._conversion.nnx_meta import NNXMeta as NNXMeta
from ._conversion.nnx_meta import with_partitioning as with_partitioning
from ._errors import AbstractInputError as AbstractInputError
from ._errors import BridgeError as BridgeError
from ._errors import BridgeWarning as BridgeWarning
from ._errors import CheckpointError as CheckpointError
from ._errors import CheckpointNotFoundError as CheckpointNotFoundError
from ._errors import ConversionError as ConversionError
from ._errors import DeclarationError as DeclarationError
from ._errors import ImmutableCollectionError as ImmutableCollectionError
from ._errors import InvalidFilterError as InvalidFilterError
from ._errors import InvalidMeshError as InvalidMeshError
from ._errors import InvalidMethodError as InvalidMethodError
from ._errors import InvalidModuleError as InvalidModuleError
from ._errors import InvalidOptionsError as InvalidOptionsError
from ._errors import InvalidRngsError as InvalidRngsError
from ._errors import LayerRegistrationError as LayerRegistrationError
from ._errors import LostUpdateError as LostUpdateError
from ._errors import MismatchError as MismatchError
from ._errors import MissingInputsError as MissingInputsError
from ._errors import MissingRngError as MissingRngError
from ._errors import NameInUseError as NameInUseError
from ._errors import NotInitializedError as NotInitializedError
from ._errors import OuterStateError as OuterStateError
from ._errors import ParityError as ParityError
from ._errors import PortError as PortError
from ._errors import ReservedNameError as ReservedNameError
from ._errors import ShardingError as ShardingError
from ._errors import UnboundAxisError as UnboundAxisError
from ._errors import UnboundLinenError as UnboundLinenError
from ._errors import UnsupportedFlaxError as UnsupportedFlaxError
from ._functions.functional import Functional as Functional
from ._functions.functional import functional as functional
from ._functions.jit_partial import jit_partial as jit_partial
from ._initialization.creating import creating_variables as creating_variables
from ._initialization.lazy_init import lazy_init as lazy_init
from ._layers.table import register_layer as register_layer
from ._linen_in_nnx.module_paths import set_module_paths as set_module_paths
from ._linen_in_nnx.to_nnx import ToNNX as ToNNX
from ._linen_style_module.attributes import AttrPriority as AttrPriority
from ._linen_style_module.calling import compact as compact
from ._linen_style_module.interop import linen_in_bridge_mdl as linen_in_bridge_mdl
from ._linen_style_module.interop import nnx_in_bridge_mdl as nnx_in_bridge_mdl
from ._linen_style_module.module import Module as Module
from ._module_calls import Scope as Scope
from ._module_calls import current_context as current_context
from ._module_calls import current_module as current_module
from ._nnx_in_linen.implemented_by import implemented_by as implemented_by
from ._nnx_in_linen.module_views import nnx_modules_as_linen as nnx_modules_as_linen
from ._nnx_in_linen.to_linen import ToLinen as ToLinen
from ._nnx_in_linen.to_linen import to_linen as to_linen
from ._nnx_in_linen.to_linen import to_linen_class as to_linen_class
from ._sharding.init_sharded import abstract as abstract
from ._sharding.init_sharded import init_sharded as init_sharded

if _typing.TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import parity as parity
    from . import port as port
    from .rewrite import rewrite as rewrite

__all__ = [
    "AbstractInputError",
    "AttrPriority",
    "BridgeError",
    "BridgeWarning",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ConversionError",
    "DeclarationError",
    "Functional",
    "ImmutableCollectionError",
    "InvalidFilterError",
    "InvalidMeshError",
    "InvalidMethodError",
    "InvalidModuleError",
    "InvalidOptionsError",
    "InvalidRngsError",
    "LayerRegistrationError",
    "LostUpdateError",
    "MismatchError",
    "MissingInputsError",
    "MissingRngError",
    "Module",
    "NNXMeta",
    "NameInUseError",
    "NotInitializedError",
    "OuterStateError",
    "ParityError",
    "PortError",
    "ReservedNameError",
    "Scope",
    "ShardingError",
    "ToLinen",
    "ToNNX",
    "UnboundAxisError",
    "UnboundLinenError",
    "UnsupportedFlaxError",
    "abstract",
    "checkpoint",
    "compact",
    "creating_variables",
    "current_context",
    "current_module",
    "functional",
    "implemented_by",
    "init_sharded",
    "initializers",
    "interop",
    "jit_partial",
    "lazy_init",
    "linen_in_bridge_mdl",
    "linen_to_nnx",
    "module",
    "nnx_in_bridge_mdl",
    "nnx_modules_as_linen",
    "nnx_to_linen",
    "parity",
    "port",
    "register_layer",
    "register_variable_name",
    "register_variable_name_type_pair",
    "rewrite",
    "set_module_paths",
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
