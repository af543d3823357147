"""What errors say about a submodule of a ToNNX."""

from __future__ import annotations

from bridge._conversion.linen_attributes import LinenHolder, name_of
from bridge._conversion.neutral import Path
from bridge._errors import InvalidModuleError


def place_text(owner: LinenHolder, path: Path) -> str:
    """What messages call a submodule."""
    return ".".join((name_of(owner), *map(str, path)))


def not_found_text(owner: LinenHolder, path: Path, name: str, *, is_made: bool) -> str:
    """The text for an attribute that is not there.

    Args:
      owner: the ToNNX.
      path: the submodule.
      name: the attribute.
      is_made: whether the submodule is there outside of a call.
    """
    text = f"{place_text(owner, path)} has no variable, field or method {name!r}"
    if is_made:
        return text
    return (
        f"{text}; it is made in an nn.compact method, so outside of a call only its variables are"
        " known. Make it in setup to read its fields and call its methods"
    )


def not_created_text(owner: LinenHolder, path: Path, name: str) -> str:
    """The text for an attribute that is computed from variables, before there are any."""
    return (
        f"{place_text(owner, path)}.{name} depends on variables that do not exist yet; create them"
        " with bridge.lazy_init(model, *inputs)"
    )


def method_name_text(owner: LinenHolder, path: Path, name: str) -> str:
    """The text for an assignment to a name that a method of `dict` has."""
    place = place_text(owner, path)
    return (
        f"{name!r} is a method of {place}, which is a dict too; set a variable of that name as an"
        f" item, {place}[{name!r}] = …"
    )


def misfit_error(
    owner: LinenHolder, path: Path, value: object, expected: str
) -> InvalidModuleError:
    """The error for what cannot take the place of a list, tuple or dict of submodules."""
    return InvalidModuleError(
        place_text(owner, path),
        value,
        expected,
        "assign to each submodule by its own name, such as model.blocks_0",
    )
