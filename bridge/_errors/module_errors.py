"""What a `bridge.Module` raises."""

from __future__ import annotations

from flax import errors as flax_errors

from registry import BridgeError as BridgeError

from .texts import shown


class DeclarationError(BridgeError, ValueError, flax_errors.AssignSubModuleError):
    """A `bridge.Module` declares something where it may not."""

    def __init__(self, what: str, owner: str, *, is_bound: bool = True):
        remedy = "do it there" if is_bound else "create them with init or bridge.lazy_init"
        Exception.__init__(
            self,
            f"{what} of {owner} must be initialized in `setup()` or in a method wrapped in"
            f" `@compact`, while that one runs; {remedy}",
        )

    @classmethod
    def _of(cls, text: str) -> DeclarationError:
        error = cls("", "", is_bound=True)
        error.args = (text,)
        return error

    @classmethod
    def of_name(cls, owner: str, name: object) -> DeclarationError:
        """The error for a name that is no text."""
        return cls._of(f"{owner} expected name as a str, found {shown(name)}; pass name='…'")

    @classmethod
    def of_parent(cls, owner: str, parent: object) -> DeclarationError:
        """The error for a parent that is not being called."""
        return cls._of(
            f"{owner} expected parent=None or a bridge.Module that is being called, found"
            f" {shown(parent)}; leave parent out to make it a submodule"
        )

    @classmethod
    def of_path(cls, owner: str) -> DeclarationError:
        """The error for a path outside of a call."""
        return cls._of(f"{owner} has a path while it is being called; ask for it in a method")

    @classmethod
    def of_rngs(cls, owner: str) -> DeclarationError:
        """The error for a key outside of a call."""
        return cls._of(f"{owner} draws keys while it is being called; call make_rng in a method")

    @classmethod
    def of_reference(cls, owner: str, name: str) -> DeclarationError:
        """The error for a function of the module around it that is read without that one."""
        return cls._of(
            f"{owner}.{name} refers to the module around {owner}, and was read outside of a call of"
            " that one; call the outermost module, or make it a method of this class"
        )

    @classmethod
    def of_interop(cls, who: str) -> DeclarationError:
        """The error for a submodule of no module."""
        return cls._of(
            f"{who} was called, and no bridge.Module is being called; use it in `setup()` or in a"
            " method wrapped in `@compact`"
        )


class UnboundLinenError(BridgeError, flax_errors.CallCompactUnboundModuleError, AttributeError):
    """A Linen module is called in a `bridge.Module` that it is no submodule of."""

    def __init__(self, linen_module: str, owner: str):
        Exception.__init__(
            self,
            f"{linen_module} is a Linen module, and a method of {owner} calls it though it is no"
            f" submodule; write bridge.linen_in_bridge_mdl({linen_module}(…))(x) in a compact"
            f" method, or assign it in setup: self.layer = {linen_module}(…)",
        )


class NameInUseError(BridgeError, flax_errors.NameInUseError):
    """Two variables of a collection, or a submodule and something else, have the same name.

    Attributes:
      name: the name.
    """

    def __init__(self, what: str, name: str, owner: str):
        self.name = name
        Exception.__init__(
            self,
            f"the name {name!r} of a {what} of {owner} is in use already; give one of the two"
            " another name",
        )
