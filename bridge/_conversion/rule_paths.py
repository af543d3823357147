r"""The NNX paths of rules: names with dots, and two signs for layers that one side keeps stacked.

`blocks.*` stands for the items of a list, whose leaves Linen has stacked; `blocks[3]` for an entry
of leaves that NNX has stacked. The axis is the first one; `blocks.*@1` and `blocks[3@1]` name
another. In a rule the number of an entry may be a reference to a group: `blocks[\1]`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_SEGMENT = re.compile(
    r"(?P<star>\*)(@(?P<star_axis>-?\d+))?"
    r"|(?P<name>[^\[\]*]+)(\[(?P<index>\\?\d+)(@(?P<axis>-?\d+))?\])?"
)


class Segment(NamedTuple):
    """One key of an NNX path in a rule.

    Attributes:
      name: the key; None for all items of a list.
      number: which entry of stacked leaves, a number or a reference to a group; None if the leaves
        are not stacked.
      axis: the axis on which Linen (for all items) or NNX (for an entry) has the leaves stacked.
    """

    name: str | None
    number: str | None
    axis: int

    @property
    def is_stacked(self) -> bool:
        """Whether one of the two sides has the layers stacked."""
        return self.name is None or self.number is not None


def segments(target: str) -> list[Segment] | None:
    """The keys of an NNX path in a rule, none for the model itself; None if it cannot be read."""
    found: list[Segment] = []
    for text in target.split(".") if target else ():
        match = _SEGMENT.fullmatch(text)
        if match is None:
            return None
        axis = int(match["star_axis"] or match["axis"] or 0)
        found.append(Segment(match["name"], match["index"], axis))
    return found
