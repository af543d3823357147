"""Moves values between Linen variables and the native NNX re-implementation of the same model.

`plan` compares the two. `Plan.apply` moves the values in either direction, and
`Plan.apply_optimizer` the optimizer state with its step. `suggest` proposes the rules that a plan
needs, with the evidence.
"""

from bridge._errors import PortError as PortError

from ._entries import Entry as Entry
from ._plan import Plan as Plan
from ._plan import plan as plan
from ._suggest import Proposal as Proposal
from ._suggest import Suggestions as Suggestions
from ._suggest import suggest as suggest

__all__ = [
    "Entry",
    "Plan",
    "PortError",
    "Proposal",
    "Suggestions",
    "plan",
    "suggest",
]
