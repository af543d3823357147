"""Tells the parameters of a Linen model from an NNX state, in a tree without collections."""

from __future__ import annotations

import re
from collections.abc import Collection

from ._stored import Names

# A class name and a number, as in Linen's automatic names.
_AUTOMATIC = re.compile(r"_*[A-Z]\w*_\d+")


def is_params_alone(leaves: Collection[Names], form: str, within: Names) -> bool:
    """Whether leaves are the parameters alone, as `to_bytes(state.params)` writes them.

    An NNX state has what parameters do not: the key `value` of each Variable, statistics and
    streams. A tree that holds more than a model has `params` further down. Without any such sign, a
    single file or a tree called `params` is taken for parameters. A directory of orbax is only if
    Linen made its names, and no key is a number, as those of a list are. In a file numbers are no
    sign: models of Hugging Face have them (`h/0/attn`).

    Args:
      leaves: the names of every leaf below the tree.
      form: the format of the checkpoint.
      within: the keys that lead to the tree.
    """
    keys = {key for names in leaves for key in names}
    last = {names[-1] for names in leaves if names}
    is_other = (
        last <= {"value"}
        or bool(last & {"mean", "var"})
        or any("params" in names[1:-1] for names in leaves)
        or any((*names[:-1], "count") in leaves for names in leaves if names[-1:] == ("key",))
    )
    if is_other or not keys or () in leaves:
        return False
    if form != "orbax" or within[-1:] == ("params",):
        return True
    return any(map(_AUTOMATIC.fullmatch, keys)) and not any(key.isdecimal() for key in keys)
