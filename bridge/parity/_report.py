"""What a check found: a value that can be asked, shown as a table, and written as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from ._findings import Findings


@dataclasses.dataclass(frozen=True)
class Report(Findings):
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

    def __str__(self) -> str:
        # Only this needs rich.
        from ._table import as_text

        return as_text(self)

    def to_json(self, indent: int | None = None) -> str:
        """The report as a JSON document.

        Args:
          indent: as for `json.dumps`.

        Returns:
          The fields of the report, with `ok` for it and for each section. Numbers that are not
          finite are null.
        """
        document = _plain(dataclasses.asdict(self))
        document["ok"] = self.ok
        for entry, section in zip(document["sections"], self.sections, strict=True):
            entry["ok"] = section.ok
        return json.dumps(document, indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
