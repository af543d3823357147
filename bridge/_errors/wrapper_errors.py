"""Defines the errors of the two wrappers."""

from __future__ import annotations

from collections.abc import Iterable

from flax import errors as flax_errors

from registry import BridgeError as BridgeError

from .texts import bullets, listed, misfits, shown


class InvalidModuleError(BridgeError, TypeError):
    """A wrapper got something that it cannot wrap.

    Attributes:
      found: the refused object.
    """

    def __init__(self, wrapper: str, found: object, expected: str, remedy: str):
        self.found = found
        super().__init__(f"{wrapper} expected {expected}, found {shown(found)}; {remedy}")


class InvalidMethodError(BridgeError, TypeError, AttributeError):
    """`method` is not the name of a method, nor a function.

    Attributes:
      method: what was asked for.
    """

    def __init__(self, owner: type, method: object, available: Iterable[str], remedy: str = ""):
        self.method = method
        super().__init__(
            f"{owner.__name__} has no method {method!r} that can be called; its methods are"
            f" {listed(sorted(available))}{remedy and f'; {remedy}'}"
        )


class InvalidRngsError(BridgeError, TypeError, flax_errors.InvalidRngError):
    """`rngs` is not a source of random keys.

    Attributes:
      found: the refused object.
    """

    def __init__(
        self, found: object, where: str, expected: str = "an nnx.Rngs, a key", remedy: str = ""
    ):
        self.found = found
        super().__init__(
            f"{where} expected rngs as {expected}, or a dict of keys by stream name such as"
            f" {{'dropout': jax.random.key(0)}}; found {shown(found)}{remedy and f'; {remedy}'}",
        )


class InvalidFilterError(BridgeError, TypeError, flax_errors.InvalidFilterError):
    """`mutable` does not name collections.

    Attributes:
      found: the refused object.
    """

    def __init__(self, found: object, where: str):
        self.found = found
        super().__init__(
            f"{where} expected mutable as a collection's name, a list of names such as"
            f" ['batch_stats'], True, False or a DenyList of names; found {shown(found)}",
        )


class MissingRngError(BridgeError, flax_errors.InvalidRngError):
    """A module draws a key from an RNG stream that does not exist.

    Attributes:
      streams: the streams that were asked for.
    """

    def __init__(self, where: str, streams: Iterable[str], available: Iterable[str], remedy: str):
        self.streams: tuple[str, ...] = tuple(streams)
        names = sorted(available)
        given = f"keys only for {listed(names)}" if names else "no keys"
        super().__init__(
            f"{where} draws from the RNG streams {listed(self.streams)}, but was given {given};"
            f" {remedy}",
        )


class OuterStateError(BridgeError, flax_errors.TraceContextError):
    """In a JAX transform, a constructor changes Variables that it did not make, such as streams."""

    def __init__(self, where: str, detail: str):
        super().__init__(
            f"the constructor of {where} changes Variables that it did not make: it draws from an"
            f" nnx.Rngs that it closes over or was given, for instance; {detail}\nA program cannot"
            " change what is outside it, and the definition could not be made again. Let the"
            " constructor take rngs, which init(key) passes; or call init outside of the transform,"
            " and keep the collection `nnx` that it returns with the other variables",
        )


class NotInitializedError(BridgeError, ValueError, flax_errors.ScopeCollectionNotFound):
    """A wrapped Linen module or a `bridge.Module` was called before its variables were created."""

    def __init__(self, who: str, remedy: str):
        super().__init__(
            f"{who} was called before it had variables; create them from sample inputs with"
            f" bridge.lazy_init(model, *inputs), or {remedy}"
        )


class MissingInputsError(BridgeError, TypeError):
    """A `ToLinen` was initialised without inputs, and modules in it create variables from them.

    Attributes:
      modules: (path, class) of the wrapped Linen modules that have no variables yet.
    """

    def __init__(self, where: str, modules: Iterable[tuple[str, str]]):
        self.modules: tuple[tuple[str, str], ...] = tuple(modules)
        lines = [f"{path or 'the module itself'}: ToNNX({name})" for path, name in self.modules]
        super().__init__(
            f"init of {where} was given no inputs, so only its constructor ran; these wrapped Linen"
            f" modules create their variables when they are called:{bullets(lines)}\n"
            "Pass sample inputs, init(key, *inputs), or initialise them in the constructor with"
            " bridge.lazy_init.",
        )


