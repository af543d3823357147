"""Linen sources become NNX sources, and are proven to do the same.

The module itself is called: `bridge.rewrite(make_model, x)`.
"""

import sys as _sys
import types as _types
from typing import Any as _Any

from ._failures import RewriteError as RewriteError
from ._function import rewrite as rewrite
from .publish._result import LEVELS as LEVELS
from .publish._result import ClassResult as ClassResult
from .publish._result import FunctionResult as FunctionResult
from .publish._result import Level as Level
from .publish._result import Rewrite as Rewrite
from .publish._result import Training as Training

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
    """A module that can be called like its main function: `bridge.rewrite(...)`.

    Python's data model provides the assignment to `__class__` for a module with behaviour of its
    own.
    """

    def __call__(self, *args: _Any, **kwargs: _Any) -> Rewrite:
        return rewrite(*args, **kwargs)


_sys.modules[__name__].__class__ = _CallableModule
