"""What the bridge raises and warns about.

::

    BridgeError(Exception)                       the root; registry's errors derive from it too
    ├── InvalidModuleError(TypeError)            what was given to be wrapped cannot be wrapped
    ├── InvalidMethodError(TypeError, AttributeError)
    │                                            there is no such method
    ├── InvalidRngsError(TypeError, flax InvalidRngError)
    │                                            rngs of a wrong type
    ├── InvalidFilterError(TypeError, flax InvalidFilterError)
    │                                            mutable names no collections
    ├── MissingRngError(flax InvalidRngError)    a key is needed and there is none
    ├── NotInitializedError(ValueError, flax ScopeCollectionNotFound)
    │                                            a wrapped Linen module has no variables yet
    ├── MismatchError(ValueError, flax ScopeParamShapeError, ScopeParamNotFoundError,
    │                 ScopeVariableNotFoundError, ScopeCollectionNotFound)
    │                                            variables that do not fit the module
    ├── ReservedNameError(ValueError)            a name the wrapper keeps for itself
    ├── ImmutableCollectionError(flax ModifyScopeVariableError)
    │                                            a call writes where it may not
    ├── ConversionError(ValueError, TypeError)   not variables, not a State
    ├── PortError(ValueError)                    values that have no place in a native model
    ├── CheckpointError(ValueError)              a checkpoint that cannot be read, written or used
    │   └── CheckpointNotFoundError(FileNotFoundError)
    │                                            there is none
    ├── InvalidMeshError(TypeError)              what was given as a mesh is none
    ├── ShardingError(ValueError)                partition specs that do not fit the mesh
    ├── ParityError(AssertionError)              two models that should do the same do not
    ├── InvalidSectionsError(ValueError)         a comparison that there is not
    ├── UnboundAxisError(NameError)              a model reduces over an axis that nothing binds
    ├── UnsupportedFlaxError(ImportError)        a part of Flax or JAX is not as the bridge needs it
    └── LostUpdateError(ValueError, flax ModifyScopeVariableError)
                                                 strict mode: an update that would be dropped

    BridgeWarning(UserWarning)                   an update is dropped, a path is ignored
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from flax import errors as flax_errors

from registry import BridgeError as BridgeError


class BridgeWarning(UserWarning):
    """Something the program does is probably not what its author means."""


class InvalidModuleError(BridgeError, TypeError):
    """What was given to a wrapper cannot be wrapped by it.

    Attributes:
      found: the refused object.
    """

    def __init__(self, wrapper: str, found: object, expected: str, remedy: str):
        self.found = found
        super().__init__(f"{wrapper} expected {expected}, found {shown(found)}; {remedy}")


class InvalidMethodError(BridgeError, TypeError, AttributeError):
    """A `method` names nothing that can be called.

    Attributes:
      method: what was asked for.
    """

    def __init__(self, owner: type, method: object, available: Iterable[str]):
        self.method = method
        super().__init__(
            f"{owner.__name__} has no method {method!r} that can be called; its methods are"
            f" {_list(sorted(available))}"
        )

    @classmethod
    def of_part(cls, owner: type, path: str, available: Iterable[str]) -> InvalidMethodError:
        """The error for a submodule that does not exist outside of a call.

        Args:
          owner: the class of the Linen module.
          path: the submodule.
          available: the names of those that can be called.
        """
        error = cls(owner, path, available)
        text = (
            f"{path} of {owner.__name__} cannot be called: it is made in an nn.compact method while"
            f" that one runs. Submodules that can be called: {_list(sorted(available))}. Make it in"
            " setup, call the whole model with capture_intermediates=True to see what it returns,"
            " or pass a function of the Linen module as method="
        )
        error.args = (text,)
        return error


class InvalidRngsError(BridgeError, TypeError, flax_errors.InvalidRngError):
    """`rngs` is not something that keys can be drawn from.

    Attributes:
      found: the refused object.
    """

    def __init__(
        self, found: object, where: str, expected: str = "an nnx.Rngs, a key", remedy: str = ""
    ):
        self.found = found
        Exception.__init__(
            self,
            f"{where} expected rngs as {expected}, or a dict of keys by stream name such as"
            f" {{'dropout': jax.random.key(0)}}; found {shown(found)}{remedy and f'; {remedy}'}",
        )


class InvalidFilterError(BridgeError, TypeError, flax_errors.InvalidFilterError):
    """`mutable` is not something that says which collections are meant.

    Attributes:
      found: the refused object.
    """

    def __init__(self, found: object, where: str):
        self.found = found
        Exception.__init__(
            self,
            f"{where} expected mutable as a collection's name, a list of names such as"
            f" ['batch_stats'], True, False or a DenyList of names; found {shown(found)}",
        )


class MissingRngError(BridgeError, flax_errors.InvalidRngError):
    """A key is drawn from a stream that exists nowhere.

    Attributes:
      streams: the streams that were asked for.
    """

    def __init__(self, where: str, streams: Iterable[str], available: Iterable[str], remedy: str):
        self.streams = tuple(streams)
        Exception.__init__(
            self,
            f"{where} draws from the RNG streams {_list(self.streams)}, the streams that exist are"
            f" {_list(sorted(available))}; {remedy}",
        )


class NotInitializedError(BridgeError, ValueError, flax_errors.ScopeCollectionNotFound):
    """A wrapped Linen module was called before its variables were created."""

    def __init__(self, module: object):
        name = type(module).__name__
        Exception.__init__(
            self,
            f"ToNNX({name}) was called, and it has no variables yet; create them from sample"
            f" inputs with"
            " bridge.lazy_init(model, *inputs), or take existing ones with"
            f" ToNNX.from_variables({name}(…), variables)",
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
      missing: (path, expected) of what the module needs and the variables lack.
      mis_shaped: (path, expected, found) of what has another shape.
      unknown: paths that the module does not have.
    """

    def __init__(
        self,
        where: str,
        missing: Iterable[tuple[str, str]] = (),
        mis_shaped: Iterable[tuple[str, str, str]] = (),
        unknown: Iterable[str] = (),
    ):
        self.missing = tuple(missing)
        self.mis_shaped = tuple(mis_shaped)
        self.unknown = tuple(unknown)
        lines = _misfits(self.missing, self.mis_shaped)
        lines += [f"{path}: not in the module" for path in self.unknown]
        remedy = "Give variables that came from this module with these arguments."
        if {path for path, _ in self.missing} & {f"params/{path}" for path in self.unknown}:
            remedy = "These seem to be parameters alone; give them as {'params': …}."
        Exception.__init__(self, f"the variables do not fit {where}:{_bullets(lines)}\n{remedy}")


