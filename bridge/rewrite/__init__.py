"""Linen sources become NNX sources, and are proven to do the same.

The module itself is called: `bridge.rewrite(make_model, x)`.
"""

import sys as _sys
import types as _types
from typing import Any as _Any

from ._failures import RewriteError as RewriteError
from ._function import rewrite as rewrite
from .publish._functions import FunctionResult as FunctionResult
from .publish._functions import Training as Training
from .publish._result import LEVELS as LEVELS
from .publish._result import ClassResult as ClassResult
from .publish._result import Level as Level
from .publish._result import Rewrite as Rewrite

__all__ = [
    "LEVELS",
    "ClassResult",
    "FunctionResult",
    "Level",
    "Rewrite",
    "RewriteError",
    "Training",
    "rewrite",
]


class _CallableModule(_types.ModuleType):
    """A module that stands for its main function, as `bridge.rewrite(...)` needs it.

    Setting `__class__` is what Python's data model provides for a module's own behaviour.
    """

    def __call__(self, *args: _Any, **kwargs: _Any) -> Rewrite:
        return rewrite(*args, **kwargs)


_sys.modules[__name__].__class__ = _CallableModule
