"""The options of lifted transforms: which NNX's transforms have too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.rewrite.observe._records import Lifted

from ._refusals import NotRewritableError

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "remat": {"variables": True, "rngs": True, "concrete": False, "methods": None},
    "jit": {
        "variables": True,
        "rngs": True,
        "donate_argnums": (),
        "device": None,
        "backend": None,
        "methods": None,
        "static_argnames": (),
    },
    "scan": {"data_transform": None, "methods": None},
    "vmap": {"methods": None},
    "cond": {"variables": True, "rngs": True},
    "switch": {"variables": True, "rngs": True},
    "while_loop": {},
}
PASSED: Mapping[str, Mapping[str, Any]] = {
    "remat": {"prevent_cse": True, "policy": None},
    "jit": {},
    "scan": {"reverse": False, "unroll": 1},
    "vmap": {"axis_name": None, "spmd_axis_name": None},
}
STACKS = {"scan": "length", "vmap": "axis_size"}
"""The transforms that may stack variables, with how the number is called."""


def check_options(lifted: Lifted) -> None:
    """Looks for what NNX's transform does not have.

    Raises NotRewritableError if there is any.
    """
    for name, default in _DEFAULTS[lifted.kind].items():
        if lifted.options.get(name, default) not in (default, None):
            raise NotRewritableError("transform-option", kind=lifted.kind, option=name)
