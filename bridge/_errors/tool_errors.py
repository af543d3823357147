"""Defines the errors of checkpoints, ports and comparisons."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from registry import BridgeError as BridgeError

from .texts import bullets, by_reason, misfits, shown, with_remedy


class CheckpointError(BridgeError, ValueError):
    """A model or a target does not fit the checkpoint; one error holds every problem.

    Attributes:
      path: where the checkpoint is.
      missing: (path in the tree, expected) of leaves that only the target has.
      mis_shaped: (path in the tree, expected, found) of leaves with another shape.
      mis_typed: (path in the tree, expected, found) of leaves with another dtype or PRNG.
      unexpected: paths of leaves that only the checkpoint has.
      unreadable: (path in the tree or file, reason) of damaged arrays or files.
      unsupported: (path in the tree, reason) of leaves that a checkpoint cannot hold.
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
        self.path: str = str(path)
        self.missing: tuple[tuple[str, str], ...] = tuple(missing)
        self.mis_shaped: tuple[tuple[str, str, str], ...] = tuple(mis_shaped)
        self.mis_typed: tuple[tuple[str, str, str], ...] = tuple(mis_typed)
        self.unexpected: tuple[str, ...] = tuple(unexpected)
        self.unreadable: tuple[tuple[str, str], ...] = tuple(unreadable)
        self.unsupported: tuple[tuple[str, str], ...] = tuple(unsupported)
        lines = misfits(self.missing, self.mis_shaped + self.mis_typed)
        lines += [f"{name}: not in the target" for name in self.unexpected]
        lines += [f"{name}: {reason}" for name, reason in by_reason(self.unreadable)]
        lines += [f"{name}: {reason}" for name, reason in self.unsupported]
        subject = f"{where} {self.path}".rstrip()
        text = with_remedy(subject, lines, remedy) if lines else f"{subject}. {remedy}"
        super().__init__(text.rstrip())


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the given path."""


class LayerRegistrationError(BridgeError, ValueError, TypeError):
    """A layer cannot be registered: not a pair of classes, or one is in another layer already.

    Attributes:
      linen_class: the Linen class of the refused pair.
      nnx_class: its NNX class.
      found: the obstacle.
    """

    def __init__(
        self, linen_class: object, nnx_class: object, found: object, problem: str, remedy: str = ""
    ):
        self.linen_class: object = linen_class
        self.nnx_class: object = nnx_class
        self.found: object = found
        pair = " and ".join(
            f"{cls.__module__}.{cls.__qualname__}" if isinstance(cls, type) else shown(cls)
            for cls in (linen_class, nnx_class)
        )
        text = f"cannot register {pair} as one layer: {problem}"
        super().__init__(f"{text}. {remedy}" if remedy else text)


class ParityError(BridgeError, AssertionError):
    """Two models that should compute the same do not.

    Attributes:
      report: the `parity.Report`.
    """

    def __init__(self, report: object):
        self.report = report
        super().__init__(str(report))


class InvalidOptionsError(BridgeError, ValueError):
    """`parity.check` got unknown options, numbers that are too small, or options without a use.

    Attributes:
      problems: every problem, one line each.
    """

    def __init__(self, problems: Iterable[str]):
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__(f"parity.check cannot follow its options:{bullets(self.problems)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


class PortError(BridgeError, ValueError):
    """Values cannot be moved between Linen variables and a native NNX model.

    Attributes:
      where: the operation that failed.
      problems: every reason, one line each.
    """

    def __init__(self, where: str, problems: Iterable[str], remedy: str = ""):
        self.where = where
        self.problems: tuple[str, ...] = tuple(problems)
        self.remedy = remedy
        super().__init__(with_remedy(where, self.problems, remedy))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.where, self.problems, self.remedy)
