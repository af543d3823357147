"""The JSON beside a checkpoint's arrays: a dataclass, and what a file has in its place.

A file is not trusted: what `write` does not write is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

from bridge._errors import CheckpointError

from . import _json
from ._files import NOTES, NOTES_FILE, VARIABLES
from ._json import MalformedError, NotCarriedError
from ._stored import PYTHON_TYPES, Names, Record, Stored, names_of

FORMAT_VERSION = 1
_ARRAY_KINDS = ("jax", "numpy", "generic", "key")
_NAME = re.compile(r"[A-Za-z0-9_~%(),-]+")
_DIGEST = re.compile(r"[0-9a-f]{16}")
_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class _Document:
    version: int
    written_by: Literal["linen", "nnx"]
    items: dict[str, list[Any]]
    digest: str | None = None


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A `Record`; `leaves` has the kind, shape, dtype and content of each of its arrays."""

    path: Any
    form: Any
    leaves: list[tuple[str, list[int], str, Any]]
    names: list[list[str]]
    digests: list[str | None] | None = None
    box: str | None = None
    fields: dict[str, Any] | None = None
    left_out: list[str] | None = None


@dataclasses.dataclass(frozen=True)
class Notes:
    """What the JSON of a checkpoint says.

    Attributes:
      written_by: the side that the model was saved from.
      items: the records of each tree.
      is_intact: whether its own digest is right; None if it has none.
    """

    written_by: str
    items: Mapping[str, Sequence[Record]]
    is_intact: bool | None


def write(
    written_by: str, items: Mapping[str, Sequence[Record]], digests: Mapping[Names, str] | None
) -> dict[str, Any]:
    """The JSON for a checkpoint; the inverse of `read`.

    Args:
      written_by: the side that the model is saved from.
      items: the records of each tree.
      digests: the digests of arrays by the name of the tree and their own; None for none at all.
    """
    made = {}
    for item, records in items.items():
        made[item] = []
        for record in records:
            leaf = _Leaf(
                _json.encode(record.path),
                record.form,
                [(s.kind, list(s.shape), s.dtype, s.content) for s in record.stored.values()],
                list(map(list, record.stored)),
            )
            own = [(digests or {}).get((item, *names)) for names in record.stored]
            if any(own):
                leaf = dataclasses.replace(leaf, digests=own)
            if record.box is not None:
                box, fields, left_out = record.box, dict(record.fields), list(record.left_out)
                leaf = dataclasses.replace(leaf, box=box, fields=fields, left_out=left_out)
            # The form of None is None.
            made[item].append({k: v for k, v in vars(leaf).items() if v is not None or k == "form"})
    document = {"version": FORMAT_VERSION, "written_by": written_by, "items": made}
    return document if digests is None else {**document, "digest": _digest(document)}


def read(path: Any) -> Notes:
    """The JSON of the checkpoint at a path.

    Raises:
      CheckpointError: it is newer than this package, or not what this package writes.
    """
    problems: list[tuple[str, str]] = []
    items: dict[str, list[Record]] = {}
    written_by, is_intact = "", None
    try:
        content = json.loads((path / NOTES / NOTES_FILE).read_bytes())
        version = content.get("version") if isinstance(content, dict) else None
        if type(version) is int and version > FORMAT_VERSION:
            raise CheckpointError(
                f"format version {version} is newer than this package's {FORMAT_VERSION}:",
                path,
                "Upgrade the package.",
            )
        document = _json.checked(_Document, content)
        written_by, own = document.written_by, content.pop("digest", None)
        is_intact = None if own is None else own == _digest(content)
        if VARIABLES not in document.items:
            raise MalformedError(f"there is no tree {VARIABLES!r}")
        for name, leaves in document.items.items():
            # Each is the name of a directory in the checkpoint's.
            if name == NOTES or not name.isidentifier():
                raise MalformedError(f"a tree cannot be called {name!r:.40}")
            items[name] = _records(leaves, name, problems)
    except CheckpointError:
        raise
    except (MalformedError, ValueError, RecursionError) as error:
        problems.append((NOTES, str(error).partition("\n")[0]))
    if problems:
        rest = len(problems) - _SHOWN
        more = [("…", f"and {rest} more")] if rest > 0 else []
        raise CheckpointError(
            "the list of leaves is damaged, or was not written by this package, in the checkpoint"
            " at",
            path,
            "Restore an earlier checkpoint. Nothing was changed in memory.",
            unreadable=problems[:_SHOWN] + more,
        )
    return Notes(written_by, items, is_intact)


