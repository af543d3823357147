"""Tells the names that Linen made from a class, such as `Dense_0`, from those of a program."""

from __future__ import annotations

import functools
import re

from flax import linen as nn

_CAPITAL = re.compile(r"_*[A-Z]\w*_\d+")
_NUMBERED = re.compile(r"([^\W\d]\w*)_\d+")


class AutomaticNames:
    """The names that Linen may have made, of the classes that there are at this moment.

    A class begins with a capital by convention. For another name, such as `block_0`, the program's
    classes tell whether it is the first `block` or an item of a list `block` that `setup` made.
    """

    def __contains__(self, name: str) -> bool:
        if _CAPITAL.fullmatch(name):
            return True
        match = _NUMBERED.fullmatch(name)
        return match is not None and match.group(1) in self._classes

    @functools.cached_property
    def _classes(self) -> set[str]:
        """The names of all Linen classes in this process."""
        found: set[type[nn.Module]] = set()
        more: list[type[nn.Module]] = [nn.Module]
        while more:
            new = [cls for cls in more.pop().__subclasses__() if cls not in found]
            found.update(new)
            more += new
        return {cls.__name__ for cls in found}
