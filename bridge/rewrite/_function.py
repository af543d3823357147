"""`rewrite`: Linen sources become NNX sources, and are proven to do the same."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flax import linen as nn

from bridge._errors import did_you_mean, listed, shown
from bridge._linen_in_nnx.linen_call import function_of
from bridge._nnx_in_linen.implemented_by import is_implemented

from ._failures import RewriteError, said
from ._rewriter import Rewriter
from .observe._entries import Entry
from .observe._steps import COLLECTION, choices
from .plan._function_plans import FunctionPlan
from .plan._plans import ClassPlan, Program
from .prove._draws import drawn_in_calls
from .prove._native_share import native_share
from .publish._places import Made, places_of
from .publish._result import ClassResult, Level, Rewrite
from .publish._test_text import test_of
from .publish._uses import ClassName
from .publish._writing import check_sources, shown_path
from .training._training import TrainingRewriter

_ANNOTATED = (
    "NNX shards annotated variables when they are made: make the model under its mesh, or without a"
    " mesh in nnx.use_eager_sharding(False)"
)
# How many notes on other configurations a class has.
_MOST_LIMITS = 4


def rewrite(
    make: Callable[[], nn.Module] | nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    method: str | None = None,
    also: Iterable[nn.Module | Callable[[], nn.Module] | tuple[Any, ...]] = (),
    keep_names: bool = False,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    gradients: bool = True,
    fast: bool = False,
    as_linen: bool = False,
    train: Callable[[], Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Rewrite:
    """Rewrites a Linen model's sources as NNX sources, and proves that the two do the same.

    The model runs under `jax.eval_shape`, also with other sizes, and the run is recorded. Each
    class of its package that the run reached becomes an NNX class, or stays Linen with a reason and
    is wrapped in `bridge.ToNNX`. Then both models get the same random weights, and `bridge.parity`
    compares them. Where their traces are the same program, nothing has to be computed. A class that
    fails stays Linen, and the rest is proven again.

    In the end each class is compared for other values of its fields, one field at a time. Values
    that the Linen class refuses are skipped. If the new class differs for a value, its level is
    "proven for this configuration", and the result names the field and the value.

    This function writes no file. Of the program it runs only the imports, `make` and the model.

    Args:
      make: the Linen model, or a function without arguments that returns it.
      *inputs: sample inputs, arrays or `jax.ShapeDtypeStruct`s.
      kwargs: keyword arguments of the model's call, such as `{'train': False}`.
      method: the method to call, by default `__call__`.
      also: more entry points that reach other branches: `make` alone, which is called as the first
        one is, or `(make, *inputs)`, or `(make, *inputs, kwargs)` with a dict.
      keep_names: whether attributes keep Linen's automatic names, such as `Dense_0`.
      only: names of the classes that may be rewritten; all by default.
      skip: names of classes that stay Linen.
      gradients: whether gradients are compared too. This takes time, except where both traces are
        the same program.
      fast: whether to skip the comparison for other values of the fields. Every class is then at
        most "proven for this configuration".
      as_linen: whether the old files keep Linen classes of the same names, which run the new
        classes. The rest of the program stays as it is. `write` writes both.
      train: a function that returns a sample of the training, `(state, train_step, batches)`: the
        first `TrainState`, the function that makes a step from a state, and for each step a tuple
        of its other arguments. The functions that the sample runs are rewritten too, into new
        files, and proven by three steps.
      progress: a function that is called with a line of text at each stage.

    Returns:
      The result: `print(result)` shows each class's level, `result.diff` the new sources,
      `result.write()` writes them.

    Raises:
      RewriteError: the model or the sample cannot be made or run, or the model has no class that
        `only` or `skip` names.
      InvalidMethodError: the model has no method of this name.

    Example::

      >>> import jax
      >>> import bridge
      >>> from bridge._demo import _models
      >>> x = jax.ShapeDtypeStruct((2, 8, 8, 1), 'float32')
      >>> result = bridge.rewrite(_models.DigitsCNN, x, kwargs={'train': False})
      >>> result.is_proven
      True
    """
    first = entry(make, inputs, kwargs, method)
    entries = [first, *(_extra(each, first) for each in also)]
    return rewrite_entries(
        entries,
        keep_names=keep_names,
        only=only,
        skip=skip,
        gradients=gradients,
        fast=fast,
        as_linen=as_linen,
        train=train,
        progress=progress,
    )


def rewrite_entries(
    entries: Sequence[Entry],
    *,
    keep_names: bool = False,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    gradients: bool = True,
    fast: bool = False,
    as_linen: bool = False,
    train: Callable[[], Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Rewrite:
    """Rewrites the models of all entries, each with a method of its own; see `rewrite`."""
    rewriter = Rewriter(
        entries,
        keep_names=keep_names,
        only=None if only is None else tuple(only),
        skip=tuple(skip),
        on_progress=progress or (lambda text: None),
        gradients=gradients,
        varies=not fast,
    )
    rewriter.trace()
    _check_names(rewriter)
    rewriter.run()
    result = _result(rewriter)
    if result.sources and rewriter.program.records.is_annotated and not as_linen:
        result = dataclasses.replace(result, notes=(*result.notes, _ANNOTATED))
    if train is not None:
        result = _with_training(result, rewriter, train)
    return _with_linen_classes(result, rewriter) if as_linen else result


def _with_training(result: Rewrite, rewriter: Rewriter, sample: Callable[[], Any]) -> Rewrite:
    """The result with the functions that train the model."""
    if not result.is_proven or result.parts or rewriter.proof is None:
        note = "the training stays as it is, as the program as a whole is not proven"
        return dataclasses.replace(result, notes=(*result.notes, note))
    training = TrainingRewriter(
        rewriter.program,
        rewriter.files,
        rewriter.texts,
        rewriter.proof.rules[rewriter.tops[0]],
        _rewritten(rewriter),
        sample,
        rewriter.on_progress,
    )
    made = training.run()
    in_place = rewriter.in_place(made)
    find = result.find_places or tuple

    def written(by_hand: Iterable[str]) -> Mapping[str, str]:
        if made.is_proven:
            return training.in_place(in_place.texts(by_hand))
        if made.left:
            # The old training could not make the new classes, also in a file named by hand.
            raise RewriteError(
                "the files cannot be rewritten in place",
                [f"{shown_path(f.file)}:{f.line}: {f.name}: {f.refusal}" for f in made.left],
                "Write new files beside them, or leave train= out and change the training by hand.",
            )
        return in_place.texts(by_hand)

    return dataclasses.replace(
        result,
        training=made,
        # The model's file stays the last one: the rules are named after it.
        sources={**made.sources, **result.sources, **made.sources},
        old_sources={**made.old_sources, **result.old_sources},
        find_places=lambda: [place for place in find() if not made.is_about(place)],
        make_in_place=written,
    )


def _with_linen_classes(result: Rewrite, rewriter: Rewriter) -> Rewrite:
    made = rewriter.as_linen()
    if made is None:
        note = "no Linen class runs an NNX class, as the program as a whole is not proven"
        return dataclasses.replace(result, notes=(*result.notes, note), as_linen=True)
    notes = [f"{name} stays Linen: {why}" for name, why in made.left.items()]
    if made.exported:
        notes.insert(0, f"Linen classes that run NNX classes: {', '.join(made.exported)}")
    return dataclasses.replace(
        result,
        notes=(*result.notes, *notes),
        find_places=None,
        as_linen=True,
        exported=made.exported,
        make_linen_texts=made.texts,
    )


def _check_names(rewriter: Rewriter) -> None:
    """Raises an error for names of classes that were not met."""
    program = rewriter.program
    classes = [p.cls for p in program.plans.values() if not isinstance(p, FunctionPlan)]
    known = sorted({cls.__name__ for cls in (*classes, *program.unreadable)})
    problems = [
        f"{option} names {name!r}. {did_you_mean(name, known)}".rstrip(". ")
        for option, names in (("only", rewriter.only or ()), ("skip", rewriter.skip))
        for name in names
        if name not in known
    ]
    if problems:
        raise RewriteError(
            "the model makes no class of this name",
            problems,
            f"The classes that it makes are {listed(known)}.",
        )


def entry(make: Any, inputs: Any, kwargs: Any, method: str | None) -> Entry:
    """A model and its call, checked.

    Raises RewriteError if it cannot be made, is not a Linen model, or runs an NNX class already,
    and InvalidMethodError if the model has no method of this name.
    """
    found = _checked(make, inputs, kwargs, method)
    cls = type(found.make())
    if is_implemented(cls):
        raise RewriteError(
            f"{cls.__name__} runs an NNX class already",
            ["it is decorated with bridge.implemented_by"],
            "Use the NNX class instead of the Linen class to finish the move.",
        )
    return found


def _checked(make: Any, inputs: Any, kwargs: Any, method: str | None) -> Entry:
    if isinstance(make, nn.Module):
        model = make
        function_of(model, method)
        return Entry(lambda: model, tuple(inputs), dict(kwargs or {}), method)
    if not callable(make):
        raise RewriteError(
            "rewrite expected a Linen module, or a function that gives one",
            [f"found {shown(make)}"],
            "Pass the function that makes the model.",
        )
    try:
        made = make()
    except Exception as error:
        raise RewriteError(
            "the model cannot be made",
            [said(error)],
            "Pass a function without arguments that makes it.",
        ) from error
    if not isinstance(made, nn.Module):
        raise RewriteError(
            "rewrite expected a function that gives a Linen module",
            [f"it gave {shown(made)}"],
            "Give sample inputs as further arguments, not with the model.",
        )
    function_of(made, method)
    factory: Any = make
    return Entry(factory, tuple(inputs), dict(kwargs or {}), method)


def _extra(given: Any, first: Entry) -> Entry:
    """Another entry point; a model alone is called as the first one is."""
    if not isinstance(given, tuple):
        return entry(given, *first.called)
    make, *inputs = given
    kwargs = inputs.pop() if inputs and type(inputs[-1]) is dict else {}
    return entry(make, inputs, kwargs, first.method)


def _result(rewriter: Rewriter) -> Rewrite:
    program, proof = rewriter.program, rewriter.proof
    reports = {} if proof is None else dict(proof.reports)
    is_proven = bool(reports) and all(report.ok for report in reports.values())
    limits = () if proof is None else proof.limits
    whole = _undecoded(rewriter)
    parts = _parts(rewriter)
    classes = [
        _class(program, plan, is_proven, (*limits, *rewriter.limits.get(plan.cls, ())), whole)
        if plan.cls in rewriter.tops
        else _class(program, plan, is_proven, rewriter.limits.get(plan.cls, ()))
        for plan in {**program.plans, **_left_above(rewriter)}.values()
        # Where a function stays Linen, the classes that call it say so.
        if not (isinstance(plan, FunctionPlan) and plan.refusal)
    ]
    classes += [
        ClassResult(cls.__name__, file, 0, "left Linen", (str(refusal),), (refusal,))
        for cls, (file, refusal) in program.unreadable.items()
    ]
    # The paths of parts are not those of the whole.
    rules = {} if proof is None or parts else {**proof.rules}
    own_rules = rules.pop(rewriter.tops[0], {})
    native, left = native_share(
        rewriter.whole or program, {**program.plans, **_left_above(rewriter)}
    )
    files = rewriter.files
    return Rewrite(
        tuple(classes),
        {str(f.path): rewriter.texts[f.name][1] for f in files},
        {str(f.path): f.source.file for f in files},
        own_rules,
        reports,
        () if proof is None else tuple(proof.sizes),
        rewriter.root.__name__,
        (*rewriter.notes, *(() if proof is None else proof.notes), *_said_of(parts)),
        lambda: places_of(
            {f.source.file: f.module for f in files},
            _rewritten(rewriter),
            drawn_in_calls(program),
        ),
        test_of(program, rewriter.entries[0], own_rules) if is_proven and not parts else None,
        () if proof is None else tuple(proof.same),
        rewriter.in_place().texts,
        parts,
        native,
        further_rules={cls.__name__: each for cls, each in rules.items()},
        left_shares=left,
        check_sources=lambda: check_sources(f.source for f in files),
    )


def _left_above(rewriter: Rewriter) -> dict[type, ClassPlan]:
    """What stays Linen around the parts that were proven by themselves."""
    known = rewriter.program.plans
    return {cls: plan for cls, plan in rewriter.above.items() if cls not in known}


def _parts(rewriter: Rewriter) -> tuple[str, ...]:
    """The classes that were proven by themselves, because what is around them stays Linen."""
    if not rewriter.is_split or rewriter.proof is None:
        return ()
    return tuple(dict.fromkeys(top.__name__ for top in rewriter.tops))


def _said_of(parts: Iterable[str]) -> tuple[str, ...]:
    names = ", ".join(parts)
    return (f"run and compared by themselves: {names}",) if names else ()


def _rewritten(rewriter: Rewriter) -> dict[ClassName, Made]:
    """The rewritten classes, with how they were made where the model ran."""
    program = rewriter.program
    # Runs with other sizes come after those of the entries.
    ran = [i for i in program.records.instances.values() if i.run < program.entries]
    return {
        ClassName(plan.cls.__module__, plan.name): Made(
            plan,
            plan.cls in rewriter.tops[:1],
            [
                (i.fields, {n: s.values.get((i.run, i.path)) for n, s in plan.sizes.items()})
                for i in ran
                if i.cls is plan.cls
            ],
        )
        for plan in program.plans.values()
        if plan.refusal is None
    }


def _undecoded(rewriter: Rewriter) -> tuple[str, ...]:
    """What to review in a model with caches if its inputs could not be cut into steps."""
    records = rewriter.program.records
    for run, entry in enumerate(rewriter.entries):
        has_cache = COLLECTION in records.variables[run]
        has_sequence = any(choices(entry.inputs, entry.kwargs))
        if has_cache and has_sequence and not records.steps.get(run):
            return ("no single step of decoding could be run: only whole inputs were compared",)
    return ()


def _class(
    program: Program,
    plan: ClassPlan,
    is_proven: bool,
    limits: Iterable[str],
    whole: tuple[str, ...] = (),
) -> ClassResult:
    file, line = plan.source.file, plan.node.lineno
    name = pathlib.Path(file).name
    if plan.refusal is not None:
        where = f"{name}:{plan.refusal.line}: " if plan.refusal.line else ""
        note = f"{where}{plan.refusal}"
        return ClassResult(plan.name, file, line, "left Linen", (note,), (plan.refusal,))
    notes = [*(f"{name}:{number}: {text}" for number, text in program.notes_of(plan)), *whole]
    # A layer that no run called may be left out of the new class.
    text = program.written[plan.cls].text
    linen = [
        (slot, slot.linen)
        for slot in plan.slots.values()
        if slot.linen is not None and f".{slot.attribute}" in text
    ]
    wrapped = [
        f"{name}:{slot.node.lineno}: {slot.attribute} stays Linen: {refusal}"
        for slot, refusal in linen
    ]
    seen = [f"{text} was seen with a single value" for text in plan.seen]
    level: Level = "proven"
    if not is_proven:
        level, notes = "needs review", [*notes, "the program was not proven"]
    elif notes:
        level = "needs review"
    elif limits := list(dict.fromkeys([*seen, *limits])):
        level, notes = "proven for this configuration", limits[:_MOST_LIMITS]
        if len(limits) > _MOST_LIMITS:
            notes.append(f"and {len(limits) - _MOST_LIMITS} more of the kind")
    refusals = [dataclasses.replace(refusal, line=slot.node.lineno) for slot, refusal in linen]
    return ClassResult(plan.name, file, line, level, (*notes, *wrapped), tuple(refusals))
