"""Maps collections to Variable types, and metadata boxes to their fields.

Linen groups variables in named collections, NNX in Variable types. The default registry knows
Flax's own pairs (`params` is `nnx.Param`, `batch_stats` is `nnx.BatchStat`, …) and the pairs
registered here. A `Registry` is an immutable value; `use` replaces it for a block.
"""

from . import auto as auto
from ._boxes import BoxCodec as BoxCodec
from ._default import register_box as register_box
from ._default import register_variable_name as register_variable_name
from ._default import register_variable_name_type_pair as register_variable_name_type_pair
from ._default import variable_name_from_type as variable_name_from_type
from ._default import variable_type_from_name as variable_type_from_name
from ._errors import BridgeError as BridgeError
from ._errors import InvalidRegistrationError as InvalidRegistrationError
from ._errors import RegistrationConflictError as RegistrationConflictError
from ._errors import RegistryError as RegistryError
from ._errors import UnknownNameError as UnknownNameError
from ._errors import UnsupportedBoxError as UnsupportedBoxError
from ._registry import Registry as Registry
from ._registry import current as current
from ._registry import use as use

__all__ = [
    "BoxCodec",
    "BridgeError",
    "InvalidRegistrationError",
    "RegistrationConflictError",
    "Registry",
    "RegistryError",
    "UnknownNameError",
    "UnsupportedBoxError",
    "auto",
    "current",
    "register_box",
    "register_variable_name",
    "register_variable_name_type_pair",
    "use",
    "variable_name_from_type",
    "variable_type_from_name",
]
