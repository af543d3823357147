"""Makes the entry points of a rewriting of the Linen calls that a command makes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import importlib
import pathlib
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from bridge._nnx_in_linen.implemented_by import is_implemented
from bridge._train_eval import MODE_NAMES, TRAINING
from bridge.rewrite._failures import RewriteError, said
from bridge.rewrite.observe._entries import Entry, arguments_of
from bridge.rewrite.observe._runs import run_entry
from bridge.rewrite.observe._snapshots import is_array
from bridge.rewrite.observe._trace import Watch, WatchedLines
from bridge.rewrite.publish._writing import shown_path

from ._child import records_of
from ._recorder import ADDRESS, loaded
from ._recorder import found as named

_LONGEST = 60


@dataclasses.dataclass(eq=False)
class Discovered:
    """An entry point that was found.

    Attributes:
        cls: the model's class.
        entry: how it is made and called.
        fields: its fields that do not have their default.
        rngs: the streams that it was given keys for, in any of its calls.
        mutable: which collections were mutable, likewise.
        shapes: the variables that an `init` by this call makes.
    """

    cls: type
    entry: Entry
    fields: Mapping[str, Any]
    rngs: set[str]
    mutable: set[str]
    shapes: Any = dataclasses.field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """How many parameters it has."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.shapes.get("params", {})))

    @property
    def row(self) -> tuple[str, str, str]:
        """The class, the call and the fields, in words."""
        inputs = [_text(each) for each in self.entry.inputs]
        call = ", ".join([*inputs, *_named(self.entry.kwargs)])
        name = f"{self.cls.__module__}:{self.cls.__qualname__}"
        return name, f"{self.entry.method or ''}({call})", ", ".join(_named(self.fields))

    @property
    def is_training(self) -> bool:
        """Whether the call is one of training."""
        return any(
            value is (name in TRAINING)
            for name, value in self.entry.kwargs.items()
            if _is_mode(name, value)
        )

    @property
    def key(self) -> str:
        """Equal for calls that differ in their sizes or in the mode alone."""
        kwargs = {k: v for k, v in self.entry.kwargs.items() if not _is_mode(k, v)}
        given = jax.tree.map(
            lambda x: (len(x.shape), str(x.dtype)) if is_array(x) else x,
            (self.entry.inputs, kwargs),
        )
        name = f"{self.cls.__module__}:{self.cls.__qualname__}.{self.entry.method}"
        return ADDRESS.sub("", f"{name} {self.fields!r} {given!r}")


@dataclasses.dataclass(frozen=True)
class Found:
    """What was found by running a command.

    The entry point with the most parameters comes first. `left` says why other calls are no entry
    points, and `done` has the classes of those that run an NNX class already.
    """

    command: str
    entries: Sequence[Discovered]
    left: Sequence[str]
    done: Sequence[str]

    @property
    def document(self) -> dict[str, Any]:
        """The same as JSON."""
        entries = [
            {
                **dict(zip(("class", "call", "fields"), each.row, strict=True)),
                "rngs": sorted(each.rngs),
                "mutable": sorted(each.mutable),
                "parameters": each.parameters,
            }
            for each in self.entries
        ]
        return {
            "command": self.command,
            "entries": entries,
            "left": [*self.left],
            "done": [*self.done],
        }


@contextlib.contextmanager
def discovered(
    command: Sequence[str],
    root: pathlib.Path,
    *,
    allow_failure: bool = False,
    on_progress: Callable[[str], None],
) -> Iterator[Found]:
    """Runs a command, and gives the Linen models that it calls.

    A model is an entry point if its class is at the top of a file below `root`, outside of tests
    and of installed packages, and if no other such model calls it. Calls that differ in sizes or in
    the mode alone are one entry point. Inside of the block the modules of the project can be
    imported as in the command.

    With `allow_failure`, what was recorded counts although the command fails. Raises RewriteError
    if the command fails or calls no model of the project, or if its modules cannot be imported
    here, or are others.
    """
    records = records_of(command, root, allow_failure=allow_failure, on_progress=on_progress)
    calls = [each for each in records if "values" in each]
    if not calls:
        raise _nothing(shlex.join(command), root, records)
    before = list(sys.path)
    try:
        sys.path[:0] = _folders(calls, root)
        _import(calls)
        yield _found(shlex.join(command), calls, _left(records), on_progress)
    finally:
        sys.path[:] = before


def _folders(calls: Iterable[Mapping[str, Any]], root: pathlib.Path) -> list[str]:
    """The folders of the project in which the command looked for modules."""
    every = dict.fromkeys(folder for each in calls for folder in each["path"])
    inside = [f for f in every if pathlib.Path(f).resolve().is_relative_to(root)]
    return [f for f in inside if f not in sys.path and "site-packages" not in f]


def _import(calls: Iterable[Mapping[str, Any]]) -> None:
    """Imports the modules of the models.

    Raises RewriteError if a module cannot be imported, or is another one than in the command.
    """
    problems: list[str] = []
    changed: list[str] = []
    for name, file, digest in dict.fromkeys(
        (each["module"], each["file"], each["digest"]) for each in calls
    ):
        path = pathlib.Path(file)
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            changed.append(shown_path(file))
            continue
        try:
            module = importlib.import_module(name)
        except Exception as error:
            problems.append(f"{name} ({shown_path(file)}): {said(error)}")
            continue
        own = str(pathlib.Path(getattr(module, "__file__", None) or "?").resolve())
        if own != file:
            problems.append(f"{name} is {own} here, and was {file}")
    if changed:
        raise RewriteError("files were changed while the command ran", changed, "Run it again.")
    if problems:
        raise RewriteError(
            "modules that the command imported cannot be imported here",
            problems,
            "Run the command with the Python of this one, such as -- python -m pytest tests.",
        )


