"""Holds the findings of a proof, and the error for one that cannot be made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bridge import parity
from bridge._errors import BridgeError


class ProofError(BridgeError, ValueError):
    """The weights of the Linen model do not fit the new one.

    `paths` has the Linen paths of what does not fit, without collections.
    """

    def __init__(self, text: str, paths: Sequence[tuple[str, ...]]) -> None:
        self.paths = tuple(paths)
        super().__init__(text)


class EntryError(BridgeError):
    """An entry could not be compared.

    `cause` is what was raised in its run.
    """

    def __init__(self, run: int, cause: Exception) -> None:
        self.run, self.cause = run, cause
        super().__init__(run, cause)


@dataclasses.dataclass(frozen=True)
class Proof:
    """What was compared.

    Attributes:
        reports: of `bridge.parity`, by what was run.
        rules: Linen paths to NNX paths, for `bridge.port`, by the model's class.
        sizes: the size arguments of each entry's model.
        first_place: the Linen path of the first layer that differs.
        notes: what was not compared.
        place: the run in which something differs.
        limits: what raised, or had other shapes, with other fields than the given ones.
        same: the runs in which both models are one program, so that no numbers are compared.
    """

    reports: Mapping[str, parity.Report]
    rules: Mapping[type, Mapping[str, str]]
    sizes: Sequence[Mapping[str, Any]]
    first_place: str | None = None
    notes: tuple[str, ...] = ()
    place: int = 0
    limits: tuple[str, ...] = ()
    same: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return all(report.ok for report in self.reports.values())
