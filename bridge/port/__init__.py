"""Moves values between Linen variables and the native NNX re-implementation of the same model.

`plan` compares the two, `Plan.apply` moves the values, both ways, and `Plan.apply_optimizer` the
optimizer state with its step.
"""

from bridge._errors import PortError as PortError

from ._entries import Entry as Entry
from ._plan import Plan as Plan
from ._plan import plan as plan

__all__ = ["Entry", "Plan", "PortError", "plan"]