class ReservedNameError(BridgeError, ValueError):
    """A variable or submodule has a name that the wrapper keeps for itself."""


class ImmutableCollectionError(BridgeError, flax_errors.ModifyScopeVariableError):
    """A wrapped Linen module writes to a collection that the call may not update.

    Attributes:
      collection: the collection's name, None if Flax's message does not tell it.
    """

    def __init__(self, module: object, collection: str | None, detail: str, inside_linen: bool):
        self.collection = collection
        names = f"[{collection!r}]" if collection else "[…]"
        remedy = (
            f"Allow it for this call with model(…, mutable={names}), for good with"
            f" ToNNX(…, mutable={names}), or for training with model.train()."
        )
        if inside_linen:
            remedy = f"Allow it at the Linen module around it: apply(…, mutable={names})."
        Exception.__init__(
            self,
            f"a call of ToNNX({type(module).__name__}) may not update collection {collection!r}:"
            f" {detail}\n{remedy}",
        )

    @classmethod
    def from_flax(
        cls, module: object, error: Exception, inside_linen: bool
    ) -> ImmutableCollectionError:
        """The error for Flax's, which keeps the collection only in its text."""
        match = re.search(r'because collection "([^"]*)"', str(error))
        return cls(module, match.group(1) if match else None, str(error), inside_linen)


