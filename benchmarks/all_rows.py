"""All rows of the table."""

from __future__ import annotations

from . import rows, size_rows

ROWS = (*rows.ROWS, *size_rows.SIZE_ROWS)
