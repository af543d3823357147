"""The reasons for which `suggest` takes two things for the same, in the words that it prints."""

from __future__ import annotations

from typing import NamedTuple


class Evidence(NamedTuple):
    """Why two things are proposed to be the same.

    Attributes:
      text: what speaks for it.
      is_weak: whether only a shape, or an order that a program need not keep, speaks for it.
      is_disputed: whether names say otherwise than the order of calls does.
    """

    text: str
    is_weak: bool = False
    is_disputed: bool = False

    def __and__(self, other: Evidence) -> Evidence:
        """Both, weak or disputed if one of them is."""
        text = self.text if self.text == other.text else f"{self.text}; {other.text}"
        is_disputed = self.is_disputed or other.is_disputed
        return Evidence(text, self.is_weak or other.is_weak, is_disputed)

    @property
    def against_names(self) -> Evidence:
        """The same where it decides, although names say otherwise."""
        text = f"{self.text}, although names say otherwise"
        return self._replace(text=text, is_disputed=True)


STRUCTURE = Evidence("the only ones of their structure")
# What a plan does by itself, by how a pair is known.
SETTLED = {
    "by name": Evidence("equal names"),
    "by number": Evidence("numbers in the same order, and nothing else"),
    "by structure": STRUCTURE,
}
STACKED = Evidence("stacked leaves, which fit one axis only")

ONLY = Evidence("nothing else is left")
THEIR_NAMES = Evidence("their names")
CONSTRUCTIONS = Evidence("automatic numbers count constructions, not calls", is_weak=True)

CALLS = Evidence("the order of calls in both models")
ANY_ORDER = Evidence(
    "some of the calls do not use each other's results, so any order would do", is_weak=True
)
DIFFERS = Evidence("the order of calls differs", is_weak=True, is_disputed=True)

SAME_SHAPE = Evidence("the same shape", is_weak=True)
SAME_SHAPE_AND_NAMES = Evidence("the same shape and their names")
SAME_USE = Evidence("the same shape, used alike in both models")
SYMMETRIC = Evidence("the same shape, which a transpose has too", is_weak=True)
STACKED_LEAVES = Evidence("stacked leaves, whose shapes are those of the layers", is_weak=True)

TRANSPOSED = Evidence("the models use different axes, so one has the transpose")
BACKWARDS = Evidence("only one of the models scans the layers backwards")
CUT_OTHERWISE = Evidence("only one of the models has a share of each part in each head")

# Of arrays that one model lays out otherwise.
SIZED_STACK = Evidence("the only ones with as many layers and elements")
EQUAL_NAMES_AND_SIZE = Evidence("equal names, and arrays of the same size")
NAMES_AND_SIZE = Evidence("their names, and arrays of the same size")
CALLS_AND_SIZE = Evidence("the order of calls in both models, and arrays of the same size")
CALLS_AND_SIZES = Evidence("the order of calls in both models, and sizes that add up")
IN_BLOCKS = Evidence(
    "a trace takes the axis apart, perhaps into blocks with a share of each", is_weak=True
)
USUAL_ORDER = Evidence("query, key and value in the usual order")
