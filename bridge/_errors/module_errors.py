"""Defines the errors of `bridge.Module`."""

from __future__ import annotations

from flax import errors as flax_errors

from registry import BridgeError as BridgeError

from .texts import shown


class DeclarationError(BridgeError, ValueError, flax_errors.AssignSubModuleError):
    """A `bridge.Module` declares something in the wrong place, or uses it outside of a call."""

    @classmethod
    def of_place(cls, what: str, owner: str, *, is_bound: bool = True) -> DeclarationError:
        """The error for a declaration outside of `setup` and compact methods."""
        remedy = "do it there" if is_bound else "create them with init or bridge.lazy_init"
        return cls(
            f"{what} of {owner} must be initialized in `setup()` or in a method wrapped in"
            f" `@compact`, while that one runs; {remedy}"
        )

    @classmethod
    def of_loose(cls, module: str, root: str) -> DeclarationError:
        """The error for a module that creates variables and is in no attribute of the model."""
        return cls(
            f"{module} creates variables, and is no submodule of {root}; assign it to an attribute"
            " in `setup()`, or make it in a method wrapped in `@compact`"
        )

    @classmethod
    def of_argument(cls, owner: str, expected: str, found: object) -> DeclarationError:
        """The error for an invalid name or parent."""
        return cls(f"{owner} expected {expected}, found {shown(found)}; leave it out")

    @classmethod
    def of_use(cls, what: str, owner: str) -> DeclarationError:
        """The error for a use that is only possible while the module is being called."""
        return cls(
            f"{what} only while {owner} is being called; use it in a method of that module, and"
            " call the outermost module"
        )


class UnboundLinenError(BridgeError, flax_errors.CallCompactUnboundModuleError, AttributeError):
    """A Linen module is called in a `bridge.Module` without being its submodule."""

    def __init__(self, linen_module: str, owner: str):
        super().__init__(
            f"{linen_module} is a Linen module, and a method of {owner} calls it though it is no"
            f" submodule; write bridge.linen_in_bridge_mdl({linen_module}(…))(x) in a compact"
            f" method, or assign it in setup: self.layer = {linen_module}(…)"
        )


class NameInUseError(BridgeError, flax_errors.NameInUseError):
    """Two variables of a collection, or a submodule and something else, have the same name.

    Attributes:
      name: the name.
    """

    def __init__(self, what: str, name: str, owner: str):
        self.name = name
        super().__init__(
            f"the name {name!r} of a {what} of {owner} is in use already; give one of the two"
            " another name"
        )