class ConversionError(BridgeError, ValueError, TypeError):
    """What was given to a conversion is neither variables nor a State."""


class CheckpointError(BridgeError, ValueError):
    """A checkpoint and what is to be saved or restored do not fit; one error holds every problem.

    Attributes:
      path: where the checkpoint is.
      missing: (path in the tree, expected) of what the target needs and the checkpoint lacks.
      mis_shaped: (path in the tree, expected, found) of what has another shape.
      mis_typed: (path in the tree, expected, found) of what has another dtype or PRNG.
      unexpected: paths in the tree that the target does not have.
      unreadable: (path in the tree or file, reason) of what is damaged.
      unsupported: (path in the tree, reason) of what a checkpoint cannot hold.
    """

    def __init__(
        self,
        where: str,
        path: object,
        remedy: str,
        *,
        missing: Iterable[tuple[str, str]] = (),
        mis_shaped: Iterable[tuple[str, str, str]] = (),
        mis_typed: Iterable[tuple[str, str, str]] = (),
        unexpected: Iterable[str] = (),
        unreadable: Iterable[tuple[str, str]] = (),
        unsupported: Iterable[tuple[str, str]] = (),
    ):
        self.path = str(path)
        self.missing = tuple(missing)
        self.mis_shaped = tuple(mis_shaped)
        self.mis_typed = tuple(mis_typed)
        self.unexpected = tuple(unexpected)
        self.unreadable = tuple(unreadable)
        self.unsupported = tuple(unsupported)
        lines = _misfits(self.missing, self.mis_shaped + self.mis_typed)
        lines += [f"{name}: not in the target" for name in self.unexpected]
        lines += [f"{name}: {reason}" for name, reason in self.unreadable + self.unsupported]
        problems = f":{_bullets(lines)}\n" if lines else ". "
        subject = f"{where} {self.path}".rstrip()
        Exception.__init__(self, f"{subject}{problems}{remedy}".rstrip())


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one is looked for."""


class InvalidMeshError(BridgeError, TypeError):
    """What was given as a mesh is none.

    Attributes:
      found: the refused object.
    """

    def __init__(self, where: str, found: object, expected: str):
        self.found = found
        super().__init__(
            f"{where} expected {expected}, found {shown(found)}; make one with jax.make_mesh"
        )


class ShardingError(BridgeError, ValueError):
    """Partition specs that do not fit the mesh; one error holds every leaf.

    Attributes:
      problems: (path, shape and spec, what is wrong) of each leaf.
      mesh: sizes of the mesh's axes by name.
    """

    def __init__(
        self, where: str, problems: Iterable[tuple[str, str, str]], mesh: Mapping[str, int]
    ):
        self.problems = tuple(problems)
        self.mesh = dict(mesh)
        super().__init__(
            f"{where} cannot be sharded over the mesh {self.mesh}:"
            + _bullets(f"{path} {what}: {wrong}" for path, what, wrong in self.problems)
            + "\nMap logical names to mesh axes with rules=, and give a dimension that cannot be"
            " divided no axis."
        )


class ParityError(BridgeError, AssertionError):
    """Two models that should do the same do not.

    Attributes:
      report: what was compared, and what differs.
    """

    def __init__(self, report: object):
        self.report = report
        super().__init__(str(report))


class InvalidSectionsError(BridgeError, ValueError):
    """What was to be compared is not among the comparisons.

    Attributes:
      unknown: the names that are none.
    """

    def __init__(self, unknown: Iterable[str], known: Iterable[str], remedy: str = ""):
        self.unknown = tuple(unknown)
        text = f"parity.check has no sections {_list(self.unknown)}; there are {_list(known)}"
        super().__init__(f"{text}. {remedy}" if remedy else text)


class UnboundAxisError(BridgeError, NameError):
    """A model reduces over a named axis, such as `BatchNorm(axis_name='batch')`, outside of it.

    Attributes:
      axis: the axis's name.
    """

    def __init__(self, where: str, axis: str):
        self.axis = axis
        super().__init__(
            f"{where} uses the named axis {axis!r}, which nothing binds; give its size:"
            f" axis_sizes={{{axis!r}: 1}}"
        )


class PortError(BridgeError, ValueError):
    """Values cannot be moved between Linen variables and a native NNX model.

    Attributes:
      where: what was to be done.
      problems: every reason against it, one line each.
    """

    def __init__(self, where: str, problems: Iterable[str], remedy: str = ""):
        self.where = where
        self.problems = tuple(problems)
        self.remedy = remedy
        text = f"{where}; nothing was written:{_bullets(self.problems)}"
        super().__init__(f"{text}\n{remedy}" if remedy else text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.where, self.problems, self.remedy)


class UnsupportedFlaxError(BridgeError, ImportError):
    """A part of Flax or JAX that the bridge needs is gone, or behaves otherwise.

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