class AbstractInputError(BridgeError, flax_errors.LazyInitError):
    """Variables depend on the values of an input that is a `jax.ShapeDtypeStruct`.

    Attributes:
      paths: where the variables are.
    """

    def __init__(self, paths: Iterable[str]):
        self.paths: tuple[str, ...] = tuple(paths)
        super().__init__(
            "these variables depend on the values of an input that was given only as a shape:"
            f"{bullets(self.paths)}\nPass an array for that input",
        )


class MismatchError(
    BridgeError,
    ValueError,
    flax_errors.ScopeParamShapeError,
    flax_errors.ScopeParamNotFoundError,
    flax_errors.ScopeVariableNotFoundError,
    flax_errors.ScopeCollectionNotFound,
):
    """Variables and module do not fit; one error holds every problem.

    Attributes:
      missing: (path, expected) of leaves that only the module has.
      mis_shaped: (path, expected, found) of leaves with another shape.
      unknown: paths that the module does not have.
    """

    REMEDY = "Pass variables that a module with these constructor arguments created."

    def __init__(
        self,
        where: str,
        missing: Iterable[tuple[str, str]] = (),
        mis_shaped: Iterable[tuple[str, str, str]] = (),
        unknown: Iterable[str] = (),
        remedy: str = REMEDY,
    ):
        self.missing: tuple[tuple[str, str], ...] = tuple(missing)
        self.mis_shaped: tuple[tuple[str, str, str], ...] = tuple(mis_shaped)
        self.unknown: tuple[str, ...] = tuple(unknown)
        lines = misfits(self.missing, self.mis_shaped)
        lines += [f"{path}: not in the module" for path in self.unknown]
        if {path for path, _ in self.missing} & {f"params/{path}" for path in self.unknown}:
            remedy = "These seem to be only the parameters; pass them as {'params': …}."
        elif moved := _in_another_collection(self.missing, self.unknown):
            wanted, found = moved
            remedy = (
                f"{wanted} and {found} differ in the collection, and a Variable's type decides its"
                " collection: a subclass has one of its own, which is called after it. Make the"
                f" Variable of the type of {wanted.partition('/')[0]}, or register the subclass"
                " for it."
            )
        super().__init__(f"the variables do not fit {where}:{bullets(lines)}\n{remedy}")


def _in_another_collection(
    missing: Iterable[tuple[str, str]], unknown: Iterable[str]
) -> tuple[str, str] | None:
    """A path that is missing, and the same one below another collection."""
    by_rest = {path.partition("/")[2]: path for path in unknown}
    pairs = ((path, by_rest.get(path.partition("/")[2])) for path, _ in missing)
    return next(((path, found) for path, found in pairs if found), None)


class ReservedNameError(BridgeError, ValueError):
    """A variable or submodule has a name that the wrapper keeps for itself."""


class ImmutableCollectionError(BridgeError, flax_errors.ModifyScopeVariableError):
    """A call writes to a collection that it may not update.

    Attributes:
      collection: the collection's name, None if it is not known.
    """

    def __init__(self, where: str, collection: str | None, remedy: str, detail: str = ""):
        self.collection = collection
        what = f"collection {collection!r}" if collection else "a collection"
        names = f"mutable=[{collection!r}]" if collection else "mutable=[…]"
        super().__init__(
            f"a call of {where} may not update {what}{detail and f': {detail}'}\n"
            f"Allow it {remedy.format(mutable=names)}."
        )


class UnboundAxisError(BridgeError, NameError):
    """A model reduces over a named axis that does not exist, as `BatchNorm(axis_name='batch')` may.

    The message contains JAX's own, which names the axis.
    """

    def __init__(self, where: str, error: NameError):
        super().__init__(
            f"{where} uses a named axis that no transform around it binds ({error}); pass its size"
            " by its name, options=parity.Options(axis_sizes={'NAME': 1})"
        )


class LostUpdateError(BridgeError, ValueError, flax_errors.ModifyScopeVariableError):
    """With `strict=True`, a call updates a collection that is not mutable."""


class UnsupportedFlaxError(BridgeError, ImportError):
    """A part of Flax or JAX that the bridge needs is missing or behaves differently.

    Attributes:
      part: the part.
    """

    def __init__(self, part: str, problem: str, versions: str):
        self.part = part
        ImportError.__init__(
            self,
            f"the bridge needs {part}, and {versions} does not have it as Flax 0.12.8 does"
            f" ({problem}); install another version of Flax, or a newer one of linen-nnx-bridge",
        )
