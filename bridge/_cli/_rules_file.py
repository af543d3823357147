r"""The table of paths for `convert`, `diff` and `parity`, from a TOML file.

::

    [rules]                              # regular expression for a Linen path -> NNX path
    "encoder/Dense_0" = "encoder.fc1"
    'block_(\d+)' = 'blocks.\1'
"""

from __future__ import annotations

import pathlib
import tomllib
from collections.abc import Mapping

from ._input_errors import InputError


def load(file: pathlib.Path | None) -> Mapping[str, str] | None:
    """Reads a table of NNX paths by regular expressions for Linen paths, as `port.plan` takes it.

    Returns None without a file. Raises InputError if it is not TOML, or not such a table.
    """
    if file is None:
        return None
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(str(file), str(error), "a TOML file", "correct it") from error
    rules = document.get("rules")
    is_table = isinstance(rules, dict) and all(isinstance(path, str) for path in rules.values())
    if document.keys() != {"rules"} or not is_table:
        found = f"the entries {', '.join(map(repr, document)) or 'none'}"
        expected = "one table [rules] of texts"
        raise InputError(str(file), found, expected, "see python -m bridge convert --help")
    return rules
