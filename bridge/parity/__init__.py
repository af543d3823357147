"""Compares what two models with the same weights do, and names the first layer that differs."""

from bridge._errors import ParityError as ParityError

from ._check import Options as Options
from ._check import assert_same as assert_same
from ._check import check as check
from ._divergence import Divergence as Divergence
from ._fields import FieldDifference as FieldDifference
from ._numbers import Compared as Compared
from ._numbers import Tolerance as Tolerance
from ._report import SECTIONS as SECTIONS
from ._report import Report as Report
from ._report import Section as Section

__all__ = [
    "SECTIONS",
    "Compared",
    "Divergence",
    "FieldDifference",
    "Options",
    "ParityError",
    "Report",
    "Section",
    "Tolerance",
    "assert_same",
    "check",
]
