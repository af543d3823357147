"""The import path of `flax.nnx.bridge.module`."""

from ._linen_style_module.attributes import AttrPriority
from ._linen_style_module.calling import compact
from ._linen_style_module.module import Module, ModuleMeta
from ._module_calls import MODULE_CONTEXT as MODULE_CONTEXT
from ._module_calls import ModuleInCall as ModuleStackEntry
from ._module_calls import Scope, current_context, current_module

__all__ = [
    "AttrPriority",
    "Module",
    "ModuleMeta",
    "ModuleStackEntry",
    "Scope",
    "compact",
    "current_context",
    "current_module",
]
