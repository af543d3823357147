r"""The table of paths for `convert`, from a TOML or JSON file.

::

    [rules]                              # regular expression for a Linen path -> NNX path
    "encoder/Dense_0" = "encoder.fc1"
    'block_(\d+)' = 'blocks.\1'

    [collections]                        # regular expression for an NNX path -> collection
    '.*\.(mean|var)' = "batch_stats"
    ".*" = "params"

A flat table of texts is `rules` alone. JSON has the same tables. `collections` is for a checkpoint
of an NNX state, which tells none; the first entry that matches the whole path counts.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from bridge._errors import shown

from ._input_errors import InputError


@dataclasses.dataclass(frozen=True)
class Rules:
    """What the file says.

    Attributes:
        paths: NNX paths, with dots, by regular expressions for Linen paths, as `port.plan` takes
            them.
        collections: collections by regular expressions for NNX paths.
    """

    paths: Mapping[str, str] = dataclasses.field(default_factory=dict)
    collections: Mapping[str, str] = dataclasses.field(default_factory=dict)


def load(file: pathlib.Path | None) -> Rules:
    """Reads a table; without a file there are no rules.

    Raises:
        InputError: not TOML or JSON, or not such a table.
    """
    if file is None:
        return Rules()
    expected = 'texts by text, in the tables "rules" and "collections"'
    try:
        text = file.read_text(encoding="utf-8")
        table = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        found = f"a file that cannot be parsed ({error})"
        remedy = "a file that ends in .json is read as JSON, any other as TOML"
        raise InputError(str(file), found, expected, remedy) from error
    if isinstance(table, dict) and not any(isinstance(value, dict) for value in table.values()):
        table = {"rules": table}
    if not isinstance(table, dict):
        raise InputError(str(file), shown(table), expected, "see python -m bridge convert --help")
    unknown = [repr(key) for key in table if key not in ("rules", "collections")]
    bad = [key for key in table if not _is_texts(table[key])] if not unknown else []
    if unknown or bad:
        found = ", ".join(unknown) or ", ".join(f"other values in {key!r}" for key in bad) or "none"
        raise InputError(str(file), found, expected, "see python -m bridge convert --help")
    rules = Rules(table.get("rules", {}), table.get("collections", {}))
    for pattern in (*rules.paths, *rules.collections):
        try:
            re.compile(pattern)
        except re.error as error:
            found = f"{pattern!r} ({error})"
            raise InputError(str(file), found, "regular expressions", "correct it") from error
    return rules


def _is_texts(table: Any) -> bool:
    return isinstance(table, dict) and all(isinstance(value, str) for value in table.values())
