"""The JSON beside a checkpoint's arrays, written and read.

A file is not trusted: what `write` does not write is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

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


# What stands for a leaf, a `Record`: `leaves` has the kind, shape, dtype and content of each of its
# arrays. The last four may be missing.
_LEAF = {
    "path": object,
    "form": object,
    "leaves": list,
    "names": list,
    "digests": list,
    "box": str,
    "fields": dict,
    "left_out": list,
}
_OPTIONAL = {"digests", "box", "fields", "left_out"}
# What an entry of another form than these two raises where it is read.
_MALFORMED = (MalformedError, NotCarriedError, ValueError, TypeError, RecursionError)


@dataclasses.dataclass(frozen=True)
class Notes:
    """What the JSON of a checkpoint says.

    The model was saved from the side `written_by`. `items` has the records of each tree.
    `is_intact` says whether its own digest is right, None if it has none.
    """

    written_by: str
    items: Mapping[str, Sequence[Record]]
    is_intact: bool | None


def write(
    written_by: str, items: Mapping[str, Sequence[Record]], digests: Mapping[Names, str] | None
) -> dict[str, Any]:
    """The JSON for a checkpoint; the inverse of `read`.

    `written_by` is the side that the model is saved from. `digests` are those of arrays by the name
    of the tree and their own; None for none at all.
    """
    made = {}
    for item, records in items.items():
        made[item] = []
        for record in records:
            leaf = {
                "path": _json.encode(record.path),
                "form": record.form,
                "leaves": [[s.kind, s.shape, s.dtype, s.content] for s in record.stored.values()],
                "names": list(record.stored),
            }
            own = [(digests or {}).get((item, *names)) for names in record.stored]
            if any(own):
                leaf["digests"] = own
            if record.box is not None:
                leaf |= {"box": record.box, "fields": record.fields, "left_out": record.left_out}
            made[item].append(leaf)
    document = {"version": FORMAT_VERSION, "written_by": written_by, "items": made}
    return document if digests is None else {**document, "digest": _digest(document)}


def read(path: Any) -> Notes:
    """The JSON of the checkpoint at a path.

    Raises CheckpointError if it is newer than this package, or not what this package writes.
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
        types = {"version": int, "written_by": str, "items": dict, "digest": str}
        _check_fields(content, types, {"digest"})
        written_by, own = content["written_by"], content.pop("digest", None)
        is_intact = None if own is None else own == _digest(content)
        if type(version) is not int or written_by not in ("linen", "nnx"):
            raise MalformedError("its version or its side is not valid")
        if VARIABLES not in content["items"]:
            raise MalformedError(f"there is no tree {VARIABLES!r}")
        for name, leaves in content["items"].items():
            # Each is the name of a directory in the checkpoint's.
            if name == NOTES or not name.isidentifier():
                raise MalformedError(f"a tree cannot be called {name!r:.40}")
            if not isinstance(leaves, list):
                raise MalformedError(f"the tree {name} has no leaves")
            items[name] = _records(leaves, name, problems)
    except CheckpointError:
        raise
    except _MALFORMED as error:
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
            record = _record(content, item)
            if record.path in paths or not taken.isdisjoint(record.stored):
                raise MalformedError("there is another leaf with its path")
        except _MALFORMED as error:
            problems.append((f"{NOTES}, leaf {index} of {item}", str(error)))
        else:
            paths.add(record.path)
            taken.update(record.stored)
            made.append(record)
    above = {names[:depth] for names in taken for depth in range(1, len(names))}
    if not taken.isdisjoint(above):
        problems.append((f"{NOTES}, {item}", "there is a leaf above another one"))
    return made


def _check_fields(content: Any, types: Mapping[str, type], optional: Set[str]) -> None:
    """Raises MalformedError for a mapping of other fields than these, or of other types."""
    if not isinstance(content, dict):
        raise MalformedError(f"{content!r:.40} where a mapping is expected")
    if others := (types.keys() - optional - content.keys()) | (content.keys() - types.keys()):
        raise MalformedError(f"{sorted(others)!r:.60} are missing, or unknown")
    for name, value in content.items():
        if not isinstance(value, types[name]) and not (value is None and name in optional):
            raise MalformedError(f"its {name} is {value!r:.40}")


def _record(leaf: Any, item: str) -> Record:
    _check_fields(leaf, _LEAF, _OPTIONAL)
    path = _json.decode(leaf["path"])
    if not isinstance(path, tuple) or not all(map(_is_key, path)):
        raise MalformedError("its path is not valid")
    if item == VARIABLES and not (path and isinstance(path[0], str)):
        raise MalformedError("its path has no collection")
    names = list(map(tuple, leaf["names"]))
    digests = leaf.get("digests") or [None] * len(names)
    counts = {len(leaf["leaves"]), len(set(names)), len(names), len(digests)}
    if len(counts) > 1 or _json.count_in(leaf["form"]) not in (None, *counts):
        raise MalformedError("it has different numbers of leaves, names and digests")
    own = names_of(path)
    # Arrays are read by name, and orbax would follow some of them out of the checkpoint.
    if not all(n[: len(own)] == own and all(map(_NAME.fullmatch, n)) for n in names):
        raise MalformedError("a name is not below its path, or is not one that this package gives")
    stored = {
        n: _stored(*entry, location=n, digest=_digest_of(digest), tree=item)
        for n, entry, digest in zip(names, leaf["leaves"], digests, strict=True)
    }
    box, fields, left_out = (leaf.get(name) for name in ("box", "fields", "left_out"))
    if box is None and fields is None and left_out is None:
        return Record(path, stored, leaf["form"])
    if box is None or fields is None or left_out is None or "value" in fields:
        raise MalformedError("its box is not valid")
    if not all(isinstance(name, str) for name in left_out):
        raise MalformedError("the fields that were left out have no names")
    return Record(path, stored, leaf["form"], box, fields, tuple(left_out))


def _digest_of(digest: Any) -> str | None:
    if digest is not None and not _DIGEST.fullmatch(digest):
        raise MalformedError(f"a digest is {digest!r:.40}")
    return digest


def _stored(kind: str, shape: list[int], dtype: str, content: Any, **beside: Any) -> Stored:
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        raise MalformedError(f"a shape is {shape!r:.40}")
    if not isinstance(dtype, str):
        raise MalformedError(f"a dtype is {dtype!r:.40}")
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
    return Stored(kind, tuple(shape), dtype, content, **beside)


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
