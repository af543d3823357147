r"""The table of paths for `convert`, `diff` and `parity`, from a TOML or JSON file.

::

    [rules]                              # regular expression for a Linen path -> NNX path
    "encoder/Dense_0" = "encoder.fc1"
    'block_(\d+)' = 'blocks.\1'

The heading may be left out. JSON has the same table.
"""

from __future__ import annotations

import json
import pathlib
import re
import tomllib
from collections.abc import Mapping

from bridge._errors import shown

from ._input_errors import InputError


def load(file: pathlib.Path | None) -> Mapping[str, str] | None:
    """Reads a table of NNX paths by regular expressions for Linen paths, as `port.plan` takes it.

    Returns:
        The table; None without a file.

    Raises:
        InputError: not TOML or JSON, or not such a table.
    """
    if file is None:
        return None
    expected = 'texts by regular expressions, in a table "rules"'
    try:
        text = file.read_text(encoding="utf-8")
        document = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        found = f"a file that cannot be parsed ({error})"
        remedy = "a file that ends in .json is read as JSON, any other as TOML"
        raise InputError(str(file), found, expected, remedy) from error
    is_headed = isinstance(document, dict) and document.keys() == {"rules"}
    table = document["rules"] if is_headed else document
    if not isinstance(table, dict):
        raise InputError(str(file), shown(table), expected, "see python -m bridge convert --help")
    if wrong := [repr(key) for key, path in table.items() if not isinstance(path, str)]:
        found = f"other values at {', '.join(wrong)}"
        raise InputError(str(file), found, expected, "see python -m bridge convert --help")
    for pattern in table:
        try:
            re.compile(pattern)
        except re.error as error:
            found = f"{pattern!r} ({error})"
            raise InputError(str(file), found, "regular expressions", "correct it") from error
    return table
