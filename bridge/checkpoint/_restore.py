"""Reads a checkpoint back: as variables, or into a target, all of it or nothing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, overload

import jax
from flax import nnx

from bridge._conversion import linen_leaves
from bridge._conversion.neutral import Key, Neutral
from bridge._errors import CheckpointError, did_you_mean, listed

from . import _reading
from ._failures import agreed, reported
from ._json import MalformedError, NotCarriedError
from ._match import Taken, TargetComparison
from ._renaming import for_target
from ._source import Source, read_from
from ._stored import is_rng, stored_in, tree_text
from ._targets import Assignment, TargetTree, empty_wrappers, tree_of
from ._training import OPT_STATE, with_optimizer
from ._verify import check_has_digests, compare

T = TypeVar("T")


@overload
def restore(
    path: str | os.PathLike[str],
    target: None = None,
    *,
    rngs: bool | None = None,
    allow_missing: bool = False,
    allow_unexpected: bool = False,
    within: Key | Sequence[Key] = (),
    layout: str | None = None,
    verify: bool = False,
    rules: Mapping[str, str] | None = None,
) -> dict[str, Any]: ...
@overload
def restore(
    path: str | os.PathLike[str],
    target: None = None,
    *,
    rngs: bool | None = None,
    extra: Mapping[str, Any],
    allow_missing: bool = False,
    allow_unexpected: bool = False,
    within: Key | Sequence[Key] = (),
    layout: str | None = None,
    verify: bool = False,
    rules: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]: ...
@overload
def restore(
    path: str | os.PathLike[str],
    target: T,
    *,
    rngs: bool | None = None,
    allow_missing: bool = False,
    allow_unexpected: bool = False,
    within: Key | Sequence[Key] = (),
    layout: str | None = None,
    verify: bool = False,
    rules: Mapping[str, str] | None = None,
) -> T: ...
@overload
def restore(
    path: str | os.PathLike[str],
    target: T,
    *,
    rngs: bool | None = None,
    extra: Mapping[str, Any],
    allow_missing: bool = False,
    allow_unexpected: bool = False,
    within: Key | Sequence[Key] = (),
    layout: str | None = None,
    verify: bool = False,
    rules: Mapping[str, str] | None = None,
) -> tuple[T, dict[str, Any]]: ...
def restore(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    rngs: bool | None = None,
    extra: Mapping[str, Any] | None = None,
    allow_missing: bool = False,
    allow_unexpected: bool = False,
    within: Key | Sequence[Key] = (),
    layout: str | None = None,
    verify: bool = False,
    rules: Mapping[str, str] | None = None,
) -> Any:
    """Restores a model from a checkpoint of this package, of orbax, or of `flax.serialization`.

    A checkpoint of either library can be restored into a target of either library. Leaves are
    matched by collection and path, or only by path if the checkpoint has no collections. In a
    program of several processes all of them call this, and each reads its own shards.

    Args:
      path: the checkpoint's directory or file; a step of a `CheckpointManager` too.
      target: Linen variables, an `nnx.State` or an NNX module, concrete or abstract. A module is
        updated in place. Variables and a State are not changed; new ones are returned. Boxes,
        metadata and shardings are those of the target. Without a target, Linen variables are made
        from the checkpoint, with whole arrays on the default device.
      rngs: whether RNG state is restored. None restores it where both sides have it. True means
        that it has to fit like everything else. False keeps the target's RNG state, or leaves it
        out if there is no target.
      extra: targets by name for the other trees of the checkpoint, such as an optimizer or a field
        of a `TrainState`. An `nnx.Optimizer`, under any name, takes the `opt_state` and `step` of a
        Linen `TrainState`. Linen targets called `opt_state` and `step` take an `nnx.Optimizer`. The
        rules of the parameters apply to their moments.
      allow_missing: whether the target keeps its own values where the checkpoint has none.
      allow_unexpected: whether to ignore leaves that the target does not have.
      within: the keys of the model in a larger checkpoint of another writer, such as `'model'` or
        `['model', 'ema']`.
      layout: `'linen'` or `'nnx'`, if the keys of a checkpoint of another writer are misleading.
        `'linen'` reads a tree without collections as parameters.
      rules: NNX paths by regular expressions for Linen paths, as for `bridge.port.plan`. Pass them
        if checkpoint and target are of different libraries and their names differ. Rules also
        stack and unstack layers, and reshape, split and join arrays.
      verify: whether to compare every array with the digest that was saved with it.

    Returns:
      The model: new variables, a new State, or the module that was given. With `extra`, a pair of
      the model and the restored extras by name.

    Raises:
      CheckpointNotFoundError: there is no checkpoint at `path`.
      CheckpointError: the checkpoint does not fit the target, cannot be read, or is damaged; the
        error lists every path, and no target is changed.
      ConversionError: `target` is not one of the forms listed above.
      RulesError: a rule matches nothing or cannot be followed, or a layer that a rule stacks is
        missing.

    Example::

      >>> import pathlib, tempfile
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn, nnx
      >>> import bridge
      >>> from bridge import checkpoint
      >>> path, x = pathlib.Path(tempfile.mkdtemp()) / 'model', jnp.ones((1, 2))
      >>> variables = nn.Dense(3).init(nnx.Rngs(0)(), x)
      >>> checkpoint.save(path, variables)
      >>> model = bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(1)).lazy_init(x)
      >>> model = checkpoint.restore(path, model)
      >>> bool((model(x) == nn.Dense(3).apply(variables, x)).all())
      True
    """
    targets = {name: tree_of(value, as_pytree=True) for name, value in (extra or {}).items()}
    main = None if target is None else tree_of(target)

    def read(source: Source) -> tuple[Source, Any, list[Assignment], dict[str, Any]]:
        if verify:
            check_has_digests(source)
            source = dataclasses.replace(source, digests=[])
        source = with_optimizer(source, main, targets, rules) if targets else source
        source = for_target(source, main, rules) if rules else source
        compared = TargetComparison(source, rngs, allow_missing, allow_unexpected)
        own = {} if main is None else compared.match(source.variables, main)
        taken: dict[str, Taken] = {}
        for name, tree in targets.items():
            if name not in source.extra and tree.leaves and not allow_missing:
                # One line for all of its leaves.
                beside = listed(source.extra)
                expected = f"a tree beside the model, where the checkpoint has {beside}"
                compared.missing.append((name, expected))
            else:
                taken[name] = compared.match(source.extra.get(name, ()), tree, f"{name}: ")
        compared.raise_if_any(_remedy(source, target, extra or {}, compared.unexpected))
        values = {name: _values(source, taken[name], tree) for name, tree in targets.items()}
        if main is None:
            model, assignments = _variables(source, rngs is not False), []
        else:
            model, assignments = main.filled(_values(source, own, main))
        extras: dict[str, Any] = {}
        for name, tree in targets.items():
            extras[name], more = tree.filled(values[name])
            assignments += more
        return source, model, assignments, extras

    failure = "nothing could be restored from"
    with reported(failure, path, "Nothing was changed in memory."):
        with agreed(path):
            found = read_from(path, read, within=within, layout=layout, beside=targets)
        source, model, assignments, extras = found
        compare(source)
        _assign(assignments)
    return model if extra is None else (model, extras)


def _values(source: Source, taken: Taken, target: TargetTree) -> dict[Any, Any]:
    """Values of the target's leaves by path, each with the containers of the target's."""
    likes = {stored: like for entries in taken.values() for stored, like in entries}
    values = _reading.read(source, likes)
    return {
        path: jax.tree.unflatten(
            jax.tree.structure(target.leaves[path].value),
            [values[stored] for stored, _ in entries],
        )
        for path, entries in taken.items()
    }


def _variables(source: Source, rngs: bool) -> Any:
    """Linen variables made of a checkpoint alone."""
    if source.layout == "nnx":
        raise CheckpointError(
            "there are no collections in the NNX state at",
            source.path,
            "Give a target: the model, its state, or Linen variables; abstract ones will do. If it"
            " holds a Linen model's parameters, give layout='linen'.",
        )
    records = [record for record in source.variables if rngs or not is_rng(record.path)]
    stored = stored_in(records)
    read = _reading.read(source, dict.fromkeys(stored.values()))
    values = {names: read[s] for names, s in stored.items()}
    neutral: Neutral = {}
    unsupported: list[tuple[str, str]] = []
    for record in records:
        try:
            neutral[record.path[0], record.path[1:]] = record.leaf(values)
        except (NotCarriedError, MalformedError) as error:
            unsupported.append((tree_text(record.path), str(error)))
    if unsupported:
        raise CheckpointError(
            "these leaves cannot be made of the checkpoint alone,",
            source.path,
            "Give a target, which has what is missing, or import the modules of these types.",
            unsupported=unsupported,
        )
    try:
        return linen_leaves.to_variables(neutral)
    except Exception as error:
        # Boxes check their fields, and paths may be in each other's way.
        raise CheckpointError(
            "no variables can be made of what is in the checkpoint", source.path, str(error)
        ) from error


def _assign(assignments: list[Assignment]) -> None:
    """Puts values into modules: all of them, or none if anything raises."""
    done: list[Assignment] = []
    try:
        for assignment in assignments:
            assignment.put(assignment.new)
            done.append(assignment)
    except BaseException:
        for assignment in done:
            assignment.put(assignment.old)
        raise


def _remedy(
    source: Source, target: Any, extra: Mapping[str, Any], unexpected: Sequence[str]
) -> str:
    """What is most likely to help."""
    if empty_wrappers(target):
        return "A ToNNX in the model has no variables yet; call bridge.lazy_init first."
    for name, each in extra.items():
        if isinstance(each, nnx.Optimizer) and any(
            path.startswith(f"{name}: ") for path in unexpected
        ):
            return (
                f"The optimizer {name!r} has another state than the one that was saved. Make it"
                " with the same optax transformation and the same wrt, after bridge.lazy_init."
            )
    held = vars(target).values() if isinstance(target, nnx.Module) else ()
    if OPT_STATE in source.extra and any(isinstance(each, nnx.Optimizer) for each in held):
        return (
            "The checkpoint is a Linen TrainState: restore into the model alone, with the optimizer"
            " in extra=."
        )
    if source.layout == "nnx":
        return "The checkpoint is an NNX state, whose leaves are matched by path."
    absent = [name for name in extra if name not in source.extra]
    return " ".join(filter(None, (did_you_mean(name, source.extra) for name in absent)))
