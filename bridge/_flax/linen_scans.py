"""Tells when Linen's `nn.scan` traces its body only to find its constants."""

from __future__ import annotations

import sys
from types import FrameType

from flax.core import axes_scan

_FILE = axes_scan.__file__


def is_looking_for_constants() -> bool:
    """Whether a call is part of a trace in which `nn.scan` runs only what is constant.

    Since Flax 0.12.9 such a trace must have no effect, such as that of `jax.debug.callback`:
    `nn.scan` takes an effect for a dependency on the scan's inputs, and raises. Flax has no name
    for the trace, so an argument identifies it. If that argument is gone, the answer is False, and
    `nn.scan` raises.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _FILE and frame.f_locals.get("init_mode", False):
            return True
        frame = frame.f_back
    return False