def _found(
    command: str,
    calls: Iterable[Mapping[str, Any]],
    left: list[str],
    on_progress: Callable[[str], None],
) -> Found:
    entries: dict[str, Discovered] = {}
    done: set[str] = set()
    for call in calls:
        cls = named(call["module"], call["name"])
        try:
            entry = _discovered(cls, call)
        except Exception as error:
            left.append(f"{call['name']}: {said(error)}")
            continue
        if isinstance(entry, str):
            left.append(f"{call['name']}: {entry}")
        elif is_implemented(cls):
            done.add(cls.__name__)
        elif (same := entries.setdefault(entry.key, entry)) is not entry:
            entry.rngs |= same.rngs
            entry.mutable |= same.mutable
            is_better = same.is_training and not entry.is_training
            entries[entry.key] = kept = entry if is_better else same
            kept.rngs, kept.mutable = entry.rngs, entry.mutable
    usable: list[Discovered] = []
    for number, each in enumerate(entries.values()):
        on_progress(f"tracing entry point {number + 1} of {len(entries)}")
        watch = Watch(lambda file: False, lambda _: WatchedLines())
        try:
            run_entry(watch, each.entry)
        except RewriteError as error:
            left.append(f"{each.cls.__name__}: it cannot be run again: {error.problems[0]}")
            continue
        each.shapes = watch.records.variables[0]
        usable.append(each)
    left += _drop_parts(usable)
    usable.sort(key=lambda each: -each.parameters)
    if not usable and not done:
        raise RewriteError(
            "none of the Linen models that the command calls can be rewritten",
            left,
            "Name a function that makes the model instead: rewrite file.py:function.",
        )
    return Found(command, usable, tuple(dict.fromkeys(left)), sorted(done))


def _drop_parts(usable: list[Discovered]) -> Iterator[str]:
    """Takes out calls that need the variables which another call of the same model makes."""

    def model(each: Discovered) -> tuple[type, str]:
        return each.cls, ADDRESS.sub("", repr(each.fields))

    def paths(each: Discovered) -> set[Any]:
        return {path for path, _ in jax.tree_util.tree_leaves_with_path(each.shapes)}

    for each in list(usable):
        other = next(
            (o for o in usable if model(o) == model(each) and paths(each) < paths(o)), None
        )
        if other is not None:
            usable.remove(each)
            one, all_ = (o.entry.method or "__call__" for o in (each, other))
            yield f"{each.cls.__name__}.{one}: it makes some of the variables that {all_} makes"


def _discovered(cls: Any, call: Mapping[str, Any]) -> Discovered | str:
    """The entry point of a call, or why there is none."""
    if call["problems"]:
        return "; ".join(call["problems"])
    fields: dict[str, Any] = {}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for (kind, name), data in call["values"].items():
        value = loaded(data)
        if kind == "field":
            fields[name] = value
        elif isinstance(name, int):
            args.append(value)
        else:
            kwargs[name] = value
    arguments = arguments_of(cls, call["method"], args, kwargs)
    if arguments is None:
        return f"{call['method']} takes any number of arguments"
    inputs, rest = arguments
    if not inputs and not any(map(is_array, jax.tree.leaves(rest))):
        return f"{call['method']} was called without an array"
    method = None if call["method"] == "__call__" else call["method"]
    entry = Entry(lambda: cls(**fields), inputs, rest, method)
    return Discovered(cls, entry, fields, set(call["rngs"]), {call["mutable"]})


def _left(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Why other calls are not entry points."""
    reasons: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for each in records:
        if "problem" in each:
            reasons[each["problem"]][""] = None
        elif "reason" in each and each["reason"] != "outside":
            reasons[each["reason"]][each["name"]] = None
    return [_sentence(reason, [*names]) for reason, names in reasons.items()]


def _sentence(reason: str, names: Sequence[str]) -> str:
    if reason == "test":
        return f"models of the tests themselves stay as they are: {', '.join(names)}"
    return f"{', '.join(names)}: {reason}" if names[0] else reason


def _nothing(
    command: str, root: pathlib.Path, records: Sequence[Mapping[str, Any]]
) -> RewriteError:
    outside = dict.fromkeys(
        f"{each['module']}.{each['name']}, a model of {each['file']}, was called"
        for each in records
        if each.get("reason") == "outside"
    )
    problems = [*_left(records), *outside] or ["no process of it called a Linen module"]
    return RewriteError(
        f"{command} called no Linen model of {root}",
        problems,
        "Looked for were calls of classes at the top of the files below this folder, without its"
        " tests and installed packages. Run from the project's folder, with the project installed"
        " in editable mode and a command that runs its models.",
    )


def _is_mode(name: str, value: Any) -> bool:
    return name in MODE_NAMES and isinstance(value, bool)


def _named(values: Mapping[str, Any]) -> list[str]:
    return [f"{name}={_text(value)}" for name, value in values.items()]


def _text(value: Any) -> str:
    """A value in a few words, an array by its type."""

    def one(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        return _Bare(f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]")

    text = ADDRESS.sub("", repr(jax.tree.map(one, value)))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


class _Bare(str):
    """A text that is shown without quotes in a tree."""

    __repr__ = str.__str__