def _records(leaves: list[Any], item: str, problems: list[tuple[str, str]]) -> list[Record]:
    made: list[Record] = []
    taken: set[Names] = set()
    paths: set[Any] = set()
    for index, content in enumerate(leaves):
        try:
            record = _record(_json.checked(_Leaf, content), in_collection=item == VARIABLES)
            if record.path in paths or not taken.isdisjoint(record.stored):
                raise MalformedError("there is another leaf with its path")
        except (MalformedError, NotCarriedError, ValueError, TypeError, RecursionError) as error:
            problems.append((f"{NOTES}, leaf {index} of {item}", str(error)))
        else:
            paths.add(record.path)
            taken.update(record.stored)
            made.append(record)
    above = {names[:depth] for names in taken for depth in range(1, len(names))}
    if not taken.isdisjoint(above):
        problems.append((f"{NOTES}, {item}", "there is a leaf above another one"))
    return made


def _record(leaf: _Leaf, *, in_collection: bool) -> Record:
    path = _json.decode(leaf.path)
    if not isinstance(path, tuple) or not all(map(_is_key, path)):
        raise MalformedError("its path is none")
    if in_collection and not (path and isinstance(path[0], str)):
        raise MalformedError("its path has no collection")
    names = list(map(tuple, leaf.names))
    digests = leaf.digests or [None] * len(names)
    counts = {len(leaf.leaves), len(set(names)), len(names), len(digests)}
    if len(counts) > 1 or _json.count_in(leaf.form) not in (None, *counts):
        raise MalformedError("it has not as many names and digests as leaves")
    own = names_of(path)
    # Arrays are read by name, and orbax would follow some of them out of the checkpoint.
    if not all(n[: len(own)] == own and all(map(_NAME.fullmatch, n)) for n in names):
        raise MalformedError("a name is not below its path, or none that this package gives")
    stored = {
        n: _stored(*entry, names=n, digest=digest)
        for n, entry, digest in zip(names, leaf.leaves, digests, strict=True)
    }
    if leaf.box is None and leaf.fields is None and leaf.left_out is None:
        return Record(path, stored, leaf.form)
    if leaf.box is None or leaf.fields is None or leaf.left_out is None or "value" in leaf.fields:
        raise MalformedError("its box is none")
    return Record(path, stored, leaf.form, leaf.box, leaf.fields, tuple(leaf.left_out))


def _stored(
    kind: str, shape: list[int], dtype: str, content: Any, *, names: Names, digest: str | None
) -> Stored:
    if not all(0 <= n < 2**63 for n in shape):
        raise MalformedError(f"a shape is {shape!r:.40}")
    if digest is not None and not _DIGEST.fullmatch(digest):
        raise MalformedError(f"a digest is {digest!r:.40}")
    if kind in PYTHON_TYPES:
        if shape or dtype != kind:
            raise MalformedError(f"a Python {kind} has a shape or a dtype")
        if kind == "float":
            _json.to_float(content)
        elif type(content) is not PYTHON_TYPES[kind]:
            raise MalformedError(f"a Python {kind} is {content!r:.40}")
    elif kind not in _ARRAY_KINDS:
        raise MalformedError(f"a leaf is of the unknown kind {kind!r:.40}")
    elif kind == "key":
        if not isinstance(content, str) or not _is_implementation(content):
            raise MalformedError(f"there is no PRNG {content!r:.40}")
    elif content is not None or jax.numpy.dtype(dtype).hasobject:
        raise MalformedError(f"an array of dtype {dtype:.40} has content beside its file")
    return Stored(kind, tuple(shape), dtype, content, names, digest)


@functools.lru_cache(maxsize=64)
def _is_implementation(name: str) -> bool:
    """Whether JAX knows a PRNG of this name."""
    try:
        jax.eval_shape(lambda: jax.random.key(0, impl=name))
    except Exception:
        # An invalid name raises errors of several types.
        return False
    return True


def _is_key(key: Any) -> bool:
    return type(key) in (str, int) or (isinstance(key, tuple) and all(map(_is_key, key)))


def _digest(document: Any) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
