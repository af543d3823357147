"""Defines the errors and warnings of the bridge.

::

    BridgeError(Exception)                       the root; registry's errors derive from it too
    ├── InvalidModuleError(TypeError)            what was given to be wrapped cannot be wrapped
    ├── InvalidMethodError(TypeError, AttributeError)
    │                                            there is no such method
    ├── InvalidRngsError(TypeError, flax InvalidRngError)
    │                                            rngs of a wrong type
    ├── InvalidFilterError(TypeError, flax InvalidFilterError)
    │                                            mutable names no collections
    ├── MissingRngError(flax InvalidRngError)    a key is needed and there is none
    ├── OuterStateError(flax TraceContextError)  a constructor changes its caller's state
    ├── NotInitializedError(ValueError, flax ScopeCollectionNotFound)
    │                                            a wrapped Linen module has no variables yet
    ├── MissingInputsError(TypeError)            init without inputs of a model that needs them
    ├── AbstractInputError(flax LazyInitError)   variables depend on an input given as a shape
    ├── MismatchError(ValueError, flax ScopeParamShapeError, ScopeParamNotFoundError,
    │                 ScopeVariableNotFoundError, ScopeCollectionNotFound)
    │                                            variables that do not fit the module
    ├── ReservedNameError(ValueError)            a name the wrapper keeps for itself
    ├── DeclarationError(ValueError, flax AssignSubModuleError)
    │                                            declared outside of setup and compact methods
    ├── NameInUseError(flax NameInUseError)      two of a module's variables have the same name
    ├── UnboundLinenError(flax CallCompactUnboundModuleError, AttributeError)
    │                                            a bridge.Module calls a Linen module as it is
    ├── ImmutableCollectionError(flax ModifyScopeVariableError)
    │                                            a call writes where it may not
    ├── ConversionError(ValueError, TypeError)   not variables, not a State
    ├── PortError(ValueError)                    values that have no place in a native model
    ├── CheckpointError(ValueError)              a checkpoint that cannot be read, written or used
    │   └── CheckpointNotFoundError(FileNotFoundError)
    │                                            there is none
    ├── LayerRegistrationError(ValueError, TypeError)
    │                                            two classes that cannot be registered as one layer
    ├── InvalidMeshError(TypeError)              a mesh was expected, found another object
    ├── ShardingError(ValueError)                partition specs that do not fit the mesh
    ├── ParityError(AssertionError)              two models that should do the same do not
    ├── InvalidOptionsError(ValueError)          options of a comparison that contradict each other
    ├── UnboundAxisError(NameError)              a model reduces over an axis that nothing binds
    ├── UnsupportedFlaxError(ImportError)        a part of Flax or JAX is not as the bridge needs it
    └── LostUpdateError(ValueError, flax ModifyScopeVariableError)
                                                 strict mode: an update that would be dropped

    BridgeWarning(UserWarning)                   an update is dropped, a path is ignored
"""

from registry import BridgeError as BridgeError

from .conversion_errors import ConversionError as ConversionError
from .conversion_errors import InvalidMeshError as InvalidMeshError
from .conversion_errors import ShardingError as ShardingError
from .conversion_errors import mapping_error as mapping_error
from .module_errors import DeclarationError as DeclarationError
from .module_errors import NameInUseError as NameInUseError
from .module_errors import UnboundLinenError as UnboundLinenError
from .texts import bullets as bullets
from .texts import by_reason as by_reason
from .texts import did_you_mean as did_you_mean
from .texts import listed as listed
from .texts import path_text as path_text
from .texts import shown as shown
from .texts import with_remedy as with_remedy
from .tool_errors import CheckpointError as CheckpointError
from .tool_errors import CheckpointNotFoundError as CheckpointNotFoundError
from .tool_errors import InvalidOptionsError as InvalidOptionsError
from .tool_errors import LayerRegistrationError as LayerRegistrationError
from .tool_errors import ParityError as ParityError
from .tool_errors import PortError as PortError
from .warning_texts import BridgeWarning as BridgeWarning
from .warning_texts import kept_definition_text as kept_definition_text
from .warning_texts import lifted_removal_text as lifted_removal_text
from .warning_texts import lost_update_text as lost_update_text
from .warning_texts import unknown_paths_text as unknown_paths_text
from .warning_texts import unread_hooks_text as unread_hooks_text
from .warning_texts import untold_change_text as untold_change_text
from .warning_texts import warn as warn
from .warning_texts import write_to_copy_text as write_to_copy_text
from .wrapper_errors import AbstractInputError as AbstractInputError
from .wrapper_errors import ImmutableCollectionError as ImmutableCollectionError
from .wrapper_errors import InvalidFilterError as InvalidFilterError
from .wrapper_errors import InvalidMethodError as InvalidMethodError
from .wrapper_errors import InvalidModuleError as InvalidModuleError
from .wrapper_errors import InvalidRngsError as InvalidRngsError
from .wrapper_errors import LostUpdateError as LostUpdateError
from .wrapper_errors import MismatchError as MismatchError
from .wrapper_errors import MissingInputsError as MissingInputsError
from .wrapper_errors import MissingRngError as MissingRngError
from .wrapper_errors import NotInitializedError as NotInitializedError
from .wrapper_errors import OuterStateError as OuterStateError
from .wrapper_errors import ReservedNameError as ReservedNameError
from .wrapper_errors import UnboundAxisError as UnboundAxisError
from .wrapper_errors import UnsupportedFlaxError as UnsupportedFlaxError
