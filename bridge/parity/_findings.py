"""What a check found, section by section."""

from __future__ import annotations

import dataclasses

from ._divergence import Divergence
from ._numbers import Compared, worst

SECTIONS = (
    "port plan",
    "weights",
    "outputs",
    "layers",
    "fields",
    "gradients",
    "state",
    "steps",
    "partition specs",
)


@dataclasses.dataclass(frozen=True)
class Section:
    """One thing that was compared.

    Attributes:
      name: one of `SECTIONS`.
      compared: every comparison, in the order of the model's values; of layers in that of
        execution.
      note: what the comparisons do not say: why there are none, or what was left out.
      failed: whether the section fails whatever its comparisons say.
      is_advisory: whether differences are told and do not count.
    """

    name: str
    compared: tuple[Compared, ...] = ()
    note: str = ""
    failed: bool = False
    is_advisory: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing differs, or the section is advisory."""
        return self.is_advisory or (not self.failed and all(c.ok for c in self.compared))

    @property
    def differing(self) -> tuple[Compared, ...]:
        """The comparisons that do not agree."""
        return tuple(c for c in self.compared if not c.ok)

    @property
    def worst(self) -> Compared | None:
        """The comparison that is furthest from agreeing, None if there is none."""
        return worst(self.compared)


@dataclasses.dataclass(frozen=True)
class Findings:
    """Whether two models do the same, and where they first do not.

    Attributes:
      a: the first model's name.
      b: the second one's.
      sections: what was compared, in order.
      first_divergence: the first layer in execution order whose output differs though its inputs
        agree; None if there is none, or if layers were not compared.
      first_inexact: the first layer whose output agrees within tolerance and is not bitwise equal,
        though its inputs are. If static fields differ in some of these, the first of those.
      hints: what else explains the verdict: dropout that is on, where NaN comes from.
    """

    a: str
    b: str
    sections: tuple[Section, ...]
    first_divergence: Divergence | None = None
    first_inexact: Divergence | None = None
    hints: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing differs in any section."""
        return all(section.ok for section in self.sections)

    def section(self, name: str) -> Section:
        """The section of a name.

        Raises:
          KeyError: nothing of the name was compared.
        """
        for section in self.sections:
            if section.name == name:
                return section
        raise KeyError(name)
