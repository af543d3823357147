"""`rewrite`: Linen sources become NNX sources, and are proven to do the same."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flax import linen as nn

from bridge._errors import BridgeError, shown

from ._entries import Entry
from ._failures import RewriteError
from ._places import places_of
from ._plans import ClassPlan, Program
from ._result import ClassResult, Rewrite
from ._rewriter import Rewriter
from ._steps import COLLECTION, choices
from ._test_text import test_of


def rewrite(
    make: Callable[[], nn.Module] | nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    method: str | None = None,
    also: Iterable[tuple[Any, ...]] = (),
    keep_names: bool = False,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    gradients: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Rewrite:
    """Rewrites a Linen model's sources as NNX sources, and proves that the two do the same.

    The model runs under `jax.eval_shape`, also with other sizes, and is looked at meanwhile. Each
    class of its package that was reached becomes an NNX class, or stays Linen with a reason and is
    wrapped in `bridge.ToNNX`. Then both models get the same random weights and are compared by
    `bridge.parity`; what two traces show to be one program is not computed. A class that fails
    stays Linen, and the rest is proven again. Nothing is written, and nothing of the program runs
    but its imports, `make` and the model.

    Args:
      make: what gives the Linen model, or the model.
      *inputs: sample inputs, arrays or `jax.ShapeDtypeStruct`s.
      kwargs: keyword arguments of the model's call, such as `{'train': False}`.
      method: what is called, by default `__call__`.
      also: more entry points that reach other branches, each `(make, *inputs)` or
        `(make, *inputs, kwargs)` with a dict.
      keep_names: whether attributes keep Linen's automatic names, such as `Dense_0`.
      only: names of the classes that may be rewritten; all by default.
      skip: names of classes that stay Linen.
      gradients: whether gradients are compared too, which takes time where the models are not one
        program.
      progress: is told what goes on.

    Returns:
      The result: `print(result)` shows each class's level, `result.diff` the new sources,
      `result.write()` writes them.

    Raises:
      RewriteError: the model cannot be run.

    Example::

      >>> import jax
      >>> import bridge
      >>> from bridge._demo import _models
      >>> x = jax.ShapeDtypeStruct((2, 8, 8, 1), 'float32')
      >>> result = bridge.rewrite(_models.DigitsCNN, x, kwargs={'train': False})
      >>> result.is_proven
      True
    """
    entries = [_entry(make, inputs, kwargs, method), *(_extra(each, method) for each in also)]
    rewriter = Rewriter(
        entries,
        keep_names=keep_names,
        only=None if only is None else tuple(only),
        skip=tuple(skip),
        told=progress or (lambda text: None),
        gradients=gradients,
    )
    try:
        rewriter.trace()
    except BridgeError:
        raise
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        raise RewriteError(
            "the model cannot be run with its sample inputs",
            [f"{type(error).__name__}: {text}"],
            "Give the inputs and keyword arguments that its call takes.",
        ) from error
    rewriter.run()
    return _result(rewriter)


def _entry(make: Any, inputs: Any, kwargs: Any, method: str | None) -> Entry:
    if isinstance(make, nn.Module):
        model = make
        return Entry(lambda: model, tuple(inputs), dict(kwargs or {}), method)
    if not callable(make):
        raise RewriteError(
            "rewrite expected a Linen module, or a function that gives one",
            [f"found {shown(make)}"],
            "Pass the function that makes the model.",
        )
    made = make()
    if not isinstance(made, nn.Module):
        raise RewriteError(
            "rewrite expected a function that gives a Linen module",
            [f"it gave {shown(made)}"],
            "Give sample inputs as further arguments, not with the model.",
        )
    factory: Any = make
    return Entry(factory, tuple(inputs), dict(kwargs or {}), method)


def _extra(given: tuple[Any, ...], method: str | None) -> Entry:
    make, *inputs = given
    kwargs = inputs.pop() if inputs and type(inputs[-1]) is dict else {}
    return _entry(make, inputs, kwargs, method)


def _result(rewriter: Rewriter) -> Rewrite:
    program, proof = rewriter.program, rewriter.proof
    reports = {} if proof is None else dict(proof.reports)
    is_proven = bool(reports) and all(report.ok for report in reports.values())
    limits = () if proof is None else proof.limits
    whole = _undecoded(rewriter)
    classes = [
        _class(plan, is_proven, limits, whole)
        if plan.cls is rewriter.root
        else _class(plan, is_proven)
        for plan in program.plans.values()
    ]
    classes += [
        ClassResult(cls.__name__, file, 0, "left Linen", (reason,))
        for cls, (file, reason) in program.unreadable.items()
    ]
    return Rewrite(
        tuple(classes),
        {str(f.path): rewriter.texts[f.name][1] for f in rewriter.files},
        {str(f.path): f.source.file for f in rewriter.files},
        {} if proof is None else dict(proof.rules),
        reports,
        () if proof is None else tuple(proof.sizes),
        rewriter.root.__name__,
        (*rewriter.notes, *(() if proof is None else proof.notes)),
        tuple(places_of([f.source.file for f in rewriter.files], _rewritten(program))),
        test_of(program, rewriter.entries[0], proof.rules) if proof and is_proven else None,
        () if proof is None else tuple(proof.same),
    )


def _rewritten(program: Program) -> list[str]:
    return [plan.name for plan in program.plans.values() if plan.reason is None]


def _undecoded(rewriter: Rewriter) -> tuple[str, ...]:
    """What is to be reviewed in a model with caches whose inputs could not be cut into steps."""
    records = rewriter.program.records
    for run, entry in enumerate(rewriter.entries):
        has_cache = COLLECTION in records.variables[run]
        has_sequence = any(choices(entry.inputs, entry.kwargs))
        if has_cache and has_sequence and not records.steps.get(run):
            return ("no single step of decoding could be run: only whole inputs were compared",)
    return ()


def _class(
    plan: ClassPlan, is_proven: bool, limits: tuple[str, ...] = (), whole: tuple[str, ...] = ()
) -> ClassResult:
    file, line = plan.source.file, plan.node.lineno
    name = pathlib.Path(file).name
    if plan.reason is not None:
        where = f"{name}:{plan.reason_line}: " if plan.reason_line else ""
        return ClassResult(plan.name, file, line, "left Linen", (f"{where}{plan.reason}",))
    notes = [*(f"{name}:{number}: {text}" for number, text in plan.review), *whole]
    if not is_proven:
        return ClassResult(
            plan.name, file, line, "needs review", (*notes, "the program was not proven")
        )
    if notes:
        return ClassResult(plan.name, file, line, "needs review", tuple(notes))
    if plan.seen or limits:
        texts = tuple(f"{text} was seen with a single value" for text in dict.fromkeys(plan.seen))
        texts += limits
        return ClassResult(plan.name, file, line, "proven for this configuration", texts)
    return ClassResult(plan.name, file, line, "proven")