class LostUpdateError(BridgeError, ValueError, flax_errors.ModifyScopeVariableError):
    """Strict mode: a call updates a collection that it may not update."""

    def __init__(self, text: str):
        Exception.__init__(self, text)


def mapping_error(found: object, expected: str, remedy: str = "") -> ConversionError:
    """The error for an argument that is no mapping where one is needed, or another mapping."""
    return ConversionError(f"expected {expected}, found {shown(found)}{remedy and f'; {remedy}'}")


def path_text(collection: str, path: Iterable[Any]) -> str:
    """A collection and a path as one text, as Flax's messages write them."""
    return "/".join([collection, *map(str, path)])


def shown(found: object) -> str:
    """What was found, short enough for a message."""
    if isinstance(found, type):
        return f"the class {found.__name__}"
    text = repr(found)
    return f"{text if len(text) < 80 else text[:77] + '…'} of type {type(found).__name__}"


def _misfits(
    missing: Iterable[tuple[str, str]], others: Iterable[tuple[str, str, str]]
) -> list[str]:
    """The lines for what is not there and for what is there and is another."""
    return [
        *(f"{path}: missing, expected {expected}" for path, expected in missing),
        *(f"{path}: expected {expected}, found {found}" for path, expected, found in others),
    ]


def _bullets(lines: Iterable[str]) -> str:
    return "".join(f"\n  - {line}" for line in lines)


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def warn(text: str) -> None:
    """Warns at the line of the caller's own program, however deep in Flax and JAX this is."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, BridgeWarning, stacklevel=level)


_INSIDE = ("bridge.", "flax.", "jax.", "contextlib", "functools")


def unknown_paths_text(where: str, paths: Iterable[str]) -> str:
    """The warning about variables that a module does not have."""
    return (
        f"these variables are not in {where} and are ignored:{_bullets(paths)}\nRemove them, or"
        f" pass"
        " strict=True to make this an error."
    )


def lost_update_text(where: str, collection: str, is_rng: bool) -> str:
    """The warning about an update in a collection that is not mutable."""
    effect = (
        "the next call draws the same key" if is_rng else "the next call starts from the old values"
    )
    return (
        f"{where} updated collection {collection!r}, which is not mutable, so the update is"
        f" dropped and"
        f" {effect}; keep it with apply(…, mutable=[{collection!r}])"
    )


def untold_change_text(where: str, places: Iterable[str]) -> str:
    """The warning about a change of a module that no leaf of its variables tells."""
    return (
        f"{where} changed in this call what its variables do not tell ({', '.join(places)}: an"
        " attribute, a submodule, a container, or a parameter's shape or place), and the next call"
        " starts from the old definition; keep it with apply(…, mutable=['nnx', …]), next to the"
        " collections that the call updates"
    )
